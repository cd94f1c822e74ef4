"""Correct before fast: out and the gradients of a provider against a float64 oracle, on sampled sequences.

The whole batch is run. What is compared are the rows of the shortest, the longest and a few random sequences; that
nothing else is NaN or infinite is looked at everywhere. The tolerance is that of `gemattn.testing`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Call
from gemattn.reference import visible_range
from gemattn.spec import AttentionSpec, fold_window
from gemattn.testing import assert_close

_CHUNK = 1 << 26
"""Scores held at once by the oracle: 512 MiB in float64."""


class WrongResult(Exception):
    """A provider's result is not within the tolerance."""


class Gate:
    """The oracle's results for one case, computed once and compared with every provider."""

    def __init__(self, case: Case, random_sequences: int = 4) -> None:
        self.case = case
        self.sample = sample_sequences(case, random_sequences)
        self.out_rows = _rows_of(case.out_offsets, self.sample)
        self.kv_rows = _rows_of(case.kv_offsets, self.sample)
        self.dout = case.dout
        if case.shape.shared_rows is not None:
            # The gradient of a shared query sums over the batch. Sequences whose incoming gradient is zero add
            # nothing to it, so with this one the sampled sequences are all of the sum.
            self.dout = torch.zeros_like(case.dout)
            self.dout[self.out_rows] = case.dout[self.out_rows]
        self.oracle = self._expected(torch.float64)
        self.plain = self._expected(case.query.dtype)

    def _expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return expected(self.case, self.sample, dtype)

    def check(self, call: Call) -> dict[str, float]:
        """Run a provider forward and backward; relative errors (Frobenius) of out, dq, dk, dv.

        Raises:
            WrongResult: says what is wrong first.
        """
        case = self.case
        _poison_free_memory(case)
        out = call(*case.leaves)
        if out.shape != case.dout.shape:
            raise WrongResult(f"out has shape {tuple(out.shape)}, wanted {tuple(case.dout.shape)}")
        dq, dk, dv = torch.autograd.grad(out, case.leaves, self.dout)
        q_rows = slice(None) if case.shape.shared_rows is not None else self.out_rows
        actual = {
            "out": (out.detach(), self.out_rows),
            "dq": (dq, q_rows),
            "dk": (dk, self.kv_rows),
            "dv": (dv, self.kv_rows),
        }
        errors = {}
        for name, (tensor, rows) in actual.items():
            if not bool(tensor.isfinite().all()):
                raise WrongResult(f"{name} has values that are not finite")
            try:
                assert_close(name, tensor[rows], self.oracle[name], self.plain[name], case.query.dtype)
            except AssertionError as error:
                raise WrongResult(str(error)) from None
            oracle = self.oracle[name]
            errors[name] = float((tensor[rows].double() - oracle).norm() / oracle.norm())
        return errors


def sample_sequences(case: Case, random_sequences: int) -> list[int]:
    """The sequences with the fewest and with the most pairs, and some others, in order."""
    pairs = case.q_lengths * case.kv_lengths
    others = torch.randint(len(pairs), (random_sequences,), generator=torch.Generator().manual_seed(1))
    return sorted({int(pairs.argmin()), int(pairs.argmax()), *others.tolist()})


def expected(case: Case, sequences: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """out, dq, dk, dv of some sequences by plain PyTorch in `dtype`, one after another.

    Query rows go in chunks, which softmax allows, so that a sequence of 65,536 fits; gradients of keys and values are
    summed over the chunks in float32 or wider and rounded once, as one product would.
    """
    shape = case.shape
    wide = torch.promote_types(dtype, torch.float32)
    out_offsets, kv_offsets = case.out_offsets.tolist(), case.kv_offsets.tolist()
    shared = torch.zeros(case.query.shape, dtype=wide, device=case.query.device)
    results: dict[str, list[Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    for b in sequences:
        rows = slice(out_offsets[b], out_offsets[b + 1])
        query = case.query if shape.shared_rows is not None else case.query[rows]
        key, value = (x[kv_offsets[b] : kv_offsets[b + 1]].detach().to(dtype).requires_grad_() for x in case.leaves[1:])
        dk, dv = (torch.zeros(key.shape, dtype=wide, device=key.device) for _ in range(2))
        step = max(1, _CHUNK // max(1, key.shape[0] * shape.heads))
        for first in range(0, query.shape[0], step):
            part = query[first : first + step].detach().to(dtype).requires_grad_()
            out = attend_rows(part, key, value, first, query.shape[0], shape.causal, shape.window)
            dout = case.dout[rows][first : first + step].to(dtype)
            dq, dk_part, dv_part = torch.autograd.grad(out, (part, key, value), dout)
            results["out"].append(out.detach())
            if shape.shared_rows is not None:
                shared[first : first + step] += dq
            else:
                results["dq"].append(dq)
            dk += dk_part
            dv += dv_part
        results["dk"].append(dk.to(dtype))
        results["dv"].append(dv.to(dtype))
    if shape.shared_rows is not None:
        results["dq"].append(shared.to(dtype))
    return {name: torch.cat(parts) for name, parts in results.items()}


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    rows: int,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Tensor:
    """out (n, H, D) of query rows first .. first + n of a sequence with `rows` queries; key, value (m, G, D)."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, dim=1) if repeat > 1 else x for x in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) * query.shape[2] ** -0.5
    spec = AttentionSpec(1.0, *fold_window(causal, window))
    if spec.masked:
        i = torch.arange(first, first + query.shape[0], device=query.device)
        j = torch.arange(key.shape[0], device=query.device)
        low, high = visible_range(i, torch.full_like(i, rows), torch.full_like(i, key.shape[0]), spec)
        scores = scores.masked_fill((j < low[:, None]) | (j >= high[:, None]), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value)


def _rows_of(offsets: Tensor, sequences: list[int]) -> Tensor:
    starts = offsets.tolist()
    return torch.cat([torch.arange(starts[b], starts[b + 1], device=offsets.device) for b in sequences])


def _poison_free_memory(case: Case) -> None:
    """Fill what the allocator would hand out for out and the gradients with NaN, so that an unwritten row shows."""
    like = [case.dout, *case.leaves]
    held = [torch.full_like(x, torch.nan, requires_grad=False) for x in like]
    del held
