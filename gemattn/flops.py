"""FLOP formulas of the operators, for `torch.utils.flop_counter`.

That module imports Triton where it is installed, which importing this package must not do: the formulas are registered
when somebody imports it, and at once if that has happened already.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gemattn.reference import visible_range
from gemattn.spec import AttentionSpec

_COUNTER = "torch.utils.flop_counter"
_waiting: list[str] = []
_WINDOW = slice(-5, -3)
"""Where the operators have (window_left, window_right): the first two of the five fields of an `AttentionSpec`."""


def register(impl: str) -> None:
    """Register the formulas of an implementation's two operators, now or when they can be used."""
    if _COUNTER in sys.modules:
        _register_now(impl)
        return
    if not _waiting:
        sys.meta_path.insert(0, _WhenImported())
    _waiting.append(impl)


class _WhenImported(MetaPathFinder):
    """Finds the counter's module once, the ordinary way, and registers what waits after it has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Loader) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        sys.modules[_COUNTER] = module
        for impl in _waiting:
            _register_now(impl)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _pairs(query: Tensor, key: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor, window: tuple[int, int]) -> int:
    """Visible (query, key) pairs of one head: true lengths for real tensors, the shapes' bound for fake ones."""
    if isinstance(kv_offsets, torch._subclasses.FakeTensor) or kv_offsets.is_meta:
        rows = query.shape[0] if q_offsets is not None else query.shape[0] * (kv_offsets.shape[0] - 1)
        return rows * key.shape[0]
    n_kv = kv_offsets.diff()
    n_q = torch.full_like(n_kv, query.shape[0]) if q_offsets is None else q_offsets.diff().to(n_kv.dtype)
    spec = AttentionSpec(1.0, *window)
    sequence = torch.repeat_interleave(torch.arange(n_q.numel(), device=n_q.device), n_q)
    i = torch.arange(sequence.numel(), device=n_q.device) - (n_q.cumsum(0) - n_q)[sequence]
    lo, hi = visible_range(i, n_q[sequence], n_kv[sequence], spec)
    return int((hi - lo).clamp(min=0).sum())


def _register_now(impl: str) -> None:
    """Two products of 2 * D FLOPs a visible pair and head forward, five backward (the recomputed scores counted)."""
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula(getattr(torch.ops.gemattn, f"jagged_attention_{impl}"), get_raw=True)
    def forward_flops(query, key, value, q_offsets, kv_offsets, *others, out_val=None, **_):  # type: ignore[no-untyped-def]
        pairs = _pairs(query, key, q_offsets, kv_offsets, others[_WINDOW])
        return 4 * query.shape[1] * query.shape[2] * pairs

    @register_flop_formula(getattr(torch.ops.gemattn, f"jagged_attention_{impl}_backward"), get_raw=True)
    def backward_flops(  # type: ignore[no-untyped-def]
        dout, dlse, query, key, value, out, lse, q_offsets, kv_offsets, *others, out_val=None, **_
    ):
        pairs = _pairs(query, key, q_offsets, kv_offsets, others[_WINDOW])
        return 10 * query.shape[1] * query.shape[2] * pairs
