"""The Triton kernels in the interpreter: every option against the float64 oracle, and what a batch must not do.

`test_gpu_triton.py` runs the compiled kernels.
"""

from itertools import accumulate

import pytest
import torch

from gemattn.kernels import interpreter
from gemattn.kernels.schedule import Schedule, make_schedule
from gemattn.spec import AttentionSpec
from gemattn.testing import JaggedInputs, assert_matches_oracle, make_inputs, run

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")

# Tiles are 64 by 64 in the interpreter: these lengths end before, at and after a tile, and two tiles.
LENGTHS = [0, 1, 15, 16, 17, 63, 65, 129]
KV_LENGTHS = [129, 65, 0, 17, 16, 1, 15, 63]
WINDOWS = {
    "causal": {"causal": True},
    "own position": {"window": (0, 0)},
    "both sides": {"window": (20, 3)},
    "left side": {"window": (70, None)},
    "right side": {"window": (None, 5)},
    "causal left side": {"causal": True, "window": (66, None)},
}


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(16, torch.bfloat16), (24, torch.float32), (64, torch.float16), (128, torch.bfloat16), (256, torch.float32)],
    ids=str,
)
def test_head_sizes_and_dtypes(head_dim, dtype):
    inputs = make_inputs(LENGTHS, heads=1, head_dim=head_dim, dtype=dtype)
    assert_matches_oracle(inputs, "triton")


@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_in_cross_attention_of_grouped_heads(options):
    # Where a sequence has more queries than keys, the first rows of a causal one see no key.
    inputs = make_inputs(LENGTHS, KV_LENGTHS, heads=2, kv_heads=1, dtype=torch.float32, slack=3)
    assert_matches_oracle(inputs, "triton", **options)


@pytest.mark.parametrize("name", ["causal", "both sides"])
def test_windows_in_self_attention(name):
    inputs = make_inputs([129, 1, 64], heads=1, dtype=torch.bfloat16, offsets_dtype=torch.int32)
    assert_matches_oracle(inputs, "triton", **WINDOWS[name])


@pytest.mark.parametrize(
    ("rows", "dtype", "options"),
    [
        (17, torch.float32, {}),
        (70, torch.bfloat16, {}),
        (70, torch.float32, {"causal": True}),
        (5, torch.float32, {"window": (10, 2)}),
    ],
    ids=str,
)
def test_shared_query(rows, dtype, options):
    inputs = make_inputs(
        None, [129, 0, 16, 65, 1], shared_rows=rows, heads=2, kv_heads=1, head_dim=24, dtype=dtype, slack=3
    )
    assert_matches_oracle(inputs, "triton", **options)


def test_shared_query_in_more_sequences_than_chunks(monkeypatch):
    # Two chunks of the batch: a program walks several sequences and keeps its sum.
    from gemattn.kernels.triton import launch

    monkeypatch.setattr(launch, "_SHARED_QUERY_PROGRAMS", 2)
    inputs = make_inputs(None, [9, 0, 70, 33, 1], shared_rows=6, heads=1)
    first = assert_matches_oracle(inputs, "triton")
    assert torch.equal(first["dq"], run(inputs, "triton")["dq"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.7, 1000.0], ids=str)
def test_scales(scale, dtype):
    # 1000: scores of about 1e4, a softmax that is nearly one-hot.
    inputs = make_inputs([1, 17, 65], [16, 65, 17], heads=1, dtype=dtype)
    results = assert_matches_oracle(inputs, "triton", scale=scale)
    if scale == 0:
        assert results["dq"].eq(0).all() and results["dk"].eq(0).all()


@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_incoming_gradient(which):
    inputs = make_inputs([17, 0, 40], heads=1)
    kept = {"dout": None} if which == "lse" else {"dlse": None}
    assert_matches_oracle(JaggedInputs(**(vars(inputs) | kept)), "triton")


