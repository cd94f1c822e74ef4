"""Host side of the Blackwell backward: describe, prepare, and the gradient kernel once a side."""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import BLOCK, Schedule
from gemattn.kernels.tlx.blackwell.backward import gradient_kernel
from gemattn.kernels.tlx.blackwell.descriptors import describe_backward_kernel
from gemattn.kernels.tlx.host import (
    DESCRIPTOR_BYTES,
    described,
    multiprocessors,
    statistics_size,
    strides_of,
)
from gemattn.kernels.tlx.statistics import prepare
from gemattn.spec import UNLIMITED, AttentionSpec

_TENSORS = 11
"""`descriptors.STATISTICS`: descriptors a sequence."""


class GradientTile(NamedTuple):
    """Launch options of the gradient kernel; 128 own rows and blocks of 64 streamed rows always."""

    stages: int
    piece: int = 32
    """Columns of scores or sums that a thread holds at a time."""
    key_registers: int = 184
    query_registers: int = 152
    """Of the compute groups, which have masks to hold on the key side; the writer gets what they leave."""
    issue_registers: int = 40


GRADIENT = {64: GradientTile(6), 128: GradientTile(3)}
"""By head size."""


@functools.cache
def _describe(head_dim: int, shared_query: bool, has_right: bool) -> Launcher:
    return Launcher(
        describe_backward_kernel, HEAD_DIM=head_dim, SHARED_QUERY=shared_query, HAS_RIGHT=has_right, num_warps=1
    )


@functools.cache
def _gradient(head_dim: int, tile: GradientTile, keys: bool, shared: bool, has_left: bool, has_right: bool) -> Launcher:
    return Launcher(
        gradient_kernel,
        HEAD_DIM=head_dim,
        STAGES=tile.stages,
        PIECE=tile.piece,
        KEYS=keys,
        SHARED=shared,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        COMPUTE_REGISTERS=tile.key_registers if keys else tile.query_registers,
        ISSUE_REGISTERS=tile.issue_registers,
        num_warps=4,
        num_stages=1,
    )


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
    """(dq, dk, dv) in the input dtype, every row written; always deterministic. G = H only."""
    lists = Schedule(*schedule)
    query, key, value, dout = described(query), described(key), described(value), described(dout)
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    _, heads, head_dim = query.shape
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (key, value))
    processors = multiprocessors(query.device)
    blocks = -(-query.shape[0] // BLOCK) * heads
    # With a shared query all programs run at once: one that had to wait would double the time.
    chunks = min(sequences, max(1, processors // max(blocks, 1)))
    shares = (chunks,) if spec.shared_query else ()
    dq = query.new_empty((*shares, *query.shape), dtype=torch.float32 if spec.shared_query else query.dtype)
    statistics = statistics_size(rows, sequences, heads)
    row_lse, row_delta = torch.empty((2, statistics), dtype=torch.float32, device=query.device)
    table = torch.empty((_TENSORS * sequences + 2) * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = spec.kernel_window
    strides = [strides_of(x) for x in (query, key, value, dout)]
    q_tiles, kv_tiles = lists.q_tiles.shape[0] * heads, lists.kv_tiles.shape[0] * heads
    tile = GRADIENT[head_dim]
    with torch.cuda.device_of(query):
        _describe(head_dim, spec.shared_query, has_right)(
            (sequences + 1,),
            (table, query, key, value, dout, dq, dk, dv, row_lse, row_delta, lists.q_offsets, lists.kv_offsets),
            (*itertools.chain.from_iterable(strides), sequences, statistics, window[1], heads),
        )
        row_gradients = lse if dlse is None else dlse
        prepare(head_dim, dlse is not None, has_right, -1)(
            (q_tiles,),
            (lists.q_tiles, lists.q_longer, lists.q_offsets, out, dout, lse, row_gradients, row_lse, row_delta),
            (q_tiles, heads, sequences, rows, *strides[3], window[1]),
        )
        for keys in (True, False):
            shared = spec.shared_query and not keys
            num_tiles = kv_tiles if keys else q_tiles
            grid = (chunks, blocks) if shared else (min(num_tiles, processors),)
            if 0 in grid:
                continue
            _gradient(head_dim, tile, keys, shared, has_left, has_right)(
                grid,
                (
                    table,
                    lists.kv_tiles if keys else lists.q_tiles,
                    lists.kv_offsets if keys else lists.q_offsets,
                    lists.q_offsets,
                    lists.kv_offsets,
                    row_lse,
                    row_delta,
                    dk if keys else dq,
                    dv if keys else dq,
                    query,
                ),
                (
                    num_tiles,
                    heads,
                    sequences,
                    query.shape[0],
                    *[head_stride for _, head_stride in strides],
                    *window,
                    spec.scale,
                    spec.scale * math.log2(math.e),
                ),
            )
    return dq.sum(0).to(query.dtype) if spec.shared_query else dq, dk, dv
