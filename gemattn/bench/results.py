"""results.json: what it holds, how it is written so that a cut run keeps what it has, how two are compared.

::

    {"schema": 1, "kind": "attention", "meaningless": false, "finished": true, "command": [...], "started": "...",
     "seconds": 300.0, "machine": {...}, "clocks": {...},
     "providers": {NAME: {"kind": "ours" | "rival", "version": "...", "absent": REASON | null}},
     "ceilings": {"copy_tb_s": 4.2, "matrix_tflop_s": 724.0, "source": "..."},
     "shapes": [{"name", "suite", "sequences", "heads", "kv_heads", "head_dim", "longest", "work": {...},
                 "floor": {"forward": ms, "backward": ms}, "seconds", "rounds", "clocks": {...},
                 "providers": {NAME: {"reason": "..."} |
                                     {"forward": TIMES, "backward": TIMES, "setup": TIMES | null, "errors": {...},
                                      "peak_bytes", "first_forward_s", "first_backward_s"}}}]}

TIMES is {"median", "q20", "q80", "samples", "busy", "tflop_s", "over_floor"}, times in milliseconds. A shape that did
not run has {"skipped": REASON} beside its name. "meaningless" marks a smoke run.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

Results = dict[str, Any]

DIRECTIONS = ("forward", "backward")


def write(results: Results, path: Path) -> None:
    """Replace the file at once: whoever reads it, or cuts the run, finds a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(beside, path)


def read(path: Path, kind: str = "attention") -> Results:
    """A results file.

    Raises:
        ValueError: it is missing, no JSON, or of another kind.
    """
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: line {error.lineno}, column {error.colno}") from None
    if not isinstance(results, dict) or results.get("kind") != kind:
        raise ValueError(f"{path} holds no results of `python -m gemattn.bench {kind}`")
    return results


def times(samples: list[float], flops: int | None = None, floor: float | None = None) -> dict[str, Any]:
    """Median, 20% and 80% quantiles of milliseconds; TFLOP/s and time over the floor at the median."""
    median = statistics.median(samples)
    summary: dict[str, Any] = {
        "median": median,
        "q20": quantile(samples, 0.2),
        "q80": quantile(samples, 0.8),
        "samples": len(samples),
    }
    if flops is not None:
        summary["tflop_s"] = flops / median * 1e-9
    if floor is not None:
        summary["over_floor"] = median / floor
    return summary


def quantile(samples: list[float], fraction: float) -> float:
    """By linear interpolation between the sorted samples."""
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def timed(shape: dict[str, Any], provider: str) -> dict[str, Any] | None:
    """A provider's figures for a shape, or None where it has none."""
    figures = shape.get("providers", {}).get(provider)
    return figures if figures and "forward" in figures else None


def compare(new: Results, old: Results) -> str:
    """What moved between two runs: each provider's geometric mean, then every time that left the other's spread."""
    from gemattn.bench.report import geometric_mean

    before = {shape["name"]: shape for shape in old["shapes"]}
    moved: list[str] = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for shape in new["shapes"]:
        for name in shape.get("providers", {}):
            now, then = timed(shape, name), timed(before.get(shape["name"], {}), name)
            if now is None or then is None:
                continue
            for direction in DIRECTIONS:
                a, b = now[direction], then[direction]
                ratio = a["median"] / b["median"]
                ratios.setdefault((name, direction), []).append(ratio)
                apart = a["q20"] > b["q80"] or a["q80"] < b["q20"]
                if apart and abs(ratio - 1) >= 0.02:
                    moved.append(
                        f"  {shape['name']} {name} {direction}: {b['median']:.3f} -> {a['median']:.3f} ms "
                        f"({100 * (ratio - 1):+.0f}%)"
                    )
    lines = [f"Against the run of {old.get('started', 'unknown date')} (time now over time then, geometric mean):"]
    for (name, direction), values in ratios.items():
        lines.append(f"  {name} {direction}: {geometric_mean(values):.3f} over {len(values)} shapes")
    if not ratios:
        lines.append("  no shape and provider in both")
    lines.append("Moved by 2% or more, out of the other run's 20% to 80% range:")
    return "\n".join(lines + (moved or ["  nothing"]))
