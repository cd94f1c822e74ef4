"""Compile what the TLX kernels' launches would, where there is no GPU, and tell what the machine code does.

    python tests/kernels/compile_launches.py --arch 90 100 --head-dim 64 128 --mask none both --kind self shared

The host's own code runs, on CPU tensors, and each kernel that it would have compiled is compiled, with the same constants
and the same hints about strides and addresses. Prints one JSON object a line: shared memory, tensor memory, instructions,
registers, spilled bytes, and what the loops over blocks hold. Run it as a process of its own: some faults of the
compiler abort it.
"""

import argparse
import json
import re
from typing import Any

import torch
import triton
from ahead_of_time import StandIn, asked, batch, count, innermost_loops, machine_code
from triton.backends.compiler import GPUTarget

driver = StandIn(GPUTarget("cuda", 90, 32))

from gemattn.kernels.tlx import blackwell, hopper  # noqa: E402 (after the stand-in)
from gemattn.spec import UNLIMITED, AttentionSpec  # noqa: E402

MASKS = {"none": (UNLIMITED, UNLIMITED), "causal": (UNLIMITED, 0), "left": (16, UNLIMITED), "both": (16, 1)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("self", "cross", "shared")


def launches(arch: int, head_dim: int, dtype: str, mask: str, kind: str) -> list[tuple[Any, dict[str, Any]]]:
    """(source, options) of the kernels of a forward and of backward with and without determinism."""
    driver.target = GPUTarget("cuda", arch, 32)
    driver.properties()
    implementation = hopper if arch == 90 else blackwell
    with asked() as found:
        tensors = batch(head_dim, DTYPES[dtype], kind, heads=4, kv_heads=4)
        for deterministic in (False, True):
            spec = AttentionSpec(head_dim**-0.5, *MASKS[mask], kind == "shared", deterministic)
            out, lse = implementation.forward(*tensors, spec)
            gradients = torch.zeros_like(out), torch.zeros_like(lse)
            implementation.backward(*gradients, *tensors[:3], out, lse, *tensors[3:], spec)
    return found


def compile_one(source: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a kernel came out as."""
    compiled = triton.compile(source, target=driver.target, options=options)
    ptx = compiled.asm["ptx"]
    sass, usage = machine_code(compiled)
    names = source.fn.arg_names
    loops = innermost_loops(sass, r"HGMMA|UTCHMMA|MUFU\.EX2")
    if not loops and count(sass.splitlines(), "HGMMA"):  # straight through: the whole kernel in place of a loop
        loops = [[line for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]]
    return {
        "kernel": source.fn.fn.__name__,
        "constants": {names[place[0]]: value for place, value in source.constants.items()},
        "target": re.search(r"\.target (\S+)", ptx).group(1),
        "shared": compiled.metadata.shared,
        "tensor_columns": compiled.metadata.tmem_size or 0,
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05.mma": ptx.count("tcgen05.mma."),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "acquires": ptx.count("fence.proxy.tensormap::generic.acquire"),
        "setmaxnreg": sorted(int(x) for x in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": count(sass.splitlines(), "(LDL|STL)"),
        "loops": [
            {
                "products": count(loop, "(HGMMA|UTCHMMA)"),
                "exponentials": count(loop, r"MUFU\.EX2"),
                "waits": count(loop, r"WARPGROUP\.DEPBAR"),
                "local": count(loop, "(LDL|STL)"),
                "tile_stores": count(loop, "UTMASTG"),
                "sums": count(loop, "UTMAREDG"),
                "instructions": len(loop),
            }
            for loop in loops
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, choices=[90, 100, 103], default=[90, 100])
    parser.add_argument("--head-dim", nargs="+", type=int, choices=[32, 64, 128], default=[64, 128])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--mask", nargs="+", choices=list(MASKS), default=["none"])
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--kernel", nargs="+", default=[""], help="parts of the names of kernels")
    arguments = parser.parse_args()
    for arch in arguments.arch:
        seen = set()
        for head_dim in arguments.head_dim:
            for dtype in arguments.dtype:
                for mask in arguments.mask:
                    about = {"arch": arch, "head_dim": head_dim, "dtype": dtype, "mask": mask}
                    for kind in arguments.kind:
                        for source, options in launches(arch, head_dim, dtype, mask, kind):
                            key = (source.hash(), str(sorted(options.items(), key=str)))
                            if key in seen or not any(x in source.fn.fn.__name__ for x in arguments.kernel):
                                continue
                            seen.add(key)
                            print(json.dumps(about | {"kind": kind} | compile_one(source, options)), flush=True)


if __name__ == "__main__":
    main()
