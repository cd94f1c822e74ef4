"""The kernels compile for GPUs that are not here, fit their shared memory and spill little."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_compile_and_fit(arch, tmp_path):
    # In a process of its own: in this one kernels may be defined for the interpreter.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "--arch", str(arch), "--head-dim", "64", "--kernel", "forward"]
    done = subprocess.run([*command, "key_gradient"], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == ["forward", "key_gradient"]
    for name, _arch, _head_dim, _dtype, registers, spilled, *_ in lines:
        assert 32 < int(registers) <= 255, name
        assert int(spilled) <= 256, name
