"""The schema refuses what models could not be built from; a batch that breaks its schema is named, not crashed on."""

from dataclasses import replace

import pytest
import torch

torchrec = pytest.importorskip("torchrec")

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from models.features import Batch, EventStream, FeatureSchema, IdFeature, check_batch  # noqa: E402

SCHEMA = FeatureSchema(
    dense=("recency",),
    ids=(IdFeature("user", 5), IdFeature("tags", 4)),
    candidate=(IdFeature("item", 10), IdFeature("year", 3)),
    streams=(
        EventStream("clicks", (IdFeature("item", 10), IdFeature("action", 6))),
        EventStream("views", (IdFeature("item", 10),)),
    ),
    tasks=("click", "buy"),
)


def make_batch() -> Batch:
    """Two examples: clicks of lengths 2 and 0, views of lengths 0 and 1, tags of lengths 0 and 2."""
    return Batch(
        dense=torch.tensor([[0.5], [1.5]]),
        ids=KeyedJaggedTensor(["user", "tags"], torch.tensor([1, 2, 3, 0]), lengths=torch.tensor([1, 1, 0, 2])),
        events=KeyedJaggedTensor(
            list(SCHEMA.event_keys),
            torch.tensor([4, 5, 1, 2, 7, 8, 3, 5, 9]),
            lengths=torch.tensor([1, 1, 1, 1, 2, 0, 2, 0, 0, 1]),
        ),
        ages=KeyedJaggedTensor(["clicks", "views"], torch.tensor([9.0, 1.0, 3.0]), lengths=torch.tensor([2, 0, 0, 1])),
        labels=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        weights=torch.ones(2),
    )


def with_values(kjt: KeyedJaggedTensor, position: int, value: float) -> KeyedJaggedTensor:
    values = kjt.values().clone()
    values[position] = value
    return KeyedJaggedTensor(kjt.keys(), values, lengths=kjt.lengths())


def test_keys_and_tables():
    assert SCHEMA.id_keys == ("user", "tags")
    assert SCHEMA.event_keys == (
        "candidate.item",
        "candidate.year",
        "clicks.item",
        "clicks.action",
        "views.item",
    )
    assert SCHEMA.stream_names == ("clicks", "views")
    assert SCHEMA.id_tables() == {"user": (5, ("user",)), "tags": (4, ("tags",))}
    assert SCHEMA.event_tables() == {
        "item": (10, ("candidate.item", "clicks.item", "views.item")),
        "year": (3, ("candidate.year",)),
        "action": (6, ("clicks.action",)),
    }


def with_lengths(kjt: KeyedJaggedTensor, lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=torch.tensor(lengths))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IdFeature("a.b", 3), "identifier"),
        (lambda: IdFeature("a", 0), "num_ids must be an int of at least 1, got 0"),
        (lambda: IdFeature("a", 3, table="x y"), "table"),
        (lambda: EventStream("clicks", ()), "at least one feature"),
        (lambda: EventStream("candidate", (IdFeature("a", 3),)), "taken"),
        (lambda: replace(SCHEMA, tasks=()), "at least one task"),
        (lambda: replace(SCHEMA, dense=("x", "x")), "dense.*'x'"),
        (lambda: replace(SCHEMA, candidate=(IdFeature("item", 11),)), "table 'item' has 11 ids .* 10"),
        (lambda: replace(SCHEMA, ids=(IdFeature("item", 10),)), r"tables \['item'\]"),
    ],
)
def test_schema_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_good_batches_pass():
    check_batch(make_batch(), SCHEMA)
    nothing = torch.empty(0, dtype=torch.int64)
    empty = Batch(
        dense=torch.empty(0, 1),
        ids=KeyedJaggedTensor(list(SCHEMA.id_keys), nothing, lengths=nothing),
        events=KeyedJaggedTensor(list(SCHEMA.event_keys), nothing, lengths=nothing),
        ages=KeyedJaggedTensor(list(SCHEMA.stream_names), torch.empty(0), lengths=nothing),
        labels=torch.empty(0, 2),
        weights=torch.empty(0),
    )
    check_batch(empty, SCHEMA)
    assert len(empty) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"ids": with_values(b.ids, 0, 5)}, r"feature 'user': id 5 is outside table 'user' of 5 ids"),
        (lambda b: {"events": with_values(b.events, 8, -1)}, "feature 'views.item': id -1 is outside table 'item'"),
        (lambda b: {"labels": torch.tensor([[1.0, 0.0], [0.0, 0.5]])}, "task 'buy', example 1: wanted 0 or 1, got 0.5"),
        (lambda b: {"labels": torch.full((2, 2), float("nan"))}, "task 'click', example 0"),
        (lambda b: {"labels": torch.ones(2, 1)}, r"batch.labels: wanted float32 \(2, 2\)"),
        (lambda b: {"dense": torch.tensor([[1.0], [float("inf")]])}, "'recency' holds a value that is not finite"),
        (lambda b: {"weights": torch.tensor([1.0, -1.0])}, "batch.weights"),
        (lambda b: {"ages": with_values(b.ages, 1, 0.0)}, "strictly earlier"),
        (lambda b: {"ages": with_lengths(b.ages, [1, 1, 0, 1])}, "lengths of 'clicks.item' differ"),
        (lambda b: {"ids": b.events}, r"batch.ids: wanted keys \['user', 'tags'\], got"),
    ],
)
def test_bad_batches_are_named(change, message):
    batch = make_batch()
    with pytest.raises(ValueError, match=message):
        check_batch(replace(batch, **change(batch)), SCHEMA)


def test_to_keeps_every_part():
    moved = make_batch().to(torch.device("cpu"))
    check_batch(moved, SCHEMA)
    assert moved.events.values().tolist() == [4, 5, 1, 2, 7, 8, 3, 5, 9]
    assert moved.ages.values().tolist() == [9.0, 1.0, 3.0]
