"""Only what is strictly earlier: against loops that compare every pair of events, and against a planted leak."""

import numpy as np
import pytest

pytest.importorskip("torchrec")

from examples.data.events import StreamData, find_leak
from examples.data.history import history_slices, past_sums


@pytest.fixture
def log():
    """200 events of 7 users at 12 different times, so most share their time with another of the same user."""
    rng = np.random.default_rng(0)
    users, times = rng.integers(7, size=200), rng.integers(12, size=200) + 1000
    order = np.lexsort((times, users))
    return users[order], times[order]


def test_history_is_all_strictly_earlier_events(log):
    users, times = log
    asked_users = np.array([0, 3, 6, 6, 2, 9, -1])  # the last two are unknown
    asked_times = np.array([1005, 1000, 1011, 99999, 1004, 1005, 1005])
    begin, end = history_slices(users, times, asked_users, asked_times)
    for n, (user, time) in enumerate(zip(asked_users, asked_times, strict=True)):
        expected = np.flatnonzero((users == user) & (times < time))
        assert list(range(begin[n], end[n])) == expected.tolist()
    assert end[3] - begin[3] == (users == 6).sum()
    assert begin[5] == end[5] and begin[6] == end[6]


def test_history_between_two_times_and_without_events():
    begin, end = history_slices(np.array([4, 4]), np.array([10, 20]), np.array([4, 4, 4]), np.array([15, 20, 21]))
    assert (begin.tolist(), end.tolist()) == ([0, 0, 0], [1, 1, 2])
    nothing = np.empty(0, dtype=np.int64)
    begin, end = history_slices(nothing, nothing, np.array([1, 2]), np.array([5, 6]))
    assert (begin.tolist(), end.tolist()) == ([0, 0], [0, 0])


def test_unsorted_events_are_refused():
    with pytest.raises(ValueError, match="event 2 is not"):
        history_slices(np.array([1, 1, 1]), np.array([5, 6, 4]), np.array([1]), np.array([9]))
    with pytest.raises(ValueError, match="event 1 is not"):
        history_slices(np.array([2, 1]), np.array([5, 6]), np.array([1]), np.array([9]))


def test_past_sums_leave_out_tie_mates(log):
    users, times = log
    values = np.random.default_rng(1).integers(1, 6, size=(200, 2)).astype(np.float64)
    shuffle = np.random.default_rng(2).permutation(200)
    users, times = users[shuffle], times[shuffle]
    count, sums = past_sums(users, times, values)
    for n in range(200):
        earlier = (users == users[n]) & (times < times[n])
        assert count[n] == earlier.sum()
        assert sums[n].tolist() == values[earlier].sum(axis=0).tolist()


def test_a_planted_tie_mate_leak_is_found(log):
    users, times = log
    # What a causal mask by position does: everything of the user that stands before the event, tie-mates included.
    first = np.searchsorted(users, users)
    planted = StreamData((), times, first, np.arange(200))
    leak = find_leak(planted, times)
    assert leak is not None
    assert times[planted.end[leak] - 1] == times[leak]

    clean = StreamData((), times, *history_slices(users, times, users, times))
    assert find_leak(clean, times) is None
    # The planted one is a leak of some examples only; the two agree on the others.
    tied = planted.end != clean.end
    assert 0 < tied.sum() < 200
    assert leak == np.flatnonzero(tied)[0]


def test_a_history_out_of_order_is_found():
    # Events at 5, 9, 4: the last one is earlier than the example at 7, the second is not.
    stream = StreamData((), np.array([5, 9, 4]), np.array([0]), np.array([3]))
    assert find_leak(stream, np.array([7])) == 0
