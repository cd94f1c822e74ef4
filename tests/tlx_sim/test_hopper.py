"""The package's Hopper kernels, simulated: the contract's clauses, race-free and within the tolerance."""

from dataclasses import replace

import pytest
import torch

tlx_sim = pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

import gemattn  # noqa: E402
from gemattn.kernels.schedule import LENGTH_CLASSES  # noqa: E402
from gemattn.kernels.tlx.hopper import launch, launch_split  # noqa: E402
from gemattn.testing import make_inputs, run  # noqa: E402
from gemattn.testing.tlx_sim import cases  # noqa: E402


@pytest.mark.parametrize("name", cases.CASES)
def test_matches_the_oracle(name):
    case = cases.CASES[name]
    found = cases.results(case, seed=list(cases.CASES).index(name))
    assert set(found) == {"out", "lse"} | (set() if name == "grouped heads" else {"dq", "dk", "dv"})
    cases.check_oracle(case, found)


@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
def test_a_bad_sequence_hurts_only_itself_and_shows(name):
    inputs = make_inputs([30, 70, 40], heads=1, head_dim=64, dtype=torch.bfloat16)
    with tlx_sim.simulate(90, seed=1) as simulation:
        clean = run(inputs, "tlx")
        getattr(inputs, name)[50:51] = torch.nan
        dirty = run(inputs, "tlx")
    assert simulation.report.ok, str(simulation.report)
    others = torch.ones(140, dtype=torch.bool)
    others[30:100] = False
    for result, value in clean.items():
        pick = (slice(None), others) if result == "lse" else (others,)
        assert torch.equal(dirty[result][pick], value[pick]), result
    assert not dirty["dq" if name == "dout" else "out"][30:100].isfinite().all()


@pytest.mark.parametrize(("head_dim", "longer"), [(64, 128), (128, 512)])
def test_any_length_at_which_tiles_change_is_right(monkeypatch, head_dim, longer):
    assert longer in LENGTH_CLASSES
    monkeypatch.setattr(launch, "FORWARD_LONGER", longer)
    monkeypatch.setattr(launch_split, "QUERY_LONGER", longer)
    windows = {"window": (70, 30)}, {"deterministic": True}
    for seed, options in enumerate(windows):
        case = cases.Case({"q_lengths": [150, 520, 64, 330], "head_dim": head_dim}, options)
        cases.check_oracle(case, cases.results(case, seed=seed))


def test_results_do_not_depend_on_the_schedule():
    inputs = make_inputs([200, 70], heads=1, head_dim=64, dtype=torch.bfloat16)
    found = []
    for seed in range(3):
        with tlx_sim.simulate(90, seed, processors=1 + seed):
            found.append(run(inputs, "tlx", causal=True))
    for other in found[1:]:
        assert all(torch.equal(other[name], x) for name, x in found[0].items())


def test_offsets_that_begin_at_one_address_are_not_one_offsets_tensor():
    """A view of every second entry has other lengths: self-attention's kernels would read past the shorter side."""
    offsets = torch.tensor([0, 10, 30, 70, 100])
    cross = make_inputs([10, 20], [30, 70], heads=1, head_dim=64, dtype=torch.bfloat16)
    views = replace(cross, q_offsets=offsets[:3], kv_offsets=offsets[::2])
    with tlx_sim.simulate(90) as simulation:
        found, wanted = run(views, "tlx"), run(cross, "tlx")
    assert simulation.report.ok, str(simulation.report)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def test_outside_a_simulation_the_kernels_refuse_cpu_tensors():
    x, offsets = torch.zeros(3, 1, 64, dtype=torch.bfloat16), torch.tensor([0, 3])
    assert gemattn.unsupported_reasons("tlx", x, x, x, offsets)
    with tlx_sim.simulate(90):
        assert not gemattn.unsupported_reasons("tlx", x, x, x, offsets)
    assert gemattn.unsupported_reasons("tlx", x, x, x, offsets)
