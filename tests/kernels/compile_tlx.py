"""Compile the Hopper kernels where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_tlx.py --kernel forward short query key tile fused --head-dim 64 128 --mask none both

Prints one JSON object a line: shared memory, matrix instructions, waits for them, and local loads and stores inside the
loops over blocks. Run it as a process of its own: some faults of the compiler abort it.
"""

import re
from typing import Any

from ahead_of_time import StandIn, compile_function, count, innermost_loops, main
from triton.backends.compiler import GPUTarget

StandIn(GPUTarget("cuda", 90, 32))

from gemattn.kernels.tlx.hopper import launch, launch_fused, launch_split  # noqa: E402 (after the stand-in)


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
    compiled, sass, _usage = compile_function(
        KERNELS[kernel], head_dim, mask, constants(kernel, head_dim), options_of(kernel, head_dim)
    )
    # Loops over blocks; others branch back past a tile's start or end, where a fused kernel stores dk and dv: more than
    # the stores that stand beside a sum, of which one is taken for a block's dq.
    loops = [loop for loop in innermost_loops(sass, "HGMMA") if count(loop, r"MUFU\.EX2")]
    loops.sort(key=len)
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
                "waits": count(loop, r"WARPGROUP\.DEPBAR"),
                "local": count(loop, "(LDL|STL)"),
            }
            for loop in loops
        ],
    }


if __name__ == "__main__":
    main(__doc__, KERNELS, compile_one)
