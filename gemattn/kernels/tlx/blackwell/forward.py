"""Forward on sm_100: two tiles of 128 query rows share each key and value block; every product runs in tensor memory.

Roles, one task each: load (TMA), mma (one warp issues every product), softmax (a group of 4 warps for each 128 rows),
and correction (4 warps: rescales the output in tensor memory where a maximum moved, and writes it). A program walks the
tile list with a stride of the grid and takes 256 rows, a record with an even block and the one behind it. Masked blocks
come first (end of the sequence, causal edge) and last (left side of a window).

The barriers are tabled in docs/kernels/blackwell.md. Compiled and simulated, never run on a B200.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import mul_f32x2, read_descriptor, sub_f32x2, tlx
from gemattn.kernels.tlx.common import LN2, RECORD_ROWS, ROWS, clear_rows, hide, key_blocks, read_tile, ring

PAIR_ROWS: tl.constexpr = tl.constexpr(2 * 128)  # query rows of a program's tile, RECORD_ROWS a softmax group
BLOCK_N: tl.constexpr = tl.constexpr(128)
RARELY: tl.constexpr = tl.constexpr(8.0)  # a row's reference moves when its maximum grows by more, in log2


@triton.jit
def _has_rows(group: tl.constexpr, first_row, n_q):
    """Whether the tile has rows for a softmax group; the first one always has."""
    return first_row + group * RECORD_ROWS < n_q


@triton.jit
def _blocks(first_row, n_q, n_kv, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """`key_blocks` of a tile; both groups walk the same ones."""
    last_row = tl.minimum(first_row + PAIR_ROWS, n_q) - 1
    return key_blocks(first_row, last_row, n_q, n_kv, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)


@triton.jit
def _load(
    table, tiles_ptr, offsets_ptr, num_tiles, heads, group_size, num_sequences, q_head_stride, k_head_stride,
    v_head_stride, window_left, window_right, q_bufs, kv_bufs, q_full, q_free, kv_full, kv_free, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = BLOCK_N * HEAD_DIM * 2
    tiles = 0
    count = 0
    tile = tl.program_id(0)
    segment, head, first_row, n_q, n_kv, _ = read_tile(tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences)
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, _ = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        if (segment < num_sequences) & (first_row % PAIR_ROWS == 0):
            begin, _free_begin, _free_end, end = _blocks(
                first_row, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                q_desc = read_descriptor(table, segment, [RECORD_ROWS, HEAD_DIM], DTYPE)
                k_desc = read_descriptor(table, num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                v_desc = read_descriptor(table, 2 * num_sequences + segment, [BLOCK_N, HEAD_DIM], DTYPE)
                kv_head = head // group_size
                tlx.barrier_wait(q_free[0], (tiles & 1) ^ 1)
                tlx.barrier_expect_bytes(q_full[0], RECORD_ROWS * HEAD_DIM * 2)
                tlx.async_descriptor_load(q_desc, q_bufs[0], [first_row, head * q_head_stride], q_full[0])
                tiles += 1
                for step in tl.range(0, end - begin):
                    row = (end - 1 - step) * BLOCK_N
                    buf, phase = ring(count, STAGES)
                    tlx.barrier_wait(kv_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(kv_full[buf], BYTES)
                    tlx.async_descriptor_load(k_desc, kv_bufs[buf], [row, kv_head * k_head_stride], kv_full[buf])
                    if (step == 0) & _has_rows(1, first_row, n_q):
                        tlx.barrier_expect_bytes(q_full[1], RECORD_ROWS * HEAD_DIM * 2)
                        tlx.async_descriptor_load(
                            q_desc, q_bufs[1], [first_row + RECORD_ROWS, head * q_head_stride], q_full[1]
                        )
                    buf, phase = ring(count + 1, STAGES)
                    tlx.barrier_wait(kv_free[buf], phase ^ 1)
                    tlx.barrier_expect_bytes(kv_full[buf], BYTES)
                    tlx.async_descriptor_load(v_desc, kv_bufs[buf], [row, kv_head * v_head_stride], kv_full[buf])
                    count += 2
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv


@triton.jit
def _add_values(group: tl.constexpr, blocks, step, p, v_buf, o, p_full, o_ready):
    """Issue the value product of a group's block: o is rescaled, and p is stored."""
    tlx.barrier_wait(o_ready[group], blocks & 1)
    tlx.barrier_wait(p_full[group], blocks & 1)
    tlx.async_dot(p[group], v_buf, o[group], use_acc=step > 0, force_async=True)


