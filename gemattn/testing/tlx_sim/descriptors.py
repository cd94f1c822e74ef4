"""TMA descriptors in global memory: 128 bytes of which the simulator writes a mark and a number."""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Any

_MARK = 0x5D15C0DE5D15C0DE
_BYTES = 128


class DescriptorTable:
    """All descriptors that kernels wrote, by number. A slot that was overwritten, or never written, is an error."""

    def __init__(self) -> None:
        """Empty; kept as long as `simulate` is active, for one kernel reads what another one wrote."""
        self._made: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._scratch: list[Any] = []

    def put(self, address: int, descriptor: Any) -> int:
        """Write a descriptor to memory; its number."""
        number = next(self._numbers)
        self._made[number] = descriptor
        ctypes.memmove(address, struct.pack("<QQ", _MARK, number) + bytes(_BYTES - 16), _BYTES)
        return number

    def number(self, address: int) -> int:
        """The number of the descriptor at an address."""
        mark, number = struct.unpack("<QQ", ctypes.string_at(address, 16))
        if mark != _MARK or number not in self._made:
            raise ValueError(f"the slot at address {address:#x} holds no descriptor")
        return int(number)

    def get(self, address: int) -> Any:
        """Read a descriptor from memory."""
        return self._made[self.number(address)]

    def scratch(self, size: int, alignment: int) -> int:
        """The address of fresh memory."""
        buffer = ctypes.create_string_buffer(size + alignment)
        self._scratch.append(buffer)
        return -(-ctypes.addressof(buffer) // alignment) * alignment
