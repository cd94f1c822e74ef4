"""The tile lists of `gemattn.kernels.schedule`, in one launch and without a sync.

A stable counting sort over length classes, half a power of two wide: near enough to "longest first" for the balance of
a grid. Every program reads all offsets (they are few and stay in cache) and writes the records of its own sequences.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemattn.kernels.launcher import Launcher

_CHUNK = 128
"""Sequences a program writes."""
_SCAN = 512
"""Sequences a program reads at a time."""
_CLASSES: tl.constexpr = tl.constexpr(32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sequences(ptr, rows, index, num_sequences, carry, SHARED: tl.constexpr):
    """(start, length, end) of sequences `index`: clamped, non-decreasing; `carry` is the largest offset before."""
    valid = index < num_sequences
    if SHARED:
        per_sequence = rows // tl.maximum(num_sequences, 1)
        start = index.to(tl.int64) * per_sequence
        length = tl.where(valid, per_sequence, 0)
        end = start + length
    else:
        start = tl.load(ptr + index, mask=valid, other=0).to(tl.int64)
        start = tl.minimum(tl.maximum(start, carry), rows)
        start = tl.associative_scan(start, 0, _larger)
        end = tl.load(ptr + index + 1, mask=valid, other=0).to(tl.int64)
        end = tl.maximum(tl.minimum(end, rows), start)
        length = tl.where(valid, end - start, 0)
    return start, length, tl.where(valid, end, 0)


@triton.jit
def _length_class(length):
    """0 for the longest lengths, _CLASSES - 1 for 0 to 2; half a power of two each, a power of two the last of its own.

    From the bits of a float, as a rounded logarithm would misplace lengths next to a power of two.
    """
    bits = tl.maximum(length - 1, 1).to(tl.float32).to(tl.int32, bitcast=True)
    half_powers = 2 * ((bits >> 23) - 127) + ((bits & 0x7FFFFF) >= 0x3504F3).to(tl.int32)
    return _CLASSES - 1 - tl.minimum(half_powers, _CLASSES - 1)


@triton.jit
def _build(
    own_ptr,
    other_ptr,
    starts_ptr,
    tiles_ptr,
    longer_ptr,
    own_rows,
    other_rows,
    num_sequences,
    num_records,
    OWN_SHARED: tl.constexpr,
    OTHER_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
):
    program = tl.program_id(0)
    own_first = program * CHUNK
    classes = tl.arange(0, _CLASSES)
    total = tl.zeros([_CLASSES], tl.int32)
    before = tl.zeros([_CLASSES], tl.int32)
    own_rows = own_rows.to(tl.int64)
    other_rows = other_rows.to(tl.int64)
    own_carry = tl.zeros([], tl.int64)
    other_carry = tl.zeros([], tl.int64)
    own_carry_here = tl.zeros([], tl.int64)
    other_carry_here = tl.zeros([], tl.int64)
    for scanned in tl.range(0, num_sequences, SCAN):
        scan = scanned + tl.arange(0, SCAN)
        earlier = scan < own_first
        _, scan_length, own_end = _sequences(own_ptr, own_rows, scan, num_sequences, own_carry, OWN_SHARED)
        _, scan_work, other_end = _sequences(other_ptr, other_rows, scan, num_sequences, other_carry, OTHER_SHARED)
        own_carry_here = tl.maximum(own_carry_here, tl.max(tl.where(earlier, own_end, 0), 0))
        other_carry_here = tl.maximum(other_carry_here, tl.max(tl.where(earlier, other_end, 0), 0))
        own_carry = tl.maximum(own_carry, tl.max(own_end, 0))
        other_carry = tl.maximum(other_carry, tl.max(other_end, 0))
        scan_count = ((scan_length + (BLOCK - 1)) // BLOCK).to(tl.int32)
        scan_class = _length_class(scan_work)
        scan_counts = tl.where(scan_class[:, None] == classes[None, :], scan_count[:, None], 0)
        total += tl.sum(scan_counts, 0)
        before += tl.sum(tl.where(earlier[:, None], scan_counts, 0), 0)

    lane = tl.arange(0, CHUNK)
    index = own_first + lane
    start, length, _ = _sequences(own_ptr, own_rows, index, num_sequences, own_carry_here, OWN_SHARED)
    _, work, _ = _sequences(other_ptr, other_rows, index, num_sequences, other_carry_here, OTHER_SHARED)
    tl.store(starts_ptr + index, start, mask=index < num_sequences)
    count = ((length + (BLOCK - 1)) // BLOCK).to(tl.int32)
    length_class = _length_class(work)
    in_class = length_class[:, None] == classes[None, :]
    counts = tl.where(in_class, count[:, None], 0)
    place = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(counts, 0) - counts
    place = tl.sum(tl.where(in_class, place, 0), 1)
    for block in tl.range(0, tl.max(count, 0)):
        record = tiles_ptr + 4 * (place + block)
        tl.store(record, index, mask=block < count)
        tl.store(record + 1, block, mask=block < count)
        tl.store(record + 2, length.to(tl.int32), mask=block < count)
        tl.store(record + 3, work.to(tl.int32), mask=block < count)

    # What is left over: slack before the first sequence, slack past the last one, unused records.
    used = tl.sum(total, 0)
    if OWN_SHARED:
        first = tl.zeros([], tl.int64)
        last = own_rows
    else:
        first = tl.minimum(tl.maximum(tl.load(own_ptr).to(tl.int64), 0), own_rows)
        last = tl.maximum(own_carry, first)
    if program == 0:
        tl.store(starts_ptr + num_sequences, last)
        for position in tl.static_range(3):  # LENGTH_CLASSES: 2 ** 9, 2 ** 8, 2 ** 7
            longer = tl.where(classes < _CLASSES - 2 * (9 - position), total, 0)
            tl.store(longer_ptr + position, tl.sum(longer, 0))
    leading = ((first + (BLOCK - 1)) // BLOCK).to(tl.int32)
    trailing = ((own_rows - last + (BLOCK - 1)) // BLOCK).to(tl.int32)
    for position in tl.range(used + own_first, num_records, tl.num_programs(0) * CHUNK):
        slot = position + lane
        rank = slot - used
        is_leading = rank < leading
        is_slack = rank < leading + trailing
        segment = tl.where(is_leading, num_sequences, tl.where(is_slack, num_sequences + 1, -1))
        block_of_slack = tl.where(is_leading, rank, tl.where(is_slack, rank - leading, 0))
        slack_rows = tl.where(is_leading, first, tl.where(is_slack, own_rows - last, 0)).to(tl.int32)
        tl.store(tiles_ptr + 4 * slot, segment, mask=slot < num_records)
        tl.store(tiles_ptr + 4 * slot + 1, block_of_slack, mask=slot < num_records)
        tl.store(tiles_ptr + 4 * slot + 2, slack_rows, mask=slot < num_records)
        tl.store(tiles_ptr + 4 * slot + 3, tl.zeros_like(slack_rows), mask=slot < num_records)


@triton.jit(do_not_specialize=["q_rows", "kv_rows", "num_sequences", "num_q_records", "num_kv_records"])
def tile_list_kernel(
    q_ptr,
    kv_ptr,
    q_starts_ptr,
    kv_starts_ptr,
    q_tiles_ptr,
    kv_tiles_ptr,
    q_longer_ptr,
    kv_longer_ptr,
    q_rows,
    kv_rows,
    num_sequences,
    num_q_records,
    num_kv_records,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Both lists of a `Schedule`: program axis 1 picks the side. ``q_rows`` are the rows of the output."""
    if tl.program_id(1) == 0:
        _build(
            q_ptr, kv_ptr, q_starts_ptr, q_tiles_ptr, q_longer_ptr, q_rows, kv_rows, num_sequences, num_q_records,
            SHARED, False, BLOCK, CHUNK, SCAN,
        )  # fmt: skip
    else:
        _build(
            kv_ptr, q_ptr, kv_starts_ptr, kv_tiles_ptr, kv_longer_ptr, kv_rows, q_rows, num_sequences, num_kv_records,
            False, SHARED, BLOCK, CHUNK, SCAN,
        )  # fmt: skip