@pytest.mark.parametrize(
    ("q_lengths", "kv_lengths", "shared_rows", "slack"),
    [
        ([0, 0, 0], None, None, 0),
        ([0, 0, 0], None, None, 70),
        ([], None, None, 0),
        ([], None, None, 5),
        ([3, 0, 70], [0, 0, 0], None, 2),
        ([0, 0], [5, 70], None, 2),
        (None, [0, 0], 6, 0),
        (None, [], 6, 3),
        (None, [4, 70], 0, 0),
    ],
)
def test_nothing_to_attend_to(q_lengths, kv_lengths, shared_rows, slack, poison_empty):
    inputs = make_inputs(q_lengths, kv_lengths, shared_rows=shared_rows, heads=2, kv_heads=1, slack=slack)
    if inputs.dout is not None:
        inputs.dout.fill_(torch.nan)
        inputs.dlse.fill_(torch.nan)
    for options in ({}, {"causal": True}):
        results = run(inputs, "triton", **options)
        assert results.pop("lse").eq(-torch.inf).all()
        for name, x in results.items():
            assert x.eq(0).all(), name


def rows_of(inputs, b):
    """Rows of sequence ``b`` in (query, key)."""
    ends = inputs.kv_offsets.tolist()
    kv = slice(ends[b], ends[b + 1])
    if inputs.q_offsets is None:
        s = inputs.query.shape[0]
        return slice(b * s, b * s + s), kv
    starts = inputs.q_offsets.tolist()
    return slice(starts[b], starts[b + 1]), kv


def sequence_results(inputs, results, b):
    """What belongs to sequence ``b``."""
    q, kv = rows_of(inputs, b)
    own = {"out": results["out"][q], "lse": results["lse"][:, q], "dk": results["dk"][kv], "dv": results["dv"][kv]}
    return own | ({} if inputs.shared_query else {"dq": results["dq"][q]})


@pytest.fixture(scope="module")
def clean():
    """A batch of three sequences and its results."""
    inputs = make_inputs([20, 65, 16], [70, 17, 33], heads=1, dtype=torch.float32)
    return inputs, run(inputs, "triton")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dlse"])
def test_a_bad_sequence_hurts_only_itself_and_shows(name, bad, clean, poison_empty):
    inputs, expected = clean
    q, kv = rows_of(inputs, 1)
    tensor = getattr(inputs, name).clone()
    row = (kv if name in ("key", "value") else q).start + 2
    (tensor.T if name == "dlse" else tensor)[row] = bad
    results = run(JaggedInputs(**(vars(inputs) | {name: tensor})), "triton")
    for b in (0, 2):
        for what, x in sequence_results(inputs, results, b).items():
            assert torch.equal(x, sequence_results(inputs, expected, b)[what]), (what, b)
    own = sequence_results(inputs, results, 1)
    shows = {
        "query": ["out", "dq", "dk", "dv"],
        "key": ["out", "dq", "dk", "dv"],
        "value": ["out", "dq", "dk"],
        "dout": ["dq", "dk", "dv"],
        "dlse": ["dq", "dk"],
    }
    for what in shows[name]:
        assert not own[what].isfinite().all(), what
    if bad != bad:
        for what in shows[name]:
            assert own[what].isnan().any(), what


def test_a_bad_sequence_shows_in_a_shared_querys_gradient_alone(poison_empty):
    inputs = make_inputs(None, [20, 65, 16], shared_rows=9, heads=1)
    expected = run(inputs, "triton")
    inputs.value[25] = torch.nan
    results = run(inputs, "triton")
    for b in (0, 2):
        for what, x in sequence_results(inputs, results, b).items():
            assert torch.equal(x, sequence_results(inputs, expected, b)[what]), (what, b)
    assert results["out"][9:18].isnan().all() and results["dq"].isnan().all()


def test_gradients_of_rows_that_see_no_key_are_ignored(poison_empty):
    # Causal with 40 queries on 9 keys: the first 31 rows see none. The shared query likewise.
    for inputs in (
        make_inputs([40, 5], [9, 70], heads=1),
        make_inputs(None, [9, 70], shared_rows=40, heads=1),
    ):
        expected = run(inputs, "triton", causal=True)
        inputs.dout[:31] = torch.nan
        inputs.dlse[:, :31] = torch.nan
        results = run(inputs, "triton", causal=True)
        for name, x in results.items():
            assert torch.equal(x, expected[name]), name
            assert x[..., :31].eq(-torch.inf).all() if name == "lse" else not x.isnan().any()


