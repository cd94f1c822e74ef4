"""The simulated chip: programs with their memory and barriers, and the rules by which operations touch them."""

from __future__ import annotations

import functools
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from gemattn.testing.tlx_sim.addresses import Addresses
from gemattn.testing.tlx_sim.barriers import Barrier
from gemattn.testing.tlx_sim.clocks import NOWHERE, Access, Actor, Clock, Place, join
from gemattn.testing.tlx_sim.descriptors import DescriptorTable
from gemattn.testing.tlx_sim.memory import SHARED_BYTES, TENSOR_COLUMNS, View
from gemattn.testing.tlx_sim.program import Engine, Program
from gemattn.testing.tlx_sim.report import Report
from gemattn.testing.tlx_sim.schedule import Operation, Scheduler, Task


@functools.cache
def short(file: str) -> str:
    """A file as reports name it: from the package on where it is installed, else from the current folder."""
    _, installed, inside = file.rpartition("site-packages/")
    return inside if installed else os.path.relpath(file)


class Machine:
    """State of one launch, and what all operations share."""

    def __init__(
        self,
        arch: int,
        scheduler: Scheduler,
        report: Report,
        descriptors: DescriptorTable,
        addresses: Addresses,
        files: set[str],
        explicit_fences: bool,
    ):
        """`files` are those with kernel source, for line numbers; `explicit_fences` as in `simulate`."""
        self.arch = arch
        self.explicit_fences = explicit_fences
        self.scheduler = scheduler
        self.report = report
        self.descriptors = descriptors
        self.addresses = addresses
        self.files = files
        self.kernel = "?"
        self.grid = (1, 1, 1)
        self.warps = 4
        self.waiting_programs: deque[Any] = deque()
        self._lanes = 0

    # Who and where.

    @property
    def task(self) -> Task:
        """The running task."""
        task = self.scheduler.current
        assert task is not None
        return task

    @property
    def program(self) -> Program:
        """Its program."""
        program = self.task.program
        assert isinstance(program, Program)
        return program

    def new_lane(self) -> int:
        """A lane of its own."""
        self._lanes += 1
        return self._lanes

    def here(self) -> Place:
        """The innermost line of a kernel that is being run."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                place = Place(short(frame.f_code.co_filename), frame.f_lineno)
                self.report.reached.add(place)
                return place
            frame = frame.f_back  # type: ignore[assignment]
        return NOWHERE

    def step(self) -> Task:
        """Begin an operation of the running task: others may go first."""
        task = self.task
        task.place = self.here()
        self.scheduler.pause()
        return task

    # Memory.

    def actor(self, what: str, warps_meet: bool = False) -> Actor:
        """The running task at this step."""
        task = self.task
        rendezvous = task.rendezvous if warps_meet and task.warps > 4 else -1
        return Actor(
            f"{what} by {task.name}",
            self.here(),
            task.lane,
            task.step(),
            task.clock,
            task.seen_by_async,
            rendezvous=rendezvous,
        )

    def touch(self, view: View, actor: Actor, write: bool) -> None:
        """Record an access and report what it conflicts with."""
        geometry = (view.shape, view.dtype.itemsize)
        view.storage.shadow.add(view.region(), Access(actor, write, view.label, geometry), self._found)

    def _found(self, kind: str, before: Access, now: Access) -> None:
        def text(x: Access) -> str:
            return f"{'write' if x.write else 'read'} of {x.label} ({x.actor.what}) at {x.actor.place}"

        advice = {
            "race": "are not ordered",
            "race between warps": "of one task: its warps do not meet between them, and the layouts differ",
            "missing fence": 'have no fence("async_shared") between them',
        }[kind]
        sites = (before.actor.place, now.actor.place, before.label.split("[")[0], now.label.split("[")[0])
        self.report.add(kind, f"{text(before)} and {text(now)} {advice}", sites)

    def check_written(self, view: View, what: str, place: Place) -> None:
        """Report a read of memory that nothing wrote."""
        if not view.initialised():
            self.report.add(
                "uninitialised read", f"{what} at {place} reads {view.label}, not all of which was written", (place,)
            )

    def check_capacity(self) -> None:
        """Report more memory than a program has."""
        memory = self.program.memory
        if memory.shared_bytes() > SHARED_BYTES:
            self.report.add(
                "capacity", f"{self.kernel} takes {memory.shared_bytes()} bytes of shared memory of {SHARED_BYTES}"
            )
        if memory.tensor_columns() > TENSOR_COLUMNS:
            self.report.add(
                "capacity",
                f"{self.kernel} takes {memory.tensor_columns()} columns of tensor memory of {TENSOR_COLUMNS}",
            )

    # Synchronisation.

    def release(self) -> tuple[Clock, Clock]:
        """What the running task knows, for others to learn; its later steps are news again."""
        task = self.task
        known = dict(task.clock), dict(task.seen_by_async)
        task.clock[task.lane] += 1
        return known

    def acquire(self, clock: Clock, seen_by_async: Clock) -> None:
        """The running task learns."""
        join(self.task.clock, clock)
        join(self.task.seen_by_async, seen_by_async)

    def fence(self) -> None:
        """Ordinary stores that the running task knows of become visible to engines."""
        clock, _ = self.release()
        join(self.task.seen_by_async, clock)

    # Engines.

    def engine(self, name: str) -> Engine:
        """The running task's view of an in-order engine."""
        engines = self.task.engines
        if name not in engines:
            engines[name] = Engine(self.new_lane())
        return engines[name]

    def issue(
        self,
        what: str,
        engine: Engine,
        reads: list[View],
        writes: list[View],
        run: Callable[[], None],
        fenced: bool = True,
    ) -> tuple[Operation, Actor]:
        """Queue an operation of an in-order engine; `fenced` where the compiler fences its operands."""
        task = self.task
        clock, seen_by_async = self.release()
        clock[engine.lane] = engine.issued
        engine.issued += 1
        actor = Actor(
            f"{what} issued by {task.name}",
            self.here(),
            engine.lane,
            engine.issued,
            clock,
            seen_by_async,
            is_async=True,
            needs_fence=not fenced,
        )
        return self._enqueue(actor, engine.queue, what, reads, writes, run, engine), actor

    def copy(
        self, what: str, barrier: Barrier, reads: list[View], writes: list[View], run: Callable[[], None], size: int
    ) -> None:
        """Queue a copy that signals `size` bytes to a barrier, in no order with others."""
        task = self.task
        barrier.copies += 1
        clock, seen_by_async = self.release()
        actor = Actor(
            f"{what} issued by {task.name}",
            self.here(),
            barrier.lane,
            barrier.copies,
            clock,
            seen_by_async,
            is_async=True,
        )

        def copy_and_signal() -> None:
            run()
            barrier.complete(size, self.after(actor), actor.seen_by_async)

        self._enqueue(actor, deque(), what, reads, writes, copy_and_signal, None)

    @staticmethod
    def after(actor: Actor) -> Clock:
        """What is known once an operation is complete."""
        clock = dict(actor.clock)
        clock[actor.lane] = max(actor.time, clock.get(actor.lane, 0))
        return clock

    def _enqueue(
        self,
        actor: Actor,
        queue: deque[Operation],
        what: str,
        reads: list[View],
        writes: list[View],
        run: Callable[[], None],
        engine: Engine | None,
    ) -> Operation:
        for view in reads:
            self.touch(view, actor, False)
        for view in writes:
            self.touch(view, actor, True)

        def execute() -> None:
            for view in reads:
                self.check_written(view, actor.what, actor.place)
            try:
                run()
            except Exception as error:
                error.place = actor.place  # type: ignore[attr-defined]  # whichever task's thread this is
                raise
            if engine is not None:
                engine.executed += 1

        operation = Operation(what, execute)
        self.scheduler.enqueue(queue, operation)
        return operation

    def settle(self, engine: Engine, outstanding: int, what: str) -> None:
        """Wait until at most `outstanding` operations of an engine are not complete, and know of the others."""
        wanted = max(engine.issued - outstanding, engine.known)
        self.scheduler.wait(
            lambda: engine.executed >= wanted, lambda: f"{what}: {engine.executed} of {wanted} complete"
        )
        engine.known = wanted
        self.task.clock[engine.lane] = wanted
