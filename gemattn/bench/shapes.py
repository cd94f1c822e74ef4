"""The benchmark's shapes: what each is called, how its lengths are drawn, how much work it is.

Lengths come from a CPU generator of seed 0, query lengths first; queries, keys, values and incoming gradients are
normal. A shape is therefore the same batch on every machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gemattn.spec import UNLIMITED, AttentionSpec, fold_window

SEED = 0

Kind = Literal["full", "half", "density", "lognormal", "giant"]


@dataclass(frozen=True)
class Lengths:
    """How the lengths of one side are drawn.

    Args:
        kind: "full": all of them `limit`; "half": uniform on 1..limit; "density": uniform with the mean near
            density * limit, see `bounds`; "lognormal": exp(1.2 x + ln(limit / 12)), x normal, clamped to [1, limit] and
            truncated, mean near limit / 6; "giant": one sequence of `limit`, the others of `rest`.
        limit: L, the longest that may be drawn.
        density: s of "density".
        rest: of "giant".
    """

    kind: Kind
    limit: int
    density: float = 0.0
    rest: int = 0

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest length of "density": [max(1, (2s - 1) L), L] for s >= 1/2, [1, 2sL] below."""
        if self.density >= 0.5:
            return max(1, int((2 * self.density - 1) * self.limit)), self.limit
        return 1, int(2 * self.density * self.limit)

    def draw(self, sequences: int, generator: torch.Generator) -> Tensor:
        """(sequences,) int64."""
        if self.kind == "full":
            return torch.full((sequences,), self.limit)
        if self.kind == "half":
            return torch.randint(1, self.limit + 1, (sequences,), generator=generator)
        if self.kind == "density":
            low, high = self.bounds()
            return torch.randint(low, high + 1, (sequences,), generator=generator)
        if self.kind == "lognormal":
            normal = torch.randn(sequences, generator=generator)
            return (1.2 * normal + math.log(self.limit / 12)).exp().clamp(1, self.limit).long()
        lengths = torch.full((sequences,), self.rest)
        lengths[0] = self.limit
        return lengths


@dataclass(frozen=True)
class Shape:
    """One row of the benchmark: B sequences, H query heads, G key/value heads, head size D.

    `query` is None with `shared_rows` (S rows ask every sequence); `key` is None in self-attention, where the key
    lengths are the query lengths.
    """

    name: str
    suite: str
    sequences: int
    heads: int
    head_dim: int
    query: Lengths | None = None
    key: Lengths | None = None
    shared_rows: int | None = None
    kv_heads: int | None = None
    causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def groups(self) -> int:
        """G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def longest(self) -> int:
        """L: the limit of the key lengths (of the query lengths in self-attention)."""
        lengths = self.key or self.query
        assert lengths is not None
        return lengths.limit

    def draw(self) -> tuple[Tensor, Tensor]:
        """Query and key lengths, (B,) int64 each, on the CPU. With a shared query the former are all S."""
        generator = torch.Generator().manual_seed(SEED)
        if self.shared_rows is not None:
            query = torch.full((self.sequences,), self.shared_rows)
        else:
            assert self.query is not None
            query = self.query.draw(self.sequences, generator)
        return query, query if self.key is None else self.key.draw(self.sequences, generator)

    @functools.cached_property
    def work(self) -> Work:
        """Rows, pairs, FLOPs and least bytes of the drawn batch, bfloat16."""
        return count_work(self)


@dataclass(frozen=True)
class Work:
    """What any implementation has to do. Bytes count every tensor once: query, key, value, out and lse (float32, a row
    and head) forward; these, dout and the three gradients backward. FLOPs count true lengths: 4 D a visible pair and
    head forward, 10 D backward (the recomputed scores included).
    """

    query_rows: int
    key_rows: int
    pairs: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


def count_work(shape: Shape, element_size: int = 2) -> Work:
    """`Work` of a shape's drawn lengths."""
    q_lengths, kv_lengths = shape.draw()
    out_rows, key_rows = int(q_lengths.sum()), int(kv_lengths.sum())
    query_rows = out_rows if shape.shared_rows is None else shape.shared_rows
    pairs = visible_pairs(q_lengths, kv_lengths, shape.causal, shape.window)
    flops = 4 * shape.heads * shape.head_dim * pairs
    wide, narrow = (heads * shape.head_dim * element_size for heads in (shape.heads, shape.groups))
    tensors = wide * (query_rows + out_rows) + 2 * narrow * key_rows
    lse = 4 * shape.heads * out_rows
    return Work(
        query_rows=query_rows,
        key_rows=key_rows,
        pairs=pairs,
        forward_flops=flops,
        backward_flops=flops * 5 // 2,
        forward_bytes=tensors + lse,
        backward_bytes=2 * tensors + lse,  # q, k, v, out, dout, dq, dk, dv: twice q, k, v, out
    )


