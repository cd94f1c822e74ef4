"""Compile the Blackwell kernels where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_blackwell.py --kernel forward --head-dim 64 128 --mask none both

Prints one JSON object a line: shared memory, tensor memory, instructions, registers, spilled bytes, and local loads and
stores inside the loops that issue matrix products or take exponentials. Run it as a process of its own: some faults of
the compiler abort it.
"""

import re
from typing import Any

from ahead_of_time import StandIn, compile_function, count, innermost_loops, main
from triton.backends.compiler import GPUTarget

StandIn(GPUTarget("cuda", 100, 32))

from gemattn.kernels.tlx.blackwell import launch, launch_backward  # noqa: E402 (after the stand-in)

SIDES = {"keys": (True, False), "queries": (False, False), "shared_query": (False, True)}
KERNELS = {"forward": launch.forward_kernel} | dict.fromkeys(SIDES, launch_backward.gradient_kernel)


def constants(kernel: str, head_dim: int) -> dict[str, Any]:
    """Constants of a kernel's launches."""
    tile = launch.FORWARD[head_dim] if kernel == "forward" else launch_backward.GRADIENT[head_dim]
    options: dict[str, Any] = {name.upper(): value for name, value in tile._asdict().items()}
    if kernel in SIDES:
        options["KEYS"], options["SHARED"] = SIDES[kernel]
        registers = options.pop("KEY_REGISTERS"), options.pop("QUERY_REGISTERS")
        options["COMPUTE_REGISTERS"] = registers[not options["KEYS"]]
    return options


def compile_one(kernel: str, head_dim: int, mask: str) -> dict[str, Any]:
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": kernel != "forward"}
    compiled, sass, usage = compile_function(KERNELS[kernel], head_dim, mask, constants(kernel, head_dim), options)
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
        "local": count(sass.splitlines(), "(LDL|STL)"),
        "loops": [
            {
                "products": count(loop, "UTCHMMA"),
                "exponentials": count(loop, r"MUFU\.EX2"),
                "local": count(loop, "(LDL|STL)"),
                "instructions": len(loop),
            }
            for loop in innermost_loops(sass, r"UTCHMMA|MUFU\.EX2")
        ],
    }


if __name__ == "__main__":
    main(__doc__, KERNELS, compile_one)
