"""The Hopper kernels compiled ahead of time: what the machine code must and must not hold."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_tlx.py")
SHARED_MEMORY = 232_448  # bytes a block may have on sm_90

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(170),
]


def compile_kernels(*arguments):
    from triton import language

    if not Path(language.__file__).with_name("extra").joinpath("tlx").exists():
        pytest.skip("needs fbtriton, this triton has no TLX")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# A mask costs the 128-column kernels a few spilled registers; docs/kernels/hopper.md has the figures.
@pytest.mark.parametrize(
    ("head_dim", "mask", "kernels"),
    [
        (128, "none", ["forward", "short", "query", "query_short", "key"]),
        (64, "both", ["forward", "short", "query", "query_short", "key"]),
        (128, "causal", ["tile"]),
        (128, "none", ["fused", "fused_shared"]),
        (128, "causal", ["fused"]),
        (128, "both", ["fused"]),
        (64, "both", ["fused", "fused_shared"]),
        (32, "both", ["forward", "short", "query", "query_short", "key", "fused", "fused_shared"]),
        (32, "causal", ["tile"]),
    ],
)
def test_machine_code(head_dim, mask, kernels):
    compiled = compile_kernels("--kernel", *kernels, "--head-dim", str(head_dim), "--mask", mask)
    assert [c["kernel"] for c in compiled] == kernels
    for c in compiled:
        assert c["shared"] <= SHARED_MEMORY, c
        assert c["wgmma"] > 0 and c["tma_loads"] > 0 and c["setmaxnreg"] > 0, c
        assert (len(c["loops"]) >= 2 and len(c["loops"]) % 2 == 0) or c["kernel"] == "tile", c
        for loop in c["loops"]:
            # The waits that the kernels ask for, one for 4 matrix instructions or more. A wait after every product of
            # tiles comes from a software pipeliner that is not off; one after every instruction from want of registers.
            forward = c["kernel"] in ("forward", "short")  # which waits for its scores alone by intent
            assert loop["waits"] * (2 if forward else 4) <= loop["products"], c
            assert loop["local"] == 0 or c["kernel"] == "tile", c  # no loop there, and a few reloads on the way
