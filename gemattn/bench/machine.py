"""What a run was made on: versions, the card, its driver, clocks and power."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

import gemattn
from gemattn.bench.floor import PEAK_TFLOPS
from gemattn.bench.providers.ours import triton_version

_QUERY = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and, on CUDA, the card."""
    about: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gemattn": gemattn.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        about |= {"gpu": None, "cpu": platform.processor() or platform.machine()}
    return about


class ClockReading:
    """Clocks, power and temperature by nvidia-smi, asked for without waiting: `start` while the card works."""

    def __init__(self, index: int = 0) -> None:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-i", str(index)]
        self._process: subprocess.Popen[str] | None
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self._process = None

    def result(self) -> dict[str, Any]:
        """The readings; empty where there is no nvidia-smi or it said nothing."""
        if self._process is None:
            return {}
        try:
            text, _ = self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return {}
        return parse_reading(text)


def parse_reading(text: str) -> dict[str, Any]:
    """One line of nvidia-smi's CSV: numbers where they are numbers."""
    values = [part.strip() for part in text.strip().split(",")]
    names = [name.replace(".", "_") for name in _QUERY.split(",")]
    if len(values) != len(names):
        return {}
    reading: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        try:
            reading[name] = value if name == "driver_version" else float(value)
        except ValueError:
            reading[name] = value
    return reading


def peak_tflops(gpu: str | None) -> float | None:
    """Dense bf16 TFLOP/s that the vendor states for a card, by its name; None for an unknown one."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if gpu and part in gpu), None)
