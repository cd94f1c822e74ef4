"""Batches for the tests of the models: two streams, every kind of feature, histories of any length."""

import pytest
import torch
from torch import Tensor

torchrec = pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from models.features import Batch, EventStream, FeatureSchema, IdFeature, check_batch  # noqa: E402

SCHEMA = FeatureSchema(
    dense=("recency", "price"),
    ids=(IdFeature("country", 5), IdFeature("tags", 7)),
    candidate=(IdFeature("item", 30), IdFeature("shop", 6)),
    streams=(
        EventStream("clicks", (IdFeature("item", 30), IdFeature("shop", 6), IdFeature("action", 4))),
        EventStream("views", (IdFeature("item", 30),)),
    ),
    tasks=("click", "buy"),
)


@pytest.fixture(scope="session")
def schema() -> FeatureSchema:
    return SCHEMA


def make_batch(clicks: list[int], views: list[int] | None = None, seed: int = 0) -> Batch:
    """Random examples whose histories have these lengths (views: as many, reversed); each has 0 to 2 tags."""
    generator = torch.Generator().manual_seed(seed)
    views = clicks[::-1] if views is None else views
    size = len(clicks)
    one = [1] * size

    def ids(lengths: list[int], num_ids: int) -> Tensor:
        return torch.randint(num_ids, (sum(lengths),), generator=generator)

    def keyed(keys: list[str], values: list[Tensor], lengths: list[list[int]]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.tensor(lengths, dtype=torch.int64).flatten())

    def ages(lengths: list[int]) -> Tensor:
        return torch.rand(sum(lengths), generator=generator) * 5000 + 1

    tags = [i % 3 for i in range(size)]
    features = list(SCHEMA.event_features())
    lengths = [one, one, clicks, clicks, clicks, views]
    batch = Batch(
        dense=torch.randn(size, 2, generator=generator),
        ids=keyed(["country", "tags"], [ids(one, 5), ids(tags, 7)], [one, tags]),
        events=keyed(
            [key for key, _ in features],
            [ids(each, feature.num_ids) for each, (_, feature) in zip(lengths, features, strict=True)],
            lengths,
        ),
        ages=keyed(["clicks", "views"], [ages(clicks), ages(views)], [clicks, views]),
        labels=torch.randint(2, (size, 2), generator=generator).float(),
        weights=torch.rand(size, generator=generator) + 0.5,
    )
    check_batch(batch, SCHEMA)
    return batch


def select(batch: Batch, examples: list[int]) -> Batch:
    """The examples of these indices, in this order, as a batch."""

    def pick(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values, lengths = [], []
        for key in kjt.keys():  # noqa: SIM118
            one = kjt[key]
            rows = torch.split(one.values(), one.lengths().tolist())
            values += [rows[i] for i in examples]
            lengths += [len(rows[i]) for i in examples]
        return KeyedJaggedTensor(list(kjt.keys()), torch.cat(values), lengths=torch.tensor(lengths))

    return Batch(
        dense=batch.dense[examples],
        ids=pick(batch.ids),
        events=pick(batch.events),
        ages=pick(batch.ages),
        labels=batch.labels[examples],
        weights=batch.weights[examples],
    )
