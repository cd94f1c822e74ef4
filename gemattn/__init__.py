"""gemattn: jagged flash attention for generative recommendation models.

>>> gemattn.jagged_attention(query, key, value, offsets)      # the function
>>> gemattn.JaggedAttention(embed_dim=128, num_heads=4)       # the module, on TorchRec's KeyedJaggedTensor

Importing this package imports neither Triton nor TorchRec; kernels and modules load when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from gemattn.attention import jagged_attention, resolve, unsupported_reasons
from gemattn.confirm import self_check
from gemattn.dispatch import UnsupportedError
from gemattn.kernels.schedule import Schedule, make_schedule

__version__ = "0.1.0"

_SUBMODULES = ("bench", "nn", "rec", "testing")
_LAZY = {"JaggedAttention": "gemattn.nn", "SharedQueryPooling": "gemattn.nn", "JaggedTransformerBlock": "gemattn.nn"}

__all__ = [
    "JaggedAttention",
    "JaggedTransformerBlock",
    "Schedule",
    "SharedQueryPooling",
    "UnsupportedError",
    "jagged_attention",
    "make_schedule",
    "resolve",
    "self_check",
    "unsupported_reasons",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"gemattn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_SUBMODULES])
