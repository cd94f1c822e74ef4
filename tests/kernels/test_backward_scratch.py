"""What surrounds the fused Hopper backward, in Triton's interpreter: statistics, scratch and its order of values."""

import math

import pytest
import torch

from gemattn.kernels import interpreter
from gemattn.kernels.schedule import make_schedule

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 (where it can be imported)

pytest.importorskip("triton.language.extra.tlx", reason="needs fbtriton, this triton has no TLX")
from gemattn.kernels.tlx import statistics  # noqa: E402 (where it can be imported)
from gemattn.kernels.tlx.hopper import backward_scratch  # noqa: E402 (where it can be imported)

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="Triton compiles for the GPU here")

HEADS, HEAD_DIM, SCALE = 2, 64, 0.5


def register_order(x):
    """(64, width) as wgmma leaves it: thread 4 r + q of warp w has rows 16 w + r and + 8, columns 8 j + 2 q and + 1."""
    warps, columns = 4, x.shape[1] // 8
    index = torch.tensor(
        [
            (16 * w + 8 * h + r) * x.shape[1] + 8 * j + 2 * q + e
            for w in range(warps)
            for j in range(columns)
            for r in range(8)
            for q in range(4)
            for h in range(2)
            for e in range(2)
        ]
    )
    return x.flatten()[index]


