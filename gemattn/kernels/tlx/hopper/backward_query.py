"""Query gradients on sm_90, and the row statistics that the key kernel reads.

A program owns 128 query rows, 64 a consumer: dq stays in registers while key and value blocks stream by, three
products a block. ``delta = rowsum(dO * O) - dlse`` is computed on the way.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import (
    LOG2E,
    RECORD_ROWS,
    clear_rows,
    first_seeing_row,
    hide,
    key_blocks,
    read_tile,
    ring,
    stat_block,
    tile_range,
)


@triton.jit
def _load_pair(
    desc, bufs, full, free, count, row, column, BYTES: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr
):
    """Both consumers' halves of a tile of rows into their buffers, once they are free."""
    buf, phase = ring(count, STAGES)
    for half in tl.static_range(2):
        slot = 2 * buf + half
        tlx.barrier_wait(free[slot], phase ^ 1)
        tlx.barrier_expect_bytes(full[slot], BYTES)
        tlx.async_descriptor_load(desc, bufs[slot], [row + half * HALF, column], full[slot])


@triton.jit
def _stream_keys(
    k_desc, v_desc, k_column, v_column, begin, end, kv_count, k_bufs, v_bufs, k_full, k_free, v_full, v_free,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES_KV: tl.constexpr,
):  # fmt: skip
    """Key and value blocks end - 1 down to begin into their rings; returns the new count of blocks."""
    for step in tl.range(0, end - begin):
        row = (end - 1 - step) * BLOCK_N
        buf, phase = ring(kv_count, STAGES_KV)
        tlx.barrier_wait(k_free[buf], phase ^ 1)
        tlx.barrier_expect_bytes(k_full[buf], BLOCK_N * HEAD_DIM * 2)
        tlx.async_descriptor_load(k_desc, k_bufs[buf], [row, k_column], k_full[buf])
        tlx.barrier_wait(v_free[buf], phase ^ 1)
        tlx.barrier_expect_bytes(v_full[buf], BLOCK_N * HEAD_DIM * 2)
        tlx.async_descriptor_load(v_desc, v_bufs[buf], [row, v_column], v_full[buf])
        kv_count += 1
    return kv_count


@triton.jit
def _gradient_blocks(
    dq, kv_count, from_block, to_block, rows, lse_buf, delta_buf, shift, n_kv, window_left, window_right, score_scale,
    q_buf, do_buf, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
    REGISTER_A: tl.constexpr = False,
):  # fmt: skip
    """Blocks from_block - 1 down to to_block. Keys past the end are zeros in shared memory: their share is 0."""
    for step in tl.range(0, from_block - to_block):
        block = from_block - 1 - step
        buf, phase = ring(kv_count, STAGES_KV)
        tlx.barrier_wait(k_full[buf], phase)
        scores = tlx.async_dot(tlx.local_load(q_buf) if REGISTER_A else q_buf, tlx.local_trans(k_bufs[buf]))
        tlx.barrier_wait(v_full[buf], phase)
        dp = tlx.async_dot(tlx.local_load(do_buf) if REGISTER_A else do_buf, tlx.local_trans(v_bufs[buf]))
        scores = tlx.async_dot_wait(1, scores) * score_scale
        if MASKED:
            scores = hide(
                scores, rows, block * BLOCK_N, shift, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
        lse = tlx.local_load(lse_buf)
        p = tl.math.exp2(tl.minimum(scores - lse[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL))
        dp = tlx.async_dot_wait(0, dp)
        tlx.barrier_arrive(v_free[buf], 1)
        delta = tlx.local_load(delta_buf)
        ds = p * (dp - delta[:, None])
        dq = tlx.async_dot(ds.to(DTYPE), k_bufs[buf], dq)
        dq = tlx.async_dot_wait(0, dq)
        tlx.barrier_arrive(k_free[buf], 1)
        kv_count += 1
    return dq, kv_count


@triton.jit
def _one_tile(
    dq, kv_count, do_phase, o_phase, begin, free_begin, free_end, end, rows, n_q, n_kv, lse_ptrs, dlse_ptrs, stat_ptr,
    delta_ptr, stat_offset, window_left, window_right, score_scale, q_buf, do_buf, o_buf, lse_buf, delta_buf, do_full,
    do_free, o_full, o_free, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HALF:
    tl.constexpr,
):  # fmt: skip
    """dq of a tile; leaves lse (base 2) and delta of its rows, +inf for a row that takes no part."""
    sees_key = (rows >= first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)) & (rows < n_q)
    lse = tl.load(lse_ptrs, mask=sees_key, other=float("inf")) * LOG2E
    tlx.barrier_wait(do_full, do_phase)
    tlx.barrier_wait(o_full, o_phase)
    delta = tl.sum(tlx.local_load(do_buf).to(tl.float32) * tlx.local_load(o_buf).to(tl.float32), 1)
    delta = tl.where(sees_key, delta, 0.0)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptrs, mask=sees_key, other=0.0)
    lane = tl.arange(0, HALF)
    # A block without rows has no place of its own: it would write over the next sequence's.
    has_rows = rows - lane < n_q
    tl.store(stat_ptr + stat_offset + lane, lse, mask=has_rows)
    tl.store(delta_ptr + stat_offset + lane, delta, mask=has_rows)
    # Read back in the layout that the products want: a conversion in every step would cost barriers.
    tlx.local_store(lse_buf, lse)
    tlx.local_store(delta_buf, delta)
    tlx.barrier_arrive(o_free, 1)
    shift = n_kv - n_q
    if HAS_RIGHT:
        dq, kv_count = _gradient_blocks(
            dq, kv_count, end, free_end, rows, lse_buf, delta_buf, shift, n_kv, window_left, window_right, score_scale,
            q_buf, do_buf, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_LEFT,
            HAS_RIGHT, True,
        )  # fmt: skip
        free_top = free_end
    else:
        free_top = end
    dq, kv_count = _gradient_blocks(
        dq, kv_count, free_top, free_begin, rows, lse_buf, delta_buf, shift, n_kv, window_left, window_right,
        score_scale, q_buf, do_buf, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_LEFT,
        HAS_RIGHT, False,
    )  # fmt: skip
    if HAS_LEFT:
        dq, kv_count = _gradient_blocks(
            dq, kv_count, tl.minimum(free_begin, free_top), begin, rows, lse_buf, delta_buf, shift, n_kv, window_left,
            window_right, score_scale, q_buf, do_buf, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N,
            STAGES_KV, HAS_LEFT, HAS_RIGHT, True,
        )  # fmt: skip
    tlx.barrier_arrive(do_free, 1)
    return dq, kv_count, sees_key


