"""Rows put before jagged sequences and taken from their ends, by index arithmetic alone: no padding, no host sync.

Shape legend: B sequences, T rows of all of them, d width.
"""

import torch
from torch import Tensor


def prepend(values: Tensor, offsets: Tensor, segment: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts k rows before every sequence, by index arithmetic alone.

    Args:
        values: (T, d).
        offsets: (B + 1,). Rows outside every sequence stay outside.
        segment: (T,) of `segment_of`.
        first: (B, k, d).

    Returns:
        (T + B k, d); the new offsets (B + 1,); and where each row of `values` went, (T,).
    """
    size, count, dim = first.shape
    shift = torch.arange(size + 1, device=offsets.device, dtype=offsets.dtype) * count
    old = torch.arange(values.shape[0], device=offsets.device, dtype=offsets.dtype)
    # Rows before the first sequence keep their place.
    row = old + torch.where(old < offsets[0], 0, (segment + 1) * count)
    new_row = ((offsets + shift)[:-1].unsqueeze(1) + torch.arange(count, device=offsets.device)).flatten()
    out = values.new_zeros(values.shape[0] + size * count, dim)
    out.index_copy_(0, row, values)
    out.index_copy_(0, new_row, first.flatten(0, 1).to(out.dtype))
    return out, offsets + shift, row


def rows_from_start(values: Tensor, offsets: Tensor, count: int) -> Tensor:
    """(B, count, d): the first rows of sequences that all have as many."""
    index = offsets[:-1].unsqueeze(1) + torch.arange(count, device=offsets.device)
    return values.index_select(0, index.flatten()).unflatten(0, index.shape)


def rows_from_end(values: Tensor, offsets: Tensor, count: int, skip: int) -> Tensor:
    """(B, count, d): the last rows, the latest first; zeros where a sequence has fewer behind its first `skip` rows."""
    index = offsets[1:].unsqueeze(1) - 1 - torch.arange(count, device=offsets.device)
    there = index >= offsets[:-1].unsqueeze(1) + skip
    rows = values.index_select(0, index.clamp(min=0).flatten()).unflatten(0, index.shape)
    return torch.where(there.unsqueeze(2), rows, 0)
