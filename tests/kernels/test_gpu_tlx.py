"""The Hopper kernels on the GPU: the contract's clauses, case by case."""

from dataclasses import replace

import pytest
import torch

import gemattn
from gemattn import dispatch
from gemattn.testing import assert_matches_oracle, assert_zero_slack, make_inputs, run

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 15, 16, 17, 63, 65, 129, 0, 300, 257, 128, 64, 500]
KV_LENGTHS = [5, 0, 130, 16, 1, 64, 300, 129, 0, 20, 600, 128, 77, 500]
KINDS = {
    "self": {"q_lengths": LENGTHS},
    "cross": {"q_lengths": LENGTHS, "kv_lengths": KV_LENGTHS},
    "shared": {"q_lengths": None, "shared_rows": 130, "kv_lengths": KV_LENGTHS},
}
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "causal, left side": {"causal": True, "window": (37, None)},
    "both sides": {"window": (100, 50)},
    "left side": {"window": (20, None)},
    "right side": {"window": (None, 9)},
    "own position": {"window": (0, 0)},
}


@pytest.fixture(autouse=True)
def hopper():
    """Skips where the kernels cannot run; a fixture, because markers are evaluated without a GPU too."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    x = torch.empty(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    reasons = gemattn.unsupported_reasons("tlx", x, x, x, torch.tensor([0, 1], device="cuda"))
    if reasons:
        pytest.skip("; ".join(reasons))


def inputs_of(kind="self", **options):
    defaults = {"heads": 3, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda", "slack": 70}
    return make_inputs(**KINDS[kind], **(defaults | options))


@pytest.mark.parametrize("deterministic", [False, True])  # the fused backward and the split one
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_matches_the_oracle(head_dim, kind, mask, deterministic, poison_empty):
    dtype = torch.bfloat16 if head_dim == 128 else torch.float16
    inputs = inputs_of(kind, head_dim=head_dim, dtype=dtype)
    assert_matches_oracle(inputs, "tlx", deterministic=deterministic, **MASKS[mask])


@pytest.mark.parametrize("scale", [0.0, -0.3, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_scales(kind, scale):
    assert_matches_oracle(inputs_of(kind), "tlx", scale=scale, causal=True)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads(kind):
    assert_matches_oracle(inputs_of(kind, heads=4, kv_heads=2), "tlx")


@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 0]], ids=str)
@pytest.mark.parametrize("slack", [0, 200])
@pytest.mark.parametrize("shared", [False, True])
def test_empty(lengths, slack, shared, poison_empty):
    shape = {"q_lengths": None, "shared_rows": 5, "kv_lengths": lengths} if shared else {"q_lengths": lengths}
    assert_matches_oracle(make_inputs(**shape, head_dim=64, dtype=torch.float16, slack=slack, device="cuda"), "tlx")


@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dlse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sequence_hurts_only_itself_and_shows(name, bad):
    inputs = make_inputs([70, 100, 130], heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    clean = run(inputs, "tlx")
    victim = slice(70, 170)
    tensor = getattr(inputs, name)
    (tensor[:, 90:91] if name == "dlse" else tensor[90:91])[:] = bad
    dirty = run(inputs, "tlx")
    others = torch.ones(300, dtype=torch.bool, device="cuda")
    others[victim] = False
    for result, value in clean.items():
        pick = (slice(None), others) if result == "lse" else (others,)
        assert torch.equal(dirty[result][pick], value[pick]), result
    shown = "dq" if name in ("dout", "dlse") else "out"
    assert not dirty[shown][victim].isfinite().all()


def test_gradients_of_rows_that_see_no_key_are_ignored():
    inputs = make_inputs([200], [70], heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    clean = run(inputs, "tlx", causal=True)
    inputs.dout[:130] = torch.nan
    inputs.dlse[:, :130] = torch.nan
    dirty = run(inputs, "tlx", causal=True)
    for name, value in clean.items():
        assert torch.equal(value, dirty[name]), name
    assert clean["out"][:130].eq(0).all() and clean["dq"][:130].eq(0).all()


def test_batch_invariance_and_determinism():
    shape = {"heads": 2, "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda"}
    inputs = make_inputs([300, 64, 0, 1000, 129], **shape)
    together = run(inputs, "tlx", deterministic=True)
    for _ in range(20):
        again = run(inputs, "tlx", deterministic=True)
        assert all(torch.equal(again[name], value) for name, value in together.items())
    rows = slice(364, 1364)
    alone = make_inputs([1000], **shape)
    for name in ("query", "key", "value", "dout"):
        getattr(alone, name).copy_(getattr(inputs, name)[rows])
    alone.dlse.copy_(inputs.dlse[:, rows])
    for name, value in run(alone, "tlx", deterministic=True).items():
        whole = together[name]
        assert torch.equal(value, whole[:, rows] if name == "lse" else whole[rows]), name


def test_the_gradient_of_a_shared_query_is_repeatable():
    """Without asking for it: partial sums are added in a fixed order."""
    inputs = make_inputs(
        None, [700, 64, 0, 1000, 129] * 40, shared_rows=200, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    first = run(inputs, "tlx")
    for _ in range(20):
        again = run(inputs, "tlx")
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_views_of_one_projection_and_an_expanded_gradient():
    fused = torch.randn(300, 3, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    query, key, value = fused.unbind(1)
    out = gemattn.jagged_attention(query, key, value, offsets, impl="tlx")
    out.sum().backward()
    plain = fused.detach().clone().requires_grad_()
    contiguous = [x.contiguous() for x in plain.unbind(1)]
    wanted = gemattn.jagged_attention(*contiguous, offsets, impl="tlx")
    wanted.backward(torch.ones_like(wanted))
    assert torch.equal(out, wanted) and torch.equal(fused.grad, plain.grad)


def test_what_tma_cannot_describe_is_refused():
    x = torch.randn(10, 2, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
    offsets = torch.tensor([0, 10], device="cuda")
    assert any("multiples of 16 bytes" in r for r in gemattn.unsupported_reasons("tlx", x, x, x, offsets))
    assert gemattn.resolve(x, x, x, offsets) == "triton"


def test_auto_takes_them_and_a_switch_turns_them_off(monkeypatch):
    x = torch.randn(10, 2, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 10], device="cuda")
    assert gemattn.resolve(x, x, x, offsets) == "tlx"
    assert gemattn.resolve(x.float(), x.float(), x.float(), offsets) == "triton"
    monkeypatch.setenv("GEMATTN_DISABLE_TLX", "1")
    assert gemattn.resolve(x, x, x, offsets) == "triton"
    with pytest.raises(dispatch.UnsupportedError, match="GEMATTN_DISABLE_TLX"):
        gemattn.jagged_attention(x, x, x, offsets, impl="tlx")


def test_no_host_sync():
    inputs = inputs_of(head_dim=64)
    run(inputs, "tlx")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(inputs, "tlx")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shared", [False, True])
def test_cuda_graph_replays_with_other_lengths(shared):
    shape = {"heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    kind = {"q_lengths": None, "shared_rows": 40} if shared else {}

    def case(lengths, seed):
        lengths_of = {"kv_lengths": lengths} if shared else {"q_lengths": lengths}
        return make_inputs(**kind, **lengths_of, **shape, slack=300 - sum(lengths), seed=seed)

    static = case([100, 20, 30], 0)
    leaves = [x.requires_grad_() for x in (static.query, static.key, static.value)]

    def step():
        out = gemattn.jagged_attention(
            *leaves,
            None if shared else static.kv_offsets,
            static.kv_offsets if shared else None,
            shared_query=shared,
            deterministic=True,
            impl="tlx",
        )
        return out, *torch.autograd.grad(out, leaves, static.dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    other = case([7, 290, 0], 1)
    with torch.no_grad():
        for name in ("query", "key", "value", "dout", "kv_offsets"):
            getattr(static, name).copy_(getattr(other, name))
    graph.replay()
    wanted = run(replace(other, dlse=None), "tlx", deterministic=True)
    assert torch.equal(results[0], wanted["out"])
    for grad, name in zip(results[1:], ("dq", "dk", "dv"), strict=True):
        assert torch.equal(grad, wanted[name]), name
        if name != "dq":
            assert_zero_slack(name, grad, other.kv_offsets)


def test_long_rows_take_64_bit_addresses():
    """More than 2**31 elements before the last sequence."""
    rows, heads, head_dim = 2**31 // (8 * 128) + 300, 8, 128
    if torch.cuda.mem_get_info()[0] < 10 * rows * heads * head_dim * 2:
        pytest.skip("needs about 43 GB of free GPU memory")
    x = torch.zeros(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    small = make_inputs([300], heads=heads, head_dim=head_dim, dtype=torch.bfloat16, device="cuda", with_dlse=False)
    x[-300:] = small.query
    dout = torch.zeros_like(x)
    dout[-300:] = small.dout
    offsets = torch.tensor([rows - 300, rows], device="cuda")  # all before is slack
    leaf = x.requires_grad_()
    out = gemattn.jagged_attention(leaf, leaf, leaf, offsets, deterministic=True, impl="tlx")
    (grad,) = torch.autograd.grad(out, leaf, dout)
    few = small.query.clone().requires_grad_()
    few_offsets = torch.tensor([0, 300], device="cuda")
    wanted = gemattn.jagged_attention(few, few, few, few_offsets, deterministic=True, impl="tlx")
    (wanted_grad,) = torch.autograd.grad(wanted, few, small.dout)
    assert torch.equal(out[-300:], wanted) and torch.equal(grad[-300:], wanted_grad)
    assert out[:-300:1000].eq(0).all() and grad[:-300:1000].eq(0).all()
