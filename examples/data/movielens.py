"""MovieLens-100K: 100,000 ratings of 943 users, read from the wheel of ``recbole==1.2.1``, which carries the files.

GroupLens does not allow its data to be redistributed, so the files are fetched on first use into a folder that git
ignores (``data/``) and never copied into the repository.

Protocol. Events are sorted by (timestamp, user, item) and cut once by time: the first 80% train, the next 10% validate,
the last 10% test. Tasks: ``engaged`` is a rating of 4 or more, ``loved`` a 5. All that is used for an event at time t,
history and running statistics alike, is strictly earlier than t; earlier valid and test events of a user are part of
her later histories (streaming evaluation). Vocabularies and scalings come from train alone; what train does not hold is
id 0, unknown.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.data.events import EventData, Ragged, StreamData
from examples.data.history import Floats, Ints, history_slices, past_sums
from models.features import UNKNOWN_ID, EventStream, FeatureSchema, IdFeature

NAME = "ml-100k"
WHEEL = "recbole==1.2.1"
TASKS = ("engaged", "loved")
NUM_RATINGS = 5


class DataError(ValueError):
    """A data file that is missing or not as it should be; the message names the file, the line and the column."""


def fetch(data_dir: Path) -> Path:
    """The folder with the three files, downloaded on the first call (2 MB).

    Raises:
        DataError: pip could not get the wheel, with what pip said.
    """
    folder = data_dir / NAME
    names = [f"{NAME}.{kind}" for kind in ("inter", "item", "user")]
    if all((folder / name).is_file() for name in names):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--retries", "2", "--dest", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise DataError(
                f"MovieLens-100K is read from the package {WHEEL}, and pip could not download it ({said}). "
                "Without a network, train on made-up events: --data synthetic"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in names:
                # Written aside and renamed, so that an interrupted fetch leaves no half file behind.
                part = Path(scratch) / name
                part.write_bytes(wheel.read(f"recbole/dataset_example/{NAME}/{name}"))
                part.replace(folder / name)
    return folder


class Column(NamedTuple):
    """A column of a file: its header, how a field is read (ValueError if it is not as wanted), and what is wanted."""

    header: str
    parse: Callable[[str], int | str | tuple[str, ...]]
    wanted: str


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < low or (high is not None and number > high):
            raise ValueError(text)
        return number

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _year(text: str) -> int:
    # Two films of the set have no year in this column.
    return int(text) if text.isdigit() and len(text) == 4 else 0


INTER = (
    Column("user_id:token", _whole(1), "a whole number from 1"),
    Column("item_id:token", _whole(1), "a whole number from 1"),
    Column("rating:float", _whole(1, NUM_RATINGS), f"a whole number from 1 to {NUM_RATINGS}"),
    Column("timestamp:float", _whole(0), "seconds since 1970, a whole number"),
)
ITEM = (
    Column("item_id:token", _whole(1), "a whole number from 1"),
    Column("movie_title:token_seq", str, "a title"),
    Column("release_year:token", _year, "a year"),
    Column("class:token_seq", lambda text: tuple(_word(text).split(" ")), "genres with a blank between them"),
)
USER = (
    Column("user_id:token", _whole(1), "a whole number from 1"),
    Column("age:token", _whole(0, 150), "an age in years"),
    Column("gender:token", _one_of("M", "F"), "M or F"),
    Column("occupation:token", _word, "an occupation"),
    Column("zip_code:token", str, "a zip code"),
)


def read_table(path: Path, columns: Sequence[Column]) -> list[list]:
    """The rows of a tab-separated file with a typed header, column by column.

    Raises:
        DataError: naming file, line, column, what is there and what is wanted.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing (remove its folder to have it fetched again)") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: wanted UTF-8 text, byte {error.start} is not") from None
    header = [column.header for column in columns]
    got = lines[0].split("\t") if lines else []
    if got != header:
        shorter = min(len(got), len(header))
        wrong = next((i for i in range(shorter) if got[i] != header[i]), shorter)
        raise DataError(f"{path}, line 1, column {wrong + 1}: wanted the header {header}, got {got}")
    if len(lines) == 1:
        raise DataError(f"{path}, line 2, column 1: wanted a row, the file ends after its header")
    table: list[list] = [[] for _ in columns]
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) != len(columns):
            place = min(len(fields), len(columns)) + (len(fields) < len(columns))
            raise DataError(f"{path}, line {number}, column {place}: wanted {len(columns)} columns, got {len(fields)}")
        for place, (text, column, into) in enumerate(zip(fields, columns, table, strict=True), start=1):
            try:
                into.append(column.parse(text))
            except ValueError:
                raise DataError(
                    f"{path}, line {number}, column {place} ({column.header}): wanted {column.wanted}, got {text!r}"
                ) from None
    return table


