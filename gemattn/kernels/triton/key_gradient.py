"""Gradients of key and value, by key tile: dV = P^T dO and dK = scale * dS^T Q, summed in a fixed order, written once.

dS is as in `query_gradient`, which runs first and leaves delta (and norm).

Query rows past the end of a sequence, like those that see no key, are loaded with lse = +inf, so their P is 0. Key rows
past its end are not stored, and no other row depends on them.
"""

import triton
import triton.language as tl

from gemattn.kernels.triton.common import (
    LOG2E,
    RECORD_ROWS,
    add_product,
    exponential,
    first_seeing_row,
    load_record,
    load_tile,
    phase_bounds,
    product,
    query_ranges,
    segment_rows,
    store_tile,
    visible,
)


@triton.jit
def _key_gradient(
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    norm_ptr,
    q_row_stride,
    dout_row_stride,
    first_key,
    n_q,
    n_kv,
    window_left,
    window_right,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Add one query head's dS^T Q (the factor ``scale`` left out) and P^T dO; scores are held transposed (key, query).

    Pointers point at the sequence's first row.
    """
    columns = first_key + tl.arange(0, BLOCK_N)
    first_seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
    last_key = tl.minimum(first_key + BLOCK_N, n_kv) - 1
    begin, free_begin, free_end, end = query_ranges(
        first_key, last_key, n_q, n_kv, window_left, window_right, BLOCK_M, HAS_LEFT, HAS_RIGHT
    )
    if EXACT:
        free_end = begin  # one stretch: arithmetic hides the masks, and every stretch is compiled anew, slowly
    FIRST_PHASE: tl.constexpr = 2 if EXACT else (0 if HAS_RIGHT else 1)
    for PHASE in tl.static_range(FIRST_PHASE, 3):
        first_block, end_block = phase_bounds(PHASE, begin, free_begin, free_end, end)
        for start in tl.range(first_block, end_block, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            seeing = (rows >= first_seeing) & (rows < n_q)
            first = start + tl.zeros([], tl.int64)
            q = load_tile(q_ptr + first * q_row_stride, q_row_stride, seeing, BLOCK_M, HEAD_DIM, BLOCK_D, PHASE != 1)
            dout = load_tile(
                dout_ptr + first * dout_row_stride, dout_row_stride, seeing, BLOCK_M, HEAD_DIM, BLOCK_D, PHASE != 1
            )
            if PHASE != 1:
                lse = tl.load(lse_ptr + rows, mask=seeing, other=float("inf"))
                delta = tl.load(delta_ptr + rows, mask=seeing, other=0.0)
            else:
                lse = tl.load(lse_ptr + rows)
                delta = tl.load(delta_ptr + rows)
            if not EXACT:
                lse *= LOG2E
            if EXACT:  # as the other kernels multiply, to the last bit: lse, norm and delta are of their products
                scores = tl.trans(product(q, tl.trans(k), EXACT)) * score_scale
                dp = tl.trans(product(dout, tl.trans(v), EXACT))
            else:
                scores = product(k, tl.trans(q), EXACT) * score_scale
                dp = product(v, tl.trans(dout), EXACT)
            p = exponential(scores - lse[None, :], EXACT)
            ds = dp - delta[None, :]
            if EXACT:
                p *= tl.load(norm_ptr + rows, mask=seeing, other=0.0)[None, :]
                if HAS_DLSE:
                    ds += tl.load(dlse_ptr + rows, mask=seeing, other=0.0)[None, :]
            ds *= p
            if PHASE != 1 and (HAS_LEFT or HAS_RIGHT):
                sees = visible(
                    rows[None, :], columns[:, None], n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                p = tl.where(sees, p, 0.0)
                ds = tl.where(sees, ds, 0.0)
            dv = add_product(dv, p.to(dout.dtype), dout, EXACT)
            dk = add_product(dk, ds.to(q.dtype), q, EXACT)
    return dk, dv


@triton.jit(do_not_specialize=["num_sequences", "out_rows", "kv_rows", "window_left", "window_right"])
def key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    norm_ptr,
    dk_ptr,
    dv_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    kv_tiles_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    dout_row_stride,
    dout_head_stride,
    num_sequences,
    out_rows,
    kv_rows,
    num_kv_heads,
    group_size,
    window_left,
    window_right,
    scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_QUERY: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """dk and dv (kv_rows, G, D), contiguous. Grid: records * (RECORD_ROWS / BLOCK_N) * G.

    A program sums over the ``group_size`` query heads that read its key head, one after another.
    """
    SPLIT: tl.constexpr = RECORD_ROWS // BLOCK_N
    program = tl.program_id(0)
    kv_head = (program % num_kv_heads).to(tl.int64)
    part = (program // num_kv_heads) % SPLIT
    segment, block = load_record(kv_tiles_ptr, program // num_kv_heads // SPLIT)
    kv_start, n_kv = segment_rows(kv_offsets_ptr, segment, num_sequences, kv_rows)
    q_start, n_q = segment_rows(q_offsets_ptr, segment, num_sequences, out_rows)
    first_key = block * RECORD_ROWS + part * BLOCK_N
    if (segment < 0) | (first_key >= n_kv):
        return

    column_mask = first_key + tl.arange(0, BLOCK_N) < n_kv
    row = kv_start + first_key
    own_row_stride = num_kv_heads * HEAD_DIM  # of dk and dv, which are contiguous
    own = row * own_row_stride + kv_head * HEAD_DIM
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if segment >= num_sequences:
        store_tile(dk_ptr + own, own_row_stride, column_mask, dk, BLOCK_N, HEAD_DIM, BLOCK_D)
        store_tile(dv_ptr + own, own_row_stride, column_mask, dv, BLOCK_N, HEAD_DIM, BLOCK_D)
        return

    k_ptr += row * k_row_stride + kv_head * k_head_stride
    v_ptr += row * v_row_stride + kv_head * v_head_stride
    k = load_tile(k_ptr, k_row_stride, column_mask, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_ptr, v_row_stride, column_mask, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    if not SHARED_QUERY:
        q_ptr += q_start * q_row_stride
    dout_ptr += q_start * dout_row_stride
    for member in tl.range(0, group_size):
        head = kv_head * group_size + member
        statistic = head * out_rows + q_start
        dk, dv = _key_gradient(
            dk,
            dv,
            k,
            v,
            q_ptr + head * q_head_stride,
            dout_ptr + head * dout_head_stride,
            lse_ptr + statistic,
            dlse_ptr + statistic,
            delta_ptr + statistic,
            norm_ptr + statistic,
            q_row_stride,
            dout_row_stride,
            first_key,
            n_q,
            n_kv,
            window_left,
            window_right,
            score_scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_M,
            BLOCK_N,
            HAS_DLSE,
            HAS_LEFT,
            HAS_RIGHT,
            EXACT,
        )
    store_tile(dk_ptr + own, own_row_stride, column_mask, dk * scale, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv_ptr + own, own_row_stride, column_mask, dv, BLOCK_N, HEAD_DIM, BLOCK_D)
