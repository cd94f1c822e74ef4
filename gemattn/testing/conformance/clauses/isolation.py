"""Clause 2: a bad sequence hurts only itself, and shows."""

import itertools
from dataclasses import replace

import torch

from gemattn.testing.conformance.clause import NotRunHere, clause, over
from gemattn.testing.conformance.subject import DTYPES, MASKS, Subject, own_results, rows_of, verify

_SHOWS = {
    "query": ("out", "dq", "dk", "dv"),
    "key": ("out", "dq", "dk", "dv"),
    "value": ("out", "dq", "dk"),
    "dout": ("dq", "dk", "dv"),
    "dlse": ("dq", "dk"),
}
"""Where a bad value must show, by the tensor that holds it."""

# A tile that reads past a sequence's end meets its neighbour's first row.
_BAD = {"NaN in the first row": (torch.nan, 0), "Inf in the last row": (torch.inf, -1)}


@clause(2, cases=over(dtype=DTYPES, mask=("full", "causal"), deterministic=(True, False)))
def isolation(subject: Subject, dtype: torch.dtype, mask: str, deterministic: bool) -> None:
    """NaN or Inf in one sequence's query, key, value or incoming gradient reaches no other sequence and shows in its
    own results.
    """
    if not deterministic and not subject.compiled:
        raise NotRunHere("kernels that are not deterministic are not the interpreter's")
    lengths = ([70, 150, 33], [300, 270, 290]) if subject.compiled else ([20, 9, 16], [17, 70, 9])
    inputs = subject.inputs(*lengths, dtype=dtype)
    options = MASKS[mask] | {"deterministic": deterministic}
    expected = subject.run(inputs, **options)
    q, kv = rows_of(inputs, 1)
    for name, (about, (bad, row)) in itertools.product(_SHOWS, _BAD.items()):
        side = kv if name in ("key", "value") else q
        tensor = getattr(inputs, name).clone()
        own_rows = (tensor.T if name == "dlse" else tensor)[side]
        own_rows[row] = bad
        results = subject.run(replace(inputs, **{name: tensor}), **options)
        for b in (0, 2):
            found, others = own_results(inputs, results, b), own_results(inputs, expected, b)
            if not deterministic:  # dq may be summed in another order
                torch.testing.assert_close(found["dq"], others.pop("dq"), rtol=0.02, atol=0.02)
            subject.assert_all_same(found, others, f"{about} of {name}, sequence {b}")
        own = own_results(inputs, results, 1)
        for what in _SHOWS[name]:
            verify(not own[what].isfinite().all(), f"{about} of {name} does not show in its sequence's {what}")
            if bad != bad:
                verify(own[what].isnan().any(), f"{about} of {name} shows in its sequence's {what}, but not as NaN")


@clause(2, cases=over(dtype=DTYPES))
def isolation_under_a_shared_query(subject: Subject, dtype: torch.dtype) -> None:
    """NaN in one sequence's key or value shows in the shared query's gradient and in no other sequence's results."""
    inputs = subject.inputs(None, [20, 65, 16], shared_rows=9, dtype=dtype)
    expected = subject.run(inputs)
    for name in ("key", "value"):
        tensor = getattr(inputs, name).clone()
        tensor[25] = torch.nan
        results = subject.run(replace(inputs, **{name: tensor}))
        for b in (0, 2):
            others = own_results(inputs, expected, b)
            subject.assert_all_same(own_results(inputs, results, b), others, f"NaN in {name}, sequence {b}")
        verify(results["out"][9:18].isnan().all(), f"NaN in {name} does not show in its sequence's out")
        verify(results["dq"].isnan().all(), f"NaN in {name} does not show in the shared query's gradient")


@clause(2, cases=over(dtype=DTYPES))
def scores_that_are_all_minus_infinity(subject: Subject, dtype: torch.dtype) -> None:
    """A row whose visible scores are all -inf shows NaN: it is no row without keys."""
    inputs = subject.inputs([5, 3], dtype=dtype)
    inputs.query[:5] = 1e30
    inputs.key[:5] = -1e30
    results = subject.run(inputs)
    for name in ("out", "dv"):
        verify(results[name][:5].isnan().all(), f"{name} does not show that all scores are -inf")
        verify(results[name][5:].isfinite().all(), f"{name} of the other sequence is not finite")
