"""All three gradients in one pass on sm_90: five products a block where the split kernels need seven.

A program owns 128 keys of one sequence and head, 64 a consumer: dk and dv stay in registers while blocks of 64 query
rows and their incoming gradients stream by, scores held transposed (key, query). A block's dq = ds^T K belongs to one
consumer, in turns: the other has written its half of ds to shared memory and is ahead with the next block by then. dq
is added to a float32 scratch by the copy engine, in the order that the registers hold it (see `backward_scratch`).

With a shared query each program has a scratch of its own and works for one head, in an order that the shapes fix: the
sum is the same in every run.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import (
    RECORD_ROWS,
    clear_rows,
    first_seeing_row,
    query_blocks,
    read_tile,
    ring,
    stat_block,
    tile_range,
)
from gemattn.kernels.tlx.hopper.backward_scratch import SCRATCH_COLUMNS, in_register_order

# Named barriers; each is of 2 x 128 threads, and the next id is for the block or tile of the other consumer.
_DS_READY: tl.constexpr = tl.constexpr(9)
_DS_READ: tl.constexpr = tl.constexpr(11)
_BOTH: tl.constexpr = tl.constexpr(256)
# In place of a consumer's turn: each has half of the columns.
_HALVES: tl.constexpr = tl.constexpr(2)


@triton.jit
def _produce(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences, q_head_stride,
    k_head_stride, v_head_stride, do_head_stride, window_left, window_right, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
    delta_bufs, k_full, k_free, v_full, v_free, q_full, q_free, do_full, do_free, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, KEYS_ABOVE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    BYTES: tl.constexpr = HALF * HEAD_DIM * 2
    tile_count = 0
    q_count = 0
    tile = tl.program_id(0)
    segment, head, first_key, n_kv, n_q, _kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, _next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        if (segment < num_sequences) & (n_kv > KEYS_ABOVE):
            last_key = tl.minimum(first_key + RECORD_ROWS, n_kv) - 1
            begin, _free_begin, _free_end, end = query_blocks(
                first_key, last_key, n_q, n_kv, window_left, window_right, HALF, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                q_desc = read_descriptor(table, segment, [HALF, HEAD_DIM], DTYPE)
                do_desc = read_descriptor(table, num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                k_desc = read_descriptor(table, 2 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                v_desc = read_descriptor(table, 3 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
                lse_desc = read_descriptor(table, 6 * num_sequences, [HALF], tl.float32)
                delta_desc = read_descriptor(table, 6 * num_sequences + 1, [HALF], tl.float32)
                q_start = tl.load(q_offsets_ptr + segment)
                first_seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
                stage, k_phase = ring(tile_count, STAGES_K)
                tlx.barrier_wait(k_free[stage], k_phase ^ 1)
                tlx.barrier_expect_bytes(k_full[stage], 2 * BYTES)
                for half in tl.static_range(2):
                    tlx.async_descriptor_load(
                        k_desc,
                        k_bufs[2 * stage + half],
                        [first_key + half * HALF, head * k_head_stride],
                        k_full[stage],
                    )
                for block in tl.range(begin, end):
                    buf, phase = ring(q_count, STAGES_Q)
                    row = block * HALF - first_seeing
                    stat = stat_block(q_start, segment, block, head, heads, HALF).to(tl.int32)
                    tlx.barrier_wait(q_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[buf], BYTES + HALF * 4)
                    tlx.async_descriptor_load(q_desc, q_bufs[buf], [row, head * q_head_stride], q_full[buf])
                    tlx.async_descriptor_load(lse_desc, lse_bufs[buf], [stat], q_full[buf])
                    # The value buffer comes free late, and is needed after the first scores only.
                    if block == begin:
                        tlx.barrier_wait(v_free[0], (tile_count & 1) ^ 1)
                        tlx.barrier_expect_bytes(v_full[0], 2 * BYTES)
                        for half in tl.static_range(2):
                            tlx.async_descriptor_load(
                                v_desc, v_bufs[half], [first_key + half * HALF, head * v_head_stride], v_full[0]
                            )
                    tlx.barrier_wait(do_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(do_full[buf], BYTES + HALF * 4)
                    tlx.async_descriptor_load(do_desc, do_bufs[buf], [row, head * do_head_stride], do_full[buf])
                    tlx.async_descriptor_load(delta_desc, delta_bufs[buf], [stat], do_full[buf])
                    q_count += 1
                tile_count += 1
        segment = next_segment
        head = next_head
        first_key = next_first_key
        n_kv = next_n_kv
        n_q = next_n_q


@triton.jit
def _gradient_block(
    dk, dv, q_count, block, tile_begin, tile_end, tile_count, keys, shift, window_left, window_right, score_scale,
    dq_desc, scratch, scratch_step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_bufs, k_free,
    v_full, v_free, q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, WAIT_FOR_SUMS: tl.constexpr, EARLY_DV: tl.constexpr,
    OVERLAP_DQ: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """One query block, whose dq is consumer TURN's. Keys past the end are zero rows: they add nothing to dq, and their
    own rows of dk and dv are never written."""
    HALF: tl.constexpr = RECORD_ROWS // 2
    # Always 0, but not to the compiler: it would keep every buffer's address in registers that the products need.
    zero = q_count >> 30
    stage = tile_count % STAGES_K + zero
    buf, phase = ring(q_count, STAGES_Q)
    tlx.barrier_wait(q_full[buf], phase)
    scores = tlx.async_dot(k_bufs[2 * stage + half], tlx.local_trans(q_bufs[buf]))
    tlx.barrier_wait(v_full[0], tile_count & 1)
    tlx.barrier_wait(do_full[buf], phase)
    dp = tlx.async_dot(v_bufs[half + zero], tlx.local_trans(do_bufs[buf]))
    lse = tlx.local_load(lse_bufs[buf])
    scores = tlx.async_dot_wait(1, scores) * score_scale
    if MASKED:
        rows = block * HALF + tl.arange(0, HALF)
        sees = (keys < 2147483647)[:, None]
        if HAS_RIGHT:
            sees = sees & (keys[:, None] <= rows[None, :] + (shift + window_right))
        if HAS_LEFT:
            sees = sees & (keys[:, None] >= rows[None, :] + (shift - window_left))
        scores = tl.where(sees, scores, float("-inf"))
    p = tl.math.exp2(tl.minimum(scores - lse[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL))
    if EARLY_DV:
        dv = tlx.async_dot(p.to(DTYPE), do_bufs[buf], dv)
        dp = tlx.async_dot_wait(1, dp)
    else:
        dp = tlx.async_dot_wait(0, dp)
    delta = tlx.local_load(delta_bufs[buf])
    tlx.barrier_arrive(v_free[0], 1, pred=block == tile_end - 1)
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    if not EARLY_DV:
        dv = tlx.async_dot(p.to(DTYPE), do_bufs[buf], dv)
    dk = tlx.async_dot(ds, q_bufs[buf], dk)
    if WAIT_FOR_SUMS:
        _wait_for_sums()
    # What this consumer stored before (dq of its last turn, dk and dv of the tile before) has left its buffers.
    tlx.async_descriptor_store_wait(0)
    tlx.barrier_arrive(k_free[(tile_count + STAGES_K - 1) % STAGES_K], 1, pred=(block == tile_begin) & (tile_count > 0))
    slot = q_count % 2 if TURN == _HALVES else TURN + zero
    tlx.local_store(ds_bufs[2 * half + slot], ds)
    tlx.fence("async_shared")
    if TURN == 1 - half:
        tlx.named_barrier_arrive(_DS_READY + TURN, _BOTH)
    if not OVERLAP_DQ or TURN == 1 - half:
        dv = tlx.async_dot_wait(1, dv)
        tlx.barrier_arrive(do_free[buf], 1)
        dk = tlx.async_dot_wait(0, dk)
        tlx.barrier_arrive(q_free[buf], 1)
    if TURN != 1 - half:
        HALVES: tl.constexpr = TURN == _HALVES
        WIDTH: tl.constexpr = HEAD_DIM // 2 if HALVES else HEAD_DIM
        column: tl.constexpr = half * WIDTH if HALVES else 0
        piece = half + zero if HALVES else zero
        tlx.named_barrier_wait(_DS_READY if HALVES else _DS_READY + TURN, _BOTH)
        k_low = tlx.local_slice(k_bufs[2 * stage], [0, column], [HALF, WIDTH])
        k_high = tlx.local_slice(k_bufs[2 * stage + 1], [0, column], [HALF, WIDTH])
        dq = tlx.async_dot(tlx.local_trans(ds_bufs[slot]), k_low)
        dq = tlx.async_dot(tlx.local_trans(ds_bufs[2 + slot]), k_high, dq)
        if OVERLAP_DQ:
            dv = tlx.async_dot_wait(3, dv)
            tlx.barrier_arrive(do_free[buf], 1)
            dk = tlx.async_dot_wait(2, dk)
            tlx.barrier_arrive(q_free[buf], 1)
        dq = tlx.async_dot_wait(0, dq)
        tlx.local_store(dq_bufs[piece], in_register_order(dq, HALF, WIDTH))
        tlx.fence("async_shared")
        place = scratch + block * scratch_step + column * HALF // SCRATCH_COLUMNS
        tlx.async_descriptor_store(dq_desc, dq_bufs[piece], [place, 0], store_reduce="add")
    return dk, dv, q_count + 1


@triton.jit
def _dq_is_done(half: tl.constexpr, TURN: tl.constexpr):
    """Consumer TURN has read the other's ds and keys: the other may write over them."""
    if TURN == _HALVES:
        tlx.named_barrier_wait(_DS_READ, _BOTH)
    elif TURN == half:
        tlx.named_barrier_arrive(_DS_READ + TURN, _BOTH)
    else:
        tlx.named_barrier_wait(_DS_READ + TURN, _BOTH)


