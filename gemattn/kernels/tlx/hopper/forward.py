"""Forward on sm_90: a producer warp group feeds two consumer warp groups of 64 query rows each.

A program walks the tile list with a stride of the grid. For each tile the producer loads the two query blocks and then
key and value blocks from the last visible one down to the first; consumers overlap the exponentials of one block with
the value product of the block before. Masked blocks come first (end of the sequence, causal edge) and last (left side
of a window), so the loop over the blocks between carries no mask.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import (
    LN2,
    RECORD_ROWS,
    ROWS,
    before_waiting,
    clear_rows,
    hide,
    key_blocks,
    read_tile,
    ring,
    tile_range,
)
from gemattn.kernels.tlx.hopper.buffers import store_rows

# Named barriers, each of 2 x 128 threads: products may be issued by the first consumer, and by the second.
_TURN: tl.constexpr = tl.constexpr(9)
_BOTH: tl.constexpr = tl.constexpr(256)


@triton.jit
def _softmax_step(scores, row_max, row_sum, score_scale, POSITIVE_SCALE: tl.constexpr):
    """Online softmax, base 2: (probabilities, correction, new maximum, new sum).

    Scores come scaled unless POSITIVE_SCALE: then the scale goes into the exponent's multiply-add. That argument and
    the maximum round differently: it may exceed 0 by half a unit in the maximum's last place, which the sum undoes.
    """
    block_max = tl.max(scores, 1)
    if POSITIVE_SCALE:
        block_max *= score_scale
        scores *= score_scale
    new_max = tl.maximum(row_max, block_max)
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.math.exp2(scores - reference[:, None])
    correction = tl.math.exp2(row_max - reference)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)


@triton.jit
def _produce(
    table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, group, num_sequences, q_head_stride, k_head_stride,
    v_head_stride, window_left, window_right, q_bufs, k_bufs, v_bufs, q_full, q_free, k_full, k_free,
    v_full, v_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr,
    STAGES_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    q_count = 0
    kv_count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, first_row, n_q, n_kv, _ = read_tile(tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences)
    while segment >= 0:
        # Read ahead: loads would otherwise stand before every tile.
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, _ = read_tile(
            tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
        )
        if segment < num_sequences:
            last_row = tl.minimum(first_row + RECORD_ROWS, n_q) - 1
            begin, _free_begin, _free_end, end = key_blocks(
                first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                q_desc = read_descriptor(table, segment, [ROWS, HEAD_DIM], DTYPE)
                k_desc = read_descriptor(table, num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                v_desc = read_descriptor(table, 2 * num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                q_column = head * q_head_stride
                k_column = head // group * k_head_stride
                v_column = head // group * v_head_stride
                q_buf, q_phase = ring(q_count, STAGES_Q)
                for half in tl.static_range(2):
                    q_slot = q_buf * 2 + half
                    tlx.barrier_wait(q_free[q_slot], q_phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[q_slot], ROWS * HEAD_DIM * 2)
                    tlx.async_descriptor_load(
                        q_desc, q_bufs[q_slot], [first_row + half * ROWS, q_column], q_full[q_slot]
                    )
                q_count += 1
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
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv


@triton.jit
def _consume_blocks(
    acc, p, row_max, row_sum, kv_count, from_block, to_block, rows, shift, n_kv, window_left, window_right, score_scale,
    q_buf, k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES_KV: tl.constexpr, POSITIVE_SCALE: tl.constexpr, TURNS: tl.constexpr, half: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks from_block - 1 down to to_block. On entry and exit `p` holds the block before, its product outstanding."""
    for step in tl.range(0, from_block - to_block):
        block = from_block - 1 - step
        buf, phase = ring(kv_count, STAGES_KV)
        before, before_phase = ring(kv_count - 1, STAGES_KV)
        tlx.barrier_wait(k_full[buf], phase)
        if TURNS:
            tlx.named_barrier_wait(_TURN + half, _BOTH)
        scores = tlx.async_dot(q_buf, tlx.local_trans(k_bufs[buf]))
        tlx.barrier_wait(v_full[before], before_phase)
        acc = tlx.async_dot(p.to(DTYPE), v_bufs[before], acc)
        if TURNS:
            tlx.named_barrier_arrive(_TURN + 1 - half, _BOTH)
        scores = tlx.async_dot_wait(1, scores)
        tlx.barrier_arrive(k_free[buf], 1)
        if not POSITIVE_SCALE:  # before the mask: the scale would turn -inf around, or into NaN
            scores *= score_scale
        if MASKED:
            scores = hide(
                scores, rows, block * BLOCK_N, shift, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
        p, correction, row_max, row_sum = _softmax_step(scores, row_max, row_sum, score_scale, POSITIVE_SCALE)
        before_waiting(row_sum)
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_free[before], 1)
        acc = acc * correction[:, None]
        kv_count += 1
    return acc, p, row_max, row_sum, kv_count


