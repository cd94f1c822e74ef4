"""What is the Triton kernels' alone, in the interpreter; `tests/test_conformance.py` holds them to the contract."""

import pytest
import torch

from gemattn.kernels import interpreter
from gemattn.kernels.schedule import Schedule, make_schedule
from gemattn.spec import AttentionSpec
from gemattn.testing import assert_matches_oracle, make_inputs, run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")


def test_shared_query_in_more_sequences_than_chunks(monkeypatch):
    # Two chunks of the batch: a program walks several sequences and keeps its sum.
    from gemattn.kernels.triton import launch

    monkeypatch.setattr(launch, "_SHARED_QUERY_PROGRAMS", 2)
    inputs = make_inputs(None, [9, 0, 70, 33, 1], shared_rows=6, heads=1)
    first = assert_matches_oracle(inputs, "triton")
    assert torch.equal(first["dq"], run(inputs, "triton")["dq"])


def test_a_schedule_of_a_longer_batch_writes_nothing_outside(monkeypatch):
    from gemattn.kernels.triton import backward, forward

    inputs = make_inputs([60, 40], heads=1)
    schedule = list(make_schedule(torch.tensor([0, 60, 127]), query_rows=127))  # 127 // 128 == 100 // 128
    guards = []

    def guarded(shape, **options):
        shape = tuple(shape)
        buffer = torch.full((4096 + torch.Size(shape).numel(),), 7, **options)
        guards.append(buffer)
        return buffer[2048:-2048].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(x.shape, dtype=x.dtype, device=x.device))
    tensors = (inputs.query, inputs.key, inputs.value)
    spec = AttentionSpec(0.25)
    out, lse = forward(*tensors, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
    backward(inputs.dout, None, *tensors, out, lse, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
    assert len(guards) == 6
    for buffer in guards:
        assert buffer[:2048].eq(7).all() and buffer[-2048:].eq(7).all()


def test_without_a_schedule_the_kernels_build_one():
    from gemattn.kernels.triton import forward

    inputs = make_inputs([60, 40], heads=1)
    out, lse = forward(
        inputs.query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets, [], AttentionSpec(0.25)
    )
    results = run(inputs, "triton", scale=0.25)
    assert torch.equal(out, results["out"]) and torch.equal(lse, results["lse"])


def test_tf32_only_when_the_newest_switch_says_so():
    from gemattn.kernels.triton import launch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    query = torch.zeros(1, 1, 16)
    spec = AttentionSpec(1.0)
    try:
        for setting, exact in (("tf32", False), ("ieee", True)):
            matmul.fp32_precision = setting
            assert launch._options(query, spec)["EXACT"] == exact
            assert not launch._options(query.half(), spec)["EXACT"]
    finally:
        matmul.fp32_precision = before


def test_a_given_schedule_serves_two_calls():
    inputs = make_inputs([20, 65], [9, 70], heads=1)
    schedule = make_schedule(inputs.q_offsets, inputs.kv_offsets, query_rows=85, key_rows=79)
    assert isinstance(schedule, Schedule)
    expected = run(inputs, "triton")
    for _ in range(2):
        for name, x in run(inputs, "triton", schedule=schedule).items():
            assert torch.equal(x, expected[name]), name
