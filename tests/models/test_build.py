"""Every model by its name: config round trip, inputs that are used, training, meta device, TorchRec's pipeline."""

import json
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import MODELS, build_model
from models.baselines import DinConfig
from models.build import make_config
from models.features import Batch, EventStream, FeatureSchema, IdFeature
from models.gem import GemConfig, StreamConfig
from models.inputs import segment_sum
from tests.models.conftest import make_batch, select

LENGTHS = [3, 0, 7, 1, 12]


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


# Config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gem", GemConfig(dim=48, streams={"clicks": StreamConfig(num_heads=4, window=50)}, head_hidden=(8, 4))),
        ("gem", GemConfig(stream=StreamConfig(num_seeds=3))),
        ("din", DinConfig(num_heads=3, head_hidden=())),
        ("mlp", MODELS["mlp"](dropout=0.5)),
    ],
)
def test_config_survives_json(name: str, config: object) -> None:
    assert make_config(name, json.loads(json.dumps(asdict(config)))) == config
    assert make_config(name, asdict(config)) == config


def test_unknown_names_are_named(schema: FeatureSchema) -> None:
    with pytest.raises(ValueError, match=r"model is 'dim'.*'din'"):
        build_model("dim", schema)
    with pytest.raises(ValueError, match=r"unknown \['layers'\].*num_layers"):
        build_model("gem", schema, layers=2)
    with pytest.raises(ValueError, match=r"streams\['clicks'\].*unknown \['heads'\].*num_heads"):
        build_model("gem", schema, streams={"clicks": {"heads": 2}})
    with pytest.raises(ValueError, match="task_weights"):
        build_model("mlp", schema, task_weights=[1.0])


# What the models read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_gradient_reaches_every_parameter(schema: FeatureSchema, name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, schema)
    perturb(model)
    model(make_batch(LENGTHS))[0].backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", MODELS)
def test_only_the_history_free_model_ignores_the_history(schema: FeatureSchema, name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, schema).eval()
    perturb(model)
    batch = make_batch(LENGTHS)
    values = batch.events.values().clone()
    values[2 * len(LENGTHS) :] = (values[2 * len(LENGTHS) :] + 1) % 4  # all but the candidate
    other = replace(batch, events=type(batch.events)(batch.events.keys(), values, lengths=batch.events.lengths()))
    with torch.no_grad():
        change = (model(batch)[1] - model(other)[1]).abs().amax(dim=1)
    assert not change[1] if name == "mlp" or not any(LENGTHS[1:2] + LENGTHS[::-1][1:2]) else change[1]
    assert bool((change[[0, 2, 3, 4]] > 0).all()) == (name != "mlp")


@pytest.mark.parametrize("name", MODELS)
def test_examples_do_not_meet(schema: FeatureSchema, name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, schema).eval()
    perturb(model)
    batch = make_batch(LENGTHS)
    with torch.no_grad():
        _, logits = model(batch)
        _, fewer = model(select(batch, [4, 2, 1]))
        _, spoilt = model(replace(batch, dense=batch.dense.index_fill(0, torch.tensor([3]), torch.nan)))
    torch.testing.assert_close(fewer, logits[[4, 2, 1]], rtol=1e-5, atol=1e-6)
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[[0, 1, 2, 4]], logits[[0, 1, 2, 4]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [2]])
def test_empty_histories(schema: FeatureSchema, name: str, lengths: list[int]) -> None:
    model = build_model(name, schema)
    loss, logits = model(make_batch(lengths))
    loss.backward()
    assert logits.shape == (len(lengths), 2)
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_schema_of_the_least(name: str) -> None:
    schema = FeatureSchema(
        dense=(),
        ids=(),
        candidate=(IdFeature("item", 5),),
        streams=(EventStream("clicks", (IdFeature("item", 5),)),),
        tasks=("click",),
    )
    full = make_batch([2, 0], [0, 0])
    keyed = type(full.events)
    batch = Batch(
        dense=torch.zeros(2, 0),
        ids=keyed([], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)),
        events=keyed(["candidate.item", "clicks.item"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 2, 0])),
        ages=keyed(["clicks"], torch.tensor([9.0, 1.0]), lengths=torch.tensor([2, 0])),
        labels=torch.tensor([[1.0], [0.0]]),
        weights=torch.ones(2),
    )
    loss, logits = build_model(name, schema)(batch)
    loss.backward()
    assert logits.shape == (2, 1)
    assert loss.isfinite()


