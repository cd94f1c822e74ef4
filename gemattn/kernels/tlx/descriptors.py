"""One TMA descriptor for each tensor and sequence.

A descriptor that ends where its sequence ends makes the hardware fill what a tile reads past the end with zeros, and
drop what it would write there: a neighbour's NaN never enters a product, at no cost in the main loop.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import descriptor_slot, tlx
from gemattn.kernels.tlx.common import first_seeing_row

QUERY: tl.constexpr = tl.constexpr(0)
KEY: tl.constexpr = tl.constexpr(1)
VALUE: tl.constexpr = tl.constexpr(2)
OUT: tl.constexpr = tl.constexpr(3)


@triton.jit
def describe_rows(
    table, slot, ptr, first_row, rows, row_stride, head_stride, heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Rows of all heads as one matrix: head h starts at column h * head_stride."""
    tlx.make_tensor_descriptor(
        desc_ptr=descriptor_slot(table, slot),
        base=ptr + first_row * row_stride,
        shape=[tl.maximum(rows, 1), (heads - 1) * head_stride + HEAD_DIM],
        strides=[row_stride, tl.constexpr(1)],
        block_shape=[ROWS, HEAD_DIM],
    )


@triton.jit(do_not_specialize=["num_sequences"])
def describe_forward_kernel(
    table,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_offsets_ptr,
    kv_offsets_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_sequences,
    heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LONGER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_BLOCK_N: tl.constexpr,
    SHARED_QUERY: tl.constexpr,
):
    """Descriptors of query, key, value and out for sequence `program_id(0)`; slot = tensor * B + sequence.

    Keys and values in blocks of BLOCK_N rows where there are more than LONGER of them, else of SHORT_BLOCK_N.
    """
    sequence = tl.program_id(0)
    q_start = tl.load(q_offsets_ptr + sequence)
    n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
    kv_start = tl.load(kv_offsets_ptr + sequence)
    n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
    q_first = tl.zeros([], tl.int64) if SHARED_QUERY else q_start
    describe_rows(table, sequence, q_ptr, q_first, n_q, q_row_stride, q_head_stride, heads, HEAD_DIM, BLOCK_M)
    slot = num_sequences + sequence
    v_slot = slot + num_sequences
    if n_kv > LONGER:
        describe_rows(table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, kv_heads, HEAD_DIM, BLOCK_N)
        describe_rows(table, v_slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, kv_heads, HEAD_DIM, BLOCK_N)
    else:
        describe_rows(
            table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, kv_heads, HEAD_DIM, SHORT_BLOCK_N
        )
        describe_rows(
            table, v_slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, kv_heads, HEAD_DIM, SHORT_BLOCK_N
        )
    slot = v_slot + num_sequences
    describe_rows(table, slot, out_ptr, q_start, n_q, heads * HEAD_DIM, HEAD_DIM, heads, HEAD_DIM, BLOCK_M)


@triton.jit(do_not_specialize=["num_sequences", "statistics"])
def describe_split_kernel(
    table,
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
    window_right,
    heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LONGER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT_BLOCK_N: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Descriptors of backward for sequence `program_id(0)`, slot = tensor * B + sequence; program B makes the others.

    Tensors: query, key, value, out, dout, dq, dk, dv. Those of query, out and dout begin at the first row that sees a
    key: what comes in for the rows before arrives as zeros. Keys and values are described for the query kernel, in
    blocks as in forward, and, in slots 8 B + 2 on, in blocks of BLOCK_M rows for the key kernel.
    """
    sequence = tl.program_id(0)
    if sequence == num_sequences:
        slot = 8 * num_sequences
        for stat in tl.static_range(2):
            tlx.make_tensor_descriptor(
                desc_ptr=descriptor_slot(table, slot + stat),
                base=delta_ptr if stat else lse_ptr,
                shape=[statistics],
                strides=[tl.constexpr(1)],
                block_shape=[BLOCK_M],
            )
    else:
        q_start = tl.load(q_offsets_ptr + sequence)
        n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
        kv_start = tl.load(kv_offsets_ptr + sequence)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
        seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
        q_first = q_start + seeing
        rows = n_q - seeing
        out_stride = heads * HEAD_DIM
        dk_stride = kv_heads * HEAD_DIM
        slot = sequence
        describe_rows(table, slot, q_ptr, q_first, rows, q_row_stride, q_head_stride, heads, HEAD_DIM, BLOCK_M)
        slot += num_sequences
        v_slot = slot + num_sequences
        if n_kv > LONGER:
            describe_rows(table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, kv_heads, HEAD_DIM, BLOCK_N)
            describe_rows(
                table, v_slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, kv_heads, HEAD_DIM, BLOCK_N
            )
        else:
            rows_n: tl.constexpr = SHORT_BLOCK_N
            describe_rows(table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, kv_heads, HEAD_DIM, rows_n)
            describe_rows(table, v_slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, kv_heads, HEAD_DIM, rows_n)
        slot = v_slot + num_sequences
        describe_rows(table, slot, out_ptr, q_start + seeing, rows, out_stride, HEAD_DIM, heads, HEAD_DIM, BLOCK_M)
        slot += num_sequences
        describe_rows(
            table, slot, dout_ptr, q_start + seeing, rows, dout_row_stride, dout_head_stride, heads, HEAD_DIM, BLOCK_M
        )
        slot += num_sequences
        describe_rows(table, slot, dq_ptr, q_start, n_q, out_stride, HEAD_DIM, heads, HEAD_DIM, BLOCK_M)
        slot += num_sequences
        describe_rows(table, slot, dk_ptr, kv_start, n_kv, dk_stride, HEAD_DIM, kv_heads, HEAD_DIM, BLOCK_M)
        slot += num_sequences
        describe_rows(table, slot, dv_ptr, kv_start, n_kv, dk_stride, HEAD_DIM, kv_heads, HEAD_DIM, BLOCK_M)
        slot = 8 * num_sequences + 2 + sequence
        describe_rows(table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, kv_heads, HEAD_DIM, BLOCK_M)
        slot += num_sequences
        describe_rows(table, slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, kv_heads, HEAD_DIM, BLOCK_M)
