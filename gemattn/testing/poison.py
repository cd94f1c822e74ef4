"""Uninitialised memory that shows: fresh floating-point tensors hold NaN, so a row that nobody wrote is seen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_ALLOCATORS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
)


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return call


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, what Python code allocates uninitialised is filled with NaN. Not for code under `torch.compile`."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATORS]
    try:
        for owner, name, allocate in originals:
            setattr(owner, name, _poisoned(allocate))
        yield
    finally:
        for owner, name, allocate in originals:
            setattr(owner, name, allocate)
