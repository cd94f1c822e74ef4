"""Which addresses of global memory belong to tensors that kernels were given."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.tools.tensor_descriptor import TensorDescriptor

from gemattn.testing.tlx_sim.memory import MemoryFault


class Addresses:
    """Memory of every tensor that was given to a launch under one `simulate`."""

    def __init__(self) -> None:
        """None yet."""
        self._starts, self._ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def add(self, value: Any) -> None:
        """Take a launch's argument into account."""
        if isinstance(value, TensorDescriptor):
            value = value.base
        if hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            self.add_range(storage.data_ptr(), storage.nbytes())

    def add_range(self, start: int, size: int) -> None:
        """Take other memory into account."""
        spans = sorted([*zip(self._starts.tolist(), self._ends.tolist(), strict=True), (start, start + size)])
        merged: list[tuple[int, int]] = []
        for begin, end in spans:
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        self._starts, self._ends = (np.array(x, np.uint64) for x in zip(*merged, strict=True))

    def check(self, pointers: np.ndarray, mask: np.ndarray, itemsize: int) -> None:
        """Raise MemoryFault unless all elements that `mask` picks lie inside some tensor."""
        picked = pointers[np.broadcast_to(mask, pointers.shape)]
        if not picked.size:
            return
        places = np.searchsorted(self._starts, picked, side="right") - 1
        inside = (places >= 0) & (picked + np.uint64(itemsize) <= self._ends[places])
        if not inside.all():
            outside = picked[~inside]
            raise MemoryFault(f"{outside.size} of {picked.size} addresses lie outside every tensor")
