"""Host side of the fused backward: allocate, choose tiles, launch."""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.backward_fused import fused_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_scratch import add_partials_kernel, finish_kernel
from gemattn.kernels.tlx.hopper.descriptors import describe_fused_kernel
from gemattn.kernels.tlx.host import (
    DESCRIPTOR_BYTES,
    Gradients,
    multiprocessors,
    statistics_size,
    strides_of,
)
from gemattn.kernels.tlx.statistics import prepare
from gemattn.spec import UNLIMITED, AttentionSpec

_BLOCK = 64
"""Query rows of a block of the scratch."""
_COLUMNS = 32
"""`backward_scratch.SCRATCH_COLUMNS`."""


class FusedTile(NamedTuple):
    """Launch options of the fused backward; 2 x 64 keys and blocks of 64 query rows always."""

    stages_k: int
    """At least 2: a tile's keys are freed in the next tile."""
    stages_q: int
    registers: int
    early_dv: bool
    """Start dv before dp is there: more overlap, more registers."""
    walk_rows: int
    """Sequences of at most so many queries and `walk_keys` keys are walked: every program has one, of one head, and its
    rows and their dq, 8 D bytes a row, must stay in the cache from tile to tile."""
    walk_keys: int
    """A program must not have so many keys that others wait for it."""


FUSED = {
    32: FusedTile(2, 4, 240, early_dv=True, walk_rows=1024, walk_keys=4096),
    64: FusedTile(2, 4, 240, early_dv=True, walk_rows=512, walk_keys=4096),
    128: FusedTile(2, 2, 240, early_dv=False, walk_rows=256, walk_keys=4096),
}


@functools.cache
def _describe(head_dim: int, shared_query: bool, has_right: bool) -> Launcher:
    return Launcher(
        describe_fused_kernel,
        HEAD_DIM=head_dim,
        BLOCK=_BLOCK,
        SCRATCH_BLOCK=_BLOCK * head_dim // _COLUMNS,
        SCRATCH_COLUMNS=_COLUMNS,
        SHARED_QUERY=shared_query,
        HAS_RIGHT=has_right,
        num_warps=1,
    )


@functools.cache
def _gradient(head_dim: int, tile: FusedTile, shared_query: bool, has_left: bool, has_right: bool) -> Launcher:
    return Launcher(
        fused_gradient_kernel,
        HEAD_DIM=head_dim,
        STAGES_K=tile.stages_k,
        STAGES_Q=tile.stages_q,
        EARLY_DV=tile.early_dv,
        SHARED_QUERY=shared_query,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        REGISTERS=tile.registers,
        num_warps=4,
        num_stages=1,
    )


@functools.cache
def _finish(head_dim: int, has_right: bool, last_class: int) -> Launcher:
    return Launcher(finish_kernel, HEAD_DIM=head_dim, HAS_RIGHT=has_right, END=last_class, num_warps=4, num_stages=1)


@functools.cache
def _add_partials(head_dim: int) -> Launcher:
    return Launcher(add_partials_kernel, HEAD_DIM=head_dim, num_warps=4, num_stages=1)


def fused_backward(
    gradients: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
    *,
    last_class: int = -1,
) -> None:
    """Write the rows of `gradients` of sequences up to `last_class`; of all and of slack where that is -1. G = H.

    Tensors are such that TMA can describe them; a mask comes with a shared query alone, which is deterministic here.
    """
    dq, dk, dv = gradients
    query_rows, heads, head_dim = query.shape
    device = query.device
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    records = lists.kv_tiles.shape[0]
    tile = FUSED[head_dim]
    walk = (tile.walk_rows, tile.walk_keys)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = spec.kernel_window
    processors = multiprocessors(device)
    statistics = statistics_size(rows, sequences, heads)
    stat = torch.empty(statistics, dtype=torch.float32, device=device)
    delta = torch.empty_like(stat)
    query_blocks = -(-query_rows // _BLOCK)
    chunks = max(1, processors // heads)
    if spec.shared_query:
        # A program adds to a block of its own; no other pass clears it.
        blocks = chunks * heads * query_blocks
        scratch = torch.zeros(blocks * _BLOCK * head_dim, dtype=torch.float32, device=device)
        programs = chunks * heads
        first = rest = lists.kv_tiles
        launches = [(lists.kv_tiles, False)]
    else:
        scratch = torch.empty(statistics * head_dim, dtype=torch.float32, device=device)
        programs = min(records * heads, processors)
        first, rest = torch.empty_like(lists.kv_tiles), torch.empty_like(lists.kv_tiles)
        launches = [(first, True), (rest, False)]
    table = torch.empty((6 * sequences + 3) * DESCRIPTOR_BYTES, dtype=torch.int8, device=device)
    q_tiles = lists.q_tiles.shape[0] * heads
    passes = min(q_tiles, 16 * processors)
    strides = [strides_of(x) for x in (query, key, value, dout)]
    _describe(head_dim, spec.shared_query, has_right)(
        (sequences + (1 if spec.shared_query else 2),),
        (
            table,
            query,
            dout,
            key,
            value,
            dk,
            dv,
            stat,
            delta,
            scratch,
            lists.kv_tiles,
            first,
            rest,
            lists.q_offsets,
            lists.kv_offsets,
        ),
        (
            *itertools.chain.from_iterable(strides),
            sequences,
            statistics,
            max(1, scratch.numel() // _COLUMNS),
            window[1],
            records,
            *walk,
            -1 if last_class < 0 else LENGTH_CLASSES[last_class],
            heads,
        ),
    )
    row_gradients = lse if dlse is None else dlse
    prepare(head_dim, dlse is not None, has_right, last_class, num_stages=1)(
        (passes,),
        (lists.q_tiles, lists.q_longer, lists.q_offsets, out, dout, lse, row_gradients, stat, delta),
        (q_tiles, heads, sequences, rows, *strides[3], window[1]),
    )
    gradient = _gradient(head_dim, tile, spec.shared_query, has_left, has_right)
    for tiles, first_tiles in launches:
        gradient(
            (programs,),
            (table, tiles, lists.q_offsets, lists.kv_offsets, dk, dv),
            (
                records * heads,
                heads,
                sequences,
                query_blocks,
                int(first_tiles),
                *[head_stride for _, head_stride in strides],
                *window,
                *walk,
                spec.scale,
                spec.scale * math.log2(math.e),
            ),
        )
    if not spec.shared_query:
        _finish(head_dim, has_right, last_class)(
            (passes,),
            (lists.q_tiles, lists.q_longer, lists.q_offsets, scratch, dq),
            (q_tiles, heads, sequences, window[1], spec.scale),
        )
    elif query_blocks:
        _add_partials(head_dim)((query_blocks * heads * 4,), (scratch, dq), (heads, chunks, query_rows, spec.scale))
