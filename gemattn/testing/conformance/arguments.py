"""Arguments of `gemattn.jagged_attention`, each wrong in every way that can be seen without reading offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gemattn.kernels.schedule import make_schedule
from gemattn.testing.inputs import JaggedInputs

Wrong = tuple[str, tuple[str, ...], dict[str, Any]]
"""What is wrong, the arguments of which the message must name one, and the changes to a good call."""


def wrong_arguments(inputs: JaggedInputs) -> Iterator[Wrong]:
    """Changes to the call ``(query, key, value, q_offsets)`` of a self-attention batch, each of which must raise
    ValueError or TypeError.
    """
    for name in ("query", "key", "value"):
        for about, x in _wrong_tokens(getattr(inputs, name)):
            yield f"{name}: {about}", (name,), {name: x}
    rows, heads, head_dim = inputs.query.shape
    more = inputs.query.new_zeros(rows + 1, heads, head_dim)
    yield "key: more rows than query", ("key",), {"key": more, "value": more}
    yield "value: fewer rows than key", ("value",), {"value": inputs.value[:-1]}
    three = inputs.query.new_zeros(rows, 2 * heads + 1, head_dim)
    yield "key: more heads than query", ("key",), {"key": three, "value": three}

    assert inputs.q_offsets is not None
    for about, x in _wrong_offsets(inputs.q_offsets):
        yield f"q_offsets: {about}", ("q_offsets",), {"q_offsets": x}
        if x is not None:
            yield f"kv_offsets: {about}", ("kv_offsets",), {"kv_offsets": x}
            shared = {"shared_query": True, "q_offsets": None, "kv_offsets": x}
            yield f"kv_offsets under a shared query: {about}", ("kv_offsets",), shared
    yield "q_offsets: missing", ("q_offsets",), {"q_offsets": None}
    yield "q_offsets: missing beside kv_offsets", ("q_offsets",), {"q_offsets": None, "kv_offsets": inputs.q_offsets}
    yield "kv_offsets: another B", ("kv_offsets", "q_offsets"), {"kv_offsets": inputs.q_offsets[:-1]}
    yield "q_offsets: given with a shared query", ("q_offsets",), {"shared_query": True, "kv_offsets": inputs.q_offsets}
    yield "kv_offsets: missing with a shared query", ("kv_offsets",), {"shared_query": True, "q_offsets": None}

    for name in ("shared_query", "causal", "return_lse", "deterministic"):
        for x in (1, None, "yes", torch.tensor(True), [True]):
            yield f"{name}: {x!r}", (name,), {name: x}
    for x in _WINDOWS:
        yield f"window: {x!r}", ("window",), {"window": x}
    for x in (float("nan"), float("inf"), -float("inf"), "1", 1j, True, [1.0], torch.tensor(1.0)):
        yield f"scale: {x!r}", ("scale",), {"scale": x}
    for about, x in _wrong_schedules(inputs):
        yield f"schedule: {about}", ("schedule",), {"schedule": x}


_WINDOWS: tuple[Any, ...] = (
    3, "ab", (1,), (1, 2, 3), {1, 2}, torch.tensor([1, 2]), (-1, 0), (0, -1), (-1, -1), (1.0, 0), (0, 1.5), (True, 0),
    ("1", 0), (2**31, 0), (None, 2**63), (torch.tensor(1), 0),
)  # fmt: skip


def _wrong_tokens(x: Tensor) -> Iterator[tuple[str, Any]]:
    for other in (None, 1.0, "tokens", [[[1.0]]], x.tolist()):
        yield f"a {type(other).__name__}", other
    for shape in ((), (8,), (8, 32), (1, *x.shape), (1, 1, *x.shape)):
        yield f"shape {shape}", x.new_zeros(shape)
    for dtype in (torch.bool, torch.int8, torch.int64, torch.complex64):
        yield str(dtype), torch.zeros(x.shape, dtype=dtype, device=x.device)
    other_float = torch.float16 if x.dtype != torch.float16 else torch.bfloat16
    yield "another dtype than the others", x.to(other_float)
    yield "another device than the others", torch.empty(x.shape, dtype=x.dtype, device="meta")
    yield "no heads", x.new_zeros(x.shape[0], 0, x.shape[2])
    yield "head size 0", x.new_zeros(x.shape[0], x.shape[1], 0)
    yield "another head size than the others", x.new_zeros(x.shape[0], x.shape[1], x.shape[2] + 8)
    yield "a sparse tensor", x.float().to_sparse().to(x.dtype)


def _wrong_offsets(x: Tensor) -> Iterator[tuple[str, Any]]:
    for other in (1, 1.0, "offsets", x.tolist(), tuple(x.tolist())):
        yield f"a {type(other).__name__}", other
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64):
        yield str(dtype), x.to(dtype)
    for shape in ((), (1, 4), (4, 1), (0,)):
        yield f"shape {shape}", x.new_zeros(shape)
    yield "another device", torch.empty(x.shape, dtype=x.dtype, device="meta")
    yield "a sparse tensor", x.to_sparse()


def _wrong_schedules(inputs: JaggedInputs) -> Iterator[tuple[str, Any]]:
    rows = inputs.query.shape[0]
    good = make_schedule(inputs.q_offsets, query_rows=rows)
    assert inputs.q_offsets is not None
    for other in (1, "schedule", inputs.q_offsets, tuple(good), list(good)):
        yield f"a {type(other).__name__}", other
    yield "of another B", make_schedule(inputs.q_offsets[:-1], query_rows=rows)
    yield "of more rows", make_schedule(inputs.q_offsets, query_rows=rows + 300)
    for name in good._fields:
        x = getattr(good, name)
        for about, field in (
            ("None", None),
            ("a list", x.tolist()),
            ("float", x.float()),
            ("shorter", x[:-1]),
            ("of a rank more", x[None]),
            ("on another device", torch.empty(x.shape, dtype=x.dtype, device="meta")),
        ):
            changes: dict[str, Any] = {name: field}
            yield f"{name} {about}", good._replace(**changes)
