from dataclasses import dataclass

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

import gemattn
from gemattn.nn import EventEncoder, MaskedFusion, check_ids, log_age

STREAMS = {"clicks": ("item", "shop"), "buys": ("item",)}
SIZES = {"clicks.item": 20, "buys.item": 20, "clicks.shop": 7}
CLICKS, BUYS = [2, 0, 3], [1, 4, 0]


def tables():
    return [
        EmbeddingConfig(name="item", num_embeddings=20, embedding_dim=4, feature_names=["clicks.item", "buys.item"]),
        EmbeddingConfig(name="shop", num_embeddings=7, embedding_dim=4, feature_names=["clicks.shop"]),
    ]


def make_encoder(**options):
    torch.manual_seed(0)
    return EventEncoder.from_tables(tables(), STREAMS, 8, **options)


def make_events(seed=0, lengths=(CLICKS, CLICKS, BUYS)):
    generator = torch.Generator().manual_seed(seed)
    keys = ["clicks.item", "clicks.shop", "buys.item"]
    ids = [torch.randint(SIZES[k], (sum(n),), generator=generator) for k, n in zip(keys, lengths, strict=True)]
    return KeyedJaggedTensor(keys, torch.cat(ids), lengths=torch.tensor([n for key in lengths for n in key]))


def make_ages(seed=0, dtype=torch.float32):
    ages = torch.rand(10, generator=torch.Generator().manual_seed(seed)) * 1e5
    return KeyedJaggedTensor(["clicks", "buys"], ages.to(dtype), lengths=torch.tensor(CLICKS + BUYS))


def test_fuses_aligned_ids():
    encoder, events = make_encoder(), make_events()
    tokens = encoder(events)
    item, shop = (encoder.embedding_collection.embeddings[t].weight for t in ("item", "shop"))
    ids = events.to_dict()
    for stream, x in {
        "clicks": torch.cat([item[ids["clicks.item"].values()], shop[ids["clicks.shop"].values()]], dim=1),
        "buys": item[ids["buys.item"].values()],
    }.items():
        fusion = encoder.fusion[stream]
        mask = 1 + fusion.mask_down(torch.relu(fusion.mask_up(x)))
        wanted = fusion.lce_down(torch.relu(fusion.lce_up(x * mask)))
        torch.testing.assert_close(tokens[stream].values(), wanted)
        assert type(tokens[stream]) is JaggedTensor
    assert list(tokens) == ["clicks", "buys"]
    assert tokens["clicks"].lengths().tolist() == CLICKS and tokens["buys"].offsets().tolist() == [0, 1, 5, 5]
    sum(t.values().square().sum() for t in tokens.values()).backward()
    assert all(p.grad is not None and p.grad.any() for p in encoder.parameters())


def test_side_inputs_are_added():
    encoder, events, ages = make_encoder(side_dim=1), make_events(), make_ages()
    ages = KeyedJaggedTensor(ages.keys(), log_age(ages.values(), 60.0), lengths=ages.lengths())
    tokens = encoder(events, ages)
    plain = EventEncoder(encoder.embedding_collection, STREAMS, 8)
    plain.load_state_dict(encoder.state_dict(), strict=False)
    without = plain(events)
    for stream, part in (("clicks", ages.values()[:5]), ("buys", ages.values()[5:])):
        added = part[:, None] * encoder.side[stream].weight[:, 0]
        torch.testing.assert_close(tokens[stream].values(), without[stream].values() + added)
    as_dict = encoder(events, {"clicks": ages.values()[:5, None], "buys": ages.values()[5:, None]})
    assert all(torch.equal(as_dict[s].values(), tokens[s].values()) for s in STREAMS)


