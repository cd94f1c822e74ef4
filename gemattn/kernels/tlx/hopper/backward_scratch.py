"""What the fused backward needs before and after: lists of tiles, and the float32 scratch of dq.

The scratch holds blocks of 64 query rows. Within a block the values stand in the order in which registers hold a matrix
product's result, so that the fused kernel stages a block in shared memory without bank conflicts; nothing but these
kernels looks inside. Blocks never straddle sequences: `scratch_block` gives their place.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx.common import RECORD_ROWS, first_seeing_row, read_tile, tile_range
from gemattn.kernels.tlx.statistics import row_statistics

SCRATCH_COLUMNS: tl.constexpr = tl.constexpr(32)  # 128 bytes, the widest row that the copy engine swizzles


@triton.jit
def in_register_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A product's (ROWS, COLUMNS) as (ROWS * COLUMNS / 32, 32), four values of a thread together: no data moves.

    A warp holds 16 rows. Of rows r and r + 8, thread 4 r + q holds columns 8 j + 2 q and the next one.
    """
    x = tl.reshape(x, (ROWS // 16, 2, 8, COLUMNS // 8, 4, 2))
    x = tl.permute(x, (0, 3, 2, 4, 1, 5))
    return tl.reshape(x, (ROWS * COLUMNS // SCRATCH_COLUMNS, SCRATCH_COLUMNS))


@triton.jit
def in_row_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `in_register_order`, of any shape, as (ROWS, COLUMNS)."""
    x = tl.reshape(x, (ROWS // 16, COLUMNS // 8, 8, 4, 2, 2))
    return tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (ROWS, COLUMNS))


@triton.jit
def scratch_block(q_start, segment, n_q, head, heads):
    """Place of the first of a sequence's and head's cdiv(n_q, 64) blocks, one after another."""
    return (q_start // 64 + segment) * heads + head * tl.cdiv(n_q, 64)


@triton.jit
def is_walked(n_q, n_kv, walk_rows, walk_keys):
    """Whether one program has all key tiles of the sequence: by its own lengths, whatever the batch holds."""
    return (n_q <= walk_rows) & (n_kv <= walk_keys)


@triton.jit
def _read_records(
    tiles_ptr, index, end, num_sequences, walk_rows, walk_keys, keys_above
):  # fmt: skip
    """Records `index` (N,) int32, those before `end`: (N, 4) int32; and which lists of `split_records` they belong to,
    the first and the second one's, (N,) bool each."""
    inside = index < end
    fields = tl.arange(0, 4)
    records = tl.load(tiles_ptr + index[:, None] * 4 + fields[None, :], mask=inside[:, None], other=-1)
    even, odd = tl.split(tl.reshape(records, (index.shape[0], 2, 2)))
    segment, n_kv = tl.split(even)
    block, n_q = tl.split(odd)
    own = (segment >= 0) & (segment < num_sequences) & (n_kv > keys_above)
    first = (own & (block == 0)) | ((segment >= num_sequences) & (keys_above < 0))
    rest = own & (block > 0) & (is_walked(n_q, n_kv, walk_rows, walk_keys) == 0)
    return records, first, rest


@triton.jit
def _place_records(list_ptr, records, index, end, num_records, chosen, before):
    """Write the chosen of records `index` that are before `end`, after the `before` ones of earlier records.

    Each of the others becomes an unused record at the list's end. So every record has a place of its own either way,
    and no program needs to know how many are chosen in all.
    """
    rank = before + tl.cumsum(chosen.to(tl.int32), 0) - chosen.to(tl.int32)
    place = tl.where(chosen, rank, num_records - 1 - (index - rank))
    fields = tl.arange(0, 4)[None, :]
    records = tl.where(chosen[:, None], records, tl.where(fields == 0, -1, 0))
    tl.store(list_ptr + place[:, None] * 4 + fields, records, mask=(index < end)[:, None])


@triton.jit
def split_records(
    program, programs, tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows, walk_keys, keys_above,
    COUNTED: tl.constexpr = 2048, WRITTEN: tl.constexpr = 256,
):  # fmt: skip
    """Records of key tiles, order kept, into two lists of the same length, unused ones at their ends: first tiles of
    sequences of more than `keys_above` keys (of all, and of slack, where that is -1); and the rest of those sequences
    where they are not walked.

    The share of one of any number of programs, a stretch of the list: it counts for itself what the stretches before
    put where, COUNTED records at a time, and then places its own, WRITTEN at a time.
    """
    stretch = tl.cdiv(num_records, programs)
    begin = tl.minimum(program * stretch, num_records)
    end = tl.minimum(begin + stretch, num_records)
    # Both in one number, for registers: 2 ** 15 times COUNTED records are more than a batch has.
    counts = tl.zeros([COUNTED], tl.int32)
    for start in tl.range(0, begin, COUNTED):
        index = start + tl.arange(0, COUNTED)
        _records, first, rest = _read_records(
            tiles_ptr, index, begin, num_sequences, walk_rows, walk_keys, keys_above
        )  # fmt: skip
        counts += first.to(tl.int32) + (rest.to(tl.int32) << 16)
    firsts_before = tl.sum(counts & 0xFFFF, 0)
    rests_before = tl.sum(counts >> 16, 0)
    for start in tl.range(begin, end, WRITTEN):
        index = start + tl.arange(0, WRITTEN)
        records, first, rest = _read_records(tiles_ptr, index, end, num_sequences, walk_rows, walk_keys, keys_above)
        _place_records(first_ptr, records, index, end, num_records, first, firsts_before)
        _place_records(rest_ptr, records, index, end, num_records, rest, rests_before)
        firsts_before += tl.sum(first.to(tl.int32), 0)
        rests_before += tl.sum(rest.to(tl.int32), 0)


@triton.jit(
    do_not_specialize=[
        "num_tiles", "num_sequences", "out_rows", "splitters", "num_records", "walk_rows", "walk_keys", "keys_above"
    ]
)  # fmt: skip
def prepare_fused_kernel(
    q_tiles_ptr, longer_ptr, offsets_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, kv_tiles_ptr,
    first_ptr, rest_ptr, num_tiles, heads, num_sequences, out_rows, do_row_stride, do_head_stride, splitters,
    num_records, walk_rows, walk_keys, keys_above, HEAD_DIM: tl.constexpr, HAS_DLSE: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """What own queries without a mask need before: `split_records` by the first `splitters` programs, `row_statistics`
    by the others, any number of them."""
    if tl.program_id(0) < splitters:
        split_records(
            tl.program_id(0), splitters, kv_tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows,
            walk_keys, keys_above,
        )  # fmt: skip
    else:
        row_statistics(
            tl.program_id(0) - splitters, tl.num_programs(0) - splitters, q_tiles_ptr, longer_ptr, offsets_ptr, out_ptr,
            dout_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, num_tiles, heads, num_sequences, out_rows, do_row_stride,
            do_head_stride, 0, HEAD_DIM, HAS_DLSE, False, END,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "window_right"])
def finish_kernel(
    tiles_ptr, longer_ptr, offsets_ptr, scratch_ptr, dq_ptr, num_tiles, heads, num_sequences, window_right,
    scale, HEAD_DIM: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """dq (out_rows, H, D) = scale * scratch, slack rows 0. Any grid; a tile is the rows of one record and
    head, of the records up to length class END."""
    BLOCK: tl.constexpr = 64
    _first_tile, num_tiles = tile_range(longer_ptr, num_tiles, heads, -1, END)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        segment, head, first_row, n_q, n_kv, q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        head = head.to(tl.int64)
        if segment >= 0:
            seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
            for part in tl.static_range(RECORD_ROWS // BLOCK):
                rows = first_row + part * BLOCK + tl.arange(0, BLOCK)
                if first_row + part * BLOCK < n_q:
                    block = scratch_block(q_start, segment, n_q, head, heads) + first_row // BLOCK + part
                    dq = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
                    if n_kv > 0:
                        dq = in_row_order(
                            tl.load(scratch_ptr + block * (BLOCK * HEAD_DIM) + tl.arange(0, BLOCK * HEAD_DIM)),
                            BLOCK,
                            HEAD_DIM,
                        )
                        dq = tl.where((rows >= seeing)[:, None], dq * scale, 0.0)
                    offset = ((q_start + rows) * heads + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
                    tl.store(dq_ptr + offset, dq.to(dq_ptr.dtype.element_ty), mask=(rows < n_q)[:, None])


@triton.jit(do_not_specialize=["chunks", "shared_rows"])
def add_partials_kernel(scratch_ptr, dq_ptr, heads, chunks, shared_rows, scale, HEAD_DIM: tl.constexpr):
    """dq (S, H, D) = scale * the sum of the programs' scratch, in order. Program p of the fused kernel works for head
    p % H. Grid: blocks of S * H * 4; 16 rows a program."""
    BLOCK: tl.constexpr = 64
    ROWS: tl.constexpr = 16
    part = tl.program_id(0) % (BLOCK // ROWS)
    head = tl.program_id(0) // (BLOCK // ROWS) % heads
    block = tl.program_id(0) // (BLOCK // ROWS) // heads
    blocks = tl.cdiv(shared_rows, BLOCK)
    values = part * (ROWS * HEAD_DIM) + tl.arange(0, ROWS * HEAD_DIM)
    total = tl.zeros([ROWS * HEAD_DIM], tl.float32)
    for chunk in tl.range(0, chunks):
        program = (chunk * heads + head).to(tl.int64)
        total += tl.load(scratch_ptr + (program * blocks + block) * (BLOCK * HEAD_DIM) + values)
    dq = in_row_order(total, ROWS, HEAD_DIM) * scale
    rows = block * BLOCK + part * ROWS + tl.arange(0, ROWS)
    offset = (rows * heads + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq_ptr + offset, dq.to(dq_ptr.dtype.element_ty), mask=(rows < shared_rows)[:, None])
