"""What the scripts that compile kernels without a GPU share. They run as processes of their own, beside this file."""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {
    "table": "*i8",
    "tiles_ptr": "*i32",
    "longer_ptr": "*i32",
    "offsets_ptr": "*i64",
    "q_offsets_ptr": "*i64",
    "kv_offsets_ptr": "*i64",
    "lse_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "stat_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "scale": "fp32",
    "score_scale": "fp32",
}
MASKS = {"none": (False, False), "causal": (False, True), "both": (True, True)}


class StandIn:
    """TLX asks the active driver for its target as it is imported and as it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        driver.set_active(self)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_current_device(self) -> int:
        return 0


def compile_function(
    function: Any, head_dim: int, mask: str, constants: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, str, str]:
    """(compiled kernel, its machine code, its use of resources) for the target of the active `StandIn`, bfloat16."""
    has_left, has_right = MASKS[mask]
    values = {"HEAD_DIM": head_dim, "HAS_LEFT": has_left, "HAS_RIGHT": has_right, **constants}
    signature = {
        name: "constexpr" if name in values else POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    target = driver.active.get_current_target()
    compiled = triton.compile(ASTSource(function, signature, values), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        commands = [TOOLS / "nvdisasm", "-c", file.name], [TOOLS / "cuobjdump", "-res-usage", file.name]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    return compiled, outputs[0], outputs[1]


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


def main(about: str | None, kernels: Iterable[str], compile_one: Callable[[str, int, str], dict[str, Any]]) -> None:
    """Command line of a script: one JSON object a line for each kernel, head size and mask that is asked for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", choices=list(kernels), default=list(kernels))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=[32, 64, 128], default=[32, 64, 128])
    parser.add_argument("--mask", nargs="+", choices=list(MASKS), default=["none"])
    arguments = parser.parse_args()
    for head_dim in arguments.head_dim:
        for kernel in arguments.kernel:
            for mask in arguments.mask:
                print(json.dumps(compile_one(kernel, head_dim, mask)), flush=True)
