"""Host side of the fused backward: allocate, choose tiles, launch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.backward_fused import fused_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_scratch import add_partials_kernel, finish_kernel
from gemattn.kernels.tlx.hopper.descriptors import describe_fused_kernel
from gemattn.kernels.tlx.host import (
    DESCRIPTOR_BYTES,
    WIDEST_WINDOW,
    Gradients,
    multiprocessors,
    statistics_size,
    strides_of,
)
from gemattn.kernels.tlx.statistics import prepare_kernel
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
    heads, head_dim = query.shape[1:]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    tile = FUSED[head_dim]
    walk = (tile.walk_rows, tile.walk_keys)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = (min(spec.window_left, WIDEST_WINDOW), min(spec.window_right, WIDEST_WINDOW))
    statistics = statistics_size(rows, sequences, heads)
    stat = torch.empty(statistics, dtype=torch.float32, device=query.device)
    delta = torch.empty_like(stat)
    query_blocks = -(-query.shape[0] // _BLOCK)
    chunks = max(1, multiprocessors(query.device) // heads)
    if spec.shared_query:
        # A program adds to a block of its own; no other pass clears it.
        blocks = chunks * heads * query_blocks
        scratch = torch.zeros(blocks * _BLOCK * head_dim, dtype=torch.float32, device=query.device)
        programs = chunks * heads
        first = rest = lists.kv_tiles
        launches = [(lists.kv_tiles, False)]
    else:
        scratch = torch.empty(statistics * head_dim, dtype=torch.float32, device=query.device)
        programs = min(lists.kv_tiles.shape[0] * heads, multiprocessors(query.device))
        first, rest = torch.empty_like(lists.kv_tiles), torch.empty_like(lists.kv_tiles)
        launches = [(first, True), (rest, False)]
    table = torch.empty((6 * sequences + 3) * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    q_tiles = lists.q_tiles.shape[0] * heads
    passes = min(q_tiles, 16 * multiprocessors(query.device))
    describe_fused_kernel[(sequences + (1 if spec.shared_query else 2),)](
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
        *strides_of(query),
        *strides_of(key),
        *strides_of(value),
        *strides_of(dout),
        sequences,
        statistics,
        max(1, scratch.numel() // _COLUMNS),
        window[1],
        lists.kv_tiles.shape[0],
        *walk,
        -1 if last_class < 0 else LENGTH_CLASSES[last_class],
        heads,
        HEAD_DIM=head_dim,
        BLOCK=_BLOCK,
        SCRATCH_BLOCK=_BLOCK * head_dim // _COLUMNS,
        SCRATCH_COLUMNS=_COLUMNS,
        SHARED_QUERY=spec.shared_query,
        HAS_RIGHT=has_right,
        num_warps=1,
    )
    prepare_kernel[(passes,)](
        lists.q_tiles,
        lists.q_longer,
        lists.q_offsets,
        out,
        dout,
        lse,
        lse if dlse is None else dlse,
        stat,
        delta,
        q_tiles,
        heads,
        sequences,
        rows,
        *strides_of(dout),
        window[1],
        HEAD_DIM=head_dim,
        HAS_DLSE=dlse is not None,
        HAS_RIGHT=has_right,
        END=last_class,
        num_warps=4,
        num_stages=1,
    )
    for tiles, first_tiles in launches:
        fused_gradient_kernel[(programs,)](
            table,
            tiles,
            lists.q_offsets,
            lists.kv_offsets,
            dk,
            dv,
            tiles.shape[0] * heads,
            heads,
            sequences,
            query_blocks,
            int(first_tiles),
            *(strides_of(x)[1] for x in (query, key, value, dout)),
            *window,
            *walk,
            spec.scale,
            spec.scale * math.log2(math.e),
            HEAD_DIM=head_dim,
            STAGES_K=tile.stages_k,
            STAGES_Q=tile.stages_q,
            EARLY_DV=tile.early_dv,
            SHARED_QUERY=spec.shared_query,
            HAS_LEFT=has_left,
            HAS_RIGHT=has_right,
            REGISTERS=tile.registers,
            num_warps=4,
            num_stages=1,
        )
    if not spec.shared_query:
        finish_kernel[(passes,)](
            lists.q_tiles,
            lists.q_longer,
            lists.q_offsets,
            scratch,
            dq,
            q_tiles,
            heads,
            sequences,
            window[1],
            spec.scale,
            HEAD_DIM=head_dim,
            HAS_RIGHT=has_right,
            END=last_class,
            num_warps=4,
            num_stages=1,
        )
    elif query_blocks:
        add_partials_kernel[(query_blocks * heads * 4,)](
            scratch,
            dq,
            heads,
            chunks,
            query.shape[0],
            spec.scale,
            HEAD_DIM=head_dim,
            num_warps=4,
            num_stages=1,
        )