@triton.jit
def _produce(
    table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, num_sequences, q_head_stride, k_head_stride,
    v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs, o_bufs, k_bufs, v_bufs, q_full, q_free,
    do_full, do_free, o_full, o_free, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr, STAGES_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT:
    tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    BYTES: tl.constexpr = HALF * HEAD_DIM * 2
    q_count = 0
    kv_count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, first_row, n_q, n_kv, _q_start = read_tile(
        tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, _next_q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
        )
        if segment < num_sequences:
            last_row = tl.minimum(first_row + RECORD_ROWS, n_q) - 1
            begin, _free_begin, _free_end, end = key_blocks(
                first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                q_desc = read_descriptor(table, segment, [HALF, HEAD_DIM], DTYPE)
                k_desc = read_descriptor(table, num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                v_desc = read_descriptor(table, 2 * num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                o_desc = read_descriptor(table, 3 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                do_desc = read_descriptor(table, 4 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                # Query-side descriptors begin at the first row that sees a key: rows before it arrive as zeros.
                row = first_row - first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
                _load_pair(
                    do_desc, do_bufs, do_full, do_free, q_count, row, head * do_head_stride, BYTES, HALF, STAGES_Q
                )
                _load_pair(q_desc, q_bufs, q_full, q_free, q_count, row, head * q_head_stride, BYTES, HALF, STAGES_Q)
                kv_count = _stream_keys(
                    k_desc, v_desc, head * k_head_stride, head * v_head_stride, end - 1, end, kv_count, k_bufs, v_bufs,
                    k_full, k_free, v_full, v_free, BLOCK_N, HEAD_DIM, STAGES_KV,
                )  # fmt: skip
                _load_pair(o_desc, o_bufs, o_full, o_free, q_count, row, head * HEAD_DIM, BYTES, HALF, 1)
                kv_count = _stream_keys(
                    k_desc, v_desc, head * k_head_stride, head * v_head_stride, begin, end - 1, kv_count, k_bufs,
                    v_bufs, k_full, k_free, v_full, v_free, BLOCK_N, HEAD_DIM, STAGES_KV,
                )  # fmt: skip
                q_count += 1
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv


@triton.jit
def _consume(
    table, tiles_ptr, offsets_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, dq_ptr, first_tile, last_tile, heads,
    num_sequences, out_rows, window_left, window_right, scale, score_scale, q_bufs, dq_bufs, do_bufs, o_bufs, lse_bufs,
    delta_bufs, k_bufs, v_bufs, q_full, q_free, do_full, do_free, o_full, o_free, k_full, k_free, v_full, v_free, half:
    tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr, STAGES_KV:
    tl.constexpr, HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    q_count = 0
    kv_count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, first_row, n_q, n_kv, q_start = read_tile(
        tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, next_q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
        )
        rows = first_row + half * HALF + tl.arange(0, HALF)
        last_row = tl.minimum(first_row + RECORD_ROWS, n_q) - 1
        begin, free_begin, free_end, end = key_blocks(
            first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        stat_offset = stat_block(q_start, segment, first_row // HALF + half, head.to(tl.int64), heads, HALF)
        dq = tl.zeros([HALF, HEAD_DIM], tl.float32)
        if end > begin:
            row_stat = head.to(tl.int64) * out_rows + q_start + rows
            buf, phase = ring(q_count, STAGES_Q)
            slot = 2 * buf + half
            # The query buffer is read by products only; it is full before the first score is asked for.
            tlx.barrier_wait(q_full[slot], phase)
            if STAGES_Q > 1:
                # dq of the tile before has left through that tile's query buffer.
                tlx.async_descriptor_store_wait(0)
                before = 2 * ((q_count + STAGES_Q - 1) % STAGES_Q) + half
                tlx.barrier_arrive(q_free[before], 1, pred=q_count > 0)
            dq, kv_count, sees_key = _one_tile(
                dq, kv_count, phase, q_count & 1, begin, free_begin, free_end, end, rows, n_q, n_kv, lse_ptr + row_stat,
                dlse_ptr + row_stat, stat_ptr, delta_ptr, stat_offset, window_left, window_right, score_scale,
                q_bufs[slot], do_bufs[slot], o_bufs[half], lse_bufs[half], delta_bufs[half], do_full[slot],
                do_free[slot], o_full[half], o_free[half], k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE,
                BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT, HALF,
            )  # fmt: skip
            q_count += 1
            dq = tl.where(sees_key[:, None], dq * scale, 0.0)
            # Through the buffer of this consumer's own query rows, which no one else reads.
            tlx.local_store(dq_bufs[slot], dq.to(DTYPE))
            tlx.fence("async_shared")
            dq_desc = read_descriptor(table, 5 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            tlx.async_descriptor_store(dq_desc, dq_bufs[slot], [first_row + half * HALF, head * HEAD_DIM])
            if STAGES_Q == 1:
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(q_free[slot], 1)
        else:
            if segment < num_sequences:
                has_rows = rows - tl.arange(0, HALF) < n_q
                tl.store(
                    stat_ptr + stat_offset + tl.arange(0, HALF),
                    tl.full([HALF], float("inf"), tl.float32),
                    mask=has_rows,
                )
                tl.store(delta_ptr + stat_offset + tl.arange(0, HALF), tl.zeros([HALF], tl.float32), mask=has_rows)
            clear_rows(dq_ptr, q_start + first_row + half * HALF, q_start + n_q, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv
        q_start = next_q_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "out_rows", "window_left", "window_right"])
def query_gradient_kernel(
    table, tiles_ptr, longer_ptr, offsets_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, dq_ptr, num_tiles, heads,
    num_sequences, out_rows, q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right,
    scale, score_scale, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr, STAGES_KV: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq (out_rows, H, D) and the statistics (blocks, H, 64) of lse (base 2) and delta. Persistent: any grid.

    Of the tiles of length classes BEGIN to END, see `tile_range`.
    """
    HALF: tl.constexpr = RECORD_ROWS // 2
    DTYPE: tl.constexpr = dq_ptr.dtype.element_ty
    q_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_Q)
    # A name of its own: a buffer of operands that is ever stored to gets a fence before every product that reads it.
    dq_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_Q, reuse=q_bufs)
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_Q)
    o_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    lse_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    delta_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    k_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    v_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    q_full = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    do_free = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    o_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    o_free = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    k_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
    v_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    v_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
    first_tile, last_tile = tile_range(longer_ptr, num_tiles, heads, BEGIN, END)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, num_sequences,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs,
                o_bufs, k_bufs, v_bufs, q_full, q_free, do_full, do_free, o_full, o_free, k_full, k_free, v_full,
                v_free, DTYPE, HEAD_DIM, BLOCK_N, STAGES_Q, STAGES_KV, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, offsets_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, dq_ptr, first_tile, last_tile,
                heads, num_sequences, out_rows, window_left, window_right, scale, score_scale, q_bufs, dq_bufs, do_bufs,
                o_bufs, lse_bufs, delta_bufs, k_bufs, v_bufs, q_full, q_free, do_full, do_free, o_full, o_free, k_full,
                k_free, v_full, v_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, BLOCK_N, STAGES_Q, STAGES_KV,
                HAS_DLSE, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
