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
from gemattn.spec import AttentionSpec, fold_window
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
            found, wanted = results[name].double(), wanted.double()
            error = (found - wanted).abs().where(found != wanted, 0.0).max().item()  # -inf is -inf
            if not error <= self.tolerance * wanted[wanted.isfinite()].abs().max().item():
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
    run: Callable[..., tuple[Tensor, Tensor]], arch: int, length: int, head_dim: int, heads: int = 2, **options: Any
) -> Scenario:
    def launch() -> Results:
        query, key, value, _ = _tutorial_inputs(length, head_dim, heads)
        out, lse = run(query, key, value, head_dim**-0.5, **options)
        return {"out": out, "lse": lse}

    def expected() -> Results:
        wanted = _tutorial_expected(length, head_dim, heads, options.get("causal", False))
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


@dataclass(frozen=True)
class _Batch:
    """A jagged batch of one head: arguments of `make_inputs`, and of the call."""

    q_lengths: tuple[int, ...] | None
    kv_lengths: tuple[int, ...] | None = None
    head_dim: int = 64
    window: tuple[int | None, int | None] | None = None
    shared_rows: int | None = None


_SELF = _Batch((520, 40), window=(450, 30))
_SHORT = _Batch((200, 100, 70, 20, 128, 9, 64, 33), window=(60, 10))
"""Three long tiles for the kernel that has a sequence in one tile, then four of one consumer alone."""
_WIDE = _Batch((300, 140, 40, 100, 128), head_dim=128, window=(200, 30))
_CAUSAL = _Batch((260, 270), head_dim=128, window=(None, 0))
"""A consumer without rows in a tile that is not its program's last."""
_CROSS = _Batch((130, 520), (600, 520))
"""The first sequence is walked by one program, the other one is not."""
_WIDE_CROSS = _Batch((70, 260), (600, 520), head_dim=128)
_SHARED = _Batch(None, (520, 20, 200), shared_rows=130)
_SHARED_WINDOW = _Batch(None, (20, 300), shared_rows=300, window=(200, 0))
"""Most rows see no key of the first sequence."""


@functools.cache
def _jagged(batch: _Batch) -> tuple[JaggedInputs, AttentionSpec, list[Tensor], Results]:
    """Inputs, options, schedule and float64 results of a jagged batch."""
    inputs = make_inputs(
        batch.q_lengths,
        batch.kv_lengths,
        shared_rows=batch.shared_rows,
        heads=1,
        head_dim=batch.head_dim,
        dtype=torch.bfloat16,
    )
    left, right = fold_window(False, batch.window)
    spec = AttentionSpec(batch.head_dim**-0.5, left, right, inputs.shared_query, False)
    schedule = make_schedule(
        inputs.q_offsets,
        None if batch.kv_lengths is None else inputs.kv_offsets,
        query_rows=inputs.query.shape[0],
        key_rows=inputs.key.shape[0],
        shared_query=inputs.shared_query,
    )
    return inputs, spec, list(schedule), run_oracle(inputs, torch.float64, window=batch.window)


def _own_forward(arch: int, batch: _Batch) -> Scenario:
    def launch() -> Results:
        from gemattn.kernels import tlx

        inputs, spec, schedule, _ = _jagged(batch)
        out, lse = tlx.forward(
            inputs.query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets, schedule, spec
        )
        return {"out": out, "lse": lse}

    return Scenario(arch, launch, lambda: {name: _jagged(batch)[3][name] for name in ("out", "lse")})


def _own_backward(arch: int, batch: _Batch) -> Scenario:
    def launch() -> Results:
        from gemattn.kernels import tlx

        inputs, spec, schedule, wanted = _jagged(batch)
        assert inputs.dout is not None
        saved = inputs.query, inputs.key, inputs.value, wanted["out"].bfloat16(), wanted["lse"].float()
        grads = tlx.backward(inputs.dout, inputs.dlse, *saved, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    return Scenario(arch, launch, lambda: {name: _jagged(batch)[3][name] for name in ("dq", "dk", "dv")})


SCENARIOS: dict[str, Scenario] = {
    "hopper forward": _own_forward(90, _SELF),
    "hopper forward, short": _own_forward(90, _SHORT),
    "hopper forward, D 128": _own_forward(90, _WIDE),
    "hopper forward, shared query": _own_forward(90, _SHARED),
    "hopper backward": _own_backward(90, _SELF),
    "hopper backward, short": _own_backward(90, _SHORT),
    "hopper backward, D 128": _own_backward(90, _WIDE),
    "hopper backward, causal, D 128": _own_backward(90, _CAUSAL),
    "hopper backward, fused": _own_backward(90, _CROSS),
    "hopper backward, fused, D 128": _own_backward(90, _WIDE_CROSS),
    "hopper backward, shared query": _own_backward(90, _SHARED),
    "blackwell forward": _own_forward(100, _SELF),
    "blackwell forward, D 128": _own_forward(100, _WIDE),
    "blackwell forward, shared query": _own_forward(100, _SHARED),
    "blackwell forward, shared query, window": _own_forward(100, _SHARED_WINDOW),
    "blackwell backward": _own_backward(100, _SELF),
    "blackwell backward, D 128": _own_backward(100, _WIDE),
    "blackwell backward, shared query": _own_backward(100, _SHARED),
    "blackwell backward, shared query, window": _own_backward(100, _SHARED_WINDOW),
    "tutorial hopper forward": _forward_tutorial(tutorials.hopper_forward, 90, 384, 64),
    # With three blocks or more a tile, the wait for its first keys guards nothing that other waits do not.
    "tutorial hopper forward, two blocks": _forward_tutorial(
        tutorials.hopper_forward, 90, 256, 64, heads=2, programs=1
    ),
    "tutorial blackwell forward": _forward_tutorial(tutorials.blackwell_forward, 100, 512, 64),
    "tutorial blackwell forward, causal": _forward_tutorial(tutorials.blackwell_forward, 100, 512, 64, causal=True),
    "tutorial blackwell backward": _backward_tutorial(256, 64),
    "tutorial blackwell backward, causal": _backward_tutorial(256, 64, causal=True),
    "tutorial blackwell backward, two programs": _backward_tutorial(512, 128, programs=2),
    "tutorial blackwell backward, two programs, causal": _backward_tutorial(512, 128, programs=2, causal=True),
}
