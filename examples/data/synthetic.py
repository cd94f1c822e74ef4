"""A made-up event log for a machine without a network, and for tests: two streams, skewed lengths, something to learn.

Every user has a few favourite categories. Clicks fall mostly on them, impressions on anything, so the clicked items of
a history say what a user likes, and whether the candidate is liked follows from its category and its own quality: a
model that relates candidate and history does better than one that sees neither. Lengths are log-normal, and one user in
ten has no event at all.
"""

import numpy as np

from examples.data.events import EventData, Ragged, StreamData
from examples.data.history import Ints, history_slices
from models.features import EventStream, FeatureSchema, IdFeature

NUM_CATEGORIES = 20
NUM_FAVOURITES = 3
NUM_SEGMENTS = 8
NUM_SURFACES = 4
DURATION = 30 * 24 * 3600  # seconds that the log spans
TASKS = ("click", "conversion")


def load(
    seed: int = 0,
    num_examples: int = 20_000,
    num_users: int = 2_000,
    num_items: int = 1_000,
    max_events: int = 50,
) -> EventData:
    """The same log for the same arguments, split 80 / 10 / 10 by time as real ones are.

    Args:
        seed: of everything that is drawn.
        num_examples: examples in all.
        num_users: users, one in ten of them without any event.
        num_items: candidates and items of events.
        max_events: histories are cut to their latest ``max_events`` a stream.
    """
    rng = np.random.default_rng(seed)
    category = rng.integers(NUM_CATEGORIES, size=num_items)
    quality = rng.normal(size=num_items)
    # Argsort of noise: distinct favourites for each user.
    favourites = rng.random((num_users, NUM_CATEGORIES)).argsort(axis=1)[:, :NUM_FAVOURITES]
    likes = np.zeros((num_users, NUM_CATEGORIES), dtype=bool)
    np.put_along_axis(likes, favourites, True, axis=1)
    segment = rng.integers(NUM_SEGMENTS, size=num_users)
    silent = rng.random(num_users) < 0.1

    def draw_events(median: float, share_liked: float) -> tuple[Ints, Ints, Ints]:
        """Users, times and items of a stream, sorted by user, then time."""
        lengths = np.where(silent, 0, rng.lognormal(np.log(median), 1.0, num_users)).astype(np.int64)
        users = np.repeat(np.arange(num_users), lengths)
        times = rng.integers(DURATION, size=len(users))
        items = rng.integers(num_items, size=len(users))
        # A second try for the events meant to be liked: redraw those that missed, a few times.
        meant = rng.random(len(users)) < share_liked
        for _ in range(8):
            missed = np.flatnonzero(meant & ~likes[users, category[items]])
            items[missed] = rng.integers(num_items, size=len(missed))
        order = np.lexsort((times, users))
        return users[order], times[order], items[order]

    # Busy users get more examples, and every example has one of the log's own times.
    users = rng.choice(num_users, size=num_examples, p=_skewed(rng, num_users))
    times = np.sort(rng.integers(1, DURATION + 1, size=num_examples))
    items = rng.integers(num_items, size=num_examples)
    liked = likes[users, category[items]]
    score = 3.0 * liked + 0.8 * quality[items] + 0.3 * (segment[users] % 2) - 1.5
    click = rng.random(num_examples) < _sigmoid(score)
    conversion = click & (rng.random(num_examples) < _sigmoid(quality[items] - 0.5))

    streams, specs, gaps = [], [], {}
    for name, median, share_liked in (("clicks", 15.0, 0.8), ("impressions", 40.0, 0.0)):
        event_users, event_times, event_items = draw_events(median, share_liked)
        begin, end = history_slices(event_users, event_times, users, times)
        surface = rng.integers(1, NUM_SURFACES + 1, size=len(event_users))
        ids = (event_items + 1, category[event_items] + 1, surface)
        streams.append(StreamData(ids, event_times, begin, end).recent(max_events))
        surface_spec = IdFeature("surface", NUM_SURFACES + 1)
        specs.append(EventStream(name, (*_item_specs(num_items), surface_spec)))
        gaps[f"{name}_log_count"] = np.log1p(end - begin)
        latest = event_times[np.maximum(end - 1, 0)] if len(event_times) else times
        gaps[f"{name}_log_since_last"] = np.log1p(np.where(end > begin, times - latest, 0))

    schema = FeatureSchema(
        dense=tuple(gaps),
        ids=(
            IdFeature("user", num_users + 1),
            IdFeature("segment", NUM_SEGMENTS + 1),
            IdFeature("interests", NUM_CATEGORIES + 1),
        ),
        candidate=_item_specs(num_items),
        streams=tuple(specs),
        tasks=TASKS,
    )
    dense = np.stack(list(gaps.values()), axis=1)
    dense = (dense - dense.mean(axis=0)) / (dense.std(axis=0) + 1e-6)
    first, second = num_examples * 8 // 10, num_examples * 9 // 10
    return EventData(
        schema=schema,
        users=users,
        times=times,
        dense=dense.astype(np.float32),
        ids=(
            Ragged.single(users + 1),
            Ragged.single(segment[users] + 1),
            _interests(rng, favourites, users),
        ),
        candidate=(items + 1, category[items] + 1),
        streams=tuple(streams),
        labels=np.stack([click, conversion], axis=1).astype(np.float32),
        weights=np.ones(num_examples, dtype=np.float32),
        splits={
            "train": np.arange(first),
            "valid": np.arange(first, second),
            "test": np.arange(second, num_examples),
        },
    )


def _item_specs(num_items: int) -> tuple[IdFeature, IdFeature]:
    return IdFeature("item", num_items + 1), IdFeature("category", NUM_CATEGORIES + 1)


def _interests(rng: np.random.Generator, favourites: Ints, users: Ints) -> Ragged:
    """A multi-valued feature: most users tell one of their favourites, some two, some none."""
    told = rng.integers(NUM_FAVOURITES, size=len(favourites))
    lengths = told[users]
    owner = np.repeat(users, lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    which = np.arange(len(owner)) - np.repeat(offsets[:-1], lengths)
    return Ragged(favourites[owner, which] + 1, offsets)


def _skewed(rng: np.random.Generator, size: int) -> np.ndarray:
    weight = rng.lognormal(sigma=1.0, size=size)
    return weight / weight.sum()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
