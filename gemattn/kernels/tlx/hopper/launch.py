"""Host side of the Hopper kernels: allocate, choose tiles, launch. Called with real tensors only, checked before."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.hopper.forward import forward_kernel
from gemattn.kernels.tlx.hopper.launch_fused import fused_backward
from gemattn.kernels.tlx.hopper.launch_split import query_key_blocks, split_backward
from gemattn.kernels.tlx.hopper.workspace import describe_backward
from gemattn.kernels.tlx.host import (
    ForwardBlocks,
    Gradients,
    described,
    forward_outputs,
    multiprocessors,
    strides_of,
)
from gemattn.spec import UNLIMITED, AttentionSpec


class ForwardTile(NamedTuple):
    """Launch options of the forward kernel; query rows are 2 x 64 always."""

    block_n: int
    stages_q: int
    stages_kv: int
    registers: int = 240
    warp_barriers: bool = True
    """Every thread frees a key or value buffer, in place of one for all after a barrier between them."""
    turns: bool = False
    """Consumers issue their products in turn: 2% where there are many blocks, a loss where there are few."""


FORWARD = {
    32: (ForwardTile(128, 2, 3), ForwardTile(64, 2, 6)),
    64: (ForwardTile(128, 2, 3), ForwardTile(64, 2, 6)),
    128: (ForwardTile(128, 2, 2, warp_barriers=False, turns=True), ForwardTile(64, 2, 4)),
}
"""By head size: for sequences of more keys than FORWARD_LONGER, and for the others."""
FORWARD_LONGER = 256
"""One of LENGTH_CLASSES."""

FUSED_CLASS = LENGTH_CLASSES.index(512)
"""Sequences of more keys than this take the fused backward, unless the call has a mask or asks for determinism."""


@functools.cache
def _forward(
    head_dim: int, tile: ForwardTile, begin: int, end: int, positive_scale: bool, has_left: bool, has_right: bool
) -> Launcher:
    return Launcher(
        forward_kernel,
        HEAD_DIM=head_dim,
        BLOCK_N=tile.block_n,
        STAGES_Q=tile.stages_q,
        STAGES_KV=tile.stages_kv,
        BEGIN=begin,
        END=end,
        POSITIVE_SCALE=positive_scale,
        TURNS=tile.turns,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        REGISTERS=tile.registers,
        WARP_BARRIERS=tile.warp_barriers,
        num_warps=4,
        num_stages=1,
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """out (rows, H, D) in the input dtype and lse (H, rows) float32, natural log; every row written."""
    lists = Schedule(*schedule)
    query, key, value = described(query), described(key), described(value)
    _, heads, head_dim = query.shape
    tiles = FORWARD[head_dim]
    num_tiles = lists.q_tiles.shape[0] * heads
    grid = (min(num_tiles, multiprocessors(query.device)),)
    options = (spec.scale > 0, spec.window_left != UNLIMITED, spec.window_right != UNLIMITED)
    with torch.cuda.device_of(query):
        short_class = LENGTH_CLASSES.index(FORWARD_LONGER)
        blocks = ForwardBlocks(64, FORWARD_LONGER, tiles[0].block_n, tiles[1].block_n)
        out, lse, table = forward_outputs(query, key, value, lists, spec, blocks)
        pointers = (table, lists.q_tiles, lists.q_longer, lists.q_offsets, out, lse)
        numbers = (
            num_tiles,
            heads,
            heads // key.shape[1],
            lists.kv_offsets.shape[0] - 1,
            out.shape[0],
            strides_of(query)[1],
            strides_of(key)[1],
            strides_of(value)[1],
            *spec.kernel_window,
            spec.scale * math.log2(math.e),
        )
        _forward(head_dim, tiles[0], -1, short_class, *options)(grid, pointers, numbers)
        _forward(head_dim, tiles[1], short_class, -1, *options)(grid, pointers, numbers)
    return out, lse


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
    """(dq, dk, dv) in the input dtype, every row written; deterministic where `spec` asks for it. G = H only."""
    lists = Schedule(*schedule)
    query, key, value, dout = described(query), described(key), described(value), described(dout)
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    gradients = Gradients(dq, dk, torch.empty_like(dk))
    out = out.contiguous()
    # One list of tiles for both sides: the lengths are the same.
    self_attention = lists.q_tiles.data_ptr() == lists.kv_tiles.data_ptr()
    fused = spec.shared_query or not (spec.deterministic or spec.masked)
    split = not spec.shared_query
    with torch.cuda.device_of(query):
        key_blocks = query_key_blocks(query.shape[2])
        workspace = describe_backward(
            gradients, dout, query, key, value, out, lists, spec, key_blocks, fused=fused, split=split
        )
        tensors = (gradients, dout, dlse, query, key, value, out, lse.contiguous(), lists, spec, workspace)
        if fused:
            fused_backward(*tensors, last_class=FUSED_CLASS if split else -1)
        if split:
            split_backward(*tensors, self_attention=self_attention, first_class=FUSED_CLASS if fused else -1)
    return gradients