@triton.jit
def _gradient_blocks(
    dk, dv, q_count, from_block, to_block, tile_begin, tile_end, tile_count, keys, shift, window_left, window_right,
    score_scale, dq_desc, scratch, scratch_step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs,
    dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, WAIT_FOR_SUMS: tl.constexpr,
    EARLY_DV: tl.constexpr, OVERLAP_DQ: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    MASKED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Query blocks [from_block, to_block). Without a mask two at a time, so that each consumer's turn is known to the
    compiler; a block left over, and those with a mask, are consumer 0's turn."""
    alone = from_block
    TURN_ALONE: tl.constexpr = _HALVES if HALVES else 0
    if not (MASKED or HALVES):
        alone = to_block - (to_block - from_block) % 2
        for block in tl.range(from_block, alone, 2):
            dk, dv, q_count = _gradient_block(
                dk, dv, q_count, block, tile_begin, tile_end, tile_count, keys, shift, window_left, window_right,
                score_scale, dq_desc, scratch, scratch_step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                ds_bufs, dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE, HEAD_DIM,
                STAGES_K, STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, MASKED, 0,
            )  # fmt: skip
            dk, dv, q_count = _gradient_block(
                dk, dv, q_count, block + 1, tile_begin, tile_end, tile_count, keys, shift, window_left, window_right,
                score_scale, dq_desc, scratch, scratch_step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                ds_bufs, dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE, HEAD_DIM,
                STAGES_K, STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, MASKED, 1,
            )  # fmt: skip
    for block in tl.range(alone, to_block):
        dk, dv, q_count = _gradient_block(
            dk, dv, q_count, block, tile_begin, tile_end, tile_count, keys, shift, window_left, window_right,
            score_scale, dq_desc, scratch, scratch_step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs,
            dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE, HEAD_DIM, STAGES_K,
            STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, MASKED, TURN_ALONE,
        )  # fmt: skip
        if not HALVES:
            _dq_is_done(half, 0)
    return dk, dv, q_count


@triton.jit
def _wait_for_sums():
    """Until this thread's reductions have reached memory: two in flight to one address may land in either order."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _consume(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
    query_blocks_of_all, window_left, window_right, scale, score_scale, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
    delta_bufs, ds_bufs, dq_bufs, dk_bufs, dv_bufs, k_full, k_free, v_full, v_free, q_full, q_free, do_full, do_free,
    half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr,
    SHARED_QUERY: tl.constexpr, WAIT_FOR_SUMS: tl.constexpr, EARLY_DV: tl.constexpr, OVERLAP_DQ: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HALVES: tl.constexpr, KEYS_ABOVE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    UNIT: tl.constexpr = HALF * HEAD_DIM // SCRATCH_COLUMNS
    DV_BUF: tl.constexpr = half * (RECORD_ROWS // HEAD_DIM)
    tile_count = 0
    q_count = 0
    tile = tl.program_id(0)
    segment, head, first_key, n_kv, n_q, kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    dq_desc = read_descriptor(table, 6 * num_sequences + 2, [UNIT // (2 if HALVES else 1), SCRATCH_COLUMNS], tl.float32)
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        keys = first_key + half * HALF + tl.arange(0, HALF)
        last_key = tl.minimum(first_key + RECORD_ROWS, n_kv) - 1
        begin, free_begin, free_end, end = query_blocks(
            first_key, last_key, n_q, n_kv, window_left, window_right, HALF, HAS_LEFT, HAS_RIGHT
        )
        mine = (segment < num_sequences) & (n_kv > KEYS_ABOVE)
        if (end > begin) & mine:
            if SHARED_QUERY:
                scratch = tl.program_id(0) * query_blocks_of_all * UNIT
                step = UNIT
            else:
                q_start = tl.load(q_offsets_ptr + segment)
                scratch = (stat_block(q_start, segment, 0, head, heads, HALF) // HALF * UNIT).to(tl.int32)
                step = heads * UNIT
            dk = tl.zeros([HALF, HEAD_DIM], tl.float32)
            dv = tl.zeros([HALF, HEAD_DIM], tl.float32)
            shift = n_kv - n_q
            stage, k_phase = ring(tile_count, STAGES_K)
            tlx.barrier_wait(k_full[stage], k_phase)
            if HAS_RIGHT:
                dk, dv, q_count = _gradient_blocks(
                    dk, dv, q_count, begin, free_begin, begin, end, tile_count, keys, shift, window_left, window_right,
                    score_scale, dq_desc, scratch, step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                    ds_bufs, dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE,
                    HEAD_DIM, STAGES_K, STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, True,
                    HALVES,
                )  # fmt: skip
            dk, dv, q_count = _gradient_blocks(
                dk, dv, q_count, free_begin, free_end, begin, end, tile_count, keys, shift, window_left, window_right,
                score_scale, dq_desc, scratch, step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                ds_bufs, dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE, HEAD_DIM,
                STAGES_K, STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, False, HALVES,
            )  # fmt: skip
            if HAS_LEFT:
                dk, dv, q_count = _gradient_blocks(
                    dk, dv, q_count, free_end, end, begin, end, tile_count, keys, shift, window_left, window_right,
                    score_scale, dq_desc, scratch, step, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                    ds_bufs, dq_bufs, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE,
                    HEAD_DIM, STAGES_K, STAGES_Q, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, True,
                    HALVES,
                )  # fmt: skip
            # dv leaves through this consumer's ds, dk through its half of the keys, once the last dq has read both.
            _dq_is_done(half, _HALVES if HALVES else 1)
            tlx.local_store(dv_bufs[DV_BUF], dv.to(DTYPE))
            tlx.local_store(dk_bufs[2 * stage + half], (dk * scale).to(DTYPE))
            tlx.fence("async_shared")
            dk_desc = read_descriptor(table, 4 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            dv_desc = read_descriptor(table, 5 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            first = first_key + half * HALF
            tlx.async_descriptor_store(dv_desc, dv_bufs[DV_BUF], [first, head * HEAD_DIM])
            tlx.async_descriptor_store(dk_desc, dk_bufs[2 * stage + half], [first, head * HEAD_DIM])
            tile_count += 1
        elif mine | (KEYS_ABOVE < 0):
            first = kv_start + first_key + half * HALF
            clear_rows(dk_ptr, first, kv_start + n_kv, heads, head, HEAD_DIM)
            clear_rows(dv_ptr, first, kv_start + n_kv, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_key = next_first_key
        n_kv = next_n_kv
        n_q = next_n_q
        kv_start = next_kv_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "query_blocks_of_all", "window_left", "window_right"])
def fused_gradient_kernel(
    table, tiles_ptr, longer_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
    query_blocks_of_all, q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, scale,
    score_scale, HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, SHARED_QUERY: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, REGISTERS: tl.constexpr, FREE_BY_THREAD: tl.constexpr,
    WAIT_FOR_SUMS: tl.constexpr, EARLY_DV: tl.constexpr, OVERLAP_DQ: tl.constexpr, HALVES: tl.constexpr,
    END: tl.constexpr, KEYS_ABOVE: tl.constexpr,
):  # fmt: skip
    """dk and dv (kv_rows, H, D), and dq without `scale` added to the scratch. Persistent: any grid, with a shared query
    a multiple of H.

    Of the tiles up to length class END (`tile_range`), sequences of more than KEYS_ABOVE keys; -1: all, slack too.
    """
    HALF: tl.constexpr = RECORD_ROWS // 2
    DTYPE: tl.constexpr = dk_ptr.dtype.element_ty
    k_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_K)
    v_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    q_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    ds_bufs = tlx.local_alloc((HALF, HALF), DTYPE, 4)
    DQ_BUFS: tl.constexpr = 2 if HALVES else 1
    dq_bufs = tlx.local_alloc((HALF * HEAD_DIM // DQ_BUFS // SCRATCH_COLUMNS, SCRATCH_COLUMNS), tl.float32, DQ_BUFS)
    dv_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * (RECORD_ROWS // HEAD_DIM), reuse=ds_bufs)
    dk_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_K, reuse=k_bufs)
    lse_bufs = tlx.local_alloc((HALF,), tl.float32, STAGES_Q)
    delta_bufs = tlx.local_alloc((HALF,), tl.float32, STAGES_Q)
    k_full = tlx.alloc_barriers(num_barriers=STAGES_K, arrive_count=1)
    v_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    q_full = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=1)
    k_free = tlx.alloc_warp_barrier(num_barriers=STAGES_K, num_warps=4, num_arrivals=2)
    v_free = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=2)
    if FREE_BY_THREAD:
        q_free = tlx.alloc_warp_barrier(num_barriers=STAGES_Q, num_warps=4, num_arrivals=2)
        do_free = tlx.alloc_warp_barrier(num_barriers=STAGES_Q, num_warps=4, num_arrivals=2)
    else:
        q_free = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=2)
        do_free = tlx.alloc_barriers(num_barriers=STAGES_Q, arrive_count=2)
    _first_tile, num_tiles = tile_range(longer_ptr, num_tiles, heads, -1, END)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, k_bufs, v_bufs,
                q_bufs, do_bufs, lse_bufs, delta_bufs, k_full, k_free, v_full, v_free, q_full, q_free, do_full, do_free,
                DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, HAS_LEFT, HAS_RIGHT, KEYS_ABOVE,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
                query_blocks_of_all, window_left, window_right, scale, score_scale, k_bufs, v_bufs, q_bufs,
                do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_bufs, dk_bufs, dv_bufs, k_full, k_free, v_full, v_free,
                q_full, q_free, do_full, do_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, STAGES_K, STAGES_Q,
                SHARED_QUERY, WAIT_FOR_SUMS, EARLY_DV, OVERLAP_DQ, HAS_LEFT, HAS_RIGHT, HALVES, KEYS_ABOVE,
            )  # fmt: skip
