"""All three gradients in one pass on sm_90: five products a block where the split kernels need seven.

A program owns 128 keys of one sequence and head, 64 a consumer: dk and dv stay in registers while blocks of 64 query
rows and their incoming gradients stream by, scores held transposed (key, query). A block's dq = ds^T K belongs to one
consumer, even blocks to the first, odd ones to the second: the other has written its half of ds to shared memory and is
ahead with the next block by then. The copy engine takes dq to a float32 scratch, in the order that the registers hold
it (see `backward_scratch`): a block's first tile of keys stores, the others add.

That the first tile comes first is seen to in two ways. A sequence of few queries is walked: one program has all of its
tiles, in order, and dq is the same in every run. Of another a first launch has the first tiles, a second launch the
rest. Under a window's left side a block's first tile would not be its sequence's: own queries come without a mask.

With a shared query each program adds to a scratch of its own and works for one head, in an order that the shapes fix:
the sum is the same in every run.
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
)
from gemattn.kernels.tlx.hopper.backward_scratch import SCRATCH_COLUMNS, in_register_order, is_walked, scratch_block
from gemattn.kernels.tlx.hopper.buffers import store_rows

# Named barriers; each is of 2 x 128 threads, and the next id is for the block or tile of the other consumer.
_DS_READY: tl.constexpr = tl.constexpr(9)
_DS_READ: tl.constexpr = tl.constexpr(11)
_BOTH: tl.constexpr = tl.constexpr(256)


@triton.jit
def _next_tile(tile, lane, ALTERNATE: tl.constexpr):
    """(tile, lane) of a program's next turn at the list. Longest first, it must not be the same one's every time."""
    programs = tl.num_programs(0)
    tile += programs
    if ALTERNATE:
        tile += programs - 1 - 2 * lane
        lane = programs - 1 - lane
    return tile, lane


@triton.jit
def _last_key_tile(first_key, n_q, n_kv, walk_rows, walk_keys, SHARED_QUERY: tl.constexpr):
    """First key of the last tile that a program has of a record."""
    last = first_key
    if not SHARED_QUERY:
        last = tl.where(is_walked(n_q, n_kv, walk_rows, walk_keys), (n_kv - 1) // RECORD_ROWS * RECORD_ROWS, last)
    return last


@triton.jit
def _paired_blocks(
    first_key, n_q, n_kv, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """Query blocks for a tile of keys: (begin, begin of the mask-free, end of the mask-free, end of the pairs, end).

    All but the end are even, so that blocks come in pairs and the same consumer has a block's dq in every tile: masks
    reach over one block more at either side where they must. begin = end where nothing is seen.
    """
    last_key = tl.minimum(first_key + RECORD_ROWS, n_kv) - 1
    begin, free_begin, free_end, end = query_blocks(
        first_key, last_key, n_q, n_kv, window_left, window_right, RECORD_ROWS // 2, HAS_LEFT, HAS_RIGHT
    )
    begin = tl.where(end > begin, begin - begin % 2, end)
    paired = tl.maximum(end - end % 2, begin)
    free_begin = tl.minimum(free_begin + free_begin % 2, paired)
    free_end = tl.maximum(free_end - free_end % 2, free_begin)
    return begin, free_begin, free_end, paired, end


@triton.jit
def _produce(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences, q_head_stride,
    k_head_stride, v_head_stride, do_head_stride, window_left, window_right, walk_rows, walk_keys, k_bufs, v_bufs,
    q_bufs, do_bufs, lse_bufs, delta_bufs, k_full, k_free, v_full, v_free, q_full, q_free, do_full, do_free,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr,
    SHARED_QUERY: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    BYTES: tl.constexpr = HALF * HEAD_DIM * 2
    lse_desc = read_descriptor(table, 6 * num_sequences, [HALF], tl.float32)
    delta_desc = read_descriptor(table, 6 * num_sequences + 1, [HALF], tl.float32)
    tile_count = 0
    q_count = 0
    tile = tl.program_id(0)
    lane = tl.program_id(0)
    segment, head, first_key, n_kv, n_q, _kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    while segment >= 0:
        tile, lane = _next_tile(tile, lane, not SHARED_QUERY)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, _next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        if segment < num_sequences:
            q_desc = read_descriptor(table, segment, [HALF, HEAD_DIM], DTYPE)
            do_desc = read_descriptor(table, num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            k_desc = read_descriptor(table, 2 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            v_desc = read_descriptor(table, 3 * num_sequences + segment, [HALF, HEAD_DIM], DTYPE)
            q_start = tl.load(q_offsets_ptr + segment)
            first_seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
            last = _last_key_tile(first_key, n_q, n_kv, walk_rows, walk_keys, SHARED_QUERY)
            for key in tl.range(first_key, last + 1, RECORD_ROWS):
                begin, _free_begin, _free_end, _paired, end = _paired_blocks(
                    key, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
                )
                if end > begin:
                    stage, k_phase = ring(tile_count, STAGES_K)
                    tlx.barrier_wait(k_free[stage], k_phase ^ 1)
                    tlx.barrier_expect_bytes(k_full[stage], 2 * BYTES)
                    for half in tl.static_range(2):
                        tlx.async_descriptor_load(
                            k_desc, k_bufs[2 * stage + half], [key + half * HALF, head * k_head_stride], k_full[stage]
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
                                    v_desc, v_bufs[half], [key + half * HALF, head * v_head_stride], v_full[0]
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
    dk, dv, q_count, block, freeing, tile_end, tile_count, seeing, first_rows, width, score_scale, dq_desc,
    scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_buf, k_free, v_full,
    v_free, q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, EARLY_DV: tl.constexpr,
    SHARED_QUERY: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
    FULL: tl.constexpr, TURN: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One query block, whose dq is consumer TURN's; a tile begins with TURN 0, and an ALONE one is its last. In block
    `freeing` the keys of the tile before come free. Unless the tile is FULL, keys past the end are zero rows: they add
    nothing to dq, and their own rows of dk and dv are never written."""
    HALF: tl.constexpr = RECORD_ROWS // 2
    # Always 0, but not to the compiler: it would keep every buffer's address in registers that the products need.
    zero = q_count >> 30
    tile_count += zero
    stage = tile_count % STAGES_K
    buf, phase = ring(q_count, STAGES_Q)
    tlx.barrier_wait(q_full[buf], phase)
    scores = tlx.async_dot(k_bufs[2 * stage + half], tlx.local_trans(q_bufs[buf]))
    tlx.barrier_wait(v_full[0], tile_count & 1)
    tlx.barrier_wait(do_full[buf], phase)
    dp = tlx.async_dot(v_bufs[half + zero], tlx.local_trans(do_bufs[buf]))
    lse = tlx.local_load(lse_bufs[buf])
    scores = tlx.async_dot_wait(1, scores) * score_scale
    if MASKED:
        if HAS_RIGHT:
            scores = tl.where(from_column(first_rows - block * HALF, HALF, HALF), scores, float("-inf"))
        if HAS_LEFT:
            hidden = first_rows + (width + zero) - block * HALF
            scores = tl.where(from_column(hidden, HALF, HALF), float("-inf"), scores)
    exponent = scores - lse[None, :]
    if not FULL:  # of a key past the end nothing bounds it, and 0 times infinity would get into dq
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.math.exp2(exponent)
    if EARLY_DV:
        dv = tlx.async_dot(p.to(DTYPE), do_bufs[buf], dv)
        dp = tlx.async_dot_wait(1, dp)
    else:
        dp = tlx.async_dot_wait(0, dp)
    delta = tlx.local_load(delta_bufs[buf])
    if ALONE:
        tlx.barrier_arrive(v_free[0], 1)
    elif TURN == 1:
        tlx.barrier_arrive(v_free[0], 1, pred=block == tile_end - 1)
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    if not EARLY_DV:
        dv = tlx.async_dot(p.to(DTYPE), do_bufs[buf], dv)
    dk = tlx.async_dot(ds, q_bufs[buf], dk)
    if TURN == 0:
        _wait_for_sums(block == freeing)
    # What this consumer stored before (dq of its last turn, dk and dv of the tile before) has left its buffers.
    tlx.async_descriptor_store_wait(0)
    if TURN == 0:
        tlx.barrier_arrive(k_free[(tile_count + STAGES_K - 1) % STAGES_K], 1, pred=block == freeing)
    slot = TURN + zero
    tlx.local_store(ds_bufs[2 * half + slot], ds)
    tlx.fence("async_shared")
    if TURN != half:
        tlx.named_barrier_arrive(_DS_READY + TURN, _BOTH)
    dv = tlx.async_dot_wait(1, dv)
    tlx.barrier_arrive(do_free[buf], 1)
    dk = tlx.async_dot_wait(0, dk)
    tlx.barrier_arrive(q_free[buf], 1)
    if TURN == half:
        tlx.named_barrier_wait(_DS_READY + TURN, _BOTH)
        dq = tlx.async_dot(tlx.local_trans(ds_bufs[slot]), k_bufs[2 * stage])
        dq = tlx.async_dot(tlx.local_trans(ds_bufs[2 + slot]), k_bufs[2 * stage + 1], dq)
        dq = tlx.async_dot_wait(0, dq)
        if SHARED_QUERY and HAS_RIGHT and MASKED:  # rows that see no key here: 0 times a NaN key is NaN
            dq = tl.where((block * HALF + tl.arange(0, HALF) >= seeing)[:, None], dq, 0.0)
        tlx.local_store(dq_buf, in_register_order(dq, HALF, HEAD_DIM))
        place = (scratch ^ (scratch >> 31)) + block * (HALF * HEAD_DIM // SCRATCH_COLUMNS)
        # The fence is in every branch, as the compiler adds one of its own to a branch that has none.
        if SHARED_QUERY:
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, dq_buf, [place, 0], store_reduce="add")
        elif scratch < 0:
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, dq_buf, [place, 0])
        else:
            tlx.fence("async_shared")
            tlx.async_descriptor_store(dq_desc, dq_buf, [place, 0], store_reduce="add")
    return dk, dv, q_count + 1


