"""Named runs of kernels with what they must give: the package's own, and fbtriton's tutorials."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemattn.kernels.schedule import make_schedule
from gemattn.spec import UNLIMITED, AttentionSpec
from gemattn.testing.inputs import JaggedInputs, make_inputs
from gemattn.testing.oracle import run_oracle
from gemattn.testing.tlx_sim import tutorials

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Scenario:
    """Kernels on inputs of their own: `run` launches them, `expected` is what must come out, in float64."""

    arch: int
    run: Callable[[], Results]
    expected: Callable[[], Results]
    tolerance: float = 0.02
    """Of the largest element, for bfloat16 results."""
    explicit_fences: bool = True
    known: tuple[str, ...] = ()
    """Kinds of findings that the kernel really has, and that do no harm."""

    def wrong(self, results: Results) -> str:
        """The first result that is not as expected, or nothing."""
        for name, wanted in self.expected().items():
            error = (results[name].double() - wanted.double()).abs().max().item()
            if not error <= self.tolerance * wanted.double().abs().max().item():
                return f"{name} is off by {error:.2e}"
        return ""


def _tutorial_inputs(length: int, head_dim: int, heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, length, head_dim, generator=generator).bfloat16() for _ in range(4))


@functools.cache
def _tutorial_expected(length: int, head_dim: int, heads: int, causal: bool) -> Results:
    query, key, value, dout = _tutorial_inputs(length, head_dim, heads)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    scores = leaves[0] @ leaves[1].mT * head_dim**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    out = scores.softmax(-1) @ leaves[2]
    grads = torch.autograd.grad(out, leaves, dout.double())
    lse = scores.logsumexp(-1) / math.log(2)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def _forward_tutorial(
    run: Callable[..., tuple[Tensor, Tensor]], arch: int, length: int, head_dim: int, **options: Any
) -> Scenario:
    def launch() -> Results:
        query, key, value, _ = _tutorial_inputs(length, head_dim, 2)
        out, lse = run(query, key, value, head_dim**-0.5, **options)
        return {"out": out, "lse": lse}

    def expected() -> Results:
        wanted = _tutorial_expected(length, head_dim, 2, options.get("causal", False))
        return {"out": wanted["out"], "lse": wanted["lse"]}

    # The Blackwell kernel rescales an accumulator that nothing has written yet; the next product overwrites it.
    known = ("uninitialised read",) if arch == 100 else ()
    return Scenario(arch, launch, expected, explicit_fences=False, known=known)


def _backward_tutorial(length: int, head_dim: int, **options: Any) -> Scenario:
    def launch() -> Results:
        query, key, value, dout = _tutorial_inputs(length, head_dim, 1)
        wanted = _tutorial_expected(length, head_dim, 1, options.get("causal", False))
        saved = wanted["out"].bfloat16(), wanted["lse"].float().contiguous()
        grads = tutorials.blackwell_backward(query, key, value, *saved, dout, head_dim**-0.5, **options)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def expected() -> Results:
        wanted = _tutorial_expected(length, head_dim, 1, options.get("causal", False))
        return {name: wanted[name] for name in ("dq", "dk", "dv")}

    return Scenario(100, launch, expected, explicit_fences=False)


@functools.cache
def _jagged(kind: str) -> tuple[JaggedInputs, AttentionSpec, list[Tensor], Results]:
    """Inputs, options, schedule and float64 results of a jagged batch with a window on both sides."""
    kinds: dict[str, dict[str, Any]] = {
        "self": {"q_lengths": [520, 40]},
        "shared": {"q_lengths": None, "shared_rows": 130, "kv_lengths": [520, 20, 200]},
    }
    inputs = make_inputs(**kinds[kind], heads=1, head_dim=64, dtype=torch.bfloat16)
    window = (450, 30) if kind == "self" else None
    left, right = window or (UNLIMITED, UNLIMITED)
    spec = AttentionSpec(64**-0.5, left, right, inputs.shared_query, False)
    rows = inputs.query.shape[0]
    if inputs.shared_query:
        keys = inputs.key.shape[0]
        schedule = make_schedule(None, inputs.kv_offsets, query_rows=rows, key_rows=keys, shared_query=True)
    else:
        schedule = make_schedule(inputs.q_offsets, query_rows=rows)
    return inputs, spec, list(schedule), run_oracle(inputs, torch.float64, window=window)


def _own_forward(arch: int, kind: str) -> Scenario:
    def launch() -> Results:
        from gemattn.kernels import tlx

        inputs, spec, schedule, _ = _jagged(kind)
        out, lse = tlx.forward(
            inputs.query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets, schedule, spec
        )
        return {"out": out, "lse": lse}

    return Scenario(arch, launch, lambda: {name: _jagged(kind)[3][name] for name in ("out", "lse")})


def _own_backward(arch: int, kind: str) -> Scenario:
    def launch() -> Results:
        from gemattn.kernels import tlx

        inputs, spec, schedule, wanted = _jagged(kind)
        assert inputs.dout is not None
        saved = inputs.query, inputs.key, inputs.value, wanted["out"].bfloat16(), wanted["lse"].float()
        grads = tlx.backward(inputs.dout, inputs.dlse, *saved, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return Scenario(arch, launch, lambda: {name: _jagged(kind)[3][name] for name in ("dq", "dk", "dv")})


SCENARIOS: dict[str, Scenario] = {
    "hopper forward": _own_forward(90, "self"),
    "hopper forward, shared query": _own_forward(90, "shared"),
    "hopper backward": _own_backward(90, "self"),
    "hopper backward, shared query": _own_backward(90, "shared"),
    "blackwell forward": _own_forward(100, "self"),
    "blackwell forward, shared query": _own_forward(100, "shared"),
    "blackwell backward": _own_backward(100, "self"),
    "blackwell backward, shared query": _own_backward(100, "shared"),
    "tutorial hopper forward": _forward_tutorial(tutorials.hopper_forward, 90, 384, 64),
    "tutorial blackwell forward": _forward_tutorial(tutorials.blackwell_forward, 100, 512, 64),
    "tutorial blackwell forward, causal": _forward_tutorial(tutorials.blackwell_forward, 100, 512, 64, causal=True),
    "tutorial blackwell backward": _backward_tutorial(256, 64),
    "tutorial blackwell backward, causal": _backward_tutorial(256, 64, causal=True),
    "tutorial blackwell backward, two programs": _backward_tutorial(512, 128, programs=2),
    "tutorial blackwell backward, two programs, causal": _backward_tutorial(512, 128, programs=2, causal=True),
}
