"""The process that runs providers: takes requests as lines of JSON on stdin, answers on what was stdout.

A provider that crashes, hangs or brings down the CUDA context takes this process with it and nothing else.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from gemattn.bench import check, machine, shapes
from gemattn.bench.case import Case, make_case
from gemattn.bench.providers import Spec, make
from gemattn.bench.providers.base import Prepared, Provider
from gemattn.bench.timing import make_clock, measure_ceilings


class BrokenContext(Exception):
    """CUDA answers every call with the error of an earlier one: only a new process helps."""


@dataclass
class _Ready:
    prepared: Prepared
    forward_repeats: int
    backward_repeats: int


class Session:
    """Holds the inputs of one shape and the providers that are ready for it. Everything it returns is JSON."""

    def __init__(self, specs: list[Spec], device: torch.device) -> None:
        self.device = device
        self.providers: dict[str, Provider] = {spec.name: make(spec) for spec in specs}
        self.clock = make_clock(device)
        self.case: Case | None = None
        self.ready: dict[str, _Ready] = {}
        self.announce: Callable[[str], None] = lambda name: None

    def describe(self) -> dict[str, Any]:
        """The machine, and every provider's kind and version or the reason of its absence."""
        providers = {}
        for name, provider in self.providers.items():
            self.announce(name)
            reason = _guarded(lambda p=provider: p.absent(self.device))  # type: ignore[misc]
            providers[name] = {
                "kind": provider.kind,
                "absent": reason,
                "version": None if reason else provider.version(),
            }
        return {"machine": machine.describe(self.device), "providers": providers}

    def ceilings(self) -> dict[str, Any]:
        """Copy and matrix rate of the hot card."""
        result = asdict(measure_ceilings(self.device))
        self._free()
        return result

    def prepare(self, shape: str, names: list[str]) -> dict[str, Any]:
        """Make providers ready for a shape: first run, check against the oracle, memory. A reason each, or figures."""
        self.release()
        self.case = make_case(shapes.by_name(shape), self.device, torch.bfloat16)
        gate = check.Gate(self.case)
        answers = {}
        for name in names:
            self.announce(name)
            try:
                answers[name] = self._prepare_one(name, self.case, gate)
            except check.WrongResult as error:
                answers[name] = {"reason": f"wrong result: {error}"}
            except torch.cuda.OutOfMemoryError:
                answers[name] = {"reason": "out of device memory"}
            except Exception as error:
                self._context_or_raise(name, error)
                answers[name] = {"reason": f"{type(error).__name__}: {_first_line(error)}"}
                traceback.print_exc()
            self._free()
        return answers

    def _prepare_one(self, name: str, case: Case, gate: check.Gate) -> dict[str, Any]:
        provider = self.providers[name]
        if reason := provider.refuses(case):
            return {"reason": reason}
        prepared = provider.prepare(case)
        self.clock.synchronize()
        begin = time.perf_counter()
        out = prepared.call(*case.leaves)
        self.clock.synchronize()
        middle = time.perf_counter()
        torch.autograd.grad(out, case.leaves, case.dout)
        self.clock.synchronize()
        end = time.perf_counter()
        del out
        errors = gate.check(prepared.call)
        warm: list[list[float]] = []
        peak = self.clock.peak_bytes(lambda: warm.extend(self._sample(prepared, 1, 1)))
        forward, backward = warm
        self.ready[name] = _Ready(prepared, repeats(forward[0]), repeats(backward[0]))
        return {
            "errors": errors,
            "peak_bytes": peak,
            "first_forward_s": middle - begin,
            "first_backward_s": end - middle,
        }

    def time(self, name: str) -> dict[str, list[float]]:
        """One round of a provider: milliseconds of some forward runs, some backward runs and one set-up."""
        ready = self.ready[name]
        self.announce(name)
        forward, backward = self._sample(ready.prepared, ready.forward_repeats, ready.backward_repeats)
        setup = [] if ready.prepared.setup is None else self.clock.samples(ready.prepared.setup, 1)
        return {"forward": forward, "backward": backward, "setup": setup}

    def busy(self, name: str) -> dict[str, float | None]:
        """Device-kernel milliseconds of one forward and one backward run."""
        assert self.case is not None
        self.announce(name)
        call, leaves = self.ready[name].prepared.call, self.case.leaves
        forward = self.clock.busy_ms(lambda: call(*leaves))
        out = call(*leaves)
        return {"forward": forward, "backward": self.clock.busy_ms(lambda: self._grad(out))}

    def release(self) -> None:
        """Let go of the shape."""
        self.case = None
        self.ready.clear()
        self._free()

    def _sample(self, prepared: Prepared, forward: int, backward: int) -> tuple[list[float], list[float]]:
        assert self.case is not None
        leaves = self.case.leaves
        last: list[Tensor] = []

        def run_forward() -> None:
            last.clear()  # one graph at a time in memory
            last.append(prepared.call(*leaves))

        times = self.clock.samples(run_forward, forward)
        return times, self.clock.samples(lambda: self._grad(last[0]), backward)

    def _grad(self, out: Tensor) -> tuple[Tensor, ...]:
        assert self.case is not None
        return torch.autograd.grad(out, self.case.leaves, self.case.dout, retain_graph=True)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _context_or_raise(self, name: str, error: Exception) -> None:
        try:
            self.clock.synchronize()
        except Exception:
            raise BrokenContext(f"{name} broke the CUDA context: {_first_line(error)}") from error


def repeats(ms: float) -> int:
    """Runs a round and direction: about 8 ms of them, so that short kernels get more samples."""
    return min(8, max(1, round(8 / max(ms, 1e-3))))


def _guarded(ask: Callable[[], str | None]) -> str | None:
    """A reason, or the error that asking for it raised."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


def serve(requests: TextIO, answers: TextIO, session: Session) -> None:
    """Answer requests `{"do": method, ...arguments}` until the input ends; `{"at": provider}` lines go before."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    session.announce = lambda name: say({"at": name})
    for line in requests:
        request = json.loads(line)
        method = getattr(session, request.pop("do"))
        try:
            say({"result": method(**request)})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {_first_line(error)}"})
            if isinstance(error, BrokenContext):
                return


def main(argument: str) -> None:
    """Entry of the process: its configuration is one JSON argument."""
    configuration = json.loads(argument)
    # Libraries print; only answers may reach the other end of the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    specs = [Spec(**spec) for spec in configuration["specs"]]
    device = torch.device(configuration["device"])
    serve(sys.stdin, answers, Session(specs, device))


if __name__ == "__main__":
    main(sys.argv[1])
