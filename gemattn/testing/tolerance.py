"""The one tolerance of the package, and the check of a whole call against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemattn.attention import jagged_attention
from gemattn.spec import Impl
from gemattn.testing.inputs import JaggedInputs
from gemattn.testing.oracle import run_oracle

Implementation = Impl | Callable[..., Any]
"""A name that `gemattn.jagged_attention` knows, or a function of its signature (less `impl`)."""


def assert_close(name: str, actual: Tensor, oracle: Tensor, plain: Tensor, dtype: torch.dtype) -> None:
    """``|x - o64| <= 2 |p - o64| + eps(dtype) |o64|`` in the maximum and in the Frobenius norm.

    For float64 inputs the oracle is no more precise than what is tested: there the bound is ``64 eps |o64|``.

    Args:
        actual: x, what is tested.
        oracle: o64, the same in float64.
        plain: p, the same by plain PyTorch in `dtype`.
        dtype: of the inputs.

    Raises:
        AssertionError: names the norm, the error and the bound; also where a value is not finite and the oracle's is.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name} has shape {tuple(actual.shape)}, the oracle's is {tuple(oracle.shape)}")
    if not oracle.numel():
        return
    x, o, p = (t.detach().to(torch.float64) for t in (actual, oracle, plain))
    unseen = o == -torch.inf  # lse of rows that see no key: equal, not close
    if not torch.equal(x == -torch.inf, unseen):
        raise AssertionError(f"{name} is -inf on other rows than the oracle")
    x, o, p = (t.masked_fill(unseen, 0) for t in (x, o, p))
    eps = torch.finfo(dtype).eps
    for norm, order in (("maximum", torch.inf), ("Frobenius", 2)):
        error, plain_error, size = (torch.linalg.vector_norm(t, ord=order).item() for t in (x - o, p - o, o))
        bound = 64 * eps * size if dtype == torch.float64 else 2 * plain_error + eps * size
        if not error <= bound:  # NaN fails
            raise AssertionError(
                f"{name}: error {error:.3e} in the {norm} norm, bound {bound:.3e} (plain PyTorch {plain_error:.3e})"
            )


def run(inputs: JaggedInputs, impl: Implementation = "auto", **options: Any) -> dict[str, Tensor]:
    """out, lse and, where the inputs hold incoming gradients, dq, dk, dv of `gemattn.jagged_attention`.

    The tensors go in as they are, strides and all.
    """
    function = impl if callable(impl) else functools.partial(jagged_attention, impl=impl)
    query, key, value = leaves = [x.detach().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    kv_offsets = None if inputs.kv_offsets is inputs.q_offsets else inputs.kv_offsets
    shared_query = inputs.shared_query
    out, lse = function(
        query, key, value, inputs.q_offsets, kv_offsets, shared_query=shared_query, return_lse=True, **options
    )
    results = {"out": out.detach(), "lse": lse.detach()}
    incoming = [(x, g) for x, g in ((out, inputs.dout), (lse, inputs.dlse)) if g is not None]
    if incoming:
        outputs, grads = zip(*incoming, strict=True)
        results |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, leaves, grads), strict=True))
    return results


def assert_matches_oracle(inputs: JaggedInputs, impl: Implementation = "auto", **options: Any) -> dict[str, Tensor]:
    """Run `gemattn.jagged_attention` forward and backward and compare everything with the float64 oracle.

    Slack rows must be exactly 0. Returns what `run` returned.
    """
    results = run(inputs, impl, **options)
    compare_with_oracle(results, inputs, **options)
    return results


def compare_with_oracle(results: dict[str, Tensor], inputs: JaggedInputs, **options: Any) -> None:
    """What `assert_matches_oracle` asserts, of `results` that `run` made of `inputs` with `options`."""
    oracle_options = {k: v for k, v in options.items() if k in ("causal", "window", "scale")}
    dtype = inputs.query.dtype
    oracle = run_oracle(inputs, torch.float64, **oracle_options)
    plain = run_oracle(inputs, dtype, **oracle_options)
    for name, actual in results.items():
        wanted = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        if actual.dtype != wanted:
            raise AssertionError(f"{name} is {actual.dtype}, wanted {wanted}")
        assert_close(name, actual, oracle[name], plain[name], dtype)
    for name in ("out", "dq"):
        if name in results and inputs.q_offsets is not None:
            assert_zero_slack(name, results[name], inputs.q_offsets)
    for name in ("dk", "dv"):
        if name in results:
            assert_zero_slack(name, results[name], inputs.kv_offsets)


def assert_zero_slack(name: str, x: Tensor, offsets: Tensor) -> None:
    """Rows of `x` before offsets[0] and past offsets[-1] are exactly 0."""
    first, last = int(offsets[0]), int(offsets[-1])
    if x[:first].ne(0).any() or x[last:].ne(0).any():
        raise AssertionError(f"{name}: a slack row is not 0")
