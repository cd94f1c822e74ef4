"""Plots of a results file as PNG. matplotlib is optional: they can be drawn later, on another machine."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from gemattn.bench.report import MEANINGLESS, geometric_mean, present
from gemattn.bench.results import DIRECTIONS, Results, timed

_FAMILIES = {
    "self_half": "self-attention, lengths uniform on 1..L, D 128",
    "self_full": "self-attention, all lengths L, D 128",
    "hsp_s0.1": "shared query of 256 rows, density 0.1",
    "hsp_s0.5": "shared query of 256 rows, density 0.5",
    "hsp_s0.95": "shared query of 256 rows, density 0.95",
}


def matplotlib_missing() -> str | None:
    """Why no plot can be drawn, or None."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return "matplotlib is not installed: pip install 'gemattn[bench]'"
    return None


def draw(results: Results, folder: Path) -> list[Path]:
    """ratio.png, over_floor.png and scaling.png, as far as the results hold what they show.

    Raises:
        ValueError: no matplotlib.
    """
    if reason := matplotlib_missing():
        raise ValueError(reason)
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, make in (("ratio", _ratio), ("over_floor", _over_floor), ("scaling", _scaling)):
        figure = make(pyplot, results)
        if figure is None:
            continue
        figure.text(0.01, 0.005, _caption(results), fontsize=7, color="0.35")
        drawn.append(folder / f"{name}.png")
        figure.savefig(drawn[-1], dpi=130, bbox_inches="tight")
        pyplot.close(figure)
    return drawn


def baseline(results: Results) -> str | None:
    """The rival that ratios refer to: FlashAttention-4 where there is one, else the first rival with times."""
    rivals = [name for name in present(results) if results["providers"][name]["kind"] == "rival"]
    rivals = [name for name in rivals if any(timed(shape, name) for shape in results["shapes"])]
    return next((name for name in rivals if name.startswith("fa4")), rivals[0] if rivals else None)


def _caption(results: Results) -> str:
    machine = results["machine"]
    text = f"{machine.get('gpu') or machine.get('cpu')}, torch {machine['torch']}, {results['started'][:10]}, bfloat16"
    return f"{MEANINGLESS}  {text}" if results["meaningless"] else text


def _bars(
    pyplot: Any,
    labels: list[str],
    series: dict[str, dict[str, list[float]]],
    title: str,
    line: str,
    log: bool = False,
) -> Any:
    """Two panels, forward and backward, with a group of bars a label; `series` is name -> direction -> values."""
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 1.2 + 0.16 * len(labels) * max(2, len(series))), sharey=True)
    height = 0.8 / len(series)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for place, (name, values) in enumerate(series.items()):
            positions = [i + (place - (len(series) - 1) / 2) * height for i in range(len(labels))]
            bars = axis.barh(positions, values[direction], height=height, label=name)
            texts = ["" if math.isnan(value) else f"{value:.2f}" for value in values[direction]]
            axis.bar_label(bars, texts, fontsize=6, padding=2)
        axis.axvline(1, color="0.3", linewidth=1)
        axis.set_title(f"{title}, {direction}", fontsize=10)
        axis.set_xlabel(line, fontsize=8)
        axis.grid(axis="x", alpha=0.3)
        axis.margins(x=0.1)
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlim(left=0.7)
    axes[0].set_yticks(range(len(labels)), labels, fontsize=7)
    axes[0].set_ylim(len(labels) - 0.4, -0.6)
    figure.tight_layout(rect=(0, 0.02, 1, 0.97))
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=8, loc="upper center", ncols=len(series), frameon=False
    )
    return figure


def _ratio(pyplot: Any, results: Results) -> Any:
    """How many times as fast as the baseline everyone is, shape by shape, geometric means of the suites last."""
    reference = baseline(results)
    names = [name for name in present(results) if name != reference]
    shapes = [shape for shape in results["shapes"] if reference and timed(shape, reference)]
    if not shapes or not names:
        return None
    assert reference is not None
    suites = list(dict.fromkeys(shape["suite"] for shape in shapes))
    series: dict[str, dict[str, list[float]]] = {}
    for name in names:
        series[name] = {}
        for direction in DIRECTIONS:
            values = [_speed_up(shape, name, reference, direction) for shape in shapes]
            means = [
                geometric_mean(
                    value
                    for value, shape in zip(values, shapes, strict=True)
                    if shape["suite"] == suite and not math.isnan(value)
                )
                for suite in suites
            ]
            series[name][direction] = values + means
    labels = [shape["name"] for shape in shapes] + [f"{suite}: geometric mean" for suite in suites]
    return _bars(
        pyplot, labels, series, f"Speed-up over {reference}", f"time of {reference} over time; above 1 is faster"
    )


def _speed_up(shape: dict[str, Any], name: str, reference: str, direction: str) -> float:
    mine, theirs = timed(shape, name), timed(shape, reference)
    return theirs[direction]["median"] / mine[direction]["median"] if mine and theirs else math.nan


def _over_floor(pyplot: Any, results: Results) -> Any:
    """Time over the floor, shape by shape."""
    shapes = [shape for shape in results["shapes"] if any(timed(shape, name) for name in present(results))]
    if not shapes:
        return None
    series = {
        name: {
            direction: [
                figures[direction]["over_floor"] if (figures := timed(shape, name)) else math.nan for shape in shapes
            ]
            for direction in DIRECTIONS
        }
        for name in present(results)
    }
    return _bars(
        pyplot, [shape["name"] for shape in shapes], series, "Time over floor", "1 is the least possible time", log=True
    )


def _scaling(pyplot: Any, results: Results) -> Any:
    """TFLOP/s against L for the families of shapes that differ in length alone."""
    families = {key: [s for s in results["shapes"] if family(s["name"]) == key] for key in _FAMILIES}
    families = {key: shapes for key, shapes in families.items() if len(shapes) > 1}
    if not families:
        return None
    figure, axes = pyplot.subplots(2, len(families), figsize=(3.4 * len(families), 6), squeeze=False, sharey="row")
    for column, (key, shapes) in enumerate(families.items()):
        for axis, direction in zip(axes[:, column], DIRECTIONS, strict=True):
            for name in present(results):
                points = [(s["longest"], f[direction]["tflop_s"]) for s in shapes if (f := timed(s, name))]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([shape["longest"] for shape in shapes], [str(shape["longest"]) for shape in shapes])
            axis.grid(alpha=0.3)
            axis.set_xlabel("L", fontsize=8)
            axis.set_title(f"{_FAMILIES[key]}\n{direction}", fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s of true lengths", fontsize=8)
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def family(name: str) -> str | None:
    """self_half_1024 -> self_half, hsp_q256_kv512_s0.1 -> hsp_s0.1; None for a shape of no family."""
    parts = name.split("_")
    if len(parts) == 3 and parts[0] == "self" and parts[2].isdigit():
        key = f"self_{parts[1]}"
    elif len(parts) == 4 and parts[:2] == ["hsp", "q256"]:
        key = f"hsp_{parts[3]}"
    else:
        return None
    return key if key in _FAMILIES else None
