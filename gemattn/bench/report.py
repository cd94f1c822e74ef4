"""From results to words: rows for the terminal, geometric means, report.md."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gemattn.bench.results import DIRECTIONS, Results, timed

MEANINGLESS = "SMOKE RUN: tiny shapes on a machine without a GPU. The figures mean nothing."


@dataclass(frozen=True)
class Ratio:
    """A rival's time over one of our implementations' on a suite: above 1, ours is faster."""

    suite: str
    ours: str
    rival: str
    direction: str
    mean: float
    """Geometric mean over the shapes that both ran."""
    mean_with_setup: float
    """The same if each side's per-batch set-up were counted in this one call."""
    shapes: int
    worst: float
    worst_shape: str


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratios(results: Results) -> list[Ratio]:
    """Every pair of ours and a rival, suite by suite and direction by direction."""
    kinds = {name: about["kind"] for name, about in results["providers"].items()}
    suites = list(dict.fromkeys(shape["suite"] for shape in results["shapes"]))
    found = []
    for suite in suites:
        shapes = [shape for shape in results["shapes"] if shape["suite"] == suite]
        for ours in (name for name, kind in kinds.items() if kind == "ours"):
            for rival in (name for name, kind in kinds.items() if kind == "rival"):
                for direction in DIRECTIONS:
                    ratio = _ratio(suite, shapes, ours, rival, direction)
                    if ratio is not None:
                        found.append(ratio)
    return found


def _ratio(suite: str, shapes: list[dict[str, Any]], ours: str, rival: str, direction: str) -> Ratio | None:
    values: dict[str, float] = {}
    with_setup = []
    for shape in shapes:
        a, b = timed(shape, ours), timed(shape, rival)
        if a is None or b is None:
            continue
        mine, theirs = a[direction]["median"], b[direction]["median"]
        values[shape["name"]] = theirs / mine
        # The set-up comes before forward and serves backward too, so it is counted once.
        extra = [x["setup"]["median"] if x["setup"] and direction == "forward" else 0.0 for x in (a, b)]
        with_setup.append((theirs + extra[1]) / (mine + extra[0]))
    if not values:
        return None
    worst = min(values, key=lambda name: values[name])
    return Ratio(
        suite,
        ours,
        rival,
        direction,
        geometric_mean(values.values()),
        geometric_mean(with_setup),
        len(values),
        values[worst],
        worst,
    )


def over_floor(results: Results, suite: str, provider: str, direction: str) -> float:
    """Geometric mean of time over floor on a suite; NaN where the provider has no times."""
    figures = [timed(shape, provider) for shape in results["shapes"] if shape["suite"] == suite]
    return geometric_mean(x[direction]["over_floor"] for x in figures if x)


def row(shape: dict[str, Any], names: list[str]) -> str:
    """One line of the terminal's table: floor and times in ms, forward / backward."""
    if "skipped" in shape:
        return f"{shape['name']:<26} skipped: {shape['skipped']}"
    floor = shape["floor"]
    cells = [f"{shape['name']:<26} {floor['forward']:6.2f} /{floor['backward']:6.2f}"]
    for name in names:
        figures = timed(shape, name)
        if figures is None:
            reason = shape["providers"].get(name, {}).get("reason", "")
            cells.append(f"{'WRONG' if reason.startswith('wrong') else '-':>15}")
        else:
            cells.append(f"{figures['forward']['median']:7.2f} /{figures['backward']['median']:6.2f}")
    return " | ".join(cells)


def header(names: list[str]) -> str:
    """The line above the rows."""
    return " | ".join([f"{'shape, ms forward/backward':<26} {'floor':>14}", *(f"{name:>15}" for name in names)])


def present(results: Results) -> list[str]:
    """Providers that are not absent."""
    return [name for name, about in results["providers"].items() if not about["absent"]]


def summary(results: Results) -> str:
    """The short text that ends a run."""
    lines = [MEANINGLESS] if results["meaningless"] else []
    for ratio in ratios(results):
        with_setup = (
            ""
            if abs(ratio.mean_with_setup - ratio.mean) < 0.005
            else f", {ratio.mean_with_setup:.2f}x with the set-up of a batch in it"
        )
        lines.append(
            f"{ratio.suite:<5} {ratio.direction:<8} {ratio.ours} against {ratio.rival}: {ratio.mean:.2f}x{with_setup} "
            f"({ratio.shapes} shapes; worst {ratio.worst:.2f}x, {ratio.worst_shape})"
        )
    for suite in dict.fromkeys(shape["suite"] for shape in results["shapes"]):
        means = []
        for name in present(results):
            forward, backward = (over_floor(results, suite, name, direction) for direction in DIRECTIONS)
            if not math.isnan(forward):
                means.append(f"{name} {forward:.2f} / {backward:.2f}")
        if means:
            lines.append(f"{suite:<5} time over floor, forward / backward: {'; '.join(means)}")
    if not results["finished"]:
        lines.append("The run was cut: shapes are missing.")
    return "\n".join(lines)


