"""Rotary embeddings by position and by time.

RoPE (Su et al., arXiv 2104.09864) turns pairs of query and key components by an angle that grows with the token's
coordinate, so that a score depends on the difference of two coordinates only. The pairs here are (i, i + D / 2).
The coordinate is the position within the sequence, or the logarithm of the event's age.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pairs (x[..., i], x[..., i + D / 2]) by ``angles[..., i]``.

    Args:
        x: (T, H, D), D even.
        angles: (T, D // 2) in radians, one turn for all heads.

    Returns:
        (T, H, D) in the dtype of x; computed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, wanted (T, H, D) with D even")
    if angles.dim() != 2 or angles.shape[0] != x.shape[0] or angles.shape[1] != x.shape[2] // 2:
        raise ValueError(f"angles has shape {tuple(angles.shape)}, wanted ({x.shape[0]}, {x.shape[2] // 2})")
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = angles.to(dtype).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def position_angles(offsets: Tensor, num_tokens: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Angles by position: row t of sequence b turns pair i by ``(t - offsets[b]) * base ** (-2 i / head_dim)``.

    Args:
        offsets: (B + 1,) int32 or int64.
        num_tokens: T, rows of the tokens' values, slack included.
        head_dim: D, even.
        base: longer wavelengths the larger it is.

    Returns:
        (T, head_dim // 2) float32, no gradient, no host sync. Slack rows get finite angles of no meaning. In
        cross-attention queries and keys each count from the start of their own sequence.
    """
    row = torch.arange(num_tokens, device=offsets.device, dtype=offsets.dtype)
    segment = torch.searchsorted(offsets, row, right=True) - 1
    position = row - offsets[segment.clamp(0, offsets.shape[0] - 1)]
    return position.to(torch.float32).unsqueeze(1) * _frequencies(head_dim, base, offsets.device)


def log_age(age_seconds: Tensor, time_scale: float) -> Tensor:
    """``log(1 + age / time_scale)`` in float32: near 0 linear in the age, far back by orders of magnitude.

    Ages below 0 (an event after its example, a clock that is off) count as 0.
    """
    if not time_scale > 0:
        raise ValueError(f"time_scale is {time_scale}, wanted seconds > 0")
    return torch.log1p(age_seconds.to(torch.float32).clamp(min=0) / time_scale)


def time_angles(
    age_seconds: Tensor,
    head_dim: int,
    time_scale: float,
    *,
    max_frequency: float = 16.0,
    base: float = 256.0,
) -> Tensor:
    """Angles by time (ROTE): pair i turns by ``tau * max_frequency * base ** (-2 i / head_dim)``, tau the log age.

    ``tau = log(1 + dt / time_scale)`` is the coordinate that public descriptions of Meta's ads models give for ROTE;
    the frequencies are this package's choice. tau spans 0 to about 16 (a second to a year), far less than positions
    do; so the defaults here cover turns from 1/16 to 16 radians a unit of tau: the slowest pair does not wrap
    around within a year, the fastest tells ages apart that differ by a tenth.

    Args:
        age_seconds: (T,) seconds from the event to the example.
        head_dim: D, even.
        time_scale: seconds below which ages are told apart linearly, above it by their ratio.
        max_frequency: radians a unit of tau of the first pair.
        base: ratio of the first pair's frequency to what would be the next one past the last.

    Returns:
        (T, head_dim // 2) float32.
    """
    if age_seconds.dim() != 1:
        raise ValueError(f"age_seconds has shape {tuple(age_seconds.shape)}, wanted (T,)")
    frequencies = max_frequency * _frequencies(head_dim, base, age_seconds.device)
    return log_age(age_seconds, time_scale).unsqueeze(1) * frequencies


def _frequencies(head_dim: int, base: float, device: torch.device) -> Tensor:
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}, wanted an even number")
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    return torch.pow(base, -exponent)
