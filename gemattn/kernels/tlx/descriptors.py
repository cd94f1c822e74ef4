"""One TMA descriptor for each tensor and sequence.

A descriptor that ends where its sequence ends makes the hardware fill what a tile reads past the end with zeros, and
drop what it would write there: a neighbour's NaN never enters a product, at no cost in the main loop.
"""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import descriptor_slot, tlx


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


@triton.jit
def describe_keys(
    table, slot, num_sequences, k_ptr, v_ptr, first, rows, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    heads, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys in slot `slot` and values B slots on, in blocks of ROWS."""
    describe_rows(table, slot, k_ptr, first, rows, k_row_stride, k_head_stride, heads, HEAD_DIM, ROWS)
    describe_rows(table, slot + num_sequences, v_ptr, first, rows, v_row_stride, v_head_stride, heads, HEAD_DIM, ROWS)


@triton.jit
def describe_statistics(table, slot, lse_ptr, delta_ptr, statistics, ROWS: tl.constexpr):
    """lse and delta in two slots, in blocks of ROWS."""
    for stat in tl.static_range(2):
        tlx.make_tensor_descriptor(
            desc_ptr=descriptor_slot(table, slot + stat),
            base=delta_ptr if stat else lse_ptr,
            shape=[statistics],
            strides=[tl.constexpr(1)],
            block_shape=[ROWS],
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

    Keys and values in blocks of BLOCK_N rows where there are more than LONGER of them, else of SHORT_BLOCK_N. Slot 4 B
    is for the rows of out of all sequences.
    """
    sequence = tl.program_id(0)
    if sequence == 0:
        rows = tl.load(q_offsets_ptr + num_sequences).to(tl.int32)
        describe_rows(table, 4 * num_sequences, out_ptr, 0, rows, heads * HEAD_DIM, HEAD_DIM, heads, HEAD_DIM, BLOCK_M)
    if sequence < num_sequences:
        q_start = tl.load(q_offsets_ptr + sequence)
        n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
        kv_start = tl.load(kv_offsets_ptr + sequence)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
        q_first = tl.zeros([], tl.int64) if SHARED_QUERY else q_start
        describe_rows(table, sequence, q_ptr, q_first, n_q, q_row_stride, q_head_stride, heads, HEAD_DIM, BLOCK_M)
        slot = num_sequences + sequence
        if n_kv > LONGER:
            describe_keys(
                table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, kv_heads, HEAD_DIM, BLOCK_N,
            )  # fmt: skip
        else:
            describe_keys(
                table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, kv_heads, HEAD_DIM, SHORT_BLOCK_N,
            )  # fmt: skip
        slot += 2 * num_sequences
        describe_rows(table, slot, out_ptr, q_start, n_q, heads * HEAD_DIM, HEAD_DIM, heads, HEAD_DIM, BLOCK_M)
