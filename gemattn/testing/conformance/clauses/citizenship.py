"""Clause 11: a citizen of PyTorch."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gemattn.kernels.schedule import make_schedule
from gemattn.testing.conformance.clause import NotRunHere, clause, over
from gemattn.testing.conformance.subject import KINDS, Subject, verify
from gemattn.testing.inputs import JaggedInputs


def _leaves(inputs: JaggedInputs) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]


@clause(11, cases=over(kind=KINDS))
def opcheck(subject: Subject, kind: str) -> None:
    """torch.library.opcheck is clean: schema, fake implementation, autograd, dynamic shapes."""
    if not isinstance(subject.impl, str):
        raise NotRunHere("a function has no operator name")
    lengths = {"self": ([3, 0, 5], None), "cross": ([3, 0, 5], [2, 4, 0]), "shared": (None, [2, 4, 0])}[kind]
    inputs = subject.inputs(*lengths, shared_rows=2 if kind == "shared" else None, dtype=torch.bfloat16)
    rows = {"query_rows": inputs.query.shape[0], "key_rows": inputs.key.shape[0]}
    schedule = make_schedule(inputs.q_offsets, inputs.kv_offsets, shared_query=inputs.shared_query, **rows)
    kv_offsets, *tiles = (x.clone() for x in (inputs.kv_offsets, *schedule))  # no two arguments are one tensor here
    options = (-1, 0, 0.25, inputs.shared_query, False)
    args = (*_leaves(inputs), inputs.q_offsets, kv_offsets, *tiles, *options)
    subject.function(
        *_leaves(inputs), inputs.q_offsets, kv_offsets, shared_query=inputs.shared_query
    )  # supported at all?
    operator = getattr(torch.ops.gemattn, f"jagged_attention_{subject.impl}").default
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, args, test_utils=checks, atol=0.02, rtol=0.02)


@clause(11)
def fullgraph_compile(subject: Subject) -> None:
    """torch.compile(fullgraph=True, dynamic=True) makes one graph for every batch, forward and backward."""
    import torch._dynamo.testing  # not above: it imports Triton, before which its interpreter has to be on

    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def layer(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
        return subject.function(query * 2, key, value, offsets, causal=True).square()

    subject.run(subject.inputs([3, 0, 6], dtype=torch.bfloat16))  # supported at all?
    compiled: Any = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for lengths in ([3, 0, 6], [7, 2, 4, 6], [2] * 11):  # no two sizes of the first batch are equal
        inputs = subject.inputs(lengths, heads=2, dtype=torch.bfloat16)
        ours, plain = _leaves(inputs), _leaves(inputs)
        assert inputs.q_offsets is not None
        wanted = layer(plain[0], plain[1], plain[2], inputs.q_offsets)
        out = compiled(*ours, inputs.q_offsets)
        torch.testing.assert_close(out, wanted)
        out.backward(inputs.dout)
        wanted.backward(inputs.dout)
        for x, y in zip(ours, plain, strict=True):
            torch.testing.assert_close(x.grad, y.grad)
    verify(graphs.frame_count == 1, f"{graphs.frame_count} graphs for three batches")


@clause(11, cases=over(kind=KINDS))
def export(subject: Subject, kind: str) -> None:
    """torch.export with dynamic lengths and a dynamic number (2 or more: PyTorch specialises 0 and 1) of sequences."""

    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, kv_offsets: Tensor) -> Any:
            options: dict[str, Any] = {"window": (2, 0), "return_lse": True}
            if kind == "self":
                return subject.function(query, key, value, offsets, **options)
            if kind == "cross":
                return subject.function(query, key, value, offsets, kv_offsets, **options)
            return subject.function(query, key, value, None, kv_offsets, shared_query=True, **options)

    def batch(lengths: list[int], kv_lengths: list[int]) -> tuple[Tensor, ...]:
        inputs = subject.inputs(lengths, None if kind == "self" else kv_lengths, dtype=torch.bfloat16)
        query = inputs.query[:4] if kind == "shared" else inputs.query
        assert inputs.q_offsets is not None
        return query, inputs.key, inputs.value, inputs.q_offsets, inputs.kv_offsets.clone()

    tokens, keys = torch.export.Dim("tokens"), torch.export.Dim("keys")
    entries = torch.export.Dim("entries", min=3)
    query = {"self": {0: tokens}, "cross": {0: tokens}, "shared": {}}[kind]
    kv = {0: tokens if kind == "self" else keys}
    first, second = batch([3, 0, 5], [2, 4, 7]), batch([4, 1, 6, 2], [9, 0, 1, 2])
    Layer()(*first)  # supported at all?
    dynamic = (query, kv, kv, {0: entries}, {0: entries})
    program = torch.export.export(Layer(), first, dynamic_shapes=dynamic)
    torch.testing.assert_close(program.module()(*second), Layer()(*second))


@clause(11, cases=over(dtype=(torch.bfloat16, torch.float16)))
def autocast(subject: Subject, dtype: torch.dtype) -> None:
    """Autocast casts the inputs to its dtype, and gradients come back in theirs."""
    inputs = subject.inputs([3, 0, 17])
    cast = [x.to(dtype) for x in (inputs.query, inputs.key, inputs.value)]
    wanted = subject.function(*cast, inputs.q_offsets)
    leaves = _leaves(inputs)
    with torch.autocast(subject.device.type, dtype=dtype):
        out = subject.function(*leaves, inputs.q_offsets)
    verify(out.dtype == dtype, f"out is {out.dtype} under autocast to {dtype}")
    subject.assert_same("out", out, wanted)
    grads = torch.autograd.grad(out.float().sum(), leaves)
    verify(all(grad.dtype == torch.float32 for grad in grads), "gradients of float32 inputs are not float32")


@clause(11, cases=over(kind=KINDS))
def checkpointing(subject: Subject, kind: str) -> None:
    """Non-reentrant activation checkpointing gives the same gradients."""
    inputs = subject.few(kind, dtype=torch.bfloat16)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets = (inputs.q_offsets, inputs.kv_offsets)
        return subject.function(query, key, value, *offsets, shared_query=inputs.shared_query, deterministic=True)

    plain, saved = _leaves(inputs), _leaves(inputs)
    wanted = torch.autograd.grad(layer(*plain), plain, inputs.dout)
    grads = torch.autograd.grad(checkpoint(layer, *saved, use_reentrant=False), saved, inputs.dout)
    for name, x, y in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        subject.assert_same(name, x, y)


@clause(11, cases=over(kind=KINDS))
def no_input_is_mutated(subject: Subject, kind: str) -> None:
    """Inputs and incoming gradients are as they were."""
    inputs = subject.few(kind, dtype=torch.bfloat16)
    tensors = {name: x for name, x in vars(inputs).items() if isinstance(x, Tensor)}
    before = {name: (x.clone(), x._version) for name, x in tensors.items()}
    subject.run(inputs)
    for name, x in tensors.items():
        copy, version = before[name]
        same = torch.equal(x.nan_to_num(7), copy.nan_to_num(7)) and torch.equal(x.isnan(), copy.isnan())
        verify(same and x._version == version, f"{name} was written to")


@clause(11)
def flops(subject: Subject) -> None:
    """FlopCounterMode counts the visible pairs: 4 D a pair and head forward, 10 D backward."""
    from torch.utils.flop_counter import FlopCounterMode  # not above: it imports Triton

    heads = 2
    inputs = subject.inputs([3, 0, 5], heads=heads, dtype=torch.bfloat16)
    leaves, head_dim = _leaves(inputs), inputs.query.shape[2]
    for causal, pairs in ((False, 9 + 25), (True, 6 + 15)):
        with FlopCounterMode(display=False) as counter:
            out = subject.function(*leaves, inputs.q_offsets, causal=causal)
            torch.autograd.grad(out, leaves, inputs.dout)
        wanted = (4 + 10) * heads * head_dim * pairs
        verify(counter.get_total_flops() == wanted, f"{counter.get_total_flops()} FLOPs, wanted {wanted}")
