"""Kernels written in TLX, one folder an architecture; the portable ones take what these leave."""

from __future__ import annotations

import torch
from torch import Tensor

from gemattn.kernels import triton as portable
from gemattn.kernels.tlx import blackwell, hopper
from gemattn.spec import AttentionSpec

__all__ = ["backward", "forward"]


def _on_blackwell(x: Tensor) -> bool:
    return torch.cuda.get_device_properties(x.device).major == 10


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse)"""
    architecture = blackwell if _on_blackwell(query) else hopper
    return architecture.forward(query, key, value, q_offsets, kv_offsets, schedule, spec)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); grouped heads (G < H) are the portable kernels', which sum over a group's query heads on chip."""
    implementation = portable if _on_blackwell(query) or key.shape[1] != query.shape[1] else hopper
    return implementation.backward(dout, dlse, query, key, value, out, lse, q_offsets, kv_offsets, schedule, spec)
