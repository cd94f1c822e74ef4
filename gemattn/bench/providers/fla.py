"""flash-linear-attention's parallel softmax attention: causal self-attention in Triton."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, needs_cuda, version_of


class FlaParallel(Provider):
    """`fla.ops.attn.parallel.parallel_attn`."""

    def absent(self, device: torch.device) -> str | None:
        """No GPU, or the error of its import."""
        if reason := needs_cuda(device):
            return reason
        try:
            importlib.import_module("fla.ops.attn.parallel")
        except Exception as error:  # its import reaches into Triton, which raises of its own
            return f"fla.ops.attn.parallel cannot be imported ({type(error).__name__}: {error}): pip install fla-core"
        return None

    def version(self) -> str:
        """Of the package that holds the operators."""
        return version_of("fla-core")

    def refuses(self, case: Case) -> str | None:
        """Anything but causal self-attention."""
        if case.shape.shared_rows is not None or case.shape.key is not None or not case.shape.causal:
            return "has causal self-attention only"
        return "its window is counted otherwise" if case.shape.window is not None else None

    def prepare(self, case: Case) -> Prepared:
        """The packed batch is one of size 1."""
        function = importlib.import_module("fla.ops.attn.parallel").parallel_attn

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = function(query[None], key[None], value[None], cu_seqlens=case.kv_offsets)
            return out[0]

        return Prepared(call)