@dataclass(frozen=True)
class Ratings:
    """The three files as arrays; events are sorted by (time, user, item), ``*_row`` point into the other arrays."""

    user_row: Ints
    item_row: Ints
    rating: Ints
    time: Ints
    age: Ints  # years
    gender: Ints  # 1 M, 2 F
    occupation: Ints  # from 1
    year: Ints  # 0 unknown
    genres: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.time)


def read_ratings(folder: Path) -> Ratings:
    """Reads ``ml-100k.inter``, ``.item`` and ``.user``; see `read_table` for errors."""
    paths = {kind: folder / f"{NAME}.{kind}" for kind in ("inter", "item", "user")}
    user, item, rating, time = (np.array(column, dtype=np.int64) for column in read_table(paths["inter"], INTER))
    item_id, _, year, genres = read_table(paths["item"], ITEM)
    user_id, age, gender, occupation, _ = read_table(paths["user"], USER)
    rows = {}
    for kind, place, ids, known in (("user", 1, user, user_id), ("item", 2, item, item_id)):
        row_of = {name: row for row, name in enumerate(known)}
        if len(row_of) != len(known):
            repeated = next(row for row, name in enumerate(known) if row_of[name] != row)
            raise DataError(f"{paths[kind]}, line {repeated + 2}, column 1: {kind} {known[repeated]} comes twice")
        rows[kind] = np.array([row_of.get(name, -1) for name in ids.tolist()], dtype=np.int64)
        if (rows[kind] < 0).any():
            line = int((rows[kind] < 0).argmax())
            where = f"{paths['inter']}, line {line + 2}, column {place}"
            raise DataError(f"{where}: {kind} {ids[line]} is not in {paths[kind]}")
    occupations = {name: number for number, name in enumerate(sorted(set(occupation)), start=1)}
    order = np.lexsort((item, user, time))
    return Ratings(
        user_row=rows["user"][order],
        item_row=rows["item"][order],
        rating=rating[order],
        time=time[order],
        age=np.array(age, dtype=np.int64),
        gender=np.array([1 if g == "M" else 2 for g in gender], dtype=np.int64),
        occupation=np.array([occupations[name] for name in occupation], dtype=np.int64),
        year=np.array(year, dtype=np.int64),
        genres=tuple(genres),
    )


class Vocabulary:
    """Ids from 1 for the values seen in train, in sorted order; everything else is 0, unknown."""

    def __init__(self, seen: Ints) -> None:
        self._values = np.unique(seen)

    def __len__(self) -> int:
        return len(self._values) + 1

    def ids(self, values: Ints) -> Ints:
        """The ids of these values, 0 for those not seen in train."""
        place = np.searchsorted(self._values, values).clip(max=len(self._values) - 1)
        return np.where(self._values[place] == values, place + 1, UNKNOWN_ID)


def split_by_time(n: int) -> dict[str, Ints]:
    """First 80% train, next 10% valid, last 10% test."""
    first, second = n * 8 // 10, n * 9 // 10
    return {"train": np.arange(first), "valid": np.arange(first, second), "test": np.arange(second, n)}


class History(NamedTuple):
    """What each event may know of its user: ``by_user[begin[n]:end[n]]`` are her strictly earlier events, in order."""

    by_user: Ints  # events sorted by user, time and item
    begin: Ints
    end: Ints

    def recent_sums(self, values: Floats, most: int) -> tuple[Floats, Floats]:
        """Number and sum of the values of the latest ``most`` events, at most, before each event."""
        first = np.maximum(self.begin, self.end - most)
        prefix = np.concatenate([np.zeros(1), np.cumsum(values[self.by_user])])
        return (self.end - first).astype(np.float64), prefix[self.end] - prefix[first]

    def last(self, values: Floats) -> Floats:
        """The value of the latest event before each event; 0 where there is none."""
        return np.where(self.end > self.begin, values[self.by_user[np.maximum(self.end - 1, 0)]], 0.0)

    def first(self, values: Floats) -> Floats:
        """The value of the earliest event; 0 where there is none."""
        place = np.minimum(self.begin, len(self.by_user) - 1)
        return np.where(self.end > self.begin, values[self.by_user[place]], 0.0)


