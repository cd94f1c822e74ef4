import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemattn
from gemattn.nn import MLP, position_angles
from tests.nn.jagged import assert_all_close, attend_one, gradients_of, split, tokens

LENGTHS = (3, 0, 5, 1, 17)


def make(seed=1, **options):
    torch.manual_seed(seed)
    block = gemattn.JaggedTransformerBlock(16, 4, dtype=torch.float64, **options)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def run_one(block, x):
    x = x + attend_one(block.attention, block.attention_norm(x))
    hidden = block.mlp.up(block.mlp_norm(x))
    if block.mlp.activation == "gelu":
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    else:
        gate, up = hidden.chunk(2, dim=-1)
        hidden = gate * torch.sigmoid(gate) * up
    return x + block.mlp.down(hidden)


@pytest.mark.parametrize(
    "options", [{}, {"activation": "swiglu", "causal": True}, {"window": (2, 0), "num_kv_heads": 2}], ids=str
)
def test_equals_each_sequence_alone(options):
    block = make(**options)
    values, offsets = tokens(LENGTHS, 16, slack=3)
    values.requires_grad_()
    out, out_offsets = block((values, offsets))
    wanted = torch.cat([run_one(block, x) for x in split(values, offsets)])
    assert out_offsets is offsets
    assert_all_close([out[:26]], [wanted])
    assert not out[26:].any()
    upstream = torch.full_like(out, float("nan"))  # for the slack rows
    upstream[:26] = torch.randn_like(wanted)
    leaves = [values, *block.parameters()]
    grads = torch.autograd.grad(out, leaves, upstream)
    wanted_grads = gradients_of((wanted * upstream[:26]).sum(), leaves)
    assert_all_close([grads[0][:26], *grads[1:]], [wanted_grads[0][:26], *wanted_grads[1:]])
    assert not grads[0][26:].any()


def test_layers_share_rotary_and_schedule():
    blocks = [make(seed, causal=True) for seed in (1, 2)]
    values, offsets = tokens(LENGTHS, 16)
    shared = {
        "rotary": position_angles(offsets, 26, 4),
        "schedule": gemattn.make_schedule(offsets, query_rows=26),
    }
    x = alone = values
    for block in blocks:
        x, _ = block((x, offsets), **shared)
        pieces = []
        for piece in split(alone, offsets):
            ends = torch.tensor([0, piece.shape[0]])
            pieces.append(block((piece, ends), rotary=position_angles(ends, piece.shape[0], 4))[0])
        alone = torch.cat(pieces)
    assert_all_close([x], [alone])
    assert not torch.allclose(x, values)


def test_dropout_only_in_training():
    block = make(dropout=0.5)
    inputs = tokens(LENGTHS, 16)
    assert not torch.equal(block(inputs)[0], block(inputs)[0])
    block.eval()
    assert torch.equal(block(inputs)[0], block(inputs)[0])
    values, offsets = inputs
    assert_all_close([block(inputs)[0]], [torch.cat([run_one(block, x) for x in split(values, offsets)])])


def test_names_and_reset():
    block = gemattn.JaggedTransformerBlock(8, 2, qk_norm=True, device="meta").to_empty(device="cpu")
    for p in block.parameters():
        nn.init.constant_(p, float("nan"))
    block.reset_parameters()
    assert all(p.isfinite().all() for p in block.parameters())
    assert {name.split(".")[0] for name in block.state_dict()} == {"attention_norm", "attention", "mlp_norm", "mlp"}


def test_mlp_widths():
    assert MLP(48).down.in_features == 192
    assert MLP(48, activation="swiglu").down.in_features == 128
    assert MLP(50, activation="swiglu").down.in_features == 136
    mlp = MLP(4, 6)
    x = torch.randn(3, 4)
    torch.testing.assert_close(mlp(x), mlp.down(F.gelu(mlp.up(x))))
    with pytest.raises(ValueError, match="activation is 'relu', wanted 'gelu' or 'swiglu'"):
        MLP(4, activation="relu")
