"""The float32 scratch of dq that the fused backward adds to.

The scratch holds blocks of 64 query rows. Within a block the values stand in the order in which registers hold a matrix
product's result, so that the fused kernel stages a block in shared memory without bank conflicts; nothing but these
kernels looks inside. Blocks never straddle sequences: `stat_block` gives their place.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx.common import RECORD_ROWS, first_seeing_row, read_tile, stat_block, tile_range

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


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "window_right"])
def finish_kernel(
    tiles_ptr, longer_ptr, offsets_ptr, scratch_ptr, dq_ptr, num_tiles, heads, num_sequences, window_right,
    scale, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """dq (out_rows, H, D) = scale * scratch, slack rows 0. Grid: num_tiles; a program has one record and head, of
    the records up to length class END."""
    BLOCK: tl.constexpr = 64
    _first_tile, num_tiles = tile_range(longer_ptr, num_tiles, heads, -1, END)
    segment, head, first_row, n_q, n_kv, q_start = read_tile(
        tiles_ptr, offsets_ptr, tl.program_id(0), num_tiles, heads, num_sequences
    )
    head = head.to(tl.int64)
    if segment >= 0:
        WIDTH: tl.constexpr = HEAD_DIM // PIECES
        seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
        for part in tl.static_range(RECORD_ROWS // BLOCK):
            rows = first_row + part * BLOCK + tl.arange(0, BLOCK)
            if first_row + part * BLOCK < n_q:
                block = stat_block(q_start, segment, first_row // BLOCK + part, head, heads, BLOCK) * HEAD_DIM
                for piece in tl.static_range(PIECES):
                    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
                    if n_kv > 0:
                        values = block + piece * (BLOCK * WIDTH) + tl.arange(0, BLOCK * WIDTH)
                        dq = in_row_order(tl.load(scratch_ptr + values), BLOCK, WIDTH)
                        dq = tl.where((rows >= seeing)[:, None], dq * scale, 0.0)
                    columns = piece * WIDTH + tl.arange(0, WIDTH)
                    offset = ((q_start + rows) * heads + head)[:, None] * HEAD_DIM + columns[None, :]
                    tl.store(dq_ptr + offset, dq.to(dq_ptr.dtype.element_ty), mask=(rows < n_q)[:, None])


@triton.jit(do_not_specialize=["chunks", "shared_rows"])
def add_partials_kernel(
    scratch_ptr, dq_ptr, heads, chunks, shared_rows, scale, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr
):
    """dq (S, H, D) = scale * the sum of the programs' scratch, in order. Program p of the fused kernel works for head
    p % H. Grid: blocks of S * H * 4 * PIECES; 16 rows and D / PIECES columns a program."""
    BLOCK: tl.constexpr = 64
    ROWS: tl.constexpr = 16
    WIDTH: tl.constexpr = HEAD_DIM // PIECES
    part = tl.program_id(0) % (BLOCK // ROWS * PIECES)
    head = tl.program_id(0) // (BLOCK // ROWS * PIECES) % heads
    block = tl.program_id(0) // (BLOCK // ROWS * PIECES) // heads
    blocks = tl.cdiv(shared_rows, BLOCK)
    values = part * (ROWS * WIDTH) + tl.arange(0, ROWS * WIDTH)
    total = tl.zeros([ROWS * WIDTH], tl.float32)
    for chunk in tl.range(0, chunks):
        program = (chunk * heads + head).to(tl.int64)
        total += tl.load(scratch_ptr + (program * blocks + block) * (BLOCK * HEAD_DIM) + values)
    dq = in_row_order(total, ROWS, WIDTH) * scale
    rows = block * BLOCK + part % (BLOCK // ROWS) * ROWS + tl.arange(0, ROWS)
    columns = part // (BLOCK // ROWS) * WIDTH + tl.arange(0, WIDTH)
    offset = (rows * heads + head)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(dq_ptr + offset, dq.to(dq_ptr.dtype.element_ty), mask=(rows < shared_rows)[:, None])
