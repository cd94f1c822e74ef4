"""All gradients of sequences of at most 128 rows in self-attention, on sm_90.

A program reads query, key, value and incoming gradient of a (sequence, head) once and writes dq, dk and dv: five
products, no statistics in memory. Two consumers own 64 keys each and hold scores transposed, (key, query). As every key
is in the tile, ``delta = rowsum(dO * O) = colsum(P * dP)`` comes from what is at hand, so ``out`` is not read.
Consumers meet twice a tile: to add their halves of delta, and to read each other's dS for dq. A sequence of at most 64
rows is one consumer's alone; they take such tiles in turn.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import LOG2E, ROWS, clear_rows, read_tile, ring, tile_range

TILE: tl.constexpr = tl.constexpr(128)
_DELTA_BARRIER: tl.constexpr = tl.constexpr(9)
_DS_BARRIER: tl.constexpr = tl.constexpr(10)
_OWN_DS_BARRIER: tl.constexpr = tl.constexpr(11)  # of one consumer's 128 threads; the next id is the other's


@triton.jit
def _load_pair(desc, bufs, full, free, count, column, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr):
    """128 rows, 64 a buffer, once both consumers have left the buffers."""
    buf, phase = ring(count, STAGES)
    tlx.barrier_wait(free[buf], phase ^ 1)
    tlx.barrier_expect_bytes(full[buf], TILE * HEAD_DIM * 2)
    tlx.async_descriptor_load(desc, bufs[2 * buf], [0, column], full[buf])
    tlx.async_descriptor_load(desc, bufs[2 * buf + 1], [ROWS, column], full[buf])


@triton.jit
def _produce(
    table, tiles_ptr, offsets_ptr, lse_ptr, first_tile, last_tile, heads, num_sequences, rows, q_head_stride,
    k_head_stride, v_head_stride, do_head_stride, q_bufs, k_bufs, v_bufs, do_bufs, lse_bufs, q_full, q_free, k_full,
    k_free, v_full, v_free, do_full, do_free, lse_full, lse_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    count = 0
    tile = first_tile + tl.program_id(0)
    segment, head, _row, length, _work, start = read_tile(tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences)
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, _row, next_length, _work, next_start = read_tile(
            tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
        )
        if segment < num_sequences:
            q_desc = read_descriptor(table, segment, [ROWS, HEAD_DIM], DTYPE)
            k_desc = read_descriptor(table, 8 * num_sequences + 2 + segment, [ROWS, HEAD_DIM], DTYPE)
            v_desc = read_descriptor(table, 9 * num_sequences + 2 + segment, [ROWS, HEAD_DIM], DTYPE)
            do_desc = read_descriptor(table, 4 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
            _load_pair(k_desc, k_bufs, k_full, k_free, count, head * k_head_stride, HEAD_DIM, STAGES)
            _load_pair(q_desc, q_bufs, q_full, q_free, count, head * q_head_stride, HEAD_DIM, STAGES)
            _load_pair(v_desc, v_bufs, v_full, v_free, count, head * v_head_stride, HEAD_DIM, STAGES)
            _load_pair(do_desc, do_bufs, do_full, do_free, count, head * do_head_stride, HEAD_DIM, STAGES)
            buf, phase = ring(count, 2)
            tlx.barrier_wait(lse_free[buf], phase ^ 1)
            lse_ptrs = lse_ptr + head.to(tl.int64) * rows + start + tl.arange(0, ROWS)
            for half in tl.static_range(2):
                valid = half * ROWS + tl.arange(0, ROWS) < length
                lse = tl.load(lse_ptrs + half * ROWS, mask=valid, other=float("inf"))
                tlx.local_store(lse_bufs[2 * buf + half], lse * LOG2E)
            tlx.barrier_arrive(lse_full[buf], 1)
            count += 1
        segment = next_segment
        head = next_head
        length = next_length
        start = next_start


@triton.jit
def _probabilities(
    scores, lse_buf, keys, length, queries, window_left, window_right, score_scale, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """P transposed, (key, query), of scores that are not scaled yet; 0 where a query does not see a key."""
    lse = tlx.local_load(lse_buf)
    sees = (keys < length)[:, None]
    if HAS_RIGHT:
        sees = sees & (keys[:, None] <= queries[None, :] + window_right)
    if HAS_LEFT:
        sees = sees & (keys[:, None] >= queries[None, :] - window_left)
    exponent = tl.where(sees, scores * score_scale, float("-inf")) - lse[None, :]
    return tl.math.exp2(exponent)


@triton.jit
def _store(desc, buf, tile, row, column, DTYPE: tl.constexpr):
    """Round a tile and store it by way of `buf`, which no store before may still be reading."""
    tlx.local_store(buf, tile.to(DTYPE))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, buf, [row, column])


@triton.jit
def _short_tile(
    table, segment, head, length, dlse_ptrs, buf, phase, lse_buf, lse_phase, num_sequences, window_left, window_right,
    scale, score_scale, q_bufs, k_bufs, v_bufs, do_bufs, ds_buf, stage_buf, lse_bufs, dlse_buf, q_full, q_free, k_full,
    k_free, v_full, v_free, do_full, do_free, lse_full, lse_free, half: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """All gradients of a sequence of at most 64 rows, by one consumer."""
    lane = tl.arange(0, ROWS)
    if HAS_DLSE:
        tlx.local_store(dlse_buf, tl.load(dlse_ptrs, mask=lane < length, other=0.0))
    tlx.barrier_wait(k_full[buf], phase)
    tlx.barrier_wait(q_full[buf], phase)
    scores = tlx.async_dot(k_bufs[2 * buf], tlx.local_trans(q_bufs[2 * buf]))
    tlx.barrier_wait(v_full[buf], phase)
    tlx.barrier_wait(do_full[buf], phase)
    dp = tlx.async_dot(v_bufs[2 * buf], tlx.local_trans(do_bufs[2 * buf]))
    tlx.barrier_wait(lse_full[lse_buf], lse_phase)
    scores = tlx.async_dot_wait(1, scores)
    p = _probabilities(
        scores, lse_bufs[2 * lse_buf], lane, length, lane, window_left, window_right, score_scale, HAS_LEFT, HAS_RIGHT
    )
    tlx.barrier_arrive(lse_free[lse_buf], 1)
    dp = tlx.async_dot_wait(0, dp)
    delta = tl.sum(p * dp, 0)
    if HAS_DLSE:
        delta -= tlx.local_load(dlse_buf)
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    dv = tlx.async_dot(p.to(DTYPE), do_bufs[2 * buf])
    dk = tlx.async_dot(ds, q_bufs[2 * buf])
    tlx.local_store(ds_buf, ds)
    tlx.fence("async_shared")
    tlx.named_barrier_wait(_OWN_DS_BARRIER + half, 128)
    dq = tlx.async_dot(tlx.local_trans(ds_buf), k_bufs[2 * buf])
    column = head * HEAD_DIM
    dq_desc = read_descriptor(table, 5 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
    dk_desc = read_descriptor(table, 6 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
    dv_desc = read_descriptor(table, 7 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
    # The values were read, and the other half of their buffers holds no rows.
    dv = tlx.async_dot_wait(2, dv)
    tlx.barrier_arrive(do_free[buf], 1)
    _store(dv_desc, v_bufs[2 * buf + 1], dv, 0, column, DTYPE)
    dk = tlx.async_dot_wait(1, dk)
    tlx.barrier_arrive(q_free[buf], 1)
    _store(dk_desc, v_bufs[2 * buf], dk * scale, 0, column, DTYPE)
    dq = tlx.async_dot_wait(0, dq)
    tlx.barrier_arrive(k_free[buf], 1)
    tlx.async_descriptor_store_wait(2)
    _store(dq_desc, stage_buf, dq * scale, 0, column, DTYPE)
    tlx.async_descriptor_store_wait(1)
    tlx.barrier_arrive(v_free[buf], 1)


@triton.jit
def _leave_tile(
    buf, phase, lse_buf, lse_phase, q_full, q_free, k_full, k_free, v_full, v_free, do_full, do_free, lse_full, lse_free
):
    """A tile that is the other consumer's.

    Freed only once it is in: an arrival before would count for the tile that was in the buffer before.
    """
    tlx.barrier_wait(k_full[buf], phase)
    tlx.barrier_arrive(k_free[buf], 1)
    tlx.barrier_wait(q_full[buf], phase)
    tlx.barrier_arrive(q_free[buf], 1)
    tlx.barrier_wait(v_full[buf], phase)
    tlx.barrier_arrive(v_free[buf], 1)
    tlx.barrier_wait(do_full[buf], phase)
    tlx.barrier_arrive(do_free[buf], 1)
    tlx.barrier_wait(lse_full[lse_buf], lse_phase)
    tlx.barrier_arrive(lse_free[lse_buf], 1)


@triton.jit
def _consume(
    table, tiles_ptr, offsets_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, first_tile, last_tile, heads, num_sequences, rows,
    window_left, window_right, scale, score_scale, q_bufs, k_bufs, v_bufs, do_bufs, ds_bufs, stage_bufs, lse_bufs,
    delta_bufs, q_full, q_free, k_full, k_free, v_full, v_free, do_full, do_free, lse_full, lse_free,
    half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    count = 0
    after_long = 0
    lane = tl.arange(0, ROWS)
    own = half * ROWS + lane
    tile = first_tile + tl.program_id(0)
    segment, head, first_row, length, _work, start = read_tile(
        tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_length, _work, next_start = read_tile(
            tiles_ptr, offsets_ptr, tile, last_tile, heads, num_sequences
        )
        buf, phase = ring(count, STAGES)
        lse_buf, lse_phase = ring(count, 2)
        # At D 128 the assembler runs out of registers with both ways in one kernel, and serialises the products.
        is_short = (segment < num_sequences) & (length <= ROWS) if HEAD_DIM < 128 else False
        if is_short:
            if after_long != 0:  # the other consumer has read this one's ds of that tile
                tlx.named_barrier_wait(_DELTA_BARRIER, 256)
            after_long = 0
            count += 1
            if count % 2 == half:
                _short_tile(
                    table, segment, head, length, dlse_ptr + head.to(tl.int64) * rows + start + lane, buf, phase,
                    lse_buf, lse_phase, num_sequences, window_left, window_right, scale, score_scale, q_bufs, k_bufs,
                    v_bufs, do_bufs, ds_bufs[2 * half], stage_bufs[half], lse_bufs, delta_bufs[4 + half], q_full,
                    q_free, k_full, k_free, v_full, v_free, do_full, do_free, lse_full, lse_free, half, DTYPE, HEAD_DIM,
                    HAS_DLSE, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            else:
                _leave_tile(
                    buf, phase, lse_buf, lse_phase, q_full, q_free, k_full, k_free, v_full, v_free, do_full, do_free,
                    lse_full, lse_free,
                )  # fmt: skip
        elif segment < num_sequences:
            after_long = 1
            count += 1
            if HAS_DLSE:
                dlse_ptrs = dlse_ptr + head.to(tl.int64) * rows + start + own
                tlx.local_store(delta_bufs[4 + half], tl.load(dlse_ptrs, mask=own < length, other=0.0))
            tlx.barrier_wait(k_full[buf], phase)
            tlx.barrier_wait(q_full[buf], phase)
            k_own = k_bufs[2 * buf + half]
            scores0 = tlx.async_dot(k_own, tlx.local_trans(q_bufs[2 * buf]))
            scores1 = tlx.async_dot(k_own, tlx.local_trans(q_bufs[2 * buf + 1]))
            tlx.barrier_wait(v_full[buf], phase)
            tlx.barrier_wait(do_full[buf], phase)
            v_own = v_bufs[2 * buf + half]
            dp0 = tlx.async_dot(v_own, tlx.local_trans(do_bufs[2 * buf]))
            dp1 = tlx.async_dot(v_own, tlx.local_trans(do_bufs[2 * buf + 1]))
            tlx.barrier_wait(lse_full[lse_buf], lse_phase)
            scores0 = tlx.async_dot_wait(3, scores0)
            p0 = _probabilities(
                scores0, lse_bufs[2 * lse_buf], own, length, lane, window_left, window_right, score_scale, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
            scores1 = tlx.async_dot_wait(2, scores1)
            p1 = _probabilities(
                scores1, lse_bufs[2 * lse_buf + 1], own, length, ROWS + lane, window_left, window_right, score_scale,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            tlx.barrier_arrive(lse_free[lse_buf], 1)
            dp0 = tlx.async_dot_wait(1, dp0)
            dp1 = tlx.async_dot_wait(0, dp1)
            tlx.local_store(delta_bufs[2 * half], tl.sum(p0 * dp0, 0))
            tlx.local_store(delta_bufs[2 * half + 1], tl.sum(p1 * dp1, 0))
            tlx.named_barrier_wait(_DELTA_BARRIER, 256)
            delta0 = tlx.local_load(delta_bufs[0]) + tlx.local_load(delta_bufs[2])
            delta1 = tlx.local_load(delta_bufs[1]) + tlx.local_load(delta_bufs[3])
            if HAS_DLSE:
                delta0 -= tlx.local_load(delta_bufs[4])
                delta1 -= tlx.local_load(delta_bufs[5])
            ds0 = (p0 * (dp0 - delta0[None, :])).to(DTYPE)
            ds1 = (p1 * (dp1 - delta1[None, :])).to(DTYPE)
            p0 = p0.to(DTYPE)
            p1 = p1.to(DTYPE)
            tlx.local_store(ds_bufs[2 * half], ds0)
            tlx.local_store(ds_bufs[2 * half + 1], ds1)
            tlx.fence("async_shared")
            tlx.named_barrier_wait(_DS_BARRIER, 256)
            # dq first: the keys are then free for the next tile while the rest is at work.
            dq = tlx.async_dot(tlx.local_trans(ds_bufs[half]), k_bufs[2 * buf])
            dq = tlx.async_dot(tlx.local_trans(ds_bufs[2 + half]), k_bufs[2 * buf + 1], dq)
            dk = tlx.async_dot(ds0, q_bufs[2 * buf])
            dk = tlx.async_dot(ds1, q_bufs[2 * buf + 1], dk)
            column = head * HEAD_DIM
            dq_desc = read_descriptor(table, 5 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
            dk_desc = read_descriptor(table, 6 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
            dv_desc = read_descriptor(table, 7 * num_sequences + segment, [ROWS, HEAD_DIM], DTYPE)
            dq = tlx.async_dot_wait(2, dq)
            tlx.barrier_arrive(k_free[buf], 1)
            tlx.async_descriptor_store_wait(0)
            _store(dq_desc, stage_bufs[half], dq * scale, half * ROWS, column, DTYPE)
            dv = tlx.async_dot(p0, do_bufs[2 * buf])
            dv = tlx.async_dot(p1, do_bufs[2 * buf + 1], dv)
            dk = tlx.async_dot_wait(2, dk)
            tlx.barrier_arrive(q_free[buf], 1)
            # This consumer alone read these values, and is done with them.
            _store(dk_desc, v_own, dk * scale, half * ROWS, column, DTYPE)
            dv = tlx.async_dot_wait(0, dv)
            tlx.barrier_arrive(do_free[buf], 1)
            tlx.async_descriptor_store_wait(1)
            _store(dv_desc, stage_bufs[half], dv, half * ROWS, column, DTYPE)
            tlx.async_descriptor_store_wait(1)
            tlx.barrier_arrive(v_free[buf], 1)
        else:
            first = start + first_row + half * ROWS
            clear_rows(dq_ptr, first, start + length, heads, head, HEAD_DIM)
            clear_rows(dk_ptr, first, start + length, heads, head, HEAD_DIM)
            clear_rows(dv_ptr, first, start + length, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_row = next_first_row
        length = next_length
        start = next_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "rows", "window_left", "window_right"])
def one_tile_gradient_kernel(
    table, tiles_ptr, longer_ptr, offsets_ptr, lse_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, num_tiles, heads,
    num_sequences, rows, q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, scale,
    score_scale, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, BEGIN: tl.constexpr, HAS_DLSE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv (rows, H, D) of the tiles from length class BEGIN on, slack rows too. Persistent: any grid."""
    DTYPE: tl.constexpr = dq_ptr.dtype.element_ty
    q_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * STAGES)
    do_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * STAGES)
    v_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * STAGES)
    k_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2 * STAGES)
    ds_bufs = tlx.local_alloc((ROWS, ROWS), DTYPE, 4)
    stage_bufs = tlx.local_alloc((ROWS, HEAD_DIM), DTYPE, 2)
    lse_bufs = tlx.local_alloc((ROWS,), tl.float32, 4)
    delta_bufs = tlx.local_alloc((ROWS,), tl.float32, 6)
    q_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    do_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    do_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    v_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    v_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    k_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    k_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=2)
    lse_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    lse_free = tlx.alloc_barriers(num_barriers=2, arrive_count=2)
    first_tile, last_tile = tile_range(longer_ptr, num_tiles, heads, BEGIN, -1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, offsets_ptr, lse_ptr, first_tile, last_tile, heads, num_sequences, rows,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, q_bufs, k_bufs, v_bufs, do_bufs, lse_bufs,
                q_full, q_free, k_full, k_free, v_full, v_free, do_full, do_free, lse_full, lse_free, DTYPE, HEAD_DIM,
                STAGES,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, offsets_ptr, dlse_ptr, dq_ptr, dk_ptr, dv_ptr, first_tile, last_tile, heads,
                num_sequences, rows, window_left, window_right, scale, score_scale, q_bufs, k_bufs, v_bufs, do_bufs,
                ds_bufs, stage_bufs, lse_bufs, delta_bufs, q_full, q_free, k_full, k_free, v_full, v_free, do_full,
                do_free, lse_full, lse_free, tlx.async_task_replica_id(), DTYPE, HEAD_DIM, STAGES, HAS_DLSE, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
