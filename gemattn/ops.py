"""torch.library operators: schema, fake, autograd and FLOP formula of every implementation. Torch only.

An implementation is two plain functions, `forward` and `backward` (see `gemattn.reference`); `_register` makes the
operators ``gemattn::jagged_attention_<impl>`` and ``gemattn::jagged_attention_<impl>_backward`` of them. Their modules
are imported when an operator first runs, so that registering needs neither Triton nor a GPU.
"""

import contextlib
import functools
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


@functools.cache
def _module(impl: str) -> ModuleType:
    return importlib.import_module(_MODULES[impl])


def _kernels(impl: str, device: torch.device) -> ModuleType:
    """The implementation, unless its kernels may not run on the device."""
    if impl == "tlx":  # the one place that every program passes, whatever compiled, exported or loaded it
        refuse_unconfirmed(device)
    return _module(impl)


_NO_SCHEDULE = (None,) * 6
"""A `Schedule` comes tensor by tensor: a list takes PyTorch's dispatcher nearly twice the time."""
_OPTIONS = 5
"""Fields of an `AttentionSpec`, the last arguments."""


def _listed(*schedule: Tensor | None) -> list[Tensor]:
    return [x for x in schedule if x is not None]


def _without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Dtypes are settled, `gemattn.attention` has cast."""
    if device in ("cpu", "cuda") and not torch.is_autocast_enabled(device):  # the query raises on some others
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _fake_out(query: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor) -> tuple[Tensor, Tensor]:
    rows = query.shape[0] if q_offsets is not None else query.shape[0] * (kv_offsets.shape[0] - 1)
    out = query.new_empty(rows, query.shape[1], query.shape[2])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(query.shape[1], rows, dtype=dtype)


_LIBRARY = torch.library.Library("gemattn", "FRAGMENT")


def _define(name: str, function: Any, fake: Any) -> Any:
    """The operator ``gemattn::<name>`` of a function that mutates nothing.

    As `torch.library.custom_op` defines it, without what that does at every call: it takes a third of the time.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, torch._disable_dynamo(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gemattn::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.gemattn, name).default


def _differentiate(operator: Any, inputs: int, setup_context: Any, backward: Any) -> None:
    """Autograd of an operator, as `torch.library.register_autograd` has it, for its first `inputs` arguments.

    `backward` returns their gradients; None: there is no formula.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            arguments = (*arguments[:-1], *arguments[-1])
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*arguments)
            if setup_context is not None:
                setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if backward is None:
                raise RuntimeError(f"Trying to backward through {operator} but no autograd formula was registered.")
            return (*backward(ctx, *gradients), None)

    def autograd(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:inputs]):
            return Differentiable.apply(*arguments[:inputs], arguments[inputs:])
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    _LIBRARY.impl(operator._schema.name.removeprefix("gemattn::"), autograd, "Autograd")


def _register(impl: str) -> tuple[Any, Any]:
    """The forward and the backward operator of one implementation."""

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
        with _without_autocast(query.device.type):
            schedule = _listed(q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer)
            return _kernels(impl, query.device).forward(query, key, value, q_offsets, kv_offsets, schedule, spec)

    def fake_forward(query, key, value, q_offsets, kv_offsets, *_):  # type: ignore[no-untyped-def]
        return _fake_out(query, q_offsets, kv_offsets)

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
        with _without_autocast(query.device.type):
            schedule = _listed(q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer)
            return _kernels(impl, query.device).backward(
                dout, dlse, query, key, value, out, lse, q_offsets, kv_offsets, schedule, spec
            )

    def fake_backward(dout, dlse, query, key, value, *_):  # type: ignore[no-untyped-def]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))

    forward_operator = _define(f"jagged_attention_{impl}", forward, fake_forward)
    backward_operator = _define(f"jagged_attention_{impl}_backward", backward, fake_backward)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *others = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *output, *others[:-_OPTIONS])
        ctx.options = others[-_OPTIONS:]

    def call_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse, *others = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        return backward_operator(dout, dlse, query, key, value, out, lse, *others, *ctx.options)

    _differentiate(forward_operator, 3, setup_context, call_backward)
    if impl != "reference":
        _differentiate(backward_operator, 7, None, None)
    flops.register(impl)
    return forward_operator, backward_operator


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
        with _without_autocast(query.device.type):
            return _module("reference").double_backward(
                ddq, ddk, ddv, dout, dlse, query, key, value, lse, q_offsets, kv_offsets, spec
            )

    @double_backward.register_fake
    def _(ddq, ddk, ddv, dout, dlse, query, key, value, lse, *_):  # type: ignore[no-untyped-def]
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (dout, lse, query, key, value))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        dout, dlse, query, key, value, _out, lse, q_offsets, kv_offsets, *others = inputs
        ctx.save_for_backward(dout, dlse, query, key, value, lse, q_offsets, kv_offsets)
        ctx.options = others[-_OPTIONS:]

    def call(ctx: Any, ddq: Tensor, ddk: Tensor, ddv: Tensor) -> tuple[Any, ...]:
        g_dout, g_dlse, g_q, g_k, g_v = double_backward(ddq, ddk, ddv, *ctx.saved_tensors, *ctx.options)
        g_dlse = g_dlse if ctx.saved_tensors[1] is not None else None
        # out and lse are functions of query, key and value: through those their share is counted already.
        return g_dout, g_dlse, g_q, g_k, g_v, None, None

    _differentiate(backward, 7, setup_context, call)


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
