"""The tensors of one shape on one device, in the forms that the providers take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemattn.bench.shapes import SEED, Shape


@dataclass(frozen=True)
class Case:
    """Inputs of one shape. query, key, value are leaves that require gradients; dout comes in for backward."""

    shape: Shape
    query: Tensor
    """(T_q, H, D), or (S, H, D) with a shared query."""
    key: Tensor
    value: Tensor
    dout: Tensor
    """(rows of out, H, D)."""
    q_lengths: Tensor
    """(B,) int64 on the CPU, all S with a shared query; kv_lengths likewise."""
    kv_lengths: Tensor
    out_offsets: Tensor
    """(B + 1,) int64 on the device: the rows of out of each sequence."""
    kv_offsets: Tensor

    @property
    def q_offsets(self) -> Tensor | None:
        """As `gemattn.jagged_attention` takes them: None with a shared query."""
        return None if self.shape.shared_rows is not None else self.out_offsets

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value."""
        return self.query, self.key, self.value


def make_case(shape: Shape, device: torch.device, dtype: torch.dtype) -> Case:
    """Draw a shape's inputs. Lengths come from the CPU's generator, values from the device's, in the order q, k, v,
    dout: a batch of billions of elements takes minutes on a CPU, and its values do not matter for the time.
    """
    q_lengths, kv_lengths = shape.draw()
    work = shape.work
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, shape.head_dim, generator=generator, device=device, dtype=dtype)

    query, key, value = (
        normal(rows, heads).requires_grad_()
        for rows, heads in (
            (work.query_rows, shape.heads),
            (work.key_rows, shape.groups),
            (work.key_rows, shape.groups),
        )
    )
    return Case(
        shape=shape,
        query=query,
        key=key,
        value=value,
        dout=normal(int(q_lengths.sum()), shape.heads),
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        out_offsets=offsets_of(q_lengths).to(device),
        kv_offsets=offsets_of(kv_lengths).to(device),
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """(B + 1,) prefix sums of (B,) lengths."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
