"""Clause 5: no host sync, and nothing remembered of a tensor's address."""

from typing import Any

import torch
from torch import Tensor

from gemattn.testing.conformance.clause import clause, over
from gemattn.testing.conformance.subject import KINDS, Subject
from gemattn.testing.inputs import JaggedInputs

_NAMES = ("query", "key", "value", "q_offsets", "kv_offsets", "dout", "dlse")


def _two_batches(subject: Subject, kind: str) -> tuple[JaggedInputs, JaggedInputs]:
    """Batches of other lengths in buffers of the same shapes."""
    rows = 600 if subject.on_gpu else 40
    all_lengths = ([rows // 3, 0, rows // 5], [1, rows - 1, 0])
    shared_rows = None if kind != "shared" else (50 if subject.on_gpu else 5)

    def batch(seed: int, lengths: list[int]) -> JaggedInputs:
        kv_lengths = lengths[::-1] if kind == "cross" else lengths
        q_lengths = None if kind == "shared" else lengths
        slack = rows - sum(lengths)
        made = None if kind == "self" else kv_lengths
        return subject.inputs(q_lengths, made, shared_rows=shared_rows, slack=slack, seed=seed, dtype=torch.bfloat16)

    return batch(0, all_lengths[0]), batch(1, all_lengths[1])


class _Static:
    """Buffers that one batch after another is copied into, and the step on them."""

    def __init__(self, subject: Subject, inputs: JaggedInputs):
        self.subject = subject
        self.same = inputs.q_offsets is inputs.kv_offsets
        self.buffers = {name: x.clone() for name in _NAMES if (x := getattr(inputs, name)) is not None}
        self.leaves = [self.buffers[name].requires_grad_() for name in ("query", "key", "value")]

    def fill(self, inputs: JaggedInputs) -> None:
        with torch.no_grad():
            for name, x in self.buffers.items():
                x.copy_(getattr(inputs, name))

    def step(self) -> dict[str, Tensor]:
        kv_offsets = None if self.same else self.buffers["kv_offsets"]
        q_offsets = self.buffers.get("q_offsets")
        options: dict[str, Any] = {"shared_query": q_offsets is None, "return_lse": True, "deterministic": True}
        out, lse = self.subject.function(*self.leaves, q_offsets, kv_offsets, **options)
        grads = torch.autograd.grad((out, lse), self.leaves, (self.buffers["dout"], self.buffers["dlse"]))
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


@clause(5, cases=over(kind=KINDS), owed="kernels")
def same_buffers_other_lengths(subject: Subject, kind: str) -> None:
    """Another batch in the same buffers gives its own results: nothing is cached by address or identity."""
    first, second = _two_batches(subject, kind)
    static = _Static(subject, first)
    for inputs in (first, second, first):
        static.fill(inputs)
        subject.assert_all_same(static.step(), subject.run(inputs))


@clause(5, cases=over(kind=KINDS), owed="kernels", gpus=1)
def no_host_sync(subject: Subject, kind: str) -> None:
    """Forward and backward pass torch.cuda.set_sync_debug_mode("error")."""
    static = _Static(subject, subject.batch(kind, dtype=torch.bfloat16))
    static.step()
    torch.cuda.synchronize(subject.device)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        static.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@clause(5, cases=over(kind=KINDS), owed="kernels", gpus=1)
def cuda_graph_replay(subject: Subject, kind: str) -> None:
    """A CUDA graph of forward and backward, replayed with other lengths in the same buffers, gives their results."""
    first, second = _two_batches(subject, kind)
    static = _Static(subject, first)
    stream = torch.cuda.Stream(subject.device)
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(stream):
        static.step()
    torch.cuda.current_stream(subject.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static.step()
    for inputs in (second, first):
        static.fill(inputs)
        graph.replay()
        subject.assert_all_same(results, subject.run(inputs))


@clause(11, cases=over(kind=KINDS), owed="all", gpus=1)
def current_stream(subject: Subject, kind: str) -> None:
    """Work is queued on the current stream: it waits for what that stream does before."""
    inputs = subject.batch(kind, dtype=torch.bfloat16)
    expected = subject.run(inputs)
    static = _Static(subject, inputs)
    with torch.no_grad():
        for x in static.buffers.values():
            x.zero_()
    stream = torch.cuda.Stream(subject.device)
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        static.fill(inputs)
        results = static.step()
    stream.synchronize()
    subject.assert_all_same(results, expected)


@clause(11, cases=over(kind=KINDS), owed="all", gpus=2)
def device_that_is_not_current(subject: Subject, kind: str) -> None:
    """It runs on the tensors' device whatever the current device is."""
    inputs = subject.batch(kind, dtype=torch.bfloat16).to("cuda:1")
    with torch.cuda.device(0):
        subject.check(inputs, causal=True)
