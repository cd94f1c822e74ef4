"""Happens-before: vector clocks, and the accesses of a piece of memory that they must order.

A lane is a sequence of events: the steps of a task, the operations of one of its in-order engines, or the copies that
signal one barrier. A clock maps lanes to how many of their events came before. An access is known by its lane and its
place there; it came before whatever clock has reached that place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Clock = dict[int, int]


def join(into: Clock, other: Clock) -> None:
    """Make `into` know what `other` knows."""
    for lane, time in other.items():
        if into.get(lane, 0) < time:
            into[lane] = time


class Place(NamedTuple):
    """A line of the kernel's source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Place("?", 0)


@dataclass
class Actor:
    """Who touches memory: a task at one of its steps, or an asynchronous operation.

    `clock` is what came before; `seen_by_async` is the part of it whose ordinary stores a fence has made visible to the
    copy and matrix engines.
    """

    what: str
    place: Place
    lane: int
    time: int
    clock: Clock
    seen_by_async: Clock
    is_async: bool = False
    needs_fence: bool = True
    """Whether the compiler leaves it to the kernel to fence ordinary stores before this operation reads them."""
    rendezvous: int = -1
    """How many times all warps of the task have met; -1 where warps need not meet."""


class Region(NamedTuple):
    """Bytes of a storage that a view covers."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@functools.cache
def _granules(region: Region) -> np.ndarray:
    """Numbers of the two-byte granules that it covers."""
    places = np.array([region.offset])
    for size, stride in zip(region.shape, region.strides, strict=True):
        places = (places[:, None] + np.arange(size) * stride).ravel()
    halves = (places[:, None] + np.arange(0, region.itemsize, 2)).ravel()
    return np.unique(halves // 2)


@functools.cache
def _overlap(old: Region, new: Region) -> tuple[bool, bool]:
    """(Whether they share a byte, whether `new` covers `old`.)"""
    if old == new:
        return True, True
    shared = np.intersect1d(_granules(old), _granules(new), assume_unique=True).size
    return shared > 0, shared == _granules(old).size


@dataclass
class Access:
    """One access of one region."""

    actor: Actor
    write: bool
    label: str
    geometry: tuple[object, ...]


Found = Callable[[str, Access, Access], None]


@dataclass
class Shadow:
    """The accesses of one storage that later ones must be ordered with."""

    accesses: dict[Region, list[Access]] = field(default_factory=dict)

    def _touching(self, new: Region) -> Iterator[tuple[list[Access], bool]]:
        for old, accesses in self.accesses.items():
            touches, covers = _overlap(old, new)
            if touches:
                yield accesses, covers

    def add(self, region: Region, access: Access, found: Found) -> None:
        """Compare with the accesses before, calling `found(kind, before, access)`, and remember."""
        actor = access.actor
        for accesses, covered in self._touching(region):
            for old in accesses:
                before = old.actor
                if before is actor or not (old.write or access.write):
                    continue
                if actor.clock.get(before.lane, 0) < before.time:
                    found("race", old, access)
                elif old.write and not before.is_async and actor.is_async and not access.write:
                    if actor.needs_fence and actor.seen_by_async.get(before.lane, 0) < before.time:
                        found("missing fence", old, access)
                elif (
                    access.write
                    and before.lane == actor.lane
                    and before.rendezvous == actor.rendezvous >= 0
                    and not old.write
                    and old.geometry != access.geometry
                ):
                    found("race between warps", old, access)
            if covered:
                # What an ordered write covers is ordered with all that comes after that write; likewise for reads.
                accesses[:] = [x for x in accesses if not (access.write or not x.write) or not self._known(x, actor)]
        self.accesses.setdefault(region, []).append(access)

    @staticmethod
    def _known(old: Access, actor: Actor) -> bool:
        return actor.clock.get(old.actor.lane, 0) >= old.actor.time
