"""PyTorch's `varlen_attn`: FlashAttention-2 as built in, FlashAttention-3 or -4 where PyTorch can activate them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, copied_query, needs_cuda


class TorchVarlen(Provider):
    """`torch.nn.attention.varlen.varlen_attn`. An activated implementation holds for the whole process."""

    def __init__(self, flash: str | None = None) -> None:
        self.flash = flash

    def absent(self, device: torch.device) -> str | None:
        """No GPU, no such function, or the error of the activation."""
        if reason := needs_cuda(device):
            return reason
        try:
            importlib.import_module("torch.nn.attention.varlen")
        except ImportError as error:
            return f"torch {torch.__version__} has no torch.nn.attention.varlen: {error}"
        if self.flash is None:
            return None
        activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
        if activate is None:
            return f"torch {torch.__version__} cannot activate another FlashAttention"
        try:
            activate(self.flash)
        except Exception as error:  # a missing or unfit package raises whatever it likes
            return f"torch could not activate {self.flash}: {type(error).__name__}: {error}"
        return None

    def version(self) -> str:
        """PyTorch's, and which FlashAttention."""
        return f"torch {torch.__version__}, {self.flash or 'FA2'}"

    def prepare(self, case: Case) -> Prepared:
        """int32 offsets and maximum lengths outside the timing, the query's copies inside."""
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        known = inspect.signature(function).parameters
        shape = case.shape
        options: dict[str, Any] = {}
        if "window_size" in known:  # torch 2.11 and newer
            options["window_size"] = (-1, 0) if shape.causal else shape.window or (-1, -1)
        elif shape.causal:
            options["is_causal"] = True
        if shape.groups != shape.heads and "enable_gqa" in known:
            options["enable_gqa"] = True
        arguments = (
            case.out_offsets.int(),
            case.kv_offsets.int(),
            int(case.q_lengths.max()),
            int(case.kv_lengths.max()),
        )

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = function(copied_query(case, query), key, value, *arguments, **options)
            return out

        return Prepared(call)

    def refuses(self, case: Case) -> str | None:
        """A window, where this PyTorch's function has none."""
        function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        if case.shape.window is not None and "window_size" not in inspect.signature(function).parameters:
            return f"varlen_attn of torch {torch.__version__} has no window"
        return None
