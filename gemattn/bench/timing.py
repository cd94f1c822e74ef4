"""Clocks: device events on CUDA with cold caches, the wall clock on a CPU; and the ceilings of the card.

Both clocks have one interface, so that the command runs on a machine without a GPU too.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gemattn.bench.floor import Ceilings

Region = Callable[[], object]


class Clock(Protocol):
    """Times a region of work."""

    def samples(self, region: Region, repeats: int) -> list[float]:
        """Milliseconds of each of `repeats` runs."""

    def busy_ms(self, region: Region) -> float | None:
        """Milliseconds in which the device ran at least one kernel or copy of the region; None where unknown."""

    def peak_bytes(self, region: Region) -> int | None:
        """The most memory that the region held beyond what was there before; None where unknown."""

    def synchronize(self) -> None:
        """Wait for the device."""


class CpuClock:
    """Wall clock."""

    def samples(self, region: Region, repeats: int) -> list[float]:
        """Milliseconds of each run."""
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            region()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def busy_ms(self, region: Region) -> float | None:
        """Unknown."""
        return None

    def peak_bytes(self, region: Region) -> int | None:
        """Unknown; the region is run all the same."""
        region()
        return None

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events. Before each run a buffer of twice the L2 cache is written, so that nothing is found in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._flush = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def samples(self, region: Region, repeats: int) -> list[float]:
        """Milliseconds of each run. The device first sleeps for about a millisecond, in which the host gets ahead, as
        it is in a training step; a region that waits for the device shows all of its wait. Where runs are short enough
        for several, one more comes first and does not count: others had the host, and its caches, in between.
        """
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        if repeats > 1:
            region()
        torch.cuda._sleep(2_000_000)
        for start, end in events:
            self._flush.zero_()
            start.record()
            region()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def busy_ms(self, region: Region) -> float | None:
        """From one profiled run, overlapping kernels counted once; None where the profiler saw nothing."""
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        self._flush.zero_()
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            region()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profiler.export_chrome_trace(path)
            with open(path) as file:
                events = json.load(file)["traceEvents"]
        return busy_of_trace(events)

    def peak_bytes(self, region: Region) -> int | None:
        """By PyTorch's allocator."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        region()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def busy_of_trace(events: list[dict[str, Any]]) -> float | None:
    """Milliseconds covered by the device activities of a Chrome trace (times in microseconds); None without any."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") in kinds)
    if not spans:
        return None
    total, (start, end) = 0.0, spans[0]
    for next_start, next_end in spans[1:]:
        if next_start > end:
            total += end - start
            start, end = next_start, next_end
        else:
            end = max(end, next_end)
    return (total + end - start) / 1e3


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy and matrix rate of a hot card: the product runs for 1.5 s and its second half counts, the copy follows.

    A card that has just idled is up to 10% faster than one that has worked for a second under its power cap.
    """
    size, seconds = (8192, 1.5) if device.type == "cuda" else (256, 0.1)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matrix_ms = _sustained_ms(lambda: torch.mm(a, b), device, seconds)
    length = (2 << 30) if device.type == "cuda" else (1 << 22)
    source = torch.randint(0, 255, (length,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = _sustained_ms(lambda: target.copy_(source), device, seconds / 3)
    return Ceilings(
        copy_tb_s=2 * length / copy_ms * 1e-9,
        matrix_tflop_s=2 * size**3 / matrix_ms * 1e-9,
        source=f"measured hot in this run: device-to-device copy, bf16 product of {size} x {size} matrices",
    )


def _sustained_ms(region: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Median milliseconds of the second half of the runs that fill `seconds`, in batches without a gap."""
    region()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 4:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                region()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 10)
        else:
            times.extend(CpuClock().samples(region, 1))
    return statistics.median(times[len(times) // 2 :])
