"""The modules on a GPU: no wait for the device, CUDA graphs, and the numbers of the CPU."""

import pytest
import torch
from torch import nn

import gemattn
from gemattn.nn import position_angles
from tests.nn.jagged import offsets_of, split, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LENGTHS = (3, 0, 70, 1, 200)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = gemattn.JaggedTransformerBlock(64, 4, num_kv_heads=2, causal=True, qk_norm=True)
        self.cross = gemattn.JaggedAttention(64, 4, window=(20, 20))
        self.pooling = gemattn.SharedQueryPooling(64, 4, 5)

    def forward(self, values, offsets, context, context_offsets):
        angles = position_angles(offsets, values.shape[0], 16)
        x, _ = self.block((values, offsets), rotary=angles)
        x, _ = self.cross((x, offsets), (context, context_offsets))
        return self.pooling((x, offsets))


def make_inputs(device, dtype, lengths=LENGTHS, rows=300):
    values, offsets = tokens(lengths, 64, slack=rows - sum(lengths), dtype=torch.float32)
    context, context_offsets = tokens(lengths[::-1], 64, slack=rows - sum(lengths), seed=1, dtype=torch.float32)
    return [x.to(device) for x in (values.to(dtype), offsets, context.to(dtype), context_offsets)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_equals_the_cpu_without_a_sync(dtype, bound):
    wanted = Net().double()
    wanted_out = wanted(*make_inputs("cpu", torch.float64))
    wanted_out.square().mean().backward()
    net = Net().to("cuda", dtype)
    inputs = make_inputs("cuda", dtype)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = net(*inputs)
        out.square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

    def close(a, b):
        return (a.cpu().double() - b).norm() <= bound * b.norm() + 1e-6

    assert close(out, wanted_out)
    for (name, p), q in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert close(p.grad, q.grad), name


def test_cuda_graph_replays_with_other_lengths():
    net = Net().to("cuda").requires_grad_(False)
    static = make_inputs("cuda", torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        net(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = net(*static)
    for lengths in ((5, 5, 5, 5, 5), (0, 0, 0, 0, 0), (250, 0, 1, 20, 29)):
        fresh = make_inputs("cuda", torch.float32, lengths)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        torch.testing.assert_close(out, net(*fresh))


def test_dict_is_sync_free():
    torchrec = pytest.importorskip("torchrec")
    net = gemattn.JaggedAttention(64, 4, device="cuda")
    values, offsets = tokens(LENGTHS, 64, slack=26, dtype=torch.float32)
    values, offsets = values.cuda(), offsets.cuda()
    other = offsets_of((100, 200)).cuda()
    entries = {
        "a": torchrec.JaggedTensor(values, offsets=offsets),
        "b": torchrec.JaggedTensor(values.nan_to_num(1.0), offsets=other),
    }
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = net(entries)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for key, x in split_dict(entries).items():
        wanted = torch.cat([net((piece, torch.tensor([0, len(piece)], device="cuda")))[0] for piece in x])
        torch.testing.assert_close(out[key].values()[: len(wanted)], wanted)


def split_dict(entries):
    return {key: split(jt.values(), jt.offsets()) for key, jt in entries.items()}
