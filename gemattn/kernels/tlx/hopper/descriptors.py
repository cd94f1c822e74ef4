"""Descriptors of the two ways backward; see `gemattn.kernels.tlx.descriptors`."""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import descriptor_slot, tlx
from gemattn.kernels.tlx.common import first_seeing_row
from gemattn.kernels.tlx.descriptors import describe_keys, describe_rows, describe_statistics


@triton.jit
def _describe_all_rows(
    table, slot, ptr, offsets_ptr, num_sequences, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows of all sequences of a contiguous (rows, H, D) tensor."""
    rows = tl.load(offsets_ptr + num_sequences).to(tl.int32)
    describe_rows(table, slot, ptr, 0, rows, heads * HEAD_DIM, HEAD_DIM, heads, HEAD_DIM, BLOCK)


@triton.jit
def _describe_split(
    table, q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, q_offsets_ptr,
    kv_offsets_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    dout_row_stride, dout_head_stride, num_sequences, statistics, window_right, heads, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, LONGER: tl.constexpr, BLOCK_N: tl.constexpr, SHORT_BLOCK_N: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Tensors: query, key, value, out, dout, dq, dk, dv; then lse and delta.

    Keys and values are described for the query kernel, in blocks as in forward, and, in slots 8 B + 2 on, in blocks of
    BLOCK rows for the key kernel.
    """
    sequence = tl.program_id(0)
    if sequence == num_sequences:
        describe_statistics(table, 8 * num_sequences, lse_ptr, delta_ptr, statistics, BLOCK)
        _describe_all_rows(table, 10 * num_sequences + 2, dq_ptr, q_offsets_ptr, num_sequences, heads, HEAD_DIM, BLOCK)
        _describe_all_rows(table, 10 * num_sequences + 3, dk_ptr, kv_offsets_ptr, num_sequences, heads, HEAD_DIM, BLOCK)
        _describe_all_rows(table, 10 * num_sequences + 4, dv_ptr, kv_offsets_ptr, num_sequences, heads, HEAD_DIM, BLOCK)
    else:
        q_start = tl.load(q_offsets_ptr + sequence)
        n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
        kv_start = tl.load(kv_offsets_ptr + sequence)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
        seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
        q_first = q_start + seeing
        rows = n_q - seeing
        stride = heads * HEAD_DIM
        slot = sequence
        describe_rows(table, slot, q_ptr, q_first, rows, q_row_stride, q_head_stride, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        if n_kv > LONGER:
            describe_keys(
                table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, heads, HEAD_DIM, BLOCK_N,
            )  # fmt: skip
        else:
            describe_keys(
                table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, heads, HEAD_DIM, SHORT_BLOCK_N,
            )  # fmt: skip
        slot += 2 * num_sequences
        describe_rows(table, slot, out_ptr, q_first, rows, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dout_ptr, q_first, rows, dout_row_stride, dout_head_stride, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dq_ptr, q_start, n_q, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dk_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dv_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot = 8 * num_sequences + 2 + sequence
        describe_keys(
            table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
            v_head_stride, heads, HEAD_DIM, BLOCK,
        )  # fmt: skip


@triton.jit
def _describe_fused(
    table, q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, scratch_ptr, q_offsets_ptr,
    kv_offsets_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    dout_row_stride, dout_head_stride, num_sequences, statistics, scratch_rows, window_right, heads,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, SCRATCH_BLOCK: tl.constexpr, SCRATCH_COLUMNS: tl.constexpr,
    SHARED_QUERY: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Tensors: query, dout, key, value, dk, dv; then lse, delta, the dq scratch, dk and dv of all sequences."""
    sequence = tl.program_id(0)
    if sequence == num_sequences:
        slot = 6 * num_sequences
        describe_statistics(table, slot, lse_ptr, delta_ptr, statistics, BLOCK)
        tlx.make_tensor_descriptor(
            desc_ptr=descriptor_slot(table, slot + 2),
            base=scratch_ptr,
            shape=[scratch_rows, SCRATCH_COLUMNS],
            strides=[SCRATCH_COLUMNS, tl.constexpr(1)],
            block_shape=[SCRATCH_BLOCK, SCRATCH_COLUMNS],
        )
        _describe_all_rows(table, slot + 3, dk_ptr, kv_offsets_ptr, num_sequences, heads, HEAD_DIM, BLOCK)
        _describe_all_rows(table, slot + 4, dv_ptr, kv_offsets_ptr, num_sequences, heads, HEAD_DIM, BLOCK)
    else:
        q_start = tl.load(q_offsets_ptr + sequence)
        n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
        kv_start = tl.load(kv_offsets_ptr + sequence)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
        seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
        q_first = seeing.to(tl.int64) if SHARED_QUERY else q_start + seeing
        rows = n_q - seeing
        stride = heads * HEAD_DIM
        slot = sequence
        describe_rows(table, slot, q_ptr, q_first, rows, q_row_stride, q_head_stride, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(
            table, slot, dout_ptr, q_start + seeing, rows, dout_row_stride, dout_head_stride, heads, HEAD_DIM, BLOCK
        )
        slot += num_sequences
        describe_keys(
            table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
            v_head_stride, heads, HEAD_DIM, BLOCK,
        )  # fmt: skip
        slot += 2 * num_sequences
        describe_rows(table, slot, dk_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dv_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)


@triton.jit(do_not_specialize=["num_sequences", "statistics", "scratch_rows", "window_right"])
def describe_backward_kernel(
    fused_table_ptr,
    split_table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    scratch_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    dout_row_stride,
    dout_head_stride,
    num_sequences,
    statistics,
    scratch_rows,
    window_right,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_BLOCK_N: tl.constexpr,
    SCRATCH_BLOCK: tl.constexpr,
    SCRATCH_COLUMNS: tl.constexpr,
    FUSED: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARED_QUERY: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Descriptors of the ways backward that a call takes, FUSED, SPLIT or both: program axis 1 picks the way.

    Those for sequence `program_id(0)` are in slots tensor * B + sequence of the way's table; program B makes what does
    not belong to a sequence. Those of query, out and dout begin at the first row that sees a key: what comes in for the
    rows before arrives as zeros. Pointers of a way not taken are not looked at.
    """
    if SPLIT:
        if tl.program_id(1) == tl.num_programs(1) - 1:
            _describe_split(
                split_table_ptr, q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
                q_offsets_ptr, kv_offsets_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, dout_row_stride, dout_head_stride, num_sequences, statistics, window_right, heads,
                HEAD_DIM, BLOCK, LONGER, BLOCK_N, SHORT_BLOCK_N, HAS_RIGHT,
            )  # fmt: skip
    if FUSED:
        if tl.program_id(1) == 0:
            _describe_fused(
                fused_table_ptr, q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, scratch_ptr,
                q_offsets_ptr, kv_offsets_ptr, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, dout_row_stride, dout_head_stride, num_sequences, statistics, scratch_rows, window_right,
                heads, HEAD_DIM, BLOCK, SCRATCH_BLOCK, SCRATCH_COLUMNS, SHARED_QUERY, HAS_RIGHT,
            )  # fmt: skip
