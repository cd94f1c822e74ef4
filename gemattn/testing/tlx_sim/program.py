"""One program of the grid, and engines as its tasks see them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gemattn.testing.tlx_sim.barriers import Barrier, NamedBarrier
from gemattn.testing.tlx_sim.clocks import Clock
from gemattn.testing.tlx_sim.memory import Buffers, Memory
from gemattn.testing.tlx_sim.schedule import Operation


@dataclass
class Program:
    """One program of the grid (a CTA), with the others of its cluster."""

    place: tuple[int, int, int]
    rank: int
    cluster: list[Program]
    memory: Memory = field(default_factory=Memory)
    allocations: list[Buffers | list[Barrier]] = field(default_factory=list)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    descriptors: set[int] = field(default_factory=set)
    """The numbers of those in global memory that its copy engine surely sees as they are."""
    meetings: int = 0
    """How many times it has come to a meeting of the cluster."""
    known_at: dict[int, list[tuple[Clock, Clock]]] = field(default_factory=dict)
    """Of the first program of a cluster: what those who came to each meeting knew."""

    @property
    def name(self) -> str:
        """For reports."""
        return f"program {self.place[0] if not any(self.place[1:]) else self.place}"


@dataclass
class Engine:
    """An engine as one task sees it: a queue in order, and how many operations were issued."""

    lane: int
    queue: deque[Operation] = field(default_factory=deque)
    issued: int = 0
    executed: int = 0
    known: int = 0
    """How many the task knows to be complete."""
    groups: list[int] = field(default_factory=list)
    """How many operations were issued when each group was committed."""
    on_the_way: set[int] = field(default_factory=set)
    """Numbers of stores that have not reached global memory."""
