"""Gradients on sm_100: one kernel for both sides, 128 rows of its own a tile, blocks of 64 of the other streaming by.

| | own rows x, y | streamed a, b | sums |
|---|---|---|---|
| KEYS | key, value | query, dO | dK += dSᵀ query, dV += Pᵀ dO |
| not KEYS | query, dO | key, value | dQ += dS key |

Scores ``x aᵀ`` and ``y bᵀ`` are (own, streamed) on either side. Two compute groups of 4 warps take the blocks in turn,
so that the products of one fill the exponentials of the other; sums stay in tensor memory and leave once. With a shared
query a program of the query side owns 128 rows for all sequences of its chunk, and dQ stays there across them.

No atomics: the same bits from run to run. Row statistics are `prepare_kernel`'s: a row that takes no part has
lse = +inf, so its probabilities are 0. Compiled and simulated, never run on a B200.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import mul_f32x2, read_descriptor, tlx
from gemattn.kernels.tlx.blackwell.descriptors import (
    DO_BLOCK,
    DO_TILE,
    K_BLOCK,
    K_TILE,
    Q_BLOCK,
    Q_TILE,
    STATISTICS,
    V_BLOCK,
    V_TILE,
)
from gemattn.kernels.tlx.blackwell.gradient_tile import BLOCK, read_own, streamed_blocks, write, write_partial
from gemattn.kernels.tlx.common import RECORD_ROWS, first_seeing_row, ring, stat_block


@triton.jit
def _load(
    table, tiles_ptr, offsets_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences, q_head_stride,
    k_head_stride, v_head_stride, do_head_stride, window_left, window_right, x_buf, y_buf, a_bufs, b_bufs, lse_bufs,
    delta_bufs, xy_full, xy_free, ab_full, ab_free, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr,
    KEYS: tl.constexpr, SHARED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    tiles = 0
    count = 0
    tile = tl.program_id(0)
    segment, head, first, own, other, _ = read_own(
        tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first, next_own, next_other, _ = read_own(
            tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
        )
        begin, _free_begin, _free_end, end = streamed_blocks(
            segment, first, own, other, num_sequences, window_left, window_right, KEYS, HAS_LEFT, HAS_RIGHT
        )
        if end > begin:
            # Query-side descriptors begin at the first row that sees a key: rows before it arrive as zeros.
            if KEYS:
                x_slot, y_slot, a_slot, b_slot = K_TILE, V_TILE, Q_BLOCK, DO_BLOCK
                x_stride, y_stride, a_stride, b_stride = k_head_stride, v_head_stride, q_head_stride, do_head_stride
                own_row = first
                from_row = first_seeing_row(other, own, window_right, HAS_RIGHT)
            else:
                x_slot, y_slot, a_slot, b_slot = Q_TILE, DO_TILE, K_BLOCK, V_BLOCK
                x_stride, y_stride, a_stride, b_stride = q_head_stride, do_head_stride, k_head_stride, v_head_stride
                own_row = first - first_seeing_row(own, other, window_right, HAS_RIGHT)
                from_row = 0
            x_desc = read_descriptor(table, x_slot * num_sequences + segment, [RECORD_ROWS, HEAD_DIM], DTYPE)
            y_desc = read_descriptor(table, y_slot * num_sequences + segment, [RECORD_ROWS, HEAD_DIM], DTYPE)
            a_desc = read_descriptor(table, a_slot * num_sequences + segment, [BLOCK, HEAD_DIM], DTYPE)
            b_desc = read_descriptor(table, b_slot * num_sequences + segment, [BLOCK, HEAD_DIM], DTYPE)
            lse_desc = read_descriptor(table, STATISTICS * num_sequences, [BLOCK], tl.float32)
            delta_desc = read_descriptor(table, STATISTICS * num_sequences + 1, [BLOCK], tl.float32)
            q_start = tl.load(q_offsets_ptr + segment)
            tlx.barrier_wait(xy_free[0], (tiles & 1) ^ 1)
            tlx.barrier_expect_bytes(xy_full[0], 2 * RECORD_ROWS * HEAD_DIM * 2)
            tlx.async_descriptor_load(x_desc, x_buf[0], [own_row, head * x_stride], xy_full[0])
            tlx.async_descriptor_load(y_desc, y_buf[0], [own_row, head * y_stride], xy_full[0])
            tiles += 1
            for block in tl.range(begin, end):
                buf, phase = ring(count, STAGES)
                row = block * BLOCK - from_row
                tlx.barrier_wait(ab_free[buf], phase ^ 1)
                if KEYS:
                    stat = stat_block(q_start, segment, block, head, heads, BLOCK).to(tl.int32)
                    tlx.barrier_expect_bytes(ab_full[buf], 2 * BLOCK * HEAD_DIM * 2 + 2 * BLOCK * 4)
                    tlx.async_descriptor_load(lse_desc, lse_bufs[buf], [stat], ab_full[buf])
                    tlx.async_descriptor_load(delta_desc, delta_bufs[buf], [stat], ab_full[buf])
                else:
                    tlx.barrier_expect_bytes(ab_full[buf], 2 * BLOCK * HEAD_DIM * 2)
                tlx.async_descriptor_load(a_desc, a_bufs[buf], [row, head * a_stride], ab_full[buf])
                tlx.async_descriptor_load(b_desc, b_bufs[buf], [row, head * b_stride], ab_full[buf])
                count += 1
        segment = next_segment
        head = next_head
        first = next_first
        own = next_own
        other = next_other


@triton.jit
def _add(
    count, started, a_bufs, b_bufs, p, ds, sum_a, sum_b, ds_full, ab_free, STAGES: tl.constexpr, KEYS: tl.constexpr
):
    """Issue the sums of a block whose p and ds are stored; the block's buffers are free after them."""
    group = count & 1
    buf, _phase = ring(count, STAGES)
    tlx.barrier_wait(ds_full[group], (count >> 1) & 1)
    tlx.async_dot(ds[group], a_bufs[buf], sum_a[0], use_acc=started, force_async=True)
    if KEYS:
        tlx.async_dot(p[group], b_bufs[buf], sum_b[0], use_acc=started, force_async=True)
    tlx.tcgen05_commit(ab_free[buf])


