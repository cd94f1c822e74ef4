"""The operators as PyTorch citizens: opcheck, compile, export, autocast, checkpointing, FLOPs."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gemattn
from gemattn.testing import make_inputs, run


def _forward_args(inputs, left=-1, right=-1):
    shared = inputs.shared_query
    return (
        *(x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)),
        inputs.q_offsets,
        inputs.kv_offsets.clone(),
        *[None] * 6,  # no schedule
        left,
        right,
        0.25,
        shared,
        False,
    )


CASES = {
    "self": {"q_lengths": [3, 0, 5]},
    "cross": {"q_lengths": [3, 0, 5], "kv_lengths": [2, 4, 0]},
    "shared": {"q_lengths": None, "shared_rows": 2, "kv_lengths": [2, 4, 0]},
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    inputs = make_inputs(**CASES[case], head_dim=4, dtype=torch.float64)
    torch.library.opcheck(torch.ops.gemattn.jagged_attention_reference.default, _forward_args(inputs, right=0))
    with torch.no_grad():
        args = _forward_args(inputs)
        out, lse = torch.ops.gemattn.jagged_attention_reference(*args)
    backward = (
        inputs.dout.clone().requires_grad_(),
        inputs.dlse.clone().requires_grad_(),
        *args[:3],
        out,
        lse,
        *args[3:],
    )
    torch.library.opcheck(torch.ops.gemattn.jagged_attention_reference_backward.default, backward)


def test_fullgraph_compile_serves_every_batch_with_one_graph():
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def layer(query, key, value, offsets):
        return gemattn.jagged_attention(query * 2, key, value, offsets, causal=True).square()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for lengths in ([3, 0, 6], [7, 2, 4, 6], [2] * 11):  # no two sizes of the first batch are equal
        inputs = make_inputs(lengths, head_dim=8)
        leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
        eager = [x.detach().clone().requires_grad_() for x in leaves]
        out = compiled(*leaves, inputs.q_offsets)
        wanted = layer(*eager, inputs.q_offsets)
        torch.testing.assert_close(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        for ours, plain in zip(leaves, eager, strict=True):
            torch.testing.assert_close(ours.grad, plain.grad)
    assert graphs.frame_count == 1


@pytest.mark.compiler
def test_fullgraph_compile_with_a_schedule_and_lse():
    torch._dynamo.reset()

    def pool(query, key, value, offsets):
        schedule = gemattn.make_schedule(
            None, offsets, query_rows=query.shape[0], key_rows=key.shape[0], shared_query=True
        )
        return gemattn.jagged_attention(
            query, key, value, None, offsets, shared_query=True, schedule=schedule, return_lse=True
        )

    inputs = make_inputs(None, [3, 0, 5], shared_rows=4)
    args = (inputs.query, inputs.key, inputs.value, inputs.kv_offsets)
    for ours, plain in zip(torch.compile(pool, fullgraph=True, dynamic=True)(*args), pool(*args), strict=True):
        torch.testing.assert_close(ours, plain)


def test_export_with_dynamic_lengths():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, offsets):
            return gemattn.jagged_attention(query, key, value, offsets, window=(2, 0))

    inputs = make_inputs([3, 0, 5])
    tokens, entries = torch.export.Dim("tokens"), torch.export.Dim("entries")
    program = torch.export.export(
        Layer(),
        (inputs.query, inputs.key, inputs.value, inputs.q_offsets),
        dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens}, {0: entries}),
    )
    other = make_inputs([4, 1, 6, 2])
    args = (other.query, other.key, other.value, other.q_offsets)
    torch.testing.assert_close(program.module()(*args), Layer()(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs(dtype):
    inputs = make_inputs([3, 5])
    args = (inputs.query, inputs.key, inputs.value)
    with torch.autocast("cpu", dtype=dtype):
        out = gemattn.jagged_attention(*args, inputs.q_offsets)
    assert out.dtype == dtype
    assert torch.equal(out, gemattn.jagged_attention(*(x.to(dtype) for x in args), inputs.q_offsets))
    with torch.autocast("cpu", dtype=dtype):
        doubles = gemattn.jagged_attention(*(x.double() for x in args), inputs.q_offsets)
    assert doubles.dtype == torch.float64


def test_checkpointing_gives_the_same_gradients():
    inputs = make_inputs([3, 5])
    plain = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    saved = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    gemattn.jagged_attention(*plain, inputs.q_offsets).backward(inputs.dout)
    checkpoint(gemattn.jagged_attention, *saved, inputs.q_offsets, use_reentrant=False).backward(inputs.dout)
    for ours, wanted in zip(saved, plain, strict=True):
        assert torch.equal(ours.grad, wanted.grad)


def test_flops_count_the_visible_pairs():
    lengths, heads, head_dim = [3, 0, 5], 2, 16
    inputs = make_inputs(lengths, heads=heads, head_dim=head_dim)
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    for causal, pairs in ((False, 9 + 25), (True, 6 + 15)):
        with FlopCounterMode(display=False) as counter:
            gemattn.jagged_attention(*leaves, inputs.q_offsets, causal=causal).sum().backward()
        assert counter.get_total_flops() == (4 + 10) * heads * head_dim * pairs
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode,
        FlopCounterMode(display=False) as counter,
    ):
        gemattn.jagged_attention(*(mode.from_tensor(x.detach()) for x in leaves), mode.from_tensor(inputs.q_offsets))
    assert counter.get_total_flops() == 4 * heads * head_dim * 8 * 8


def test_inputs_are_not_mutated_and_strided_views_are_taken():
    fused = torch.randn(8, 3, 2, 16)
    before = fused.clone()
    offsets = torch.tensor([0, 3, 8])
    query, key, value = fused.unbind(1)
    out = gemattn.jagged_attention(query, key, value, offsets)
    assert torch.equal(fused, before)
    assert torch.equal(out, gemattn.jagged_attention(*(x.contiguous() for x in (query, key, value)), offsets))
    transposed = torch.randn(8, 16, 2).transpose(1, 2)
    torch.testing.assert_close(
        gemattn.jagged_attention(transposed, key, value, offsets),
        gemattn.jagged_attention(transposed.contiguous(), key, value, offsets),
    )


@pytest.mark.parametrize("q_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype(q_dtype, kv_dtype):
    inputs = make_inputs([3, 0, 5], [2, 4, 0])
    wanted = run(inputs, "reference")["out"]
    out = gemattn.jagged_attention(
        inputs.query, inputs.key, inputs.value, inputs.q_offsets.to(q_dtype), inputs.kv_offsets.to(kv_dtype)
    )
    assert torch.equal(out, wanted)
