"""What the forward and the backward kernels share: tile records, visible ranges, loads and exponentials.

Vocabulary of the kernels: a program owns one *tile* of rows of one sequence and one head. Row and column numbers count
from the start of their sequence (int32); ``*_start`` is the sequence's first row in the tensor (int64, like every
address). ``shift = n_kv - n_q`` aligns windows bottom-right: query row i stands at key position ``i + shift``.

EXACT (a compile-time constant) is float32 as float32: products on the scalar units, sums and exponentials that keep
their digits. Otherwise the operands are 16-bit, or float32 that the user allows to round to TF32.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG2E_REST: tl.constexpr = tl.constexpr(1.9259629911e-08)  # log2(e) less its float32
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RECORD_ROWS: tl.constexpr = tl.constexpr(128)  # schedule.BLOCK


@triton.jit
def load_record(tiles_ptr, record):
    """(segment, block) of a record; segment -1 is unused."""
    return tl.load(tiles_ptr + 4 * record), tl.load(tiles_ptr + 4 * record + 1)


@triton.jit
def segment_rows(offsets_ptr, segment, num_sequences, total_rows):
    """(first row int64, number of rows int32) of a sequence or, past the sequences, of a stretch of slack.

    Clamped to the tensor, so that even a schedule of another batch cannot lead outside it. An unused record
    (segment -1) reads the first sequence, so that a kernel may load all its offsets before it branches.
    """
    segment = tl.maximum(segment, 0)
    first = tl.load(offsets_ptr + tl.minimum(segment, num_sequences))
    end = tl.load(offsets_ptr + tl.where(segment < num_sequences, segment + 1, 0))
    first = tl.where(segment == num_sequences, 0, first)
    end = tl.where(segment > num_sequences, total_rows, end)
    end = tl.minimum(end, total_rows)
    first = tl.minimum(tl.maximum(first, 0), end)
    return first, (end - first).to(tl.int32)


@triton.jit
def rows_and_columns(row_stride, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) int64 element offsets of a tile from its first element."""
    return tl.arange(0, BLOCK)[:, None].to(tl.int64) * row_stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_mask(row_mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D): valid rows, and the columns that exist."""
    return row_mask[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]


@triton.jit
def load_tile(
    ptr,
    row_stride,
    row_mask,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """(BLOCK, BLOCK_D) rows from ``ptr`` on. What is masked is 0: a neighbour's NaN never enters a product."""
    ptrs = ptr + rows_and_columns(row_stride, BLOCK, BLOCK_D)
    if MASK_ROWS and HEAD_DIM == BLOCK_D:
        tile = tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=tile_mask(row_mask, HEAD_DIM, BLOCK_D), other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(ptr, row_stride, row_mask, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Round ``tile`` to the tensor's dtype and store its valid rows from ``ptr`` on."""
    ptrs = ptr + rows_and_columns(row_stride, BLOCK, BLOCK_D)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=tile_mask(row_mask, HEAD_DIM, BLOCK_D))


@triton.jit
def first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT: tl.constexpr):
    """The rows [first, n_q) of a sequence see a key; those before it, all of them without keys, see none.

    Row i sees keys [i + shift - left, i + shift + right] cut to [0, n_kv). Its position i + shift is at most n_kv - 1
    and both window sides are at least 0, so only the right end can fall short: i + shift + right < 0.
    """
    first = 0
    if HAS_RIGHT:
        first = tl.maximum(n_q - n_kv - window_right, 0)
    return tl.where(n_kv > 0, first, n_q)


@triton.jit
def phase_bounds(PHASE: tl.constexpr, begin, free_begin, free_end, end):
    """Blocks of one of the three stretches that `key_ranges` and `query_ranges` give: masked, mask-free, masked."""
    if PHASE == 0:
        return begin, free_begin
    elif PHASE == 1:
        return free_begin, free_end
    else:
        return free_end, end


