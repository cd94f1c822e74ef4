"""The tile lists: every row exactly once, most work first, nothing asked of the host."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gemattn.kernels import interpreter
from gemattn.kernels.schedule import BLOCK, LENGTH_CLASSES, make_schedule, num_records, sanitize_offsets

LENGTHS = {
    "odd": [0, 1, 127, 128, 129, 0, 300, 257, 5],
    "empty": [0, 0, 0],
    "none": [],
    "one": [128],
    "tiny": [1] * 40,
    "long": [1000, 3, 1000, 128],
}


def offsets_of(lengths, first=0, dtype=torch.int64):
    return torch.tensor([first, *accumulate(lengths, initial=first)][1:], dtype=dtype)


def segments(offsets, rows):
    """(start, end) of every segment: sequences, leading slack, trailing slack."""
    return [*pairwise(offsets), (0, offsets[0]), (offsets[-1], rows)]


def covered_rows(tiles, offsets, rows):
    """How often each row of the tensor is in a record."""
    count = torch.zeros(rows, dtype=torch.int64)
    parts = segments(offsets, rows)
    for segment, block, length, _work in tiles.tolist():
        if segment == -1:
            continue
        start, end = parts[segment]
        assert length == end - start
        first = start + block * BLOCK
        assert first < end, "a record without rows"
        count[first : min(first + BLOCK, end)] += 1
    return count


@pytest.mark.parametrize("slack", [(0, 0), (3, 0), (0, 200), (130, 1)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_row_is_in_one_record(lengths, slack):
    offsets = offsets_of(lengths, slack[0])
    rows = sum(lengths) + sum(slack)
    schedule = make_schedule(offsets, query_rows=rows)
    assert schedule.q_tiles.shape == (rows // BLOCK + len(lengths) + 2, 4)
    assert schedule.q_tiles.dtype == torch.int32
    assert covered_rows(schedule.q_tiles, offsets.tolist(), rows).eq(1).all()


def test_the_bound_is_reached():
    # Every sequence ends one row past a full tile, and so does the leading slack.
    offsets = offsets_of([BLOCK + 1] * 3, BLOCK + 1)
    rows = 4 * (BLOCK + 1) + 1
    used = make_schedule(offsets, query_rows=rows).q_tiles[:, 0].ge(0).sum()
    assert used == num_records(rows, 3) == 9


def test_most_work_first_and_slack_last():
    q_lengths, kv_lengths = [10, 300, 10, 200], [500, 20, 0, 500]
    q_offsets, kv_offsets = offsets_of(q_lengths), offsets_of(kv_lengths)
    schedule = make_schedule(q_offsets, kv_offsets, query_rows=530, key_rows=1020)
    # By the keys that a query row meets; equal ones in the order of the batch.
    assert schedule.q_tiles.tolist()[:8] == [
        [0, 0, 10, 500],
        [3, 0, 200, 500],
        [3, 1, 200, 500],
        [1, 0, 300, 20],
        [1, 1, 300, 20],
        [1, 2, 300, 20],
        [2, 0, 10, 0],
        [5, 0, 10, 0],
    ]
    assert schedule.q_tiles[8:].eq(torch.tensor([-1, 0, 0, 0])).all()
    assert schedule.q_longer.tolist() == [0, 3, 3]
    # By the queries that a key row meets.
    order = [1, 3, 3, 3, 3, 0, 0, 0, 0]
    assert schedule.kv_tiles[:9, 0].tolist() == order
    assert schedule.kv_longer.tolist() == [0, 1, 5]
    assert covered_rows(schedule.kv_tiles, kv_offsets.tolist(), 1020).eq(1).all()


def test_self_attention_has_one_list():
    offsets = offsets_of([5, 200])
    schedule = make_schedule(offsets, query_rows=205)
    assert schedule.q_tiles is schedule.kv_tiles and schedule.q_offsets is schedule.kv_offsets
    cross = make_schedule(offsets, offsets.clone(), query_rows=205, key_rows=205)
    for ours, theirs in zip(schedule, cross, strict=True):
        assert torch.equal(ours, theirs)


def test_shared_query():
    kv_offsets = offsets_of([3, 0, 200])
    schedule = make_schedule(None, kv_offsets, query_rows=130, key_rows=210, shared_query=True)
    assert schedule.q_offsets.tolist() == [0, 130, 260, 390]
    assert schedule.q_tiles[:, :2].tolist() == [[2, 0], [2, 1], [0, 0], [0, 1], [1, 0], [1, 1], [-1, 0], [-1, 0]]
    assert schedule.q_tiles[:, 2:].tolist() == [[130, 200]] * 2 + [[130, 3]] * 2 + [[130, 0]] * 2 + [[0, 0]] * 2
    assert schedule.kv_tiles[:4].tolist() == [[0, 0, 3, 130], [2, 0, 200, 130], [2, 1, 200, 130], [4, 0, 7, 0]]
    assert schedule.q_longer.tolist() == [0, 0, 2] and schedule.kv_longer.tolist() == [0, 0, 3]


def test_length_classes_end_at_their_lengths():
    lengths = [128, 257, 129, 256, 1, 0, 512, 513]
    schedule = make_schedule(offsets_of(lengths), query_rows=sum(lengths))
    assert schedule.q_longer.tolist() == [5, 5 + 4 + 3, 5 + 4 + 3 + 2 + 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_offsets_are_clamped_and_made_monotone(dtype):
    offsets = torch.tensor([-4, 20, 7, 1000, 30], dtype=dtype)
    assert sanitize_offsets(offsets, 150).tolist() == [0, 20, 20, 150, 150]
    schedule = make_schedule(offsets, query_rows=150)
    assert schedule.q_offsets.dtype == torch.int64
    assert covered_rows(schedule.q_tiles, schedule.q_offsets.tolist(), 150).eq(1).all()
    assert offsets.tolist() == [-4, 20, 7, 1000, 30]


class RefuseSync(TorchDispatchMode):
    """Refuses what reads a value on the host or gives a shape that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        refused = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
        assert name not in refused, f"{name} needs a host sync"
        assert torch.Tag.data_dependent_output not in func.tags, f"{name} needs a host sync"
        assert torch.Tag.dynamic_output_shape not in func.tags, f"{name} needs a host sync"
        self.calls += 1
        return func(*args, **(kwargs or {}))

    calls = 0


