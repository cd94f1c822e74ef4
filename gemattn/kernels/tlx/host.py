"""What the host sides of the TLX kernels share."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

DESCRIPTOR_BYTES = 128
WIDEST_WINDOW = 1 << 30
"""No sequence is longer: a wider window would only overflow the kernels' 32-bit positions."""


class Gradients(NamedTuple):
    """What backward fills; each kernel writes the rows of its own sequences."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs that a persistent grid has on the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def described(x: Tensor) -> Tensor:
    """`x`, or a copy that TMA can describe: gradients come in any layout, expanded from a scalar among others."""
    rows, heads, _ = x.shape
    strides = ((x.stride(0), rows), (x.stride(1), heads))
    regular = x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 and s > 0 for s, n in strides if n > 1)
    return x if regular and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def strides_of(x: Tensor) -> tuple[int, int]:
    """(row, head) strides; a dimension of size 1 may hold any stride, and TMA would mind."""
    rows, heads, head_dim = x.shape
    return (x.stride(0) if rows > 1 else heads * head_dim, x.stride(1) if heads > 1 else head_dim)
