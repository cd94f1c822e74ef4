"""Key and value gradients on sm_90.

A program owns 128 keys of one sequence and head, 64 a consumer: dk and dv stay in registers while blocks of 64 query
rows and their incoming gradients stream by, four products a block, scores held transposed (key, query). Row statistics
come from `backward_query`, one block of 64 with each block of rows; a row that takes no part has lse = +inf, so its
probabilities are 0.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import (
    RECORD_ROWS,
    clear_rows,
    first_seeing_row,
    from_column,
    query_blocks,
    read_tile,
    ring,
    stat_block,
    tile_range,
)
from gemattn.kernels.tlx.hopper.buffers import skip_blocks, store_rows


@triton.jit
def _produce(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, first_tile, last_tile, heads, num_sequences, q_head_stride,
    k_head_stride, v_head_stride, do_head_stride, window_left, window_right, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
    delta_bufs, k_full, v_full, kv_free, q_full, q_free, do_full, do_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES_KV: tl.constexpr, STAGES_Q: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    KEYS_UP_TO: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    BYTES: tl.constexpr = HALF * HEAD_DIM * 2
    lse_desc = read_descriptor(table, 8 * num_sequences, [HALF], tl.float32)
    delta_desc = read_descriptor(table, 8 * num_sequences + 1, [HALF], tl.float32)
    tile_count = 0
    q_count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, first_key, n_kv, n_q, _kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, last_tile, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, _next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, last_tile, heads, num_sequences
        )
        if (segment < num_sequences) & (n_kv <= KEYS_UP_TO):
            last_key = tl.minimum(first_key + RECORD_ROWS, n_kv) - 1
            begin, _free_begin, _free_end, end = query_blocks(
                first_key, last_key, n_q, n_kv, window_left, window_right, HALF, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                q_desc = read_descriptor(table, segment, [HALF, HEAD_DIM], DTYPE)
                k_desc = read_descriptor(table, 8 * num_sequences + 2 + segment, [HALF, HEAD_DIM], DTYPE)
                v_desc = read_descriptor(table, 9 * num_sequences + 2 + segment, [HALF, HEAD_DIM], DTYPE)
                do_desc = read_descriptor(table, 4 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                q_start = tl.load(q_offsets_ptr + segment)
                first_seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
                stage, kv_phase = ring(tile_count, STAGES_KV)
                for half in tl.static_range(2):
                    slot = 2 * stage + half
                    first = first_key + half * HALF
                    tlx.barrier_wait(kv_free[slot], kv_phase ^ 1)
                    tlx.barrier_expect_bytes(k_full[slot], BYTES)
                    tlx.async_descriptor_load(k_desc, k_bufs[slot], [first, head * k_head_stride], k_full[slot])
                    tlx.barrier_expect_bytes(v_full[slot], BYTES)
                    tlx.async_descriptor_load(v_desc, v_bufs[slot], [first, head * v_head_stride], v_full[slot])
                tile_count += 1
                for block in tl.range(begin, end):
                    buf, phase = ring(q_count, STAGES_Q)
                    row = block * HALF - first_seeing
                    stat = stat_block(q_start, segment, block, head, heads, HALF).to(tl.int32)
                    tlx.barrier_wait(q_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[buf], BYTES + HALF * 4)
                    tlx.async_descriptor_load(q_desc, q_bufs[buf], [row, head * q_head_stride], q_full[buf])
                    tlx.async_descriptor_load(lse_desc, lse_bufs[buf], [stat], q_full[buf])
                    tlx.barrier_wait(do_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(do_full[buf], BYTES + HALF * 4)
                    tlx.async_descriptor_load(do_desc, do_bufs[buf], [row, head * do_head_stride], do_full[buf])
                    tlx.async_descriptor_load(delta_desc, delta_bufs[buf], [stat], do_full[buf])
                    q_count += 1
        segment = next_segment
        head = next_head
        first_key = next_first_key
        n_kv = next_n_kv
        n_q = next_n_q


@triton.jit
def _gradient_blocks(
    dk, dv, q_count, from_block, to_block, keys, shift, window_left, window_right, score_scale, k_buf, v_buf, q_bufs,
    do_bufs, lse_bufs, delta_bufs, q_full, q_free, do_full, do_free, DTYPE: tl.constexpr, STAGES_Q: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Query blocks [from_block, to_block). Keys past the end have rows of their own, which no store writes."""
    HALF: tl.constexpr = RECORD_ROWS // 2
    for block in tl.range(from_block, to_block):
        buf, phase = ring(q_count, STAGES_Q)
        tlx.barrier_wait(q_full[buf], phase)
        scores = tlx.async_dot(k_buf, tlx.local_trans(q_bufs[buf]))
        tlx.barrier_wait(do_full[buf], phase)
        dp = tlx.async_dot(v_buf, tlx.local_trans(do_bufs[buf]))
        lse = tlx.local_load(lse_bufs[buf])
        scores = tlx.async_dot_wait(1, scores) * score_scale
        if MASKED:
            own_row = keys - shift - block * HALF
            if HAS_RIGHT:
                scores = tl.where(from_column(own_row - window_right, HALF, HALF), scores, float("-inf"))
            if HAS_LEFT:
                scores = tl.where(from_column(own_row + (window_left + 1), HALF, HALF), float("-inf"), scores)
        p = tl.math.exp2(scores - lse[None, :])
        dv = tlx.async_dot(p.to(DTYPE), do_bufs[buf], dv)
        delta = tlx.local_load(delta_bufs[buf])
        dp = tlx.async_dot_wait(1, dp)
        ds = p * (dp - delta[None, :])
        dk = tlx.async_dot(ds.to(DTYPE), q_bufs[buf], dk)
        dv = tlx.async_dot_wait(1, dv)
        tlx.barrier_arrive(do_free[buf], 1)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_free[buf], 1)
        q_count += 1
    return dk, dv, q_count


