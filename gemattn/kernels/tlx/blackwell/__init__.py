"""Jagged attention on sm_100: TMA, tcgen05, tensor memory. Compiled and simulated, never run on a B200."""

from gemattn.kernels.tlx.blackwell.launch import forward

__all__ = ["forward"]