def test_bad_streams():
    collection = EmbeddingCollection(tables())
    for streams, message in (
        ({"clicks": ("item", "brand")}, r"no table has the feature 'clicks.brand'; the tables have \['buys.item'"),
        ({}, "streams is empty"),
        ({"clicks": "item"}, r"streams\['clicks'\] is 'item', wanted a sequence"),
        ({"clicks": ("item.id",)}, "'item.id' is no name"),
        ({"items": ("item",)}, "'items' is a method"),
    ):
        with pytest.raises(ValueError, match=message):
            EventEncoder(collection, streams, 8)
    with pytest.raises(ValueError, match="side_dim is -1"):
        EventEncoder(collection, STREAMS, 8, side_dim=-1)


def test_bad_events(monkeypatch):
    encoder = make_encoder()
    short = KeyedJaggedTensor(["clicks.item"], torch.arange(5), lengths=torch.tensor(CLICKS))
    with pytest.raises(
        ValueError, match=r"events lacks the keys \['clicks.shop', 'buys.item'\]; it has \['clicks.item'\]"
    ):
        encoder(short)
    with pytest.raises(ValueError, match=r"'clicks.shop' has 6 ids and 'clicks.item' 5"):
        encoder(make_events(lengths=(CLICKS, [2, 0, 4], BUYS)))
    crossed = make_events(lengths=(CLICKS, [3, 0, 2], BUYS))
    encoder(crossed)
    monkeypatch.setenv("GEMATTN_CHECK", "1")
    with pytest.raises(ValueError, match=r"the lengths of 'clicks.shop' and 'clicks.item' differ"):
        encoder(crossed)


def test_bad_side_inputs():
    encoder, events, ages = make_encoder(side_dim=1), make_events(), make_ages()
    with pytest.raises(ValueError, match="side is None, wanted 1 floats for every event of 'clicks'"):
        encoder(events)
    with pytest.raises(ValueError, match="side lacks the stream 'buys'"):
        encoder(events, {"clicks": ages.values()[:5]})
    with pytest.raises(ValueError, match=r"side\['clicks'\] has shape \(4, 1\), wanted \(5, 1\)"):
        encoder(events, {"clicks": ages.values()[:4], "buys": ages.values()[5:]})


def test_check_ids():
    events = make_events()
    for known in (SIZES, tables()):
        check_ids(events, known)
    events.values()[7] = 7
    with pytest.raises(ValueError, match=r"feature 'clicks.shop' has the id 7, its table holds ids 0 to 6"):
        check_ids(events, SIZES)
    events.values()[7] = -1
    with pytest.raises(ValueError, match=r"feature 'clicks.shop' has the id -1"):
        check_ids(events, tables())
    with pytest.raises(ValueError, match=r"kjt has the feature 'clicks.shop', which no table has"):
        check_ids(make_events(), {"clicks.item": 20})
    with pytest.raises(TypeError, match=r"torch.float32 values, wanted int32 or int64"):
        check_ids(make_ages(), SIZES)
    slack = KeyedJaggedTensor(["clicks.shop"], torch.tensor([1, 6, 99]), lengths=torch.tensor([1, 1]))
    check_ids(slack, SIZES)  # what lies past the last offset is nobody's id


def test_all_histories_empty():
    encoder = make_encoder()
    tokens = encoder(make_events(lengths=([0, 0], [0, 0], [0, 0])))
    assert tokens["clicks"].values().shape == (0, 8) and tokens["buys"].offsets().tolist() == [0, 0, 0]


def test_names_and_meta_device():
    encoder = make_encoder(side_dim=2, device="meta")
    assert all(p.is_meta for p in encoder.parameters())
    names = {".".join(name.split(".")[:2]) for name in encoder.state_dict()}
    assert names == {"embedding_collection.embeddings", "fusion.clicks", "fusion.buys", "side.clicks", "side.buys"}
    fusion = MaskedFusion(8, 4, device="meta").to_empty(device="cpu")
    for p in fusion.parameters():
        nn.init.constant_(p, float("nan"))
    fusion.reset_parameters()
    x = torch.randn(5, 8)
    assert fusion(x).isfinite().all()
    for p in fusion.mask_down.parameters():
        nn.init.zeros_(p)  # then the mask is 1
    torch.testing.assert_close(fusion(x), fusion.lce_down(torch.relu(fusion.lce_up(x))))


