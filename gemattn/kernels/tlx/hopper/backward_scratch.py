"""What the fused backward needs before and after: lists of tiles, and the float32 scratch of dq.

The scratch holds blocks of 64 query rows. Within a block the values stand in the order in which registers hold a matrix
product's result, so that the fused kernel stages a block in shared memory without bank conflicts; nothing but these
kernels looks inside. Blocks never straddle sequences: `scratch_block` gives their place.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx.common import RECORD_ROWS, first_seeing_row, read_tile, tile_range

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
def split_records(
    tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows, walk_keys, keys_above,
):  # fmt: skip
    """Records of key tiles, order kept, into two lists of the same length, unused ones at their ends: first tiles of
    sequences of more than `keys_above` keys (of all, and of slack, where that is -1); and the rest of those sequences
    where they are not walked."""
    RECORD: tl.constexpr = 4
    CHUNK: tl.constexpr = 512
    firsts = 0
    rests = 0
    for start in tl.range(0, num_records, CHUNK):
        index = start + tl.arange(0, CHUNK)
        inside = index < num_records
        segment = tl.load(tiles_ptr + index * RECORD, mask=inside, other=-1)
        block = tl.load(tiles_ptr + index * RECORD + 1, mask=inside, other=0)
        own = (segment >= 0) & (segment < num_sequences)
        n_kv = tl.load(tiles_ptr + index * RECORD + 2, mask=own, other=0)
        n_q = tl.load(tiles_ptr + index * RECORD + 3, mask=own, other=0)
        own = own & (n_kv > keys_above)
        first = ((segment >= num_sequences) & (keys_above < 0)) | (own & (block == 0))
        rest = own & (block > 0) & (is_walked(n_q, n_kv, walk_rows, walk_keys) == 0)
        first_place = firsts + tl.cumsum(first.to(tl.int32), 0) - 1
        rest_place = rests + tl.cumsum(rest.to(tl.int32), 0) - 1
        for field in tl.static_range(RECORD):
            value = tl.load(tiles_ptr + index * RECORD + field, mask=inside, other=0)
            tl.store(first_ptr + first_place * RECORD + field, value, mask=first)
            tl.store(rest_ptr + rest_place * RECORD + field, value, mask=rest)
        firsts += tl.sum(first.to(tl.int32), 0)
        rests += tl.sum(rest.to(tl.int32), 0)
    for start in tl.range(0, num_records, CHUNK):
        index = start + tl.arange(0, CHUNK)
        tl.store(first_ptr + index * RECORD, -1, mask=(index >= firsts) & (index < num_records))
        tl.store(rest_ptr + index * RECORD, -1, mask=(index >= rests) & (index < num_records))


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