@triton.jit
def _multiply(
    tiles_ptr, offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences, window_left, window_right, x_buf, y_buf,
    a_bufs, b_bufs, scores, p, dp, ds, sum_a, sum_b, xy_full, xy_free, ab_full, ab_free, s_full, ds_full, sum_full,
    sum_free, STAGES: tl.constexpr, KEYS: tl.constexpr, SHARED: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores and dp of a block before the sums of the block before it, whose group computes meanwhile.

    Products run in the order of their issue, so scores may take the place of a p and a ds that sums still read.
    """
    tiles = 0
    count = 0
    started = False
    tile = tl.program_id(0)
    segment, _head, first, own, other, _ = read_own(
        tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, _head, next_first, next_own, next_other, _ = read_own(
            tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
        )
        begin, _free_begin, _free_end, end = streamed_blocks(
            segment, first, own, other, num_sequences, window_left, window_right, KEYS, HAS_LEFT, HAS_RIGHT
        )
        if end > begin:
            tlx.barrier_wait(xy_full[0], tiles & 1)
            if not SHARED:
                started = False
            for step in tl.range(0, end - begin):
                buf, phase = ring(count, STAGES)
                group = count & 1
                tlx.barrier_wait(ab_full[buf], phase)
                tlx.async_dot(
                    x_buf[0], tlx.local_trans(a_bufs[buf]), scores[group], use_acc=False, force_async=True
                )  # fmt: skip
                tlx.async_dot(
                    y_buf[0], tlx.local_trans(b_bufs[buf]), dp[group], use_acc=False, mBarriers=[s_full[group]]
                )
                if step > 0:
                    if not SHARED:
                        if step == 1:
                            tlx.barrier_wait(sum_free[0], (tiles & 1) ^ 1)
                    _add(count - 1, started, a_bufs, b_bufs, p, ds, sum_a, sum_b, ds_full, ab_free, STAGES, KEYS)
                    started = True
                count += 1
            tlx.tcgen05_commit(xy_free[0])
            if not SHARED:
                if end - begin == 1:
                    tlx.barrier_wait(sum_free[0], (tiles & 1) ^ 1)
            _add(count - 1, started, a_bufs, b_bufs, p, ds, sum_a, sum_b, ds_full, ab_free, STAGES, KEYS)
            started = True
            if not SHARED:
                tlx.tcgen05_commit(sum_full[0])
            tiles += 1
        segment = next_segment
        first = next_first
        own = next_own
        other = next_other
    if SHARED:
        tlx.tcgen05_commit(sum_full[0])


@triton.jit
def _compute(
    tiles_ptr, offsets_ptr, kv_offsets_ptr, stat_ptr, delta_ptr, num_tiles, heads, num_sequences, window_left,
    window_right, score_scale, a_bufs, scores, p, dp, ds, lse_bufs, delta_bufs, ab_full, s_full, ds_full,
    group: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    count = 0
    tile = tl.program_id(0)
    segment, head, first, own, other, start = read_own(
        tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first, next_own, next_other, next_start = read_own(
            tiles_ptr, offsets_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences, SHARED
        )
        begin, free_begin, free_end, end = streamed_blocks(
            segment, first, own, other, num_sequences, window_left, window_right, KEYS, HAS_LEFT, HAS_RIGHT
        )
        if end > begin:
            rows = first + tl.arange(0, RECORD_ROWS)
            if not KEYS:
                # Read back in the layout that the scores have: a conversion in every step would cost barriers.
                place = stat_block(start, segment, rows // BLOCK, head.to(tl.int64), heads, BLOCK) + rows % BLOCK
                has_block = rows // BLOCK * BLOCK < own
                tlx.local_store(lse_bufs[group], tl.load(stat_ptr + place, mask=has_block, other=float("inf")))
                tlx.local_store(delta_bufs[group], tl.load(delta_ptr + place, mask=has_block, other=0.0))
            seeing = first_seeing_row(own, other, window_right, HAS_RIGHT)
            for step in tl.range((count + group) & 1, end - begin, 2):
                block = begin + step
                buf, phase = ring(count + step, STAGES)
                tlx.barrier_wait(s_full[group], ((count + step) >> 1) & 1)
                if KEYS:  # statistics: that products came after their copy orders no ordinary read of them
                    tlx.barrier_wait(ab_full[buf], phase)
                for piece in tl.static_range(BLOCK // PIECE):
                    x = mul_f32x2(tlx.local_load(tlx.subslice(scores[group], piece * PIECE, PIECE)), score_scale)
                    if HAS_LEFT or HAS_RIGHT:
                        if (block < free_begin) | (block >= free_end):
                            columns = block * BLOCK + piece * PIECE + tl.arange(0, PIECE)
                            x = _hide(
                                x, rows, columns, own, other, window_left, window_right, KEYS, HAS_LEFT, HAS_RIGHT
                            )
                    if KEYS:
                        lse = tlx.local_load(tlx.local_slice(lse_bufs[buf], [piece * PIECE], [PIECE]))[None, :]
                        delta = tlx.local_load(tlx.local_slice(delta_bufs[buf], [piece * PIECE], [PIECE]))[None, :]
                    else:
                        lse = tlx.local_load(lse_bufs[group])[:, None]
                        delta = tlx.local_load(delta_bufs[group])[:, None]
                    x = tl.math.exp2(tl.minimum(x - lse, 0.0, propagate_nan=tl.PropagateNan.ALL))
                    # Over columns that were read: two of these take the place of one.
                    if KEYS:
                        tlx.local_store(tlx.subslice(p[group], piece * PIECE, PIECE), x.to(DTYPE))
                    x *= tlx.local_load(tlx.subslice(dp[group], piece * PIECE, PIECE)) - delta
                    if SHARED and HAS_RIGHT:
                        x = tl.where((rows >= seeing)[:, None], x, 0.0)
                    tlx.local_store(tlx.subslice(ds[group], piece * PIECE, PIECE), x.to(DTYPE))
                if SHARED and HAS_RIGHT:
                    if first < seeing:
                        tlx.barrier_wait(ab_full[buf], phase)
                        _clear_what_is_not_finite(a_bufs[buf])
                tlx.barrier_arrive(ds_full[group], 1)
            count += end - begin
        segment = next_segment
        head = next_head
        first = next_first
        own = next_own
        other = next_other
        start = next_start


@triton.jit
def _clear_what_is_not_finite(keys):
    """Of keys whose scores are there, before dQ takes them: rows of a shared query that see none of this sequence must
    get nothing from it, and 0 times NaN is NaN. In rows that see a NaN key it shows, for their ds is NaN.
    """
    STEP: tl.constexpr = 8
    for row in tl.static_range(0, BLOCK, STEP):
        rows = tlx.local_slice(keys, [row, 0], [STEP, keys.shape[1]])
        x = tlx.local_load(rows)
        tlx.local_store(rows, tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0))
    tlx.fence("async_shared")


@triton.jit
def _hide(
    x, own_rows, other_rows, own, other, window_left, window_right, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores (own, streamed) that no query row sees become -inf."""
    if KEYS:
        ahead = own_rows[:, None] - other_rows[None, :] - (own - other)
    else:
        ahead = other_rows[None, :] - own_rows[:, None] - (other - own)
    if HAS_RIGHT:
        x = tl.where(ahead <= window_right, x, float("-inf"))
    if HAS_LEFT:
        x = tl.where(ahead >= -window_left, x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "shared_rows", "window_left", "window_right"])
