"""Shares of the step time, on made-up traces whose sums are known and on a real step."""

import time

import pytest
import torch

from examples.profiling import cpu_seconds_in, gpu_seconds, gpu_seconds_in, profile_steps


def event(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "args": args}


def test_nested_events_count_once_and_threads_apart():
    events = [
        event("op", 0.0, 100.0),
        event("op", 10.0, 50.0),  # the same operator below autograd
        event("op_backward", 200.0, 30.0),
        event("op", 50.0, 40.0, tid=2),
        event("op", 0.0, 500.0, cat="gpu_user_annotation"),
        event("other", 0.0, 1000.0),
    ]
    assert cpu_seconds_in(events, "op") == pytest.approx(170e-6)
    assert cpu_seconds_in(events, "nothing") == 0.0


def test_kernels_belong_to_the_events_that_launched_them():
    events = [
        event("op", 0.0, 100.0),
        event("launch", 20.0, 5.0, cat="cuda_runtime", correlation=1),
        event("launch", 120.0, 5.0, cat="cuda_runtime", correlation=2),
        event("launch", 20.0, 5.0, cat="cuda_runtime", tid=2, correlation=3),
        event("launch", 90.0, 5.0, cat="cuda_driver", correlation=4),
        event("kernel", 300.0, 7.0, cat="kernel", tid=9, correlation=1),
        event("kernel", 310.0, 100.0, cat="kernel", tid=9, correlation=2),
        event("kernel", 400.0, 100.0, cat="kernel", tid=9, correlation=3),
        event("copy", 500.0, 11.0, cat="gpu_memcpy", tid=9, correlation=4),
    ]
    assert gpu_seconds_in(events, "op") == pytest.approx(18e-6)
    assert gpu_seconds(events) == pytest.approx(218e-6)


def test_shares_of_a_real_step():
    def step() -> None:
        with torch.profiler.record_function("gemattn::jagged_attention_stand_in"):
            time.sleep(0.01)
        with torch.profiler.record_function("## backward 3 ##"):
            time.sleep(0.02)
        time.sleep(0.01)

    shares = profile_steps(step, 5, torch.device("cpu"))
    assert 0.1 < shares.attention < 0.3
    assert 0.35 < shares.backward < 0.65
