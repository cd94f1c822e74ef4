"""Jagged attention on sm_90: TMA, wgmma, warp-specialised."""

from gemattn.kernels.tlx.hopper.launch import backward, forward

__all__ = ["backward", "forward"]
