"""Host side of the Blackwell forward: choose the tile, launch. Called with real tensors only, checked before."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.blackwell.forward import forward_kernel
from gemattn.kernels.tlx.host import (
    ForwardBlocks,
    described,
    forward_outputs,
    multiprocessors,
    strides_of,
)
from gemattn.spec import UNLIMITED, AttentionSpec

BLOCK = 128
"""Query rows and keys of a product."""


class ForwardTile(NamedTuple):
    """Launch options of the forward kernel; 2 x 128 query rows and blocks of 128 keys always."""

    stages: int
    """Buffers of keys and values, which take turns in one ring."""
    piece: int = 32
    """Columns of scores or output that a thread holds at a time."""
    softmax_registers: int = 184
    issue_registers: int = 40


FORWARD = {64: ForwardTile(6), 128: ForwardTile(3)}
"""By head size."""


@functools.cache
def _forward(head_dim: int, tile: ForwardTile, has_left: bool, has_right: bool) -> Launcher:
    return Launcher(
        forward_kernel,
        HEAD_DIM=head_dim,
        STAGES=tile.stages,
        PIECE=tile.piece,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        SOFTMAX_REGISTERS=tile.softmax_registers,
        ISSUE_REGISTERS=tile.issue_registers,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )


def programs(num_tiles: int, device: torch.device) -> int:
    """Programs of a persistent grid whose tiles are pairs of records.

    An odd number: every second record is skipped, and those of H heads stand in runs of H; with an even stride some
    programs would meet skipped ones only.
    """
    return min(num_tiles, (multiprocessors(device) - 1) | 1)


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
    num_tiles = lists.q_tiles.shape[0] * heads
    launcher = _forward(head_dim, FORWARD[head_dim], spec.window_left != UNLIMITED, spec.window_right != UNLIMITED)
    with torch.cuda.device_of(query):
        blocks = ForwardBlocks(BLOCK, LENGTH_CLASSES[0], BLOCK, BLOCK)
        out, lse, table = forward_outputs(query, key, value, lists, spec, blocks)
        launcher(
            (programs(num_tiles, query.device),),
            (table, lists.q_tiles, lists.q_offsets, out, lse),
            (
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
            ),
        )
    return out, lse