def test_no_host_sync():
    offsets, kv_offsets = offsets_of([3, 200, 0]), offsets_of([0, 9, 130])
    with RefuseSync() as mode:
        make_schedule(offsets, query_rows=210)
        self_calls = mode.calls
        make_schedule(offsets, kv_offsets, query_rows=210, key_rows=139)
        make_schedule(None, kv_offsets, query_rows=5, key_rows=139, shared_query=True)
    assert self_calls <= 44, "every call of these costs a launch"
    with RefuseSync(), pytest.raises(AssertionError, match="host sync"):
        offsets[0].item()


def test_compiles_as_one_graph():
    compiled = torch.compile(
        lambda offsets, x: make_schedule(offsets, query_rows=x.shape[0]), fullgraph=True, dynamic=True, backend="eager"
    )
    for lengths in ([3, 200, 0], [7, 7, 7, 400]):
        offsets, x = offsets_of(lengths), torch.zeros(sum(lengths) + 1, 2)
        for ours, expected in zip(compiled(offsets, x), make_schedule(offsets, query_rows=len(x)), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("kind", "message", "args", "kwargs"),
    [
        (ValueError, "q_offsets is None", (None,), {"query_rows": 1}),
        (ValueError, "q_offsets must be None", (torch.zeros(2).long(),), {"query_rows": 1, "shared_query": True}),
        (ValueError, "kv_offsets is None", (None,), {"query_rows": 1, "shared_query": True}),
        (TypeError, "q_offsets is torch.float32", (torch.zeros(2),), {"query_rows": 1}),
        (TypeError, "q_offsets is list", ([0, 1],), {"query_rows": 1}),
        (ValueError, r"q_offsets has shape \(1, 2\)", (torch.zeros(1, 2).long(),), {"query_rows": 1}),
        (ValueError, "q_offsets is empty", (torch.zeros(0).long(),), {"query_rows": 1}),
        (TypeError, "query_rows is float", (torch.zeros(2).long(),), {"query_rows": 1.0}),
        (ValueError, "query_rows is -1", (torch.zeros(2).long(),), {"query_rows": -1}),
        (ValueError, "key_rows is None", (torch.zeros(2).long(), torch.zeros(2).long()), {"query_rows": 1}),
        (
            ValueError,
            "kv_offsets has 3 entries, q_offsets 2",
            (torch.zeros(2).long(), torch.zeros(3).long()),
            {"query_rows": 1, "key_rows": 1},
        ),
    ],
)
def test_bad_arguments(kind, message, args, kwargs):
    with pytest.raises(kind, match=message):
        make_schedule(*args, **kwargs)


