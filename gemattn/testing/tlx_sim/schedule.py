"""Cooperative scheduling: one task runs at a time, and a seeded policy chooses who is next, a task or an engine.

Tasks are threads that hand a baton on at every TLX operation. Engines (copies, matrix products) are queues of
operations that run, whole, when the policy chooses them; within a queue they keep their order.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemattn.testing.tlx_sim.clocks import NOWHERE, Clock, Place

TO_MEMORY = "global write"
"""The part of a store after its read of shared memory."""
POLICIES = ("random", "late", "early", "starve", "priority", "adversarial")


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Aborted(BaseException):
    """Unwinds a task of a launch that has failed."""


class Deadlock(Exception):
    """Every live task waits and no engine has work."""


@dataclass
class Operation:
    """Work of an engine, issued by a task."""

    what: str
    run: Callable[[], None]
    done: bool = False


@dataclass
class Task:
    """A task of a program: the kernel's own flow, or one replica of an `async_task`."""

    name: str
    program: Any
    lane: int
    warps: int
    body: Callable[[], None]
    clock: Clock
    seen_by_async: Clock
    replica: int = 0
    rendezvous: int = 0
    ready: Callable[[], bool] | None = None
    """Set while it waits."""
    waits_for: Callable[[], str] = lambda: ""
    place: Place = NOWHERE
    finished: bool = False
    engines: dict[str, Any] = field(default_factory=dict)
    baton: threading.Lock = field(default_factory=_held_lock)
    """Released to let it go on."""
    thread: threading.Thread | None = None

    def step(self) -> int:
        """Its own time, which goes on whenever others learn of it."""
        return self.clock[self.lane]


class Policy:
    """Chooses among runnable tasks and engines that have work."""

    def __init__(self, name: str, seed: int):
        """Of `POLICIES`; "adversarial" takes one of the others, by the seed."""
        if name not in POLICIES:
            raise ValueError(f"policy is {name!r}, wanted one of {', '.join(map(repr, POLICIES))}")
        self.name = POLICIES[:-1][seed % (len(POLICIES) - 1)] if name == "adversarial" else name
        self.random = random.Random(f"{name} {seed}")
        self.priority: dict[str, float] = {}
        self.stores_linger = seed % 2 == 1
        """Whether stores reach memory only when nothing else can go on."""

    def choose(self, tasks: list[Task], engines: list[deque[Operation]]) -> Task | deque[Operation]:
        """One of them; at least one is given."""
        if self.stores_linger:
            others = [queue for queue in engines if queue[0].what != TO_MEMORY]
            engines = others if tasks or others else engines
        if self.name == "late" and tasks:
            engines = []
        if self.name == "early" and engines:
            tasks = []
        if self.name in ("starve", "priority") and tasks and not (engines and self.random.random() < 0.3):
            ranked = sorted(tasks, key=lambda t: self._rank(t.name))
            if self.name == "priority" and self.random.random() < 0.02:
                self.priority[ranked[0].name] = self.random.random() + 1
            return ranked[0]
        place = self.random.randrange(len(tasks) + len(engines))
        return tasks[place] if place < len(tasks) else engines[place - len(tasks)]

    def _rank(self, name: str) -> float:
        """Smaller runs first. One task in a few is starved: it runs when nothing else can."""
        if name not in self.priority:
            value = self.random.random()
            self.priority[name] = value if self.name == "priority" else float(value < 0.3)
        return self.priority[name] + (self.random.random() * 0.5 if self.name == "starve" else 0)


class Scheduler:
    """Runs the tasks of the programs that are on the chip together, and the engines."""

    def __init__(self, policy: Policy, statistics: Counter[str]):
        """Nothing runs before `run`."""
        self.policy = policy
        self.statistics = statistics
        self.tasks: list[Task] = []
        self.queues: list[deque[Operation]] = []
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self._home = _held_lock()

    # Called by whoever sets up a launch.

    def start(self, task: Task) -> None:
        """Let a task take part."""
        task.thread = threading.Thread(target=self._live, args=(task,), daemon=True)
        self.tasks.append(task)
        task.thread.start()

    def run(self) -> None:
        """Run until every task has ended; raise what one of them raised, or `Deadlock`."""
        first = self._choose()
        assert first is not None
        self._resume(first)
        self._home.acquire()
        while unfinished := [t for t in self.tasks if not t.finished]:  # after a failure: unwind the others
            unfinished[0].baton.release()
            self._home.acquire()
        for task in self.tasks:
            assert task.thread is not None
            task.thread.join()
        self.tasks.clear()
        self.current = None
        if self.failure is not None:
            raise self.failure

    def drain(self) -> None:
        """Let the engines finish."""
        while self.queues:
            self._operate(self.policy.random.choice(self.queues))

    # Called by the running task.

    def enqueue(self, queue: deque[Operation], operation: Operation) -> None:
        """Give an engine work."""
        queue.append(operation)
        if len(queue) == 1:
            self.queues.append(queue)

    def pause(self) -> None:
        """Let others run, perhaps."""
        me = self.current
        chosen = self._choose()
        if chosen is not me:
            assert me is not None and chosen is not None
            self._resume(chosen)
            me.baton.acquire()
            if self.failure is not None:
                raise Aborted

    def wait(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Go on once `ready()` holds."""
        task = self.current
        assert task is not None
        task.ready, task.waits_for = ready, waits_for
        self.pause()
        task.ready = None

    def _live(self, task: Task) -> None:
        task.baton.acquire()
        chosen = None
        try:
            if self.failure is None:
                task.body()
            task.finished = True
            if self.failure is None:
                chosen = self._choose()
        except Aborted:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        task.finished = True
        if chosen is None:
            self._home.release()
        else:
            self._resume(chosen)

    def _resume(self, task: Task) -> None:
        self.statistics["switches"] += 1
        self.current = task
        task.baton.release()

    def _choose(self) -> Task | None:
        """The task that goes on, after letting engines work; None when all have ended."""
        while True:
            live = [t for t in self.tasks if not t.finished]
            if not live:
                return None
            runnable = [t for t in live if t.ready is None or t.ready()]
            if not runnable and not self.queues:
                raise Deadlock("\n".join(f"{t.name} waits for {t.waits_for()} at {t.place}" for t in live))
            chosen = self.policy.choose(runnable, self.queues)
            self.statistics["choices"] += 1
            if isinstance(chosen, Task):
                return chosen
            self._operate(chosen)

    def _operate(self, queue: deque[Operation]) -> None:
        operation = queue.popleft()
        if not queue:
            self.queues = [q for q in self.queues if q is not queue]
        operation.run()
        operation.done = True
        self.statistics[operation.what] += 1