@functools.cache
def _launcher(shared: bool, block: int) -> Launcher:
    return Launcher(tile_list_kernel, SHARED=shared, BLOCK=block, CHUNK=_CHUNK, SCAN=_SCAN, num_warps=8)


def tile_lists(
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    q_rows: int,
    kv_rows: int,
    num_q_records: int,
    num_kv_records: int,
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of a `Schedule`; those of the key side are not written in self-attention (one offsets tensor).

    ``q_offsets`` None: a shared query, ``q_rows`` rows of output in equal shares.
    """
    device = kv_offsets.device
    same = q_offsets is kv_offsets
    sequences = kv_offsets.shape[0] - 1
    q_starts = torch.empty(sequences + 1, dtype=torch.int64, device=device)
    q_tiles = torch.empty((num_q_records, 4), dtype=torch.int32, device=device)
    kv_starts = torch.empty_like(q_starts)
    kv_tiles = torch.empty((num_kv_records, 4), dtype=torch.int32, device=device)
    q_longer = torch.empty(3, dtype=torch.int32, device=device)
    kv_longer = torch.empty_like(q_longer)
    kv_offsets = kv_offsets.contiguous()
    shared = q_offsets is None
    q_offsets = kv_offsets if q_offsets is None or same else q_offsets.contiguous()
    with torch.cuda.device_of(kv_offsets):
        _launcher(shared, block)(
            (max(1, triton.cdiv(sequences, _CHUNK)), 1 if same else 2),
            (q_offsets, kv_offsets, q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer),
            (q_rows, kv_rows, sequences, num_q_records, num_kv_records),
        )
    return q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer
