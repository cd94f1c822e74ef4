"""The floor: the least time a shape can take on a card, from its copy rate and its matrix rate.

The floor is the larger of bytes over copy rate and FLOPs over matrix rate. Rates are either measured in the run itself
or, for a card that is not at hand, stated; a floor from stated figures is arithmetic and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemattn.bench.shapes import Shape, Work


@dataclass(frozen=True)
class Ceilings:
    """Rates of a card: device-memory copy (bytes read plus bytes written a second), dense bf16 matrix product."""

    copy_tb_s: float
    matrix_tflop_s: float
    source: str

    def forward_ms(self, work: Work) -> float:
        """Least milliseconds of a forward pass."""
        return self._ms(work.forward_bytes, work.forward_flops)

    def backward_ms(self, work: Work) -> float:
        """Least milliseconds of a backward pass."""
        return self._ms(work.backward_bytes, work.backward_flops)

    def _ms(self, count: int, flops: int) -> float:
        return 1e-9 * max(count / self.copy_tb_s, flops / self.matrix_tflop_s)


GPUS = {
    "b200": Ceilings(8.0, 2250.0, "the vendor's figures for a B200: 8 TB/s, 2,250 TFLOP/s dense bf16"),
    "h200": Ceilings(4.8, 989.0, "the vendor's figures for an H200: 4.8 TB/s, 989 TFLOP/s dense bf16"),
    "h200-hot": Ceilings(
        4.24, 724.0, "measured hot on an H200, 2026-12-01: 4.24 TB/s copy, 724 TFLOP/s matrix product"
    ),
    "h100": Ceilings(3.35, 989.0, "the vendor's figures for an H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16"),
    "a100": Ceilings(2.039, 312.0, "the vendor's figures for an A100 80 GB SXM: 2.039 TB/s, 312 TFLOP/s dense bf16"),
}

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense bf16 TFLOP/s by a part of the device's name: the denominator of MFU."""


def table(shapes: Sequence[Shape], ceilings: Ceilings) -> str:
    """The floors of some shapes as a Markdown table, headed by where they come from."""
    lines = [
        "Floors by arithmetic, not measurement: nothing was run.",
        f"Rates: {ceilings.source}.",
        "Floor = max(bytes / copy rate, FLOPs / matrix rate), every tensor once; a card under load reaches less.",
        "",
        "| shape | B, H, G, D | GB fwd | TFLOP fwd | floor fwd ms | floor bwd ms | bound by (fwd / bwd) |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for shape in shapes:
        work = shape.work
        size = f"{shape.sequences}, {shape.heads}, {shape.groups}, {shape.head_dim}"
        bound = " / ".join(
            "bytes" if count / ceilings.copy_tb_s > flops / ceilings.matrix_tflop_s else "FLOPs"
            for count, flops in (
                (work.forward_bytes, work.forward_flops),
                (work.backward_bytes, work.backward_flops),
            )
        )
        lines.append(
            f"| {shape.name} | {size} | {work.forward_bytes / 1e9:.3f} | {work.forward_flops / 1e12:.3f} "
            f"| {ceilings.forward_ms(work):.3f} | {ceilings.backward_ms(work):.3f} | {bound} |"
        )
    return "\n".join(lines)
