"""What the TLX kernels share: tile records, visible blocks, masks, rings of buffers.

Row and column numbers count from the start of their sequence. ``shift = n_kv - n_q`` aligns windows bottom-right.
"""

import triton
import triton.language as tl

RECORD_ROWS: tl.constexpr = tl.constexpr(128)  # schedule.BLOCK
ROWS: tl.constexpr = tl.constexpr(64)  # of one consumer
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def read_tile(tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences):
    """(segment, head, first row, rows, work, the segment's first row in the tensor); segment -1 past the list.

    A record's fields are loads that do not wait for one another: a chain of them would stand before every tile. Only
    the last value hangs on the segment, and it is needed late.
    """
    record = tl.maximum(tl.minimum(tile, num_tiles - 1), 0) // heads
    segment = tl.load(tiles_ptr + 4 * record)
    block = tl.load(tiles_ptr + 4 * record + 1)
    rows = tl.load(tiles_ptr + 4 * record + 2)
    work = tl.load(tiles_ptr + 4 * record + 3)
    segment = tl.where(tile < num_tiles, segment, -1)
    start = tl.load(offsets_ptr + tl.minimum(tl.maximum(segment, 0), num_sequences))
    start = tl.where(segment == num_sequences, 0, start)
    return segment, tile % heads, block * RECORD_ROWS, rows, work, start


@triton.jit
def tile_range(longer_ptr, num_tiles, heads, BEGIN: tl.constexpr, END: tl.constexpr):
    """Tiles [begin, end) of a range of length classes.

    BEGIN and END count in `schedule.LENGTH_CLASSES`; -1 is the list's own begin or end.
    """
    begin = 0
    if BEGIN >= 0:
        begin = tl.load(longer_ptr + BEGIN) * heads
    end = num_tiles
    if END >= 0:
        end = tl.load(longer_ptr + END) * heads
    return begin, end


@triton.jit
def clear_rows(ptr, first, end, heads, head, HEAD_DIM: tl.constexpr):
    """Zeros in rows [first, min(first + ROWS, end)) of a head of a contiguous (rows, H, D) tensor.

    A few rows at a time: this is rare, and must not take registers from the loops over blocks.
    """
    STEP: tl.constexpr = 8
    columns = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
    for step in tl.range(0, ROWS, STEP):
        rows = first + step + tl.arange(0, STEP)
        zeros = tl.zeros([STEP, HEAD_DIM], ptr.dtype.element_ty)
        tl.store(ptr + (rows * (heads * HEAD_DIM))[:, None] + columns[None, :], zeros, mask=(rows < end)[:, None])


@triton.jit
def key_blocks(
    first_row,
    last_row,
    n_q,
    n_kv,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Key blocks for query rows [first_row, last_row]: (last + 1, masked from the end, masked from the start, first).

    Counted in blocks of BLOCK_N from the sequence's first key. At least the last block is taken as masked.
    """
    shift = n_kv - n_q
    begin = 0
    free_begin = 0
    end = tl.cdiv(n_kv, BLOCK_N)
    free_end = n_kv // BLOCK_N
    if HAS_RIGHT:
        end = tl.cdiv(tl.minimum(n_kv, tl.maximum(last_row + shift + window_right + 1, 0)), BLOCK_N)
        free_end = tl.minimum(n_kv, tl.maximum(first_row + shift + window_right + 1, 0)) // BLOCK_N
    if HAS_LEFT:
        begin = tl.minimum(tl.maximum(first_row + shift - window_left, 0) // BLOCK_N, end)
        free_begin = tl.minimum(tl.cdiv(tl.maximum(last_row + shift - window_left, 0), BLOCK_N), end)
    first_free_from_top = tl.maximum(tl.minimum(free_end, end - 1), free_begin)
    return begin, free_begin, first_free_from_top, end


@triton.jit
def hide(
    scores,
    rows,
    start,
    shift,
    n_kv,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Scores of keys that a row does not see become -inf."""
    columns = start + tl.arange(0, BLOCK_N)
    sees = (columns < n_kv)[None, :]
    if HAS_RIGHT:
        sees = sees & (columns[None, :] <= rows[:, None] + (shift + window_right))
    if HAS_LEFT:
        sees = sees & (columns[None, :] >= rows[:, None] + (shift - window_left))
    return tl.where(sees, scores, float("-inf"))


@triton.jit
def ring(count, STAGES: tl.constexpr):
    """(buffer, phase) of the count-th use of a ring of buffers."""
    return count % STAGES, (count // STAGES) & 1


@triton.jit
def before_waiting(sums):
    """Have what leads to `sums`, which are not negative, done before the next wait for a product.

    The assembler moves such a wait up past arithmetic that does not need it, and nothing runs beside the product then.
    It does not move it past an event that hangs on the sums; the event, one for a profiler, never happens.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never pmevent 1; mov.b32 $0, 0; }",
        "=r,r",
        [sums],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def query_blocks(
    first_key,
    last_key,
    n_q,
    n_kv,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Query blocks for keys [first_key, last_key]: (begin, first mask-free, end of mask-free, end)."""
    shift = n_kv - n_q
    begin = 0
    free_begin = 0
    end = tl.cdiv(n_q, BLOCK_M)
    free_end = end
    if HAS_LEFT:
        end = tl.cdiv(tl.minimum(n_q, tl.maximum(last_key - shift + window_left + 1, 0)), BLOCK_M)
        free_end = tl.minimum(n_q, tl.maximum(first_key - shift + window_left + 1, 0)) // BLOCK_M
    if HAS_RIGHT:
        begin = tl.minimum(tl.maximum(first_key - shift - window_right, 0) // BLOCK_M, end)
        free_begin = tl.minimum(tl.cdiv(tl.maximum(last_key - shift - window_right, 0), BLOCK_M), end)
    free_end = tl.maximum(tl.minimum(free_end, end), free_begin)
    return begin, free_begin, free_end, end


@triton.jit
def first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT: tl.constexpr):
    """Rows before it see no key."""
    first = 0
    if HAS_RIGHT:
        first = tl.minimum(tl.maximum(n_q - n_kv - window_right, 0), n_q)
    return tl.where(n_kv > 0, first, n_q)


@triton.jit
def stat_block(q_start, segment, block, head, heads, BLOCK_M: tl.constexpr):
    """Place of a query block's row statistics in a scratch of (blocks, H, 64): q_start // 64 + segment bounds them."""
    place = q_start // BLOCK_M + segment + block
    return (place * heads + head) * BLOCK_M


@triton.jit
def from_column(first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS): column >= first of the row. In the layout of a product on sm_90 a thread's columns differ by
    multiples of 8, which as constants of the code take no registers; the compiler would keep a sum for each."""
    eights = 8 * tl.arange(0, COLUMNS // 8)[None, :, None]
    return tl.reshape(eights >= first[:, None, None] - tl.arange(0, 8)[None, None, :], (ROWS, COLUMNS))
