"""Cases of the contract for the package's TLX kernels, one or more a clause, small enough to simulate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemattn.testing.inputs import JaggedInputs, make_inputs
from gemattn.testing.oracle import run_oracle
from gemattn.testing.tlx_sim.simulate import simulate
from gemattn.testing.tolerance import assert_close, run

LENGTHS = [0, 1, 64, 130, 0, 257]
KV_LENGTHS = [5, 0, 300, 129, 0, 20]


class Case(NamedTuple):
    """Arguments of `make_inputs` and options of `jagged_attention`."""

    inputs: dict[str, Any]
    options: dict[str, Any]

    def make(self, device: str = "cpu") -> JaggedInputs:
        """The same inputs on every device."""
        shape: dict[str, Any] = {"heads": 1, "head_dim": 64, "dtype": torch.bfloat16, "slack": 9} | self.inputs
        return make_inputs(**shape).to(device)


_SELF: dict[str, Any] = {"q_lengths": LENGTHS}
_CROSS: dict[str, Any] = {"q_lengths": LENGTHS, "kv_lengths": KV_LENGTHS}
_SHARED: dict[str, Any] = {"q_lengths": None, "shared_rows": 130, "kv_lengths": KV_LENGTHS}

CASES: dict[str, Case] = {
    "self": Case(_SELF, {}),
    "self, D 128, two heads": Case({"q_lengths": [100, 30], "heads": 2, "head_dim": 128}, {}),
    "self, D 32": Case({"q_lengths": [130, 70], "head_dim": 32}, {"causal": True}),
    "cross, D 32, long": Case({"q_lengths": [150], "kv_lengths": [530], "head_dim": 32}, {}),
    "self, float16": Case({"q_lengths": [150, 70], "dtype": torch.float16}, {}),
    "self, causal": Case(_SELF, {"causal": True}),
    "self, window": Case(_SELF, {"window": (100, 50)}),
    "self, left side": Case(_SELF, {"window": (20, None)}),
    "self, right side": Case(_SELF, {"window": (None, 9)}),
    "self, own position": Case({"q_lengths": [70, 130]}, {"window": (0, 0)}),
    "cross": Case(_CROSS, {}),
    "cross, causal": Case(_CROSS, {"causal": True}),
    "cross, causal, D 128": Case({"q_lengths": [140], "kv_lengths": [90], "head_dim": 128}, {"causal": True}),
    "shared query": Case(_SHARED, {}),
    "shared query, causal": Case(_SHARED, {"causal": True}),
    "shared query, D 32": Case(_SHARED | {"head_dim": 32}, {}),
    "grouped heads": Case({"q_lengths": [130, 40], "heads": 2, "kv_heads": 1, "dout": False}, {}),
    "negative scale": Case(_SELF, {"scale": -0.3, "causal": True}),
    "zero scale": Case({"q_lengths": [70]}, {"scale": 0.0}),
    "large scale": Case({"q_lengths": [70, 130]}, {"scale": 30.0}),
    "no sequence": Case({"q_lengths": []}, {}),
    "empty sequences": Case({"q_lengths": [0, 3, 0]}, {}),
    "four sequences, two heads": Case({"q_lengths": [300, 17, 200, 129], "heads": 2}, {}),
}
"""Grouped heads run forward only: their backward is not a TLX kernel's."""


def results(case: Case, device: str = "cpu", seed: int = 0, arch: int = 90) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv by the TLX kernels: on a GPU where `device` is one, else simulated for `arch`.

    Raises:
        AssertionError: the simulation found something.
    """
    arguments = dict(case.inputs)
    forward_only = arguments.pop("dout", True) is False
    inputs = Case(arguments, {}).make(device)
    if forward_only:
        inputs = JaggedInputs(inputs.query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets)
    if device != "cpu":
        return {name: x.cpu() for name, x in run(inputs, "tlx", **case.options).items()}
    with simulate(arch, seed) as simulation:
        found = run(inputs, "tlx", **case.options)
    simulation.report.raise_if_any()
    return found


def check_oracle(case: Case, found: dict[str, Tensor]) -> None:
    """Raise AssertionError unless results are within the package's tolerance of the float64 oracle."""
    inputs = Case({k: v for k, v in case.inputs.items() if k != "dout"}, {}).make()
    options = {k: v for k, v in case.options.items() if k in ("causal", "window", "scale")}
    oracle = run_oracle(inputs, torch.float64, **options)
    plain = run_oracle(inputs, inputs.query.dtype, **options)
    for name, actual in found.items():
        assert_close(name, actual, oracle[name], plain[name], inputs.query.dtype)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """``|a - b| / |b|`` in the Frobenius norm; infinite where they are not finite in the same places."""
    a, b = mine.double(), theirs.double()
    unseen = b == -torch.inf
    if not torch.equal(a == -torch.inf, unseen):
        return float("inf")
    a, b = a.masked_fill(unseen, 0), b.masked_fill(unseen, 0)
    size = torch.linalg.vector_norm(b).item()
    return torch.linalg.vector_norm(a - b).item() / size if size else torch.linalg.vector_norm(a).item()