@triton.jit
def _dq_is_done(half: tl.constexpr, TURN: tl.constexpr):
    """Consumer TURN has read the other's ds and keys: the other may write over them."""
    if TURN == half:
        tlx.named_barrier_arrive(_DS_READ + TURN, _BOTH)
    else:
        tlx.named_barrier_wait(_DS_READ + TURN, _BOTH)


@triton.jit
def _gradient_pairs(
    dk, dv, q_count, from_block, to_block, freeing, tile_end, tile_count, seeing, first_rows, width, score_scale,
    dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_buf, k_free, v_full, v_free,
    q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, EARLY_DV: tl.constexpr, SHARED_QUERY: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Query blocks [from_block, to_block), both even: two at a time, so that the compiler knows whose turn it is."""
    for block in tl.range(from_block, to_block, 2):
        for turn in tl.static_range(2):
            dk, dv, q_count = _gradient_block(
                dk, dv, q_count, block + turn, freeing, tile_end, tile_count, seeing, first_rows, width,
                score_scale, dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                delta_bufs, ds_bufs, dq_buf, k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE,
                HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT, MASKED, FULL,
                turn, False,
            )  # fmt: skip
    return dk, dv, q_count


@triton.jit
def _wait_for_sums(pred):
    """Where `pred`, until what this thread stored and added has reached memory: of two sums in flight to one address
    either may land first."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p cp.async.bulk.wait_group 0; mov.b32 $0, 0; }",
        "=r,r",
        [pred.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _consume(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
    query_blocks_of_all, first_tiles, window_left, window_right, walk_rows, walk_keys, scale, score_scale, k_bufs,
    v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_bufs, dk_bufs, dv_bufs, k_full, k_free, v_full, v_free,
    q_full, q_free, do_full, do_free, half: tl.constexpr, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES_K: tl.constexpr, STAGES_Q: tl.constexpr, EARLY_DV: tl.constexpr, SHARED_QUERY: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = RECORD_ROWS // 2
    UNIT: tl.constexpr = HALF * HEAD_DIM // SCRATCH_COLUMNS
    DV_BUF: tl.constexpr = half if HEAD_DIM < HALF else half * (RECORD_ROWS // HEAD_DIM)
    tile_count = 0
    q_count = 0
    tile = tl.program_id(0)
    lane = tl.program_id(0)
    segment, head, first_key, n_kv, n_q, kv_start = read_tile(
        tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    dq_desc = read_descriptor(table, 6 * num_sequences + 2, [UNIT, SCRATCH_COLUMNS], tl.float32)
    all_dk = read_descriptor(table, 6 * num_sequences + 3, [HALF, HEAD_DIM], DTYPE)
    all_dv = read_descriptor(table, 6 * num_sequences + 4, [HALF, HEAD_DIM], DTYPE)
    while segment >= 0:
        tile, lane = _next_tile(tile, lane, not SHARED_QUERY)
        next_segment, next_head, next_first_key, next_n_kv, next_n_q, next_kv_start = read_tile(
            tiles_ptr, kv_offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        last = first_key
        if SHARED_QUERY:
            scratch = tl.program_id(0) * query_blocks_of_all * UNIT
        else:
            place = tl.minimum(segment, num_sequences)
            q_start = tl.load(q_offsets_ptr + place)
            scratch = (scratch_block(q_start, place, n_q, head, heads) * UNIT).to(tl.int32)
            if segment < num_sequences:
                last = _last_key_tile(first_key, n_q, n_kv, walk_rows, walk_keys, SHARED_QUERY)
            # The tile that stores has the place's complement: one number fewer in registers than a flag.
            scratch = tl.where(first_tiles != 0, ~scratch, scratch)
        for first in tl.range(first_key, last + 1, RECORD_ROWS):
            keys = first + half * HALF + tl.arange(0, HALF)
            begin, free_begin, free_end, paired, end = _paired_blocks(
                first, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            if (end > begin) & (segment < num_sequences):
                dk = tl.zeros([HALF, HEAD_DIM], tl.float32)
                dv = tl.zeros([HALF, HEAD_DIM], tl.float32)
                # What a window leaves a key: `width` rows from first_rows on.
                first_rows = keys - (n_kv - n_q) - window_right
                width = window_left + window_right + 1
                seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
                freeing = tl.where(tile_count > 0, begin, -1)
                stage, k_phase = ring(tile_count, STAGES_K)
                tlx.barrier_wait(k_full[stage], k_phase)
                if HAS_RIGHT:
                    dk, dv, q_count = _gradient_pairs(
                        dk, dv, q_count, begin, free_begin, freeing, end, tile_count, seeing, first_rows,
                        width, score_scale, dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                        delta_bufs, ds_bufs, dq_bufs[0], k_free, v_full, v_free, q_full, q_free, do_full, do_free, half,
                        DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT, True,
                        False,
                    )  # fmt: skip
                full_end = free_begin
                if not (HAS_LEFT or HAS_RIGHT):
                    full_end = tl.where(first + RECORD_ROWS <= n_kv, free_end, free_begin)
                    dk, dv, q_count = _gradient_pairs(
                        dk, dv, q_count, free_begin, full_end, freeing, end, tile_count, seeing, first_rows, width,
                        score_scale, dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                        delta_bufs, ds_bufs, dq_bufs[0], k_free, v_full, v_free, q_full, q_free, do_full, do_free, half,
                        DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT, False, True,
                    )  # fmt: skip
                dk, dv, q_count = _gradient_pairs(
                    dk, dv, q_count, full_end, free_end, freeing, end, tile_count, seeing, first_rows, width,
                    score_scale, dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                    delta_bufs, ds_bufs, dq_bufs[0], k_free, v_full, v_free, q_full, q_free, do_full, do_free, half,
                    DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT, False, False,
                )  # fmt: skip
                if HAS_LEFT:
                    dk, dv, q_count = _gradient_pairs(
                        dk, dv, q_count, free_end, paired, freeing, end, tile_count, seeing, first_rows,
                        width, score_scale, dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs,
                        delta_bufs, ds_bufs, dq_bufs[0], k_free, v_full, v_free, q_full, q_free, do_full, do_free, half,
                        DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT, True,
                        False,
                    )  # fmt: skip
                for block in tl.range(paired, end):
                    dk, dv, q_count = _gradient_block(
                        dk, dv, q_count, block, freeing, end, tile_count, seeing, first_rows, width, score_scale,
                        dq_desc, scratch, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs,
                        ds_bufs, dq_bufs[0], k_free, v_full, v_free, q_full, q_free, do_full, do_free, half, DTYPE,
                        HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT,
                        HAS_LEFT or HAS_RIGHT, False, 0, True,
                    )  # fmt: skip
                    _dq_is_done(half, 0)
                # dv leaves through this consumer's ds, dk through its half of the keys, once the last dq has read both.
                _dq_is_done(half, 1)
                tlx.local_store(dv_bufs[DV_BUF], dv.to(DTYPE))
                tlx.local_store(dk_bufs[2 * stage + half], (dk * scale).to(DTYPE))
                own = first + half * HALF
                column = head * HEAD_DIM
                store_rows(
                    table, all_dv, 5 * num_sequences + segment, dv_bufs[DV_BUF], kv_start, own, n_kv, column, DTYPE,
                    HEAD_DIM,
                )  # fmt: skip
                store_rows(
                    table, all_dk, 4 * num_sequences + segment, dk_bufs[2 * stage + half], kv_start, own, n_kv, column,
                    DTYPE, HEAD_DIM,
                )  # fmt: skip
                tile_count += 1
                scratch = scratch ^ (scratch >> 31)
            else:
                cleared = kv_start + first + half * HALF
                clear_rows(dk_ptr, cleared, kv_start + n_kv, heads, head, HEAD_DIM)
                clear_rows(dv_ptr, cleared, kv_start + n_kv, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_key = next_first_key
        n_kv = next_n_kv
        n_q = next_n_q
        kv_start = next_kv_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(
    do_not_specialize=[
        "num_tiles", "num_sequences", "query_blocks_of_all", "first_tiles", "window_left", "window_right",
        "walk_rows", "walk_keys",
    ]
)  # fmt: skip
def fused_gradient_kernel(
    table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
    query_blocks_of_all, first_tiles, q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left,
    window_right, walk_rows, walk_keys, scale, score_scale, HEAD_DIM: tl.constexpr, STAGES_K: tl.constexpr,
    STAGES_Q: tl.constexpr, EARLY_DV: tl.constexpr, SHARED_QUERY: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """dk and dv (kv_rows, H, D), and dq without `scale` in the scratch. Persistent: any grid, with a shared query a
    multiple of H. `first_tiles`: the records are of first tiles, of walked sequences (`is_walked`) whole, and of slack.
    """
    HALF: tl.constexpr = RECORD_ROWS // 2
    DTYPE: tl.constexpr = dk_ptr.dtype.element_ty
    k_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2 * STAGES_K)
    v_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    q_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    do_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, STAGES_Q)
    ds_bufs = tlx.local_alloc((HALF, HALF), DTYPE, 4)
    dq_bufs = tlx.local_alloc((HALF * HEAD_DIM // SCRATCH_COLUMNS, SCRATCH_COLUMNS), tl.float32, 1)
    if HEAD_DIM < HALF:  # rows of another width than ds's are laid out in another way: no place for them there
        dv_bufs = tlx.local_alloc((HALF, HEAD_DIM), DTYPE, 2)
    else:
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
    q_free = tlx.alloc_warp_barrier(num_barriers=STAGES_Q, num_warps=4, num_arrivals=2)
    do_free = tlx.alloc_warp_barrier(num_barriers=STAGES_Q, num_warps=4, num_arrivals=2)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _produce(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, num_tiles, heads, num_sequences,
                q_head_stride, k_head_stride, v_head_stride, do_head_stride, window_left, window_right, walk_rows,
                walk_keys, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, k_full, k_free, v_full, v_free,
                q_full, q_free, do_full, do_free, DTYPE, HEAD_DIM, STAGES_K, STAGES_Q, SHARED_QUERY, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            _consume(
                table, tiles_ptr, q_offsets_ptr, kv_offsets_ptr, dk_ptr, dv_ptr, num_tiles, heads, num_sequences,
                query_blocks_of_all, first_tiles, window_left, window_right, walk_rows, walk_keys, scale,
                score_scale, k_bufs, v_bufs, q_bufs, do_bufs, lse_bufs, delta_bufs, ds_bufs, dq_bufs, dk_bufs, dv_bufs,
                k_full, k_free, v_full, v_free, q_full, q_free, do_full, do_free, tlx.async_task_replica_id(), DTYPE,
                HEAD_DIM, STAGES_K, STAGES_Q, EARLY_DV, SHARED_QUERY, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
