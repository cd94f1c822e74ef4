"""Compile the Triton kernels for GPUs that are not here, and tell what they use.

    python tests/kernels/compile_ahead.py --arch 80 90 100 --head-dim 64 128 --dtype bf16

Prints one line a kernel: registers, bytes spilled to local memory, shared memory. Needs no GPU; Triton's interpreter
must be off.
"""

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemattn.kernels.triton import configs
from gemattn.kernels.triton.forward import forward_kernel
from gemattn.kernels.triton.key_gradient import key_gradient_kernel
from gemattn.kernels.triton.query_gradient import query_gradient_kernel, shared_query_gradient_kernel

KERNELS = {
    "forward": forward_kernel,
    "query_gradient": query_gradient_kernel,
    "shared_query_gradient": shared_query_gradient_kernel,
    "key_gradient": key_gradient_kernel,
}
FAMILIES = {80: "a100", 86: "small", 89: "small", 90: "hopper", 100: "hopper", 120: "small"}
SHARED_LIMIT = {"a100": 163 << 10, "small": 99 << 10, "hopper": 227 << 10}
FLOAT32 = ("lse_ptr", "dlse_ptr", "delta_ptr", "norm_ptr", "partial_ptr")


class Usage(NamedTuple):
    registers: int
    spilled: int
    shared: int
    seconds: float


def compile_kernel(
    name: str, arch: int, head_dim: int, dtype: str, *, causal: bool = False, tile: configs.Tile | None = None
) -> Usage:
    """Compile one kernel as a launch with contiguous inputs would, and read its resources from the binary."""
    function = KERNELS[name]
    half = dtype != "fp32"
    if tile is None:
        tile = configs.tile(name, head_dim, 2 if half else 4, FAMILIES[arch])
    parameters = list(inspect.signature(function.fn).parameters.values())
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": configs.block_d(head_dim),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SHARED_QUERY": False,
        "HAS_DLSE": False,
        "HAS_LEFT": False,
        "HAS_RIGHT": causal,
        "EXACT": not half,
        "group_size": 1,
    }
    signature, divisible = {}, {}
    for index, parameter in enumerate(parameters):
        name_ = parameter.name
        if name_ in constants:
            signature[name_] = "constexpr"
        elif name_.endswith("_offsets_ptr"):
            signature[name_] = "*i64"
        elif name_.endswith("_tiles_ptr"):
            signature[name_] = "*i32"
        elif name_.endswith("_ptr"):
            signature[name_] = "*fp32" if name_ in FLOAT32 else f"*{dtype}"
        elif "scale" in name_:
            signature[name_] = "fp32"
        else:
            signature[name_] = "i32"
        if name_.endswith("_ptr") or (name_.endswith("_stride") and head_dim % 16 == 0):
            divisible[(index,)] = [["tt.divisibility", 16]]
    chosen = {key: value for key, value in constants.items() if signature.get(key) == "constexpr"}
    start = time.perf_counter()
    source = ASTSource(function, signature, constexprs=chosen, attrs=divisible)
    kernel = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    seconds = time.perf_counter() - start
    registers, spilled = _resources(kernel.asm["cubin"])
    return Usage(registers, spilled, kernel.metadata.shared, seconds)


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=sorted(FAMILIES))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--kernel", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--causal", action="store_true")
    args = parser.parse_args()
    failed = False
    print(f"{'kernel':22} arch  D    dtype registers spilled shared seconds")
    for arch in args.arch:
        for head_dim in args.head_dim:
            for dtype in args.dtype:
                for name in args.kernel:
                    use = compile_kernel(name, arch, head_dim, dtype, causal=args.causal)
                    fits = use.shared <= SHARED_LIMIT[FAMILIES[arch]]
                    failed |= not fits
                    print(
                        f"{name:22} {arch:4}  {head_dim:<4} {dtype:5} {use.registers:9} {use.spilled:7} "
                        f"{use.shared:6} {use.seconds:7.1f}{'' if fits else '  DOES NOT FIT'}",
                        flush=True,
                    )
    sys.exit(failed)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("Triton's interpreter is on (TRITON_INTERPRET=1): nothing would be compiled")
    main()
