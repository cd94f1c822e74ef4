"""Clause 1: empty is ordinary."""

import itertools

import torch

from gemattn.testing.conformance.clause import clause, over
from gemattn.testing.conformance.subject import DTYPES, MASKS, Subject, verify

_NOTHING: tuple[tuple[list[int] | None, list[int] | None, int | None, int], ...] = (
    # query lengths, key lengths, shared rows, slack
    ([0, 0, 0], None, None, 0),
    ([0, 0, 0], None, None, 200),
    ([], None, None, 0),
    ([], None, None, 5),
    ([3, 0, 70], [0, 0, 0], None, 2),
    ([0, 0], [5, 70], None, 2),
    (None, [0, 0], 6, 0),
    (None, [], 6, 3),
    (None, [4, 70], 0, 0),
)


@clause(1, cases=over(dtype=DTYPES))
def empty_sequences(subject: Subject, dtype: torch.dtype) -> None:
    """Sequences without queries, without keys or without both, first, last and between others."""
    for q_lengths, kv_lengths in (([0, 17, 0, 5, 0], [9, 0, 0, 20, 0]), ([5, 0, 3], [0, 4, 70])):
        for mask in ("full", "causal", "both sides"):
            subject.check(subject.inputs(q_lengths, kv_lengths, dtype=dtype), **MASKS[mask])
    for mask in ("full", "causal"):
        subject.check(subject.inputs(None, [0, 20, 0], shared_rows=5, dtype=dtype), **MASKS[mask])


@clause(1, cases=over(dtype=DTYPES, causal=(False, True)))
def nothing_to_attend_to(subject: Subject, dtype: torch.dtype, causal: bool) -> None:
    """B = 0, T = 0, all sequences empty, no keys or no queries at all: out 0, lse -inf, zero gradients."""
    for q_lengths, kv_lengths, shared_rows, slack in _NOTHING:
        about = f"lengths {q_lengths}, {kv_lengths}, {shared_rows} shared rows, {slack} slack rows"
        inputs = subject.inputs(q_lengths, kv_lengths, shared_rows=shared_rows, slack=slack, dtype=dtype)
        assert inputs.dout is not None and inputs.dlse is not None
        inputs.dout.fill_(torch.nan)
        inputs.dlse.fill_(torch.nan)
        results = subject.run(inputs, causal=causal)
        verify(results.pop("lse").eq(-torch.inf).all(), f"{about}: lse is not -inf")
        for name, x in results.items():
            verify(x.eq(0).all(), f"{about}: {name} is not 0")


@clause(1, cases=over(dtype=DTYPES, kind=("cross", "shared")))
def gradients_of_rows_that_see_no_key(subject: Subject, dtype: torch.dtype, kind: str) -> None:
    """Rows before a causal sequence's first key give out 0, lse -inf and gradient 0, and NaN that comes in for them is
    ignored.
    """
    if kind == "cross":
        inputs, unseen = subject.inputs([40, 70], [9, 20], dtype=dtype), [slice(0, 31), slice(40, 90)]
    else:
        inputs, unseen = subject.inputs(None, [9, 70], shared_rows=40, dtype=dtype), [slice(0, 31)]
    expected = subject.run(inputs, causal=True)
    assert inputs.dout is not None and inputs.dlse is not None
    for rows in unseen:
        inputs.dout[rows] = torch.nan
        inputs.dlse[:, rows] = torch.nan
    results = subject.run(inputs, causal=True)
    subject.assert_all_same(results, expected, "with NaN gradients for unseen rows")
    for rows in unseen:
        verify(results["out"][rows].eq(0).all(), "out of rows that see no key is not 0")
        verify(results["lse"][:, rows].eq(-torch.inf).all(), "lse of rows that see no key is not -inf")
        if kind == "cross":
            verify(results["dq"][rows].eq(0).all(), "dq of rows that see no key is not 0")


@clause(1, cases=over(dtype=DTYPES))
def rows_without_keys_beside_a_nan(subject: Subject, dtype: torch.dtype) -> None:
    """A row that sees no key stays 0 though a NaN key or value of its sequence shares its tile."""
    for shared, name in itertools.product((False, True), ("key", "value")):
        if shared:
            inputs = subject.inputs(None, [9, 60], shared_rows=40, dtype=dtype)
        else:
            inputs = subject.inputs([40], [9], dtype=dtype)
        getattr(inputs, name)[3] = torch.nan
        results = subject.run(inputs, causal=True)
        verify(results["out"][:31].eq(0).all(), "out of rows that see no key is not 0")
        verify(results["out"][31:40].isnan().any(), "out of the rows that see the NaN does not show it")
        if shared:
            verify(not results["dq"][:31].isnan().any(), "dq of rows that see no key of the bad sequence is NaN")
            verify(results["dq"][35:].isnan().all(), "dq of the rows that see the NaN does not show it")
        else:
            verify(results["dq"][:31].eq(0).all(), "dq of rows that see no key is not 0")
