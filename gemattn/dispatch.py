"""Which implementation can take a call, and which one ``impl="auto"`` takes.

The answer depends on dtype, H, G, D, options, device and strides alone, never on the number of sequences or on their
lengths: a sequence gets the same arithmetic in training and in serving (contract, clause 9).
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gemattn.spec import IMPLS, AttentionSpec

_Function = TypeVar("_Function", bound=Callable[..., Any])
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TLX_HEAD_DIMS = {9: (32, 64, 128), 10: (64, 128)}
"""By the major number of the compute capability."""


simulated: tuple[int, int] | None = None
"""Compute capability of the chip that CPU tensors are simulated on; `gemattn.testing.tlx_sim.simulate` sets it."""


class UnsupportedError(NotImplementedError):
    """A named implementation cannot take the call; the message lists every reason."""


_find_spec = functools.cache(importlib.util.find_spec)
_get_device_capability = functools.cache(torch.cuda.get_device_capability)


def called_while_traced(function: _Function) -> _Function:
    """Dynamo calls the function with constants, once, and keeps the result as one; what it raises ends the compilation.

    It is `torch.compiler.assume_constant_result`, which would import torch._dynamo and, with that, Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@called_while_traced
def _installed(module: str) -> bool:
    return _find_spec(module) is not None


@called_while_traced
def _capability(index: int) -> tuple[int, int]:
    return _get_device_capability(index)


def index_of(device: torch.device) -> int:
    """Of a CUDA device; that of the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device, or of the simulated chip."""
    return simulated or _capability(index_of(device))


def _device_reasons(device: torch.device) -> list[str]:
    if not _installed("triton"):
        return ["triton is not installed: pip install 'gemattn[triton]'"]
    if device.type == "cuda":
        major, minor = capability(device)
        return [] if major >= 8 else [f"needs compute capability 8.0 or newer, this GPU has {major}.{minor}"]
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return []
        return ["runs on CUDA tensors, or on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1 before import)"]
    return [f"runs on CUDA tensors, not on {device.type}"]


def _triton_reasons(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> list[str]:
    reasons = _device_reasons(query.device)
    if query.dtype not in _KERNEL_DTYPES:
        reasons.append(f"takes float32, float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}")
    head_dim = query.shape[-1]
    if head_dim % 8 or not 16 <= head_dim <= 256:
        reasons.append(f"takes head sizes that are multiples of 8 from 16 to 256, not {head_dim}")
    return reasons


def _tlx_reasons(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> list[str]:
    if os.environ.get("GEMATTN_DISABLE_TLX") == "1":
        return ["GEMATTN_DISABLE_TLX=1 is set"]
    if query.device.type != "cuda" and simulated is None:
        return [f"runs on CUDA tensors, not on {query.device.type}"]
    reasons = []
    major, minor = capability(query.device)
    if (major, minor) != (9, 0) and major != 10:
        reasons.append(f"needs compute capability 9.0 (Hopper) or 10.x (Blackwell), this GPU has {major}.{minor}")
    if not (_installed("triton") and _installed("triton.language.extra.tlx")):
        reasons.append("needs TLX, which comes with fbtriton: pip install 'gemattn[triton]'")
    if query.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"takes float16 and bfloat16, not {str(query.dtype).removeprefix('torch.')}")
    head_dims = _TLX_HEAD_DIMS.get(major, (64, 128))
    if query.shape[-1] not in head_dims:
        reasons.append(f"takes head sizes {', '.join(map(str, head_dims))}, not {query.shape[-1]}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not _tma_describes(x):
            reasons.append(f"{name}'s strides {tuple(x.stride())} and first element are not multiples of 16 bytes")
    return reasons


def unconfirmed(device: torch.device) -> bool:
    """Whether the TLX kernels of this GPU were compiled and simulated, but never run on one of its kind."""
    return device.type == "cuda" and _capability(index_of(device))[0] == 10


def _tma_describes(x: Tensor) -> bool:
    """Whether the copy engine can address (T, H, D) as a matrix of all heads' columns."""
    _, heads, head_dim = x.shape
    row_stride, head_stride, _ = x.stride()
    size = x.element_size()
    # A graph cannot hold an offset into a storage: there the kernels copy what begins elsewhere.
    first = 0 if torch.compiler.is_compiling() else x.storage_offset()
    # The row stride counts whatever T is: the choice may not depend on it.
    if row_stride == 0 or row_stride * size % 16 or first * size % 16:
        return False
    if heads > 1 and head_stride * size % 16:
        return False
    return (heads - 1) * head_stride + head_dim < 2**31


def reasons(impl: str, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> list[str]:
    """Why `impl` cannot take these (checked) arguments; empty when it can."""
    if impl == "reference":
        return []
    if impl == "auto":
        try:
            choose(query, key, value, spec)
        except UnsupportedError as error:
            return [str(error)]
        return []
    return {"triton": _triton_reasons, "tlx": _tlx_reasons}[impl](query, key, value, spec)


def choose(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str:
    """What "auto" takes: on CPU the reference; on CUDA the best kernel that can, and the reference for float64 only."""
    if query.device.type == "cpu" or query.dtype == torch.float64:
        return "reference"
    # With heads of 32 the portable kernels were the faster ones on an H200 (docs/kernels/hopper.md).
    order = ("triton", "tlx") if query.shape[-1] <= 32 else ("tlx", "triton")
    refusals = {impl: reasons(impl, query, key, value, spec) for impl in order}
    for impl, why in refusals.items():
        if not why:
            return impl
    listed = "; ".join(f"{impl}: {', '.join(why)}" for impl, why in refusals.items())
    raise UnsupportedError(f'no kernel takes this call ({listed}); impl="reference" takes it, slowly')


def require(impl: str, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> str:
    """The implementation that runs; raises UnsupportedError when the one named cannot."""
    if impl == "auto":
        return choose(query, key, value, spec)
    why = reasons(impl, query, key, value, spec)
    if why:
        raise UnsupportedError(f'impl="{impl}" cannot take this call: {"; ".join(why)}')
    return impl


def check_impl(impl: str) -> None:
    """Raise ValueError for an unknown name."""
    if impl not in IMPLS:
        raise ValueError(f"impl is {impl!r}, wanted one of {', '.join(map(repr, IMPLS))}")
