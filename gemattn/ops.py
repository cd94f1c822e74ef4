"""torch.library operators: schema, fake, autograd and FLOP formula of every implementation. Torch only.

An implementation is two plain functions, `forward` and `backward` (see `gemattn.reference`); `_register` makes the
operators ``gemattn::jagged_attention_<impl>`` and ``gemattn::jagged_attention_<impl>_backward`` of them. Their modules
are imported when an operator first runs, so that registering needs neither Triton nor a GPU.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gemattn import flops
from gemattn.confirm import refuse_unconfirmed
from gemattn.spec import AttentionSpec

_MODULES = {"reference": "gemattn.reference", "triton": "gemattn.kernels.triton", "tlx": "gemattn.kernels.tlx"}


def _module(impl: str, device: torch.device) -> ModuleType:
    """The implementation, unless its kernels may not run on the device."""
    if impl == "tlx":  # the one place that every program passes, whatever compiled, exported or loaded it
        refuse_unconfirmed(device)
    return importlib.import_module(_MODULES[impl])


_NO_SCHEDULE = (None,) * 6
"""A `Schedule` comes tensor by tensor: a list takes PyTorch's dispatcher nearly twice the time."""
_OPTIONS = 5
"""Fields of an `AttentionSpec`, the last arguments."""


def _listed(*schedule: Tensor | None) -> list[Tensor]:
    return [x for x in schedule if x is not None]


def _fake_out(query: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor) -> tuple[Tensor, Tensor]:
    rows = query.shape[0] if q_offsets is not None else query.shape[0] * (kv_offsets.shape[0] - 1)
    out = query.new_empty(rows, query.shape[1], query.shape[2])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(query.shape[1], rows, dtype=dtype)


def _register(impl: str) -> tuple[Any, Any]:
    """The forward and the backward operator of one implementation."""
    name = f"gemattn::jagged_attention_{impl}"

    @torch.library.custom_op(name, mutates_args=())
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_offsets: Tensor | None,
        kv_offsets: Tensor,
        q_starts: Tensor | None,
        kv_starts: Tensor | None,
        q_tiles: Tensor | None,
        kv_tiles: Tensor | None,
        q_longer: Tensor | None,
        kv_longer: Tensor | None,
        window_left: int,
        window_right: int,
        scale: float,
        shared_query: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        spec = AttentionSpec(scale, window_left, window_right, shared_query, deterministic)
        with torch.autocast(query.device.type, enabled=False):  # dtypes are settled: `gemattn.attention` has cast
            schedule = _listed(q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer)
            return _module(impl, query.device).forward(query, key, value, q_offsets, kv_offsets, schedule, spec)

    @forward.register_fake
    def _(query, key, value, q_offsets, kv_offsets, *_):  # type: ignore[no-untyped-def]
        return _fake_out(query, q_offsets, kv_offsets)

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
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
        q_starts: Tensor | None,
        kv_starts: Tensor | None,
        q_tiles: Tensor | None,
        kv_tiles: Tensor | None,
        q_longer: Tensor | None,
        kv_longer: Tensor | None,
        window_left: int,
        window_right: int,
        scale: float,
        shared_query: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = AttentionSpec(scale, window_left, window_right, shared_query, deterministic)
        with torch.autocast(query.device.type, enabled=False):
            schedule = _listed(q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer)
            return _module(impl, query.device).backward(
                dout, dlse, query, key, value, out, lse, q_offsets, kv_offsets, schedule, spec
            )

    @backward.register_fake
    def _(dout, dlse, query, key, value, *_):  # type: ignore[no-untyped-def]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *others = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *output, *others[:-_OPTIONS])
        ctx.options = others[-_OPTIONS:]

    def call_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        query, key, value, out, lse, *others = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = backward(dout, dlse, query, key, value, out, lse, *others, *ctx.options)
        return (*grads, *[None] * (len(others) + _OPTIONS))

    forward.register_autograd(call_backward, setup_context=setup_context)
    flops.register(impl)
    return forward, backward


def _register_double_backward(backward: Any) -> None:
    """The reference alone differentiates twice; through a kernel PyTorch's own "no formula" error is raised."""

    @torch.library.custom_op("gemattn::jagged_attention_reference_double_backward", mutates_args=())
    def double_backward(
        ddq: Tensor,
        ddk: Tensor,
        ddv: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lse: Tensor,
        q_offsets: Tensor | None,
        kv_offsets: Tensor,
        window_left: int,
        window_right: int,
        scale: float,
        shared_query: bool,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        spec = AttentionSpec(scale, window_left, window_right, shared_query, deterministic)
        with torch.autocast(query.device.type, enabled=False):
            return _module("reference", query.device).double_backward(
                ddq, ddk, ddv, dout, dlse, query, key, value, lse, q_offsets, kv_offsets, spec
            )

    @double_backward.register_fake
    def _(ddq, ddk, ddv, dout, dlse, query, key, value, lse, *_):  # type: ignore[no-untyped-def]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (dout, lse, query, key, value))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        dout, dlse, query, key, value, _out, lse, q_offsets, kv_offsets, *others = inputs
        ctx.save_for_backward(dout, dlse, query, key, value, lse, q_offsets, kv_offsets)
        ctx.without_gradient = 2 + len(others)
        ctx.options = others[-_OPTIONS:]

    def call(ctx: Any, ddq: Tensor, ddk: Tensor, ddv: Tensor) -> tuple[Any, ...]:
        g_dout, g_dlse, g_q, g_k, g_v = double_backward(ddq, ddk, ddv, *ctx.saved_tensors, *ctx.options)
        g_dlse = g_dlse if ctx.saved_tensors[1] is not None else None
        # out and lse are functions of query, key and value: through those their share is counted already.
        return (g_dout, g_dlse, g_q, g_k, g_v, None, None, *[None] * ctx.without_gradient)

    backward.register_autograd(call, setup_context=setup_context)


_OPERATORS = {impl: _register(impl) for impl in _MODULES}
_register_double_backward(_OPERATORS["reference"][1])


def call(
    impl: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: Sequence[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Run the operator of `impl`; arguments as `gemattn.attention` has checked them."""
    return _OPERATORS[impl][0](
        query,
        key,
        value,
        q_offsets,
        kv_offsets,
        *(schedule or _NO_SCHEDULE),
        spec.window_left,
        spec.window_right,
        spec.scale,
        spec.shared_query,
        spec.deterministic,
    )