@triton.jit
def _skip_blocks(
    kv_count, blocks, k_full, k_free, v_full, v_free, STAGES_KV: tl.constexpr, TURNS: tl.constexpr, half: tl.constexpr
):
    """Blocks of which this consumer's rows see nothing.

    Freed only once they are in: an arrival before would count for the block that was in the buffer before.
    """
    for _step in tl.range(0, blocks):
        buf, phase = ring(kv_count, STAGES_KV)
        if TURNS:
            tlx.named_barrier_wait(_TURN + half, _BOTH)
            tlx.named_barrier_arrive(_TURN + 1 - half, _BOTH)
        tlx.barrier_wait(k_full[buf], phase)
        tlx.barrier_arrive(k_free[buf], 1)
        tlx.barrier_wait(v_full[buf], phase)
        tlx.barrier_arrive(v_free[buf], 1)
        kv_count += 1
    return kv_count


@triton.jit
def _consume(
    table, tiles_ptr, offsets_ptr, out_ptr, lse_ptr, first_tile, last_tile, heads, num_sequences, out_rows, window_left,
    window_right, score_scale, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_free, k_full, k_free, v_full,
    v_free, half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES_Q: tl.constexpr, STAGES_KV: tl.constexpr, POSITIVE_SCALE: tl.constexpr, TURNS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    if TURNS:
        # The first consumer begins; both see the same blocks, so turns alternate from tile to tile too.
        if half == 1:
            tlx.named_barrier_arrive(_TURN, _BOTH)
    all_out = read_descriptor(table, 4 * num_sequences, [ROWS, HEAD_DIM], DTYPE)
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
        my_first = first_row + half * ROWS
        rows = my_first + tl.arange(0, ROWS)
        in_segment = rows < n_q
        last_row = tl.minimum(first_row + RECORD_ROWS, n_q) - 1
        begin, _free_begin, _free_end, end = key_blocks(
            first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        my_last = tl.minimum(my_first + ROWS, n_q) - 1
        my_begin, free_begin, free_end, my_end = key_blocks(
            my_first, my_last, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
        takes_part = (my_first < n_q) & (my_end > my_begin)
        kv_count = _skip_blocks(
            kv_count, end - tl.where(takes_part, my_end, begin), k_full, k_free, v_full, v_free, STAGES_KV, TURNS, half
        )
        lse_ptrs = lse_ptr + head.to(tl.int64) * out_rows + q_start + rows
        if takes_part:
            shift = n_kv - n_q
            q_buf, q_phase = ring(q_count, STAGES_Q)
            q_slot = q_buf * 2 + half
            q_count += 1
            acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            row_max = tl.full([ROWS], float("-inf"), tl.float32)
            row_sum = tl.zeros([ROWS], tl.float32)

            buf, phase = ring(kv_count, STAGES_KV)
            tlx.barrier_wait(q_full[q_slot], q_phase)
            tlx.barrier_wait(k_full[buf], phase)
            if TURNS:
                tlx.named_barrier_wait(_TURN + half, _BOTH)
            scores = tlx.async_dot(q_bufs[q_slot], tlx.local_trans(k_bufs[buf]))
            if TURNS:
                tlx.named_barrier_arrive(_TURN + 1 - half, _BOTH)
            scores = tlx.async_dot_wait(0, scores)
            tlx.barrier_arrive(k_free[buf], 1)
            if not POSITIVE_SCALE:
                scores *= score_scale
            scores = hide(
                scores,
                rows,
                (my_end - 1) * BLOCK_N,
                shift,
                n_kv,
                window_left,
                window_right,
                BLOCK_N,
                HAS_LEFT,
                HAS_RIGHT,
            )
            p, _correction, row_max, row_sum = _softmax_step(scores, row_max, row_sum, score_scale, POSITIVE_SCALE)
            kv_count += 1
            if HAS_RIGHT:
                acc, p, row_max, row_sum, kv_count = _consume_blocks(
                    acc, p, row_max, row_sum, kv_count, my_end - 1, free_end, rows, shift, n_kv, window_left,
                    window_right, score_scale, q_bufs[q_slot], k_bufs, v_bufs, k_full, k_free, v_full, v_free, DTYPE,
                    BLOCK_N, STAGES_KV, POSITIVE_SCALE, TURNS, half, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
            acc, p, row_max, row_sum, kv_count = _consume_blocks(
                acc, p, row_max, row_sum, kv_count, tl.minimum(free_end, my_end - 1), free_begin, rows, shift, n_kv,
                window_left, window_right, score_scale, q_bufs[q_slot], k_bufs, v_bufs, k_full, k_free, v_full, v_free,
                DTYPE, BLOCK_N, STAGES_KV, POSITIVE_SCALE, TURNS, half, HAS_LEFT, HAS_RIGHT, False,
            )  # fmt: skip
            if HAS_LEFT:
                acc, p, row_max, row_sum, kv_count = _consume_blocks(
                    acc, p, row_max, row_sum, kv_count, tl.minimum(free_begin, my_end - 1), my_begin, rows, shift, n_kv,
                    window_left, window_right, score_scale, q_bufs[q_slot], k_bufs, v_bufs, k_full, k_free, v_full,
                    v_free, DTYPE, BLOCK_N, STAGES_KV, POSITIVE_SCALE, TURNS, half, HAS_LEFT, HAS_RIGHT, True,
                )  # fmt: skip
            buf, phase = ring(kv_count - 1, STAGES_KV)
            tlx.barrier_wait(v_full[buf], phase)
            acc = tlx.async_dot(p.to(DTYPE), v_bufs[buf], acc)
            tlx.barrier_arrive(q_free[q_slot], 1)
            lse = (row_max + tl.math.log2(row_sum)) * LN2
            inverse = 1.0 / row_sum
            if HAS_RIGHT:
                sees_key = rows + (shift + window_right) >= 0
                lse = tl.where(sees_key, lse, float("-inf"))
            tl.store(lse_ptrs, lse, mask=in_segment)
            acc = tlx.async_dot_wait(0, acc)
            tlx.barrier_arrive(v_free[buf], 1)
            if HAS_LEFT:
                kv_count = _skip_blocks(
                    kv_count, my_begin - begin, k_full, k_free, v_full, v_free, STAGES_KV, TURNS, half
                )
            acc = acc * inverse[:, None]
            if HAS_RIGHT:
                acc = tl.where(sees_key[:, None], acc, 0.0)
            # The store of the tile before must have left its buffer.
            tlx.async_descriptor_store_wait(0)
            tlx.local_store(o_bufs[half], acc.to(DTYPE))
            store_rows(
                table, all_out, 3 * num_sequences + segment, o_bufs[half], q_start, my_first, n_q, head * HEAD_DIM,
                DTYPE, HEAD_DIM,
            )  # fmt: skip
        else:
            if end > begin:
                q_buf, q_phase = ring(q_count, STAGES_Q)
                tlx.barrier_wait(q_full[q_buf * 2 + half], q_phase)
                tlx.barrier_arrive(q_free[q_buf * 2 + half], 1)
                q_count += 1
            clear_rows(out_ptr, q_start + my_first, q_start + n_q, heads, head, HEAD_DIM)
            tl.store(lse_ptrs, tl.full([ROWS], float("-inf"), tl.float32), mask=in_segment)
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv
        q_start = next_q_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "out_rows", "window_left", "window_right"])
def forward_kernel(
    table, tiles_ptr, longer_ptr, offsets_ptr, out_ptr, lse_ptr, num_tiles, heads, group, num_sequences, out_rows,
    q_head_stride, k_head_stride, v_head_stride, window_left, window_right, score_scale, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES_Q: tl.constexpr, STAGES_KV: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr, TURNS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    REGISTERS: tl.constexpr, WARP_BARRIERS: tl.constexpr,
):  # fmt: skip
    """out (out_rows, H, D) and lse (H, out_rows) of the tiles of the length classes BEGIN to END, see `tile_range`.

    Persistent: any grid; 12 warps in three groups. POSITIVE_SCALE: `score_scale` > 0. TURNS: consumers issue products
    in turn, so that the exponentials of one fall on the products of the other.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    q_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * STAGES_Q)
    o_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2)
    k_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    v_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES_KV)
    q_full = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=2 * STAGES_Q, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    v_full = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=1)
    if WARP_BARRIERS:
        k_free = tlx.alloc_warp_barrier(num_barriers=STAGES_KV, num_warps=4, num_arrivals=2)
        v_free = tlx.alloc_warp_barrier(num_barriers=STAGES_KV, num_warps=4, num_arrivals=2)
    else:
        k_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
        v_free = tlx.alloc_barriers(num_barriers=STAGES_KV, arrive_count=2)
    first_tile, last_tile = tile_range(longer_ptr, num_tiles, heads, BEGIN, END)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, offsets_ptr, first_tile, last_tile, heads, group, num_sequences, q_head_stride,
                k_head_stride, v_head_stride, window_left, window_right, q_bufs, k_bufs, v_bufs, q_full, q_free, k_full,
                k_free, v_full, v_free, DTYPE, HEAD_DIM, BLOCK_N, STAGES_Q, STAGES_KV, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, offsets_ptr, out_ptr, lse_ptr, first_tile, last_tile, heads, num_sequences,
                out_rows, window_left, window_right, score_scale, q_bufs, k_bufs, v_bufs, o_bufs, q_full, q_free,
                k_full, k_free, v_full, v_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, BLOCK_N, STAGES_Q,
                STAGES_KV, POSITIVE_SCALE, TURNS, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
