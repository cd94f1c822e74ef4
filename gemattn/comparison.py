"""The TLX kernels against the reference on a small batch, for `gemattn.confirm`."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn import dispatch, reference
from gemattn.kernels.schedule import make_schedule
from gemattn.spec import UNLIMITED, AttentionSpec

_TOLERANCE = 0.01
"""Of the reference's Frobenius norm. In the simulator bfloat16 takes 0.003 of it, float16 0.0003."""
_SECONDS = 60
"""How long a GPU may take over kernels that need less than one."""


class _Case(NamedTuple):
    head_dim: int
    dtype: torch.dtype
    shared_query: bool


_CASES = (
    _Case(64, torch.bfloat16, False),
    _Case(128, torch.float16, False),
    _Case(128, torch.bfloat16, True),
)
"""`gemattn.confirm.self_check` tells of them."""


def differences(place: torch.device) -> str:
    """What differs, in words; nothing if all is well. Compiles, launches and syncs, and sees the modes of its thread.

    Raises:
        UnsupportedError: the kernels cannot run on the device.
        TimeoutError: the GPU does not come to an end.
    """
    with torch.no_grad(), _on(place):
        return "; ".join(difference for case in _CASES for difference in _compare(case, place))


@contextlib.contextmanager
def _on(place: torch.device) -> Iterator[None]:
    if place.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()  # the process's, not the thread's
    with torch.cuda.device(place):
        try:
            if mode:
                torch.cuda.set_sync_debug_mode("default")
            _finish(place)
            yield
        finally:
            if mode:
                torch.cuda.set_sync_debug_mode(mode)


def _compare(case: _Case, place: torch.device) -> list[str]:
    generator = torch.Generator("cpu").manual_seed(0)
    query_rows, out_rows, key_rows = (40, 120, 190) if case.shared_query else (180, 180, 190)
    tensors = [
        torch.randn(rows, 2, case.head_dim, generator=generator, dtype=torch.float32, device="cpu").to(case.dtype)
        for rows in (query_rows, key_rows, key_rows, out_rows)
    ]
    spec = AttentionSpec(case.head_dim**-0.5, UNLIMITED, UNLIMITED if case.shared_query else 0, case.shared_query)
    on_device = [x.to(place) for x in tensors]
    dispatch.require("tlx", on_device[0], on_device[1], on_device[2], spec)
    found = _run(importlib.import_module("gemattn.kernels.tlx"), on_device, spec)
    wanted = _run(reference, [x.double() for x in tensors], spec)
    errors = {name: _distance(found[name], x) for name, x in wanted.items()}
    kind = f"{'shared query' if case.shared_query else 'causal'}, head size {case.head_dim}, {case.dtype}"
    return [
        f"{name} ({kind}) is {error:.1e} of its norm off the reference"
        for name, error in errors.items()
        if not error <= _TOLERANCE
    ]


def _run(kernels: ModuleType, tensors: list[Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    query, key, value, dout = tensors
    device = query.device
    q_offsets = None if spec.shared_query else torch.tensor([0, 140, 140, 180], device=device)
    kv_offsets = torch.tensor([0, 150, 150 if spec.shared_query else 170, 190], device=device)
    schedule = make_schedule(
        q_offsets,
        kv_offsets,
        query_rows=query.shape[0],
        key_rows=key.shape[0],
        shared_query=spec.shared_query,
    )
    others = q_offsets, kv_offsets, list(schedule), spec
    out, lse = kernels.forward(query, key, value, *others)
    _finish(device)
    gradients = kernels.backward(dout, None, query, key, value, out, lse, *others)
    _finish(device)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def _finish(device: torch.device) -> None:
    """Wait for the current stream, but not for ever."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + _SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU does not come to an end within {_SECONDS} seconds")
        time.sleep(0.001)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """``|a - b| / |b|``; infinite where they are not finite in the same places."""
    a, b = found.cpu().double(), wanted.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("inf")
    return (torch.linalg.vector_norm((a - b)[finite]) / torch.linalg.vector_norm(b[finite])).item()
