import pytest
import torch
from torch import nn

import gemattn
from gemattn.nn import apply_rotary
from gemattn.testing import attend
from tests.nn.jagged import assert_all_close, gradients_of, split, tokens

LENGTHS = (3, 0, 5, 1, 17)


def make(seed=1, **options):
    torch.manual_seed(seed)
    module = gemattn.SharedQueryPooling(16, 4, 3, dtype=torch.float64, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def pool_one(module, x, turn=None):
    queries = module.queries if module.query_norm is None else module.query_norm(module.queries)
    query, key, value = module.q_proj(queries), module.k_proj(x), module.v_proj(x)
    query, key, value = (y.unflatten(-1, (-1, module.head_dim)) for y in (query, key, value))
    if module.q_norm is not None:
        query, key = module.q_norm(query), module.k_norm(key)
    out, _ = attend(query, key if turn is None else turn(key), value)
    return module.out_proj(out.flatten(1))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qk_norm": True, "norm_queries": True}], ids=str)
def test_equals_attention_to_each_sequence(options):
    module = make(**options)
    values, offsets = tokens(LENGTHS, 16, slack=3)
    values.requires_grad_()
    pooled = module((values, offsets))
    wanted = torch.stack([pool_one(module, x) for x in split(values, offsets)])
    assert_all_close([pooled], [wanted])
    torch.testing.assert_close(pooled[1], module.out_proj.bias.expand(3, -1))  # an empty sequence
    leaves, upstream = [values, *module.parameters()], torch.randn_like(pooled)
    dvalues, *grads = gradients_of((pooled * upstream).sum(), leaves)
    wanted_dvalues, *wanted_grads = gradients_of((wanted * upstream).sum(), leaves)
    assert_all_close([dvalues[:26], *grads], [wanted_dvalues[:26], *wanted_grads])
    assert not dvalues[26:].any()


def test_rotary_turns_the_keys():
    module = make()
    values, offsets = tokens(LENGTHS, 16)
    angles = torch.linspace(0, 4, 26 * 2).view(26, 2)
    wanted = [
        pool_one(module, x, lambda key, a=a: apply_rotary(key, a))
        for x, a in zip(split(values, offsets), split(angles, offsets), strict=True)
    ]
    assert_all_close([module((values, offsets), rotary=angles)], [torch.stack(wanted)])


def test_no_sequence_and_all_empty():
    module = make()
    assert module((torch.zeros(0, 16, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))).shape == (0, 3, 16)
    pooled = module((torch.zeros(0, 16, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)))
    torch.testing.assert_close(pooled, module.out_proj.bias.expand(2, 3, 16))
    pooled.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_names_and_reset():
    module = gemattn.SharedQueryPooling(8, 2, 4, norm_queries=True, device="meta").to_empty(device="cpu")
    for p in module.parameters():
        nn.init.constant_(p, float("nan"))
    module.reset_parameters()
    assert all(p.isfinite().all() for p in module.parameters())
    assert module.queries.shape == (4, 8) and module.queries.std() > 0.1
    names = {name.split(".")[0] for name in module.state_dict()}
    assert names == {"queries", "query_norm", "q_proj", "k_proj", "v_proj", "out_proj"}
    with pytest.raises(ValueError, match="num_queries is 0"):
        gemattn.SharedQueryPooling(8, 2, 0)


def test_shares_a_schedule():
    module = make()
    values, offsets = tokens(LENGTHS, 16)
    schedule = gemattn.make_schedule(None, offsets, query_rows=3, key_rows=26, shared_query=True)
    assert torch.equal(module((values, offsets), schedule=schedule), module((values, offsets)))