def visible_pairs(
    q_lengths: Tensor, kv_lengths: Tensor, causal: bool = False, window: tuple[int | None, int | None] | None = None
) -> int:
    """(query, key) pairs of one head that the mask lets through, over all sequences."""
    left, right = fold_window(causal, window)
    spec = AttentionSpec(1.0, left, right)
    if not spec.masked:
        return int((q_lengths * kv_lengths).sum())
    total = 0
    for n_q, n_kv in zip(q_lengths.tolist(), kv_lengths.tolist(), strict=True):
        position = torch.arange(n_q) + (n_kv - n_q)
        low = torch.zeros_like(position) if left == UNLIMITED else (position - left).clamp(min=0)
        high = torch.full_like(position, n_kv) if right == UNLIMITED else (position + right + 1).clamp(max=n_kv)
        total += int((high - low).clamp(min=0).sum())
    return total


def _self(
    name: str,
    kind: Kind,
    limit: int,
    *,
    suite: str = "self",
    b: int = 1152,
    h: int = 4,
    d: int = 128,
    kv_heads: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Shape:
    lengths = Lengths(kind, limit)
    return Shape(name, suite, b, h, d, query=lengths, kv_heads=kv_heads, causal=causal, window=window)


def _hsp(limit: int, density: float, *, rows: int = 256, h: int = 4, d: int = 128, suite: str = "hsp") -> Shape:
    name = f"hsp_q{rows}_kv{limit}_s{density:g}" + ("" if d == 128 else f"_d{d}")
    return Shape(name, suite, 1024, h, d, key=Lengths("density", limit, density), shared_rows=rows)


def _suites() -> dict[str, tuple[Shape, ...]]:
    own = [_self(f"self_{kind}_{limit}", kind, limit) for limit in (256, 512, 1024, 2048) for kind in ("half", "full")]
    for limit in (512, 2048):
        full = Lengths("full", limit)
        own.append(Shape(f"cross_q{limit}_kv256", "self", 1152, 4, 128, query=full, key=Lengths("full", 256)))
    own += [
        Shape("pma_q32_kv2048half", "self", 1152, 4, 128, query=Lengths("full", 32), key=Lengths("half", 2048)),
        _self("self_logn_2048", "lognormal", 2048),
        _self("self_logn_2048_causal", "lognormal", 2048, causal=True),
        _self("self_half_1024_causal", "half", 1024, causal=True),
        _self("self_half_1024_d64", "half", 1024, h=8, d=64),
        _self("self_half_200_d64", "half", 200, b=4096, d=64),
        _self("self_half_200_d32", "half", 200, b=4096, d=32),
    ]
    hsp = [_hsp(limit, density) for limit in (512, 1024, 2048, 4096) for density in (0.1, 0.5, 0.95)]
    hsp.append(_hsp(1024, 0.5, rows=64))
    giant = Lengths("giant", 65536, rest=64)
    extra = [
        Shape("giant_65536_among_1023x64", "extra", 1024, 4, 128, query=giant),
        _self("self_half_4096_window128", "half", 4096, suite="extra", b=512, window=(128, 128)),
        _self("self_half_16384_window128", "half", 16384, suite="extra", b=128, window=(128, 128)),
        _self("self_half_1024_gqa8_2", "half", 1024, suite="extra", h=8, kv_heads=2),
        _hsp(1024, 0.5, h=8, d=64, suite="extra"),
        _hsp(4096, 0.5, h=8, d=64, suite="extra"),
    ]
    tiny = [
        Shape("tiny_hsp", "smoke", 2, 1, 16, key=Lengths("density", 20, 0.5), shared_rows=8),
        _self("tiny_self_causal", "half", 20, suite="smoke", b=2, h=2, d=16, kv_heads=1, causal=True),
    ]
    return {"hsp": tuple(hsp), "self": tuple(own), "extra": tuple(extra), "smoke": tuple(tiny)}


SUITES = _suites()
"""Rows of every suite. "smoke" is for a machine without a GPU: it shows that the command works, nothing else."""


def select(suite: str, pattern: str | None = None) -> list[Shape]:
    """Shapes of a suite ("hsp", "self", "extra", "smoke", several with commas, or "all" of the first three).

    `pattern` keeps those whose name holds one of its comma-separated parts.

    Raises:
        ValueError: an unknown suite, or no shape left.
    """
    names = ["hsp", "self", "extra"] if suite == "all" else suite.split(",")
    for name in names:
        if name not in SUITES:
            raise ValueError(f"suite is {name!r}, wanted one of {', '.join(SUITES)} or all")
    shapes = [shape for name in names for shape in SUITES[name]]
    if pattern is not None:
        shapes = [shape for shape in shapes if any(part in shape.name for part in pattern.split(","))]
        if not shapes:
            raise ValueError(f"no shape of suite {suite} has {pattern!r} in its name")
    return shapes


def by_name(name: str) -> Shape:
    """The shape of that name, in whatever suite."""
    for shapes in SUITES.values():
        for shape in shapes:
            if shape.name == name:
                return shape
    raise ValueError(f"no shape is called {name!r}")
