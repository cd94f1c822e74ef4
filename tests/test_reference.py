"""The reference against a plain loop over sequences, in float64 and below, forward, backward and twice."""

import pytest
import torch

import gemattn
from gemattn import reference
from gemattn.testing import assert_matches_oracle, attend, make_inputs, run, run_oracle

LENGTHS = [3, 0, 5, 17, 65, 1, 0]
KV_LENGTHS = [4, 3, 0, 6, 80, 1, 0]
MASKS = [
    {},
    {"causal": True},
    {"window": (3, None)},
    {"window": (None, 0)},
    {"window": (2, 1)},
    {"window": (0, 0)},
    {"causal": True, "window": (2, 5)},
]
SHAPES = {
    "self": {"q_lengths": LENGTHS},
    "cross": {"q_lengths": LENGTHS, "kv_lengths": KV_LENGTHS},
    "shared": {"q_lengths": None, "shared_rows": 5, "kv_lengths": KV_LENGTHS},
}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_matches_the_loop(shape, mask, dtype):
    inputs = make_inputs(**SHAPES[shape], heads=4, kv_heads=2, head_dim=16, dtype=dtype, slack=3)
    assert_matches_oracle(inputs, "reference", **mask)


@pytest.mark.parametrize("head_dim", [1, 7, 16, 256])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_head_size_and_group(head_dim, kv_heads):
    inputs = make_inputs([3, 9], heads=3, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float64)
    assert_matches_oracle(inputs, "reference", causal=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e3])
def test_any_scale(scale):
    assert_matches_oracle(make_inputs([3, 9, 0], dtype=torch.float64), "reference", scale=scale)


def test_many_groups_give_what_one_group_gives(monkeypatch):
    inputs = make_inputs(LENGTHS, KV_LENGTHS, dtype=torch.float64)
    whole = run(inputs, "reference")
    monkeypatch.setattr(reference, "_GROUP_ELEMENTS", 1)
    for name, value in run(inputs, "reference").items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("slack", [0, 2])
def test_all_empty(lengths, slack):
    results = assert_matches_oracle(make_inputs(lengths, slack=slack), "reference")
    assert results["out"].shape == (slack, 2, 16)
    assert (results["lse"] == -torch.inf).all()


def test_empty_keys_under_a_shared_query():
    results = assert_matches_oracle(make_inputs(None, [0, 2, 0], shared_rows=3), "reference")
    assert results["out"][:3].eq(0).all() and results["out"][3:6].ne(0).any()
    assert assert_matches_oracle(make_inputs(None, [], shared_rows=3), "reference")["dq"].eq(0).all()


@pytest.mark.parametrize("what", ["query", "key", "value", "dout", "dlse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_hurts_only_itself_and_shows(what, bad):
    lengths, victim = [5, 7, 4], slice(5, 12)
    inputs = make_inputs(lengths, dtype=torch.float64)
    clean = run(inputs, "reference")
    tensor = getattr(inputs, what)
    (tensor[:, 8:9] if what == "dlse" else tensor[8:9])[:] = bad
    dirty = run(inputs, "reference")
    others = torch.ones(16, dtype=torch.bool)
    others[victim] = False
    for name in clean:
        pick = (slice(None), others) if name == "lse" else (others,)
        torch.testing.assert_close(dirty[name][pick], clean[name][pick], rtol=1e-12, atol=1e-12)
    shown = "dq" if what in ("dout", "dlse") else "out"
    assert not dirty[shown][victim].isfinite().all()


def test_scores_that_are_all_minus_infinity_show_as_nan():
    inputs = make_inputs([2], heads=1, head_dim=1, dtype=torch.float64)
    inputs.query.fill_(1.0)
    inputs.key.fill_(-torch.inf)
    assert run(inputs, "reference")["out"].isnan().all()


def test_gradients_of_rows_that_see_no_key_are_ignored():
    inputs = make_inputs([4], [2], dtype=torch.float64)  # causal: rows 0 and 1 see nothing
    clean = run(inputs, "reference", causal=True)
    inputs.dout[:2] = torch.nan
    inputs.dlse[:, :2] = torch.nan
    dirty = run(inputs, "reference", causal=True)
    for name in clean:
        assert torch.equal(clean[name], dirty[name])
    assert (clean["lse"][:, :2] == -torch.inf).all() and clean["dq"][:2].eq(0).all()


@pytest.mark.parametrize("offsets", [[0, 9, 4, 20], [-3, 2, 2, 7], [5, 4, 3, 2]], ids=str)
def test_corrupted_offsets_are_clamped_and_made_monotone(offsets):
    query, key, value = (torch.randn(8, 2, 4) for _ in range(3))
    mended = torch.tensor(offsets).clamp(0, 8).cummax(0).values
    out = gemattn.jagged_attention(query, key, value, torch.tensor(offsets))
    assert torch.equal(out, gemattn.jagged_attention(query, key, value, mended))
    assert out[: mended[0]].eq(0).all() and out[mended[-1] :].eq(0).all()


def test_second_derivative_where_only_one_result_is_used():
    inputs = make_inputs([3, 4], dtype=torch.float64, head_dim=3)
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    out = gemattn.jagged_attention(*leaves, inputs.q_offsets)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    second = torch.autograd.grad(dq.square().sum(), leaves)

    total = [torch.zeros_like(x) for x in leaves]
    for rows in (slice(0, 3), slice(3, 7)):
        parts = [x[rows].detach().clone().requires_grad_() for x in leaves]
        plain, _ = attend(*parts)
        (dq,) = torch.autograd.grad(plain.square().sum(), parts[0], create_graph=True)
        for whole, grad in zip(total, torch.autograd.grad(dq.square().sum(), parts), strict=True):
            whole[rows] = grad
    for ours, plain in zip(second, total, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


def test_batch_around_a_sequence_changes_it_within_rounding_only():
    inputs = make_inputs([40, 3, 100], dtype=torch.float64)
    together = run(inputs, "reference")
    rows = slice(40, 43)
    alone = gemattn.jagged_attention(inputs.query[rows], inputs.key[rows], inputs.value[rows], torch.tensor([0, 3]))
    torch.testing.assert_close(together["out"][rows], alone, rtol=1e-13, atol=1e-13)


def test_oracle_itself_on_a_case_worked_by_hand():
    # One head of size 1, scale 1: scores of query 1 against keys (0, ln 3) are (0, ln 3), weights 1/4 and 3/4.
    inputs = make_inputs([1], [2], heads=1, head_dim=1, dtype=torch.float64, with_dlse=False)
    inputs.query.fill_(1.0)
    inputs.key.copy_(torch.tensor([1.0, 3.0]).log().view(2, 1, 1))
    inputs.value.copy_(torch.tensor([8.0, 4.0]).view(2, 1, 1))
    inputs.dout.fill_(1.0)
    oracle = run_oracle(inputs, scale=1.0)
    assert oracle["out"].item() == pytest.approx(5.0)
    assert oracle["lse"].item() == pytest.approx(torch.tensor(4.0).log().item())
    assert oracle["dv"].flatten().tolist() == pytest.approx([0.25, 0.75])
    # d out / d s_j = p_j (v_j - out)
    assert oracle["dk"].flatten().tolist() == pytest.approx([0.25 * 3, 0.75 * -1])
