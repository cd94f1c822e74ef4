"""``python -m tests.mutants``: does the conformance suite catch every mutant? Exit status 1 if one gets away.

Each mutant is a copy of the package with one textual change, imported in a process of its own. The processes are forked
from one that has imported torch and Triton already, but nothing of gemattn.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.mutants.catalogue import MUTANTS, Mutant

PACKAGE = Path(__file__).resolve().parents[2] / "gemattn"
TIMEOUT = 120
"""Seconds a mutant may take."""

Outcome = tuple[str, str]
"""(caught, survived, broken or not run here; why)."""


def mutate(mutant: Mutant, package: Path) -> None:
    """Change the copy `package`. Raises ValueError unless the text to change stands there exactly once."""
    path = package / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: gemattn/{mutant.file} holds {mutant.old!r} {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def _try(mutant: Mutant, folder: str, device: str, answer: Connection) -> None:
    sys.path.insert(0, folder)
    import gemattn
    from gemattn.testing.conformance import CLAUSES
    from gemattn.testing.conformance.runner import run_case
    from gemattn.testing.conformance.subject import Subject

    assert Path(gemattn.__file__).is_relative_to(folder)
    subject = Subject(mutant.impl, device)
    seen = []
    for clause, case in mutant.cases:
        result = run_case(subject, CLAUSES[clause], case)
        seen.append(f"{clause} ({case}): {result.status} {result.error} {result.message}")
        if result.status == "failed":
            # Anything else than an assertion is a mutant that does not run: it proves nothing about the suite.
            answer.send(("caught" if result.error == "AssertionError" else "broken", seen[-1]))
            return
    answer.send(("survived", "; ".join(seen)))


def _load_what_calls_load() -> None:
    """Import Triton, and what PyTorch imports on the first call of an operator: once for all."""
    import triton  # noqa: F401

    @torch.library.custom_op("mutants::copy", mutates_args=())
    def copy(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    copy.register_autograd(lambda context, grad: grad)
    copy(torch.ones(1, requires_grad=True)).backward()


def attempt(mutant: Mutant, device: str) -> Outcome:
    """Run a mutant's cases in a forked process."""
    if mutant.gpu and device != "cuda":
        return "not run here", "needs a GPU"
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "gemattn"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "bench", "nn"))
        mutate(mutant, package)
        context = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_try, args=(mutant, folder, device, theirs))
        process.start()
        theirs.close()
        try:
            if not ours.poll(TIMEOUT):
                return "broken", f"no answer after {TIMEOUT} s"
            return ours.recv()
        except EOFError:
            process.join(10)
            return "broken", f"the process ended with status {process.exitcode}"
        finally:
            process.kill()
            process.join()


def main() -> int:
    """Print a line for each mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="mutants whose name holds this")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every N-th mutant from the I-th on")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    _load_what_calls_load()

    part, parts = map(int, options.part.split("/"))
    chosen = [m for m in MUTANTS if not options.only or options.only in m.name][part::parts]
    escaped = 0
    for mutant in chosen:
        start = time.perf_counter()
        outcome, why = attempt(mutant, device)
        escaped += outcome in ("survived", "broken")
        print(f"{outcome:<12}  {time.perf_counter() - start:5.1f} s  {mutant.name}  ({why})", flush=True)
    print(f"{len(chosen)} mutants, {escaped} not caught")
    return int(escaped > 0)


if __name__ == "__main__":
    sys.exit(main())
