"""fbtriton's own attention kernels, unmodified: right results, no false race; and some of their mutants."""

import pytest

pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from gemattn.testing.tlx_sim import score, tutorials
from gemattn.testing.tlx_sim.mutate import REMOVED, mutants

TUTORIALS = [name for name in score.SCENARIOS if name.startswith("tutorial")]


@pytest.mark.parametrize("name", TUTORIALS)
def test_right_and_race_free(name):
    for seed in (0,) if "two programs" in name else (0, 4):
        assert not score.harmful(name, score.once(name, seed))


@pytest.fixture(scope="module")
def baselines():
    names = ["hopper forward", "hopper backward, shared query", "tutorial blackwell forward", "tutorial hopper forward"]
    return {name: score.once(name, 0) for name in names}


@pytest.mark.parametrize("operation", sorted(REMOVED))
def test_a_mutant_of_each_kind_is_caught(operation, baselines):
    """Of the package's own kernels where they have the operation, else of a tutorial's."""
    files = [
        *score.own_files(),
        tutorials.load(tutorials.BLACKWELL).__file__,
        tutorials.load(tutorials.HOPPER).__file__,
    ]
    known = {name: set(outcome.findings) for name, outcome in baselines.items()}
    for mutant in (m for file in files for m in mutants(file) if m.operation == operation and m.change == "remove"):
        able = [n for n, o in baselines.items() if (score.short(mutant.file), mutant.line) in o.reached]
        if able and score.first_catch(able, mutant, 2, known):
            return
    pytest.fail(f"no mutant without {operation} was caught")
