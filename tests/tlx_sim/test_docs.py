"""docs/tlx_sim.md: its example prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

ROOT = Path(__file__).parents[2]


def test_the_example_prints_what_the_page_says(tmp_path):
    page = (ROOT / "docs/tlx_sim.md").read_text()
    code, printed = re.search(
        r"```python\n([^`]*column_sums[^`]*)```\n\nprints\n\n```text\n(.*?)```", page, re.S
    ).groups()
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == printed, done.stdout + done.stderr