@triton.jit
def _consume(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, first_tile, last_tile, heads, num_sequences,
    window_left, window_right, scale, score_scale, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, dk_bufs,
    dv_bufs, k_full, v_full, kv_free, q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES_KV: tl.constexpr, STAGES_Q: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, KEYS_UP_TO: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    all_dk = read_descriptor(table, 10 * num_sequences + 3, [HALF, HEAD_DIM], DTYPE)
    all_dv = read_descriptor(table, 10 * num_sequences + 4, [HALF, HEAD_DIM], DTYPE)
    tile_count = 0
    q_count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, first_key, n_kv, n_q, kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, last_tile, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, last_tile, heads, num_sequences
        )
        my_first = first_key + half * HALF
        keys = my_first + tl.arange(0, HALF)
        last_key = tl.minimum(first_key + RECORD_ROWS, n_kv) - 1
        begin, _free_begin, _free_end, end = query_blocks(
            first_key, last_key, n_q, n_kv, window_left, window_right, HALF, HAS_LEFT, HAS_RIGHT
        )
        mine = (segment >= num_sequences) | (n_kv <= KEYS_UP_TO)
        if (end > begin) & (segment < num_sequences) & mine:
            dk = tl.zeros([HALF, HEAD_DIM], tl.float32)
            dv = tl.zeros([HALF, HEAD_DIM], tl.float32)
            shift = n_kv - n_q
            my_begin, my_free_begin, my_free_end, my_end = query_blocks(
                my_first, tl.minimum(my_first + HALF, n_kv) - 1, n_q, n_kv, window_left, window_right, HALF, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
            if my_first >= n_kv:
                my_begin = end
                my_free_begin = end
                my_free_end = end
                my_end = end
            stage, kv_phase = ring(tile_count, STAGES_KV)
            slot = 2 * stage + half
            tlx.barrier_wait(k_full[slot], kv_phase)
            tlx.barrier_wait(v_full[slot], kv_phase)
            # dk and dv of the tile before have left through the buffers of its keys and values.
            tlx.async_descriptor_store_wait(0)
            before = 2 * ((tile_count + STAGES_KV - 1) % STAGES_KV) + half
            tlx.barrier_arrive(kv_free[before], 1, pred=tile_count > 0)
            tile_count += 1
            q_count = skip_blocks(q_count, my_begin - begin, q_full, q_free, do_full, do_free, STAGES_Q)
            if HAS_RIGHT:
                dk, dv, q_count = _gradient_blocks(
                    dk, dv, q_count, my_begin, my_free_begin, keys, shift, window_left, window_right, score_scale,
                    k_bufs[slot], v_bufs[slot], q_bufs, do_bufs, lse_bufs, delta_bufs, q_full, q_free, do_full, do_free,
                    DTYPE, STAGES_Q, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
            dk, dv, q_count = _gradient_blocks(
                dk, dv, q_count, my_free_begin, my_free_end, keys, shift, window_left, window_right, score_scale,
                k_bufs[slot], v_bufs[slot], q_bufs, do_bufs, lse_bufs, delta_bufs, q_full, q_free, do_full, do_free,
                DTYPE, STAGES_Q, HAS_LEFT, HAS_RIGHT, False,
            )  # fmt: skip
            if HAS_LEFT:
                dk, dv, q_count = _gradient_blocks(
                    dk, dv, q_count, my_free_end, my_end, keys, shift, window_left, window_right, score_scale,
                    k_bufs[slot], v_bufs[slot], q_bufs, do_bufs, lse_bufs, delta_bufs, q_full, q_free, do_full, do_free,
                    DTYPE, STAGES_Q, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
            if HAS_LEFT:
                q_count = skip_blocks(q_count, end - my_end, q_full, q_free, do_full, do_free, STAGES_Q)
            # Through the buffers of this consumer's own keys and values, which no one else reads.
            tlx.local_store(dv_bufs[slot], dv.to(DTYPE))
            tlx.local_store(dk_bufs[slot], (dk * scale).to(DTYPE))
            column = head * HEAD_DIM
            store_rows(
                table, all_dv, 7 * num_sequences + segment, dv_bufs[slot], kv_start, my_first, n_kv, column, DTYPE,
                HEAD_DIM,
            )  # fmt: skip
            store_rows(
                table, all_dk, 6 * num_sequences + segment, dk_bufs[slot], kv_start, my_first, n_kv, column, DTYPE,
                HEAD_DIM,
            )  # fmt: skip
        elif mine:
            first = kv_start + my_first
            clear_rows(dk_ptr, first, kv_start + n_kv, heads, head, HEAD_DIM)
            clear_rows(dv_ptr, first, kv_start + n_kv, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_key = next_first_key
        n_kv = next_n_kv
        n_q = next_n_q
        kv_start = next_kv_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "window_left", "window_right"])
def key_gradient_kernel(
    table, tiles_ptr, longer_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
    q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, scale, score_scale,
    HEAD_DIM: tl.constexpr, STAGES_KV: tl.constexpr, STAGES_Q: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, KEYS_UP_TO: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dk and dv (key rows, H, D) of the tiles of length classes BEGIN to END, see `tile_range`.

    Of these, sequences with more than KEYS_UP_TO keys are left alone. Persistent: any grid.
    """
    HALF: tl.constexpr = RECORD_ROWS // 2
    DTYPE: tl.constexpr = dk_ptr.dtype.element_ty
    k_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_KV)
    v_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_KV)
    # Names of their own: a buffer of operands that is ever stored to gets a fence before every product that reads it.
    dk_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_KV, reuse=k_bufs)
    dv_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_KV, reuse=v_bufs)
    q_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    lse_bufs = tlx.local_alloc((HALF,), tl.float32, STAGES_Q)
    delta_bufs = tlx.local_alloc((HALF,), tl.float32, STAGES_Q)
    k_full = tlx.alloc_barriers(num_barriers=2 * STAGES_KV, arrive_count=1)
    v_full = tlx.alloc_barriers(num_barriers=2 * STAGES_KV, arrive_count=1)
    kv_free = tlx.alloc_barriers(num_barriers=2 * STAGES_KV, arrive_count=1)
    q_full = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=2)
    do_full = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=1)
    do_free = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=2)
    first_tile, last_tile = tile_range(longer_ptr, num_tiles, heads, BEGIN, END)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, first_tile, last_tile, heads, num_sequences,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, k_bufs, v_bufs,
                q_bufs, do_bufs, lse_bufs, delta_bufs, k_full, v_full, kv_free, q_full, q_free, do_full, do_free, DTYPE,
                HEAD_DIM, STAGES_KV, STAGES_Q, HAS_LEFT, HAS_RIGHT, KEYS_UP_TO,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, first_tile, last_tile, heads,
                num_sequences, window_left, window_right, scale, score_scale, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                delta_bufs, dk_bufs, dv_bufs, k_full, v_full, kv_free, q_full, q_free, do_full, do_free,
                tlx.async_task_replica_id(), DTYPE, HEAD_DIM, STAGES_KV, STAGES_Q, HAS_LEFT, HAS_RIGHT, KEYS_UP_TO,
            )  # fmt: skip
