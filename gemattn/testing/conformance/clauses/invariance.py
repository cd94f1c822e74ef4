"""Clause 9: batch invariance and determinism."""

import torch

import gemattn
from gemattn.testing.conformance.clause import NotRunHere, clause, over
from gemattn.testing.conformance.subject import DTYPES, MASKS, Subject, own_results, select, verify


@clause(9, cases=over(dtype=DTYPES, kind=("cross", "shared"), mask=("full", "causal, left side")))
def batch_invariance(subject: Subject, dtype: torch.dtype, kind: str, mask: str) -> None:
    """A sequence's out, lse and (deterministic) gradients are the same, bitwise, alone, permuted and among others."""
    kv_lengths = [66, 3, 0, 20, 9]
    if kind == "cross":
        few = subject.inputs([17, 9, 5, 66, 0], kv_lengths, dtype=dtype)
    else:
        few = subject.inputs(None, kv_lengths, shared_rows=20, dtype=dtype)
    options = MASKS[mask] | {"deterministic": True}
    expected = subject.run(few, **options)
    crowd = [0, 0, *[3, 1, 0] * (100 if subject.on_gpu else 1), 4, 4]
    for about, order in (("alone", [0]), ("permuted", [3, 4, 1, 0]), ("in a crowd", crowd)):
        batch = select(few, order)
        results = subject.run(batch, **options)
        for place, b in {b: place for place, b in enumerate(order)}.items():
            wanted = own_results(few, expected, place)
            subject.assert_all_same(own_results(batch, results, b), wanted, f"{about}, sequence {place}")


@clause(9, cases=over(dtype=DTYPES, kind=("self", "cross", "shared")), owed="kernels")
def determinism(subject: Subject, dtype: torch.dtype, kind: str) -> None:
    """Results are bitwise equal from run to run."""
    inputs = subject.few(kind, dtype=dtype)
    expected = subject.run(inputs, deterministic=True)
    for _ in range(20 if subject.on_gpu else 1):
        subject.assert_all_same(subject.run(inputs, deterministic=True), expected)


@clause(9)
def choice_is_not_of_the_batch(subject: Subject) -> None:
    """impl="auto" and the reasons against an implementation are the same for every batch."""
    if not isinstance(subject.impl, str):
        raise NotRunHere("a function has no name to choose")
    seen = set()
    for lengths in ([], [0], [1], [5000], [1] * 300, [0, 7, 0]):
        inputs = subject.inputs(lengths, head_dim=64, dtype=torch.bfloat16)
        tensors = (inputs.query, inputs.key, inputs.value, inputs.q_offsets)
        reasons = gemattn.unsupported_reasons(subject.impl, *tensors)
        seen.add((gemattn.resolve(*tensors), tuple(reasons)))
    verify(len(seen) == 1, f"different batches are answered differently: {seen}")
