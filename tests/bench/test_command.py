import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gemattn.bench.__main__ import main
from gemattn.bench.machine import parse_reading, peak_tflops

ROOT = Path(__file__).resolve().parents[2]


def run_bench(*arguments):
    command = [sys.executable, "-m", "gemattn.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)


def test_smoke_run(tmp_path):
    """The whole command on a CPU: kernels in the interpreter against SDPA, each in its process."""
    done = run_bench("attention", "--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "The figures mean nothing" in done.stdout
    assert "triton against sdpa" in done.stdout
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["meaningless"] and saved["finished"]
    assert [shape["name"] for shape in saved["shapes"]] == ["tiny_hsp", "tiny_self_causal"]
    for shape in saved["shapes"]:
        for name in ("triton", "reference", "sdpa"):
            figures = shape["providers"][name]
            assert max(figures["errors"].values()) < 0.02
            assert figures["forward"]["median"] > 0 and figures["backward"]["median"] > 0
    assert "The figures mean nothing" in (tmp_path / "report.md").read_text()


def test_faulty_providers_have_no_figures(tmp_path):
    """One with a wrong result and one that takes the process with it, beside a right one in the same process."""
    planted = "tests.bench.planted:"
    names = f"sdpa,wrong={planted}wrong_gradient,dead={planted}dies,mine={planted}right"
    done = run_bench("attention", "--smoke", "--shapes", "tiny_hsp", "--providers", names, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr + done.stdout
    (shape,) = json.loads((tmp_path / "results.json").read_text())["shapes"]
    assert shape["providers"]["wrong"]["reason"].startswith("wrong result: dk: error")
    assert shape["providers"]["dead"]["reason"] == "its process ended (exit code 3); see shared.log"
    assert shape["providers"]["sdpa"]["forward"]["median"] > 0
    assert shape["providers"]["mine"]["setup"]["median"] > 0
    assert "WRONG" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gets")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["attention"]) == 2
    assert "no CUDA GPU here; --smoke" in capsys.readouterr().err


def test_wrong_arguments(capsys, tmp_path):
    assert main(["attention", "--smoke", "--suite", "dense"]) == 2
    assert "suite is 'dense'" in capsys.readouterr().err
    assert main(["attention", "--smoke", "--providers", "fa4=nowhere"]) == 2
    assert "no folder" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "a.json: no such file" in capsys.readouterr().err


def test_clock_reading():
    reading = parse_reading("580.159.04, 1980, 3201, 1980, 512.31, 700.00, 51\n")
    assert reading["driver_version"] == "580.159.04"
    assert (reading["clocks_sm"], reading["power_draw"], reading["temperature_gpu"]) == (1980.0, 512.31, 51.0)
    assert parse_reading("580.1, [N/A], 3201, 1980, 1, 2, 3")["clocks_sm"] == "[N/A]"
    assert parse_reading("NVIDIA-SMI has failed") == {}


def test_peak_of_a_card():
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA B200") == 2250.0
    assert peak_tflops("NVIDIA GeForce RTX 4090") is None
    assert peak_tflops(None) is None
