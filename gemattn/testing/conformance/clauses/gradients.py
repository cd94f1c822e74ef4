"""Clauses 10 and 12: gradients and numerics."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemattn.testing.conformance.clause import clause, over
from gemattn.testing.conformance.subject import DTYPES, KINDS, MASKS, Subject, verify


@clause(10, cases=over(dtype=DTYPES, kind=("cross", "shared"), gradient=("dout", "dlse")))
def one_incoming_gradient(subject: Subject, dtype: torch.dtype, kind: str, gradient: str) -> None:
    """out and lse differentiate each on its own."""
    other: dict[str, Any] = {"dlse": None} if gradient == "dout" else {"dout": None}
    subject.check(replace(subject.few(kind, dtype=dtype), **other), causal=kind == "cross")


@clause(10, cases=over(wanted=("query", "key", "value")))
def one_wanted_gradient(subject: Subject, wanted: str) -> None:
    """Any one of query, key and value may require a gradient alone."""
    inputs = subject.inputs([3, 0, 17], dtype=torch.bfloat16)
    expected = subject.run(replace(inputs, dlse=None))
    tensors = {name: getattr(inputs, name).detach() for name in ("query", "key", "value")}
    leaf = tensors[wanted].requires_grad_()
    out = subject.function(**tensors, q_offsets=inputs.q_offsets)
    (grad,) = torch.autograd.grad(out, leaf, inputs.dout)
    subject.assert_same(f"gradient of {wanted} alone", grad, expected["d" + wanted[0]])
    with torch.no_grad():
        out = subject.function(**tensors, q_offsets=inputs.q_offsets)
    subject.assert_same("out without gradients", out, expected["out"])


@clause(10, cases=over(dtype=DTYPES, scale=(0.0, -0.7, 1e-3, 300.0)))
def scales(subject: Subject, dtype: torch.dtype, scale: float) -> None:
    """Any finite scale: zero, negative, and so large that scores reach 1e4."""
    for kind in ("cross", "shared"):
        results = subject.check(subject.few(kind, dtype=dtype), scale=scale)
        if scale == 0:
            verify(results["dq"].eq(0).all() and results["dk"].eq(0).all(), "dq and dk under scale 0 are not 0")


@clause(10, cases=over(dtype=DTYPES))
def equal_rows(subject: Subject, dtype: torch.dtype) -> None:
    """Rows whose scores are all equal, high or low, weigh their keys equally."""
    for size in (0.0, 30.0, -1000.0):
        inputs = subject.few("cross", dtype=dtype, slack=0)
        inputs.query.fill_(1.0)
        inputs.key.fill_(size)
        for mask in ("full", "causal"):
            subject.check(inputs, **MASKS[mask])


@clause(10, cases=over(kind=KINDS, mask=("full", "causal", "both sides")), owed="reference")
def gradcheck(subject: Subject, kind: str, mask: str) -> None:
    """The reference passes gradcheck and gradgradcheck in float64."""
    q_lengths, kv_lengths = [2, 0, 1, 3], [3, 2, 0, 2]
    small = {"heads": 2, "kv_heads": 1, "head_dim": 2, "dtype": torch.float64}
    if kind == "shared":
        inputs = subject.inputs(None, kv_lengths, shared_rows=2, **small)
    else:
        inputs = subject.inputs(q_lengths, kv_lengths if kind == "cross" else None, **small)
    options = {"window": (2, 1)} if mask == "both sides" else MASKS[mask]
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        offsets = (inputs.q_offsets, inputs.kv_offsets)
        shared = inputs.shared_query
        out, lse = subject.function(query, key, value, *offsets, shared_query=shared, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    torch.autograd.gradcheck(call, leaves)
    torch.autograd.gradgradcheck(call, leaves)


@clause(10, owed="kernels")
def no_double_backward(subject: Subject) -> None:
    """A second derivative through a kernel raises an error; it is never wrong in silence."""
    inputs = subject.inputs([3, 17], dtype=torch.bfloat16)
    query = inputs.query.requires_grad_()
    out = subject.function(query, inputs.key, inputs.value, inputs.q_offsets)
    try:
        (dq,) = torch.autograd.grad(out.float().square().sum(), query, create_graph=True)
        torch.autograd.grad(dq.float().square().sum(), query)
    except (NotImplementedError, RuntimeError):
        return
    raise AssertionError("a second derivative raised nothing")


@clause(12, cases=over(dtype=(torch.float16, torch.bfloat16), kind=("cross", "shared")), owed="kernels")
def scores_are_scaled_in_float32(subject: Subject, dtype: torch.dtype, kind: str) -> None:
    """Scores are scaled after the product: large keys and a large scale overflow nothing."""
    inputs = subject.few(kind, dtype=dtype, slack=0)
    assert inputs.dout is not None and inputs.dlse is not None
    small = {"query": inputs.query * 1e-4, "dout": inputs.dout * 0.01, "dlse": inputs.dlse * 0.01}
    large = replace(inputs, key=inputs.key * 100, **small)
    results = subject.check(large, scale=2000.0)
    verify(all(x.isfinite().all() for name, x in results.items() if name in ("out", "dv")), "a result is not finite")


@clause(12, cases=over(dtype=(torch.float16, torch.bfloat16)), owed="kernels")
def gradients_accumulate_in_float32(subject: Subject, dtype: torch.dtype) -> None:
    """Sums over many rows, heads and sequences round once."""
    rows, heads = (700, 4) if subject.on_gpu else (130, 2)
    inputs = subject.inputs([rows], heads=heads, kv_heads=1, dtype=dtype)
    assert inputs.dout is not None
    inputs.dout.abs_()  # dv only grows
    subject.check(inputs)
    inputs = subject.inputs(None, [3, 9, 0, 5] * (50 if subject.on_gpu else 5), shared_rows=3, dtype=dtype)
    subject.check(inputs)
