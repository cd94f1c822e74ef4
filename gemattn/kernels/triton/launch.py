"""Host side of the Triton kernels: allocate, choose tiles, launch. Called with real tensors only, checked before."""

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.schedule import BLOCK, Schedule, make_schedule
from gemattn.kernels.triton import configs
from gemattn.kernels.triton.forward import forward_kernel
from gemattn.kernels.triton.key_gradient import key_gradient_kernel
from gemattn.kernels.triton.query_gradient import query_gradient_kernel, shared_query_gradient_kernel
from gemattn.spec import UNLIMITED, AttentionSpec

_SHARED_QUERY_PROGRAMS = 264
"""Programs that a shared query's gradient is spread over, about two for each multiprocessor of a large GPU. A constant,
so the order of its sum depends on shapes alone."""


@functools.cache
def _launcher(kernel: Any, **constants: Any) -> Launcher:
    return Launcher(kernel, **constants)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """out (rows, H, D) in the input dtype and lse (H, rows) float32, natural log.

    Args as `gemattn.jagged_attention` has checked them; ``schedule`` holds the tensors of a `Schedule`, or nothing:
    then one is built.
    """
    lists = _schedule(query, key, q_offsets, kv_offsets, schedule, spec)
    query, key, value = (_last_dim_contiguous(x) for x in (query, key, value))
    heads, head_dim = query.shape[1:]
    sequences = lists.kv_offsets.shape[0] - 1
    rows = query.shape[0] * sequences if spec.shared_query else query.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    tile = configs.tile("forward", head_dim, query.element_size(), configs.family(query.device))
    grid = (lists.q_tiles.shape[0] * (BLOCK // tile.block_m) * heads,)
    options = _options(query, spec)
    with torch.cuda.device_of(query):
        launcher = _launcher(forward_kernel, SHARED_QUERY=spec.shared_query, **options, **_tile_options(tile))
        launcher(
            grid,
            (
                query,
                key,
                value,
                out,
                lse,
                lists.q_offsets,
                lists.kv_offsets,
                lists.q_tiles,
            ),
            (
                *_strides(query),
                *_strides(key),
                *_strides(value),
                sequences,
                rows,
                key.shape[0],
                heads,
                heads // key.shape[1],
                *spec.kernel_window,
                _score_scale(query, spec),
            ),
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the input dtype, every row of them written. Deterministic, whatever ``spec`` asks.

    ``out`` and ``lse`` are what `forward` returned; ``dlse`` (H, rows) or None.
    """
    lists = _schedule(query, key, q_offsets, kv_offsets, schedule, spec)
    query, key, value, dout = (_last_dim_contiguous(x) for x in (query, key, value, dout))
    out, lse = out.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    # delta, and for exact kernels the factor of P
    statistics = torch.empty((2 if _exact(query) else 1, *lse.shape), dtype=torch.float32, device=lse.device)
    with torch.cuda.device_of(query):
        launch = _shared_query_gradient if spec.shared_query else _query_gradient
        dq = launch(query, key, value, out, dout, lse, dlse, statistics, lists, spec)
        dk, dv = _key_gradient(query, key, value, dout, lse, dlse, statistics, lists, spec)
    return dq, dk, dv


def _query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    statistics: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
) -> Tensor:
    rows, heads, head_dim = query.shape
    dq = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    tile = configs.tile("query_gradient", head_dim, query.element_size(), configs.family(query.device))
    grid = (lists.q_tiles.shape[0] * (BLOCK // tile.block_m) * heads,)
    options = _options(query, spec)
    launcher = _launcher(query_gradient_kernel, HAS_DLSE=dlse is not None, **options, **_tile_options(tile))
    launcher(
        grid,
        (
            query,
            key,
            value,
            out,
            dout,
            lse,
            lse if dlse is None else dlse,
            statistics[0],
            statistics[-1],
            dq,
            lists.q_offsets,
            lists.kv_offsets,
            lists.q_tiles,
        ),
        (
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(dout),
            lists.kv_offsets.shape[0] - 1,
            rows,
            key.shape[0],
            heads,
            heads // key.shape[1],
            *spec.kernel_window,
            spec.scale,
            _score_scale(query, spec),
        ),
    )
    return dq


def _shared_query_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    statistics: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
) -> Tensor:
    rows, heads, head_dim = query.shape
    sequences = lists.kv_offsets.shape[0] - 1
    tile = configs.tile("shared_query_gradient", head_dim, query.element_size(), configs.family(query.device))
    blocks = triton.cdiv(rows, tile.block_m)
    if sequences == 0 or blocks == 0:
        return torch.zeros((rows, heads, head_dim), dtype=query.dtype, device=query.device)
    chunks = min(sequences, triton.cdiv(_SHARED_QUERY_PROGRAMS, blocks * heads))
    partial = torch.empty((chunks, rows, heads, head_dim), dtype=torch.float32, device=query.device)
    options = _options(query, spec)
    launcher = _launcher(shared_query_gradient_kernel, HAS_DLSE=dlse is not None, **options, **_tile_options(tile))
    launcher(
        (chunks * heads * blocks,),
        (
            query,
            key,
            value,
            out,
            dout,
            lse,
            lse if dlse is None else dlse,
            statistics[0],
            statistics[-1],
            partial,
            lists.kv_offsets,
        ),
        (
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(dout),
            sequences,
            chunks,
            rows,
            key.shape[0],
            heads,
            heads // key.shape[1],
            *spec.kernel_window,
            spec.scale,
            _score_scale(query, spec),
        ),
    )
    return partial.sum(0).to(query.dtype)


def _key_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    statistics: Tensor,
    lists: Schedule,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    rows, kv_heads, head_dim = key.shape
    dk = torch.empty((rows, kv_heads, head_dim), dtype=key.dtype, device=key.device)
    dv = torch.empty_like(dk)
    tile = configs.tile("key_gradient", head_dim, query.element_size(), configs.family(query.device))
    grid = (lists.kv_tiles.shape[0] * (BLOCK // tile.block_n) * kv_heads,)
    options = _options(query, spec)
    launcher = _launcher(
        key_gradient_kernel,
        SHARED_QUERY=spec.shared_query,
        HAS_DLSE=options["EXACT"] and dlse is not None,
        **options,
        **_tile_options(tile),
    )
    launcher(
        grid,
        (
            query,
            key,
            value,
            dout,
            lse,
            lse if dlse is None else dlse,
            statistics[0],
            statistics[-1],
            dk,
            dv,
            lists.q_offsets,
            lists.kv_offsets,
            lists.kv_tiles,
        ),
        (
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(dout),
            lists.kv_offsets.shape[0] - 1,
            lse.shape[1],
            rows,
            kv_heads,
            query.shape[1] // kv_heads,
            *spec.kernel_window,
            spec.scale,
            _score_scale(query, spec),
        ),
    )
    return dk, dv


def _schedule(
    query: Tensor,
    key: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> Schedule:
    if schedule:
        return Schedule(*schedule)
    return make_schedule(
        q_offsets,
        kv_offsets,
        query_rows=query.shape[0],
        key_rows=key.shape[0],
        shared_query=spec.shared_query,
    )


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    """(row, head) strides. A dimension of size 1 may hold any stride; a plain one keeps one compiled kernel for all."""
    rows, heads, head_dim = x.shape
    return (x.stride(0) if rows > 1 else heads * head_dim, x.stride(1) if heads > 1 else head_dim)


def _score_scale(query: Tensor, spec: AttentionSpec) -> float:
    """Factor of the scores: in natural units for exact kernels, in units of base 2 otherwise."""
    return spec.scale if _exact(query) else spec.scale * math.log2(math.e)


def _exact(query: Tensor) -> bool:
    return query.dtype == torch.float32 and not _tf32_allowed()


def _tf32_allowed() -> bool:
    """Whether float32 products may round their operands to TF32.

    Only the newest switch is read: the older ones raise once it was used, and setting an older one sets it too.
    """
    return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"


def _options(query: Tensor, spec: AttentionSpec) -> dict[str, Any]:
    """Compile-time constants that all kernels take."""
    head_dim = query.shape[2]
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": configs.block_d(head_dim),
        "HAS_LEFT": spec.window_left != UNLIMITED,
        "HAS_RIGHT": spec.window_right != UNLIMITED,
        "EXACT": _exact(query),
    }


def _tile_options(tile: configs.Tile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
