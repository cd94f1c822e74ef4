"""`jagged_attention`: check the arguments, choose the implementation, call its operator."""

from __future__ import annotations

import itertools
import math
import numbers
import os
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor

from gemattn import dispatch, ops
from gemattn.confirm import require_confirmed
from gemattn.kernels.schedule import Schedule, make_schedule
from gemattn.spec import AttentionSpec, fold_window

if TYPE_CHECKING:
    from gemattn.spec import Impl

Window = tuple[int | None, int | None]


class _Flags(NamedTuple):
    """The options that are bools."""

    shared_query: bool
    causal: bool
    return_lse: bool
    deterministic: bool


class _Call(NamedTuple):
    """Checked and normalised arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor | None
    kv_offsets: Tensor
    spec: AttentionSpec


@overload
def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *,
    shared_query: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    schedule: Schedule | None = None,
    impl: Impl = "auto",
) -> Tensor: ...


@overload
def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *,
    shared_query: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    schedule: Schedule | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]: ...


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *,
    shared_query: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    schedule: Schedule | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention within each of B sequences that lie one after another in a jagged tensor.

    Shapes: T tokens, H query heads, G key/value heads, D head size, B sequences, S shared query rows.

    Args:
        query: (T_q, H, D); with `shared_query` (S, H, D). float64, float32, float16 or bfloat16.
        key: (T_kv, G, D), H a multiple of G: query head h reads key/value head h // (H // G).
        value: (T_kv, G, D).
        q_offsets: (B + 1,) int32 or int64 prefix sums of the query lengths, on the tensors' device. None exactly when
            `shared_query`.
        kv_offsets: (B + 1,), likewise for keys. None: self-attention, `q_offsets` serves both. Required with
            `shared_query`.
        shared_query: the same S query rows ask every sequence.
        causal: bottom-right aligned: the last query of a sequence sees its last key, as in FlashAttention.
        window: (left, right), keys a row sees on either side of its own position (bottom-right aligned like `causal`,
            with which it composes); a side is an int >= 0, or None for no limit.
        scale: of the scores; default ``D ** -0.5``. Any finite float, zero and negative too.
        return_lse: return (out, lse).
        deterministic: gradients are bitwise equal from run to run.
        schedule: what `gemattn.make_schedule` made of the same offsets; layers and backward share it. Without it every
            call builds its own. Only kernels use it.
        impl: "auto" (on CUDA the best kernel that can take the call, float64 the reference; on CPU the reference),
            "reference", "triton" or "tlx". Nothing falls back in silence.

    Returns:
        out: (T_q, H, D) in the dtype of query; with `shared_query` (B * S, H, D), row b * S + s. Rows outside
        ``offsets[0]:offsets[-1]`` and rows that see no key are 0.
        lse: with `return_lse`, (H, rows of out), natural log, float32 (float64 for float64 inputs), differentiable;
        -inf for rows that see no key and for slack rows, whose incoming gradients are ignored.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what came and what is wanted. The values of
            offsets and of a schedule are checked only with ``GEMATTN_CHECK=1`` in the environment, because that needs
            a sync; without it offsets are clamped to [0, T] and made monotone on the device.
        UnsupportedError: the named `impl` (or, on CUDA, every kernel) cannot take the call.
        RuntimeError: on a GPU that the TLX kernels never met, `gemattn.self_check` fails or, while a graph is compiled,
            exported or captured, was not called before.

    Not offered: dropout (recommender models of this scale train for one epoch and go without; it would also make a
    sequence's result depend on the batch around it), bias and score_mod, ALiBi and softcap (no user among the models
    this package serves, and each costs registers in the backward kernel), a value size other than D, paged KV and fp8
    (serving of language models), jvp and vmap (batching is what the offsets are for).

    Example:
        >>> import torch, gemattn
        >>> offsets = torch.tensor([0, 3, 3, 8])  # lengths 3, 0, 5
        >>> q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
        >>> gemattn.jagged_attention(q, k, v, offsets, causal=True).shape
        torch.Size([8, 2, 16])
    """
    flags = _Flags(shared_query, causal, return_lse, deterministic)
    call = _check(query, key, value, q_offsets, kv_offsets, flags, window, scale, schedule, impl)
    impl_name = dispatch.require(impl, call.query, call.key, call.value, call.spec)
    if impl_name == "tlx":
        require_confirmed(call.query.device)
    tiles: list[Tensor] = []
    if impl_name != "reference":
        tiles = list(_schedule_of(call) if schedule is None else schedule)
    out, lse = ops.call(impl_name, *call[:5], tiles, call.spec)
    return (out, lse) if return_lse else out


def unsupported_reasons(
    impl: Impl,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *,
    shared_query: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    schedule: Schedule | None = None,
) -> list[str]:
    """Why `impl` cannot take this call of `jagged_attention`; empty when it can. Raises what the call would raise."""
    flags = _Flags(shared_query, causal, return_lse, deterministic)
    call = _check(query, key, value, q_offsets, kv_offsets, flags, window, scale, schedule, impl)
    return dispatch.reasons(impl, call.query, call.key, call.value, call.spec)