def test_check_refuses_another_batch():
    shapes = {"query_rows": 300, "key_rows": 300, "shared_query": False, "device": torch.device("cpu")}
    schedule = make_schedule(offsets_of([100, 200]), query_rows=300)
    schedule.check(sequences=2, **shapes)
    with pytest.raises(ValueError, match=r"schedule\.q_offsets .* 3 sequences"):
        schedule.check(sequences=3, **shapes)
    with pytest.raises(ValueError, match=r"schedule\.kv_tiles .* 500 key rows"):
        schedule.check(sequences=2, **(shapes | {"key_rows": 500}))
    with pytest.raises(ValueError, match=r"schedule\.q_tiles is torch\.int64"):
        schedule._replace(q_tiles=schedule.q_tiles.long()).check(sequences=2, **shapes)
    with pytest.raises(ValueError, match=r"is on cpu; want the tensors' device meta"):
        schedule.check(sequences=2, **(shapes | {"device": torch.device("meta")}))


LISTS = {
    "self": lambda q, kv, rows: (q, q, rows[0], rows[0]),
    "cross": lambda q, kv, rows: (q, kv.int(), *rows),
    "shared": lambda q, kv, rows: (None, kv, 257, rows[1]),
    "bad offsets": lambda q, kv, rows: (torch.randint(-500, 4000, q.shape), kv, rows[0], rows[1] // 2),
}


@pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("sequences", [0, 1, 129, 700])
def test_one_launch_builds_the_same_lists(kind, sequences):
    pytest.importorskip("triton")
    from gemattn.kernels.triton.tile_list import tile_lists

    lengths = torch.randint(0, 700, (2, sequences)) * torch.rand(2, sequences).gt(0.2)
    q_offsets, kv_offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    rows = (int(q_offsets[-1]) + 300, int(kv_offsets[-1]) + 3)
    q_offsets, kv_offsets, query_rows, key_rows = LISTS[kind](q_offsets, kv_offsets, rows)
    wanted = make_schedule(
        q_offsets, kv_offsets, query_rows=query_rows, key_rows=key_rows, shared_query=q_offsets is None
    )
    counts = wanted.q_tiles.shape[0], wanted.kv_tiles.shape[0]
    out_rows = query_rows * sequences if q_offsets is None else query_rows
    lists = tile_lists(q_offsets, kv_offsets, out_rows, key_rows, *counts, BLOCK)
    sides = ((0, 2, 4), (1, 3, 5)) if q_offsets is not kv_offsets else ((0, 2, 4),)
    for starts, tiles, longer in sides:
        assert torch.equal(lists[starts], wanted[starts])
        assert sorted(lists[tiles].tolist()) == sorted(wanted[tiles].tolist())
        assert torch.equal(lists[longer], wanted[longer])
        work = [work for segment, _, _, work in lists[tiles].tolist() if 0 <= segment < sequences]
        # Classes are half a power of two wide.
        assert all(later <= 1.5 * earlier + 1 for earlier, later in pairwise(work))
        for length, count in zip(LENGTH_CLASSES, lists[longer].tolist(), strict=True):
            assert all(w > length for w in work[:count]) and all(w <= length for w in work[count:])


@pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 513])
def test_powers_of_two_end_their_class(length):
    pytest.importorskip("triton")
    from gemattn.kernels.triton.tile_list import tile_lists

    offsets = torch.tensor([0, length])
    longer = tile_lists(offsets, offsets, length, length, *[num_records(length, 1)] * 2, BLOCK)[4]
    assert longer.tolist() == [-(-length // BLOCK) if length > limit else 0 for limit in LENGTH_CLASSES]
