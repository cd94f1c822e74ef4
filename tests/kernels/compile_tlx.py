"""Compile the Hopper kernels where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_tlx.py --kernel forward query key fused --head-dim 64 128 --mask none both

Prints one JSON object a line: shared memory, matrix instructions, waits for them, and local loads and stores inside the
loops over blocks. Run it as a process of its own: some faults of the compiler abort it.
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

TARGET = GPUTarget("cuda", 90, 32)
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

from gemattn.kernels.tlx.hopper import launch, launch_fused  # noqa: E402 (after the stand-in)

POINTERS = {
    "table": "*i8",
    "tiles_ptr": "*i32",
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


def constants(kernel: str, head_dim: int) -> dict[str, Any]:
    forward, backward = launch.FORWARD[head_dim], launch.BACKWARD[head_dim]
    fused = launch_fused.FUSED[head_dim]
    fused_options = {
        "STAGES_K": fused.stages_k,
        "STAGES_Q": fused.stages_q,
        "REGISTERS": fused.registers,
        "EARLY_DV": fused.early_dv,
    }
    keys = {"BLOCK_N": backward.block_n, "STAGES_KV": backward.stages_kv, "HAS_DLSE": True}
    return {
        "forward": {
            "BLOCK_N": forward.block_n,
            "STAGES_Q": forward.stages_q,
            "STAGES_KV": forward.stages_kv,
            "REGISTERS": forward.registers,
        },
        "query": keys | {"REGISTERS": backward.registers},
        "shared": keys | {"REGISTERS": backward.registers},
        "key": {"STAGES_Q": backward.stages_q, "REGISTERS": backward.registers},
        "fused": fused_options | {"SHARED_QUERY": False},
        "fused_shared": fused_options | {"SHARED_QUERY": True},
    }[kernel]


KERNELS = {
    "forward": launch.forward_kernel,
    "query": launch.query_gradient_kernel,
    "shared": launch.shared_query_gradient_kernel,
    "key": launch.key_gradient_kernel,
    "fused": launch_fused.fused_gradient_kernel,
    "fused_shared": launch_fused.fused_gradient_kernel,
}


def compile_one(kernel: str, head_dim: int, mask: str) -> dict[str, Any]:
    function = KERNELS[kernel]
    has_left, has_right = MASKS[mask]
    values = {"HEAD_DIM": head_dim, "HAS_LEFT": has_left, "HAS_RIGHT": has_right, **constants(kernel, head_dim)}
    signature = {
        name: "constexpr" if name in values else POINTERS.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }
    compiled = triton.compile(
        ASTSource(function, signature, values), target=TARGET, options={"num_warps": 4, "num_stages": 1}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    # Loops over blocks; others branch back past a tile's start or end, where a fused kernel stores dk and dv: more than
    # the stores that stand beside a sum, of which one is taken for a block's dq.
    loops = sorted(innermost_matrix_loops(sass), key=len)
    if kernel.startswith("fused"):
        loops = [loop for loop in loops if count(loop, "UTMASTG") <= count(loop, "UTMAREDG")]
    else:
        loops = loops[:2]  # the shortest, one a consumer
    return {
        "kernel": kernel,
        "head_dim": head_dim,
        "mask": mask,
        "shared": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "tma_loads": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "setmaxnreg": compiled.asm["ptx"].count("setmaxnreg"),
        "loops": [
            {
                "products": count(loop, "HGMMA"),
                "waits": count(loop, "WARPGROUP.DEPBAR"),
                "local": count(loop, "LDL") + count(loop, "STL"),
            }
            for loop in loops
        ],
    }


def count(loop: list[str], instruction: str) -> int:
    return sum(bool(re.search(rf"\b{instruction}\b", line)) for line in loop)


def innermost_matrix_loops(sass: str) -> list[list[str]]:
    """Instructions of the loops that issue matrix products and hold no other loop that does."""
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
            if any("HGMMA" in x for x in instructions[start : end + 1]):
                spans.append((start, end))
    innermost = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    exponential = [any("MUFU.EX2" in x for x in instructions[a : b + 1]) for a, b in innermost]
    innermost = [span for span, has in zip(innermost, exponential, strict=True) if has]
    return [instructions[a : b + 1] for a, b in innermost]


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
