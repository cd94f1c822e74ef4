"""The package's Blackwell kernels, simulated: clauses of the contract, free of races and within the tolerance."""

import pytest
import torch

tlx_sim = pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

import gemattn  # noqa: E402
from gemattn import comparison  # noqa: E402
from gemattn.testing import make_inputs, run  # noqa: E402
from gemattn.testing.inputs import JaggedInputs  # noqa: E402
from gemattn.testing.tlx_sim import cases  # noqa: E402

SUBSET = [
    "self, D 128, two heads",
    "self, float16",
    "self, window",
    "cross, causal",
    "shared query, causal",
]
"""The whole of them: python -m gemattn.testing.tlx_sim cases --arch 100."""


@pytest.mark.parametrize("name", SUBSET)
def test_matches_the_oracle(name):
    case = cases.CASES[name]
    found = cases.results(case, seed=list(cases.CASES).index(name), arch=100)
    assert set(found) == {"out", "lse"} | {"dq", "dk", "dv"}
    cases.check_oracle(case, found)


@pytest.mark.parametrize("name", ["query", "value", "dout"])
def test_a_bad_sequence_hurts_only_itself_and_shows(name):
    inputs = make_inputs([30, 70, 40], heads=1, head_dim=64, dtype=torch.bfloat16)
    with tlx_sim.simulate(100, seed=1) as simulation:
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


def test_gradients_of_rows_without_keys_are_ignored():
    inputs = make_inputs([150], kv_lengths=[20], heads=1, head_dim=64, dtype=torch.bfloat16)
    with tlx_sim.simulate(100, seed=2) as simulation:
        clean = run(inputs, "tlx", causal=True)
        inputs.dout[:130] = torch.nan
        dirty = run(inputs, "tlx", causal=True)
    assert simulation.report.ok, str(simulation.report)
    assert all(torch.equal(dirty[name], x) for name, x in clean.items())
    assert not clean["out"][:130].any() and not clean["dq"][:130].any() and clean["dq"][130:].any()


def test_results_depend_neither_on_the_schedule_nor_on_the_batch():
    inputs = make_inputs([200, 70, 140], heads=1, head_dim=64, dtype=torch.bfloat16)
    found = []
    for seed in range(2):
        with tlx_sim.simulate(100, seed):
            found.append(run(inputs, "tlx", causal=True))
    for other in found[1:]:
        assert all(torch.equal(other[name], x) for name, x in found[0].items())
    query, key, value, dout = (x[200:270] for x in (inputs.query, inputs.key, inputs.value, inputs.dout))
    offsets = torch.tensor([0, 70])
    alone = JaggedInputs(query, key, value, offsets, offsets, dout, inputs.dlse[:, 200:270])
    with tlx_sim.simulate(100):
        for name, x in run(alone, "tlx", causal=True).items():
            assert torch.equal(x, found[0][name][:, 200:270] if name == "lse" else found[0][name][200:270]), name


def test_self_check_passes_and_catches_a_wrong_kernel(monkeypatch):
    from gemattn.kernels import tlx

    with tlx_sim.simulate(100, seed=4) as simulation:
        gemattn.self_check("cpu")
        right = tlx.backward
        monkeypatch.setattr(comparison, "_CASES", comparison._CASES[:1])
        monkeypatch.setattr(tlx, "backward", lambda *arguments: (right(*arguments)[0] * 1.05, *right(*arguments)[1:]))
        with pytest.raises(RuntimeError, match=r"(?s)dq \(causal, head size 64.* is 5.*GEMATTN_DISABLE_TLX"):
            gemattn.self_check("cpu")
    assert simulation.report.ok, str(simulation.report)


@pytest.mark.parametrize("scale", [1e-39, 1e39])
def test_a_scale_beyond_float32_is_what_float32_makes_of_it(scale):
    inputs = make_inputs([5, 3], heads=1, head_dim=64, dtype=torch.bfloat16)
    with tlx_sim.simulate(100) as simulation:
        found = run(inputs, "tlx", scale=scale)
    assert simulation.report.ok, str(simulation.report)
    assert found["out"].isfinite().all() == (scale < 1)
