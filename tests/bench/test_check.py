import functools

import pytest
import torch

from gemattn.bench import check
from gemattn.bench.case import make_case
from gemattn.bench.providers.ours import Custom
from gemattn.bench.shapes import Lengths, Shape
from gemattn.testing import JaggedInputs, run_oracle

SELF = Shape("self", "test", 5, 2, 16, query=Lengths("half", 12))
SHAPES = {
    "self": SELF,
    "hsp": Shape("hsp", "test", 5, 2, 16, key=Lengths("density", 12, 0.5), shared_rows=6),
    "cross": Shape("cross", "test", 4, 2, 16, query=Lengths("half", 9), key=Lengths("full", 7)),
    "causal": Shape("causal", "test", 4, 2, 16, query=Lengths("half", 12), causal=True),
    "window": Shape("window", "test", 4, 4, 16, query=Lengths("half", 12), kv_heads=2, window=(2, 3)),
}


@functools.cache
def case_of(name):
    return make_case(SHAPES[name], torch.device("cpu"), torch.float32)


def call_of(case, function):
    return Custom(f"tests.bench.planted:{function}").prepare(case).call


@pytest.mark.parametrize("name", SHAPES)
def test_expected_is_the_oracle_of_the_package(name):
    case = case_of(name)
    shape = case.shape
    inputs = JaggedInputs(case.query, case.key, case.value, case.q_offsets, case.kv_offsets, case.dout)
    oracle = run_oracle(inputs, torch.float64, causal=shape.causal, window=shape.window)
    found = check.expected(case, list(range(shape.sequences)), torch.float64)
    for key, value in found.items():
        torch.testing.assert_close(value, oracle[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_expected_in_chunks_is_the_same(name, monkeypatch):
    case = case_of(name)
    whole = check.expected(case, [0, 2], torch.float64)
    monkeypatch.setattr(check, "_CHUNK", 50)  # one or two query rows at a time
    parts = check.expected(case, [0, 2], torch.float64)
    for key, value in parts.items():
        torch.testing.assert_close(value, whole[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_a_right_provider_passes(name):
    case = case_of(name)
    errors = check.Gate(case, random_sequences=1).check(call_of(case, "right"))
    assert errors.keys() == {"out", "dq", "dk", "dv"}
    assert max(errors.values()) < 1e-6


@pytest.mark.parametrize("name", ["self", "hsp"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong_out", "out: error"),
        ("wrong_gradient", "dk: error"),
        ("nan_in_one_row", "out has values that are not finite"),
        ("too_short", "out has shape"),
    ],
)
def test_a_planted_fault_is_found(name, fault, message):
    case = case_of(name)
    with pytest.raises(check.WrongResult, match=message):
        check.Gate(case, random_sequences=1).check(call_of(case, fault))


def test_sample_has_the_shortest_and_the_longest():
    case = make_case(
        Shape("giant", "test", 50, 1, 8, query=Lengths("giant", 40, rest=3)), torch.device("cpu"), torch.float32
    )
    sample = check.sample_sequences(case, 4)
    assert 0 in sample and 3 <= len(sample) <= 6


def test_shared_query_gradient_is_that_of_the_sample_alone():
    """Incoming gradients of other sequences are zero in the check, so its dq is a sum over the sample."""
    gate = check.Gate(case_of("hsp"), random_sequences=0)
    assert 0 < len(gate.sample) < 5
    others = torch.ones(len(gate.dout), dtype=torch.bool)
    others[gate.out_rows] = False
    assert gate.dout[others].eq(0).all() and gate.dout[~others].ne(0).any()
