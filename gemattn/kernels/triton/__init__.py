"""Jagged attention in portable Triton: every option of the contract, Ampere and newer, and the interpreter on CPU."""

from gemattn.kernels import interpreter

if interpreter.interpreting():
    interpreter.install()

from gemattn.kernels.triton.launch import backward, forward

__all__ = ["backward", "forward"]
