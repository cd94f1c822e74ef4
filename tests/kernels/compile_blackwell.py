"""Compile the Blackwell kernels where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_blackwell.py --kernel forward --head-dim 64 128 --mask none both

Prints one JSON object a line: shared memory, tensor memory, instructions, registers, spilled bytes, and local loads and
stores inside the loops that issue matrix products or take exponentials. Run it as a process of its own: some faults of
the compiler abort it.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

TARGET = GPUTarget("cuda", 100, 32)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class StandIn:
    """TLX asks the active driver for its target as it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")

    def get_current_device(self) -> int:
        return 0


driver.set_active(StandIn())

from gemattn.kernels.tlx.blackwell import launch, launch_backward  # noqa: E402 (after the stand-in)

POINTERS = {
    "table": "*i8",
    "tiles_ptr": "*i32",
    "offsets_ptr": "*i64",
    "q_offsets_ptr": "*i64",
    "kv_offsets_ptr": "*i64",
    "lse_ptr": "*fp32",
    "stat_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "scale": "fp32",
    "score_scale": "fp32",
}
MASKS = {"none": (False, False), "causal": (False, True), "both": (True, True)}
SIDES = {"keys": (True, False), "queries": (False, False), "shared_query": (False, True)}
KERNELS = {"forward": launch.forward_kernel} | dict.fromkeys(SIDES, launch_backward.gradient_kernel)


def constants(kernel: str, head_dim: int) -> dict[str, Any]:
    """Constants of a kernel's launches."""
    tile = launch.FORWARD[head_dim] if kernel == "forward" else launch_backward.GRADIENT[head_dim]
    options: dict[str, Any] = {name.upper(): value for name, value in tile._asdict().items()}
    if kernel in SIDES:
        options["KEYS"], options["SHARED"] = SIDES[kernel]
    return options


def machine_code(cubin: bytes) -> tuple[str, str]:
    """(disassembly, resource usage)"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [TOOLS / "nvdisasm", "-c", file.name], [TOOLS / "cuobjdump", "-res-usage", file.name]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    return outputs[0], outputs[1]


def loops(sass: str, instruction: str) -> list[list[str]]:
    """Instructions of the innermost loops that hold one that matches `instruction`."""
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


def compile_one(kernel: str, head_dim: int, mask: str) -> dict[str, Any]:
    function = KERNELS[kernel]
    has_left, has_right = MASKS[mask]
    values = {"HEAD_DIM": head_dim, "HAS_LEFT": has_left, "HAS_RIGHT": has_right, **constants(kernel, head_dim)}
    signature = {
        name: "constexpr" if name in values else POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": kernel != "forward"}
    compiled = triton.compile(ASTSource(function, signature, values), target=TARGET, options=options)
    sass, usage = machine_code(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        "mask": mask,
        "target": re.search(r"\.target (\S+)", ptx).group(1),
        "shared": compiled.metadata.shared,
        "tensor_columns": compiled.metadata.tmem_size,
        "tcgen05.mma": ptx.count("tcgen05.mma."),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "setmaxnreg": sorted(int(x) for x in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "loops": [
            {
                "products": sum("UTCHMMA" in line for line in loop),
                "exponentials": sum("MUFU.EX2" in line for line in loop),
                "local": sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop),
                "instructions": len(loop),
            }
            for loop in loops(sass, r"UTCHMMA|MUFU\.EX2")
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=[64, 128], default=[64, 128])
    parser.add_argument("--mask", nargs="+", choices=list(MASKS), default=["none"])
    arguments = parser.parse_args()
    for head_dim in arguments.head_dim:
        for kernel in arguments.kernel:
            for mask in arguments.mask:
                print(json.dumps(compile_one(kernel, head_dim, mask)), flush=True)
