"""Jagged inputs and a per-sequence reference for the tests of modules."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gemattn.testing import attend


def offsets_of(lengths, dtype=torch.int64) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def tokens(lengths, width, *, slack=0, seed=0, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """(values, offsets); `slack` rows of NaN past the last sequence."""
    values = torch.randn(sum(lengths) + slack, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    values[sum(lengths) :] = float("nan")
    return values, offsets_of(lengths)


def split(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def attend_one(module, x: Tensor, context: Tensor | None = None, turn=None) -> Tensor:
    """One sequence through a `JaggedAttention`'s weights: (n, E), (m, C) -> (n, E).

    `turn` is (query, key) -> (query, key) on (n, H, D) heads, for rotary angles.
    """
    context = x if context is None else context
    query, key, value = module.q_proj(x), module.k_proj(context), module.v_proj(context)
    query, key, value = (y.unflatten(-1, (-1, module.head_dim)) for y in (query, key, value))
    if module.q_norm is not None:
        query, key = (
            y * torch.rsqrt((y * y).mean(-1, keepdim=True) + norm.eps) * norm.weight
            for y, norm in ((query, module.q_norm), (key, module.k_norm))
        )
    if turn is not None:
        query, key = turn(query, key)
    out, _ = attend(query, key, value, causal=module.causal, window=module.window)
    return module.out_proj(out.flatten(1))


def gradients_of(loss: Tensor, inputs) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(inputs)))


def assert_all_close(actual, wanted) -> None:
    """float64 in another order of summation."""
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-9, atol=1e-11)
