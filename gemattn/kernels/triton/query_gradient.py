"""Gradient of the query, by query tile; no atomics, no delta pass.

With P = exp(S - lse) and S = scale * Q K^T the gradient of the scores is ``dS = P * (dP - delta + dlse)``, where
``dP = dO V^T`` and ``delta = rowsum(dO * O)`` (FlashAttention, with the gradient of lse), and dQ = scale * dS K.
These kernels compute delta on their way and leave it for `key_gradient`, which runs second.

- Not EXACT: what is left is ``delta - dlse``, which is all that the other kernel needs.
- EXACT: delta alone, and ``norm``, a factor that makes the recomputed rows of P sum to 1 (`_exact_statistics`).

Keys past the end of a sequence need no mask here: they are loaded as zeros, so their share of dQ is a product with 0.
Rows past its end, and rows that see no key, are loaded with lse = +inf, so their P is 0.
"""

import triton
import triton.language as tl

from gemattn.kernels.triton.common import (
    LOG2E,
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
def _exact_statistics(
    q,
    dout,
    lse,
    k_ptr,
    v_ptr,
    k_row_stride,
    v_row_stride,
    rows,
    begin,
    end,
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
):
    """(1 / rowsum(P), rowsum(P * dP) / rowsum(P)) of the recomputed P, in one more pass over the keys.

    In exact arithmetic they are 1 and rowsum(dO * O). But lse is rounded, so a row of exp(S - lse) is off 1 as a whole,
    and in ``dP - delta`` of a key that takes nearly all of a row the two cancel. In 16 bits both are far below the
    result's own rounding; in float32 they are not. (For the same reason dlse stays apart there.)
    """
    total = tl.zeros([BLOCK_M], tl.float32)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < n_kv
        first = start + tl.zeros([], tl.int64)
        k = load_tile(k_ptr + first * k_row_stride, k_row_stride, inside, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v = load_tile(v_ptr + first * v_row_stride, v_row_stride, inside, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        scores = product(q, tl.trans(k), True) * score_scale
        sees = visible(rows[:, None], columns[None, :], n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(sees, exponential(scores - lse[:, None], True), 0.0)
        total += tl.sum(p, 1)
        delta += tl.sum(p * product(dout, tl.trans(v), True), 1)
    return 1.0 / total, delta / total


@triton.jit
def _query_gradient(
    dq,
    q,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    norm_ptr,
    k_ptr,
    v_ptr,
    out_row_stride,
    dout_row_stride,
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
    HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(dq + one sequence's share of a query tile, the factor ``scale`` left out; which rows see a key of it).

    Stores the tile's delta and norm. Pointers of row quantities point at the tile's first row, those of keys at the
    sequence's first key.
    """
    offset = tl.arange(0, BLOCK_M)
    rows = first_row + offset
    row_mask = rows < n_q
    last_row = tl.minimum(first_row + BLOCK_M, n_q) - 1
    begin, free_begin, free_end, end = key_ranges(
        first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    # What comes in for a row that sees no key is ignored, NaN too.
    sees_key = row_mask & (rows >= first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT))
    dout = load_tile(dout_ptr, dout_row_stride, sees_key, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    lse = tl.load(lse_ptr + offset, mask=sees_key, other=float("inf"))
    if EXACT:
        free_end = begin  # one stretch: arithmetic hides the masks, and every stretch is compiled anew, slowly
        norm, delta = _exact_statistics(
            q,
            dout,
            lse,
            k_ptr,
            v_ptr,
            k_row_stride,
            v_row_stride,
            rows,
            begin,
            end,
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
        )
        norm = tl.where(sees_key, norm, 0.0)
        delta = tl.where(sees_key, delta, 0.0)
        tl.store(norm_ptr + offset, norm, mask=row_mask)
    else:
        lse *= LOG2E
        out = load_tile(out_ptr, out_row_stride, sees_key, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + offset, mask=sees_key, other=0.0)
        if not EXACT:
            delta -= dlse
    tl.store(delta_ptr + offset, delta, mask=row_mask)

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
            p = exponential(scores - lse[:, None], EXACT)
            ds = product(dout, tl.trans(v), EXACT) - delta[:, None]
            if EXACT:
                p *= norm[:, None]
                if HAS_DLSE:
                    ds += dlse[:, None]
            ds *= p
            if PHASE != 1 and (HAS_LEFT or HAS_RIGHT):
                sees = visible(
                    rows[:, None], columns[None, :], n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                ds = tl.where(sees, ds, 0.0)
            dq = add_product(dq, ds.to(k.dtype), k, EXACT)
    return dq, sees_key


@triton.jit(do_not_specialize=["num_sequences", "q_rows", "kv_rows", "window_left", "window_right"])
def query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    norm_ptr,
    dq_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    q_tiles_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    dout_row_stride,
    dout_head_stride,
    num_sequences,
    q_rows,
    kv_rows,
    num_heads,
    group_size,
    window_left,
    window_right,
    scale,
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
    """dq (q_rows, H, D) and delta (H, q_rows), contiguous. Grid: records * (RECORD_ROWS / BLOCK_M) * H."""
    SPLIT: tl.constexpr = RECORD_ROWS // BLOCK_M
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    part = (program // num_heads) % SPLIT
    segment, block = load_record(q_tiles_ptr, program // num_heads // SPLIT)
    q_start, n_q = segment_rows(q_offsets_ptr, segment, num_sequences, q_rows)
    kv_start, n_kv = segment_rows(kv_offsets_ptr, segment, num_sequences, kv_rows)
    if segment < 0:
        return
    if HAS_RIGHT:  # the last rows see the most keys: they go first
        block = (n_q + RECORD_ROWS - 1) // RECORD_ROWS - 1 - block
        part = SPLIT - 1 - part
    first_row = block * RECORD_ROWS + part * BLOCK_M
    if (first_row >= n_q) | (first_row < 0):
        return

    row_mask = first_row + tl.arange(0, BLOCK_M) < n_q
    row = q_start + first_row
    own_row_stride = num_heads * HEAD_DIM  # of out and dq, which are contiguous
    own = row * own_row_stride + head * HEAD_DIM
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if segment >= num_sequences:
        store_tile(dq_ptr + own, own_row_stride, row_mask, dq, BLOCK_M, HEAD_DIM, BLOCK_D)
        return

    q_ptr += row * q_row_stride + head * q_head_stride
    q = load_tile(q_ptr, q_row_stride, row_mask, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    kv_head = head // group_size
    statistic = head * q_rows + row
    dq, sees_key = _query_gradient(
        dq,
        q,
        out_ptr + own,
        dout_ptr + row * dout_row_stride + head * dout_head_stride,
        lse_ptr + statistic,
        dlse_ptr + statistic,
        delta_ptr + statistic,
        norm_ptr + statistic,
        k_ptr + kv_start * k_row_stride + kv_head * k_head_stride,
        v_ptr + kv_start * v_row_stride + kv_head * v_head_stride,
        own_row_stride,
        dout_row_stride,
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
        HAS_DLSE,
        HAS_LEFT,
        HAS_RIGHT,
        EXACT,
    )
    # 0 * NaN of a key that shares the tile with a row that sees none.
    dq = tl.where(sees_key[:, None], dq * scale, 0.0)
    store_tile(dq_ptr + own, own_row_stride, row_mask, dq, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_sequences", "num_chunks", "kv_rows", "window_left", "window_right", "shared_rows"])
def shared_query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    norm_ptr,
    partial_ptr,
    kv_offsets_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    dout_row_stride,
    dout_head_stride,
    num_sequences,
    num_chunks,
    shared_rows,
    kv_rows,
    num_heads,
    group_size,
    window_left,
    window_right,
    scale,
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
    """Gradient of a query that every sequence shares: partial (chunks, S, H, D) float32, delta (H, B * S).

    A program keeps its query tile on chip, walks the sequences chunk, chunk + num_chunks, ... and sums their shares;
    the partial sums are added afterwards, in a fixed order. Grid: tiles of S * H * chunks.
    """
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    chunk = (program // num_heads) % num_chunks
    first_row = (program // num_heads // num_chunks) * BLOCK_M
    row_mask = first_row + tl.arange(0, BLOCK_M) < shared_rows
    q_ptr += first_row.to(tl.int64) * q_row_stride + head * q_head_stride
    q = load_tile(q_ptr, q_row_stride, row_mask, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    kv_head = head // group_size
    own_row_stride = num_heads * HEAD_DIM  # of out and partial, which are contiguous
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for sequence in tl.range(chunk, num_sequences, num_chunks):
        kv_start, n_kv = segment_rows(kv_offsets_ptr, sequence, num_sequences, kv_rows)
        row = (sequence + tl.zeros([], tl.int64)) * shared_rows + first_row
        statistic = head * num_sequences * shared_rows + row
        total, sees_key = _query_gradient(
            dq,
            q,
            out_ptr + row * own_row_stride + head * HEAD_DIM,
            dout_ptr + row * dout_row_stride + head * dout_head_stride,
            lse_ptr + statistic,
            dlse_ptr + statistic,
            delta_ptr + statistic,
            norm_ptr + statistic,
            k_ptr + kv_start * k_row_stride + kv_head * k_head_stride,
            v_ptr + kv_start * v_row_stride + kv_head * v_head_stride,
            own_row_stride,
            dout_row_stride,
            k_row_stride,
            v_row_stride,
            first_row,
            shared_rows,
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
        # A row that sees no key of this sequence takes nothing from it, not even 0 * NaN. Without a right side all
        # rows of a sequence see a key or none does.
        dq = tl.where(sees_key[:, None], total, dq) if HAS_RIGHT else total
    partial_ptr += ((chunk + tl.zeros([], tl.int64)) * shared_rows + first_row) * own_row_stride + head * HEAD_DIM
    store_tile(partial_ptr, own_row_stride, row_mask, dq * scale, BLOCK_M, HEAD_DIM, BLOCK_D)