@dataclass
class Batch(Pipelineable):
    events: KeyedJaggedTensor
    ages: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return Batch(*(x.to(device, non_blocking=non_blocking) for x in vars(self).values()))

    def record_stream(self, stream):
        for x in vars(self).values():
            x.record_stream(stream)


class Model(nn.Module):
    """Ids to logits through everything in `gemattn.nn`."""

    def __init__(self, device=None):
        super().__init__()
        self.encoder = EventEncoder.from_tables(tables(), STREAMS, 8, side_dim=1, device=device)
        self.block = gemattn.JaggedTransformerBlock(8, 2, causal=True, device=device)
        self.pooling = gemattn.SharedQueryPooling(8, 2, 2, device=device)
        self.head = nn.Linear(32, 1, device=device)

    def forward(self, batch):
        tokens = self.block(self.encoder(batch.events, batch.ages))
        pooled = self.pooling(tokens)
        logits = self.head(torch.cat([pooled["clicks"].flatten(1), pooled["buys"].flatten(1)], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def make_batch(seed):
    ages = make_ages(seed)
    ages = KeyedJaggedTensor(ages.keys(), log_age(ages.values(), 60.0), lengths=ages.lengths())
    return Batch(make_events(seed), ages, torch.tensor([0.0, 1.0, 1.0]))


def sharded(device, build_on=None):
    torch.manual_seed(0)
    model = Model(build_on)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.encoder.embedding_collection.parameters(), {"lr": 0.1, "eps": 1e-8}
    )
    model = DistributedModelParallel(model, device=device)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))


def snapshot(model):
    """The state, with the shards that this process holds gathered into plain tensors."""
    state = {}
    for name, x in model.state_dict().items():
        local = torch.cat([s.tensor for s in x.local_shards()]) if hasattr(x, "local_shards") else x
        state[name] = local.detach().clone()
    return state


@pytest.mark.timeout(120)
def test_trains_under_distributed_model_parallel(gloo):
    model, optimizer = sharded(gloo)
    assert any(isinstance(m, ShardedEmbeddingCollection) for m in model.modules())
    before, batch = snapshot(model), make_batch(0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = snapshot(model)
    # A bias of the keys shifts all scores of a row alike: softmax does not see it, its gradient is rounding noise.
    still = [name for name in before if torch.equal(before[name], after[name]) and "k_proj.bias" not in name]
    assert not still
    assert any("embeddings.item" in name for name in after)


@pytest.mark.timeout(120)
def test_distributed_model_parallel_fills_a_model_built_on_the_meta_device(gloo):
    # It resets only the modules that hold parameters themselves; so every initial value must be theirs to give.
    model, _ = sharded(gloo, torch.device("meta"))
    loss, _ = model(make_batch(0))
    assert loss.isfinite()
    built = dict(Model().named_parameters())
    for name, p in snapshot(model).items():
        if "embeddings" not in name:
            ours, wanted = p.abs().max(), built[name].abs().max()
            assert 0.5 * wanted <= ours <= 2 * wanted or p.numel() == 1, name


@pytest.mark.timeout(120)
def test_train_pipeline_finds_the_encoder(gloo):
    batches = [make_batch(seed) for seed in range(6)]
    model, optimizer = sharded(gloo)
    wanted = []
    for batch in batches:
        optimizer.zero_grad()
        loss, logits = model(batch)
        loss.backward()
        optimizer.step()
        wanted.append(logits)

    piped, piped_optimizer = sharded(gloo)
    pipeline = TrainPipelineSparseDist(piped, piped_optimizer, gloo)
    stream = iter(batches)
    outputs = [pipeline.progress(stream) for _ in batches]
    assert [m.forward.name for m in pipeline._pipelined_modules] == ["encoder.embedding_collection"]
    for out, logits in zip(outputs, wanted, strict=True):
        assert torch.equal(out, logits)
    states = snapshot(model), snapshot(piped)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
