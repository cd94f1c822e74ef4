"""Host side of the Hopper kernels: allocate, choose tiles, launch. Called with real tensors only, checked before."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import Schedule
from gemattn.kernels.tlx.hopper.backward_key import key_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_query import query_gradient_kernel
from gemattn.kernels.tlx.hopper.backward_shared import shared_query_gradient_kernel
from gemattn.kernels.tlx.hopper.descriptors import describe_backward_kernel, describe_forward_kernel
from gemattn.kernels.tlx.hopper.forward import forward_kernel
from gemattn.kernels.tlx.hopper.host import DESCRIPTOR_BYTES, WIDEST_WINDOW, described, multiprocessors, strides_of
from gemattn.kernels.tlx.hopper.launch_fused import FusedTile, fused_backward
from gemattn.spec import UNLIMITED, AttentionSpec


class ForwardTile(NamedTuple):
    """Launch options of the forward kernel; query rows are 2 x 64 always."""

    block_n: int
    stages_q: int
    stages_kv: int
    registers: int
    pingpong: bool = False


FORWARD = {
    64: ForwardTile(128, 2, 3, 240),
    128: ForwardTile(128, 2, 2, 240),
}


class BackwardTile(NamedTuple):
    """Launch options of the split backward kernels; 2 x 64 query rows and 2 x 64 keys always."""

    block_n: int
    stages_kv: int
    stages_q: int
    registers: int


BACKWARD = {
    64: BackwardTile(128, 3, 4, 240),
    128: BackwardTile(128, 2, 3, 240),
}

FUSED_SHARED = True
"""Whether a shared query takes the fused backward: deterministic all the same."""
FUSED_OWN = True
"""Whether other queries do, unless the call asks for determinism."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
    tile: ForwardTile | None = None,
) -> tuple[Tensor, Tensor]:
    """out (rows, H, D) in the input dtype and lse (H, rows) float32, natural log; every row written."""
    lists = Schedule(*schedule)
    query, key, value = (described(x) for x in (query, key, value))
    heads, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = query.shape[0] * sequences if spec.shared_query else query.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    table = torch.empty(4 * sequences * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    tile = tile or FORWARD[head_dim]
    with torch.cuda.device_of(query):
        if sequences:
            describe_forward_kernel[(sequences,)](
                table,
                query,
                key,
                value,
                out,
                lists.q_offsets,
                lists.kv_offsets,
                *strides_of(query),
                *strides_of(key),
                *strides_of(value),
                sequences,
                heads,
                kv_heads,
                HEAD_DIM=head_dim,
                BLOCK_M=64,
                BLOCK_N=tile.block_n,
                SHARED_QUERY=spec.shared_query,
                num_warps=1,
            )
        num_tiles = lists.q_tiles.shape[0] * heads
        forward_kernel[(min(num_tiles, multiprocessors(query.device)),)](
            table,
            lists.q_tiles,
            lists.q_offsets,
            lists.kv_offsets,
            out,
            lse,
            num_tiles,
            heads,
            heads // kv_heads,
            sequences,
            rows,
            strides_of(query)[1],
            strides_of(key)[1],
            strides_of(value)[1],
            min(spec.window_left, WIDEST_WINDOW),
            min(spec.window_right, WIDEST_WINDOW),
            spec.scale * math.log2(math.e),
            HEAD_DIM=head_dim,
            BLOCK_N=tile.block_n,
            STAGES_Q=tile.stages_q,
            STAGES_KV=tile.stages_kv,
            HAS_LEFT=spec.window_left != UNLIMITED,
            HAS_RIGHT=spec.window_right != UNLIMITED,
            REGISTERS=tile.registers,
            PINGPONG=tile.pingpong,
            num_warps=4,
            num_stages=1,
        )
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
    tile: BackwardTile | FusedTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the input dtype, every row written; deterministic where `spec` asks for it. G = H only.

    A `tile` chooses the kernels too, for measurements.
    """
    lists = Schedule(*schedule)
    query, key, value, dout = (described(x) for x in (query, key, value, dout))
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    fused = FUSED_SHARED if spec.shared_query else FUSED_OWN and not spec.deterministic
    if isinstance(tile, FusedTile) or (tile is None and fused):
        return fused_backward(dout, dlse, query, key, value, out, lse, lists, spec, tile)
    heads, head_dim = query.shape[1:]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = out.shape[0]
    kv_rows = key.shape[0]
    tile = tile or BACKWARD[head_dim]
    dk = torch.empty((kv_rows, heads, head_dim), dtype=key.dtype, device=key.device)
    dv = torch.empty_like(dk)
    processors = multiprocessors(query.device)
    query_blocks = -(-query.shape[0] // 128)
    chunks = max(1, min(sequences, processors // max(1, query_blocks * heads)))
    if spec.shared_query:
        partial = torch.empty((chunks, query_blocks * 128, heads, head_dim), dtype=torch.float32, device=query.device)
        dq = partial
    else:
        dq = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
        partial = lse
    statistics = (rows // 64 + sequences + 1) * heads * 64
    row_lse = torch.empty(statistics, dtype=torch.float32, device=query.device)
    row_delta = torch.empty_like(row_lse)
    table = torch.empty((10 * sequences + 4) * DESCRIPTOR_BYTES, dtype=torch.int8, device=query.device)
    has_left, has_right = spec.window_left != UNLIMITED, spec.window_right != UNLIMITED
    window = (min(spec.window_left, WIDEST_WINDOW), min(spec.window_right, WIDEST_WINDOW))
    strides = tuple(strides_of(x)[1] for x in (query, key, value, dout))
    scales = (spec.scale, spec.scale * math.log2(math.e))
    options = {"HEAD_DIM": head_dim, "HAS_LEFT": has_left, "HAS_RIGHT": has_right, "REGISTERS": tile.registers}
    with torch.cuda.device_of(query):
        describe_backward_kernel[(sequences + 1,)](
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
            partial,
            lists.q_offsets,
            lists.kv_offsets,
            *strides_of(query),
            *strides_of(key),
            *strides_of(value),
            *strides_of(dout),
            sequences,
            query.shape[0],
            statistics,
            chunks * query_blocks * 128,
            window[1],
            heads,
            heads,
            HEAD_DIM=head_dim,
            BLOCK_M=64,
            BLOCK_N=tile.block_n,
            SHARED_QUERY=spec.shared_query,
            HAS_RIGHT=has_right,
            num_warps=1,
        )
        statistics_of = (lse, lse if dlse is None else dlse, row_lse, row_delta)
        if spec.shared_query:
            if sequences and query_blocks:
                shared_query_gradient_kernel[(chunks * heads * query_blocks,)](
                    table,
                    lists.q_tiles,
                    lists.kv_offsets,
                    *statistics_of,
                    query,
                    heads,
                    chunks,
                    sequences,
                    query.shape[0],
                    *strides,
                    *window,
                    *scales,
                    BLOCK_N=tile.block_n,
                    STAGES_KV=tile.stages_kv,
                    HAS_DLSE=dlse is not None,
                    num_warps=4,
                    num_stages=1,
                    **options,
                )
        else:
            num_tiles = lists.q_tiles.shape[0] * heads
            query_gradient_kernel[(min(num_tiles, processors),)](
                table,
                lists.q_tiles,
                lists.q_offsets,
                lists.kv_offsets,
                *statistics_of,
                dq,
                num_tiles,
                heads,
                sequences,
                rows,
                *strides,
                *window,
                *scales,
                BLOCK_N=tile.block_n,
                STAGES_KV=tile.stages_kv,
                HAS_DLSE=dlse is not None,
                num_warps=4,
                num_stages=1,
                **options,
            )
        num_tiles = lists.kv_tiles.shape[0] * heads
        key_gradient_kernel[(min(num_tiles, processors),)](
            table,
            lists.kv_tiles,
            lists.q_offsets,
            lists.kv_offsets,
            dk,
            dv,
            num_tiles,
            heads,
            sequences,
            kv_rows,
            *strides,
            *window,
            *scales,
            STAGES_Q=tile.stages_q,
            num_warps=4,
            num_stages=1,
            **options,
        )
    if spec.shared_query:
        dq = partial.sum(0)[: query.shape[0]].to(query.dtype) if sequences else torch.zeros_like(query)
    return dq, dk, dv