@triton.jit
def visible(row, column, n_q, n_kv, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether query row ``row`` sees key ``column``; the two broadcast."""
    sees = column < n_kv
    shift = n_kv - n_q
    if HAS_RIGHT:
        sees = sees & (column <= row + (shift + window_right))
    if HAS_LEFT:
        sees = sees & (column >= row + (shift - window_left))
    return sees


@triton.jit
def key_ranges(
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
    """Key blocks for query rows [first_row, last_row]: masked [a, b), mask-free [b, c), masked [c, d).

    Blocks start at multiples of BLOCK_N from the sequence's first key, whatever the window, so that a row's sums have
    the same order in every batch. In [b, c) every row sees every key of the block.
    """
    shift = n_kv - n_q
    begin = 0
    free_begin = 0
    end = n_kv
    free_end = (n_kv // BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(n_kv, tl.maximum(last_row + shift + window_right + 1, 0))
        all_see = tl.minimum(n_kv, tl.maximum(first_row + shift + window_right + 1, 0))
        free_end = (all_see // BLOCK_N) * BLOCK_N
    if HAS_LEFT:
        begin = (tl.maximum(first_row + shift - window_left, 0) // BLOCK_N) * BLOCK_N
        all_see = tl.maximum(last_row + shift - window_left, 0)
        free_begin = tl.minimum(((all_see + BLOCK_N - 1) // BLOCK_N) * BLOCK_N, tl.maximum(end, begin))
    free_end = tl.maximum(free_end, free_begin)
    return begin, free_begin, free_end, end


@triton.jit
def query_ranges(
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
    """Query blocks for keys [first_key, last_key]: masked [a, b), mask-free [b, c), masked [c, d); see `key_ranges`."""
    shift = n_kv - n_q
    begin = 0
    free_begin = 0
    end = n_q
    free_end = (n_q // BLOCK_M) * BLOCK_M
    if HAS_LEFT:
        end = tl.minimum(n_q, tl.maximum(last_key - shift + window_left + 1, 0))
        all_see = tl.minimum(n_q, tl.maximum(first_key - shift + window_left + 1, 0))
        free_end = (all_see // BLOCK_M) * BLOCK_M
    if HAS_RIGHT:
        begin = (tl.maximum(first_key - shift - window_right, 0) // BLOCK_M) * BLOCK_M
        all_see = tl.maximum(last_key - shift - window_right, 0)
        free_begin = tl.minimum(((all_see + BLOCK_M - 1) // BLOCK_M) * BLOCK_M, tl.maximum(end, begin))
    free_end = tl.maximum(free_end, free_begin)
    return begin, free_begin, free_end, end


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """a @ b in float32. 16-bit operands ignore the precision; float32 ones are split into TF32 parts unless EXACT:

    three products on the tensor cores, since one would cut P short by its last digits on every key.
    """
    return tl.dot(a, b, input_precision="ieee" if EXACT else "tf32x3")


@triton.jit
def add_product(acc, a, b, EXACT: tl.constexpr):
    """acc + a @ b. EXACT sums each block from 0: one chain through a long sequence would lose digits."""
    if EXACT:
        # The compiler would fold a plain sum into the chain again.
        total = tl.fma(product(a, b, EXACT), 1.0, acc)
    else:
        total = tl.dot(a, b, acc, input_precision="tf32x3")
    return total


@triton.jit
def exponential(x, EXACT: tl.constexpr):
    """exp(x) if EXACT, else 2**x of scores that carry the factor log2(e) already; x > 0 counts as 0, NaN stays NaN.

    No exponent here is above 0 but by rounding. EXACT keeps natural units, because a detour of lse over base 2 would
    cost digits of large scores, and pays for an exact product with log2(e): hi + lo, with 2**lo = 1 + lo * ln(2).
    """
    x = tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if EXACT:
        x = tl.maximum(x, -200.0, propagate_nan=tl.PropagateNan.ALL)  # exp(-200) is 0; -inf would make lo NaN
        hi = x * LOG2E
        lo = tl.fma(x, LOG2E, -hi) + x * LOG2E_REST
        power = tl.exp2(hi)
        power += power * (lo * LN2)
    else:
        power = tl.exp2(x)
    return power
