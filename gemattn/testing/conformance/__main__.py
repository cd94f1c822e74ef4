"""``python -m gemattn.testing.conformance``: the contract on this machine, clause by clause."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from pathlib import Path

from gemattn.spec import IMPLS
from gemattn.testing.conformance import report, runner
from gemattn.testing.conformance.subject import SIMULATED
from gemattn.testing.tolerance import Implementation


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gemattn.testing.conformance", description=__doc__)
    parser.add_argument("--impl", default="triton", help="reference, triton, tlx or MODULE:FUNCTION; default: triton")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu", *SIMULATED],
        help="default: the GPU if there is one; sm_90 and sm_100 are simulated on the CPU",
    )
    parser.add_argument("--clauses", nargs="+", metavar="CLAUSE", help="names or numbers of the contract; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes; on a GPU most of the time is compilation")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a case may take; default: 600")
    parser.add_argument(
        "--schedules", type=int, default=1, help="schedules of each case on a simulated chip; default: 1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--list", action="store_true", help="list the clauses and run nothing")
    parser.add_argument(
        "--matrix", nargs="+", type=Path, metavar="FILE", help="make the support matrix of --json files"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the matrix goes; default: the terminal")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if a case failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(report.listing())
        return 0
    if options.matrix:
        text = report.matrix([report.read_json(path) for path in options.matrix])
        if options.out:
            options.out.write_text(text)
        else:
            print(text, end="")
        return 0
    impl: Implementation = options.impl if options.impl in IMPLS else pkgutil.resolve_name(options.impl)
    device = options.device or runner.default_device()
    total = sum(len(clause.cases) for clause in runner.chosen(options.clauses))
    done = 0

    def progress(result: runner.Result) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r\033[K{done} of {total}  {result.clause}", end="", file=sys.stderr, flush=True)

    results = runner.run(
        impl,
        device=device,
        clauses=options.clauses,
        jobs=options.jobs,
        timeout=options.timeout,
        schedules=options.schedules,
        on_result=progress,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    about = report.describe(device, options.schedules)
    print(f"{options.impl} on {', '.join(f'{k} {v}' for k, v in about.items())}\n")
    print(report.table(results))
    if options.json:
        report.write_json(options.json, options.impl, about, results)
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
