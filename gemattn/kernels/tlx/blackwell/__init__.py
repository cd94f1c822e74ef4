"""Jagged attention on sm_100: TMA, tcgen05, tensor memory. Compiled and simulated, never run on a B200."""

from gemattn.kernels.tlx.blackwell.launch import forward
from gemattn.kernels.tlx.blackwell.launch_backward import backward

__all__ = ["backward", "forward"]
