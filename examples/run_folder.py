"""The folder of a run: metrics.jsonl, TensorBoard events, summary.json, and the link ``runs/latest``."""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

RUNS = Path("runs")
LATEST = RUNS / "latest"


def new_folder(prefix: str) -> Path:
    """``runs/PREFIX-DATE-TIME``, with a number behind it where that exists already."""
    stem = f"{prefix}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (RUNS / (stem + suffix) for suffix in ["", *(f"-{i}" for i in range(2, 1000))])
    return next(path for path in candidates if not path.exists())


def point_latest(folder: Path) -> None:
    """Makes ``runs/latest`` a link to this folder, in one step."""
    RUNS.mkdir(exist_ok=True)
    part = RUNS / f".latest-{os.getpid()}"
    part.symlink_to(os.path.relpath(folder.resolve(), RUNS.resolve()), target_is_directory=True)
    os.replace(part, LATEST)


class RunLog:
    """Writes numbers by step to metrics.jsonl and to TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import, and only one process writes

        self._lines = (folder / "metrics.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"))

    @classmethod
    def open(cls, folder: Path) -> "RunLog":
        """Makes the folder if it is not there, and points ``runs/latest`` to it."""
        folder.mkdir(parents=True, exist_ok=True)
        point_latest(folder)
        return cls(folder)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One line ``{"kind", "step", **values}``, and a TensorBoard scalar ``kind/name`` a value."""
        self._lines.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._lines.close()
        self._board.close()


def flatten(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """``{task: {"ne": x}}`` -> ``{"task/ne": x}``."""
    return {f"{task}/{name}": value for task, values in metrics.items() for name, value in values.items()}


def format_metrics(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """``engaged NE 0.8300 AUC 0.7700, loved ...``"""
    return ", ".join(f"{task} NE {values['ne']:.4f} AUC {values['auc']:.4f}" for task, values in metrics.items())


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """summary.json, complete or not at all."""
    part = folder / "summary.json.part"
    part.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(part, folder / "summary.json")


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as a table for the terminal."""
    columns = [("model", summary["model"])]
    for task, values in summary["tasks"].items():
        columns += [(f"{task} NE", f"{values['ne']:.4f}"), (f"{task} AUC", f"{values['auc']:.4f}")]
    columns.append(("examples/s", f"{summary['examples_per_s']:,.0f}"))
    columns += [(name, f"{summary[name]:.1%}") for name in ("backward_share", "attention_share")]
    columns.append(("seconds", f"{summary['seconds']:.1f}"))
    widths = [max(len(name), len(value)) for name, value in columns]
    head = "  ".join(name.rjust(width) for (name, _), width in zip(columns, widths, strict=True))
    row = "  ".join(value.rjust(width) for (_, value), width in zip(columns, widths, strict=True))
    return f"{head}\n{'-' * len(head)}\n{row}"