def reasons(results: Results) -> dict[str, list[str]]:
    """Why figures are missing: reason -> "provider" or "provider on shape"."""
    found: dict[str, list[str]] = {}
    for name, about in results["providers"].items():
        if about["absent"]:
            found.setdefault(about["absent"], []).append(name)
    for shape in results["shapes"]:
        if "skipped" in shape:
            found.setdefault(shape["skipped"], []).append(shape["name"])
        for name, figures in shape.get("providers", {}).items():
            if "reason" in figures:
                found.setdefault(figures["reason"], []).append(f"{name} on {shape['name']}")
    return found


def markdown(results: Results) -> str:
    """report.md."""
    about, clocks = results["machine"], results.get("clocks", {})
    lines = ["# Jagged attention, measured", ""]
    if results["meaningless"]:
        lines += [f"**{MEANINGLESS}**", ""]
    lines += [
        f"{about.get('gpu') or about.get('cpu')}, driver {clocks.get('driver_version', 'none')}, "
        f"torch {about['torch']}, CUDA {about['cuda']}, {about['triton']}; {results['started']}.",
        f"Command: `{' '.join(results['command'])}`",
        "",
        "Milliseconds, forward / backward: median of runs with cold caches, providers in turn round by round. A rival "
        "without a shared query copies it and sums its gradient inside its time. What is built once a batch and shared "
        "by layers (schedule, index, block mask) is the set-up, apart.",
        "",
    ]
    if ceilings := results.get("ceilings"):
        lines += [
            f"Floor: every tensor once at {ceilings['copy_tb_s']:.3g} TB/s or true FLOPs at "
            f"{ceilings['matrix_tflop_s']:.3g} TFLOP/s, the larger; {ceilings['source']}.",
            "",
        ]
    if clocks.get("clocks_sm") is not None:
        lines += [
            f"Clocks at the start: SM {clocks['clocks_sm']} MHz, memory {clocks['clocks_mem']} MHz; power limit "
            f"{clocks['power_limit']} W. Each shape's are in results.json.",
            "",
        ]
    lines += ["| provider | version |", "|---|---|"]
    lines += [f"| {name} | {entry['absent'] or entry['version']} |" for name, entry in results["providers"].items()]
    lines += ["", "## Summary", "", *_summary_table(results), ""]
    for suite in dict.fromkeys(shape["suite"] for shape in results["shapes"]):
        lines += [f"## {suite}", "", *_suite_table(results, suite), ""]
    if missing := reasons(results):
        lines += ["## What has no figure, and why", ""]
        lines += [f"- {', '.join(who)}: {why}" for why, who in missing.items()]
    return "\n".join(lines).rstrip() + "\n"


def _summary_table(results: Results) -> list[str]:
    lines = [
        "Speed-up: rival's time over ours, geometric mean over the suite; in brackets with each side's set-up counted.",
        "",
        "| suite | direction | ours | rival | speed-up | shapes | worst shape |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for ratio in ratios(results):
        lines.append(
            f"| {ratio.suite} | {ratio.direction} | {ratio.ours} | {ratio.rival} | {ratio.mean:.2f} "
            f"({ratio.mean_with_setup:.2f}) | {ratio.shapes} | {ratio.worst:.2f}, {ratio.worst_shape} |"
        )
    return lines


def _suite_table(results: Results, suite: str) -> list[str]:
    names = present(results)
    lines = [
        "| shape | B, H, G, D | floor | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    details = [
        "",
        "| shape | provider | 20 to 80% forward / backward | device busy | TFLOP/s | over floor | set-up | peak GiB "
        "| first call s |",
        "|---|---|---|---|---|---|---:|---:|---|",
    ]
    for shape in results["shapes"]:
        if shape["suite"] != suite or "skipped" in shape:
            continue
        size = f"{shape['sequences']}, {shape['heads']}, {shape['kv_heads']}, {shape['head_dim']}"
        cells = [f"| {shape['name']} | {size} | {shape['floor']['forward']:.2f} / {shape['floor']['backward']:.2f}"]
        for name in names:
            figures = timed(shape, name)
            if figures is None:
                cells.append("-")
                continue
            f, b = figures["forward"], figures["backward"]
            cells.append(f"{f['median']:.2f} / {b['median']:.2f}")
            details.append(
                f"| {shape['name']} | {name} | {f['q20']:.2f} to {f['q80']:.2f} / {b['q20']:.2f} to {b['q80']:.2f} "
                f"| {_two_digits(f['busy'])} / {_two_digits(b['busy'])} | {f['tflop_s']:.0f} / {b['tflop_s']:.0f} "
                f"| {f['over_floor']:.2f} / {b['over_floor']:.2f} "
                f"| {_two_digits(figures['setup'] and figures['setup']['median'])} "
                f"| {_two_digits(figures['peak_bytes'] and figures['peak_bytes'] / 2**30)} "
                f"| {figures['first_forward_s']:.1f} / {figures['first_backward_s']:.1f} |"
            )
        lines.append(" | ".join(cells) + " |")
    return lines + details


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
