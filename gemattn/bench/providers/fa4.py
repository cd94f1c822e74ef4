"""FlashAttention-4 (`flash_attn.cute`), whichever version this process imports."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch
from torch import Tensor

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, copied_query, needs_cuda, version_of

_DSL_FOLDERS = ("nvidia_cutlass_dsl/dsl_packages", "nvidia_cutlass_dsl/python_packages")
"""Where CuTe DSL keeps `cutlass`; a `.pth` file adds it in a site folder, and nothing does on PYTHONPATH."""


class FlashAttention4(Provider):
    """The varlen function with autograd."""

    def absent(self, device: torch.device) -> str | None:
        """No GPU, or the error of its import."""
        if reason := needs_cuda(device):
            return reason
        try:
            importlib.import_module("flash_attn.cute")
        except ModuleNotFoundError as error:
            if error.name in ("flash_attn", "flash_attn.cute"):
                return "flash_attn.cute is not installed: pip install flash-attn-4, or fa4=FOLDER that holds it"
            return f"flash_attn.cute cannot be imported: {error}"
        except Exception as error:  # CuTe DSL and TVM raise of their own when a library or a driver does not fit
            return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"
        return None

    def version(self) -> str:
        """Its own and CuTe DSL's."""
        return f"{version_of('flash-attn-4')}, {version_of('nvidia-cutlass-dsl')}"

    def prepare(self, case: Case) -> Prepared:
        """int32 offsets and maximum lengths outside the timing, the query's copies inside."""
        function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
        options = {
            "cu_seqlens_q": case.out_offsets.int(),
            "cu_seqlens_k": case.kv_offsets.int(),
            "max_seqlen_q": int(case.q_lengths.max()),
            "max_seqlen_k": int(case.kv_lengths.max()),
            "causal": case.shape.causal,
            "window_size": case.shape.window or (None, None),
        }

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            result = function(copied_query(case, query), key, value, **options)
            out: Tensor = result[0] if isinstance(result, tuple) else result
            return out

        return Prepared(call)


def python_path(folder: str | None, inherited: str) -> str:
    """PYTHONPATH of a process that imports FlashAttention-4 from `folder` (None: from where it is installed).

    Other copies in `inherited`, and what lies below them, are left out: two versions of CuTe DSL do not mix.

    Raises:
        ValueError: no copy in `folder`.
    """
    if folder is None:
        return inherited
    root = Path(folder).resolve()
    if not (root / "flash_attn" / "cute").is_dir():
        raise ValueError(f"fa4={folder}: no flash_attn/cute in that folder")
    entries = [Path(entry).resolve() for entry in inherited.split(os.pathsep) if entry]
    copies = [entry for entry in entries if (entry / "flash_attn" / "cute").is_dir()]
    kept = [entry for entry in entries if not any(entry == copy or copy in entry.parents for copy in copies)]
    own = [root, *(root / part for part in _DSL_FOLDERS if (root / part).is_dir())]
    return os.pathsep.join(map(str, [*own, *kept]))
