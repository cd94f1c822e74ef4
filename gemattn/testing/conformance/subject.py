"""The implementation under test on one device or simulated chip, and the batches that clauses ask it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gemattn
from gemattn.testing.inputs import JaggedInputs, make_inputs
from gemattn.testing.poison import poisoned_memory
from gemattn.testing.tolerance import Implementation, compare_with_oracle, run

DTYPES = (torch.float32, torch.bfloat16)
"""One of each arithmetic: float32 as float32, and 16 bits on tensor cores."""

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "own position": {"window": (0, 0)},
    "both sides": {"window": (20, 3)},
    "left side": {"window": (40, None)},
    "right side": {"window": (None, 5)},
    "causal, left side": {"causal": True, "window": (37, 9)},
}
KINDS = ("self", "cross", "shared")

SIMULATED = {"sm_90": 90, "sm_100": 100}
"""Devices that `gemattn.testing.tlx_sim` stands in for, on CPU tensors."""

# Tiles have 64 rows in the interpreter, 16 to 128 on a GPU and simulated, records 128: lengths before, at and after
# those.
_LENGTHS = {
    "cpu": ([0, 3, 65, 17], [70, 0, 9, 20]),
    "few": ([3, 0, 17], [20, 4, 9]),
    "simulated": ([0, 1, 64, 130, 0, 257], [5, 0, 300, 129, 0, 20]),
    "cuda": (
        [0, 1, 15, 16, 17, 63, 65, 129, 0, 300, 257, 128, 64, 500],
        [5, 0, 130, 16, 1, 64, 300, 129, 0, 20, 600, 128, 77, 700],
    ),
}
_SHARED_ROWS = {"cpu": 66, "few": 5, "simulated": 130, "cuda": 150}


class Subject:
    """An implementation on a device, as every clause takes it.

    Args:
        impl: a name, or a function.
        device: a PyTorch device, or one of `SIMULATED`.
    """

    def __init__(self, impl: Implementation, device: torch.device | str):
        self.impl = impl
        self.simulated = SIMULATED.get(str(device))
        self.device = torch.device("cpu" if self.simulated else device)
        self.name = impl if isinstance(impl, str) else getattr(impl, "__name__", type(impl).__name__)
        self.reference = impl == "reference"
        self.function: Callable[..., Any] = (
            impl if callable(impl) else functools.partial(gemattn.jagged_attention, impl=impl)
        )

    @property
    def on_gpu(self) -> bool:
        """Whether tensors are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def compiled(self) -> bool:
        """Whether kernels are those of a GPU, with its tile sizes, on one or simulated."""
        return self.on_gpu or self.simulated is not None

    @contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Within it a simulated chip runs the kernels in the order of that seed; elsewhere it does nothing.

        Raises:
            AssertionError: the simulator found a race, a hang, or a read of what nothing wrote.
        """
        if self.simulated is None:
            yield
            return
        from gemattn.testing.tlx_sim import simulate  # not above: it imports Triton

        with simulate(self.simulated, seed) as simulation:
            yield
        simulation.report.raise_if_any()

    def inputs(
        self, q_lengths: Sequence[int] | None, kv_lengths: Sequence[int] | None = None, **options: Any
    ) -> JaggedInputs:
        """`make_inputs` on the device, float32 by default; one head of size 16 on a CPU, two of 64 on a GPU."""
        defaults: dict[str, Any] = {"heads": 1, "head_dim": 16}
        if self.compiled:
            defaults = {"heads": 2 if self.on_gpu else 1, "head_dim": 64}
        return make_inputs(q_lengths, kv_lengths, device=self.device, **(defaults | options))

    def batch(self, kind: str, **options: Any) -> JaggedInputs:
        """A batch of odd lengths, some of them 0, with slack rows: "self", "cross" or "shared"."""
        return self._batch(kind, "cuda" if self.on_gpu else "simulated" if self.simulated else "cpu", options)

    def few(self, kind: str, **options: Any) -> JaggedInputs:
        """`batch`, but shorter where the interpreter or the simulator would be slow."""
        return self._batch(kind, "cuda" if self.on_gpu else "cpu" if self.simulated else "few", options)

    def _batch(self, kind: str, size: str, options: dict[str, Any]) -> JaggedInputs:
        q_lengths, kv_lengths = _LENGTHS[size]
        options = {"slack": 9} | options
        if kind == "self":
            return self.inputs(q_lengths, **options)
        if kind == "cross":
            return self.inputs(q_lengths, kv_lengths, **options)
        if size == "cpu":
            kv_lengths = kv_lengths[:3]
        return self.inputs(None, kv_lengths, shared_rows=_SHARED_ROWS[size], **options)

    def run(self, inputs: JaggedInputs, **options: Any) -> dict[str, Tensor]:
        """`gemattn.testing.run` in poisoned memory; deterministic unless `options` say otherwise."""
        with poisoned_memory():
            return run(inputs, self.impl, **({"deterministic": True} | options))

    def check(self, inputs: JaggedInputs, **options: Any) -> dict[str, Tensor]:
        """`gemattn.testing.assert_matches_oracle` in poisoned memory; deterministic only if `options` say so."""
        results = self.run(inputs, **({"deterministic": False} | options))
        compare_with_oracle(results, inputs, **options)
        return results

    def assert_same(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """Bitwise equal; the reference owes it within rounding."""
        if self.reference:
            size = expected.masked_fill(expected == -torch.inf, 0).abs().max().item() if expected.numel() else 0.0
            eps = torch.finfo(expected.dtype).eps
            same = torch.allclose(actual, expected, rtol=0, atol=32 * eps * size, equal_nan=True)
        else:
            same = torch.equal(actual, expected)
        if not same:
            difference = (actual.double() - expected.double()).abs()
            raise AssertionError(
                f"{what}: {int((actual != expected).sum())} of {actual.numel()} values differ, "
                f"by up to {difference.nan_to_num(torch.inf).max().item():.3e}"
            )

    def assert_all_same(self, actual: dict[str, Tensor], expected: dict[str, Tensor], about: str = "") -> None:
        """`assert_same` of every result."""
        for name, x in expected.items():
            self.assert_same(f"{about}{': ' if about else ''}{name}", actual[name], x)


def verify(condition: Tensor | bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


def rows_of(inputs: JaggedInputs, b: int) -> tuple[slice, slice]:
    """Rows of sequence `b` in (out, key)."""
    ends = inputs.kv_offsets.tolist()
    starts = [i * inputs.query.shape[0] for i in range(len(ends))]
    if inputs.q_offsets is not None:
        starts = inputs.q_offsets.tolist()
    return slice(starts[b], starts[b + 1]), slice(ends[b], ends[b + 1])


def own_results(inputs: JaggedInputs, results: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """What belongs to sequence `b`; of a shared query without dq, which is a sum over sequences."""
    q, kv = rows_of(inputs, b)
    own = {"out": results["out"][q], "lse": results["lse"][:, q], "dk": results["dk"][kv], "dv": results["dv"][kv]}
    return own if inputs.shared_query else own | {"dq": results["dq"][q]}


def select(inputs: JaggedInputs, order: Sequence[int]) -> JaggedInputs:
    """A batch of the sequences `order` of another one, in that order."""
    rows = [rows_of(inputs, b) for b in order]

    def gather(x: Tensor | None, side: int, dim: int = 0) -> Tensor | None:
        if x is None:
            return None
        return torch.cat([x.narrow(dim, r[side].start, r[side].stop - r[side].start) for r in rows], dim)

    def offsets(side: int, like: Tensor) -> Tensor:
        lengths = torch.tensor([0, *(r[side].stop - r[side].start for r in rows)], dtype=like.dtype)
        return lengths.cumsum(0).to(like)

    key, value = gather(inputs.key, 1), gather(inputs.value, 1)
    assert key is not None and value is not None
    chosen = replace(
        inputs,
        key=key,
        value=value,
        kv_offsets=offsets(1, inputs.kv_offsets),
        dout=gather(inputs.dout, 0),
        dlse=gather(inputs.dlse, 0, 1),
    )
    if inputs.q_offsets is None:
        return chosen
    query = gather(inputs.query, 0)
    assert query is not None
    same = inputs.q_offsets is inputs.kv_offsets
    return replace(chosen, query=query, q_offsets=chosen.kv_offsets if same else offsets(0, inputs.q_offsets))
