"""What the host sides of the TLX kernels share."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import Schedule
from gemattn.kernels.tlx.descriptors import describe_forward_kernel
from gemattn.spec import AttentionSpec

DESCRIPTOR_BYTES = 128
WIDEST_WINDOW = 1 << 30
"""No sequence is longer: a wider window would only overflow the kernels' 32-bit positions."""

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
    strides = ((x.stride(0), rows), (x.stride(1), heads))
    regular = x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 and s > 0 for s, n in strides if n > 1)
    regular = regular and (heads - 1) * x.stride(1) + head_dim < MOST_COLUMNS
    return x if regular and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor) -> tuple[int, int]:
    """(row, head) strides; a dimension of size 1 may hold any stride, and TMA would mind."""
    rows, heads, head_dim = x.shape
    return (x.stride(0) if rows > 1 else heads * head_dim, x.stride(1) if heads > 1 else head_dim)


def forward_outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
    *,
    block_m: int,
    longer: int,
    block_n: int,
    short_block_n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """out (rows, H, D) and lse (H, rows), neither written yet, and the table of descriptors, which a kernel fills.

    Blocks are of `block_n` keys in sequences of more keys than `longer`, and of `short_block_n` in the others.
    """
    heads, head_dim = query.shape[1:]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = query.shape[0] * sequences if spec.shared_query else query.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    table = torch.empty(4 * sequences * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    if sequences:
        describe_forward_kernel[(sequences,)](
            table,
            query,
            key,
            value,
            out,
            lists.q_offsets,
            lists.kv_offsets,
            *strides_of(query),
            *strides_of(key),
            *strides_of(value),
            sequences,
            heads,
            key.shape[1],
            HEAD_DIM=head_dim,
            BLOCK_M=block_m,
            LONGER=longer,
            BLOCK_N=block_n,
            SHORT_BLOCK_N=short_block_n,
            SHARED_QUERY=spec.shared_query,
            num_warps=1,
        )
    return out, lse, table
