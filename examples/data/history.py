"""What was known strictly before an event: history slices and running sums, with tie-mates left out.

Events that share their timestamp are known together or not at all. In MovieLens-100K three events in four share theirs
with another event of the same user, so a history cut by position would show a model what happens at the very moment it
predicts. Everything here compares times, never positions.

Shape legend: N examples, E events, K columns.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def history_slices(event_users: Ints, event_times: Ints, users: Ints, times: Ints) -> tuple[Ints, Ints]:
    """Where each example's history lies in the events of its stream.

    Args:
        event_users: (E,) sorted.
        event_times: (E,) sorted within each user.
        users: (N,) the examples' users, in any order.
        times: (N,) the examples' times.

    Returns:
        begin, end: (N,). Example n's history, oldest first, is ``events[begin[n]:end[n]]``: all of the user's events
        with ``event_times < times[n]``. Take the last M of them with ``max(begin, end - M)``.
    """
    unsorted = (np.diff(event_users) < 0) | ((np.diff(event_users) == 0) & (np.diff(event_times) < 0))
    if unsorted.any():
        raise ValueError(f"events must be sorted by user, then time; event {int(unsorted.argmax()) + 1} is not")
    begin = np.searchsorted(event_users, users, side="left")
    last = np.searchsorted(event_users, users, side="right")
    if not len(event_users) or not len(users):
        return begin, begin.copy()
    # One sorted key for (user, time): ranks instead of raw values, so that the product cannot overflow.
    all_times = np.unique(event_times)
    all_users = np.unique(event_users)
    width = len(all_times) + 1
    event_keys = np.searchsorted(all_users, event_users) * width + np.searchsorted(all_times, event_times)
    # A time between two event times gets the rank of the next later one: "rank < ours" then means "strictly earlier".
    keys = np.searchsorted(all_users, users) * width + np.searchsorted(all_times, times, side="left")
    end = np.searchsorted(event_keys, keys, side="left")
    # A user without events has the rank of the next one: no slice leaves the user's own events.
    return begin, end.clip(begin, last)


def past_sums(groups: Ints, times: Ints, values: Floats) -> tuple[Floats, Floats]:
    """Running statistics that are updated only after a whole timestamp group.

    Args:
        groups: (N,) whose statistics (a user, an item; all zeros for everyone's).
        times: (N,).
        values: (N, K) what an event adds.

    Returns:
        count (N,) and sums (N, K) over the group's events that are strictly earlier than each event.
    """
    order = np.lexsort((times, groups))
    group, time = groups[order], times[order]
    new_group = np.ones(len(order), dtype=bool)
    new_group[1:] = group[1:] != group[:-1]
    new_time = new_group.copy()
    new_time[1:] |= time[1:] != time[:-1]
    position = np.arange(len(order))
    group_start = np.maximum.accumulate(np.where(new_group, position, 0))
    tie_start = np.maximum.accumulate(np.where(new_time, position, 0))
    prefix = np.zeros((len(order) + 1, values.shape[1]))
    np.cumsum(values[order], axis=0, out=prefix[1:])
    count = np.empty(len(order))
    sums = np.empty(values.shape)
    count[order] = tie_start - group_start
    sums[order] = prefix[tie_start] - prefix[group_start]
    return count, sums
