"""Launches that leave Triton's own path out hand over what it would have."""

import json
from pathlib import Path

import pytest
import torch

from gemattn.kernels import interpreter
from tests.kernels.scripts import output_of

SCRIPT = Path(__file__).with_name("record_launches.py")
CHECKS = [line[4:].split("(")[0] for line in SCRIPT.read_text().splitlines() if line.startswith("def check_")]

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def results():
    """What the script says, in a process in which Triton would compile."""
    return json.loads(output_of("record_launches.py"))


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
