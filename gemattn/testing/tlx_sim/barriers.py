"""mbarriers and named barriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemattn.testing.tlx_sim.clocks import Clock, join


class BarrierFault(Exception):
    """An arrival too many, bytes that do not add up."""


@dataclass
class Barrier:
    """One mbarrier: a phase ends when `count` arrivals and all expected bytes have come."""

    name: str
    count: int
    lane: int
    """Of the copies that signal it."""
    copies: int = 0
    """How many of them were issued."""
    pending: int = field(init=False)
    bytes: int = 0
    """Expected and not yet come."""
    phases: int = 0
    """How many have ended."""
    reached: Clock = field(default_factory=dict)
    reached_async: Clock = field(default_factory=dict)
    _coming: Clock = field(default_factory=dict)
    _coming_async: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int, clock: Clock, seen_by_async: Clock, expected: int = 0) -> None:
        """`count` arrivals, which may announce bytes."""
        if count > self.pending:
            waits = f"waits for {self.pending} of {self.count} in phase {self.phases}"
            raise BarrierFault(f"{count} arrivals at {self.name}, which {waits}")
        self.bytes += expected
        self.pending -= count
        self._learn(clock, seen_by_async)

    def complete(self, count: int, clock: Clock, seen_by_async: Clock) -> None:
        """`count` bytes have come."""
        self.bytes -= count
        self._learn(clock, seen_by_async)

    def _learn(self, clock: Clock, seen_by_async: Clock) -> None:
        join(self._coming, clock)
        join(self._coming_async, seen_by_async)
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count
            join(self.reached, self._coming)
            join(self.reached_async, self._coming_async)
            self._coming, self._coming_async = {}, {}

    def ended(self, parity: int) -> bool:
        """Whether the phase of this parity has ended: the current one has the other parity."""
        return self.phases & 1 != parity & 1

    def describe(self, parity: int) -> str:
        """What a waiter waits for."""
        text = f"phase {parity & 1} of {self.name} (phase {self.phases & 1} runs, the {self.phases + 1}th: "
        text += f"{self.count - self.pending} of {self.count} arrivals"
        return text + (f", {self.bytes} bytes outstanding)" if self.bytes else ")")


@dataclass
class NamedBarrier:
    """`bar.sync` and `bar.arrive` of one number: released when `threads` threads have come."""

    number: int
    threads: int = 0
    come: int = 0
    rounds: int = 0
    waiting: list[Callable[[Clock, Clock], None]] = field(default_factory=list)
    _coming: Clock = field(default_factory=dict)
    _coming_async: Clock = field(default_factory=dict)

    def come_in(
        self,
        threads: int,
        of: int,
        clock: Clock,
        seen_by_async: Clock,
        released: Callable[[Clock, Clock], None] | None,
    ) -> None:
        """`threads` threads come, `of` are waited for; `released` is called with what all of them knew."""
        if self.come and of != self.threads:
            raise BarrierFault(f"named barrier {self.number} is used for {of} threads while {self.threads} gather")
        if self.come + threads > of:
            raise BarrierFault(f"named barrier {self.number}: {self.come} + {threads} threads come, {of} are expected")
        self.threads = of
        self.come += threads
        join(self._coming, clock)
        join(self._coming_async, seen_by_async)
        if released is not None:
            self.waiting.append(released)
        if self.come == of:
            for wake in self.waiting:
                wake(self._coming, self._coming_async)
            self.come, self.rounds, self.waiting = 0, self.rounds + 1, []
            self._coming, self._coming_async = {}, {}