def running_statistics(ratings: Ratings, history: History) -> dict[str, Floats]:
    """What the past says of each event's user and item; every value uses strictly earlier events alone.

    Means are shrunk to everyone's past mean by 5 pseudo-events (those of the latest few events by 2), so an unseen user
    or item has that. The surprise of an event is its rating over the mean that its item had at that time.
    """
    outcome = np.stack([ratings.rating, ratings.rating >= 4, ratings.rating == 5], axis=1).astype(np.float64)
    everyone = np.zeros(len(ratings), dtype=np.int64)
    count, total = past_sums(everyone, ratings.time, outcome)
    overall = (total + 20.0 * np.array([3.5, 0.55, 0.21])) / (count + 20.0)[:, None]

    def shrunk(groups: Ints) -> tuple[Floats, Floats]:
        count, total = past_sums(groups, ratings.time, outcome)
        return count, (total + 5.0 * overall) / (count + 5.0)[:, None]

    user_count, user_mean = shrunk(ratings.user_row)
    item_count, item_mean = shrunk(ratings.item_row)
    # How much better or worse than everyone this user has judged what she judged.
    _, surplus = past_sums(ratings.user_row, ratings.time, outcome - item_mean)
    surplus /= (user_count + 5.0)[:, None]
    genre_count, genre_affinity = _genre_affinity(ratings, user_mean[:, 0])

    rating, loved = outcome[:, 0], outcome[:, 2]
    surprise = rating - item_mean[:, 0]
    number_of_5, ratings_of_5 = history.recent_sums(rating, 5)
    _, surprises_of_5 = history.recent_sums(surprise, 5)
    number_of_10, surprises_of_10 = history.recent_sums(surprise, 10)
    _, loved_of_10 = history.recent_sums(loved, 10)
    known = history.end > history.begin
    time = ratings.time.astype(np.float64)

    return {
        "user_log_count": np.log1p(user_count),
        "user_rating": user_mean[:, 0],
        "user_engaged": user_mean[:, 1],
        "user_loved": user_mean[:, 2],
        "user_surplus_engaged": surplus[:, 1],
        "user_surplus_loved": surplus[:, 2],
        "user_last_rating": history.last(rating - 3.5),
        "user_last_surprise": history.last(surprise),
        "user_last5_rating": (ratings_of_5 + 2.0 * overall[:, 0]) / (number_of_5 + 2.0),
        "user_last5_surprise": surprises_of_5 / (number_of_5 + 2.0),
        "user_last10_surprise": surprises_of_10 / (number_of_10 + 2.0),
        "user_last10_loved": (loved_of_10 + 3.0 * 0.2) / (number_of_10 + 3.0),
        "item_log_count": np.log1p(item_count),
        "item_rating": item_mean[:, 0],
        "item_engaged": item_mean[:, 1],
        "item_loved": item_mean[:, 2],
        "genre_log_count": np.log1p(genre_count),
        "genre_affinity": genre_affinity,
        "log_since_last": np.log1p(np.where(known, time - history.last(time), 0.0)),
        "log_since_first": np.log1p(np.where(known, time - history.first(time), 0.0)),
    }


def _genre_affinity(ratings: Ratings, user_rating: Floats) -> tuple[Floats, Floats]:
    """The user's past events in the genres of this item: their number, and their mean rating above her own mean."""
    names, genres, offsets = _genres(ratings)
    width = np.diff(offsets)
    event = np.repeat(np.arange(len(ratings)), width)
    count, total = past_sums(
        ratings.user_row[event] * (len(names) + 1) + genres,
        ratings.time[event],
        ratings.rating[event, None].astype(np.float64),
    )
    # Every item has a genre, so no segment of reduceat is empty.
    count = np.add.reduceat(count, offsets[:-1])
    total = np.add.reduceat(total[:, 0], offsets[:-1])
    return count, (total + 3.0 * user_rating) / (count + 3.0) - user_rating


def _genres(ratings: Ratings) -> tuple[list[str], Ints, Ints]:
    """The names of the genres, and the ids (from 1) and offsets of the genres of each event's item."""
    names = sorted({genre for genres in ratings.genres for genre in genres})
    number = {genre: i for i, genre in enumerate(names, start=1)}
    of_item = [np.array([number[genre] for genre in genres], dtype=np.int64) for genres in ratings.genres]
    ids = np.concatenate([of_item[row] for row in ratings.item_row])
    width = np.array([len(genres) for genres in of_item], dtype=np.int64)[ratings.item_row]
    return names, ids, np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(width)])


