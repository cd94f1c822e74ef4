"""The tutorial attention kernels inside fbtriton, launched as their own hosts launch them, on CPU tensors."""

from __future__ import annotations

import importlib
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_PACKAGE = "triton.language.extra.tlx.tutorials"
HOPPER = "hopper_fa_ws_pipelined_pingpong_persistent"
BLACKWELL = "blackwell_fa_ws_pipelined_persistent"


def load(name: str) -> ModuleType:
    """A tutorial; it asks the active driver for its device as it is imported, so one stands in."""
    if not torch.cuda.is_available():
        stand_in = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
            get_current_device=lambda: 0,
        )
        driver.set_active(stand_in)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _rows(x: Tensor) -> TensorDescriptor:
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    return TensorDescriptor(x, [rows, width], [width, 1], [1, 1])


def hopper_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, programs: int = 2) -> tuple[Tensor, Tensor]:
    """(out, base-2 lse) of (Z, H, N, D) tensors by the ping-pong forward kernel."""
    module = load(HOPPER)
    config = module.configs[0].kwargs
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    arguments = {"desc_q": _rows(q), "desc_k": _rows(k), "desc_v": _rows(v), "desc_o": _rows(out)}
    shape = {"HEAD_DIM": q.shape[-1], "FP8_OUTPUT": False}
    module._host_descriptor_pre_hook({**config, **arguments, **shape})
    tiles = triton.cdiv(q.shape[2], config["BLOCK_M"]) * q.shape[0] * q.shape[1]
    module._attn_fwd_ws_pipelined_pingpong_persistent.fn[(min(programs, tiles), 1, 1)](
        scale, lse, q.shape[0], q.shape[1], *arguments.values(), N_CTX=q.shape[2], **shape, **config, num_warps=4
    )
    return out, lse


def blackwell_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, **choices: Any
) -> tuple[Tensor, Tensor]:
    """(out, base-2 lse) of (Z, H, N, D) tensors; `choices` overrule the kernel's configuration."""
    module = load(BLACKWELL)
    config = {**module.configs[0].kwargs, "NUM_BUFFERS_KV": 3, "GROUP_SIZE_N": 1, **choices}
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    arguments = {"desc_q": _rows(q), "desc_k": _rows(k), "desc_v": _rows(v), "desc_o": _rows(out)}
    shape = {"HEAD_DIM": q.shape[-1]}
    module._host_descriptor_pre_hook({**config, **arguments, **shape})
    grid = (triton.cdiv(q.shape[2], config["BLOCK_M"]) * q.shape[0] * q.shape[1], 1, 1)
    module._attn_fwd_ws.fn[grid](
        scale,
        lse,
        q.shape[0],
        q.shape[1],
        *arguments.values(),
        N_CTX=q.shape[2],
        **shape,
        STAGE=3 if causal else 1,
        **config,
        num_warps=4,
    )
    return out, lse


def blackwell_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    scale: float,
    causal: bool = False,
    programs: int = 1,
    **choices: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by the backward kernel, on clusters of `programs`: 1 or 2; D 128 for 2."""
    module = load(BLACKWELL)
    chosen = module.configs_bwd_2cta[0] if programs == 2 else module.configs_bwd_1cta[0]
    config = {**chosen.kwargs, **choices}
    batch, heads, length, head_dim = q.shape
    rcp_ln2 = 1.4426950408889634
    scaled_key = k * (scale * rcp_ln2)
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty(q.shape), torch.empty_like(k), torch.empty_like(v)
    accumulator = torch.zeros(q.shape)
    before = (length // 128, batch * heads)
    module._attn_bwd_preprocess[before](out, dout, delta, length, BLOCK_M=128, HEAD_DIM=head_dim)

    def described(x: Tensor, shape: list[int] | None = None) -> TensorDescriptor:
        shape = shape or list(x.shape)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return TensorDescriptor(x, shape, strides, [1] * len(shape))

    packed = [batch, heads, 2 * length, head_dim // 2]
    arguments: dict[str, Any] = {
        "desc_q": described(q),
        "desc_k": described(scaled_key),
        "desc_v": described(v),
        "sm_scale": scale,
        "desc_do": described(dout),
        "desc_dq": described(accumulator, packed),
        "desc_dk": described(dk),
        "desc_dv": described(dv),
        "desc_m": described(lse, [lse.numel()]),
        "desc_delta": described(delta, [lse.numel()]),
        "M_ptr": lse,
        "delta_ptr": delta,
        "H": heads,
        "Z": batch,
        "N_CTX": length,
        "desc_kt": described(scaled_key),
        "desc_qt": described(q),
        "desc_dot": described(dout),
    }
    module._bwd_host_descriptor_pre_hook_tlx({**arguments, **config, "HEAD_DIM": head_dim})
    tiles = triton.cdiv(triton.cdiv(length, config["BLOCK_N1"]), programs) * programs
    module._attn_bwd_ws.fn[(tiles, heads, batch)](
        *arguments.values(),
        BLK_SLICE_FACTOR=2,
        HEAD_DIM=head_dim,
        STAGE=3 if causal else 1,
        **config,
        num_warps=8,
        ctas_per_cga=(programs, 1, 1),
    )
    module._attn_bwd_dq_postprocess[before](
        accumulator,
        dq,
        length,
        BLK=config["BLOCK_M1"] // programs,
        HALF_HD=head_dim // 2,
        BLOCK_M=128,
        HEAD_DIM=head_dim,
    )
    return dq, dk, dv
