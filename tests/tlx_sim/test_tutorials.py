"""fbtriton's own attention kernels, unmodified: right results, no false race; and some of their mutants."""

import pytest
import torch

tlx_sim = pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from gemattn.testing.tlx_sim import score, tutorials  # noqa: E402
from gemattn.testing.tlx_sim.mutate import REMOVED, mutants  # noqa: E402

TUTORIALS = [name for name in score.SCENARIOS if name.startswith("tutorial")]


@pytest.mark.parametrize("name", TUTORIALS)
def test_right_and_race_free(name):
    for seed in (0,) if "two programs" in name else (0, 4):
        assert not score.harmful(name, score.once(name, seed))


def test_their_own_hosts_run_unchanged():
    """Autotuned kernels under autograd, as a user of the tutorials calls them."""
    query, key, value = (torch.randn(1, 1, 256, 64).bfloat16().requires_grad_() for _ in range(3))
    scores = query.float() @ key.float().mT / 8
    wanted = scores.softmax(-1) @ value.float()
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), key)
    with tlx_sim.simulate(90) as run:
        out = tutorials.load(tutorials.HOPPER).attention(query, key, value, 0.125)
    assert run.report.ok, str(run.report)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)
    with tlx_sim.simulate(100, explicit_fences=False) as run:
        out = tutorials.load(tutorials.BLACKWELL).attention(query, key, value, 0.125, False)
        (grad,) = torch.autograd.grad(out.float().square().sum(), key)
    assert {x.kind for x in run.report.findings} == {"uninitialised read"}, str(run.report)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)
    torch.testing.assert_close(grad, wanted_grad, atol=3e-2, rtol=3e-2)


@pytest.fixture(scope="module")
def baselines():
    names = ["hopper forward", "hopper backward, shared query", "tutorial blackwell forward", "tutorial hopper forward"]
    return {name: score.once(name, 0) for name in names}


@pytest.mark.parametrize("operation", sorted(REMOVED))
def test_a_mutant_of_each_kind_is_caught(operation, baselines):
    """Of the package's own kernels where they have the operation, else of a tutorial's."""
    files = [
        *score.own_files("hopper"),
        tutorials.load(tutorials.BLACKWELL).__file__,
        tutorials.load(tutorials.HOPPER).__file__,
    ]
    known = {name: set(outcome.findings) for name, outcome in baselines.items()}
    for mutant in (m for file in files for m in mutants(file) if m.operation == operation and m.change == "remove"):
        able = [n for n, o in baselines.items() if (score.short(mutant.file), mutant.line) in o.reached]
        if able and score.first_catch(able, mutant, 2, known):
            return
    pytest.fail(f"no mutant without {operation} was caught")
