"""The forward kernel: one pass over the keys with a running maximum and sum (FlashAttention's online softmax)."""

import triton
import triton.language as tl

from gemattn.kernels.triton.common import (
    LN2,
    RECORD_ROWS,
    add_product,
    exponential,
    first_seeing_row,
    key_ranges,
    load_record,
    load_tile,
    phase_bounds,
    product,
    segment_rows,
    store_tile,
    visible,
)


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    k_row_stride,
    v_row_stride,
    first_row,
    n_q,
    n_kv,
    window_left,
    window_right,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(weighted sum of values, sum of weights, maximum) of a query tile's rows; pointers at the sequence's key 0."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    rows = first_row + tl.arange(0, BLOCK_M)
    last_row = tl.minimum(first_row + BLOCK_M, n_q) - 1
    begin, free_begin, free_end, end = key_ranges(
        first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if EXACT:
        free_end = begin  # one stretch: arithmetic hides the masks, and every stretch is compiled anew, slowly
    FIRST_PHASE: tl.constexpr = 2 if EXACT else (0 if HAS_LEFT else 1)
    for PHASE in tl.static_range(FIRST_PHASE, 3):
        first_block, end_block = phase_bounds(PHASE, begin, free_begin, free_end, end)
        for start in tl.range(first_block, end_block, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            inside = columns < n_kv
            first = start + tl.zeros([], tl.int64)
            k = load_tile(k_ptr + first * k_row_stride, k_row_stride, inside, BLOCK_N, HEAD_DIM, BLOCK_D, PHASE != 1)
            v = load_tile(v_ptr + first * v_row_stride, v_row_stride, inside, BLOCK_N, HEAD_DIM, BLOCK_D, PHASE != 1)
            scores = product(q, tl.trans(k), EXACT) * score_scale
            if PHASE != 1:
                sees = visible(
                    rows[:, None], columns[None, :], n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                scores = tl.where(sees, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A maximum may drop NaN: the weights carry it into their sum. -inf - -inf would make NaN of a masked row.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(scores - reference[:, None], EXACT)
            correction = exponential(row_max - reference, EXACT)
            row_sum = row_sum * correction + tl.sum(p, 1)
            acc = add_product(acc * correction[:, None], p.to(v.dtype), v, EXACT)
            row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["num_sequences", "out_rows", "kv_rows", "window_left", "window_right"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    q_tiles_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_sequences,
    out_rows,
    kv_rows,
    num_heads,
    group_size,
    window_left,
    window_right,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_QUERY: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out (out_rows, H, D) and lse (H, out_rows), contiguous. Grid: records * (RECORD_ROWS / BLOCK_M) * H."""
    SPLIT: tl.constexpr = RECORD_ROWS // BLOCK_M
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    part = (program // num_heads) % SPLIT
    segment, block = load_record(q_tiles_ptr, program // num_heads // SPLIT)
    q_start, n_q = segment_rows(q_offsets_ptr, segment, num_sequences, out_rows)
    kv_start, n_kv = segment_rows(kv_offsets_ptr, segment, num_sequences, kv_rows)
    if segment < 0:
        return
    if HAS_RIGHT:  # the last rows see the most keys: they go first
        block = (n_q + RECORD_ROWS - 1) // RECORD_ROWS - 1 - block
        part = SPLIT - 1 - part
    first_row = block * RECORD_ROWS + part * BLOCK_M
    if (first_row >= n_q) | (first_row < 0):
        return

    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < n_q
    row = q_start + first_row
    out_ptr += row * (num_heads * HEAD_DIM) + head * HEAD_DIM
    lse_ptrs = lse_ptr + head * out_rows + row + tl.arange(0, BLOCK_M)
    if segment >= num_sequences:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        store_tile(out_ptr, num_heads * HEAD_DIM, row_mask, zeros, BLOCK_M, HEAD_DIM, BLOCK_D)
        tl.store(lse_ptrs, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_mask)
        return

    q_row = first_row.to(tl.int64) if SHARED_QUERY else row
    q_ptr += q_row * q_row_stride + head * q_head_stride
    q = load_tile(q_ptr, q_row_stride, row_mask, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    kv_head = head // group_size
    acc, row_sum, row_max = _attend(
        q,
        k_ptr + kv_start * k_row_stride + kv_head * k_head_stride,
        v_ptr + kv_start * v_row_stride + kv_head * v_head_stride,
        k_row_stride,
        v_row_stride,
        first_row,
        n_q,
        n_kv,
        window_left,
        window_right,
        score_scale,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        HAS_LEFT,
        HAS_RIGHT,
        EXACT,
    )
    # Decided from lengths, never from scores: a row whose visible scores are all -inf is 0 / 0 and must show it.
    sees_key = rows >= first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
    out = tl.where(sees_key[:, None], acc * (1.0 / row_sum)[:, None], 0.0)
    lse = row_max + tl.log(row_sum) if EXACT else (row_max + tl.log2(row_sum)) * LN2
    store_tile(out_ptr, num_heads * HEAD_DIM, row_mask, out, BLOCK_M, HEAD_DIM, BLOCK_D)
    tl.store(lse_ptrs, tl.where(sees_key, lse, float("-inf")), mask=row_mask)