def test_rows_without_keys_stay_zero_beside_a_nan(poison_empty):
    for inputs in (make_inputs([40], [9], heads=1), make_inputs(None, [9, 60], shared_rows=40, heads=1)):
        inputs.key[3] = torch.nan
        results = run(inputs, "triton", causal=True)
        assert results["out"][:31].eq(0).all() and results["out"][31:40].isnan().any()
        if not inputs.shared_query:
            assert results["dq"][:31].eq(0).all()
        else:
            assert not results["dq"][:31].isnan().any() and results["dq"][35:].isnan().all()


def test_all_scores_minus_infinity_show_nan():
    inputs = make_inputs([5, 3], heads=1)
    inputs.query[:5] = 1e30
    inputs.key[:5] = -1e30
    results = run(inputs, "triton")
    assert results["out"][:5].isnan().all() and results["dv"][:5].isnan().all()
    assert results["out"][5:].isfinite().all() and results["dv"][5:].isfinite().all()


def test_slack_on_both_sides(poison_empty):
    plain = make_inputs([20, 70], [33, 9], heads=1)
    before, after = 130, 5
    padded = {}
    for name, dim in (("query", 0), ("key", 0), ("value", 0), ("dout", 0), ("dlse", 1)):
        x = getattr(plain, name)
        shape = list(x.shape)
        parts = []
        for rows in (before, after):
            shape[dim] = rows
            parts.append(torch.full(shape, torch.nan))
        padded[name] = torch.cat((parts[0], x, parts[1]), dim)
    slack = JaggedInputs(q_offsets=plain.q_offsets + before, kv_offsets=plain.kv_offsets + before, **padded)
    results, expected = run(slack, "triton"), run(plain, "triton")
    for name, x in results.items():
        x = x.T if name == "lse" else x
        assert torch.equal(x[before:-after].T if name == "lse" else x[before:-after], expected[name]), name
        rest = torch.cat((x[:before], x[-after:]))
        assert rest.eq(-torch.inf if name == "lse" else 0).all(), name


def test_bad_offsets_stay_inside_the_tensors():
    inputs = make_inputs([30, 30], heads=1)
    bad = torch.tensor([-5, 40, 20, 1000])
    good = torch.tensor([0, 40, 40, 60])
    results, expected = (
        run(JaggedInputs(**(vars(inputs) | {"q_offsets": offsets, "kv_offsets": offsets})), "triton")
        for offsets in (bad, good)
    )
    for name, x in results.items():
        assert torch.equal(x, expected[name]), name


