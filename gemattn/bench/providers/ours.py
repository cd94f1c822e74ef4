"""gemattn's own kernels, and any callable with the signature of `gemattn.jagged_attention`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gemattn
from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, version_of
from gemattn.spec import Impl


class Gemattn(Provider):
    """`gemattn.jagged_attention` with one implementation. The schedule is shared by the layers of a model and by
    backward, so it is built once a batch and timed apart.
    """

    kind = "ours"

    def __init__(self, impl: Impl) -> None:
        self.impl = impl

    def absent(self, device: torch.device) -> str | None:
        """The dispatcher's reasons for a small call in the benchmark's dtype."""
        x = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device=device)
        reasons = gemattn.unsupported_reasons(self.impl, x, x, x, torch.zeros(2, dtype=torch.int64, device=device))
        return "; ".join(reasons) or None

    def version(self) -> str:
        """gemattn's and, for kernels, Triton's."""
        return f"gemattn {gemattn.__version__}" + ("" if self.impl == "reference" else f", {triton_version()}")

    def refuses(self, case: Case) -> str | None:
        """The dispatcher's reasons for this very call."""
        reasons = gemattn.unsupported_reasons(
            self.impl, *case.leaves, case.q_offsets, case.kv_offsets, **options_of(case)
        )
        return "; ".join(reasons) or None

    def prepare(self, case: Case) -> Prepared:
        """The call with the batch's schedule (the reference takes none)."""
        return prepare_call(functools.partial(gemattn.jagged_attention, impl=self.impl), case, self.impl != "reference")


class Custom(Provider):
    """A callable "module:function" that takes what `gemattn.jagged_attention` takes."""

    kind = "ours"

    def __init__(self, target: str) -> None:
        self.target = target

    def _load(self) -> Callable[..., Tensor]:
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Tensor] = getattr(importlib.import_module(module), function)
        return loaded

    def absent(self, device: torch.device) -> str | None:
        """The error of its import."""
        try:
            self._load()
        except Exception as error:  # whatever a user's module raises is the reason
            return f"{self.target} cannot be imported: {type(error).__name__}: {error}"
        return None

    def version(self) -> str:
        """Where it comes from."""
        return self.target

    def prepare(self, case: Case) -> Prepared:
        """Its call, with a schedule like ours."""
        return prepare_call(self._load(), case, with_schedule=True)


def prepare_call(function: Callable[..., Tensor], case: Case, with_schedule: bool) -> Prepared:
    """`function` bound to a case, the schedule built beforehand."""
    options = options_of(case)
    if not with_schedule:
        return Prepared(lambda q, k, v: function(q, k, v, case.q_offsets, case.kv_offsets, **options))
    build = functools.partial(
        gemattn.make_schedule,
        case.q_offsets,
        None if case.shape.key is None else case.kv_offsets,
        query_rows=case.query.shape[0],
        key_rows=case.key.shape[0],
        shared_query=options["shared_query"],
    )
    schedule = build()
    kv_offsets = None if case.shape.key is None else case.kv_offsets
    return Prepared(lambda q, k, v: function(q, k, v, case.q_offsets, kv_offsets, schedule=schedule, **options), build)


def options_of(case: Case) -> dict[str, Any]:
    """Keyword arguments of `gemattn.jagged_attention` that a shape asks for."""
    shape = case.shape
    return {"shared_query": shape.shared_rows is not None, "causal": shape.causal, "window": shape.window}


def triton_version() -> str:
    """Which Triton is installed: the fork that holds TLX imports under the same name."""
    fork = version_of("fbtriton")
    return fork if "unknown" not in fork else version_of("triton")
