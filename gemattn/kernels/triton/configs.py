"""Tile shapes: a frozen table by kernel, head size, element size and GPU family, never by anything of the batch.

A sequence's result must not depend on what shares the batch with it, so nothing is tuned at run time.
"""

import functools
from typing import Literal, NamedTuple

import torch

Kernel = Literal["forward", "query_gradient", "shared_query_gradient", "key_gradient"]
Family = Literal["a100", "small", "hopper", "interpreter"]


class Tile(NamedTuple):
    """Rows of a tile and launch options. Both row counts divide the 128 rows of a schedule's record, if not larger."""

    block_m: int
    """Query rows."""
    block_n: int
    """Key rows."""
    warps: int
    stages: int


def block_d(head_dim: int) -> int:
    """Columns of a tile: the power of two that holds the head."""
    return max(16, 1 << (head_dim - 1).bit_length())


@functools.cache
def family(device: torch.device) -> Family:
    """Which column of the table a device reads."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (8, 0):
        return "a100"
    if major in (9, 10):
        return "hopper"
    return "small"  # 99 KB of shared memory a block: 8.6, 8.9, 12.0


def tile(kernel: Kernel, head_dim: int, element_size: int, where: Family) -> Tile:
    """The tile of a kernel; ``head_dim`` 16 to 256, ``element_size`` 2 or 4 bytes."""
    if where == "interpreter":
        return _INTERPRETER[kernel]
    columns = max(32, block_d(head_dim))
    return (_HALF if element_size == 2 else _FLOAT)[where][kernel][columns]


_INTERPRETER: dict[Kernel, Tile] = {
    "forward": Tile(64, 64, 1, 1),
    "query_gradient": Tile(64, 64, 1, 1),
    "shared_query_gradient": Tile(64, 64, 1, 1),
    "key_gradient": Tile(64, 64, 1, 1),
}

# 16-bit types on tensor cores. "hopper" was chosen by measurement on an H200, the others by what the compiler reports:
# they fit shared memory and do not spill.
_HALF: dict[Family, dict[Kernel, dict[int, Tile]]] = {
    "hopper": {
        "forward": {
            32: Tile(64, 32, 4, 4),
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 32, 4, 3),
            256: Tile(128, 32, 8, 3),
        },
        "query_gradient": {
            32: Tile(64, 32, 4, 4),
            64: Tile(64, 64, 4, 3),
            128: Tile(64, 64, 4, 2),
            256: Tile(64, 32, 4, 1),
        },
        "shared_query_gradient": {
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 32, 4, 1),
        },
        "key_gradient": {
            32: Tile(32, 64, 4, 4),
            64: Tile(32, 128, 4, 4),
            128: Tile(32, 64, 4, 3),
            256: Tile(32, 64, 8, 2),
        },
    },
    "a100": {
        "forward": {
            32: Tile(128, 64, 4, 3),
            64: Tile(128, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 64, 8, 2),
        },
        "query_gradient": {
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 2),
            128: Tile(64, 64, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
        "shared_query_gradient": {
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 2),
            128: Tile(64, 64, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
        "key_gradient": {
            32: Tile(64, 64, 4, 3),
            64: Tile(32, 128, 8, 3),
            128: Tile(32, 64, 8, 2),
            256: Tile(32, 64, 8, 1),
        },
    },
    "small": {
        "forward": {
            32: Tile(128, 64, 4, 3),
            64: Tile(128, 64, 4, 2),
            128: Tile(64, 32, 4, 3),
            256: Tile(64, 32, 8, 1),
        },
        "query_gradient": {
            32: Tile(64, 64, 4, 2),
            64: Tile(64, 64, 4, 2),
            128: Tile(64, 32, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
        "shared_query_gradient": {
            32: Tile(64, 64, 4, 2),
            64: Tile(64, 64, 4, 2),
            128: Tile(64, 32, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
        "key_gradient": {
            32: Tile(64, 64, 4, 2),
            64: Tile(32, 128, 8, 2),
            128: Tile(32, 64, 8, 1),
            256: Tile(16, 32, 8, 1),
        },
    },
}

# float32 on the scalar units: small tiles, everywhere the same.
_FLOAT_ANY: dict[Kernel, dict[int, Tile]] = {
    "forward": {
        32: Tile(64, 32, 4, 2),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 4, 1),
        256: Tile(32, 16, 8, 1),
    },
    "query_gradient": {
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 16, 8, 1),
    },
    "shared_query_gradient": {
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 16, 8, 1),
    },
    "key_gradient": {
        32: Tile(32, 32, 4, 1),
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 8, 1),
        256: Tile(16, 16, 8, 1),
    },
}
_FLOAT: dict[Family, dict[Kernel, dict[int, Tile]]] = {
    "hopper": _FLOAT_ANY,
    "a100": _FLOAT_ANY,
    "small": _FLOAT_ANY,
}
