"""Launches that leave Triton's own path out hand over what it would have."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemattn.kernels import interpreter

SCRIPT = Path(__file__).with_name("record_launches.py")
CHECKS = [line[4:].split("(")[0] for line in SCRIPT.read_text().splitlines() if line.startswith("def check_")]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="module")
def results():
    """What the script says, in a process in which Triton would compile."""
    from triton import language

    if not Path(language.__file__).with_name("extra").joinpath("tlx").exists():
        pytest.skip("needs fbtriton, this triton has no TLX")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_launches(results, check):
    assert not results[check], results[check]


@pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")
def test_the_interpreter_takes_every_launch():
    from gemattn.kernels.launcher import Launcher
    from gemattn.kernels.triton.tile_list import tile_list_kernel, tile_lists

    assert not Launcher(tile_list_kernel)._keeps
    offsets = torch.tensor([0, 3, 16])
    for rows in (16, 20):  # the last argument but one, and the same launcher
        starts, _, tiles, *_ = tile_lists(offsets, offsets, rows, rows, 4, 4, 128)
        assert starts.tolist() == [0, 3, 16]
        assert (tiles[:, 0] == 3).sum() == (rows > 16)  # slack after the last sequence
