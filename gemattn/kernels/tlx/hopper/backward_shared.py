"""Gradient of a query that every sequence shares, on sm_90.

A program owns 128 query rows of one head and a chunk of the sequences: the query rows stay in shared memory and dq in
registers from the chunk's first sequence to its last, and one partial sum is written. No atomics; the partial sums are
added in a fixed order afterwards. Chunks deal the sequences round, longest first.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.hopper.backward_query import load_pair, one_sequence, stream_keys
from gemattn.kernels.tlx.hopper.common import RECORD_ROWS, first_seeing_row, key_blocks, stat_block


@triton.jit
def _read_sequence(tiles_ptr, position, num_sequences, blocks):
    """(sequence, n_kv) at a position of the tile list, longest first; clamped past its end."""
    record = tiles_ptr + 4 * blocks * tl.minimum(position, num_sequences - 1)
    return tl.load(record), tl.load(record + 3)


@triton.jit
def _produce(
    table, tiles_ptr, heads, chunks, num_sequences, shared_rows, q_head_stride, k_head_stride,
    v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs, o_bufs, k_bufs, v_bufs, q_full, q_free,
    do_full, do_free, o_full, o_free, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    BYTES: tl.constexpr = HALF * HEAD_DIM * 2
    program = tl.program_id(0)
    chunk = program % chunks
    head = program // chunks % heads
    first_row = program // chunks // heads * RECORD_ROWS
    blocks = tl.cdiv(shared_rows, RECORD_ROWS)
    last_row = tl.minimum(first_row + RECORD_ROWS, shared_rows) - 1
    # The descriptor past those of the sequences: the query as it is, whatever a sequence lets its rows see.
    q_desc = read_descriptor(table, 8 * num_sequences + 2, [HALF, HEAD_DIM], DTYPE)
    load_pair(q_desc, q_bufs, q_full, q_free, 0, first_row, head * q_head_stride, BYTES, HALF)
    count = 0
    kv_count = 0
    sequence, n_kv = _read_sequence(tiles_ptr, chunk, num_sequences, blocks)
    for position in tl.range(chunk, num_sequences, chunks):
        next_sequence, next_n_kv = _read_sequence(tiles_ptr, position + chunks, num_sequences, blocks)
        begin, _free_begin, _free_end, end = key_blocks(
            first_row, last_row, shared_rows, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        if end > begin:
            k_desc = read_descriptor(table, num_sequences + sequence, [BLOCK_N, HEAD_DIM], DTYPE)
            v_desc = read_descriptor(table, 2 * num_sequences + sequence, [BLOCK_N, HEAD_DIM], DTYPE)
            o_desc = read_descriptor(table, 3 * num_sequences + sequence, [HALF, HEAD_DIM], DTYPE)
            do_desc = read_descriptor(table, 4 * num_sequences + sequence, [HALF, HEAD_DIM], DTYPE)
            row = first_row - first_seeing_row(shared_rows, n_kv, window_right, HAS_RIGHT)
            load_pair(do_desc, do_bufs, do_full, do_free, count, row, head * do_head_stride, BYTES, HALF)
            load_pair(o_desc, o_bufs, o_full, o_free, count, row, head * HEAD_DIM, BYTES, HALF)
            count += 1
            kv_count = stream_keys(
                k_desc, v_desc, head * k_head_stride, head * v_head_stride, begin, end, kv_count, k_bufs, v_bufs,
                k_full, k_free, v_full, v_free, BLOCK_N, HEAD_DIM, STAGES_KV,
            )  # fmt: skip
        sequence = next_sequence
        n_kv = next_n_kv


@triton.jit
def _consume(
    table, tiles_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, heads, chunks, num_sequences, shared_rows,
    window_left, window_right, scale, score_scale, q_bufs, do_bufs, o_bufs, partial_bufs, lse_bufs, delta_bufs, k_bufs,
    v_bufs, q_full, do_full, do_free, o_full, o_free, k_full, k_free, v_full, v_free, half: tl.constexpr,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    program = tl.program_id(0)
    chunk = program % chunks
    head = (program // chunks % heads).to(tl.int64)
    first_row = program // chunks // heads * RECORD_ROWS
    blocks = tl.cdiv(shared_rows, RECORD_ROWS)
    last_row = tl.minimum(first_row + RECORD_ROWS, shared_rows) - 1
    lane = tl.arange(0, HALF)
    rows = first_row + half * HALF + lane
    dq = tl.zeros([HALF, HEAD_DIM], tl.float32)
    count = 0
    kv_count = 0
    tlx.barrier_wait(q_full[half], 0)
    sequence, n_kv = _read_sequence(tiles_ptr, chunk, num_sequences, blocks)
    for position in tl.range(chunk, num_sequences, chunks):
        next_sequence, next_n_kv = _read_sequence(tiles_ptr, position + chunks, num_sequences, blocks)
        begin, free_begin, free_end, end = key_blocks(
            first_row, last_row, shared_rows, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        start = sequence.to(tl.int64) * shared_rows
        stat_offset = stat_block(start, sequence, first_row // HALF + half, head, heads, HALF)
        if end > begin:
            row_stat = head * num_sequences * shared_rows + start + rows
            total, kv_count, sees_key = one_sequence(
                dq, kv_count, count, begin, free_begin, free_end, end, rows, shared_rows, n_kv, lse_ptr + row_stat,
                dlse_ptr + row_stat, stat_ptr, delta_ptr, stat_offset, window_left, window_right, score_scale,
                q_bufs[half], do_bufs[half], o_bufs[half], lse_bufs[half], delta_bufs[half], do_full[half],
                do_free[half], o_full[half], k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE, BLOCK_N, STAGES_KV,
                HAS_DLSE, HAS_LEFT, HAS_RIGHT, HALF,
            )  # fmt: skip
            tlx.barrier_arrive(o_free[half], 1)
            count += 1
            if HAS_RIGHT:
                dq = tl.where(sees_key[:, None], total, dq)
            else:
                dq = total
        else:
            has_rows = rows - lane < shared_rows
            tl.store(stat_ptr + stat_offset + lane, tl.full([HALF], float("inf"), tl.float32), mask=has_rows)
            tl.store(delta_ptr + stat_offset + lane, tl.zeros([HALF], tl.float32), mask=has_rows)
        sequence = next_sequence
        n_kv = next_n_kv
    # The partial sums leave through the key buffers: neither consumer reads those any more.
    tlx.named_barrier_wait(9, 256)
    tlx.local_store(partial_bufs[half], dq * scale)
    tlx.fence("async_shared")
    partial_desc = read_descriptor(table, 8 * num_sequences + 3, [HALF, HEAD_DIM], tl.float32)
    row = (chunk * blocks) * RECORD_ROWS + first_row + half * HALF
    tlx.async_descriptor_store(partial_desc, partial_bufs[half], [row, (head * HEAD_DIM).to(tl.int32)])
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["chunks", "num_sequences", "shared_rows", "window_left", "window_right"])
def shared_query_gradient_kernel(
    table, tiles_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, like_ptr, heads, chunks, num_sequences,
    shared_rows, q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, scale,
    score_scale, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_KV: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """partial (chunks, S rounded up to 128, H, D) float32 and the statistics (blocks, H, 64).

    Grid: chunks * H * blocks of S.
    """
    HALF: tl.constexpr = RECORD_ROWS // 2
    DTYPE: tl.constexpr = like_ptr.dtype.element_ty
    q_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    o_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    lse_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    delta_bufs = tlx.local_alloc((HALF,), tl.float32, 2)
    k_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    v_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    partial_bufs = tlx.local_alloc((HALF, HEAD_DIM), tl.float32, 2, reuse=k_bufs)
    q_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    do_free = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    o_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    o_free = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    k_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
    v_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    v_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, heads, chunks, num_sequences, shared_rows, q_head_stride,
                k_head_stride, v_head_stride, do_head_stride, window_left, window_right, q_bufs, do_bufs, o_bufs,
                k_bufs, v_bufs, q_full, q_free, do_full, do_free, o_full, o_free, k_full, k_free, v_full, v_free, DTYPE,
                HEAD_DIM, BLOCK_N, STAGES_KV, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr, heads, chunks, num_sequences,
                shared_rows, window_left, window_right, scale, score_scale, q_bufs, do_bufs, o_bufs, partial_bufs,
                lse_bufs, delta_bufs, k_bufs, v_bufs, q_full, do_full, do_free, o_full, o_free, k_full, k_free, v_full,
                v_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, BLOCK_N, STAGES_KV, HAS_DLSE, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
