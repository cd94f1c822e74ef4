"""Shared and tensor memory of a program: storages, the buffers allocated in them, and views of buffers.

Shared memory is bytes; tensor memory is 128 lanes of columns of four bytes, and a buffer's place and width there count
bytes within a lane. Memory starts as bytes 0xFF, NaN in every floating-point type, and remembers what was written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemattn.testing.tlx_sim.clocks import Region, Shadow

SHARED_BYTES = 232_448
"""What a program may have on sm_90 and sm_100."""
TENSOR_COLUMNS = 512
LANES = 128


class MemoryFault(Exception):
    """An index out of range, an alias that does not fit."""


@dataclass
class Storage:
    """A stretch of memory of its own; `size` in bytes, of a lane for tensor memory."""

    space: str
    size: int
    data: np.ndarray = field(init=False)
    written: np.ndarray = field(init=False)
    shadow: Shadow = field(default_factory=Shadow)

    def __post_init__(self) -> None:
        count = self.size * (LANES if self.space == "tmem" else 1)
        self.data = np.full(count, 0xFF, np.uint8)
        self.written = np.zeros(count, np.bool_)


@dataclass
class View:
    """Elements of a storage, of numpy type `dtype` and Triton type `element`."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: Any
    dtype: np.dtype[Any]
    label: str
    logical: tuple[int, ...] = ()
    """The shape that values have, where it is not `shape`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def region(self) -> Region:
        """What it covers; the same for a view and its transpose."""
        dims = sorted(((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1), reverse=True)
        return Region(self.offset, tuple(n for _, n in dims), tuple(s for s, _ in dims), self.dtype.itemsize)

    def _array(self) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, self.storage.data.data, self.offset, self.strides)

    def _written(self) -> np.ndarray:
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        return np.ndarray(shape, np.bool_, self.storage.written.data, self.offset, strides)

    def read(self) -> np.ndarray:
        """A copy of the elements."""
        return self._array().copy().reshape(self.logical or self.shape)

    def write(self, values: np.ndarray) -> None:
        """Store elements; more or fewer dimensions of the same size are as good."""
        self._array()[...] = values.reshape(self.shape)
        self._written()[...] = True

    def initialised(self) -> bool:
        """Whether every byte was written."""
        return bool(self._written().all())

    def index(self, place: int) -> View:
        """The place-th part along the first dimension."""
        if not 0 <= place < self.shape[0]:
            raise MemoryFault(f"index {place} of {self.label}, which has {self.shape[0]}")
        offset = self.offset + place * self.strides[0]
        shape, strides = (self.shape[1:], self.strides[1:]) if len(self.shape) > 1 else ((1,), self.strides)
        return self._replace(offset, shape, strides, f"{self.label}[{place}]")

    def slice(self, begins: Sequence[int], shape: Sequence[int]) -> View:
        """A box."""
        if self.logical:
            raise MemoryFault(f"a slice of {self.label}, which is spread over two halves of the lanes")
        offset = self.offset
        for begin, size, extent, stride in zip(begins, shape, self.shape, self.strides, strict=True):
            if begin < 0 or begin + size > extent:
                raise MemoryFault(f"slice {list(begins)} + {list(shape)} of {self.label} {list(self.shape)}")
            offset += begin * stride
        label = f"{self.label}[{', '.join(f'{b}:{b + n}' for b, n in zip(begins, shape, strict=True))}]"
        return self._replace(offset, tuple(shape), self.strides, label)

    def transpose(self, order: Sequence[int]) -> View:
        """Dimensions in another order."""
        shape, strides = tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order)
        return self._replace(self.offset, shape, strides, self.label)

    def reshape(self, shape: Sequence[int]) -> View:
        """Another shape of contiguous elements."""
        return self.reinterpret(self.element, self.dtype, shape)

    def reinterpret(self, element: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> View:
        """Contiguous bytes taken for other elements, or elements of the same size taken for another type."""
        shape = tuple(shape)
        if shape == self.shape and dtype.itemsize == self.dtype.itemsize:
            return View(self.storage, self.offset, shape, self.strides, element, dtype, self.label, self.logical)
        strides = contiguous(shape, dtype.itemsize)
        if math.prod(shape) * dtype.itemsize > self.nbytes or self.strides != contiguous(
            self.shape, self.dtype.itemsize
        ):
            raise MemoryFault(f"{self.label} taken for {list(shape)} of {dtype.itemsize} bytes")
        return View(self.storage, self.offset, shape, strides, element, dtype, self.label)

    def _replace(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], label: str) -> View:
        return View(self.storage, offset, shape, strides, self.element, self.dtype, label)


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Strides of contiguous elements."""
    return tuple(itertools.accumulate(reversed((*shape[1:], itemsize)), lambda a, b: a * b))[::-1]