def test_a_schedule_of_a_longer_batch_writes_nothing_outside(monkeypatch):
    from gemattn.kernels.triton import backward, forward

    inputs = make_inputs([60, 40], heads=1)
    schedule = list(make_schedule(torch.tensor([0, 60, 127]), query_rows=127))  # 127 // 128 == 100 // 128
    guards = []

    def guarded(shape, **options):
        shape = tuple(shape)
        buffer = torch.full((4096 + torch.Size(shape).numel(),), 7, **options)
        guards.append(buffer)
        return buffer[2048:-2048].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(x.shape, dtype=x.dtype, device=x.device))
    tensors = (inputs.query, inputs.key, inputs.value)
    spec = AttentionSpec(0.25)
    out, lse = forward(*tensors, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
    backward(inputs.dout, None, *tensors, out, lse, inputs.q_offsets, inputs.kv_offsets, schedule, spec)
    assert len(guards) == 6
    for buffer in guards:
        assert buffer[:2048].eq(7).all() and buffer[-2048:].eq(7).all()


def test_without_a_schedule_the_kernels_build_one():
    from gemattn.kernels.triton import forward

    inputs = make_inputs([60, 40], heads=1)
    out, lse = forward(
        inputs.query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets, [], AttentionSpec(0.25)
    )
    results = run(inputs, "triton", scale=0.25)
    assert torch.equal(out, results["out"]) and torch.equal(lse, results["lse"])


def test_views_of_one_projection_and_any_strides():
    plain = make_inputs([20, 65], heads=2, dtype=torch.float16)
    expected = run(plain, "triton")
    changed = ("query", "key", "value", "dout")
    fused = torch.stack((plain.query, plain.key, plain.value), dim=1)  # (T, 3, H, D)
    views = dict(zip(changed, fused.unbind(1), strict=False))
    assert views["key"].stride(0) == 3 * 2 * 16
    heads_first = {name: getattr(plain, name).transpose(0, 1).contiguous().transpose(0, 1) for name in changed}
    columns_first = {name: getattr(plain, name).permute(2, 0, 1).contiguous().permute(1, 2, 0) for name in changed}
    for tensors in (views, heads_first, columns_first):
        results = run(JaggedInputs(**(vars(plain) | tensors)), "triton")
        for name, x in results.items():
            assert torch.equal(x, expected[name]), name


def test_expanded_incoming_gradients():
    inputs = make_inputs([20, 3], heads=2)
    same = torch.tensor(1.5)
    expanded = {"dout": same.expand(23, 2, 16), "dlse": same.expand(2, 23)}
    filled = {name: x.contiguous() for name, x in expanded.items()}
    results = run(JaggedInputs(**(vars(inputs) | expanded)), "triton")
    for name, x in run(JaggedInputs(**(vars(inputs) | filled)), "triton").items():
        assert torch.equal(x, results[name]), name


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_batch_invariance(options):
    lengths, kv_lengths = [65, 3, 0, 20], [17, 129, 5, 64]
    whole = make_inputs(lengths, kv_lengths, heads=1, dtype=torch.bfloat16)
    results = run(whole, "triton", **options)
    order = [3, 1, 0]
    rows = [rows_of(whole, b) for b in order]

    def gather(x, side, dim=0):
        return torch.cat([x.narrow(dim, r[side].start, r[side].stop - r[side].start) for r in rows], dim)

    def offsets(lens):
        return torch.tensor([0, *accumulate(lens[b] for b in order)])

    permuted = JaggedInputs(
        gather(whole.query, 0),
        gather(whole.key, 1),
        gather(whole.value, 1),
        offsets(lengths),
        offsets(kv_lengths),
        gather(whole.dout, 0),
        gather(whole.dlse, 0, 1),
    )
    again = run(permuted, "triton", **options)
    q, kv = rows[0]
    alone_inputs = JaggedInputs(
        whole.query[q],
        whole.key[kv],
        whole.value[kv],
        torch.tensor([0, lengths[order[0]]]),
        torch.tensor([0, kv_lengths[order[0]]]),
        whole.dout[q],
        whole.dlse[:, q],
    )
    alone = run(alone_inputs, "triton", **options)
    for place, b in enumerate(order):
        for name, x in sequence_results(permuted, again, place).items():
            assert torch.equal(x, sequence_results(whole, results, b)[name]), (name, b)
    for name, x in alone.items():
        assert torch.equal(x, sequence_results(whole, results, order[0])[name]), name


def test_tf32_only_when_the_newest_switch_says_so():
    from gemattn.kernels.triton import launch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    query = torch.zeros(1, 1, 16)
    spec = AttentionSpec(1.0)
    try:
        for setting, exact in (("tf32", False), ("ieee", True)):
            matmul.fp32_precision = setting
            assert launch._options(query, spec)["EXACT"] == exact
            assert not launch._options(query.half(), spec)["EXACT"]
    finally:
        matmul.fp32_precision = before


def test_wide_windows_do_not_overflow():
    inputs = make_inputs([20, 3], heads=1)
    wide, unlimited = (run(inputs, "triton", window=w) for w in ((2**31 - 1, 2**31 - 1), (None, None)))
    for name, x in wide.items():
        torch.testing.assert_close(x, unlimited[name])


def test_a_given_schedule_serves_two_calls():
    inputs = make_inputs([20, 65], [9, 70], heads=1)
    schedule = make_schedule(inputs.q_offsets, inputs.kv_offsets, query_rows=85, key_rows=79)
    assert isinstance(schedule, Schedule)
    expected = run(inputs, "triton")
    for _ in range(2):
        for name, x in run(inputs, "triton", schedule=schedule).items():
            assert torch.equal(x, expected[name]), name
