"""Results as a table, as JSON, and as the support matrix."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import gemattn
from gemattn.testing.conformance.clause import CLAUSES
from gemattn.testing.conformance.runner import Result, ordered
from gemattn.testing.conformance.subject import SIMULATED

_NUMBERS = {
    1: "empty is ordinary", 2: "a bad sequence hurts only itself, and shows", 3: "slack rows are zero", 4: "offsets",
    5: "no host sync", 6: "strides", 7: "types and sizes", 8: "large", 9: "batch invariance", 10: "gradients",
    11: "citizenship", 12: "numerics",
}  # fmt: skip


def describe(device: str, schedules: int = 1) -> dict[str, str]:
    """What a run is made on: architecture, machine, versions and date; `schedules` of a simulated chip."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gemattn": gemattn.__version__}
    for name in ("triton", "fbtriton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        where = {"architecture": f"sm_{major}{minor}", "machine": torch.cuda.get_device_name(device)}
    else:
        where = {"architecture": "cpu", "machine": f"{platform.system()} {platform.machine()}"}
        if device in SIMULATED:
            where["architecture"] = f"{device} simulated"
            where["machine"] += f", {schedules} schedule{'s' if schedules > 1 else ''} a case"
    return where | versions | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def summary(results: Sequence[Result]) -> str:
    """Outcome of one clause's cases in a few words. Nothing counts as passed but what passed."""
    count = {status: sum(r.status == status for r in results) for status in {r.status for r in results}}
    total = len(results)
    if count.get("failed"):
        return f"FAILED {count['failed']} of {total}"
    if count.get("passed") == total:
        return "passed"
    if len(count) == 1:
        return next(iter(count))
    return ", ".join(f"{status} {n}" for status, n in sorted(count.items(), key=lambda item: item[0] != "passed"))


def table(results: Sequence[Result]) -> str:
    """A line for each clause, then what failed, and the reasons for what was unsupported or not run."""
    lines = []
    width = max(len(r.clause) for r in results)
    for name in dict.fromkeys(r.clause for r in results):
        own = [r for r in results if r.clause == name]
        notes = "; ".join(reasons(own))
        seconds = sum(r.seconds for r in own)
        cases = f"{len(own)} case{'s' if len(own) > 1 else ''}"
        line = f"{own[0].contract:>2}  {name:<{width}}  {cases:>9}  {seconds:6.1f} s  {summary(own)}"
        lines.append(line + (f"  ({notes})" if notes else ""))
    for r in results:
        if r.status == "failed":
            lines += ["", f"FAILED {r.contract}, {r.clause} ({r.case}): {r.error}: {r.message}"]
    statuses = dict.fromkeys(r.status for r in results)
    counts = ", ".join(f"{sum(r.status == status for r in results)} {status}" for status in statuses)
    return "\n".join([*lines, "", f"{len(results)} cases: {counts}"])


def reasons(results: Iterable[Result]) -> list[str]:
    """Distinct reasons for what neither passed nor failed, the first few."""
    found = list(dict.fromkeys(r.message for r in results if r.status not in ("passed", "failed")))
    return found if len(found) <= 2 else [found[0], f"and {len(found) - 1} reasons like it"]


def write_json(path: Path, impl: str, about: dict[str, str], results: Sequence[Result]) -> None:
    """A file that `read_json` and `matrix` take; `about` is of `describe`."""
    head = json.dumps({"impl": impl, **about})
    rows = ",\n".join(json.dumps({k: v for k, v in asdict(r).items() if v != ""}) for r in results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"about": {head},\n"results": [\n{rows}\n]}}\n')


def read_json(path: Path) -> tuple[dict[str, str], list[Result]]:
    """(what the run was made on, its results)."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data["about"], [Result(**({"case": ""} | row)) for row in data["results"]]


def matrix(runs: Sequence[tuple[dict[str, str], list[Result]]]) -> str:
    """The support matrix in Markdown: a column for each run, a row for each clause."""
    columns = [f"{about['impl']}, {about['architecture']}" for about, _ in runs]
    lines = [
        "# Support matrix",
        "",
        "<!-- Written by python -m gemattn.testing.conformance --matrix; not by hand. -->",
        "",
        "Clauses of the contract that each implementation was seen to keep: every cell is a run of",
        '`python -m gemattn.testing.conformance`. "passed" means every case of the clause; what was not run, or is not',
        "supported, is never counted as passed.",
        "",
        f"| | clause | {' | '.join(columns)} |",
        f"| --- | --- | {' | '.join('---' for _ in columns)} |",
    ]
    notes: dict[str, int] = {}
    for clause in ordered():
        cells = []
        for _, results in runs:
            own = [r for r in results if r.clause == clause.name]
            marks = []
            for reason in reasons(r for r in own if r.status == "unsupported"):
                marks.append(str(notes.setdefault(reason, len(notes) + 1)))
            cell = summary(own) if own else "not in this run"
            cells.append(cell + (f" [{', '.join(marks)}]" if marks else ""))
        lines.append(f"| {clause.contract} | `{clause.name}` | {' | '.join(cells)} |")
    if notes:
        lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())]
    lines += [
        "",
        "## Runs",
        "",
        "| run | machine | versions | date | cases passed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for column, (about, results) in zip(columns, runs, strict=True):
        versions = ", ".join(
            f"{k} {about[k]}" for k in ("gemattn", "torch", "triton", "fbtriton", "python") if k in about
        )
        owed = [r for r in results if r.status != "not owed"]
        passed = f"{sum(r.status == 'passed' for r in owed)} of {len(owed)} owed"
        lines.append(f"| {column} | {about['machine']} | {versions} | {about['date']} | {passed} |")
    lines += [
        "",
        "On cpu, kernels run in Triton's interpreter; a simulated chip is that of `gemattn.testing.tlx_sim`.",
        "",
        "## Clauses",
        "",
    ]
    number = 0
    for clause in ordered():
        if clause.contract != number:
            number = clause.contract
            lines.append(f"- {number}, {_NUMBERS[number]}")
        by = {"all": "", "kernels": " (kernels)", "reference": " (the reference)"}[clause.owed]
        lines.append(f"  - `{clause.name}`{by}: {clause.text}")
    return "\n".join(lines) + "\n"


def listing() -> str:
    """Every clause with its number, cases and text."""
    return "\n".join(f"{c.contract:>2}  {c.name}  ({len(c.cases)})\n    {c.text}" for c in ordered())


__all__ = ["CLAUSES", "describe", "listing", "matrix", "read_json", "summary", "table", "write_json"]
