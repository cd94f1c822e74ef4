"""Checks of arguments, dispatch and the schedule handed in by a caller."""

import pytest
import torch

import gemattn
from gemattn.testing import make_inputs


def call(**changes):
    inputs = make_inputs([3, 0, 5])
    arguments = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "q_offsets": inputs.q_offsets,
        "kv_offsets": None,
    }
    options = {k: changes.pop(k) for k in list(changes) if k not in arguments}
    return gemattn.jagged_attention(*(arguments | changes).values(), **options)


def tokens(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


OFFSETS = torch.tensor([0, 3, 3, 8])
BAD = {
    "query is a list": ({"query": [1.0]}, TypeError, "query is a list, wanted a tensor"),
    "query rank": ({"query": tokens(8, 32)}, ValueError, r"query has shape \(8, 32\), wanted \(T, H, D\)"),
    "key rank": ({"key": tokens(8, 32)}, ValueError, r"key has shape \(8, 32\), wanted \(T, G, D\)"),
    "no heads": ({"query": tokens(8, 0, 16)}, ValueError, "H and D at least 1"),
    "heads": ({"query": tokens(8, 3, 16)}, ValueError, "G = 2 heads, wanted a divisor of query's H = 3"),
    "no key heads": ({"key": tokens(8, 0, 16)}, ValueError, "G = 0 heads"),
    "head size": ({"query": tokens(8, 2, 8)}, ValueError, "key has head size 16, wanted query's 8"),
    "value shape": ({"value": tokens(8, 2, 8)}, ValueError, r"value has shape \(8, 2, 8\), wanted key's"),
    "value rows": ({"value": tokens(7, 2, 16)}, ValueError, r"value has shape \(7, 2, 16\), wanted key's"),
    "integer tokens": ({"query": tokens(8, 2, 16, dtype=torch.int64)}, TypeError, "query is torch.int64"),
    "mixed dtypes": ({"key": tokens(8, 2, 16, dtype=torch.float64)}, TypeError, "key is torch.float64 and query"),
    "device": ({"value": tokens(8, 2, 16, device="meta")}, ValueError, "value is on meta and query on cpu"),
    "no offsets": ({"q_offsets": None}, ValueError, "q_offsets is None"),
    "offsets list": ({"q_offsets": [0, 8]}, TypeError, "q_offsets is a list"),
    "offsets dtype": ({"q_offsets": OFFSETS.float()}, TypeError, "q_offsets is torch.float32, wanted int32 or int64"),
    "offsets bool": ({"q_offsets": OFFSETS.bool()}, TypeError, "q_offsets is torch.bool"),
    "offsets rank": ({"q_offsets": OFFSETS[None]}, ValueError, r"q_offsets has shape \(1, 4\), wanted \(B \+ 1,\)"),
    "offsets empty": ({"q_offsets": OFFSETS[:0]}, ValueError, r"q_offsets has shape \(0,\)"),
    "offsets device": ({"q_offsets": OFFSETS.to("meta")}, ValueError, "q_offsets is on meta"),
    "B mismatch": ({"kv_offsets": OFFSETS[:3]}, ValueError, "q_offsets has 3 sequences and kv_offsets 2"),
    "rows mismatch": ({"key": tokens(9, 2, 16), "value": tokens(9, 2, 16)}, ValueError, "key has 9 rows and query 8"),
    "shared and q_offsets": ({"shared_query": True, "kv_offsets": OFFSETS}, ValueError, "q_offsets is given"),
    "shared, no kv": ({"shared_query": True, "q_offsets": None}, ValueError, "kv_offsets is None"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale is nan, wanted a finite float"),
    "scale inf": ({"scale": float("inf")}, ValueError, "scale is inf"),
    "scale string": ({"scale": "1"}, TypeError, "scale is '1'"),
    "window negative": ({"window": (-1, 0)}, ValueError, "left side is -1, wanted an int >= 0; use None"),
    "window right": ({"window": (1, -1)}, ValueError, "right side is -1"),
    "window float": ({"window": (1.0, 0)}, TypeError, "left side is 1.0"),
    "window bool": ({"window": (True, 0)}, TypeError, "left side is True"),
    "window int": ({"window": 3}, TypeError, "window is 3, wanted None or"),
    "window long": ({"window": (1, 2, 3)}, TypeError, "window is"),
    "window huge": ({"window": (2**31, 0)}, ValueError, r"wanted less than 2\*\*31"),
    "causal": ({"causal": 1}, TypeError, "causal is a int, wanted a bool"),
    "impl": ({"impl": "cuda"}, ValueError, "impl is 'cuda', wanted one of 'auto', 'reference', 'triton', 'tlx'"),
    "schedule": ({"schedule": OFFSETS}, TypeError, "schedule is a Tensor, wanted what gemattn.make_schedule returns"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(name):
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 3, 3, 8], r"q_offsets\[0\] is 1, wanted 0"),
        ([0, 3, 2, 8], "q_offsets: sequence 1 ends at 2 before its start 3"),
        ([0, 3, 9, 9], "q_offsets: sequence 1 ends at 9, past the tensor's 8 rows"),
    ],
)
def test_checked_offsets_name_the_first_bad_sequence(monkeypatch, values, message):
    call(q_offsets=torch.tensor(values))  # unchecked: clamped
    monkeypatch.setenv("GEMATTN_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        call(q_offsets=torch.tensor(values))


def test_checked_key_offsets_are_named_too(monkeypatch):
    monkeypatch.setenv("GEMATTN_CHECK", "1")
    with pytest.raises(ValueError, match="kv_offsets: sequence 2 ends at 9"):
        call(kv_offsets=torch.tensor([0, 3, 3, 9]))


def test_causal_composes_with_the_window():
    wide = call(causal=True, window=(2, 7))
    assert torch.equal(wide, call(window=(2, 0)))
    assert not torch.equal(wide, call(window=(2, 7)))


def test_auto_on_cpu_is_the_reference():
    inputs = make_inputs([3, 5])
    args = (inputs.query, inputs.key, inputs.value, inputs.q_offsets)
    assert gemattn.resolve(*args) == "reference"
    assert gemattn.unsupported_reasons("reference", *args) == []
    assert gemattn.unsupported_reasons("auto", *args) == []


def test_a_named_implementation_that_cannot_says_why():
    inputs = make_inputs([3, 5], head_dim=20, dtype=torch.float64)
    args = (inputs.query, inputs.key, inputs.value, inputs.q_offsets)
    reasons = gemattn.unsupported_reasons("triton", *args)
    assert any("float64" in reason for reason in reasons) and any("20" in reason for reason in reasons)
    for ask in (gemattn.resolve, gemattn.jagged_attention):
        with pytest.raises(gemattn.UnsupportedError, match="not float64") as error:
            ask(*args, impl="triton")
        assert all(reason in str(error.value) for reason in reasons)
    with pytest.raises(NotImplementedError, match="CUDA tensors, not on cpu"):
        gemattn.jagged_attention(*args, impl="tlx")


def test_asking_for_reasons_checks_the_arguments():
    inputs = make_inputs([3, 5])
    with pytest.raises(ValueError, match="kv_offsets is None"):
        gemattn.unsupported_reasons("triton", inputs.query, inputs.key, inputs.value, shared_query=True)


def test_a_schedule_of_other_tensors_is_refused():
    inputs = make_inputs([3, 0, 5])
    args = (inputs.query, inputs.key, inputs.value, inputs.q_offsets)
    good = gemattn.make_schedule(inputs.q_offsets, query_rows=8)
    assert torch.equal(gemattn.jagged_attention(*args, schedule=good), gemattn.jagged_attention(*args))
    with pytest.raises(ValueError, match="another batch"):
        gemattn.jagged_attention(*args, schedule=gemattn.make_schedule(inputs.q_offsets, query_rows=200))
    with pytest.raises(ValueError, match="another batch"):
        gemattn.jagged_attention(*args, schedule=gemattn.make_schedule(inputs.q_offsets[:3], query_rows=8))


def test_the_docstring_example_runs():
    import doctest

    from gemattn import attention

    assert doctest.testmod(attention).attempted == 4
    assert doctest.testmod(attention).failed == 0
