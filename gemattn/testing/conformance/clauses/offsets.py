"""Clauses 3 and 4: slack rows and offsets."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemattn.testing.conformance.arguments import wrong_arguments
from gemattn.testing.conformance.clause import clause, over
from gemattn.testing.conformance.subject import DTYPES, MASKS, Subject, verify
from gemattn.testing.inputs import JaggedInputs


def _with_slack(inputs: JaggedInputs, before: int, after: int, fill: float) -> JaggedInputs:
    """The same batch with rows of `fill` before its first sequence and after its last one."""

    def padded(x: Tensor | None, dim: int = 0) -> Tensor | None:
        if x is None:
            return None
        ends = []
        for rows in (before, after):
            shape = list(x.shape)
            shape[dim] = rows
            ends.append(x.new_full(shape, fill))
        return torch.cat((ends[0], x, ends[1]), dim)

    changed: dict[str, Any] = {"key": padded(inputs.key), "value": padded(inputs.value)}
    changed["kv_offsets"] = inputs.kv_offsets + before
    if inputs.q_offsets is not None:
        changed |= {"query": padded(inputs.query), "dout": padded(inputs.dout), "dlse": padded(inputs.dlse, 1)}
        same = inputs.q_offsets is inputs.kv_offsets
        changed["q_offsets"] = changed["kv_offsets"] if same else inputs.q_offsets + before
    return replace(inputs, **changed)


@clause(3, cases=over(dtype=DTYPES, kind=("self", "cross", "shared"), mask=("full", "causal")))
def slack_rows(subject: Subject, dtype: torch.dtype, kind: str, mask: str) -> None:
    """Rows before offsets[0] and past offsets[-1] are 0 in out and every gradient, and what they hold is never read."""
    if kind == "shared":
        plain = subject.inputs(None, [33, 9], shared_rows=5, dtype=dtype)
    else:
        plain = subject.inputs([20, 66], [33, 9] if kind == "cross" else None, dtype=dtype)
    expected = subject.run(plain, **MASKS[mask])
    before, after = 130, 5
    for fill in (torch.nan, torch.inf) if subject.on_gpu else (torch.nan,):
        results = subject.run(_with_slack(plain, before, after, fill), **MASKS[mask])
        for name, x in results.items():
            if kind == "shared" and name not in ("dk", "dv"):
                subject.assert_same(name, x, expected[name])
                continue
            rows = x.movedim(1, 0) if name == "lse" else x
            wanted = expected[name].movedim(1, 0) if name == "lse" else expected[name]
            subject.assert_same(f"{name} beside slack rows of {fill}", rows[before:-after], wanted)
            rest = torch.cat((rows[:before], rows[-after:]))
            verify(rest.eq(-torch.inf if name == "lse" else 0).all(), f"{name} of slack rows is not cleared")


@clause(4, cases=over(q_dtype=(torch.int32, torch.int64), kv_dtype=(torch.int32, torch.int64)))
def offset_dtypes(subject: Subject, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Offsets are int32 or int64, and those of queries and keys may differ."""
    inputs = subject.inputs([3, 0, 17], [20, 4, 0], dtype=torch.bfloat16)
    assert inputs.q_offsets is not None
    expected = subject.check(inputs)
    as_typed = replace(inputs, q_offsets=inputs.q_offsets.to(q_dtype), kv_offsets=inputs.kv_offsets.to(kv_dtype))
    subject.assert_all_same(subject.run(as_typed), expected)
    if q_dtype == kv_dtype:
        alone = subject.inputs([3, 0, 17], offsets_dtype=q_dtype, dtype=torch.bfloat16)
        subject.check(alone)
        subject.check(subject.inputs(None, [3, 0, 17], shared_rows=4, offsets_dtype=q_dtype, dtype=torch.bfloat16))


_CORRUPTED = ([-5, 40, 20, 1000], [0, 99, 30, 60], [7, 6, 5, 4], [61, 2**31 - 1, -1, 0], [-9, -8, -7, -6])
"""Offsets of three sequences that 60 rows cannot have."""


@clause(
    4,
    cases=over(dtype=(torch.float32,), offsets_dtype=(torch.int64,))
    | over(dtype=(torch.bfloat16,), offsets_dtype=(torch.int32,)),
)
def corrupted_offsets(subject: Subject, dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    """Offsets outside [0, T] or decreasing are clamped and made monotone on the device."""
    plain = subject.inputs([30, 30, 0], dtype=dtype)
    wild = [*_CORRUPTED, [2**40, -(2**40), 3, 2**62]] if offsets_dtype == torch.int64 else _CORRUPTED
    for values in wild:
        bad = torch.tensor(values, dtype=offsets_dtype, device=subject.device)
        mended = bad.to(torch.int64).clamp(0, 60).cummax(0).values
        results, expected = (subject.run(replace(plain, q_offsets=x, kv_offsets=x)) for x in (bad, mended))
        subject.assert_all_same(results, expected, f"offsets {values}")
    for side in ("q_offsets", "kv_offsets"):
        results, expected = (subject.run(replace(plain, **{side: x})) for x in (bad, mended))
        subject.assert_all_same(results, expected, f"{side} {values}")


@clause(4)
def wrong_arguments_are_named(subject: Subject) -> None:
    """Wrong dtypes, devices, ranks, sizes and options raise ValueError or TypeError that names the argument."""
    inputs = subject.inputs([3, 0, 5], dtype=torch.bfloat16)
    good = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "q_offsets": inputs.q_offsets}
    for about, names, changes in wrong_arguments(inputs):
        try:
            subject.function(**(good | changes))
        except (ValueError, TypeError) as error:
            named = any(re.search(rf"\b{name}\b", str(error)) for name in names)
            verify(named, f"{about}: the message names none of {', '.join(names)}: {error}")
        else:
            raise AssertionError(f"{about}: nothing is raised")
