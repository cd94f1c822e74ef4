"""The Blackwell kernels compiled ahead of time for sm_100a: what the machine code must and must not hold."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_blackwell.py")
SHARED_MEMORY = 232_448  # bytes a block may have
TENSOR_COLUMNS = 512
ROLES = {40, 104, 184}
"""Registers of the issuing warps, of correction or writer, of softmax or compute."""
SPILLED = {"forward": 40, "keys": 112, "queries": 16, "shared_query": 272}
"""Bytes a thread, as recorded: all outside of the loops over blocks but a few words of the forward's."""

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


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "both"])
def test_machine_code(head_dim, mask):
    compiled = compile_kernels("--head-dim", str(head_dim), "--mask", mask)
    assert [c["kernel"] for c in compiled] == ["forward", "keys", "queries", "shared_query"]
    for c in compiled:
        assert c["target"] == "sm_100a", c
        assert c["tcgen05.mma"] > 0 and c["tma"] > 0, c
        assert c["shared"] <= SHARED_MEMORY and c["tensor_columns"] <= TENSOR_COLUMNS, c
        assert set(c["setmaxnreg"]) >= ROLES, c
        assert c["stack"] <= SPILLED[c["kernel"]], c
        issuing = [loop for loop in c["loops"] if loop["products"]]
        computing = [loop for loop in c["loops"] if loop["exponentials"]]
        assert issuing and computing, c
        assert all(loop["local"] == 0 for loop in issuing), c
        # Half the forward's loops over blocks are the masked ones, which run once or twice a tile.
        clean = sum(loop["local"] == 0 for loop in computing)
        assert clean >= (2 if c["kernel"] == "forward" else len(computing)), c
