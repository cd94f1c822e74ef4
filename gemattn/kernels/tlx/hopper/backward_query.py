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
    from_column,
    key_blocks,
    read_tile,
    ring,
    stat_block,
    tile_range,
)
from gemattn.kernels.tlx.hopper.buffers import skip_blocks, store_rows


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
def _leave_delta(delta_ptrs, has_rows, sees_key, dlse, do_buf, o_buf, delta_buf, HAS_DLSE: tl.constexpr):
    """delta of a consumer's rows, for its own products and the key kernel's."""
    delta = tl.sum(tlx.local_load(do_buf).to(tl.float32) * tlx.local_load(o_buf).to(tl.float32), 1)
    delta = tl.where(sees_key, delta, 0.0)
    if HAS_DLSE:
        delta -= dlse
    tl.store(delta_ptrs, delta, mask=has_rows)
    # Read back in the layout that the products want: a conversion in every step would cost barriers.
    tlx.local_store(delta_buf, delta)


@triton.jit
def _gradient_block(
    dq, kv_count, block, last_block, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left, window_right,
    score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase, k_bufs, v_bufs, k_full,
    k_free, v_full, v_free, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds a block's share to dq. A tile's FIRST one leaves delta on the way, and alone may have keys past the end."""
    HALF: tl.constexpr = RECORD_ROWS // 2
    # Always 0, but not to the compiler: it would keep every buffer's address in registers that the products need.
    zero = kv_count >> 30
    if MASKED or FIRST:
        slot += zero
    buf, phase = ring(kv_count, STAGES_KV)
    tlx.barrier_wait(k_full[buf], phase)
    scores = tlx.async_dot(q_bufs[slot], tlx.local_trans(k_bufs[buf]))
    tlx.barrier_wait(v_full[buf], phase)
    dp = tlx.async_dot(do_bufs[slot], tlx.local_trans(v_bufs[buf]))
    scores = tlx.async_dot_wait(1, scores) * score_scale
    if MASKED:
        own_key = rows + (shift + zero) - block * BLOCK_N
        if HAS_RIGHT:
            scores = tl.where(from_column(own_key + (window_right + 1), HALF, BLOCK_N), float("-inf"), scores)
        if HAS_LEFT:
            scores = tl.where(from_column(own_key - window_left, HALF, BLOCK_N), scores, float("-inf"))
    lse = tlx.local_load(lse_buf)
    exponent = scores - lse[:, None]
    if FIRST:  # of a key past the end nothing bounds it, and 0 times infinity would get into dq
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.math.exp2(exponent)
    if FIRST:
        # O comes late, when dq of the tile before has left its buffer: products and exponentials hide the wait.
        tlx.barrier_wait(o_full, o_phase)
        _leave_delta(delta_ptrs, has_rows, sees_key, dlse, do_bufs[slot], o_buf, delta_buf, HAS_DLSE)
    dp = tlx.async_dot_wait(0, dp)
    tlx.barrier_arrive(v_free[buf], 1)
    if block == last_block:
        # No product reads q and dO of this tile any more: the next ones come while this block is finished.
        tlx.barrier_arrive(q_free[slot], 1)
    delta = tlx.local_load(delta_buf)
    ds = p * (dp - delta[:, None])
    dq = tlx.async_dot(ds.to(DTYPE), k_bufs[buf], dq)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k_free[buf], 1)
    return dq


@triton.jit
def _gradient_blocks(
    dq, kv_count, from_block, to_block, last_block, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left,
    window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase, k_bufs,
    v_bufs, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_KV: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks from_block - 1 down to to_block. Keys past the end are zeros in shared memory: their share is 0."""
    for step in tl.range(0, from_block - to_block):
        dq = _gradient_block(
            dq, kv_count, from_block - 1 - step, last_block, rows, sees_key, dlse, delta_ptrs, has_rows, shift,
            window_left, window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full,
            o_phase, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT,
            HAS_RIGHT, MASKED, False,
        )  # fmt: skip
        kv_count += 1
    return dq, kv_count


@triton.jit
def _one_tile(
    kv_count, begin, free_begin, free_end, end, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left,
    window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase, k_bufs,
    v_bufs, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """dq of the blocks [begin, end) that a consumer's rows see, one at least; leaves delta."""
    dq = tl.zeros([HALF, HEAD_DIM], tl.float32)
    dq = _gradient_block(
        dq, kv_count, end - 1, begin, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left, window_right,
        score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase, k_bufs, v_bufs, k_full,
        k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT, HAS_LEFT or HAS_RIGHT, True,
    )  # fmt: skip
    kv_count += 1
    free_top = tl.minimum(free_end, end - 1)
    if HAS_RIGHT:
        dq, kv_count = _gradient_blocks(
            dq, kv_count, end - 1, free_top, begin, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left,
            window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase,
            k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT,
            True,
        )  # fmt: skip
    dq, kv_count = _gradient_blocks(
        dq, kv_count, free_top, free_begin, begin, rows, sees_key, dlse, delta_ptrs, has_rows, shift, window_left,
        window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free, o_full, o_phase, k_bufs,
        v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT, False,
    )  # fmt: skip
    if HAS_LEFT:
        dq, kv_count = _gradient_blocks(
            dq, kv_count, tl.minimum(free_begin, free_top), begin, begin, rows, sees_key, dlse, delta_ptrs, has_rows,
            shift, window_left, window_right, score_scale, slot, q_bufs, do_bufs, o_buf, lse_buf, delta_buf, q_free,
            o_full, o_phase, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV, HAS_DLSE,
            HAS_LEFT, HAS_RIGHT, True,
        )  # fmt: skip
    return dq, kv_count


@triton.jit
def _produce(
    table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, num_sequences, q_head_stride, k_head_stride,
    v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs, o_bufs, k_bufs, v_bufs, q_full, q_free,
    do_full, o_full, o_free, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr, STAGES_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
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
                # In the order in which buffers of the tile before are freed, and wanted in this one.
                # Query-side descriptors begin at the first row that sees a key: rows before it arrive as zeros.
                row = first_row - first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
                kv_count = _stream_keys(
                    k_desc, v_desc, head * k_head_stride, head * v_head_stride, end - 1, end, kv_count, k_bufs, v_bufs,
                    k_full, k_free, v_full, v_free, BLOCK_N, HEAD_DIM, STAGES_KV,
                )  # fmt: skip
                stage, phase = ring(q_count, STAGES_Q)
                for half in tl.static_range(2):
                    slot = 2 * stage + half
                    tlx.barrier_wait(q_free[slot], phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[slot], BYTES)
                    tlx.async_descriptor_load(
                        q_desc, q_bufs[slot], [row + half * HALF, head * q_head_stride], q_full[slot]
                    )
                    tlx.barrier_expect_bytes(do_full[slot], BYTES)
                    tlx.async_descriptor_load(
                        do_desc, do_bufs[slot], [row + half * HALF, head * do_head_stride], do_full[slot]
                    )
                for half in tl.static_range(2):
                    tlx.barrier_wait(o_free[half], (q_count & 1) ^ 1)
                    tlx.barrier_expect_bytes(o_full[half], BYTES)
                    tlx.async_descriptor_load(o_desc, o_bufs[half], [row + half * HALF, head * HEAD_DIM], o_full[half])
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
    num_sequences, out_rows, window_left, window_right, scale, score_scale, q_bufs, do_bufs, o_bufs, lse_bufs,
    delta_bufs, k_bufs, v_bufs, q_full, q_free, do_full, o_full, o_free, k_full, k_free, v_full, v_free,
    half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr,
    STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    all_dq = read_descriptor(table, 10 * num_sequences + 2, [HALF, HEAD_DIM], DTYPE)
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
        lane = tl.arange(0, HALF)
        my_first = first_row + half * HALF
        rows = my_first + lane
        last_row = tl.minimum(first_row + RECORD_ROWS, n_q) - 1
        begin, _free_begin, _free_end, end = key_blocks(
            first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        stat_offset = stat_block(q_start, segment, first_row // HALF + half, head.to(tl.int64), heads, HALF)
        delta_ptrs = delta_ptr + stat_offset + lane
        # A block without rows has no place of its own: it would write over the next sequence's.
        has_rows = rows - lane < n_q
        if end > begin:
            sees_key = (rows >= first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)) & (rows < n_q)
            row_stat = head.to(tl.int64) * out_rows + q_start + rows
            lse = tl.load(lse_ptr + row_stat, mask=sees_key, other=float("inf")) * LOG2E
            dlse = sees_key
            if HAS_DLSE:
                dlse = tl.load(dlse_ptr + row_stat, mask=sees_key, other=0.0)
            # dq of the tile before has left through the buffer of its O.
            tlx.async_descriptor_store_wait(0)
            tlx.barrier_arrive(o_free[half], 1, pred=q_count > 0)
            tl.store(stat_ptr + stat_offset + lane, lse, mask=has_rows)
            tlx.local_store(lse_bufs[half], lse)
            my_begin, my_free_begin, my_free_end, my_end = key_blocks(
                my_first, tl.minimum(my_first + HALF, n_q) - 1, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
            takes_part = (my_first < n_q) & (my_end > my_begin)
            kv_count = skip_blocks(
                kv_count, end - tl.where(takes_part, my_end, begin), k_full, k_free, v_full, v_free, STAGES_KV
            )
            buf, phase = ring(q_count, STAGES_Q)
            slot = 2 * buf + half
            tlx.barrier_wait(q_full[slot], phase)
            tlx.barrier_wait(do_full[slot], phase)
            if takes_part:
                dq, kv_count = _one_tile(
                    kv_count, my_begin, my_free_begin, my_free_end, my_end, rows, sees_key, dlse, delta_ptrs, has_rows,
                    n_kv - n_q, window_left, window_right, score_scale, slot, q_bufs, do_bufs, o_bufs[half],
                    lse_bufs[half], delta_bufs[half], q_free, o_full[half], q_count & 1, k_bufs, v_bufs, k_full, k_free,
                    v_full, v_free, DTYPE, HEAD_DIM, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT, HALF,
                )  # fmt: skip
                if HAS_LEFT:
                    kv_count = skip_blocks(kv_count, my_begin - begin, k_full, k_free, v_full, v_free, STAGES_KV)
                tlx.local_store(o_bufs[half], tl.where(sees_key[:, None], dq * scale, 0.0).to(DTYPE))
            else:
                tlx.barrier_arrive(q_free[slot], 1)
                tlx.barrier_wait(o_full[half], q_count & 1)
                tl.store(delta_ptrs, tl.zeros([HALF], tl.float32), mask=has_rows)
                tlx.local_store(o_bufs[half], tl.zeros([HALF, HEAD_DIM], DTYPE))
            store_rows(
                table, all_dq, 5 * num_sequences + segment, o_bufs[half], q_start, my_first, n_q, head * HEAD_DIM,
                DTYPE, HEAD_DIM,
            )  # fmt: skip
            q_count += 1
        else:
            if segment < num_sequences:
                tl.store(stat_ptr + stat_offset + lane, tl.full([HALF], float("inf"), tl.float32), mask=has_rows)
                tl.store(delta_ptrs, tl.zeros([HALF], tl.float32), mask=has_rows)
            clear_rows(dq_ptr, q_start + my_first, q_start + n_q, heads, head, HEAD_DIM)
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
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_Q)
    o_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    lse_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    delta_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    k_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    v_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    q_full = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
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
                table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, num_sequences, q_head_stride,
                k_head_stride, v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs, o_bufs,
                k_bufs, v_bufs, q_full, q_free, do_full, o_full, o_free, k_full, k_free, v_full, v_free, DTYPE,
                HEAD_DIM, BLOCK_N, STAGES_Q, STAGES_KV, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, offsets_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, dq_ptr, first_tile, last_tile,
                heads, num_sequences, out_rows, window_left, window_right, scale, score_scale, q_bufs, do_bufs, o_bufs,
                lse_bufs, delta_bufs, k_bufs, v_bufs, q_full, q_free, do_full, o_full, o_free, k_full, k_free, v_full,
                v_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, BLOCK_N, STAGES_Q, STAGES_KV, HAS_DLSE, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
