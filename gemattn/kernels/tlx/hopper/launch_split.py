"""Host side of the backward kernels without sums in memory: the split ones, and the one-tile one."""

import functools
import math
from typing import NamedTuple

from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.backward_key import key_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_query import query_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_tile import one_tile_gradient_kernel
from gemattn.kernels.tlx.hopper.workspace import KeyBlocks, Workspace
from gemattn.kernels.tlx.host import Gradients, multiprocessors, strides_of
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
"""By head size: for sequences of more keys than QUERY_LONGER, and for the others."""
QUERY_LONGER = 256
"""One of LENGTH_CLASSES."""
KEY = {32: KeyTile(2, 4), 64: KeyTile(2, 4), 128: KeyTile(2, 3)}
REGISTERS = 240
ONE_TILE_STAGES = {32: 2, 64: 2, 128: 1}
ONE_TILE_CLASS = LENGTH_CLASSES.index(128)
"""In self-attention, sequences of this class on take the kernel that keeps a whole sequence in one tile."""
_NO_LIMIT = 2**31 - 1


def query_key_blocks(head_dim: int) -> KeyBlocks:
    """Keys of a block of the query kernel."""
    return KeyBlocks(QUERY_LONGER, *[tile.block_n for tile in QUERY[head_dim]])


class _Options(NamedTuple):
    """Constants that all three kernels take."""

    HEAD_DIM: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    REGISTERS: int = REGISTERS
    num_warps: int = 4
    num_stages: int = 1


@functools.cache
def _query(options: _Options, tile: QueryTile, begin: int, end: int, has_dlse: bool) -> Launcher:
    return Launcher(
        query_gradient_kernel,
        BLOCK_N=tile.block_n,
        STAGES_Q=tile.stages_q,
        STAGES_KV=tile.stages_kv,
        BEGIN=begin,
        END=end,
        HAS_DLSE=has_dlse,
        **options._asdict(),
    )


@functools.cache
def _key(options: _Options, tile: KeyTile, begin: int, end: int, keys_up_to: int) -> Launcher:
    return Launcher(
        key_gradient_kernel,
        STAGES_KV=tile.stages_kv,
        STAGES_Q=tile.stages_q,
        BEGIN=begin,
        END=end,
        KEYS_UP_TO=keys_up_to,
        **options._asdict(),
    )


@functools.cache
def _one_tile(options: _Options, stages: int, has_dlse: bool) -> Launcher:
    return Launcher(
        one_tile_gradient_kernel,
        STAGES=stages,
        BEGIN=ONE_TILE_CLASS,
        HAS_DLSE=has_dlse,
        **options._asdict(),
    )


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
    workspace: Workspace,
    *,
    self_attention: bool,
    first_class: int = -1,
) -> None:
    """Write the rows of `gradients` of sequences from `first_class` (-1 or 0) on, -1 all, and of slack. G = H only.

    Deterministic.

    Tensors are such that TMA can describe them. In self-attention both sides have the same lengths.
    """
    dq, dk, dv = gradients
    _, heads, head_dim = query.shape
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    tiles = QUERY[head_dim]
    table = workspace.split_table
    options = _Options(head_dim, spec.window_left != UNLIMITED, spec.window_right != UNLIMITED)
    window = spec.kernel_window
    strides = [strides_of(x) for x in (query, key, value, dout)]
    rest = (*[head_stride for _, head_stride in strides], *window, spec.scale, spec.scale * math.log2(math.e))
    row_gradients = lse if dlse is None else dlse
    last_class = ONE_TILE_CLASS if self_attention else -1
    q_tiles = lists.q_tiles.shape[0] * heads
    kv_tiles = lists.kv_tiles.shape[0] * heads
    processors = multiprocessors(query.device)
    q_grid = (min(q_tiles, processors),)
    q_lists = (table, lists.q_tiles, lists.q_longer, lists.q_offsets, lse, row_gradients)
    short_class = LENGTH_CLASSES.index(QUERY_LONGER)
    for tile, begin, end in ((tiles[0], first_class, short_class), (tiles[1], short_class, last_class)):
        if begin == end >= 0:
            continue  # no sequence is in no class
        _query(options, tile, begin, end, dlse is not None)(
            q_grid, (*q_lists, workspace.lse, workspace.delta, dq), (q_tiles, heads, sequences, rows, *rest)
        )
    # The list of the keys is in the order of their queries' lengths: only in self-attention is a class a stretch of it.
    begin = first_class if self_attention else -1
    keys_up_to = _NO_LIMIT if first_class < 0 else LENGTH_CLASSES[first_class]
    _key(options, KEY[head_dim], begin, last_class, keys_up_to)(
        (min(kv_tiles, processors),),
        (table, lists.kv_tiles, lists.kv_longer, lists.q_offsets, lists.kv_offsets, dk, dv),
        (kv_tiles, heads, sequences, *rest),
    )
    if self_attention:
        _one_tile(options, ONE_TILE_STAGES[head_dim], dlse is not None)(
            q_grid, (*q_lists, dq, dk, dv), (q_tiles, heads, sequences, rows, *rest)
        )
