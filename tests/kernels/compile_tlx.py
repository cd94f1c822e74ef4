"""Compile the Hopper kernels where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_tlx.py --kernel forward short query key tile fused --head-dim 64 128 --mask none both

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

from gemattn.kernels.tlx.hopper import launch, launch_fused, launch_split  # noqa: E402 (after the stand-in)

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


def constants(kernel: str, head_dim: int) -> dict[str, Any]:
    """Constants of a kernel's launches; "forward" and "short" are the forward kernel's two classes of sequences."""
    fused = launch_fused.FUSED[head_dim]
    if kernel in ("forward", "short"):
        tile = launch.FORWARD[head_dim][kernel == "short"]
        options = {name.upper(): value for name, value in tile._asdict().items() if name != "num_stages"}
        return options | ({"BEGIN": 0, "END": -1} if kernel == "short" else {"BEGIN": -1, "END": 0})
    fused_options = {
        "STAGES_K": fused.stages_k,
        "STAGES_Q": fused.stages_q,
        "REGISTERS": fused.registers,
        "EARLY_DV": fused.early_dv,
    }
    return {
        "query": query_options(launch_split.QUERY[head_dim][0]),
        "query_short": query_options(launch_split.QUERY[head_dim][1]),
        "key": {
            **{name.upper(): value for name, value in launch_split.KEY[head_dim]._asdict().items()},
            "REGISTERS": launch_split.REGISTERS,
            "BEGIN": -1,
            "END": -1,
            "KEYS_UP_TO": 256,
        },
        "tile": {
            "STAGES": launch_split.ONE_TILE_STAGES[head_dim],
            "REGISTERS": launch_split.REGISTERS,
            "HAS_DLSE": True,
            "BEGIN": launch_split.ONE_TILE_CLASS,
        },
        "fused": fused_options | {"SHARED_QUERY": False},
        "fused_shared": fused_options | {"SHARED_QUERY": True},
    }[kernel]


def query_options(tile: launch_split.QueryTile) -> dict[str, Any]:
    options = {name.upper(): value for name, value in tile._asdict().items()}
    return options | {"REGISTERS": launch_split.REGISTERS, "HAS_DLSE": True, "BEGIN": -1, "END": -1}


def options_of(kernel: str, head_dim: int) -> dict[str, Any]:
    """Compiler options of a kernel's launches."""
    options = {"num_warps": 4, "num_stages": 1}
    if kernel in ("forward", "short"):
        tile = launch.FORWARD[head_dim][kernel == "short"]
        options |= {"num_stages": tile.num_stages, "enable_fp_fusion": False}
    return options


KERNELS = {
    "forward": launch.forward_kernel,
    "short": launch.forward_kernel,
    "query": launch_split.query_gradient_kernel,
    "query_short": launch_split.query_gradient_kernel,
    "key": launch_split.key_gradient_kernel,
    "tile": launch_split.one_tile_gradient_kernel,
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
        ASTSource(function, signature, values), target=TARGET, options=options_of(kernel, head_dim)
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    # Loops over blocks; others branch back past a tile's start or end, where a fused kernel stores dk and dv: more than
    # the stores that stand beside a sum, of which one is taken for a block's dq.
    loops = sorted(innermost_matrix_loops(sass), key=len)
    if kernel == "tile":  # straight through: the whole kernel in place of a loop
        loops = [[line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]]
    elif kernel.startswith("fused"):
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
