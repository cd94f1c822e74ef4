"""One launch: programs in clusters, their tasks, and what can go wrong."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from gemattn.testing.tlx_sim.builder import Options
from gemattn.testing.tlx_sim.builder_products import Builder
from gemattn.testing.tlx_sim.machine import Machine, short
from gemattn.testing.tlx_sim.program import Program
from gemattn.testing.tlx_sim.report import SimulationError
from gemattn.testing.tlx_sim.schedule import Deadlock, Scheduler, Task

if TYPE_CHECKING:
    from gemattn.testing.tlx_sim.simulate import Run


class Launch:
    """A kernel on a grid."""

    def __init__(self, run: Run, function: Any, options: dict[str, Any]):
        """`options` are keyword arguments of the launch: the kernel's, and those of the compiler."""
        self.run_of = run
        self.function = function
        self.options = options
        self.cluster = tuple(options.get("ctas_per_cga") or options.get("cluster_dims") or (1, 1, 1))
        scheduler = Scheduler(run.policy, run.report.statistics)
        self.machine = Machine(
            run.arch,
            scheduler,
            run.report,
            run.descriptors,
            run.addresses,
            run.language.rewriter.files,
            run.explicit_fences,
        )
        self.machine.kernel = function.__name__
        self.machine.warps = options.get("num_warps", 4)

    def run(self, grid: Any, args: tuple[Any, ...]) -> None:
        """Run every program."""
        parameters = inspect.signature(self.function).parameters
        named = {k: v for k, v in self.options.items() if k in parameters}
        bound = inspect.getcallargs(self.function, *args, **named)
        for value in bound.values():
            self.run_of.addresses.add(value)
        grid = grid(bound) if callable(grid) else grid
        self.machine.grid = grid = (*grid, *(1,) * (3 - len(grid)))
        builder = Builder(self.machine)
        builder.options = Options(arch=f"sm{self.run_of.arch}", num_warps=self.machine.warps)
        interpreter.interpreter_builder = builder
        interpreter.interpreter_semantic = TritonSemantic(builder)
        language = self.run_of.language
        language.builder, language.semantic = builder, interpreter.interpreter_semantic
        language.start_tasks = self._start_tasks
        body = language.rewriter(self.function)
        values = {name: self._argument(parameters[name], x) for name, x in bound.items()}
        self._run_grid(lambda: body(**values))

    @staticmethod
    def _argument(parameter: inspect.Parameter, value: Any) -> Any:
        if "constexpr" in str(parameter.annotation):
            return value
        if isinstance(value, TensorDescriptor) and value.padding not in (None, "zero"):
            raise NotImplementedError("the TLX simulator fills with zeros only")
        if isinstance(value, float):  # a launch passes float32, be it too small or too large for it
            with np.errstate(all="ignore"):
                return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return interpreter._implicit_cvt(value)

    def _run_grid(self, body: Callable[[], None]) -> None:
        nx, ny, nz = self.machine.grid
        cx, cy, cz = self.cluster
        places = itertools.product(range(0, nz, cz), range(0, ny, cy), range(0, nx, cx))
        waiting = self.machine.waiting_programs = deque((x, y, z) for z, y, x in places)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            while waiting:
                x, y, z = waiting.popleft()
                members = itertools.product(range(cz), range(cy), range(cx))
                self._run_cluster([(x + dx, y + dy, z + dz) for dz, dy, dx in members], body)
            self.machine.scheduler.drain()

    def _run_cluster(self, places: list[tuple[int, int, int]], body: Callable[[], None]) -> None:
        cluster: list[Program] = []
        for rank, place in enumerate(places):
            cluster.append(Program(place, rank, cluster))
        machine = self.machine
        for program in cluster:
            machine.scheduler.start(self._task(f"{program.name}", program, machine.warps, body, None))
        try:
            machine.scheduler.run()
        except Deadlock as deadlock:
            machine.report.add("deadlock", f"in {machine.kernel}, every task waits:\n    " + _indent(str(deadlock)))
            raise SimulationError(str(machine.report.findings[-1])) from None
        except SimulationError:
            raise  # a finding that is enough
        except Exception as error:
            kind = {"BarrierFault": "barrier", "MemoryFault": "bounds", "IndexError": "bounds"}.get(
                type(error).__name__, "error"
            )
            message = f"{type(error).__name__}: {error} at {self._place(error)}"
            machine.report.add(kind, message)
            raise SimulationError(message) from error

    def _place(self, error: BaseException) -> str:
        """Where the operation that failed was issued, or the innermost line of a kernel in the error's traceback."""
        place = str(getattr(error, "place", "?"))
        if place != "?":
            return place
        frames = error.__traceback__
        while frames is not None:
            if frames.tb_frame.f_code.co_filename in self.machine.files:
                place = f"{short(frames.tb_frame.f_code.co_filename)}:{frames.tb_lineno}"
            frames = frames.tb_next
        return place

    def _task(
        self, name: str, program: Program, warps: int, body: Callable[[], None], parent: Task | None, replica: int = 0
    ) -> Task:
        language, machine = self.run_of.language, self.machine
        lane = machine.new_lane()
        clock = {lane: 1} | (dict(parent.clock) if parent else {})
        seen = dict(parent.seen_by_async) if parent else {}
        run = language.as_replica(body, replica)

        def run_and_check() -> None:
            run()
            engine = machine.task.engines.get("bulk store")
            if engine is not None and engine.known < engine.issued:
                task = machine.task
                text = (
                    f"{task.name} ends, its last operation at {task.place}, before its stores have left shared memory"
                )
                machine.report.add("race", text, (task.place,))

        return Task(name, program, lane, warps, run_and_check, clock, seen, replica)

    def _start_tasks(self, tasks: list[tuple[Callable[[], None], Any, int, int]]) -> None:
        """Start the tasks of `async_tasks` in the running program, and wait for their end."""
        machine = self.machine
        language = self.run_of.language
        assert language.builder is not None
        language.builder.meet()  # the barriers of every program of the cluster are ready
        parent = machine.task
        machine.release()
        children = []
        for body, task, line, replica in tasks:
            kind = "default task" if task.is_default else f"task at line {line}"
            name = kind + (f", replica {replica}" if task.replicate > 1 else "")
            if len(parent.program.cluster) > 1 or parent.program.place != (0, 0, 0):
                name += f", {parent.program.name}"
            warps = machine.warps if task.num_warps is None else task.num_warps
            children.append(self._task(name, parent.program, warps, body, parent, replica))
        for child in children:
            machine.scheduler.start(child)
        machine.scheduler.wait(
            lambda: all(c.finished for c in children), lambda: f"its {sum(not c.finished for c in children)} tasks"
        )
        for child in children:
            machine.acquire(child.clock, child.seen_by_async)
        language.builder.meet()


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")
