import pytest
import torch
from torch import nn

import gemattn
from gemattn.nn import apply_rotary, position_angles
from tests.nn.jagged import assert_all_close, attend_one, gradients_of, offsets_of, split, tokens

LENGTHS = (3, 0, 5, 1, 17)


def make(embed_dim=16, num_heads=4, seed=1, **options):
    torch.manual_seed(seed)
    module = gemattn.JaggedAttention(embed_dim, num_heads, dtype=torch.float64, **options)
    for parameter in module.parameters():  # biases and norms too are to be told apart
        nn.init.normal_(parameter, std=0.3)
    return module


def test_equals_multihead_attention_on_a_padded_batch():
    torch.manual_seed(0)
    lengths, width = (4, 1, 6), 16
    theirs = nn.MultiheadAttention(width, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = gemattn.JaggedAttention(width, 4, dtype=torch.float64)
    in_weights, in_biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    with torch.no_grad():
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), in_weights, in_biases, strict=True):
            getattr(ours, name).weight.copy_(weight)
            getattr(ours, name).bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    values, offsets = tokens(lengths, width)
    values.requires_grad_()
    upstream = torch.randn_like(values)

    out, _ = ours((values, offsets))
    padded = nn.utils.rnn.pad_sequence(split(values, offsets), batch_first=True)
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    wanted, _ = theirs(padded, padded, padded, key_padding_mask=padding, need_weights=False)
    wanted = wanted[~padding]

    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    ours_grads = gradients_of((out * upstream).sum(), [values, *ours.parameters()])
    named = dict(theirs.named_parameters())
    in_weight, in_bias, out_weight, out_bias, dvalues = gradients_of(
        (wanted * upstream).sum(),
        [named[k] for k in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")] + [values],
    )
    wanted_grads = [dvalues]
    for weight, bias in zip(in_weight.chunk(3), in_bias.chunk(3), strict=True):
        wanted_grads += [weight, bias]
    assert_all_close(ours_grads, [*wanted_grads, out_weight, out_bias])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"causal": True, "window": (3, None)},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "head_dim": 6, "bias": False},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_equals_attention_of_each_sequence(options):
    module = make(**options)
    values, offsets = tokens(LENGTHS, 16)
    values.requires_grad_()
    out, out_offsets = module((values, offsets))
    wanted = torch.cat([attend_one(module, x) for x in split(values, offsets)])
    assert out_offsets is offsets
    assert_all_close([out], [wanted])
    upstream = torch.randn_like(out)
    leaves = [values, *module.parameters()]
    assert_all_close(gradients_of((out * upstream).sum(), leaves), gradients_of((wanted * upstream).sum(), leaves))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 2), "num_kv_heads": 2}], ids=str)
def test_cross_attention_to_a_context_of_another_width(options):
    module = make(context_dim=10, **options)
    values, offsets = tokens((3, 0, 5, 2), 16)
    context, context_offsets = tokens((4, 6, 0, 1), 10, seed=2)
    for x in (values, context):
        x.requires_grad_()
    out, _ = module((values, offsets), (context, context_offsets))
    pairs = zip(split(values, offsets), split(context, context_offsets), strict=True)
    wanted = torch.cat([attend_one(module, *pair) for pair in pairs])
    assert_all_close([out], [wanted])
    # The queries that see no key give the bias of the output projection.
    torch.testing.assert_close(out[3:8], module.out_proj.bias.expand(5, -1))
    leaves = [values, context, *module.parameters()]
    assert_all_close(gradients_of(out.square().sum(), leaves), gradients_of(wanted.square().sum(), leaves))


def test_rotary_turns_queries_and_keys():
    module = make(num_kv_heads=2, qk_norm=True, causal=True)
    values, offsets = tokens(LENGTHS, 16)
    angles = position_angles(offsets, values.shape[0], module.head_dim)
    out, _ = module((values, offsets), rotary=angles)
    wanted = []
    for x, angle in zip(split(values, offsets), split(angles, offsets), strict=True):
        wanted.append(attend_one(module, x, turn=lambda q, k, a=angle: (apply_rotary(q, a), apply_rotary(k, a))))
    assert_all_close([out], [torch.cat(wanted)])
    assert not torch.allclose(out, module((values, offsets))[0])