def gradient_kernel(
    table, tiles_ptr, offsets_ptr, q_offsets_ptr, kv_offsets_ptr, stat_ptr, delta_ptr, da_ptr, db_ptr, query_ptr,
    num_tiles, heads, num_sequences, shared_rows, q_head_stride, k_head_stride, v_head_stride, do_head_stride,
    window_left, window_right, scale, score_scale, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, PIECE: tl.constexpr,
    KEYS: tl.constexpr, SHARED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    COMPUTE_REGISTERS: tl.constexpr, ISSUE_REGISTERS: tl.constexpr,
):  # fmt: skip
    """KEYS: dK to `da_ptr` and dV to `db_ptr`; else dQ to `da_ptr`, with SHARED as float32 shares (chunks, S, H, D).

    `offsets_ptr` is that of the own side; `query_ptr` gives the dtype. Grid: any number of programs, with SHARED
    (chunks, blocks of S * H).
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    x_buf = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), DTYPE, 1)
    y_buf = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), DTYPE, 1)
    a_bufs = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, STAGES)
    b_bufs = tlx.local_alloc((BLOCK, HEAD_DIM), DTYPE, STAGES)
    out_bufs = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), DTYPE, 2 if KEYS else 1)
    # Statistics of streamed rows come with them; those of own rows each group keeps for itself.
    lse_bufs = tlx.local_alloc((BLOCK if KEYS else RECORD_ROWS,), tl.float32, STAGES if KEYS else 2)
    delta_bufs = tlx.local_alloc((BLOCK if KEYS else RECORD_ROWS,), tl.float32, STAGES if KEYS else 2)
    score_columns = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((RECORD_ROWS, BLOCK), tl.float32, 2, tlx.storage_kind.tmem, reuse=score_columns)
    p = tlx.local_alloc((RECORD_ROWS, BLOCK), DTYPE, 2, tlx.storage_kind.tmem, reuse=score_columns)
    score_columns.set_buffer_overlap(tlx.reuse_group(scores, p, group_type=tlx.reuse_group_type.shared))
    dp_columns = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    dp = tlx.local_alloc((RECORD_ROWS, BLOCK), tl.float32, 2, tlx.storage_kind.tmem, reuse=dp_columns)
    ds = tlx.local_alloc((RECORD_ROWS, BLOCK), DTYPE, 2, tlx.storage_kind.tmem, reuse=dp_columns)
    dp_columns.set_buffer_overlap(tlx.reuse_group(dp, ds, group_type=tlx.reuse_group_type.shared))
    sum_a = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    sum_b = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), tl.float32, 1, tlx.storage_kind.tmem)
    xy_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    xy_free = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    ab_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    ab_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    s_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    ds_full = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    sum_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    sum_free = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if SHARED:
                write_partial(
                    offsets_ptr, kv_offsets_ptr, da_ptr, heads, num_sequences, shared_rows, window_left, window_right,
                    scale, sum_a, sum_full, HEAD_DIM, PIECE, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            else:
                write(
                    table, tiles_ptr, offsets_ptr, kv_offsets_ptr, da_ptr, db_ptr, num_tiles, heads, num_sequences,
                    window_left, window_right, scale, sum_a, sum_b, out_bufs, sum_full, sum_free, DTYPE, HEAD_DIM,
                    PIECE, KEYS, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=COMPUTE_REGISTERS, replicate=2):
            _compute(
                tiles_ptr, offsets_ptr, kv_offsets_ptr, stat_ptr, delta_ptr, num_tiles, heads, num_sequences,
                window_left, window_right, score_scale, a_bufs, scores, p, dp, ds, lse_bufs, delta_bufs,
                ab_full, s_full, ds_full, tlx.async_task_replica_id(), DTYPE, STAGES, PIECE, KEYS, SHARED, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=ISSUE_REGISTERS):
            _multiply(
                tiles_ptr, offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences, window_left, window_right,
                x_buf, y_buf, a_bufs, b_bufs, scores, p, dp, ds, sum_a, sum_b, xy_full, xy_free, ab_full, ab_free,
                s_full, ds_full, sum_full, sum_free, STAGES, KEYS, SHARED, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=ISSUE_REGISTERS):
            _load(
                table, tiles_ptr, offsets_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, x_buf, y_buf,
                a_bufs, b_bufs, lse_bufs, delta_bufs, xy_full, xy_free, ab_full, ab_free, DTYPE, HEAD_DIM, STAGES, KEYS,
                SHARED, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
