"""The GEM-like model against the same computation written out one example at a time, without jagged tensors."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gemattn.nn import apply_rotary, time_angles
from models.build import RankingModel, build_model
from models.features import Batch, FeatureSchema
from models.gem import (
    Gate,
    Gem,
    GemConfig,
    PersonalizedFeedForward,
    SequenceSummary,
    StreamConfig,
    Summary,
)
from models.inputs import segment_of, segment_sum, time_features
from models.jagged import prepend, rows_from_end, rows_from_start
from tests.models.conftest import make_batch, select

LENGTHS = [3, 0, 7, 1, 12]
OPTIONS = {
    "embedding_dim": 8,
    "dim": 16,
    "taste_dim": 4,
    "num_layers": 2,
    "ffn_dim": 12,
    "interaction_hidden": (20,),
    "dropout": 0.0,
}
STREAMS = {
    "clicks": {"num_heads": 2, "window": 2, "num_recent": 2, "num_tastes": 2},
    "views": {"num_heads": 4, "num_seeds": 3},
}


def make_model(schema: FeatureSchema, **options: object) -> RankingModel:
    torch.manual_seed(0)
    model = build_model("gem", schema, **{**OPTIONS, "streams": STREAMS, **options})
    with torch.no_grad():  # away from the values that would hide an error: open gates, zero biases
        for parameter in model.body.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# One example, in plain PyTorch -------------------------------------------------------------------------------------


def plain_attention(module: torch.nn.Module, queries: Tensor, keys: Tensor, turn: Tensor, window: int | None) -> Tensor:
    """(S, d), (L, d), angles of the keys (L, D / 2); the queries stand where the keys do, or at angle 0."""
    heads = module.num_heads
    q = module.q_proj(queries).unflatten(1, (heads, -1))
    k = apply_rotary(module.k_proj(keys).unflatten(1, (heads, -1)), turn)
    v = module.v_proj(keys).unflatten(1, (heads, -1))
    if queries is keys:
        q = apply_rotary(q, turn)
    scores = torch.einsum("shd,lhd->hsl", q, k) / q.shape[2] ** 0.5
    if window is not None:
        place = torch.arange(len(keys))
        scores = scores.masked_fill((place[:, None] - place).abs() > window, -torch.inf)
    return module.out_proj(torch.einsum("hsl,lhd->shd", scores.softmax(2), v).flatten(1))


def plain_summary(module: Summary, x: Tensor, streams: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """X_sum (n_sum, d) and S_sum of one example."""
    x_sum = module.fields.gate(module.fields.compression.weight @ x)
    parts = []
    for name, summary in module.sequences.items():
        assert isinstance(summary, SequenceSummary)
        tokens, turn = streams[name]
        events = tokens[summary.num_sum :]
        recent = torch.zeros(summary.num_recent, tokens.shape[1])
        for k in range(min(summary.num_recent, len(events))):
            recent[k] = events[len(events) - 1 - k]
        pooled = plain_attention(summary.pooling, summary.pooling.queries, summary.norm(tokens), turn, None)
        parts.append(summary.gate(torch.cat([tokens[: summary.num_sum], pooled, recent])))
    return x_sum, torch.cat(parts)


def plain_logits(model: RankingModel, batch: Batch) -> Tensor:
    """(K,) of a batch of one example."""
    gem = model.body
    assert isinstance(gem, Gem)
    config = gem.config
    embedded, pooled, vectors = model.ec(batch.events), model.ebc(batch.ids), model.taste(batch.events)
    fields = [pooled[key][0] for key in gem.fields.id_keys]
    fields += [embedded[key].values()[0] for key in gem.fields.candidate_keys]
    assert gem.fields.projections is not None and gem.direct is not None
    fields = [project(field) for project, field in zip(gem.fields.projections, fields, strict=True)]
    x = first = torch.stack([gem.fields.dense(batch.dense[0]), *fields])
    fields_summary = gem.layers[0].summary.fields
    cls = fields_summary.gate(fields_summary.compression.weight @ x)
    streams, matches = {}, []
    for name, encoder in gem.encoders.items():
        ages = batch.ages[name].values()
        candidate = {"item": embedded["candidate.item"].values()[0], "shop": embedded["candidate.shop"].values()[0]}
        columns = [embedded[key].values() for key in encoder.features.keys]
        for feature, num_ids in (("item", 30), ("shop", 6)):
            if f"{name}.{feature}" in encoder.features.keys:
                # Four inner products over two entries each, of variance 1 at the start.
                products = embedded[f"{name}.{feature}"].values() * candidate[feature]
                groups = torch.stack([products[:, 2 * g : 2 * g + 2].sum(1) for g in range(4)], dim=1)
                columns.append(groups / (min(1, 4 / num_ids) * 2**0.5))
        columns.append(time_features(ages, config.time_scale))
        # Taste weighs events by what the candidate does not share: the action, where there is one, and the time.
        outcome = [embedded["clicks.action"].values()] if name == "clicks" else []
        weights = gem.tastes[name].weights_of(torch.cat([*outcome, columns[-1]], dim=1))  # (events, tastes)
        for feature, num_ids in (("item", 30), ("shop", 6)):
            if f"{name}.{feature}" in encoder.features.keys:
                events, mate = vectors[f"{name}.{feature}"].values(), vectors[f"candidate.{feature}"].values()[0]
                tastes = weights.T @ events / (len(events) + 1) ** 0.5
                matches.append(tastes @ mate * 0.1 / (min(1, 4 / num_ids) * 4**0.5))
        tokens = encoder.norm(encoder.fusion(torch.cat(columns, dim=1)))
        head_dim = 16 // gem.stream_configs[name].num_heads
        angles = time_angles(ages, head_dim, config.time_scale)
        turn = torch.cat([torch.zeros(config.num_sum, head_dim // 2), angles])
        streams[name] = (torch.cat([cls, tokens]), turn)
    for layer in gem.layers:
        x_sum, s_sum = plain_summary(layer.summary, x, streams)
        for name, block in layer.blocks.items():
            tokens, turn = streams[name]
            ffn = block.feed_forward
            hidden = F.gelu(ffn.up(block.feed_forward_norm(tokens))) * ffn.weights_of(x_sum.flatten())
            tokens = tokens + ffn.down(hidden)
            normed = block.attention_norm(tokens)
            window = gem.stream_configs[name].window
            streams[name] = (tokens + plain_attention(block.attention, normed, normed, turn, window), turn)
        x = layer.interaction(torch.cat([x, s_sum])[None])[0]
    x_sum, s_sum = plain_summary(gem.summary, x, streams)
    match = torch.cat(matches)
    logits = gem.heads(torch.cat([first.flatten(), x_sum.flatten(), s_sum.flatten(), match])[None])[0]
    return logits + gem.direct.weight @ match + model.bias


def test_logits_are_those_of_each_example_alone_in_plain_pytorch(schema: FeatureSchema) -> None:
    model, batch = make_model(schema), make_batch(LENGTHS)
    with torch.no_grad():
        _, logits = model(batch)
        expected = torch.stack([plain_logits(model, select(batch, [i])) for i in range(len(LENGTHS))])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)
    assert logits.std() > 0.05  # a model that ignores its inputs would agree with itself


# Examples and events -----------------------------------------------------------------------------------------------


def test_logits_do_not_depend_on_the_other_examples(schema: FeatureSchema) -> None:
    model, batch = make_model(schema), make_batch(LENGTHS)
    with torch.no_grad():
        _, logits = model(batch)
        order = [4, 2, 0]
        _, fewer = model(select(batch, order))
    torch.testing.assert_close(fewer, logits[order], rtol=1e-5, atol=1e-6)


def test_nan_of_one_example_stays_with_it(schema: FeatureSchema) -> None:
    model, batch = make_model(schema), make_batch(LENGTHS)
    with torch.no_grad():
        _, logits = model(batch)
        dense = batch.dense.clone()
        dense[2] = torch.nan
        _, spoilt = model(replace(batch, dense=dense))
    assert spoilt[2].isnan().all()
    others = [0, 1, 3, 4]
    torch.testing.assert_close(spoilt[others], logits[others], rtol=0, atol=0)


@pytest.mark.parametrize("streams", [{}, STREAMS])
def test_gradient_of_one_example_reaches_no_other(schema: FeatureSchema, streams: dict) -> None:
    # Ages are the one input that is a float an event.
    model, batch = make_model(schema, streams=streams), make_batch(LENGTHS)
    dense = batch.dense.requires_grad_()
    seconds = batch.ages.values().requires_grad_()
    ages = type(batch.ages)(batch.ages.keys(), seconds, lengths=batch.ages.lengths())
    _, logits = model(replace(batch, dense=dense, ages=ages))
    logits[2].sum().backward()
    owner = torch.arange(len(LENGTHS)).repeat(2).repeat_interleave(batch.ages.lengths())
    assert seconds.grad is not None and dense.grad is not None
    assert (seconds.grad[owner == 2] != 0).all()
    assert not seconds.grad[owner != 2].any()
    assert not dense.grad[[0, 1, 3, 4]].any() and dense.grad[2].all()


def test_order_of_events_of_one_time_does_not_matter(schema: FeatureSchema) -> None:
    # No position enters with rotary by time and without windows: what happened at once has no order.
    model, batch = make_model(schema, streams={}), make_batch([6], [0])
    ages = batch.ages.values()
    ages[1:5] = 100.0
    permuted = torch.tensor([0, 4, 2, 1, 3, 5])
    values = batch.events.values().clone()
    for first in (2, 8, 14):  # the three features of clicks, behind the candidate's two
        values[first : first + 6] = values[first : first + 6][permuted]
    events = type(batch.events)(batch.events.keys(), values, lengths=batch.events.lengths())
    with torch.no_grad():
        _, logits = model(batch)
        _, same = model(replace(batch, events=events))
        torch.testing.assert_close(same, logits, rtol=1e-5, atol=1e-6)
        ages[1] = 4000.0
        _, other = model(replace(batch, events=events))
    assert (other - logits).abs().max() > 1e-4


@pytest.mark.parametrize("rotary", ["time", "position", "none"])
def test_rotary(schema: FeatureSchema, rotary: str) -> None:
    # All at one age: only positions can tell the events apart.
    model, batch = make_model(schema, streams={}, rotary=rotary), make_batch([6], [0])
    batch.ages.values().fill_(100.0)
    values = batch.events.values().clone()
    for first in (2, 8, 14):
        values[first : first + 6] = values[first : first + 6].flip(0)
    events = type(batch.events)(batch.events.keys(), values, lengths=batch.events.lengths())
    with torch.no_grad():
        difference = (model(batch)[1] - model(replace(batch, events=events))[1]).abs().max()
    assert (difference > 1e-5) == (rotary == "position")


# Training ----------------------------------------------------------------------------------------------------------


def test_gradient_reaches_every_parameter(schema: FeatureSchema) -> None:
    model = make_model(schema)
    model(make_batch(LENGTHS))[0].backward()
    missed = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missed == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0]])
def test_trains_when_every_history_is_empty(schema: FeatureSchema, lengths: list[int]) -> None:
    model, batch = make_model(schema, dropout=0.1, token_dropout=0.1), make_batch(lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss, logits = model(batch)
        assert logits.isfinite().all()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_learns_whether_the_candidate_is_in_the_history(schema: FeatureSchema) -> None:
    torch.manual_seed(0)
    model = build_model("gem", schema, embedding_dim=16, dim=16, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(40):
        batch = make_batch([3] * 128, [1] * 128, seed=step)
        items = batch.events["candidate.item"].values()
        history = batch.events["clicks.item"].values().view(128, 3)
        chosen = torch.arange(128) % 2 == 0
        items[chosen] = history[chosen, 1]  # in place: half of the candidates were clicked
        inside = (history == items[:, None]).any(1).float()
        batch = replace(batch, labels=torch.stack([inside, 1 - inside], dim=1))
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[:5]) / 5 > 1.3  # 2 log 2 = 1.386 without knowing
    assert sum(losses[-5:]) / 5 < 0.9


# Taste -------------------------------------------------------------------------------------------------------------


def test_a_stream_without_tokens_is_read_by_taste_alone(schema: FeatureSchema) -> None:
    model, batch = make_model(schema, streams={**STREAMS, "views": {"tokens": False}}), make_batch(LENGTHS)
    gem = model.body
    assert isinstance(gem, Gem)
    assert set(gem.encoders) == set(gem.layers[0].blocks) == set(gem.summary.sequences) == {"clicks"}
    assert set(gem.tastes) == {"clicks", "views"}
    assert "views.item" not in gem.event_keys  # of the tables that tokens are made from
    assert model.taste is not None
    tables = {table.name: table.feature_names for table in model.taste.embedding_configs()}
    assert tables == {
        "taste_item_candidate": ["candidate.item"],
        "taste_item_events": ["clicks.item", "views.item"],
        "taste_shop_candidate": ["candidate.shop"],
        "taste_shop_events": ["clicks.shop"],
    }
    values = batch.events.values().clone()
    first = len(values) - sum(LENGTHS)
    values[first:] = (values[first:] + 1) % 30
    events = type(batch.events)(batch.events.keys(), values, lengths=batch.events.lengths())
    with torch.no_grad():
        change = (model(batch)[1] - model(replace(batch, events=events))[1]).abs().amax(dim=1)
    assert [bool(c > 0) for c in change] == [n > 0 for n in LENGTHS[::-1]]
    model(batch)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_model_may_do_without_taste_and_without_tokens(schema: FeatureSchema) -> None:
    batch = make_batch(LENGTHS)
    plain = make_model(schema, streams={}, stream={"num_tastes": 0})
    assert plain.taste is None and not plain.body.tastes
    flat = make_model(schema, streams={}, stream={"tokens": False})
    for model in (plain, flat):
        loss, logits = model(batch)
        loss.backward()
        assert logits.shape == (5, 2) and loss.isfinite()
    with pytest.raises(ValueError, match="num_tastes"):
        StreamConfig(num_tastes=-1)


# Config ------------------------------------------------------------------------------------------------------------


def test_streams_take_their_own_config(schema: FeatureSchema) -> None:
    model = make_model(schema)
    gem = model.body
    assert isinstance(gem, Gem)
    assert gem.layers[0].blocks["clicks"].attention.window == (2, 2)
    assert gem.layers[0].blocks["views"].attention.window is None
    assert gem.layers[1].blocks["views"].attention.num_heads == 4
    assert gem.summary.sequences["clicks"].num_tokens == 2 + 2 + 2
    assert gem.summary.sequences["views"].num_tokens == 2 + 3
    with pytest.raises(ValueError, match="buys"):
        make_model(schema, streams={"buys": StreamConfig()})


@pytest.mark.parametrize("bad", [{"num_layers": 0}, {"num_sum": 0}, {"rotary": "spin"}])
def test_bad_config_is_named(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GemConfig(**{**asdict(GemConfig()), **bad})


# Pieces ------------------------------------------------------------------------------------------------------------


def test_gate() -> None:
    gate = Gate(3)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(gate(x), x * torch.sigmoid(torch.tensor(1.0)))
    torch.nn.init.normal_(gate.weight)
    expected = torch.stack([row * torch.sigmoid(gate.weight @ row + gate.bias) for row in x.view(10, 3)])
    torch.testing.assert_close(gate(x), expected.view(2, 5, 3))


def test_personalized_feed_forward_is_a_weight_an_example() -> None:
    torch.manual_seed(0)
    d, h, n_sum = 4, 6, 2
    ffn = PersonalizedFeedForward(d, h, n_sum, activation=False)
    for layer in (ffn.up, ffn.down):
        torch.nn.init.zeros_(layer.bias)
    x_sum, tokens, segment = torch.randn(3, n_sum, d), torch.randn(7, d), torch.tensor([0, 0, 1, 1, 1, 1, 2])
    expected = []
    for token, example in zip(tokens, segment, strict=True):
        factors = ffn.weights_of.weight @ x_sum[example].flatten() + ffn.weights_of.bias
        weight = ffn.up.weight.T @ torch.diag(factors) @ ffn.down.weight.T  # W_p (d, d)
        expected.append(token @ weight)
    torch.testing.assert_close(ffn(x_sum, tokens, segment), torch.stack(expected))
    ffn.activation = True
    hidden = F.gelu(ffn.up(tokens)) * ffn.weights_of(x_sum.flatten(1))[segment]
    torch.testing.assert_close(ffn(x_sum, tokens, segment), ffn.down(hidden))


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("after", [0, 3])
def test_prepend(before: int, after: int) -> None:
    lengths = [2, 0, 3]
    offsets = torch.tensor([0, 2, 2, 5]) + before
    values = torch.arange(before + 5 + after, dtype=torch.float32)[:, None] + 1
    first = -torch.arange(1.0, 7.0).view(3, 2, 1)
    out, new_offsets, row = prepend(values, offsets, segment_of(offsets, len(values)), first)
    pieces = [values[:before]]
    for i, length in enumerate(lengths):
        pieces += [first[i], values[offsets[i] : offsets[i] + length]]
    assert torch.equal(out, torch.cat([*pieces, values[len(values) - after :]]))
    assert torch.equal(new_offsets, torch.tensor([0, 4, 6, 11]) + before)
    assert torch.equal(out[row], values)


def test_prepend_differentiates() -> None:
    values, first = torch.randn(3, 2, requires_grad=True), torch.randn(2, 1, 2, requires_grad=True)
    offsets = torch.tensor([0, 3, 3])
    out, _, _ = prepend(values, offsets, segment_of(offsets, 3), first)
    out.backward(torch.arange(10.0).view(5, 2))
    assert torch.equal(first.grad, torch.tensor([[[0.0, 1.0]], [[8.0, 9.0]]]))
    assert torch.equal(values.grad, torch.tensor([[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]))


def test_rows_from_start_and_end() -> None:
    offsets = torch.tensor([0, 4, 5, 8])
    values = torch.arange(1.0, 9.0)[:, None]
    assert rows_from_start(values, offsets, 1).flatten().tolist() == [1, 5, 6]
    assert rows_from_end(values, offsets, 2, skip=1).squeeze(2).tolist() == [[4, 3], [0, 0], [8, 7]]
    assert rows_from_end(values, offsets, 3, skip=0).squeeze(2).tolist() == [[4, 3, 2], [5, 0, 0], [8, 7, 6]]


def test_segments() -> None:
    offsets = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    segment = segment_of(offsets, 8)
    assert segment.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    assert segment_of(torch.tensor([0]), 0).tolist() == []
    values = torch.arange(6.0).view(3, 2)
    assert segment_sum(values, torch.tensor([0, 0, 2]), 3).tolist() == [[2, 4], [0, 0], [4, 5]]
