"""What backward's kernels leave for one another, and the launch that describes all tensors."""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import Schedule
from gemattn.kernels.tlx.hopper.descriptors import describe_backward_kernel
from gemattn.kernels.tlx.host import DESCRIPTOR_BYTES, Gradients, multiprocessors, statistics_size, strides_of
from gemattn.spec import UNLIMITED, AttentionSpec

BLOCK = 64
"""Query rows of a block of statistics and of the scratch."""
_COLUMNS = 32
"""`backward_scratch.SCRATCH_COLUMNS`."""


class Workspace(NamedTuple):
    """Memory of one backward. Both ways share the statistics: a sequence takes one way, and has blocks of its own."""

    lse: Tensor
    """(rows,) float32, base 2, see `statistics.row_statistics`. Not written yet, as `delta`."""
    delta: Tensor
    scratch: Tensor
    """(values,) float32 sums of dq of the fused way, see `backward_scratch`. Zeros with a shared query, else not
    written yet."""
    fused_table: Tensor
    """Descriptors for the fused kernel. Anything where that way is not taken, as `scratch`."""
    split_table: Tensor
    """Descriptors for the split kernels. Anything where that way is not taken."""


class KeyBlocks(NamedTuple):
    """Keys of a block of the query kernel."""

    longer: int
    """In sequences of more keys than this, blocks are of `block_n` keys, in the others of `short_block_n`."""
    block_n: int
    short_block_n: int


@functools.cache
def _describe(
    head_dim: int, key_blocks: KeyBlocks, fused: bool, split: bool, shared_query: bool, has_right: bool
) -> Launcher:
    return Launcher(
        describe_backward_kernel,
        HEAD_DIM=head_dim,
        BLOCK=BLOCK,
        LONGER=key_blocks.longer,
        BLOCK_N=key_blocks.block_n,
        SHORT_BLOCK_N=key_blocks.short_block_n,
        SCRATCH_BLOCK=BLOCK * head_dim // _COLUMNS,
        SCRATCH_COLUMNS=_COLUMNS,
        FUSED=fused,
        SPLIT=split,
        SHARED_QUERY=shared_query,
        HAS_RIGHT=has_right,
        num_warps=1,
    )


def shared_query_chunks(device: torch.device, heads: int) -> int:
    """Programs of the fused kernel for one head of a shared query, each with a scratch of its own."""
    return max(1, multiprocessors(device) // heads)


def describe_backward(
    gradients: Gradients,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
    key_blocks: KeyBlocks,
    *,
    fused: bool,
    split: bool,
) -> Workspace:
    """Memory for the ways that a call takes, one or both, and the descriptors of its tensors, in one launch."""
    query_rows, heads, head_dim = query.shape
    device = query.device
    sequences = lists.kv_offsets.shape[0] - 1
    statistics = statistics_size(out.shape[0], sequences, heads)
    lse = torch.empty(statistics, dtype=torch.float32, device=device)
    delta = torch.empty_like(lse)
    scratch = lse
    if fused and spec.shared_query:
        # A program adds to a block of its own; no other pass clears it.
        blocks = shared_query_chunks(device, heads) * heads * -(-query_rows // BLOCK)
        scratch = torch.zeros(blocks * BLOCK * head_dim, dtype=torch.float32, device=device)
    elif fused:
        scratch = torch.empty(statistics * head_dim, dtype=torch.float32, device=device)
    tables = [
        torch.empty(descriptors * DESCRIPTOR_BYTES, dtype=torch.int8, device=device)
        for descriptors, taken in ((6 * sequences + 5, fused), (10 * sequences + 5, split))
        if taken
    ]
    _describe(head_dim, key_blocks, fused, split, spec.shared_query, spec.window_right != UNLIMITED)(
        (sequences + 1, len(tables)),
        (
            tables[0],
            tables[-1],
            query,
            key,
            value,
            out,
            dout,
            *gradients,
            lse,
            delta,
            scratch,
            lists.q_offsets,
            lists.kv_offsets,
        ),
        (
            *itertools.chain.from_iterable(strides_of(x) for x in (query, key, value, dout)),
            sequences,
            statistics,
            max(1, scratch.numel() // _COLUMNS),
            spec.kernel_window[1],
            heads,
        ),
    )
    return Workspace(lse, delta, scratch, tables[0], tables[-1])
