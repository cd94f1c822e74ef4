"""Kernels written in TLX, one folder an architecture; the portable ones take what these leave."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from gemattn.kernels import triton as portable
from gemattn.kernels.tlx import blackwell, hopper
from gemattn.spec import AttentionSpec

__all__ = ["backward", "forward"]


def _architecture(x: Tensor) -> ModuleType:
    return blackwell if torch.cuda.get_device_properties(x.device).major == 10 else hopper


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
    return _architecture(query).forward(query, key, value, q_offsets, kv_offsets, schedule, spec)


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
    implementation = _architecture(query) if key.shape[1] == query.shape[1] else portable
    return implementation.backward(dout, dlse, query, key, value, out, lse, q_offsets, kv_offsets, schedule, spec)
