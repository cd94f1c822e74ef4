"""Host side of the Blackwell forward: choose the tile, launch. Called with real tensors only, checked before."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import LENGTH_CLASSES, Schedule
from gemattn.kernels.tlx.blackwell.forward import forward_kernel
from gemattn.kernels.tlx.host import WIDEST_WINDOW, described, forward_outputs, multiprocessors, strides_of
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
    query, key, value = (described(x) for x in (query, key, value))
    heads, head_dim = query.shape[1:]
    tile = FORWARD[head_dim]
    num_tiles = lists.q_tiles.shape[0] * heads
    with torch.cuda.device_of(query):
        out, lse, table = forward_outputs(
            query, key, value, lists, spec, block_m=BLOCK, longer=LENGTH_CLASSES[0], block_n=BLOCK, short_block_n=BLOCK
        )
        forward_kernel[(programs(num_tiles, query.device),)](
            table,
            lists.q_tiles,
            lists.q_offsets,
            out,
            lse,
            num_tiles,
            heads,
            heads // key.shape[1],
            lists.kv_offsets.shape[0] - 1,
            out.shape[0],
            strides_of(query)[1],
            strides_of(key)[1],
            strides_of(value)[1],
            min(spec.window_left, WIDEST_WINDOW),
            min(spec.window_right, WIDEST_WINDOW),
            spec.scale * math.log2(math.e),
            HEAD_DIM=head_dim,
            STAGES=tile.stages,
            PIECE=tile.piece,
            HAS_LEFT=spec.window_left != UNLIMITED,
            HAS_RIGHT=spec.window_right != UNLIMITED,
            SOFTMAX_REGISTERS=tile.softmax_registers,
            ISSUE_REGISTERS=tile.issue_registers,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,
        )
    return out, lse
