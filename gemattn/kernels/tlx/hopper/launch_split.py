"""Host side of the backward kernels without sums in memory: the split ones, and the one-tile one."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.backward_key import key_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_query import query_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_tile import one_tile_gradient_kernel
from gemattn.kernels.tlx.hopper.descriptors import describe_split_kernel
from gemattn.kernels.tlx.host import (
    DESCRIPTOR_BYTES,
    WIDEST_WINDOW,
    Gradients,
    multiprocessors,
    statistics_size,
    strides_of,
)
from gemattn.spec import UNLIMITED, AttentionSpec


class QueryTile(NamedTuple):
    """Launch options of the query kernel; 2 x 64 query rows always."""

    block_n: int
    stages_q: int
    stages_kv: int


class KeyTile(NamedTuple):
    """Launch options of the key kernel; 2 x 64 keys and blocks of 64 query rows always."""

    stages_kv: int
    stages_q: int


QUERY = {
    32: (QueryTile(128, 2, 3), QueryTile(64, 2, 4)),
    64: (QueryTile(128, 2, 3), QueryTile(64, 2, 4)),
    128: (QueryTile(128, 1, 2), QueryTile(64, 2, 2)),
}
"""By head size: for sequences of more keys than LENGTH_CLASSES[SHORT_CLASS], and for the others."""
KEY = {32: KeyTile(2, 4), 64: KeyTile(2, 4), 128: KeyTile(2, 3)}
REGISTERS = 240
ONE_TILE_STAGES = {32: 2, 64: 2, 128: 1}
SHORT_CLASS = LENGTH_CLASSES.index(256)
"""Sequences of more keys than this come in blocks of 128 keys, the others in blocks of 64."""
ONE_TILE_CLASS = LENGTH_CLASSES.index(128)
"""In self-attention, sequences of this class on take the kernel that keeps a whole sequence in one tile."""
_NO_LIMIT = 2**31 - 1


def split_backward(
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
    self_attention: bool,
    first_class: int = -1,
) -> None:
    """Write the rows of `gradients` of sequences from `first_class` (-1 or 0) on, -1 all, and of slack. G = H only.

    Deterministic.

    Tensors are such that TMA can describe them. In self-attention both sides have the same lengths.
    """
    dq, dk, dv = gradients
    heads, head_dim = query.shape[1:]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    tiles = QUERY[head_dim]
    statistics = statistics_size(rows, sequences, heads)
    row_lse = torch.empty(statistics, dtype=torch.float32, device=query.device)
    row_delta = torch.empty_like(row_lse)
    table = torch.empty((10 * sequences + 2) * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = (min(spec.window_left, WIDEST_WINDOW), min(spec.window_right, WIDEST_WINDOW))
    strides = tuple(strides_of(x)[1] for x in (query, key, value, dout))
    scales = (spec.scale, spec.scale * math.log2(math.e))
    row_gradients = lse if dlse is None else dlse
    last_class = ONE_TILE_CLASS if self_attention else -1
    options = {
        "HEAD_DIM": head_dim,
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
        "REGISTERS": REGISTERS,
        "num_warps": 4,
        "num_stages": 1,
    }
    q_tiles = lists.q_tiles.shape[0] * heads
    kv_tiles = lists.kv_tiles.shape[0] * heads
    processors = multiprocessors(query.device)
    describe_split_kernel[(sequences + 1,)](
        table,
        query,
        key,
        value,
        out,
        dout,
        dq,
        dk,
        dv,
        row_lse,
        row_delta,
        lists.q_offsets,
        lists.kv_offsets,
        *strides_of(query),
        *strides_of(key),
        *strides_of(value),
        *strides_of(dout),
        sequences,
        statistics,
        window[1],
        heads,
        HEAD_DIM=head_dim,
        BLOCK_M=64,
        LONGER=LENGTH_CLASSES[SHORT_CLASS],
        BLOCK_N=tiles[0].block_n,
        SHORT_BLOCK_N=tiles[1].block_n,
        HAS_RIGHT=has_right,
        num_warps=1,
    )
    for tile, (begin, end) in zip(tiles, ((first_class, SHORT_CLASS), (SHORT_CLASS, last_class)), strict=True):
        query_gradient_kernel[(min(q_tiles, processors),)](
            table,
            lists.q_tiles,
            lists.q_longer,
            lists.q_offsets,
            lse,
            row_gradients,
            row_lse,
            row_delta,
            dq,
            q_tiles,
            heads,
            sequences,
            rows,
            *strides,
            *window,
            *scales,
            BLOCK_N=tile.block_n,
            STAGES_Q=tile.stages_q,
            STAGES_KV=tile.stages_kv,
            BEGIN=begin,
            END=end,
            HAS_DLSE=dlse is not None,
            **options,
        )
    # The list of the keys is in the order of their queries' lengths: only in self-attention is a class a stretch of it.
    key_gradient_kernel[(min(kv_tiles, processors),)](
        table,
        lists.kv_tiles,
        lists.kv_longer,
        lists.q_offsets,
        lists.kv_offsets,
        dk,
        dv,
        kv_tiles,
        heads,
        sequences,
        *strides,
        *window,
        *scales,
        STAGES_KV=KEY[head_dim].stages_kv,
        STAGES_Q=KEY[head_dim].stages_q,
        BEGIN=first_class if self_attention else -1,
        END=last_class,
        KEYS_UP_TO=_NO_LIMIT if first_class < 0 else LENGTH_CLASSES[first_class],
        **options,
    )
    if self_attention:
        one_tile_gradient_kernel[(min(q_tiles, processors),)](
            table,
            lists.q_tiles,
            lists.q_longer,
            lists.q_offsets,
            lse,
            row_gradients,
            dq,
            dk,
            dv,
            q_tiles,
            heads,
            sequences,
            rows,
            *strides,
            *window,
            *scales,
            STAGES=ONE_TILE_STAGES[head_dim],
            BEGIN=ONE_TILE_CLASS,
            HAS_DLSE=dlse is not None,
            **options,
        )
