"""Generators of jagged inputs for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class JaggedInputs:
    """The tensors of one call and the gradients that come in; names as in `gemattn.jagged_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor | None
    kv_offsets: Tensor
    dout: Tensor | None = None
    dlse: Tensor | None = None

    @property
    def shared_query(self) -> bool:
        """Whether query is (S, H, D)."""
        return self.q_offsets is None

    def to(self, device: torch.device | str) -> JaggedInputs:
        """The same on another device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make_inputs(
    q_lengths: Sequence[int] | None,
    kv_lengths: Sequence[int] | None = None,
    *,
    shared_rows: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    offsets_dtype: torch.dtype = torch.int64,
    slack: int = 0,
    slack_value: float = float("nan"),
    with_dlse: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> JaggedInputs:
    """Normal inputs and incoming gradients for the given lengths.

    Args:
        q_lengths: query lengths, or None with `shared_rows`.
        kv_lengths: key lengths; default the query lengths (self-attention, one offsets tensor for both).
        shared_rows: S of a shared query.
        slack: rows past ``offsets[-1]`` of query, key, value and (without a shared query) dout, filled with
            `slack_value`.
        with_dlse: whether a gradient for lse comes in too.
    """
    generator = torch.Generator().manual_seed(seed)
    if (q_lengths is None) != (shared_rows is not None):
        raise ValueError("give q_lengths or shared_rows, one of the two")

    def offsets(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=offsets_dtype, device=device)

    def tokens(rows: int, count: int, extra: int) -> Tensor:
        x = torch.randn(rows + extra, count, head_dim, generator=generator)
        x[rows:] = slack_value
        return x.to(device, dtype)

    kv_heads = heads if kv_heads is None else kv_heads
    q_offsets = None if q_lengths is None else offsets(q_lengths)
    if kv_lengths is None:
        if q_lengths is None:
            raise ValueError("give kv_lengths with shared_rows")
        kv_lengths, kv_offsets = q_lengths, q_offsets
    else:
        kv_offsets = offsets(kv_lengths)
    assert kv_offsets is not None
    if q_lengths is None:
        assert shared_rows is not None
        query, rows, extra = tokens(shared_rows, heads, 0), shared_rows * len(kv_lengths), 0
    else:
        query, rows, extra = tokens(sum(q_lengths), heads, slack), sum(q_lengths), slack
    key, value = (tokens(sum(kv_lengths), kv_heads, slack) for _ in range(2))
    dout = tokens(rows, heads, extra)
    dlse = None
    if with_dlse:
        dlse = torch.randn(heads, rows + extra, generator=generator)
        dlse[:, rows:] = slack_value
        dlse = dlse.to(device, torch.promote_types(dtype, torch.float32))
    return JaggedInputs(query, key, value, q_offsets, kv_offsets, dout, dlse)
