"""Running clauses: one after another or in several processes, a result for each case."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal

import torch

import gemattn
from gemattn.testing.conformance import clauses as _clauses  # noqa: F401  (registers them)
from gemattn.testing.conformance.clause import CLAUSES, Clause, NotRunHere
from gemattn.testing.conformance.subject import Subject
from gemattn.testing.tolerance import Implementation

Status = Literal["passed", "failed", "unsupported", "not run here", "not owed"]


@dataclass(frozen=True)
class Result:
    """What one case of one clause gave."""

    clause: str
    contract: int
    case: str
    status: Status
    message: str = ""
    error: str = ""
    """Type of what was raised, where `status` is "failed"."""
    seconds: float = 0.0


def ordered() -> list[Clause]:
    """Every clause, by its number in the contract."""
    return sorted(CLAUSES.values(), key=lambda clause: clause.contract)


def chosen(names: Sequence[str] | None) -> list[Clause]:
    """The clauses of these names or contract numbers; None: all. Raises ValueError for an unknown one."""
    if names is None:
        return ordered()
    unknown = [n for n in names if n not in CLAUSES and n not in {str(c.contract) for c in CLAUSES.values()}]
    if unknown:
        raise ValueError(f"unknown clauses {', '.join(unknown)}; known are {', '.join(CLAUSES)} and contract numbers")
    return [clause for clause in ordered() if clause.name in names or str(clause.contract) in names]


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_interpreter() -> None:
    """Turn Triton's interpreter on, which must happen before Triton is imported."""
    if os.environ.get("TRITON_INTERPRET") != "1" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"


def cannot_run(subject: Subject) -> str | None:
    """Why this machine cannot run the implementation at all, or None."""
    if subject.on_gpu and not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if not isinstance(subject.impl, str):
        return None
    if subject.simulated and subject.impl != "tlx":
        return "the simulator runs TLX kernels"
    if subject.simulated and importlib.util.find_spec("triton.language.extra.tlx") is None:
        return "the simulator needs fbtriton"
    x = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=subject.device)
    offsets = torch.tensor([0, 1], device=subject.device)
    with subject.schedule(0):
        return "; ".join(gemattn.unsupported_reasons(subject.impl, x, x, x, offsets)) or None


def lacks_gpus(clause: Clause, subject: Subject) -> str | None:
    """Why the clause's GPUs are missing, or None."""
    if clause.gpus and not subject.on_gpu:
        return "needs a GPU"
    if clause.gpus > 1 and torch.cuda.device_count() < clause.gpus:
        return f"needs {clause.gpus} GPUs"
    return None


def run_case(subject: Subject, clause: Clause, case: str, schedules: int = 1) -> Result:
    """Run one case, on a simulated chip under so many schedules; whatever it raises is its result."""

    def result(status: Status, message: str = "", error: str = "") -> Result:
        seconds = round(time.perf_counter() - start, 3)
        return Result(clause.name, clause.contract, case, status, message, error, seconds)

    start = time.perf_counter()
    if why := clause.not_owed(subject.reference):
        return result("not owed", why)
    if why := cannot_run(subject) or lacks_gpus(clause, subject):
        return result("not run here", why)
    try:
        for seed in range(schedules if subject.simulated else 1):
            torch.manual_seed(0)
            with subject.schedule(seed):
                clause.function(subject, **clause.cases[case])
    except NotRunHere as error:
        return result("not run here", str(error))
    except gemattn.UnsupportedError as error:
        return result("unsupported", str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
        return result("failed", f"{str(error)[:2000]}{where}", type(error).__name__)
    finally:
        if subject.on_gpu and torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # of a kernel that failed: it has been reported
                torch.cuda.empty_cache()
    return result("passed")


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this (main) thread after so many seconds; 0: never."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _run_named(impl: Implementation, device: str, clause: str, case: str, timeout: int, schedules: int) -> Result:
    start = time.perf_counter()
    try:
        with _limited(timeout):
            return run_case(Subject(impl, device), CLAUSES[clause], case, schedules)
    except TimeoutError as error:  # while the case was cleaning up
        seconds = time.perf_counter() - start
        return Result(clause, CLAUSES[clause].contract, case, "failed", str(error), "TimeoutError", seconds)


def run(
    impl: Implementation,
    *,
    device: str | None = None,
    clauses: Sequence[str] | None = None,
    jobs: int = 1,
    timeout: int = 0,
    schedules: int = 1,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every case of the clauses on an implementation.

    Args:
        impl: a name, or a function with the signature of `gemattn.jagged_attention` (less `impl`).
        device: "cuda", "cpu", or "sm_90" or "sm_100": `gemattn.testing.tlx_sim` simulates that chip. Default: a GPU
            if there is one. On a CPU, Triton's interpreter is turned on, which works only before Triton is imported.
        clauses: names or contract numbers; default: all.
        jobs: processes. With more than one, a case that kills its process fails alone, and `impl` must be picklable.
        timeout: seconds a case may take, by SIGALRM, so only from the main thread; 0: no limit.
        schedules: under how many schedules a simulated chip runs each case.
        on_result: called with each result as it comes.

    Returns:
        One result for each case, in the order of the contract.
    """
    device = device or default_device()
    if device == "cpu":
        use_interpreter()
    cases = [(clause.name, case) for clause in chosen(clauses) for case in clause.cases]
    found: dict[tuple[str, str], Result] = {}
    if jobs <= 1:
        for name, case in cases:
            found[name, case] = _run_named(impl, device, name, case, timeout, schedules)
            on_result(found[name, case])
        return [found[key] for key in cases]
    waiting = list(cases)
    while waiting:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(_run_named, impl, device, *key, timeout, schedules): key for key in waiting}
            for future in as_completed(futures):
                key = futures[future]
                if future.exception() is None:
                    found[key] = future.result()
                    on_result(found[key])
        waiting = [key for key in cases if key not in found]
        if waiting and jobs > 1:
            jobs = 1  # a process died and took others' cases with it: one at a time shows whose fault it was
        elif waiting:
            message = "the process died"
            found[waiting[0]] = Result(*_place(waiting[0]), "failed", message, "BrokenProcessPool")
            on_result(found[waiting[0]])
            waiting = waiting[1:]
    return [found[key] for key in cases]


def _place(key: tuple[str, str]) -> tuple[str, int, str]:
    return key[0], CLAUSES[key[0]].contract, key[1]


def check(
    clause: str, impl: Implementation, *, case: str = "", device: str | None = None, whole: bool = False
) -> Result:
    """Run one case of a clause as a test.

    Args:
        clause, case: as `gemattn.testing.conformance.cases` lists them.
        impl, device: as for `run`.
        whole: the implementation supports everything, so "unsupported" is a failure.

    Raises:
        AssertionError: the case failed.
        unittest.SkipTest: it is not owed, not supported, or cannot be shown here; pytest reports the reason.
    """
    device = device or default_device()
    if device == "cpu":
        use_interpreter()
    result = run_case(Subject(impl, device), CLAUSES[clause], case)
    if result.status == "failed" or (whole and result.status == "unsupported"):
        raise AssertionError(f"clause {result.contract}, {clause} ({case}): {result.error}: {result.message}")
    if result.status != "passed":
        raise unittest.SkipTest(f"{result.status}: {result.message}")
    return result
