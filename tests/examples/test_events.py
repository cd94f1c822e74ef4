"""Batches by index arithmetic, their division among ranks, and the synthetic log."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torchrec")

from examples.data import synthetic
from examples.data.events import Batches, StreamData
from models.features import check_batch


@pytest.fixture(scope="module")
def data():
    return synthetic.load(num_examples=1127, num_users=150, num_items=60, max_events=20)


def test_the_log_is_skewed_seeded_and_has_empties(data):
    again = synthetic.load(num_examples=1127, num_users=150, num_items=60, max_events=20)
    other = synthetic.load(seed=1, num_examples=1127, num_users=150, num_items=60, max_events=20)
    assert np.array_equal(data.labels, again.labels) and np.array_equal(data.dense, again.dense)
    assert not np.array_equal(data.labels, other.labels)
    for stream in data.streams:
        lengths = stream.end - stream.begin
        assert (lengths == 0).any() and lengths.max() == 20
    assert 0.1 < data.labels[:, 0].mean() < 0.6
    assert (data.labels[:, 1] <= data.labels[:, 0]).all()  # a conversion needs a click


def test_clicks_tell_what_a_user_likes():
    data = synthetic.load(num_examples=4000)
    clicks, category = data.streams[0], data.candidate[1]
    share = np.array(
        [
            (clicks.ids[1][begin:end] == wanted).mean() if end > begin else np.nan
            for begin, end, wanted in zip(clicks.begin, clicks.end, category, strict=True)
        ]
    )
    clicked = data.labels[:, 0] == 1
    assert np.nanmean(share[clicked]) > 2 * np.nanmean(share[~clicked])


def test_a_batch_is_its_examples(data):
    chosen = np.array([700, 3, 3, 1126])
    batch = data.batch(chosen)
    check_batch(batch, data.schema)
    assert batch.labels.tolist() == data.labels[chosen].tolist()
    assert batch.dense.tolist() == data.dense[chosen].tolist()
    for column, ragged in zip(data.schema.ids, data.ids, strict=True):
        rows = [ragged.values[ragged.offsets[n] : ragged.offsets[n + 1]].tolist() for n in chosen]
        assert [v.tolist() for v in batch.ids[column.name].to_dense()] == rows
    for spec, stream in zip(data.schema.streams, data.streams, strict=True):
        for key, ids in zip(spec.keys, stream.ids, strict=True):
            rows = [ids[stream.begin[n] : stream.end[n]].tolist() for n in chosen]
            assert [v.tolist() for v in batch.events[key].to_dense()] == rows
        rows = [(data.times[n] - stream.times[stream.begin[n] : stream.end[n]]).tolist() for n in chosen]
        assert [v.tolist() for v in batch.ages[spec.name].to_dense()] == rows


def test_an_empty_batch(data):
    batch = data.batch(np.empty(0, dtype=np.int64))
    check_batch(batch, data.schema)
    assert len(batch) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_every_example_once_in_equally_many_batches(data, world_size):
    ranks = [
        Batches(data, "train", 50, shuffle=True, seed=4, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    sizes = [[int(batch.weights.sum()) for batch in part.epoch(1)] for part in ranks]
    assert {len(part) for part in sizes} == {len(ranks[0])} == {-(-901 // (50 * world_size))}
    own = [part.own_examples(1) for part in ranks]
    assert [len(examples) for examples in own] == [sum(part) for part in sizes]
    assert sorted(np.concatenate(own).tolist()) == list(range(901))
    if world_size == 2:
        # One example is left over. The first rank has none, and steps along with one of weight 0.
        assert [part[-1] for part in sizes] == [0, 1]
        *_, idle = ranks[0].epoch(1)
        check_batch(idle, data.schema)
        assert idle.weights.tolist() == [0.0]
    assert ranks[0].examples_in(0, len(ranks[0])) == 901


def test_epochs_differ_and_can_be_entered_anywhere(data):
    batches = Batches(data, "train", 100, shuffle=True, id_dropout={"user": 0.5}, seed=1)
    assert not np.array_equal(batches.examples(0), batches.examples(1))
    whole = [batch.ids.values().tolist() for batch in batches.epoch(1)]
    assert [batch.ids.values().tolist() for batch in batches.epoch(1, start=3, stop=7)] == whole[3:7]
    assert Batches(data, "valid", 100).examples().tolist() == data.splits["valid"].tolist()


def test_id_dropout_hides_whole_features_at_the_rate_asked(data):
    batches = Batches(data, "train", 901, id_dropout={"user": 0.3, "interests": 1.0})
    (batch,) = batches.epoch(0)
    check_batch(batch, data.schema)
    hidden = batch.ids["user"].values() == 0
    assert hidden.float().mean().item() == pytest.approx(0.3, abs=0.05)
    assert batch.ids["user"].values()[~hidden].tolist() == data.ids[0].values[:901][~hidden.numpy()].tolist()
    assert not batch.ids["interests"].values().any()
    assert batch.ids["interests"].lengths().tolist() == np.diff(data.ids[2].offsets[:902]).tolist()
    assert data.ids[0].values.min() > 0  # the data themselves are left alone
    with pytest.raises(ValueError, match="id_dropout names"):
        Batches(data, "train", 10, id_dropout={"nobody": 0.1})


def test_bad_data_are_named(data):
    candidate = (data.candidate[0].copy(), data.candidate[1])
    candidate[0][5] = 61
    with pytest.raises(ValueError, match=r"'candidate.item': id 61 is outside table 'item' of 61 ids"):
        replace(data, candidate=candidate)
    labels = data.labels.copy()
    labels[7, 1] = 2
    with pytest.raises(ValueError, match=r"task 'conversion', example 7: wanted 0 or 1, got 2"):
        replace(data, labels=labels)
    with pytest.raises(ValueError, match="split 'valid' has no examples"):
        replace(data, splits={**data.splits, "valid": np.empty(0, dtype=np.int64)})
    clicks = data.streams[0]
    later = StreamData(clicks.ids, clicks.times + 10**9, clicks.begin, clicks.end)
    with pytest.raises(ValueError, match=r"stream 'clicks': the history of example \d+ must be .* strictly earlier"):
        replace(data, streams=(later, data.streams[1]))