@dataclass
class Buffers:
    """What one `local_alloc` returned: `count` buffers of one shape."""

    space: str
    count: int
    shape: tuple[int, ...]
    element: Any
    dtype: np.dtype[Any]
    folded: bool = False
    """Tensor memory of 64 rows whose right half of columns lies in the other 64 lanes."""
    name: str = "?"
    alias: Alias | None = None
    storage: Storage | None = None
    base: int = 0
    step: int = 0
    """Bytes from a group of buffers to the next."""
    group: int = 1

    @property
    def size(self) -> int:
        """Bytes of one buffer, of a lane for tensor memory."""
        if self.space == "smem":
            return math.prod(self.shape) * self.dtype.itemsize
        width = self.shape[-1] * self.dtype.itemsize // (2 if self.folded else 1)
        return -(-width // 4) * 4

    def place(self, storage: Storage, base: int, step: int, group: int = 1) -> None:
        """Where they are."""
        if base + (self.count // group - 1) * step + group * self.size > storage.size:
            raise MemoryFault(f"{self.name} does not fit into the memory that it is to reuse")
        self.storage, self.base, self.step, self.group = storage, base, step, group

    def view(self, place: int) -> View:
        """One buffer."""
        if not 0 <= place < self.count:
            raise MemoryFault(f"index {place} of {self.name}, which has {self.count} buffers")
        if self.storage is None:
            assert self.alias is not None
            self.alias.settle()
        assert self.storage is not None
        offset = self.base + place // self.group * self.step + place % self.group * self.size
        itemsize, label = self.dtype.itemsize, f"{self.name}[{place}]"
        if self.space == "smem":
            strides = contiguous(self.shape, itemsize)
            return View(self.storage, offset, self.shape, strides, self.element, self.dtype, label)
        lane = self.storage.size
        if self.folded:
            rows, columns = self.shape
            shape, strides = (rows, 2, columns // 2), (lane, rows * lane, itemsize)
            return View(self.storage, offset, shape, strides, self.element, self.dtype, label, self.shape)
        return View(self.storage, offset, self.shape, (lane, itemsize), self.element, self.dtype, label)


@dataclass
class Alias:
    """Buffers that share a storage, by `storage_alias_spec`."""

    memory: Memory
    space: str
    size: int | None
    members: list[Buffers] = field(default_factory=list)

    def settle(self, tree: Group | None = None) -> None:
        """Give every member its place; without a tree all begin at the first byte."""
        if tree is None:
            size = self.size or max(x.count * x.size for x in self.members)
            storage = self.memory.add(Storage(self.space, size))
            for member in self.members:
                if member.storage is None:
                    member.place(storage, 0, member.size)
            return
        step = tree.width(1)
        counts = {leaf.count // group for leaf, _, group in tree.leaves(0, 1)}
        if len(counts) != 1:
            raise MemoryFault(f"a reuse group of {sorted(counts)} buffers: the numbers must be equal")
        storage = self.memory.add(Storage(self.space, max(self.size or 0, step * counts.pop())))
        for leaf, base, group in tree.leaves(0, 1):
            leaf.place(storage, base, step, group)


@dataclass
class Group:
    """A `reuse_group`."""

    children: list[Group | Buffers]
    distinct: bool
    size: int

    def width(self, group: int) -> int:
        """Bytes of one index of the whole."""
        group *= self.size
        widths = [x.width(group) if isinstance(x, Group) else group * x.size for x in self.children]
        return sum(widths) if self.distinct else max(widths)

    def leaves(self, base: int, group: int) -> list[tuple[Buffers, int, int]]:
        """(buffers, first byte, buffers an index) of every leaf."""
        group *= self.size
        found: list[tuple[Buffers, int, int]] = []
        for child in self.children:
            width = child.width(group) if isinstance(child, Group) else group * child.size
            found += child.leaves(base, group) if isinstance(child, Group) else [(child, base, group)]
            if self.distinct:
                base += width
        return found


@dataclass
class Memory:
    """All memory of one program."""

    storages: list[Storage] = field(default_factory=list)
    barrier_bytes: int = 0

    def add(self, storage: Storage) -> Storage:
        """Make room."""
        self.storages.append(storage)
        return storage

    def shared_bytes(self) -> int:
        """Bytes of shared memory in use."""
        return self.barrier_bytes + sum(x.size for x in self.storages if x.space == "smem")

    def tensor_columns(self) -> int:
        """Columns of tensor memory in use."""
        return sum(-(-x.size // 4) for x in self.storages if x.space == "tmem")