def _buckets(values: Floats, low: float, high: float, width: float) -> tuple[Ints, int]:
    """Ids from 1 for buckets of this width, the values clipped to [low, high]; and the number of ids, 0 included."""
    ids = np.rint((values.clip(low, high) - low) / width).astype(np.int64) + 1
    return ids, round((high - low) / width) + 2


def build(ratings: Ratings, max_events: int = 50, max_past: int = 200) -> EventData:
    """Schema, histories and features of the protocol above.

    There are two streams of the same events: ``ratings``, with all that is known of an event, and ``past``, with little
    of each but longer, for what adds up over many. They are cut to their latest ``max_events`` and ``max_past``.
    """
    n = len(ratings)
    splits = split_by_time(n)
    train = splits["train"]
    user, item, time = ratings.user_row, ratings.item_row, ratings.time

    by_user = np.lexsort((item, time, user))
    history = History(by_user, *history_slices(user[by_user], time[by_user], user, time))
    statistics = running_statistics(ratings, history)
    year = np.where(ratings.year[item] > 0, ratings.year[item], 1990).astype(np.float64)
    age = ratings.age[user].astype(np.float64)
    dense = np.stack([*statistics.values(), year, age], axis=1)
    dense = (dense - dense[train].mean(axis=0)) / (dense[train].std(axis=0) + 1e-6)

    # No id of the user: nearly all users of the test are new, and what is learned of the others does not help them.
    genre_names, genres, genre_offsets = _genres(ratings)
    bags = {
        "gender": (Ragged.single(ratings.gender[user]), 3),
        "occupation": (Ragged.single(ratings.occupation[user]), int(ratings.occupation.max()) + 1),
        "age_group": (Ragged.single(_buckets(age, 8.0, 72.0, 8.0)[0]), 10),
        "genres": (Ragged(genres, genre_offsets), len(genre_names) + 1),
    }
    items = Vocabulary(item[train])
    genre_set = np.unique([" ".join(genres) for genres in ratings.genres], return_inverse=True)[1].astype(np.int64)[
        item
    ]
    genre_sets = Vocabulary(genre_set[train])
    year_ids, num_years = _buckets(year, 1920.0, 2000.0, 5.0)
    candidate = {
        "item": (items.ids(item), len(items)),
        "year": (np.where(ratings.year[item] > 0, year_ids, UNKNOWN_ID), num_years),
        "genre_set": (genre_sets.ids(genre_set), len(genre_sets)),
    }
    # A rating says more against what others gave the item before: 3 below them to 3 above, in halves.
    surprise = _buckets(ratings.rating - statistics["item_rating"], -3.0, 3.0, 0.5)
    event = {**candidate, "rating": (ratings.rating, NUM_RATINGS + 1), "surprise": surprise}
    streams = {"ratings": tuple(event), "past": ("item", "rating", "surprise")}
    longest = {"ratings": max_events, "past": max_past}

    schema = FeatureSchema(
        dense=(*statistics, "year", "age"),
        ids=tuple(IdFeature(name, size) for name, (_, size) in bags.items()),
        candidate=tuple(IdFeature(name, size) for name, (_, size) in candidate.items()),
        streams=tuple(
            EventStream(name, tuple(IdFeature(feature, event[feature][1]) for feature in features))
            for name, features in streams.items()
        ),
        tasks=TASKS,
    )
    return EventData(
        schema=schema,
        users=user,
        times=time,
        dense=dense.clip(-4.0, 4.0).astype(np.float32),
        ids=tuple(ragged for ragged, _ in bags.values()),
        candidate=tuple(ids for ids, _ in candidate.values()),
        streams=tuple(
            StreamData(
                tuple(event[feature][0][by_user] for feature in features), time[by_user], history.begin, history.end
            ).recent(longest[name])
            for name, features in streams.items()
        ),
        labels=np.stack([ratings.rating >= 4, ratings.rating == 5], axis=1).astype(np.float32),
        weights=np.ones(n, dtype=np.float32),
        splits=splits,
    )


def load(data_dir: Path, max_events: int = 50, max_past: int = 200) -> EventData:
    """Fetches (on first use), reads and builds MovieLens-100K; see `build`."""
    return build(read_ratings(fetch(data_dir)), max_events, max_past)
