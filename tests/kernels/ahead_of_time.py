"""What the scripts that compile kernels without a GPU share. They run as processes of their own, beside this file."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver

from gemattn.kernels.schedule import make_schedule

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class StandIn:
    """TLX asks the active driver for its target as it is imported and as it compiles, and launches ask it for more."""

    device, stream = 0, 7

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        driver.set_active(self)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 * device + self.stream

    def properties(self) -> None:
        """The target's, for those who ask PyTorch."""
        arch = self.target.arch
        value = SimpleNamespace(multi_processor_count=4, major=arch // 10, minor=arch % 10)
        torch.cuda.get_device_properties = lambda device=None: value


class Asked(CompiledKernel):
    """What Triton asked its compiler for, in place of a compiled kernel: it launches nothing."""

    def __init__(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> None:
        self.src, self.metadata, self.module, self.name = source, SimpleNamespace(target=target), None, source.name
        described = (source.signature, source.constants, source.attrs, options)
        device = driver.active.get_current_device()
        self.function = (source.fn.fn.__name__, device, *(sorted(map(str, x.items())) for x in described))
        self.packed_metadata = ("packed", id(self))

    def __del__(self) -> None:
        """Nothing was loaded."""

    def _init_handles(self) -> None:
        """Nothing to load."""

    @property
    def run(self) -> Any:
        return self.launch

    launch: Callable[..., None] = staticmethod(lambda *arguments: None)
    """What happens at a launch."""


@contextlib.contextmanager
def asked() -> Iterator[list[tuple[ASTSource, dict[str, Any]]]]:
    """Within it nothing is compiled; gives (source, options) of each kernel that launches would have compiled."""
    found = []

    def note(source: ASTSource, target: GPUTarget, options: dict[str, Any], **_: Any) -> Asked:
        found.append((source, options))
        return Asked(source, target, options)

    usual = triton.compiler.compile
    triton.compiler.compile = note
    try:
        yield found
    finally:
        triton.compiler.compile = usual


def batch(head_dim: int, dtype: torch.dtype, kind: str, heads: int = 2, kv_heads: int = 2) -> tuple[Any, ...]:
    """(query, key, value, q_offsets, kv_offsets, schedule); `kind` is self, fused (one projection), cross or shared."""
    offsets = torch.tensor([0, 40, 40, 700])
    kv_offsets = offsets if kind in ("self", "fused") else torch.tensor([0, 33, 300, 640])
    rows, kv_rows = 700, int(kv_offsets[-1])
    if kind == "fused":
        query, key, value = torch.zeros(rows, 3, heads, head_dim, dtype=dtype).unbind(1)
    else:
        query = torch.zeros(80 if kind == "shared" else rows, heads, head_dim, dtype=dtype)
        key, value = torch.zeros(2, kv_rows, kv_heads, head_dim, dtype=dtype)
    q_offsets = None if kind == "shared" else offsets
    schedule = make_schedule(
        q_offsets, kv_offsets, query_rows=query.shape[0], key_rows=kv_rows, shared_query=kind == "shared"
    )
    return query, key, value, q_offsets, kv_offsets, list(schedule)


def machine_code(compiled: CompiledKernel) -> tuple[str, str]:
    """(SASS, use of resources)"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        commands = [TOOLS / "nvdisasm", "-c", file.name], [TOOLS / "cuobjdump", "-res-usage", file.name]
        sass, usage = (subprocess.run(x, capture_output=True, text=True, check=True).stdout for x in commands)
    return sass, usage


def count(lines: Iterable[str], instruction: str) -> int:
    """How many instructions match a pattern."""
    return sum(bool(re.search(rf"\b{instruction}\b", line)) for line in lines)


def innermost_loops(sass: str, instruction: str) -> list[list[str]]:
    """Instructions of the loops that hold one that matches the pattern, and no other loop that does."""
    labels, instructions = {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
    spans = []
    for end, line in enumerate(instructions):
        branch = re.search(r"\bBRA\b.*\.(L_x_\d+)", line)
        if branch and labels.get(branch.group(1), end + 1) <= end:
            start = labels[branch.group(1)]
            if any(re.search(instruction, x) for x in instructions[start : end + 1]):
                spans.append((start, end))
    innermost = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return [instructions[a : b + 1] for a, b in innermost]
