"""The long runs: every scenario under many seeds, the mutation score, and cases against a GPU.

python -m gemattn.testing.tlx_sim seeds --seeds 50
python -m gemattn.testing.tlx_sim mutants --schedules 50
python -m gemattn.testing.tlx_sim cases --device cuda --save h200.pt     (on a GPU)
python -m gemattn.testing.tlx_sim cases --compare h200.pt                (simulated)
python -m gemattn.testing.tlx_sim all                                    (an hour of two cores)
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path

import torch

from gemattn.dispatch import UnsupportedError
from gemattn.testing.conformance.__main__ import main as conformance
from gemattn.testing.conformance.subject import SIMULATED
from gemattn.testing.tlx_sim import cases, score, tutorials
from gemattn.testing.tlx_sim.scenarios import SCENARIOS
from gemattn.testing.tlx_sim.summary import Summary

FILES = {
    "own": ("hopper", lambda: score.own_files("hopper")),
    "blackwell": ("blackwell", lambda: score.own_files("blackwell")),
    "hopper tutorial": ("tutorial hopper", lambda: [tutorials.load(tutorials.HOPPER).__file__ or ""]),
    "blackwell tutorial": ("tutorial blackwell", lambda: [tutorials.load(tutorials.BLACKWELL).__file__ or ""]),
}
"""Sources to mutate: which scenarios run them (by how their names begin), and where they are."""


def _tell(text: str) -> None:
    print(text, flush=True)


def _commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path.cwd())
    return found.stdout.strip() or "unknown"


def seeds(arguments: argparse.Namespace) -> bool:
    """Every scenario under every seed; whether nothing was found."""
    good = True
    for name in SCENARIOS:
        if not name.startswith(tuple(arguments.scenario)):
            continue
        outcomes = score.many(name, range(arguments.seeds))
        bad = [(seed, text) for seed, o in enumerate(outcomes) for text in score.harmful(name, o)]
        known = {text for o in outcomes for text in o.findings} - {text for _, text in bad}
        seconds = sum(o.seconds for o in outcomes) / len(outcomes)
        _tell(
            f"{name}: {len(outcomes)} seeds, {len({s for s, _ in bad})} bad, {seconds:.1f} s of processor time a seed"
        )
        for seed, text in bad[:5]:
            _tell(f"    seed {seed}: {text}")
        for text in sorted(known):
            _tell(f"    known: {text}")
        good = good and not bad
    return good


def mutants(arguments: argparse.Namespace) -> bool:
    """The mutation score of each set of sources; whether all that are really wrong were caught."""
    good = True
    for which in arguments.sources:
        prefix, files = FILES[which]
        names = [name for name in SCENARIOS if name.startswith(prefix)]
        verdicts = score.score(names, files(), arguments.schedules, _tell if arguments.verbose else lambda text: None)
        summary = Summary.of(verdicts)
        _tell(f"{which}: " + "\n".join(summary.lines()))
        good = good and summary.good
    return good


def compare_cases(arguments: argparse.Namespace) -> bool:
    """Cases on a GPU or simulated, each checked with the oracle, saved or compared; whether all agree."""
    saved = torch.load(arguments.compare) if arguments.compare else {}
    kept, good = {}, True
    for name, case in cases.CASES.items():
        begin = time.process_time()
        try:
            kept[name] = found = cases.results(case, arguments.device, arguments.seed, arguments.arch)
            cases.check_oracle(case, found)
            verdict = "within tolerance of the oracle"
        except AssertionError as error:
            verdict, good, found = f"WRONG: {error}", False, {}
        except UnsupportedError as error:
            verdict, found = f"not run: {error}", {}
        for result, x in found.items():
            if name in saved:
                eps = torch.finfo(torch.bfloat16 if x.dtype == torch.float32 else x.dtype).eps
                apart = cases.difference(x, saved[name][result])
                verdict += f"; {result} {apart:.1e} apart"
                if not apart <= eps:
                    verdict, good = verdict + " (TOO FAR)", False
        _tell(f"{name}: {verdict} ({time.process_time() - begin:.1f} s of processor time)")
    if arguments.save:
        torch.save(kept, arguments.save)
    return good


def everything(arguments: argparse.Namespace) -> bool:
    """Every clause on both chips, every scenario under 50 schedules, every mutant; whether all is well."""
    good = True
    for chip in SIMULATED:
        schedules = ["--schedules", str(arguments.schedules)]
        good = conformance(["--impl", "tlx", "--device", chip, *schedules]) == 0 and good
    for command in ("seeds", "mutants"):
        good = main([command]) == 0 and good
    return good


def main(words: list[str] | None = None) -> int:
    """Run one of the commands; 0 when it found nothing wrong."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("seeds", help="scenarios under many seeds")
    command.add_argument("--seeds", type=int, default=50)
    command.add_argument("--scenario", nargs="+", default=[""], help="how names of scenarios begin")
    command.set_defaults(run=seeds)
    command = commands.add_parser("mutants", help="the mutation score")
    command.add_argument("--schedules", type=int, default=50)
    command.add_argument("--sources", nargs="+", choices=list(FILES), default=list(FILES))
    command.add_argument("--verbose", action="store_true", help="a line for every mutant")
    command.set_defaults(run=mutants)
    command = commands.add_parser("cases", help="cases of the contract, simulated or on a GPU")
    command.add_argument("--device", default="cpu")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--arch", type=int, choices=[90, 100], default=90, help="the chip that is simulated")
    command.add_argument("--save", type=Path)
    command.add_argument("--compare", type=Path)
    command.set_defaults(run=compare_cases)
    command = commands.add_parser("all", help="every clause on both chips, every scenario, every mutant")
    command.add_argument("--schedules", type=int, default=2, help="of each case of a clause")
    command.set_defaults(run=everything)
    arguments = parser.parse_args(words)
    _tell(f"{' '.join(words)}, commit {_commit()}, {datetime.date.today()}")
    return 0 if arguments.run(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
