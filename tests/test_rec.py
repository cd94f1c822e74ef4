"""TorchRec's jagged types through the modules: what comes back, and that every sequence is computed for itself."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("torchrec")

from torchrec import JaggedTensor, KeyedJaggedTensor

import gemattn
from gemattn import rec
from gemattn.nn import position_angles
from tests.nn.jagged import assert_all_close, offsets_of, split, tokens

WIDTH = 8


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return gemattn.JaggedAttention(WIDTH, 2, causal=True, dtype=torch.float64)


@pytest.fixture
def pooling():
    torch.manual_seed(0)
    return gemattn.SharedQueryPooling(WIDTH, 2, 3, dtype=torch.float64)


def alone(module, values, offsets):
    """Each sequence by a call of its own."""
    outs = [module((x, torch.tensor([0, x.shape[0]]))) for x in split(values, offsets)]
    return torch.cat([x if isinstance(x, torch.Tensor) else x[0] for x in outs])


def kjt_of(lengths, slack=0, **options):
    values, offsets = tokens(lengths, WIDTH, slack=slack)
    return KeyedJaggedTensor(["a", "b"], values.requires_grad_(), lengths=torch.tensor(lengths), **options), offsets


def test_kjt_comes_back_as_it_was(attention):
    kjt, offsets = kjt_of((3, 0, 2, 4), weights=torch.arange(9.0))
    out = attention(kjt)
    assert type(out) is KeyedJaggedTensor
    assert out.keys() == ["a", "b"] and out.stride() == 2 and out.stride_per_key() == [2, 2]
    assert not out.variable_stride_per_key()
    for method in ("weights", "lengths", "offsets"):
        assert getattr(out, method)() is getattr(kjt, method)()
    assert_all_close([out.values()], [alone(attention, kjt.values(), offsets)])
    by_key = out.to_dict()
    assert torch.equal(by_key["a"].values(), out.values()[:3]) and torch.equal(by_key["b"].values(), out.values()[3:])
    assert kjt.values().grad_fn is None  # what came in is as it was
    out.values().sum().backward()
    assert kjt.values().grad.abs().sum(1).gt(0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kjt_of_offsets_only(attention, dtype):
    values, _ = tokens((3, 0, 2, 4), WIDTH)
    offsets = offsets_of((3, 0, 2, 4), dtype)
    out = attention(KeyedJaggedTensor(["a", "b"], values, offsets=offsets))
    assert out.offsets() is offsets and out.lengths().tolist() == [3, 0, 2, 4]


def test_kjt_with_another_batch_size_a_key(attention, pooling):
    lengths = (3, 1, 0, 2, 4)
    kjt, offsets = kjt_of(lengths, stride_per_key_per_rank=[[2], [3]])
    out = attention(kjt)
    assert out.stride_per_key() == [2, 3] and out.variable_stride_per_key()
    assert out.stride_per_key_per_rank() == [[2], [3]]
    assert_all_close([out.values()], [alone(attention, kjt.values(), offsets)])
    pooled, wanted = pooling(kjt), alone(pooling, kjt.values(), offsets)
    assert list(pooled) == ["a", "b"]
    assert_all_close([pooled["a"], pooled["b"]], [wanted[:2], wanted[2:]])


def test_kjt_keeps_inverse_indices(attention):
    inverse = (["a", "b"], torch.tensor([[0, 1, 1], [0, 1, 2]]))
    kjt, _ = kjt_of((3, 1, 0, 2, 4), stride_per_key_per_rank=[[2], [3]], inverse_indices=inverse)
    out = attention(kjt)
    assert out.inverse_indices() is inverse and out.stride() == kjt.stride() == 3


def test_kjt_with_slack(attention, pooling):
    lengths = (3, 0, 2, 4)
    kjt, offsets = kjt_of(lengths, slack=5)
    out = attention(kjt)
    assert out.values().shape == (14, WIDTH) and not out.values()[9:].any()
    assert_all_close([out.values()[:9]], [alone(attention, kjt.values(), offsets)])
    assert_all_close([pooling(kjt)["b"]], [alone(pooling, kjt.values(), offsets)[2:]])
    out.values().sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    assert kjt.values().grad.isfinite().all() and not kjt.values().grad[9:].any()


def test_jagged_tensor(attention, pooling):
    values, offsets = tokens((3, 0, 2), WIDTH, slack=2)
    weights = torch.arange(7.0)
    jt = JaggedTensor(values, lengths=torch.tensor((3, 0, 2)), weights=weights)
    out = attention(jt)
    assert type(out) is JaggedTensor and out.weights() is weights
    assert out.lengths() is jt.lengths() and out.offsets() is jt.offsets()
    assert_all_close([out.values()[:5]], [alone(attention, values, offsets)])
    assert_all_close([pooling(jt)], [alone(pooling, values, offsets)])


@pytest.mark.parametrize("slack", [(0, 0), (4, 2), (2500, 0)], ids=str)
def test_dict_is_one_launch(attention, pooling, slack, monkeypatch):
    # Batch sizes, offset types and slack differ from entry to entry.
    a, a_offsets = tokens((3, 0, 2), WIDTH, slack=slack[0])
    b, b_offsets = tokens((4, 1), WIDTH, slack=slack[1], seed=1)
    entries = {
        "b": JaggedTensor(b.requires_grad_(), offsets=b_offsets.int(), weights=torch.arange(float(len(b)))),
        "a": JaggedTensor(a.requires_grad_(), offsets=a_offsets),
    }
    launches = []

    def counted(*args, **kwargs):
        launches.append(args)
        return gemattn.jagged_attention(*args, **kwargs)

    monkeypatch.setattr("gemattn.nn.attention.jagged_attention", counted)
    out = attention(entries)
    assert len(launches) == 1 and list(out) == ["b", "a"]
    for key, jt in entries.items():
        assert out[key].offsets() is jt.offsets() and out[key].weights_or_none() is jt.weights_or_none()
    assert_all_close([out["a"].values()[:5]], [alone(attention, a, a_offsets)])
    assert_all_close([out["b"].values()[:5]], [alone(attention, b, b_offsets)])
    assert not out["a"].values()[5:].any() and not out["b"].values()[5:].any()
    pooled = pooling(entries)
    assert_all_close([pooled["a"]], [alone(pooling, a, a_offsets)])
    assert_all_close([pooled["b"]], [alone(pooling, b, b_offsets)])
    sum(x.values().sum() for x in out.values()).backward()
    for x in (a, b):
        assert x.grad[:5].abs().sum(1).gt(0).all() and not x.grad[5:].any()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


def test_slack_between_entries_costs_no_square(attention):
    tokens_ = rec.unpack(
        {k: JaggedTensor(*(tokens((2,), WIDTH, slack=9000)[:1]), offsets=offsets_of((2,))) for k in "ab"}
    )
    lengths = tokens_.offsets.diff()
    assert lengths.max() <= rec.GAP and lengths.sum() == 2 * 9002
    assert tokens_.inside.sum() == 4 and tokens_.values.isfinite().all()


def test_dict_attends_to_a_dict_by_key(attention):
    a, b = tokens((3, 0, 2), WIDTH, slack=1), tokens((1, 1), WIDTH, seed=1)
    context_a, context_b = tokens((2, 5, 1), WIDTH, seed=2), tokens((0, 3), WIDTH, slack=3000, seed=3)
    out = attention(
        {"a": JaggedTensor(a[0], offsets=a[1]), "b": JaggedTensor(b[0], offsets=b[1])},
        {"b": JaggedTensor(context_b[0], offsets=context_b[1]), "a": JaggedTensor(context_a[0], offsets=context_a[1])},
    )
    assert_all_close([out["a"].values()], [attention(a, context_a)[0]])
    assert_all_close([out["b"].values()], [attention(b, context_b)[0]])


def test_dict_of_angles():
    torch.manual_seed(0)
    block = gemattn.JaggedTransformerBlock(WIDTH, 2, dtype=torch.float64)
    parts = {
        key: tokens(lengths, WIDTH, slack=1, seed=len(lengths)) for key, lengths in {"a": (3, 2), "b": (4,)}.items()
    }
    angles = {key: position_angles(offsets, values.shape[0], 4) for key, (values, offsets) in parts.items()}
    out = block({key: JaggedTensor(x, offsets=o) for key, (x, o) in parts.items()}, rotary=angles)
    for key, part in parts.items():
        assert_all_close([out[key].values()], [block(part, rotary=angles[key])[0]])
    with pytest.raises(ValueError, match="rotary is a dict"):
        block(parts["a"], rotary=angles)


def test_a_kjt_attends_to_a_jagged_tensor(attention):
    kjt, offsets = kjt_of((3, 0, 2, 4))
    context = tokens((1, 2, 0, 5), WIDTH, seed=3)
    out = attention(kjt, JaggedTensor(context[0], offsets=context[1]))
    assert_all_close([out.values()], [attention((kjt.values(), offsets), context)[0]])


def test_block_and_pooling_take_every_kind(pooling):
    torch.manual_seed(0)
    block = gemattn.JaggedTransformerBlock(WIDTH, 2, dtype=torch.float64)
    kjt, offsets = kjt_of((3, 0, 2, 4))
    wanted, _ = block((kjt.values(), offsets))
    out = block(kjt)
    assert type(out) is KeyedJaggedTensor and out.offsets() is kjt.offsets() and out.keys() == kjt.keys()
    assert torch.equal(out.values(), wanted)
    by_key = block(kjt.to_dict())
    assert_all_close([torch.cat([by_key["a"].values(), by_key["b"].values()])], [wanted])


def test_ids_raise_and_name_the_encoder(attention, pooling):
    ids = KeyedJaggedTensor(["a"], torch.arange(5), lengths=torch.tensor([3, 2]))
    for module in (attention, pooling, gemattn.JaggedTransformerBlock(WIDTH, 2)):
        with pytest.raises(TypeError, match=r"sequences holds torch.int64 ids.*gemattn\.nn\.EventEncoder"):
            module(ids)
    with pytest.raises(TypeError, match=r"sequences\['a'\] holds torch.int64 ids"):
        attention(ids.to_dict())
    floats = KeyedJaggedTensor(["a"], torch.ones(5), lengths=torch.tensor([3, 2]))
    with pytest.raises(ValueError, match=r"values of shape \(5,\), wanted \(T, 8\).*EventEncoder"):
        attention(floats)


def test_bad_dicts(attention):
    a, b = (JaggedTensor(*tokens((3,), WIDTH)[:1], offsets=offsets_of((3,))) for _ in range(2))
    with pytest.raises(ValueError, match="sequences is an empty dict"):
        attention({})
    with pytest.raises(ValueError, match=r"context has keys \['b'\], wanted those of sequences, \['a'\]"):
        attention({"a": a}, {"b": b})
    with pytest.raises(TypeError, match="one of sequences and context is a dict"):
        attention({"a": a}, b)
    with pytest.raises(TypeError, match=r"sequences\['a'\] is a list"):
        attention({"a": [1, 2]})


def test_checks_the_offsets_of_every_entry(attention, monkeypatch):
    good, _ = tokens((3,), WIDTH)
    entries = {"a": JaggedTensor(good, offsets=offsets_of((5,))), "b": JaggedTensor(good, offsets=offsets_of((3,)))}
    wanted, _ = attention((good, offsets_of((3,))))
    assert_all_close([attention(entries)["b"].values()], [wanted])  # "a" does not reach into "b"
    monkeypatch.setenv("GEMATTN_CHECK", "1")
    with pytest.raises(ValueError, match="offsets of 'a': sequence 0 ends at 5, past the tensor's 3 rows"):
        attention(entries)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = gemattn.JaggedTransformerBlock(WIDTH, 2, causal=True, qk_norm=True, dtype=torch.float64)
        self.attention = gemattn.JaggedAttention(WIDTH, 2, dtype=torch.float64)
        self.pooling = gemattn.SharedQueryPooling(WIDTH, 2, 3, dtype=torch.float64)

    def forward(self, sequences, context):
        return self.pooling(self.attention(self.block(sequences), context))


def test_symbolic_trace():
    model = Model()
    traced = torch.fx.symbolic_trace(model)
    targets = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert {"attention.q_proj", "block.mlp.up", "pooling.out_proj"} <= targets
    (kjt, _), (context, _) = kjt_of((3, 0, 2, 4)), kjt_of((1, 2, 0, 5))
    for sequences, other in ((kjt, context), (kjt.to_dict(), context.to_dict())):
        out, wanted = traced(sequences, other), model(sequences, other)
        assert all(torch.equal(out[key], wanted[key]) for key in "ab")


@pytest.mark.parametrize("with_context", [False, True])
def test_symbolic_trace_of_a_bare_layer(attention, with_context):
    traced = torch.fx.symbolic_trace(attention)
    kjt, _ = kjt_of((3, 0, 2, 4))
    context = kjt_of((1, 2, 0, 5))[0] if with_context else None
    out = traced(kjt, context)
    assert out.offsets() is kjt.offsets()
    assert torch.equal(out.values(), attention(kjt, context).values())


@pytest.mark.parametrize("kind", ["kjt", "jt", "dict"])
def test_compiles_with_torchrec_types(attention, kind):
    torch._dynamo.reset()
    values, offsets = tokens((3, 1, 2, 4), WIDTH)
    step = torch.compile(attention, fullgraph=True, backend="aot_eager")
    if kind == "kjt":
        kjt = KeyedJaggedTensor(["a", "b"], values, offsets=offsets)
        out, wanted = step(kjt).values(), attention(kjt).values()
    elif kind == "jt":
        jt = JaggedTensor(values, offsets=offsets)
        out, wanted = step(jt).values(), attention(jt).values()
    else:
        jts = {"a": JaggedTensor(values, offsets=offsets), "b": JaggedTensor(values, offsets=offsets)}
        out, wanted = step(jts)["b"].values(), attention(jts)["b"].values()
    torch.testing.assert_close(out, wanted)


class Lazy:
    """What a sharded module hands out: `wait` must be called once, whoever asks first."""

    def __init__(self, result):
        self.result, self.waits = result, 0

    @staticmethod
    def _wait_async(obj):
        if callable(obj.result):
            obj.waits += 1
            obj.result = obj.result()
        return obj.result


def test_lazy_results_are_waited_for(attention, pooling):
    kjt, _ = kjt_of((3, 0, 2, 4))
    lazy = Lazy(kjt.to_dict)
    out = attention(lazy)
    assert lazy.waits == 1
    assert_all_close([torch.cat([out[key].values() for key in "ab"])], [attention(kjt).values()])
    assert_all_close([pooling(lazy)["b"]], [pooling(kjt)["b"]])


def test_importing_modules_does_not_import_torchrec():
    code = (
        "import sys, torch, gemattn, gemattn.nn;"
        "gemattn.JaggedAttention(8, 2)((torch.ones(3, 8), torch.tensor([0, 3])));"
        "print([m for m in ('torchrec', 'fbgemm_gpu') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"
