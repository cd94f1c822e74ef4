"""Scripts beside this file that compile or launch TLX kernels without a GPU, run as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def output_of(script: str, *arguments: str) -> str:
    """What the script prints, Triton's interpreter and other switches off; skips the test where there is no TLX."""
    language = pytest.importorskip("triton.language")
    if not Path(language.__file__).with_name("extra").joinpath("tlx").exists():
        pytest.skip("needs fbtriton, this triton has no TLX")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