# The baselines' formulas -------------------------------------------------------------------------------------------


def test_mean_pooled_reads_means(schema: FeatureSchema) -> None:
    model, batch = build_model("mean", schema), make_batch(LENGTHS)
    body = model.body
    embedded = model.ec(batch.events)
    events = body.events["clicks"](embedded, batch.ages)
    start, means = 0, []
    for length in LENGTHS:
        rows = body.tokens["clicks"](events.features[start : start + length])
        means.append(rows.mean(0) if length else torch.zeros(32))
        start += length
    read = []
    body.heads.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(batch)
    mean = torch.stack(means)
    query = body.candidate(embedded)
    n = body.fields.num_tokens * 32
    torch.testing.assert_close(read[0][:, n : n + 32], mean)
    torch.testing.assert_close(read[0][:, n + 32 : n + 64], mean * query)


def test_din_is_its_formula(schema: FeatureSchema) -> None:
    torch.manual_seed(0)
    model, batch = build_model("din", schema, num_heads=2), make_batch(LENGTHS)
    body = model.body
    embedded = model.ec(batch.events)
    events = body.events["clicks"](embedded, batch.ages)
    read = []
    body.heads.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(batch)
    start, expected = 0, []
    for length, query in zip(LENGTHS, body.candidate(embedded), strict=True):
        total = torch.zeros(2, 32)
        for row in events.features[start : start + length]:
            token = body.tokens["clicks"](row)
            weights = body.weights["clicks"](torch.cat([query, token, query - token, query * token]))
            total = total + weights[:, None] * token
        expected.append((total / max(length, 1) ** 0.5).flatten())
        start += length
    n = body.fields.num_tokens * 32
    torch.testing.assert_close(read[0][:, n : n + 64], torch.stack(expected), rtol=1e-4, atol=1e-6)


def test_segment_sum_differentiates() -> None:
    values = torch.ones(3, 1, requires_grad=True)
    segment_sum(values, torch.tensor([0, 2, 2]), 3).backward(torch.tensor([[1.0], [2.0], [3.0]]))
    assert values.grad.flatten().tolist() == [1, 3, 3]


# Meta device and pipeline ------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> object:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_sharded_pipeline_trains_like_the_plain_model(schema: FeatureSchema, name: str, one_process: object) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    torch.manual_seed(0)
    plain = build_model(name, schema, **({"dropout": 0.0}))
    sharded = build_model(name, schema, device="meta", **({"dropout": 0.0}))
    for tables in filter(None, (sharded.ebc, sharded.ec, sharded.taste)):
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    sharded = DistributedModelParallel(sharded, device=torch.device("cpu"))
    # Built without memory and given it by DMP, every weight starts from the distribution of the plain model's.
    for (key, theirs), (_, ours) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        if ours.numel() >= 16 and not key.startswith(("ec.", "ebc.", "taste.")):
            assert theirs.std().item() == pytest.approx(ours.std().item(), rel=0.5, abs=1e-6), key
            assert theirs.mean().item() == pytest.approx(ours.mean().item(), abs=4 * ours.std().item() / 4), key
    sharded.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    dense = [p for key, p in sharded.named_parameters() if not key.startswith(("ec.", "ebc.", "taste."))]
    pipeline = TrainPipelineSparseDist(
        sharded,
        torch.optim.SGD(dense, lr=0.1),
        torch.device("cpu"),
        custom_model_fwd=lambda batch: (lambda out: (out[0], out))(sharded(batch)),
    )
    batches = [make_batch([2, 0, 5], seed=seed) for seed in range(4)]
    stream = iter(batches)
    for batch in batches:
        loss, logits = plain(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        their_loss, their_logits = pipeline.progress(stream)
        torch.testing.assert_close(their_loss, loss)
        torch.testing.assert_close(their_logits, logits, rtol=1e-4, atol=1e-6)
