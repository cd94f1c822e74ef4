"""Where the time of a training step goes: the shares of backward and of the attention operator, from torch.profiler."""

import json
import os
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ATTENTION = "gemattn::jagged_attention_"  # forward and backward of every implementation
BACKWARD_CPU = "## backward "  # the train pipeline's own mark
BACKWARD_CUDA = "autograd::engine::evaluate_function"  # one a node of the graph, on autograd's threads

Event = Mapping[str, Any]
Spans = dict[int, list[tuple[float, float]]]  # thread -> disjoint (start, end) in microseconds, in order


@dataclass(frozen=True)
class Shares:
    """Fractions of the step time.

    On a CPU of wall time. On a GPU of the time that its kernels and copies run: a model as small as this one leaves the
    GPU waiting for the host most of the time, and that wait belongs to no part of the step.
    """

    backward: float
    attention: float


def profile_steps(step: Callable[[], object], num_steps: int, device: torch.device) -> Shares:
    """Profiles ``num_steps`` calls of ``step``, which trains on one batch; warm it up beforehand."""
    on_gpu = device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints when it starts and stops
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    # The trace as JSON: profiler.events() needs half a minute for the 200,000 events of twenty steps on a CPU.
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_bytes())["traceEvents"] if event.get("ph") == "X"]
    if on_gpu:
        seconds = gpu_seconds(events)
    backward = BACKWARD_CUDA if on_gpu else BACKWARD_CPU
    time_in = gpu_seconds_in if on_gpu else cpu_seconds_in
    return Shares(backward=time_in(events, backward) / seconds, attention=time_in(events, ATTENTION) / seconds)


def cpu_seconds_in(events: Iterable[Event], prefix: str) -> float:
    """Wall time inside events of this name, nested ones counted once."""
    spans = _outermost(events, prefix)
    return 1e-6 * sum(end - start for thread in spans.values() for start, end in thread)


def gpu_seconds_in(events: Iterable[Event], prefix: str) -> float:
    """Time of the kernels and copies that were launched inside events of this name."""
    spans = _outermost(events, prefix)
    launched = set()
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and _inside(spans.get(event["tid"], []), event["ts"]):
            launched.add(event["args"].get("correlation"))
    return gpu_seconds(event for event in events if event.get("args", {}).get("correlation") in launched)


def gpu_seconds(events: Iterable[Event]) -> float:
    """Time of all kernels and copies."""
    return 1e-6 * sum(event["dur"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))


def _outermost(events: Iterable[Event], prefix: str) -> Spans:
    """Where the CPU is inside events of this name; an operator calls itself by the same name below autograd."""
    found: Spans = defaultdict(list)
    for event in events:
        if event["name"].startswith(prefix) and event.get("cat") in ("cpu_op", "user_annotation"):
            found[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    spans: Spans = {}
    for thread, pieces in found.items():
        spans[thread] = merged = []
        for start, end in sorted(pieces):
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
    return spans


def _inside(spans: list[tuple[float, float]], moment: float) -> bool:
    place = bisect_right(spans, (moment, float("inf"))) - 1
    return place >= 0 and moment < spans[place][1]
