"""What a tile of the gradient kernel owns and what streams by it, and how its sums leave tensor memory."""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import mul_f32x2, read_descriptor, tlx
from gemattn.kernels.tlx.blackwell.descriptors import DK, DQ, DV
from gemattn.kernels.tlx.common import (
    RECORD_ROWS,
    ROWS,
    clear_rows,
    first_seeing_row,
    key_blocks,
    query_blocks,
    read_tile,
)

BLOCK: tl.constexpr = ROWS  # streamed rows


@triton.jit
def read_own(tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED: tl.constexpr):
    """`read_tile`; with SHARED, `tile` is a sequence and the program has its rows and head for all of them."""
    if SHARED:
        sequence = tl.minimum(tile, num_sequences - 1)
        start = tl.load(offsets_ptr + sequence)
        n_q = (tl.load(offsets_ptr + sequence + 1) - start).to(tl.int32)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - tl.load(kv_offsets_ptr + sequence)).to(tl.int32)
        segment = tl.where(tile < num_sequences, sequence, -1)
        head = tl.program_id(1) % heads
        first = tl.program_id(1) // heads * RECORD_ROWS
    else:
        segment, head, first, n_q, n_kv, start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
    return segment, head, first, n_q, n_kv, start


@triton.jit
def streamed_blocks(
    segment, first, own, other, num_sequences, window_left, window_right, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(begin, first mask-free, end of mask-free, end) of the streamed blocks; none of slack."""
    last = tl.minimum(first + RECORD_ROWS, own) - 1
    if KEYS:
        begin, free_begin, free_end, end = query_blocks(
            first, last, other, own, window_left, window_right, BLOCK, HAS_LEFT, HAS_RIGHT
        )
    else:
        begin, free_begin, free_end, end = key_blocks(
            first, last, own, other, window_left, window_right, BLOCK, HAS_LEFT, HAS_RIGHT
        )
    return begin, free_begin, free_end, tl.where(segment < num_sequences, end, begin)


@triton.jit
def _stage(
    total, buf, rows, from_row, scale, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A sum, scaled and rounded, into shared memory; rows before `from_row` see no key and get zeros."""
    for piece in tl.static_range(HEAD_DIM // PIECE):
        x = mul_f32x2(tlx.local_load(tlx.subslice(total, piece * PIECE, PIECE)), scale)
        x = tl.where((rows >= from_row)[:, None], x, 0.0)
        tlx.local_store(tlx.local_slice(buf, [0, piece * PIECE], [RECORD_ROWS, PIECE]), x.to(DTYPE))


@triton.jit
def write(
    table, tiles_ptr, offsets_ptr, kv_offsets_ptr, da_ptr, db_ptr, num_tiles, heads, num_sequences, window_left,
    window_right, scale, sum_a, sum_b, out_bufs, sum_full, sum_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PIECE: tl.constexpr, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The sums of every tile, through shared memory; zeros where nothing is seen and in slack rows."""
    tiles = 0
    tile = tl.program_id(0)
    segment, head, first, own, other, start = read_tile(tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences)
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first, next_own, next_other, next_start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        begin, _free_begin, _free_end, end = streamed_blocks(
            segment, first, own, other, num_sequences, window_left, window_right, KEYS, HAS_LEFT, HAS_RIGHT
        )
        if end > begin:
            rows = first + tl.arange(0, RECORD_ROWS)
            from_row = 0
            if not KEYS:
                from_row = first_seeing_row(own, other, window_right, HAS_RIGHT)
            # The stores of the tile before must have left their buffers.
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_wait(sum_full[0], tiles & 1)
            _stage(sum_a[0], out_bufs[0], rows, from_row, scale, DTYPE, HEAD_DIM, PIECE)
            if KEYS:
                _stage(sum_b[0], out_bufs[1], rows, from_row, 1.0, DTYPE, HEAD_DIM, PIECE)
            tlx.barrier_arrive(sum_free[0], 1)
            tlx.fence("async_shared")
            slot = DK if KEYS else DQ
            a_desc = read_descriptor(table, slot * num_sequences + segment, [RECORD_ROWS, HEAD_DIM], DTYPE)
            tlx.async_descriptor_store(a_desc, out_bufs[0], [first, head * HEAD_DIM])
            if KEYS:
                b_desc = read_descriptor(table, DV * num_sequences + segment, [RECORD_ROWS, HEAD_DIM], DTYPE)
                tlx.async_descriptor_store(b_desc, out_bufs[1], [first, head * HEAD_DIM])
            tiles += 1
        else:
            for part in tl.range(0, RECORD_ROWS, ROWS):
                clear_rows(da_ptr, start + first + part, start + own, heads, head, HEAD_DIM)
                if KEYS:
                    clear_rows(db_ptr, start + first + part, start + own, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first = next_first
        own = next_own
        other = next_other
        start = next_start
    tlx.async_descriptor_store_wait(0)


@triton.jit
def write_partial(
    offsets_ptr, kv_offsets_ptr, partial_ptr, heads, num_sequences, shared_rows, window_left, window_right, scale,
    sum_a, sum_full, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """The program's share of dQ, float32, (chunks, S, H, D); zeros where no row of any sequence sees a key."""
    any_block = 0
    for sequence in tl.range(tl.program_id(0), num_sequences, tl.num_programs(0)):
        segment, _head, first, own, other, _start = read_own(
            offsets_ptr, offsets_ptr, kv_offsets_ptr, sequence, num_sequences, heads, num_sequences, True
        )
        begin, _free_begin, _free_end, end = streamed_blocks(
            segment, first, own, other, num_sequences, window_left, window_right, False, HAS_LEFT, HAS_RIGHT
        )
        any_block = tl.where(end > begin, 1, any_block)
    head = tl.program_id(1) % heads
    first_row = tl.program_id(1) // heads * RECORD_ROWS
    start = partial_ptr + ((tl.program_id(0).to(tl.int64) * shared_rows + first_row) * heads + head) * HEAD_DIM
    lane = tl.arange(0, RECORD_ROWS)
    in_query = (first_row + lane < shared_rows)[:, None]
    tlx.barrier_wait(sum_full[0], 0)
    for piece in tl.static_range(HEAD_DIM // PIECE):
        pointers = start + ((lane * (heads * HEAD_DIM))[:, None] + (piece * PIECE + tl.arange(0, PIECE))[None, :])
        if any_block > 0:
            x = mul_f32x2(tlx.local_load(tlx.subslice(sum_a[0], piece * PIECE, PIECE)), scale)
            tl.store(pointers, x, mask=in_query)
        else:
            tl.store(pointers, tl.zeros([RECORD_ROWS, PIECE], tl.float32), mask=in_query)