def test_rotary_pair_in_cross_attention():
    module = make()
    values, offsets = tokens((3, 5), 16)
    context, context_offsets = tokens((4, 1), 16, seed=2)
    angles = torch.linspace(0, 3, 5 * module.head_dim // 2).view(5, -1)
    out, _ = module((values, offsets), (context, context_offsets), rotary=(None, angles))
    wanted = [
        attend_one(module, x, c, turn=lambda q, k, a=a: (q, apply_rotary(k, a)))
        for x, c, a in zip(
            split(values, offsets), split(context, context_offsets), split(angles, context_offsets), strict=True
        )
    ]
    assert_all_close([out], [torch.cat(wanted)])
    with pytest.raises(ValueError, match="wanted a pair"):
        module((values, offsets), (context, context_offsets), rotary=angles)


def test_finite_differences():
    module = make(8, 2, num_kv_heads=1, qk_norm=True, causal=True)
    values, offsets = tokens((2, 0, 3), 8)
    angles = position_angles(offsets, 5, 4)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def call(x, *weights):
        out, _ = torch.func.functional_call(
            module, dict(zip(names, weights, strict=True)), ((x, offsets),), {"rotary": angles}
        )
        return out

    assert torch.autograd.gradcheck(call, (values.requires_grad_(), *parameters))


@pytest.mark.parametrize("context_slack", [False, True])
def test_slack_rows_are_never_read(context_slack):
    module = make(qk_norm=True, context_dim=16)
    lengths, slack = (3, 0, 5), 4

    def run(slack):
        values, offsets = tokens(lengths, 16, slack=slack)
        values.requires_grad_()
        angles = position_angles(offsets, 8 + slack, module.head_dim)
        angles[8:] = float("nan")
        context = rotary = None
        if context_slack:
            context, rotary = tokens((2, 2, 2), 16, slack=slack, seed=3), (angles, None)
        out, _ = module((values, offsets), context, rotary=angles if rotary is None else rotary)
        upstream = torch.full_like(out, float("nan"))
        upstream[:8] = torch.randn(8, 16, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
        return out, torch.autograd.grad(out, [values, *module.parameters()], upstream)

    (out, (dvalues, *grads)), (wanted, (wanted_dvalues, *wanted_grads)) = run(slack), run(0)
    assert_all_close([out[:8], dvalues[:8], *grads], [wanted, wanted_dvalues, *wanted_grads])
    assert not out[8:].any() and not dvalues[8:].any()


def test_all_empty_batch_trains():
    module = make(qk_norm=True)
    for offsets in (torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        values = torch.zeros(0, 16, dtype=torch.float64, requires_grad=True)
        out, _ = module((values, offsets))
        assert out.shape == (0, 16)
        out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_parameter_names():
    names = {f"{p}_proj.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")}
    assert set(gemattn.JaggedAttention(8, 2).state_dict()) == names
    options = {"num_kv_heads": 1, "context_dim": 4, "qk_norm": True}
    assert set(gemattn.JaggedAttention(8, 2, **options).state_dict()) == names | {"q_norm.weight", "k_norm.weight"}
    assert set(gemattn.JaggedAttention(8, 2, bias=False).state_dict()) == {n for n in names if "weight" in n}


def test_meta_device_then_reset():
    module = gemattn.JaggedAttention(8, 2, qk_norm=True, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module = module.to_empty(device="cpu")
    for p in module.parameters():
        nn.init.constant_(p, float("nan"))
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        wanted = nn.Linear(8, 8)
        assert torch.equal(getattr(module, name).weight, wanted.weight)
        assert torch.equal(getattr(module, name).bias, wanted.bias)
    assert (module.q_norm.weight == 1).all() and (module.k_norm.weight == 1).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast):
    module = make(qk_norm=True).to(torch.float32 if autocast else torch.bfloat16)
    values, offsets = tokens(LENGTHS, 16, dtype=torch.float32)
    angles = position_angles(offsets, values.shape[0], module.head_dim)
    wanted, _ = make(qk_norm=True)((values.double(), offsets), rotary=angles)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = values if autocast else values.bfloat16()
        out, _ = module((x.requires_grad_(), offsets), rotary=angles)
    assert out.dtype == torch.bfloat16
    assert (out.double() - wanted).norm() < 0.02 * wanted.norm()  # bf16 keeps 8 bits: 2 ** -8 a rounding, some in a row
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_compiles_in_one_graph_without_recompiling():
    torch._dynamo.reset()
    module = make(causal=True, num_kv_heads=2)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(values, offsets):
        angles = position_angles(offsets, values.shape[0], 4)
        return module((values, offsets), rotary=angles)[0]

    counts = torch._dynamo.utils.counters
    counts.clear()
    for seed, lengths in enumerate([(3, 0, 5), (4, 7, 2, 9, 6), (20, 2)]):
        values, offsets = tokens(lengths, 16, slack=2, seed=seed)
        values.requires_grad_()
        angles = position_angles(offsets, values.shape[0], 4)
        out, (wanted, _) = step(values, offsets), module((values, offsets), rotary=angles)
        torch.testing.assert_close(out, wanted)
        assert_all_close(*(gradients_of(y.square().sum(), module.parameters()) for y in (out, wanted)))
    assert counts["stats"]["unique_graphs"] == 1


def test_shares_a_schedule():
    module = make()
    values, offsets = tokens(LENGTHS, 16)
    schedule = gemattn.make_schedule(offsets, query_rows=values.shape[0])
    assert torch.equal(module((values, offsets), schedule=schedule)[0], module((values, offsets))[0])
    with pytest.raises(ValueError, match="schedule"):
        module((values[:-1], offsets[:-1]), schedule=schedule)


def test_options_reach_the_operator():
    with pytest.raises(ValueError, match="impl"):
        make(impl="fast")(tokens((3,), 16))
    with pytest.raises(gemattn.UnsupportedError):
        make(impl="tlx")(tokens((3,), 16))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"embed_dim": 10}, ValueError, "embed_dim is 10, wanted a multiple of num_heads, 4"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads is 3, wanted a divisor of num_heads, 4"),
        ({"num_heads": 0}, ValueError, "num_heads is 0"),
        ({"head_dim": 2.0}, TypeError, "head_dim is 2.0, wanted an int"),
    ],
    ids=str,
)
def test_bad_sizes(options, error, message):
    with pytest.raises(error, match=message):
        gemattn.JaggedAttention(**{"embed_dim": 16, "num_heads": 4, **options})


def test_bad_inputs():
    module = make()
    values, offsets = tokens((3, 2), 16)
    with pytest.raises(ValueError, match=r"sequences has values of shape \(5, 12\), wanted \(T, 16\)"):
        module((values[:, :12], offsets))
    with pytest.raises(TypeError, match="sequences is a Tensor, wanted a KeyedJaggedTensor"):
        module(values)
    with pytest.raises(ValueError, match="context has 3 sequences, wanted the 2 of sequences"):
        module((values, offsets), (values, offsets_of((1, 2, 2))))
    with pytest.raises(ValueError, match=r"rotary has angles of shape \(4, 2\), wanted \(5, 2\)"):
        module((values, offsets), rotary=torch.zeros(4, 2))
    with pytest.raises(ValueError, match="context is None, wanted tokens of context_dim 8"):
        make(context_dim=8)((values, offsets))


def test_repr_shows_what_is_not_default():
    module = gemattn.JaggedAttention(16, 4, num_kv_heads=2, causal=True, impl="triton")
    first = repr(module).splitlines()[1].strip()
    assert first == "16, num_heads=4, num_kv_heads=2, head_dim=4, causal=True, impl='triton'"
