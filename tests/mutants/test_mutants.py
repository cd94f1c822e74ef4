"""Every mutant is caught by the conformance suite, and every one still applies."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PARTS = 6


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies_to_one_place(mutant):
    assert (ROOT / "gemattn" / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_names_are_distinct_and_cases_exist():
    from gemattn.testing import conformance

    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {case for mutant in MUTANTS for case in mutant.cases} <= set(conformance.cases())


@pytest.mark.parametrize("part", range(PARTS))
def test_is_caught(part):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.mutants", "--part", f"{part}/{PARTS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