def resolve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    *,
    shared_query: bool = False,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    schedule: Schedule | None = None,
    impl: Impl = "auto",
) -> str:
    """The implementation that this call of `jagged_attention` would run. Raises what the call would raise."""
    flags = _Flags(shared_query, causal, return_lse, deterministic)
    call = _check(query, key, value, q_offsets, kv_offsets, flags, window, scale, schedule, impl)
    return dispatch.require(impl, call.query, call.key, call.value, call.spec)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None,
    flags: _Flags,
    window: Window | None,
    scale: float | None,
    schedule: Schedule | None,
    impl: str,
) -> _Call:
    dispatch.check_impl(impl)
    for name, flag in zip(_Flags._fields, flags, strict=True):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is a {type(flag).__name__}, wanted a bool")
    _check_shapes(query, key, value)
    query, key, value = _autocast(query, key, value)
    if query.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"query is {query.dtype}, wanted float64, float32, float16 or bfloat16")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and query {query.dtype}, wanted one dtype")
    q_offsets, kv_offsets = _check_offsets(q_offsets, kv_offsets, flags.shared_query, query, key)
    left, right = fold_window(flags.causal, _check_window(window))
    spec = AttentionSpec(_check_scale(scale, query.shape[2]), left, right, flags.shared_query, flags.deterministic)
    query, key, value = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (query, key, value))
    call = _Call(query, key, value, q_offsets, kv_offsets, spec)
    _check_schedule(schedule, call)
    return call


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, wanted a tensor")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} is of layout {tensor.layout}, wanted torch.strided")
        if tensor.dim() != 3:
            wanted = "(T, H, D)" if name == "query" else "(T, G, D)"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted {wanted}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} and query on {query.device}, wanted one device")
    heads, head_dim = query.shape[1:]
    if heads < 1 or head_dim < 1:
        raise ValueError(f"query has shape {tuple(query.shape)}, wanted (T, H, D) with H and D at least 1")
    if key.shape[1] < 1 or heads % key.shape[1]:
        raise ValueError(f"key has G = {key.shape[1]} heads, wanted a divisor of query's H = {heads}")
    if key.shape[2] != head_dim:
        raise ValueError(f"key has head size {key.shape[2]}, wanted query's {head_dim}")
    if value.shape != key.shape:
        raise ValueError(f"value has shape {tuple(value.shape)}, wanted key's {tuple(key.shape)}")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):  # the query raises on some others
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check_offsets(
    q_offsets: Tensor | None, kv_offsets: Tensor | None, shared_query: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor]:
    if shared_query and q_offsets is not None:
        raise ValueError("q_offsets is given, wanted None with shared_query: the same rows ask every sequence")
    if shared_query and kv_offsets is None:
        raise ValueError("kv_offsets is None, wanted (B + 1,) offsets with shared_query")
    if not shared_query and q_offsets is None:
        raise ValueError("q_offsets is None, wanted (B + 1,) offsets (None is for shared_query)")
    if kv_offsets is None:
        kv_offsets = q_offsets
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"key has {key.shape[0]} rows and query {query.shape[0]}, wanted as many for self-attention "
                "(give kv_offsets for cross-attention)"
            )
    assert kv_offsets is not None
    device = query.device
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if offsets is None or (offsets is q_offsets and name == "kv_offsets"):
            continue
        if not isinstance(offsets, Tensor):
            raise TypeError(f"{name} is a {type(offsets).__name__}, wanted a tensor")
        if offsets.layout != torch.strided:
            raise TypeError(f"{name} is of layout {offsets.layout}, wanted torch.strided")
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {offsets.dtype}, wanted int32 or int64")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(offsets.shape)}, wanted (B + 1,)")
        if offsets.device != device:
            raise ValueError(f"{name} is on {offsets.device}, wanted query's device {device}")
    if os.environ.get("GEMATTN_CHECK") == "1":
        for name, offsets, rows in (("q_offsets", q_offsets, query.shape[0]), ("kv_offsets", kv_offsets, key.shape[0])):
            if offsets is not None:
                check_offset_values(name, offsets, rows)
    if q_offsets is not None and q_offsets.shape[0] != kv_offsets.shape[0]:
        raise ValueError(
            f"q_offsets has {q_offsets.shape[0] - 1} sequences and kv_offsets {kv_offsets.shape[0] - 1}, wanted as many"
        )
    return q_offsets, kv_offsets


def check_offset_values(name: str, offsets: Tensor, rows: int) -> None:
    """Raise ValueError naming the first bad sequence of `offsets`, for GEMATTN_CHECK=1. Syncs."""
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0] is {values[0]}, wanted 0")
    for b, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ValueError(
                f"{name}: sequence {b} ends at {end} before its start {start}, wanted non-decreasing offsets"
            )
        if end > rows:
            raise ValueError(f"{name}: sequence {b} ends at {end}, past the tensor's {rows} rows")


def _check_window(window: Window | None) -> Window | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window is {window!r}, wanted None or (left, right)")
    for side, size in zip(("left", "right"), window, strict=True):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"window's {side} side is {size!r}, wanted an int >= 0 or None")
        if size < 0:
            raise ValueError(f"window's {side} side is {size}, wanted an int >= 0; use None for no limit")
        if size >= 2**31:
            raise ValueError(f"window's {side} side is {size}, wanted less than 2**31; use None for no limit")
    return (window[0], window[1])


def _check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is {scale!r}, wanted a finite float or None")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, wanted a finite float")
    return float(scale)


def _check_schedule(schedule: Schedule | None, call: _Call) -> None:
    """Refuse a schedule of another batch: by its shapes, without a sync; by its values with GEMATTN_CHECK=1."""
    if schedule is None:
        return
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}, wanted what gemattn.make_schedule returns")
    schedule.check(
        sequences=call.kv_offsets.shape[0] - 1,
        query_rows=call.query.shape[0],
        key_rows=call.key.shape[0],
        shared_query=call.spec.shared_query,
        device=call.query.device,
    )
    if os.environ.get("GEMATTN_CHECK") == "1":
        schedule.check_values(_schedule_of(call))


def _schedule_of(call: _Call) -> Schedule:
    return make_schedule(
        call.q_offsets,
        call.kv_offsets,
        query_rows=call.query.shape[0],
        key_rows=call.key.shape[0],
        shared_query=call.spec.shared_query,
    )
