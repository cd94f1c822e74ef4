import os
import sys
import types

import pytest
import torch

import gemattn
from gemattn.bench import providers
from gemattn.bench.case import make_case
from gemattn.bench.check import Gate
from gemattn.bench.providers import flex, padded
from gemattn.bench.providers.base import copied_query
from gemattn.bench.providers.fa4 import python_path
from gemattn.bench.shapes import Lengths, Shape, by_name

CPU = torch.device("cpu")


def test_parse_names_and_processes(tmp_path):
    specs = providers.parse(f"triton,varlen,fa4,varlen-fa3,fa4-old={tmp_path},mine=package.module:function")
    assert [(spec.name, spec.kind, spec.process) for spec in specs] == [
        ("triton", "triton", "shared"),
        ("varlen", "varlen", "shared"),
        ("fa4", "fa4", "shared"),
        ("varlen-fa3", "varlen-fa3", "varlen-fa3"),
        ("fa4-old", "fa4", "fa4-old"),
        ("mine", "custom", "shared"),
    ]
    assert {spec.name for spec in providers.parse("all")} >= {"tlx", "cudnn", "flex", "fla"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("triton,fa5", "provider is 'fa5', wanted one of tlx, triton"),
        ("triton,triton", "named twice"),
        ("triton,,fa4", "wanted names with commas"),
        ("fa4=no-such-folder", "'no-such-folder' is no folder and no module:function"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        providers.parse(text)


def test_every_rival_says_why_it_is_absent_on_a_cpu():
    reasons = {spec.name: providers.make(spec).absent(CPU) for spec in providers.parse("fa4,varlen,cudnn,flex,fla")}
    assert reasons == dict.fromkeys(reasons, "needs a CUDA GPU")


def varlen_stub(query, key, value, cu_q, cu_k, max_q, max_k, window):
    """What the rivals' functions compute, by the reference; int32 offsets and host maxima are part of their calls."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    left, right = window
    return gemattn.jagged_attention(query, key, value, cu_q, cu_k, window=(left, right), impl="reference")


def flash_attention_4(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, window_size=(None, None)
):
    """The arguments of `flash_attn.cute.flash_attn_varlen_func` that are used here, in b13 and in b36."""
    window = (window_size[0], 0) if causal else window_size
    return varlen_stub(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window), None


def varlen_of_torch(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """As in torch 2.13, with -1 for an unlimited side."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    window = tuple(None if side == -1 else side for side in window_size)
    return varlen_stub(query, key, value, cu_q, cu_k, max_q, max_k, window)


def older_varlen_of_torch(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False):
    """Without a window and without enable_gqa."""
    return varlen_stub(query, key, value, cu_q, cu_k, max_q, max_k, (None, 0 if is_causal else None))


SHAPES = [
    Shape("self", "test", 4, 2, 16, query=Lengths("half", 9)),
    Shape("hsp", "test", 4, 2, 16, key=Lengths("density", 9, 0.5), shared_rows=3),
    Shape("cross", "test", 3, 2, 16, query=Lengths("half", 9), key=Lengths("full", 5)),
    Shape("causal", "test", 4, 2, 16, query=Lengths("half", 9), kv_heads=1, causal=True),
    Shape("window", "test", 4, 2, 16, query=Lengths("half", 9), window=(2, 1)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("function", [flash_attention_4, varlen_of_torch, older_varlen_of_torch])
def test_rivals_are_called_right(shape, function, monkeypatch):
    if function is flash_attention_4:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        stub = types.ModuleType("flash_attn.cute")
        stub.flash_attn_varlen_func = function
        monkeypatch.setitem(sys.modules, "flash_attn.cute", stub)
        provider = providers.make(providers.parse("fa4")[0])
    else:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        provider = providers.make(providers.parse("varlen")[0])
    case = make_case(shape, CPU, torch.float32)
    if function is older_varlen_of_torch and shape.window:
        assert "has no window" in provider.refuses(case)
        return
    assert provider.refuses(case) is None
    Gate(case, random_sequences=2).check(provider.prepare(case).call)


def make_copy(root, dsl):
    (root / "flash_attn" / "cute").mkdir(parents=True)
    (root / "nvidia_cutlass_dsl" / dsl).mkdir(parents=True)
    return root


def test_python_path_holds_one_copy(tmp_path):
    new = make_copy(tmp_path / "new", "dsl_packages")
    old = make_copy(tmp_path / "old", "python_packages")
    other = tmp_path / "other"
    inherited = os.pathsep.join(map(str, [new, new / "nvidia_cutlass_dsl/dsl_packages", other]))
    assert python_path(str(old), inherited).split(os.pathsep) == [
        str(old),
        str(old / "nvidia_cutlass_dsl/python_packages"),
        str(other),
    ]
    assert python_path(None, inherited) == inherited
    with pytest.raises(ValueError, match="no flash_attn/cute in that folder"):
        python_path(str(other), "")


def test_copied_query_sums_its_gradient():
    case = make_case(Shape("x", "test", 3, 1, 8, key=Lengths("full", 4), shared_rows=2), CPU, torch.float64)
    copies = copied_query(case, case.query)
    assert torch.equal(copies, torch.cat([case.query] * 3))
    gradient = torch.randn_like(copies)
    assert torch.allclose(torch.autograd.grad(copies, case.query, gradient)[0], gradient.view(3, 2, 1, 8).sum(0))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: shape.name)
def test_padded_sdpa_is_right(shape):
    case = make_case(shape, CPU, torch.float64)
    provider = padded.PaddedSdpa()
    assert provider.refuses(case) is None
    Gate(case, random_sequences=2).check(provider.prepare(case).call)


def test_padded_rows_by_hand():
    assert padded.padded_rows(torch.tensor([0, 2, 2, 5]), 5, 3).tolist() == [0, 1, 6, 7, 8]
    assert padded.key_mask(torch.tensor([2, 0, 1]), 2)[:, 0, 0].tolist() == [
        [True, True],
        [False, False],
        [True, False],
    ]


def test_mask_is_left_out_only_where_no_padded_key_is_seen():
    def free(**options):
        return padded.mask_free(make_case(Shape("x", "test", 4, 1, 8, **options), CPU, torch.float32))

    half = Lengths("half", 9)
    assert free(query=half, causal=True)
    assert free(query=half, key=Lengths("full", 5))
    assert not free(query=half)
    assert not free(query=Lengths("full", 9), key=half, causal=True)


def test_refusals_name_the_memory(monkeypatch):
    shape = Shape("x", "test", 3, 2, 16, query=Lengths("giant", 1000, rest=10))
    case = make_case(shape, CPU, torch.float32)
    # 3 sequences of 1000 rows of 2 heads x 16 x 4 bytes; q, k, v, out and their gradients, two copies each; a mask.
    assert padded.padded_bytes(case) == 16 * 3 * 1000 * 2 * 16 * 4 + 2 * 3 * 1000 * 1000
    assert flex.mask_bytes(case) == 2 * 1020 * 1020
    for provider, module in ((padded.PaddedSdpa(), padded), (flex.Flex(), flex)):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 20)
        assert "GiB are free" in provider.refuses(case)


def test_block_mask_coordinates_are_bottom_right():
    sequence, position = flex.coordinates(torch.tensor([0, 2, 3]), torch.tensor([0, 5, 6]), 3)
    assert sequence.tolist() == [0, 0, 1]
    assert position.tolist() == [3, 4, 0]


def test_fla_takes_causal_self_attention_alone():
    fla = providers.make(providers.parse("fla")[0])

    def reason(name):
        return fla.refuses(make_case(by_name(name), CPU, torch.float32))

    assert reason("tiny_hsp") == "has causal self-attention only"
    assert reason("tiny_self_causal") is None
