"""Arguments wrong in every way: a Python error that names the argument, never a crash, never a hang."""

import contextlib
import re

import pytest
import torch

import gemattn
from gemattn.testing import make_inputs
from gemattn.testing.conformance.arguments import wrong_arguments

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

INPUTS = make_inputs([3, 0, 5])
GOOD = {"query": INPUTS.query, "key": INPUTS.key, "value": INPUTS.value, "q_offsets": INPUTS.q_offsets}
WRONG = list(wrong_arguments(INPUTS))


def ask_reasons(impl="reference", **arguments):
    return gemattn.unsupported_reasons(impl, **arguments)


ASKED = (gemattn.jagged_attention, gemattn.resolve, ask_reasons)


@pytest.mark.parametrize(("about", "names", "changes"), WRONG, ids=[about for about, *_ in WRONG])
def test_a_wrong_argument_is_named(about, names, changes):
    for ask in ASKED:
        with pytest.raises((ValueError, TypeError)) as error:
            ask(**(GOOD | changes))
        assert any(re.search(rf"\b{name}\b", str(error.value)) for name in names), str(error.value)


@pytest.mark.parametrize("impl", ["", "cuda", "Triton", None, 3, ["triton"], torch.tensor(1)], ids=repr)
def test_a_wrong_implementation_is_named(impl):
    for ask in ASKED:
        with pytest.raises((ValueError, TypeError), match="impl"):
            ask(**GOOD, impl=impl)


POOL = [
    None, True, False, 0, 1, -1, 2**40, 0.5, float("nan"), "causal", b"x", (), (1, 2), [0, 3], {}, {1}, object(),
    torch.tensor(0), torch.zeros(3), torch.tensor([0, 3, 3, 8]), torch.zeros(8, 2, 16), torch.zeros(8, 1, 16),
    torch.zeros(2, 2, 16, 1), torch.zeros(8, 2, 16, dtype=torch.bfloat16), torch.zeros(0, 2, 16),
    torch.zeros(8, 2, 16, device="meta"), torch.zeros(8, 2, 16).to_sparse(), torch.tensor([5, -1, 99, 2]),
    torch.tensor([0], dtype=torch.int32), gemattn.make_schedule(INPUTS.q_offsets, query_rows=8),
]  # fmt: skip
ARGUMENTS = [
    "query", "key", "value", "q_offsets", "kv_offsets", "shared_query", "causal", "window", "scale", "return_lse",
    "deterministic", "schedule",
]  # fmt: skip


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.dictionaries(st.sampled_from(ARGUMENTS), st.sampled_from(POOL), min_size=1, max_size=5))
def test_anything_is_answered_or_refused(changes):
    with contextlib.suppress(ValueError, TypeError):
        gemattn.jagged_attention(**(GOOD | changes), impl="reference")


SCHEDULE_WRONG = {
    "q_offsets list": ({"q_offsets": [0, 8]}, "q_offsets"),
    "q_offsets float": ({"q_offsets": torch.zeros(3)}, "q_offsets"),
    "q_offsets rank": ({"q_offsets": torch.zeros(1, 3, dtype=torch.int64)}, "q_offsets"),
    "q_offsets empty": ({"q_offsets": torch.zeros(0, dtype=torch.int64)}, "q_offsets"),
    "q_offsets missing": ({"q_offsets": None}, "q_offsets"),
    "q_offsets sparse": ({"q_offsets": torch.tensor([0, 8]).to_sparse()}, "q_offsets"),
    "kv_offsets list": ({"kv_offsets": [0, 8], "key_rows": 8}, "kv_offsets"),
    "kv_offsets B": ({"kv_offsets": torch.tensor([0, 8]), "key_rows": 8}, "kv_offsets"),
    "kv_offsets device": (
        {"kv_offsets": torch.zeros(4, dtype=torch.int64, device="meta"), "key_rows": 8},
        "kv_offsets",
    ),
    "key_rows missing": ({"kv_offsets": torch.tensor([0, 3, 3, 8])}, "key_rows"),
    "query_rows float": ({"query_rows": 8.0}, "query_rows"),
    "query_rows bool": ({"query_rows": True}, "query_rows"),
    "query_rows negative": ({"query_rows": -1}, "query_rows"),
    "query_rows None": ({"query_rows": None}, "query_rows"),
    "key_rows negative": ({"key_rows": -1}, "key_rows"),
    "shared, q_offsets": ({"shared_query": True, "kv_offsets": torch.tensor([0, 8]), "key_rows": 8}, "q_offsets"),
    "shared, no kv_offsets": ({"shared_query": True, "q_offsets": None}, "kv_offsets"),
    "shared_query int": ({"shared_query": 1}, "shared_query"),
}


@pytest.mark.parametrize(("changes", "name"), SCHEDULE_WRONG.values(), ids=SCHEDULE_WRONG.keys())
def test_make_schedule_names_a_wrong_argument(changes, name):
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        gemattn.make_schedule(**({"q_offsets": INPUTS.q_offsets, "query_rows": 8} | changes))


def test_a_schedule_of_other_lengths_is_found_when_values_are_checked(monkeypatch):
    other = gemattn.make_schedule(torch.tensor([0, 4, 4, 8]), query_rows=8)
    good = gemattn.make_schedule(INPUTS.q_offsets, query_rows=8)
    tiles = good._replace(q_tiles=other.q_tiles.flip(0), kv_tiles=good.kv_tiles.flip(0))
    gemattn.jagged_attention(**GOOD, schedule=other)  # by its shapes it would do
    monkeypatch.setenv("GEMATTN_CHECK", "1")
    gemattn.jagged_attention(**GOOD, schedule=good)
    gemattn.jagged_attention(**GOOD, schedule=tiles)  # another order of the records
    with pytest.raises(ValueError, match=r"schedule\.q_offsets is not that of these offsets"):
        gemattn.jagged_attention(**GOOD, schedule=other)
    lost = good._replace(q_tiles=torch.full_like(good.q_tiles, -1))
    with pytest.raises(ValueError, match=r"schedule\.q_tiles is not that of these offsets"):
        gemattn.jagged_attention(**GOOD, schedule=lost)
