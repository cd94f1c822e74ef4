"""What a provider is: one attention kernel behind one signature, or a reason why it is not there."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gemattn.bench.case import Case

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) of a case -> out (rows of out, H, D), differentiable."""


@dataclass(frozen=True)
class Prepared:
    """A provider made ready for one case.

    Args:
        call: what is timed, forward and backward.
        setup: what is done once a batch and shared by all layers (a schedule, an index, a block mask); timed apart.
    """

    call: Call
    setup: Callable[[], object] | None = None


class Provider:
    """One attention kernel. Everything about a batch that the host knows anyway (maximum lengths, int32 offsets) is
    prepared outside the timing; whatever touches tokens is inside.
    """

    kind: ClassVar[Literal["ours", "rival"]] = "rival"

    def absent(self, device: torch.device) -> str | None:
        """Why this provider cannot run at all on this machine, or None."""
        raise NotImplementedError

    def version(self) -> str:
        """Of the package behind it."""
        return f"torch {torch.__version__}"

    def refuses(self, case: Case) -> str | None:
        """Why it cannot take this case, or None."""
        return None

    def prepare(self, case: Case) -> Prepared:
        """Make it ready for a case that it does not refuse."""
        raise NotImplementedError


def needs_cuda(device: torch.device) -> str | None:
    """The reason of a provider that has CUDA kernels alone."""
    return None if device.type == "cuda" else "needs a CUDA GPU"


def version_of(distribution: str) -> str:
    """ "name version" of an installed distribution."""
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution}, version unknown"


def copied_query(case: Case, query: Tensor) -> Tensor:
    """The query as a kernel without a shared one needs it: a copy for each sequence. Autograd sums its gradient."""
    if case.shape.shared_rows is None:
        return query
    return query.expand(case.shape.sequences, *query.shape).reshape(-1, *query.shape[1:])
