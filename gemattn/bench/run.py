"""A run of `python -m gemattn.bench attention`: shapes one after another, providers in turn within each.

Every provider runs once in each round, and each round starts with another one: a card under a power cap serves whoever
runs first 5 to 15% faster, and this spreads that evenly.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemattn.bench import report
from gemattn.bench import results as files
from gemattn.bench.client import Worker, WorkerError, WorkerLost
from gemattn.bench.floor import Ceilings
from gemattn.bench.machine import ClockReading
from gemattn.bench.shapes import Shape

_FEWEST_ROUNDS = 3


@dataclass
class Run:
    """Measures shapes with the providers of some workers and keeps results.json up to date.

    Args:
        workers: one a process.
        path: of results.json.
        rounds: how often each provider runs on a shape, after a round that does not count.
        budget_s: rounds are cut, and shapes that would begin later left out, so that the run ends about then.
        busy: whether the device-kernel time is taken too, by the profiler.
        meaningless: marks the figures of a smoke run.
        command: for the record.
        say: prints a line.
    """

    workers: list[Worker]
    path: Path
    rounds: int = 10
    budget_s: float | None = None
    busy: bool = True
    meaningless: bool = False
    command: Sequence[str] = ()
    say: Callable[[str], None] = print
    results: files.Results = field(init=False)
    _owner: dict[str, Worker] = field(init=False, default_factory=dict)
    _begin: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.results = {
            "schema": 1,
            "kind": "attention",
            "meaningless": self.meaningless,
            "finished": False,
            "command": list(self.command),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "machine": {},
            "clocks": {},
            "providers": {},
            "ceilings": None,
            "shapes": [],
        }

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    def begin(self) -> list[str]:
        """Ask everyone who is there and measure the ceilings. Names of the providers that are present."""
        self.results["clocks"] = ClockReading().result()
        for worker in self.workers:
            worker.send("describe")
        for worker in self.workers:
            try:
                answer = worker.receive()
            except (WorkerError, WorkerLost) as error:
                for spec in worker.specs:
                    self.results["providers"][spec.name] = {"kind": "rival", "absent": str(error), "version": None}
                continue
            self.results["machine"] = self.results["machine"] or answer["machine"]
            self.results["providers"] |= answer["providers"]
            self._owner |= {name: worker for name, about in answer["providers"].items() if not about["absent"]}
        for name, about in self.results["providers"].items():
            self.say(f"{name}: {'absent, ' + about['absent'] if about['absent'] else about['version']}")
        if self._owner:
            worker = next(iter(self._owner.values()))
            worker.send("ceilings")
            self.results["ceilings"] = worker.receive()
            self.say(
                f"floor: copy {self.results['ceilings']['copy_tb_s']:.3g} TB/s, matrix product "
                f"{self.results['ceilings']['matrix_tflop_s']:.3g} TFLOP/s, both measured hot"
            )
        self._write()
        return list(self._owner)

    def measure(self, shapes: Sequence[Shape]) -> files.Results:
        """Measure the shapes, writing after each; the file is marked finished at the end."""
        names = list(self._owner)
        self.say(report.header(names))
        for place, shape in enumerate(shapes):
            left = len(shapes) - place
            row: dict[str, Any] = {"name": shape.name, "suite": shape.suite}
            if self.budget_s is not None and self.elapsed >= self.budget_s:
                row["skipped"] = f"the budget of {self.budget_s:.0f} s was spent"
            else:
                slice_s = None if self.budget_s is None else (self.budget_s - self.elapsed) / left
                row |= self._measure_one(shape, names, slice_s)
            self.results["shapes"].append(row)
            self._write()
            self.say(f"[{place + 1:2}/{len(shapes)} {self.elapsed:4.0f} s] {report.row(row, names)}")
        self.results["finished"] = not any("skipped" in row for row in self.results["shapes"])
        self._write()
        return self.results

    def _measure_one(self, shape: Shape, names: list[str], slice_s: float | None) -> dict[str, Any]:
        begin = time.monotonic()
        figures = self._prepare(shape, names)
        ready = [name for name in names if "reason" not in figures[name]]
        samples: dict[str, dict[str, list[float]]] = {
            name: {"forward": [], "backward": [], "setup": []} for name in ready
        }
        clocks: dict[str, Any] = {}
        done = 0
        for number in range(self.rounds + 1):
            reading = ClockReading() if number == 0 and not self.meaningless else None  # this round does not count
            for name in in_turn(ready, number):
                answer = self._ask(name, "time", figures)
                if answer is not None and number > 0:
                    for key, values in answer.items():
                        samples[name][key] += values
            if reading is not None:
                clocks = reading.result()
            ready = [name for name in ready if "reason" not in figures[name]]
            done = number
            if not ready or (slice_s and done >= _FEWEST_ROUNDS and time.monotonic() - begin > slice_s):
                break
        busy = {name: self._ask(name, "busy", figures) for name in ready} if self.busy else {}
        for worker in self.workers:
            self._ask_worker(worker, "release")
        ceilings = Ceilings(**self.results["ceilings"])
        floor = {"forward": ceilings.forward_ms(shape.work), "backward": ceilings.backward_ms(shape.work)}
        flops = {"forward": shape.work.forward_flops, "backward": shape.work.backward_flops}
        for name in ready:
            if "reason" in figures[name]:
                continue
            for direction in files.DIRECTIONS:
                summary = files.times(samples[name][direction], flops[direction], floor[direction])
                figures[name][direction] = summary | {"busy": (busy.get(name) or {}).get(direction)}
            setup = samples[name]["setup"]
            figures[name]["setup"] = files.times(setup) if setup else None
        return {
            "sequences": shape.sequences,
            "heads": shape.heads,
            "kv_heads": shape.groups,
            "head_dim": shape.head_dim,
            "longest": shape.longest,
            "work": asdict(shape.work),
            "floor": floor,
            "rounds": done,
            "seconds": time.monotonic() - begin,
            "clocks": clocks,
            "providers": figures,
        }

    def _prepare(self, shape: Shape, names: list[str]) -> dict[str, dict[str, Any]]:
        """All workers at once: compilers are slow and nothing is timed yet. A lost one starts without its culprit."""
        figures: dict[str, dict[str, Any]] = {}
        pending = [
            worker for worker in self.workers if any(self._owner.get(spec.name) is worker for spec in worker.specs)
        ]
        while pending:
            asked: dict[int, list[str]] = {}
            for worker in pending:
                mine = [spec.name for spec in worker.specs if spec.name in names and spec.name not in figures]
                asked[id(worker)] = mine
                worker.send("prepare", shape=shape.name, names=mine)
            again = []
            for worker in pending:
                mine = asked[id(worker)]
                try:
                    figures |= worker.receive()
                except WorkerError as error:  # the shape itself: no memory for its inputs, say
                    figures |= {name: {"reason": str(error)} for name in mine}
                except WorkerLost as error:
                    culprits = [error.culprit] if error.culprit in mine else mine
                    figures |= {name: {"reason": str(error)} for name in culprits}
                    worker.restart()
                    if len(culprits) < len(mine):
                        again.append(worker)
            pending = again
        return {name: figures[name] for name in names}

    def _ask(self, name: str, do: str, figures: dict[str, dict[str, Any]]) -> Any:
        """A provider's answer, or None and its reason noted. What else its process held is lost with it."""
        if "reason" in figures[name]:
            return None
        worker = self._owner[name]
        worker.send(do, name=name)
        try:
            return worker.receive()
        except WorkerError as error:
            figures[name] = {"reason": f"{do}: {error}"}
        except WorkerLost as error:
            worker.restart()
            for spec in worker.specs:
                if "reason" not in figures.get(spec.name, {"reason": ""}):
                    figures[spec.name] = {"reason": f"{error} ({error.culprit or name} was running)"}
        return None

    def _ask_worker(self, worker: Worker, do: str) -> None:
        worker.send(do)
        try:
            worker.receive()
        except WorkerError:
            pass
        except WorkerLost:
            worker.restart()

    def _write(self) -> None:
        self.results["seconds"] = self.elapsed
        files.write(self.results, self.path)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each starts one further on."""
    if not names:
        return []
    first = number % len(names)
    return [*names[first:], *names[:first]]