@triton.jit
def _multiply(
    tiles_ptr, offsets_ptr, num_tiles, heads, num_sequences, window_left, window_right, q_bufs, kv_bufs, scores, p, o,
    q_full, q_free, kv_full, kv_free, s_full, p_full, o_ready, o_full, STAGES: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Products of a block, in turns: values of group 0, its next scores, values of group 1, its next scores.

    Products run in the order of their issue, so a group's next scores may take the place of its p without a barrier.
    """
    tiles = 0
    pairs = 0
    blocks = 0
    pair_blocks = 0
    count = 0
    tile = tl.program_id(0)
    segment, _head, first_row, n_q, n_kv, _ = read_tile(tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences)
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, _head, next_first_row, next_n_q, next_n_kv, _ = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        if (segment < num_sequences) & (first_row % PAIR_ROWS == 0):
            begin, _free_begin, _free_end, end = _blocks(
                first_row, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                both = _has_rows(1, first_row, n_q)
                buf, phase = ring(count, STAGES)
                tlx.barrier_wait(q_full[0], tiles & 1)
                tlx.barrier_wait(kv_full[buf], phase)
                tlx.async_dot(q_bufs[0], tlx.local_trans(kv_bufs[buf]), scores[0], use_acc=False, mBarriers=[s_full[0]])
                if both:
                    tlx.barrier_wait(q_full[1], pairs & 1)
                    tlx.async_dot(
                        q_bufs[1], tlx.local_trans(kv_bufs[buf]), scores[1], use_acc=False, mBarriers=[s_full[1]]
                    )
                tlx.tcgen05_commit(kv_free[buf])
                for step in tl.range(0, end - begin):
                    v_buf, v_phase = ring(count + 1, STAGES)
                    k_buf, k_phase = ring(count + 2, STAGES)
                    goes_on = step < end - begin - 1
                    tlx.barrier_wait(kv_full[v_buf], v_phase)
                    _add_values(0, blocks, step, p, kv_bufs[v_buf], o, p_full, o_ready)
                    if goes_on:
                        tlx.barrier_wait(kv_full[k_buf], k_phase)
                        tlx.async_dot(
                            q_bufs[0], tlx.local_trans(kv_bufs[k_buf]), scores[0], use_acc=False, mBarriers=[s_full[0]]
                        )
                    else:
                        # The last scores of group 1 came before: both queries are read.
                        tlx.tcgen05_commit(q_free[0])
                        if both:  # its store need not wait for group 1's values
                            tlx.tcgen05_commit(o_full[0])
                    if both:
                        _add_values(1, pair_blocks, step, p, kv_bufs[v_buf], o, p_full, o_ready)
                        pair_blocks += 1
                    tlx.tcgen05_commit(kv_free[v_buf])
                    if goes_on:
                        if both:
                            tlx.async_dot(
                                q_bufs[1], tlx.local_trans(kv_bufs[k_buf]), scores[1], use_acc=False,
                                mBarriers=[s_full[1]],
                            )  # fmt: skip
                        tlx.tcgen05_commit(kv_free[k_buf])
                    blocks += 1
                    count += 2
                # The program's last commit is one that it waits for: nothing may arrive after its end.
                if both:
                    tlx.tcgen05_commit(o_full[1])
                    pairs += 1
                else:
                    tlx.tcgen05_commit(o_full[0])
                tiles += 1
        segment = next_segment
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv


@triton.jit
def _send(group: tl.constexpr, messages, factor, factors, f_full, f_free):
    """A factor for each row, to the correction group."""
    tlx.barrier_wait(f_free[group], (messages & 1) ^ 1)
    tlx.local_store(factors[group], factor)
    tlx.barrier_arrive(f_full[group], 1)


@triton.jit
def _scaled_scores(
    scores, piece: tl.constexpr, start, rows, shift, n_kv, window_left, window_right, score_scale, PIECE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """PIECE columns, read anew each time they are wanted: tensor memory has the bandwidth, registers have no room."""
    x = tlx.local_load(tlx.subslice(scores, piece * PIECE, PIECE))
    x = mul_f32x2(x, score_scale)  # before the mask: a negative scale would turn -inf around
    if MASKED:
        x = hide(
            x, rows, start + piece * PIECE, shift, n_kv, window_left, window_right, PIECE, HAS_LEFT, HAS_RIGHT
        )  # fmt: skip
    return x


@triton.jit
def _softmax_blocks(
    row_max, row_sum, blocks, messages, from_block, to_block, rows, shift, n_kv, window_left, window_right, score_scale,
    scores, p, factors, s_full, p_full, f_full, f_free, group: tl.constexpr, DTYPE: tl.constexpr,
    PIECE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Blocks from_block - 1 down to to_block.

    A row keeps its reference until its maximum grows by more than RARELY above it: probabilities reach 2 ** RARELY, and
    what was summed so far is seldom rescaled. What a row gets depends on its own scores alone.
    """
    for step in tl.range(0, from_block - to_block):
        start = (from_block - 1 - step) * BLOCK_N
        tlx.barrier_wait(s_full[group], blocks & 1)
        peak = row_max
        for piece in tl.static_range(BLOCK_N // PIECE):
            x = _scaled_scores(
                scores[group], piece, start, rows, shift, n_kv, window_left, window_right, score_scale, PIECE, HAS_LEFT,
                HAS_RIGHT, MASKED,
            )  # fmt: skip
            peak = tl.maximum(peak, tl.max(x, 1))
        keeps = row_max - peak >= -RARELY
        new_max = tl.where(keeps, row_max, peak)
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        factor = tl.where(keeps, 1.0, tl.math.exp2(row_max - reference))
        _send(group, messages, factor, factors, f_full, f_free)
        row_sum *= factor
        for piece in tl.static_range(BLOCK_N // PIECE):
            x = _scaled_scores(
                scores[group], piece, start, rows, shift, n_kv, window_left, window_right, score_scale, PIECE, HAS_LEFT,
                HAS_RIGHT, MASKED,
            )  # fmt: skip
            x = tl.math.exp2(sub_f32x2(x, reference[:, None]))
            # Over columns of scores that were read: two of p's take the place of one.
            tlx.local_store(tlx.subslice(p[group], piece * PIECE, PIECE), x.to(DTYPE))
            row_sum += tl.sum(x, 1)
        tlx.barrier_arrive(p_full[group], 1)
        row_max = new_max
        blocks += 1
        messages += 1
    return row_max, row_sum, blocks, messages


@triton.jit
def _softmax(
    tiles_ptr, offsets_ptr, lse_ptr, num_tiles, heads, num_sequences, out_rows, window_left, window_right, score_scale,
    scores, p, factors, s_full, p_full, f_full, f_free, group: tl.constexpr, DTYPE: tl.constexpr,
    PIECE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    blocks = 0
    messages = 0
    tile = tl.program_id(0)
    segment, head, first_row, n_q, n_kv, q_start = read_tile(
        tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, next_q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        if (segment < num_sequences) & (first_row % PAIR_ROWS == 0) & _has_rows(group, first_row, n_q):
            begin, free_begin, free_end, end = _blocks(
                first_row, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            if end > begin:
                rows = first_row + group * RECORD_ROWS + tl.arange(0, RECORD_ROWS)
                shift = n_kv - n_q
                row_max = tl.full([RECORD_ROWS], float("-inf"), tl.float32)
                row_sum = tl.zeros([RECORD_ROWS], tl.float32)
                row_max, row_sum, blocks, messages = _softmax_blocks(
                    row_max, row_sum, blocks, messages, end, free_end, rows, shift, n_kv, window_left, window_right,
                    score_scale, scores, p, factors, s_full, p_full, f_full, f_free, group, DTYPE, PIECE, HAS_LEFT,
                    HAS_RIGHT, True,
                )  # fmt: skip
                row_max, row_sum, blocks, messages = _softmax_blocks(
                    row_max, row_sum, blocks, messages, free_end, free_begin, rows, shift, n_kv,
                    window_left, window_right, score_scale, scores, p, factors, s_full, p_full, f_full, f_free, group,
                    DTYPE, PIECE, HAS_LEFT, HAS_RIGHT, False,
                )  # fmt: skip
                if HAS_LEFT:
                    row_max, row_sum, blocks, messages = _softmax_blocks(
                        row_max, row_sum, blocks, messages, free_begin, begin, rows, shift, n_kv,
                        window_left, window_right, score_scale, scores, p, factors, s_full, p_full, f_full, f_free,
                        group, DTYPE, PIECE, HAS_LEFT, HAS_RIGHT, True,
                    )  # fmt: skip
                _send(group, messages, 1.0 / row_sum, factors, f_full, f_free)
                messages += 1
                lse = (row_max + tl.math.log2(row_sum)) * LN2
                if HAS_RIGHT:
                    lse = tl.where(rows + (shift + window_right) >= 0, lse, float("-inf"))
                tl.store(lse_ptr + head.to(tl.int64) * out_rows + q_start + rows, lse, mask=rows < n_q)
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv
        q_start = next_q_start


@triton.jit
def _receive(group: tl.constexpr, messages, factors, f_full, f_free):
    tlx.barrier_wait(f_full[group], messages & 1)
    factor = tlx.local_load(factors[group])
    tlx.barrier_arrive(f_free[group], 1)
    return factor


@triton.jit
def _rescale(
    group: tl.constexpr, messages, step, o, factors, f_full, f_free, o_ready, HEAD_DIM: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Make o ready for a block's value product. The block's scores came after the product before, which so is done."""
    factor = _receive(group, messages, factors, f_full, f_free)
    moved = tl.max((factor != 1.0).to(tl.int32), 0)
    if (step > 0) & (moved > 0):
        for piece in tl.static_range(HEAD_DIM // PIECE):
            part = tlx.subslice(o[group], piece * PIECE, PIECE)
            tlx.local_store(part, mul_f32x2(tlx.local_load(part), factor[:, None]))
    tlx.barrier_arrive(o_ready[group], 1)


@triton.jit
def _write(
    group: tl.constexpr, table, slot, tiles, messages, row, head, sees_from, o, o_bufs, factors, f_full, f_free, o_full,
    DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Rows row to row + 127 of out. The buffer is free; rows before `sees_from` see no key."""
    inverse = _receive(group, messages, factors, f_full, f_free)
    tlx.barrier_wait(o_full[group], tiles & 1)
    for piece in tl.static_range(HEAD_DIM // PIECE):
        out = mul_f32x2(tlx.local_load(tlx.subslice(o[group], piece * PIECE, PIECE)), inverse[:, None])
        if HAS_RIGHT:
            out = tl.where((row + tl.arange(0, RECORD_ROWS) >= sees_from)[:, None], out, 0.0)
        tlx.local_store(tlx.local_slice(o_bufs[group], [0, piece * PIECE], [RECORD_ROWS, PIECE]), out.to(DTYPE))
    tlx.fence("async_shared")
    o_desc = read_descriptor(table, slot, [RECORD_ROWS, HEAD_DIM], DTYPE)
    tlx.async_descriptor_store(o_desc, o_bufs[group], [row, head * HEAD_DIM])


@triton.jit
def _correct(
    table, tiles_ptr, offsets_ptr, out_ptr, lse_ptr, num_tiles, heads, num_sequences, out_rows, window_left,
    window_right, o, o_bufs, factors, f_full, f_free, o_ready, o_full, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PIECE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    tiles = 0
    pairs = 0
    messages = 0
    pair_messages = 0
    tile = tl.program_id(0)
    segment, head, first_row, n_q, n_kv, q_start = read_tile(
        tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
    )
    while segment >= 0:
        tile += tl.num_programs(0)
        next_segment, next_head, next_first_row, next_n_q, next_n_kv, next_q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        begin, _free_begin, _free_end, end = _blocks(
            first_row, n_q, n_kv, window_left, window_right, HAS_LEFT, HAS_RIGHT
        )
        if first_row % PAIR_ROWS == 0:
            if (segment < num_sequences) & (end > begin):
                both = _has_rows(1, first_row, n_q)
                for step in tl.range(0, end - begin):
                    _rescale(0, messages, step, o, factors, f_full, f_free, o_ready, HEAD_DIM, PIECE)
                    messages += 1
                    if both:
                        _rescale(1, pair_messages, step, o, factors, f_full, f_free, o_ready, HEAD_DIM, PIECE)
                        pair_messages += 1
                slot = 3 * num_sequences + segment
                sees_from = n_q - n_kv - window_right
                # The stores of the tile before must have left their buffers.
                tlx.async_descriptor_store_wait(0)
                _write(
                    0, table, slot, tiles, messages, first_row, head, sees_from, o, o_bufs, factors, f_full, f_free,
                    o_full, DTYPE, HEAD_DIM, PIECE, HAS_RIGHT,
                )  # fmt: skip
                messages += 1
                tiles += 1
                if both:
                    _write(
                        1, table, slot, pairs, pair_messages, first_row + RECORD_ROWS, head, sees_from, o, o_bufs,
                        factors, f_full, f_free, o_full, DTYPE, HEAD_DIM, PIECE, HAS_RIGHT,
                    )  # fmt: skip
                    pair_messages += 1
                    pairs += 1
            else:
                rows = first_row + tl.arange(0, PAIR_ROWS)
                none = tl.full([PAIR_ROWS], float("-inf"), tl.float32)
                tl.store(lse_ptr + head.to(tl.int64) * out_rows + q_start + rows, none, mask=rows < n_q)
                for part in tl.range(0, PAIR_ROWS, ROWS):
                    clear_rows(out_ptr, q_start + first_row + part, q_start + n_q, heads, head, HEAD_DIM)
        segment = next_segment
        head = next_head
        first_row = next_first_row
        n_q = next_n_q
        n_kv = next_n_kv
        q_start = next_q_start
    tlx.async_descriptor_store_wait(0)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "out_rows", "window_left", "window_right"])
def forward_kernel(
    table, tiles_ptr, offsets_ptr, out_ptr, lse_ptr, num_tiles, heads, group_size, num_sequences, out_rows,
    q_head_stride, k_head_stride, v_head_stride, window_left, window_right, score_scale, HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr, PIECE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTMAX_REGISTERS: tl.constexpr, ISSUE_REGISTERS: tl.constexpr,
):  # fmt: skip
    """out (out_rows, H, D) and lse (H, out_rows). Persistent: any grid; launch with 4 warps, the correction group's."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    q_bufs = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), DTYPE, 2)
    o_bufs = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), DTYPE, 2)
    kv_bufs = tlx.local_alloc((BLOCK_N, HEAD_DIM), DTYPE, STAGES)
    factors = tlx.local_alloc((RECORD_ROWS,), tl.float32, 2)
    shared_columns = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    scores = tlx.local_alloc((RECORD_ROWS, BLOCK_N), tl.float32, 2, tlx.storage_kind.tmem, reuse=shared_columns)
    p = tlx.local_alloc((RECORD_ROWS, BLOCK_N), DTYPE, 2, tlx.storage_kind.tmem, reuse=shared_columns)
    shared_columns.set_buffer_overlap(tlx.reuse_group(scores, p, group_type=tlx.reuse_group_type.shared))
    o = tlx.local_alloc((RECORD_ROWS, HEAD_DIM), tl.float32, 2, tlx.storage_kind.tmem)
    q_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    q_free = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    kv_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    kv_free = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    s_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    o_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    p_full = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    f_full = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    f_free = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    o_ready = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            _correct(
                table, tiles_ptr, offsets_ptr, out_ptr, lse_ptr, num_tiles, heads, num_sequences, out_rows, window_left,
                window_right, o, o_bufs, factors, f_full, f_free, o_ready, o_full, DTYPE, HEAD_DIM, PIECE, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=4, registers=SOFTMAX_REGISTERS, replicate=2):
            _softmax(
                tiles_ptr, offsets_ptr, lse_ptr, num_tiles, heads, num_sequences, out_rows, window_left, window_right,
                score_scale, scores, p, factors, s_full, p_full, f_full, f_free, tlx.async_task_replica_id(), DTYPE,
                PIECE, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=ISSUE_REGISTERS):
            _multiply(
                tiles_ptr, offsets_ptr, num_tiles, heads, num_sequences, window_left, window_right, q_bufs, kv_bufs,
                scores, p, o, q_full, q_free, kv_full, kv_free, s_full, p_full, o_ready, o_full, STAGES, HAS_LEFT,
                HAS_RIGHT,
            )  # fmt: skip
        with tlx.async_task(num_warps=1, registers=ISSUE_REGISTERS):
            _load(
                table, tiles_ptr, offsets_ptr, num_tiles, heads, group_size, num_sequences, q_head_stride,
                k_head_stride, v_head_stride, window_left, window_right, q_bufs, kv_bufs, q_full, q_free, kv_full,
                kv_free, DTYPE, HEAD_DIM, STAGES, HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
