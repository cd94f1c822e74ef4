"""Host side of the fused backward: choose tiles, launch."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.backward_fused import fused_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_scratch import add_partials_kernel, finish_kernel, prepare_fused_kernel
from gemattn.kernels.tlx.hopper.workspace import BLOCK, Workspace, shared_query_chunks
from gemattn.kernels.tlx.host import Gradients, multiprocessors, strides_of
from gemattn.kernels.tlx.statistics import prepare
from gemattn.spec import UNLIMITED, AttentionSpec

_SPLITTERS = 64
"""Programs that split the list of key tiles, at most: each counts what stands before its stretch of the list."""
_STRETCH = 512
"""Records of a stretch, while that many programs are enough."""


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
def _prepare_fused(head_dim: int, has_dlse: bool, last_class: int) -> Launcher:
    return Launcher(
        prepare_fused_kernel, HEAD_DIM=head_dim, HAS_DLSE=has_dlse, END=last_class, num_warps=4, num_stages=1
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
    workspace: Workspace,
    *,
    last_class: int = -1,
) -> None:
    """Write the rows of `gradients` of sequences up to `last_class`; of all and of slack where that is -1. G = H.

    Tensors are such that TMA can describe them; a mask comes with a shared query alone, which is deterministic here.
    """
    dq, dk, dv = gradients
    query_rows, heads, head_dim = query.shape
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    records = lists.kv_tiles.shape[0]
    tile = FUSED[head_dim]
    walk = (tile.walk_rows, tile.walk_keys)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = spec.kernel_window
    processors = multiprocessors(query.device)
    query_blocks = -(-query_rows // BLOCK)
    q_tiles = lists.q_tiles.shape[0] * heads
    passes = min(q_tiles, 16 * processors)
    strides = [strides_of(x) for x in (query, key, value, dout)]
    row_gradients = lse if dlse is None else dlse
    row_tensors = (out, dout, lse, row_gradients, workspace.lse, workspace.delta)
    row_numbers = (q_tiles, heads, sequences, rows, *strides[3])
    if spec.shared_query:
        chunks = shared_query_chunks(query.device, heads)
        programs = chunks * heads
        launches = [(lists.kv_tiles, False)]
        prepare(head_dim, dlse is not None, has_right, last_class, num_stages=1)(
            (passes,),
            (lists.q_tiles, lists.q_longer, lists.q_offsets, *row_tensors),
            (*row_numbers, window[1]),
        )
    else:
        programs = min(records * heads, processors)
        first, rest = torch.empty_like(lists.kv_tiles), torch.empty_like(lists.kv_tiles)
        launches = [(first, True), (rest, False)]
        splitters = min(-(-records // _STRETCH), _SPLITTERS)
        keys_above = -1 if last_class < 0 else LENGTH_CLASSES[last_class]
        _prepare_fused(head_dim, dlse is not None, last_class)(
            (splitters + passes,),
            (lists.q_tiles, lists.q_longer, lists.q_offsets, *row_tensors, lists.kv_tiles, first, rest),
            (*row_numbers, splitters, records, *walk, keys_above),
        )
    gradient = _gradient(head_dim, tile, spec.shared_query, has_left, has_right)
    for tiles, first_tiles in launches:
        gradient(
            (programs,),
            (workspace.fused_table, tiles, lists.q_offsets, lists.kv_offsets, dk, dv),
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
            (lists.q_tiles, lists.q_longer, lists.q_offsets, workspace.scratch, dq),
            (q_tiles, heads, sequences, window[1], spec.scale),
        )
    elif query_blocks:
        _add_partials(head_dim)(
            (query_blocks * heads * 4,), (workspace.scratch, dq), (heads, chunks, query_rows, spec.scale)
        )
