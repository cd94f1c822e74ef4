"""What the host sides of the TLX kernels share."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import Schedule
from gemattn.kernels.tlx.descriptors import describe_forward_kernel
from gemattn.spec import AttentionSpec

DESCRIPTOR_BYTES = 128
MOST_COLUMNS = 1 << 31
"""Columns and coordinates that TMA counts in 32 bits."""


class Gradients(NamedTuple):
    """What backward fills; each kernel writes the rows of its own sequences."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def statistics_size(rows: int, sequences: int, heads: int) -> int:
    """Elements of a scratch of row statistics, in blocks of 64 rows that never straddle sequences.

    Raises ValueError where TMA could not address them.
    """
    size = (rows // 64 + sequences + 1) * heads * 64
    if size >= MOST_COLUMNS:
        raise ValueError(f"{sequences} sequences of {heads} heads are too many for one call: split the batch")
    return size


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that a persistent grid has on the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def described(x: Tensor) -> Tensor:
    """`x`, or a copy that TMA can describe: gradients come in any layout, expanded from a scalar among others."""
    rows, heads, head_dim = x.shape
    row_stride, head_stride, stride = x.stride()
    size = x.element_size()
    if (
        stride == 1
        and (rows <= 1 or (row_stride > 0 and row_stride * size % 16 == 0))
        and (heads <= 1 or (head_stride > 0 and head_stride * size % 16 == 0))
        and (heads - 1) * head_stride + head_dim < MOST_COLUMNS
        and x.data_ptr() % 16 == 0
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor) -> tuple[int, int]:
    """(row, head) strides; a dimension of size 1 may hold any stride, and TMA would mind."""
    rows, heads, head_dim = x.shape
    row_stride, head_stride, _ = x.stride()
    return (row_stride if rows > 1 else heads * head_dim, head_stride if heads > 1 else head_dim)


class ForwardBlocks(NamedTuple):
    """Rows of the blocks that the forward's descriptors are made for."""

    block_m: int
    longer: int
    """In sequences of more keys than this, blocks are of `block_n` keys, in the others of `short_block_n`."""
    block_n: int
    short_block_n: int


@functools.cache
def _describe_forward(head_dim: int, blocks: ForwardBlocks, shared_query: bool) -> Launcher:
    return Launcher(
        describe_forward_kernel,
        HEAD_DIM=head_dim,
        BLOCK_M=blocks.block_m,
        LONGER=blocks.longer,
        BLOCK_N=blocks.block_n,
        SHORT_BLOCK_N=blocks.short_block_n,
        SHARED_QUERY=shared_query,
        num_warps=1,
    )


def forward_outputs(
    query: Tensor, key: Tensor, value: Tensor, lists: Schedule, spec: AttentionSpec, blocks: ForwardBlocks
) -> tuple[Tensor, Tensor, Tensor]:
    """out (rows, H, D) and lse (H, rows), neither written yet, and the table of descriptors, which a kernel fills."""
    rows, heads, head_dim = query.shape
    sequences = lists.kv_offsets.shape[0] - 1
    if spec.shared_query:
        rows *= sequences
    device = query.device
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=device)
    table = torch.empty((4 * sequences + 1) * DESCRIPTOR_BYTES, dtype=torch.int8, device=device)
    _describe_forward(head_dim, blocks, spec.shared_query)(
        (max(1, sequences),),
        (table, query, key, value, out, lists.q_offsets, lists.kv_offsets),
        (*strides_of(query), *strides_of(key), *strides_of(value), sequences, heads, key.shape[1]),
    )
    return out, lse, table
