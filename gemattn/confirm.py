"""A small check of kernels that have not met the GPU they run on, against the reference, before they are trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from gemattn import dispatch, ops
from gemattn.kernels.schedule import make_schedule
from gemattn.spec import UNLIMITED, AttentionSpec

_TOLERANCE = 0.02
"""Of the reference's Frobenius norm. bfloat16 and sums of a few hundred terms leave a third of it unused."""

_confirmed: set[int] = set()
"""Indices of the GPUs whose kernels have passed."""


def self_check(device: torch.device | str | int | None = None) -> None:
    """Compare the TLX kernels with the reference on a small batch, forward and backward. Syncs.

    Runs by itself at the first eager call that takes these kernels on a GPU for which they were never confirmed
    (compute capability 10.x). Before a CUDA graph is captured, or a compiled model runs first, call it yourself.

    Args:
        device: a CUDA device; the current one by default.

    Raises:
        RuntimeError: a result differs; the message says which and by how much.
        UnsupportedError: the kernels cannot run on the device.
    """
    place = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        for head_dim in (64, 128):
            _compare(place, head_dim)
    if place.type == "cuda":
        _confirmed.add(torch.cuda.current_device() if place.index is None else place.index)


def require_confirmed(device: torch.device) -> None:
    """Run `self_check` where it was not run yet and is needed; raise RuntimeError where it may not run."""
    if not dispatch.unconfirmed(device) or (device.index or 0) in _confirmed:
        return
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the TLX kernels are unconfirmed on {device}: call gemattn.self_check() once in the process before "
            "compiling or capturing a graph, or set GEMATTN_DISABLE_TLX=1"
        )
    self_check(device)


def _compare(device: torch.device, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q_offsets, kv_offsets = (torch.tensor(x, device=device) for x in ([0, 140, 140, 180], [0, 150, 170, 190]))
    shapes = (int(q_offsets[-1]), int(kv_offsets[-1]), int(kv_offsets[-1]))
    leaves = [torch.randn(rows, 2, head_dim, generator=generator).to(device, torch.bfloat16) for rows in shapes]
    dout = torch.randn(shapes[0], 2, head_dim, generator=generator).to(device, torch.bfloat16)
    spec = AttentionSpec(head_dim**-0.5, UNLIMITED, 0)
    schedule = make_schedule(q_offsets, kv_offsets, query_rows=shapes[0], key_rows=shapes[1])
    query, key, value = leaves
    dispatch.require("tlx", query, key, value, spec)
    results = {}
    for impl, dtype in (("tlx", torch.bfloat16), ("reference", torch.float64)):
        query, key, value = (x.to(dtype).requires_grad_() for x in leaves)
        out, lse = ops.call(impl, query, key, value, q_offsets, kv_offsets, list(schedule), spec)
        gradients = torch.autograd.grad(out, (query, key, value), dout.to(dtype))
        results[impl] = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    for name, wanted in results["reference"].items():
        error = _distance(results["tlx"][name], wanted)
        if not error <= _TOLERANCE:
            raise RuntimeError(
                f"self-check on {device}: {name} of the TLX kernels (head size {head_dim}) is {error:.1e} of its norm "
                "off the reference. These kernels are wrong on this GPU or with this compiler; set "
                "GEMATTN_DISABLE_TLX=1 to go on without them, and please report it"
            )


def _distance(found: Tensor, wanted: Tensor) -> float:
    """``|a - b| / |b|``; infinite where they are not finite in the same places."""
    a, b = found.detach().double(), wanted.detach().double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("inf")
    return (torch.linalg.vector_norm((a - b)[finite]) / torch.linalg.vector_norm(b[finite])).item()