def test_statistics_and_scratch_of_own_queries():
    q_lengths, kv_lengths = [0, 70, 0, 130, 3], [5, 60, 3, 0, 3]
    offsets, kv_offsets = (torch.tensor([0, *x]).cumsum(0) for x in (q_lengths, kv_lengths))
    slack, sequences = 70, len(q_lengths)
    rows = sum(q_lengths) + slack
    schedule = make_schedule(offsets, kv_offsets, query_rows=rows, key_rows=sum(kv_lengths))
    out, dout = torch.randn(2, rows, HEADS, HEAD_DIM)
    lse, dlse = torch.randn(2, HEADS, rows)
    out[-slack:] = math.nan
    size = (rows // 64 + sequences + 1) * HEADS * 64
    stat, delta = torch.full((2, size), math.nan)
    scratch = torch.full((size * HEAD_DIM,), math.nan)
    grid = schedule.q_tiles.shape[0] * HEADS
    lists = (schedule.q_tiles, schedule.q_longer, schedule.q_offsets)
    sizes = (grid, HEADS, sequences)
    statistics.prepare_kernel[(grid,)](
        *lists, out, dout, lse, dlse, stat, delta, *sizes, rows, HEADS * HEAD_DIM, HEAD_DIM, 0,
        HEAD_DIM=HEAD_DIM, HAS_DLSE=True, HAS_RIGHT=True, END=-1,
    )  # fmt: skip

    wanted = torch.zeros(rows, HEADS, HEAD_DIM)
    for sequence, (n_q, n_kv) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        seeing = max(0, n_q - n_kv) if n_kv else n_q  # causal
        for block in range(-(-n_q // 64)):
            count = min(64, n_q - 64 * block)
            first = int(offsets[sequence]) + 64 * block
            sees = torch.arange(64 * block, 64 * block + count) >= seeing
            for head in range(HEADS):
                place = (int(offsets[sequence]) // 64 + sequence + block) * HEADS + head
                block_stat, block_delta = stat[64 * place : 64 * place + 64], delta[64 * place : 64 * place + 64]
                rows_of = (slice(first, first + count), head)
                expected = (out[rows_of] * dout[rows_of]).sum(1) - dlse[head, rows_of[0]]
                torch.testing.assert_close(block_delta[:count], expected * sees, rtol=0, atol=1e-4)
                torch.testing.assert_close(
                    block_stat[:count], torch.where(sees, lse[head, rows_of[0]] / math.log(2), math.inf)
                )
                assert (block_stat[count:] == math.inf).all() and (block_delta[count:] == 0).all()
                place = (int(offsets[sequence]) // 64 + sequence) * HEADS + head * -(-n_q // 64) + block
                values = scratch[64 * HEAD_DIM * place : 64 * HEAD_DIM * (place + 1)]
                x = torch.randn(64, HEAD_DIM)
                values.copy_(register_order(x))
                wanted[rows_of] = SCALE * x[:count] * sees[:, None]
    dq = torch.full((rows, HEADS, HEAD_DIM), math.nan)
    backward_scratch.finish_kernel[(grid,)](
        *lists, scratch, dq, *sizes, 0, SCALE, HEAD_DIM=HEAD_DIM, HAS_RIGHT=True, END=-1
    )
    assert torch.equal(dq, wanted)


def test_partial_sums_of_a_shared_query():
    rows, chunks, blocks = 130, 3, 3
    x = torch.randn(chunks, HEADS, blocks, 64, HEAD_DIM)
    scratch = torch.cat([register_order(block) for block in x.flatten(0, 2)])
    dq = torch.full((rows, HEADS, HEAD_DIM), math.nan)
    backward_scratch.add_partials_kernel[(blocks * HEADS * 4,)](
        scratch, dq, HEADS, chunks, rows, SCALE, HEAD_DIM=HEAD_DIM
    )
    wanted = SCALE * x.sum(0).flatten(1, 2)[:, :rows].transpose(0, 1)
    torch.testing.assert_close(dq, wanted, rtol=0, atol=1e-5)


@triton.jit
def split_kernel(
    tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows, walk_keys, keys_above,
    COUNTED: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    backward_scratch.split_records(
        tl.program_id(0), tl.num_programs(0), tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows,
        walk_keys, keys_above, COUNTED, WRITTEN,
    )  # fmt: skip


WALK = (300, 900)
UNUSED = [-1, 0, 0, 0]


def check_split(records, sequences, keys_above, programs, counted=32, written=16):
    """Both lists against a plain walk over the records; how many are in each."""
    first, rest = torch.full((2, len(records) + 1, 4), 77, dtype=torch.int32)
    split_kernel[(programs,)](
        records, first, rest, len(records), sequences, *WALK, keys_above, COUNTED=counted, WRITTEN=written
    )
    wanted_first, wanted_rest = [], []
    for record in records.tolist():
        segment, block, n_kv, n_q = record
        if segment >= sequences:
            wanted_first += [record] if keys_above < 0 else []
        elif segment >= 0 and n_kv > keys_above:
            if block == 0:
                wanted_first.append(record)
            elif n_q > WALK[0] or n_kv > WALK[1]:
                wanted_rest.append(record)
    for found, wanted in ((first, wanted_first), (rest, wanted_rest)):
        unused = len(records) - len(wanted)
        assert found.tolist() == [*wanted, *[UNUSED] * unused, [77] * 4]
    return len(wanted_first), len(wanted_rest)


@pytest.mark.parametrize("keys_above", [-1, 0, 512])
@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("slack", [0, 200])
def test_lists_of_first_tiles_and_of_the_rest(slack, cross, programs, keys_above):
    """Empty and long sequences, walked and not: by their queries, and by their keys."""
    lengths = [200, 0, 700, 5, 300, 1100, 513, 512] * 6
    kv_offsets = torch.tensor([0, *lengths]).cumsum(0) + slack
    queries = [40, 301, 0, 300, 7, 520, 1] * 7
    offsets = torch.tensor([0, *queries[: len(lengths)]]).cumsum(0) if cross else kv_offsets
    schedule = make_schedule(
        offsets, kv_offsets, query_rows=int(offsets[-1]) + slack, key_rows=int(kv_offsets[-1]) + slack
    )
    firsts, rests = check_split(schedule.kv_tiles, len(lengths), keys_above, programs)
    assert firsts == sum(n > max(keys_above, 0) for n in lengths) + (2 * -(-slack // 128) if keys_above < 0 else 0)
    assert rests > 0


@pytest.mark.parametrize("keys_above", [-1, 512])
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 32, 33, 95, 96, 97, 300])
def test_lists_of_any_length(count, programs, keys_above):
    """Around the sizes of what is read and written at a time, and of stretches of programs; no schedule's order."""
    generator = torch.Generator().manual_seed(count)
    records = torch.stack(
        [torch.randint(*bounds, (count,), generator=generator) for bounds in ((-1, 12), (0, 3), (400, 1000), (0, 500))],
        dim=1,
    ).int()
    check_split(records, 10, keys_above, programs)


def test_all_first_and_all_rest():
    records = torch.tensor([[0, 0, 2000, 500]]).expand(70, 4).int().contiguous()
    assert check_split(records, 1, -1, 3) == (70, 0)
    records[:, 1] = 4
    assert check_split(records, 1, -1, 3) == (0, 70)
    assert check_split(records, 0, -1, 3) == (70, 0), "slack alone"


def test_statistics_and_lists_in_one_launch():
    lengths, slack = [700, 0, 130, 900, 520], 70
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows, sequences = sum(lengths) + slack, len(lengths)
    schedule = make_schedule(offsets, query_rows=rows)
    out, dout = torch.randn(2, rows, HEADS, HEAD_DIM)
    lse, dlse = torch.randn(2, HEADS, rows)
    size = (rows // 64 + sequences + 1) * HEADS * 64
    wanted, found = torch.full((2, 2, size), math.nan)
    q_lists = (schedule.q_tiles, schedule.q_longer, schedule.q_offsets)
    records = schedule.kv_tiles
    tiles = len(records) * HEADS
    sizes = (tiles, HEADS, sequences, rows, HEADS * HEAD_DIM, HEAD_DIM)
    statistics.prepare_kernel[(3,)](
        *q_lists, out, dout, lse, dlse, *wanted, *sizes, -1, HEAD_DIM=HEAD_DIM, HAS_DLSE=True, HAS_RIGHT=False, END=0
    )
    assert wanted.isfinite().any() and wanted.isnan().any()
    lists = torch.full((2, 2, *records.shape), 77, dtype=torch.int32)
    backward_scratch.prepare_fused_kernel[(2 + 3,)](
        *q_lists, out, dout, lse, dlse, *found, records, *lists[0], *sizes, 2, len(records), *WALK, 512,
        HEAD_DIM=HEAD_DIM, HAS_DLSE=True, END=0,
    )  # fmt: skip
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    split_kernel[(1,)](records, *lists[1], len(records), sequences, *WALK, 512, COUNTED=64, WRITTEN=64)
    assert torch.equal(lists[0], lists[1]) and (lists != 77).all()
