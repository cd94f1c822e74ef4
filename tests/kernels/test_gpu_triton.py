"""The compiled Triton kernels on a GPU: every option, every head size, and what only a GPU shows."""

import pytest
import torch

import gemattn
from gemattn.testing import JaggedInputs, assert_matches_oracle, make_inputs, run

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 15, 16, 17, 63, 65, 129, 300, 1, 257]
KV_LENGTHS = [129, 65, 0, 17, 16, 1, 15, 63, 257, 700, 40]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WINDOWS = {
    "full": {},
    "causal": {"causal": True},
    "own position": {"window": (0, 0)},
    "both sides": {"window": (20, 3)},
    "left side": {"window": (130, None)},
    "right side": {"window": (None, 70)},
    "causal left side": {"causal": True, "window": (66, None)},
}


def inputs_of(kind, **options):
    options = {"heads": 4, "kv_heads": 2, "head_dim": 64, "slack": 9, "device": "cuda"} | options
    if kind == "self":
        return make_inputs(LENGTHS, **options)
    if kind == "cross":
        return make_inputs(LENGTHS, KV_LENGTHS, **options)
    return make_inputs(None, KV_LENGTHS, shared_rows=150, **options)


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_size(head_dim):
    assert_matches_oracle(inputs_of("self", head_dim=head_dim, dtype=torch.bfloat16), "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 200, 256])
def test_dtypes(dtype, head_dim):
    assert_matches_oracle(inputs_of("cross", head_dim=head_dim, dtype=dtype), "triton", causal=True)


@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(window, dtype, kind):
    assert_matches_oracle(inputs_of(kind, dtype=dtype), "triton", **window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_shared_query(seed, dtype):
    lengths = torch.randint(0, 200, (700,), generator=torch.Generator().manual_seed(seed)).tolist()
    inputs = make_inputs(None, lengths, shared_rows=40, heads=2, head_dim=32, dtype=dtype, seed=seed, device="cuda")
    assert_matches_oracle(inputs, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.3, 500.0], ids=str)
def test_scales(scale, dtype):
    assert_matches_oracle(inputs_of("self", dtype=dtype), "triton", scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_sequences(dtype):
    lengths = torch.randint(0, 70, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert_matches_oracle(make_inputs(lengths, heads=2, dtype=dtype, device="cuda"), "triton", causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_sequences(dtype):
    assert_matches_oracle(make_inputs([5000, 1, 3000], heads=1, head_dim=64, dtype=dtype, device="cuda"), "triton")


@pytest.mark.parametrize("lengths", [[], [0, 0, 0], [0, 3, 0]], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_empty(lengths, shared, poison_empty):
    inputs = make_inputs(
        None if shared else lengths, [0] * len(lengths), shared_rows=70 if shared else None, slack=200, device="cuda"
    )
    inputs.dout.fill_(torch.nan)
    inputs.dlse.fill_(torch.nan)
    results = run(inputs, "triton")
    assert results.pop("lse").eq(-torch.inf).all()
    for name, x in results.items():
        assert x.eq(0).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["query", "key", "value", "dout", "dlse"])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_a_bad_sequence_hurts_only_itself_and_shows(options, name, bad, dtype, poison_empty):
    inputs = make_inputs([70, 150, 33], [90, 150, 200], heads=2, kv_heads=1, head_dim=24, dtype=dtype, device="cuda")
    expected = run(inputs, "triton", **options)
    q, kv = slice(70, 220), slice(90, 240)
    tensor = getattr(inputs, name).clone()
    row = (kv if name in ("key", "value") else q).start + 7
    (tensor.movedim(1, 0) if name == "dlse" else tensor)[row] = bad
    results = run(JaggedInputs(**(vars(inputs) | {name: tensor})), "triton", **options)
    shows = {"query": "out dq dk dv", "key": "out dq dk dv", "value": "out dq dk", "dout": "dq dk dv", "dlse": "dq dk"}
    for what, x in results.items():
        x, good = (y.movedim(1, 0) if what == "lse" else y for y in (x, expected[what]))
        own = kv if what in ("dk", "dv") else q
        assert torch.equal(x[: own.start], good[: own.start]), what
        assert torch.equal(x[own.stop :], good[own.stop :]), what
        if what in shows[name].split():
            assert not x[own].isfinite().all(), what
            if bad != bad:
                assert x[own].isnan().any(), what


def test_rows_that_see_no_key(poison_empty):
    inputs = make_inputs([40, 200], [9, 70], heads=2, dtype=torch.bfloat16, device="cuda")
    expected = run(inputs, "triton", causal=True)
    for rows in (slice(0, 31), slice(40, 170)):
        inputs.dout[rows] = torch.nan
        inputs.dlse[:, rows] = torch.nan
    results = run(inputs, "triton", causal=True)
    for name, x in results.items():
        assert torch.equal(x, expected[name]), name
        assert not x.isnan().any()


def test_all_scores_minus_infinity_show_nan():
    inputs = make_inputs([5, 3], heads=1, device="cuda")
    inputs.query[:5] = 1e30
    inputs.key[:5] = -1e30
    results = run(inputs, "triton")
    assert results["out"][:5].isnan().all() and results["dv"][:5].isnan().all()
    assert results["out"][5:].isfinite().all() and results["dv"][5:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_batch_invariance_and_determinism(dtype):
    lengths = torch.randint(0, 400, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    inputs = make_inputs(lengths, heads=4, kv_heads=2, head_dim=64, dtype=dtype, slack=100, device="cuda")
    whole = run(inputs, "triton", causal=True)
    for name, x in run(inputs, "triton", causal=True).items():
        assert torch.equal(x, whole[name]), name
    ends = inputs.q_offsets.tolist()
    for b in (0, 17, 42):
        rows = slice(ends[b], ends[b + 1])
        offsets = torch.tensor([0, lengths[b]], device="cuda")
        alone = JaggedInputs(
            inputs.query[rows],
            inputs.key[rows],
            inputs.value[rows],
            offsets,
            offsets,
            inputs.dout[rows],
            inputs.dlse[:, rows],
        )
        for name, x in run(alone, "triton", causal=True).items():
            assert torch.equal(x, whole[name][:, rows] if name == "lse" else whole[name][rows]), (name, b)


def test_views_of_one_projection():
    plain = make_inputs(LENGTHS, heads=4, head_dim=64, dtype=torch.bfloat16, device="cuda")
    fused = torch.stack((plain.query, plain.key, plain.value), dim=1)
    views = JaggedInputs(**(vars(plain) | dict(zip(("query", "key", "value"), fused.unbind(1), strict=True))))
    expected = run(plain, "triton")
    for name, x in run(views, "triton").items():
        assert torch.equal(x, expected[name]), name


def test_no_host_sync():
    inputs = inputs_of("cross", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]

    def step():
        out, lse = gemattn.jagged_attention(
            *leaves, inputs.q_offsets, inputs.kv_offsets, causal=True, return_lse=True, impl="triton"
        )
        return torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))

    step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("shared", [False, True])
def test_cuda_graph_replays_with_other_lengths(shared):
    rows = 600
    shapes = {"heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    first, second = (
        make_inputs(
            None if shared else n, n, shared_rows=50 if shared else None, slack=rows - sum(n), seed=seed, **shapes
        )
        for seed, n in enumerate(([200, 0, 130], [1, 599, 0]))
    )
    names = ("query", "key", "value", "q_offsets", "kv_offsets", "dout", "dlse")
    static = {name: x.clone() for name in names if (x := getattr(first, name)) is not None}
    leaves = [static[name].requires_grad_() for name in ("query", "key", "value")]

    def step():
        out, lse = gemattn.jagged_attention(
            *leaves,
            static.get("q_offsets"),
            static["kv_offsets"],
            shared_query=shared,
            return_lse=True,
            impl="triton",
        )
        return out, lse, *torch.autograd.grad((out, lse), leaves, (static["dout"], static["dlse"]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for inputs in (second, first):
        with torch.no_grad():
            for name, x in static.items():
                x.copy_(getattr(inputs, name))
        graph.replay()
        for ours, (name, expected) in zip(results, run(inputs, "triton").items(), strict=True):
            assert torch.equal(ours, expected), name


def test_other_lengths_compile_nothing():
    from gemattn.kernels.triton.forward import forward_kernel
    from gemattn.kernels.triton.key_gradient import key_gradient_kernel
    from gemattn.kernels.triton.query_gradient import query_gradient_kernel

    kernels = (forward_kernel, query_gradient_kernel, key_gradient_kernel)

    def compiled():
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in kernels]

    shapes = {"heads": 2, "head_dim": 40, "dtype": torch.float16, "device": "cuda"}
    run(make_inputs([3, 5, 200], **shapes), "triton")
    before = compiled()
    for lengths in ([1], [0], [16] * 16, [1] * 33, [128, 4000], [7] * 1000):
        run(make_inputs(lengths, **shapes), "triton")
        run(make_inputs(lengths, slack=13, **shapes), "triton")
    assert compiled() == before


def test_tf32_where_the_user_allows_it():
    matmul = torch.backends.cuda.matmul
    inputs = make_inputs([200, 300], heads=2, head_dim=64, device="cuda")
    exact = assert_matches_oracle(inputs, "triton")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        rough = assert_matches_oracle(inputs, "triton")  # plain PyTorch rounds to TF32 as well
    finally:
        matmul.fp32_precision = before
    assert not torch.equal(exact["out"], rough["out"])


@pytest.mark.parametrize("layout", ["rows", "strides"])
def test_more_than_2_to_the_31_elements(layout):
    """Queries at the end of a huge tensor: by many rows, or by rows far apart in a wide fused buffer."""
    free = torch.cuda.mem_get_info()[0]
    if free < 40 << 30:
        pytest.skip(f"needs 40 GiB of free GPU memory, found {free >> 30}")
    heads, head_dim, dtype = 8, 128, torch.bfloat16
    small = make_inputs([300, 200], heads=heads, head_dim=head_dim, dtype=dtype, device="cuda")
    expected = run(small, "triton")
    if layout == "rows":
        before = 2**31 // (heads * head_dim) + 5
        buffers = [torch.zeros(before + 500, heads, head_dim, dtype=dtype, device="cuda") for _ in range(4)]
        for buffer, x in zip(buffers, (small.query, small.key, small.value, small.dout), strict=True):
            buffer[before:] = x
        dlse = torch.zeros(heads, before + 500, device="cuda")
        dlse[:, before:] = small.dlse
        offsets = small.q_offsets + before
    else:
        before, width = 0, 2**31 // 400
        width -= width % 8
        wide = torch.zeros(500, width, dtype=dtype, device="cuda")
        buffers = [wide[:, i * 1024 : (i + 1) * 1024].unflatten(1, (heads, head_dim)) for i in range(4)]
        for buffer, x in zip(buffers, (small.query, small.key, small.value, small.dout), strict=True):
            buffer.copy_(x)
        dlse, offsets = small.dlse, small.q_offsets
    # Straight to the operator's own functions: `run` would copy these tensors.
    from gemattn.kernels.triton import backward, forward
    from gemattn.spec import AttentionSpec

    spec = AttentionSpec(head_dim**-0.5)
    query, key, value, dout = buffers
    out, lse = forward(query, key, value, offsets, offsets, [], spec)
    grads = backward(dout, dlse, query, key, value, out, lse, offsets, offsets, [], spec)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    for name, x in results.items():
        assert torch.equal(x[before:], expected[name]), name
        assert x[:before].eq(0).all(), name
    assert torch.equal(lse[:, before:], expected["lse"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_device():
    inputs = make_inputs(LENGTHS, dtype=torch.bfloat16, device="cuda:1")
    with torch.cuda.device(0):
        assert_matches_oracle(inputs, "triton")
