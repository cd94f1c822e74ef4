"""Descriptors of the fused backward, beside those that other kernels share: see `gemattn.kernels.tlx.descriptors`."""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import descriptor_slot, tlx
from gemattn.kernels.tlx.common import first_seeing_row
from gemattn.kernels.tlx.descriptors import describe_rows
from gemattn.kernels.tlx.hopper.backward_scratch import split_records


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "statistics",
        "scratch_rows",
        "num_records",
        "walk_rows",
        "walk_keys",
        "keys_above",
    ]
)
def describe_fused_kernel(
    table,
    q_ptr,
    dout_ptr,
    k_ptr,
    v_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    scratch_ptr,
    tiles_ptr,
    first_ptr,
    rest_ptr,
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
    num_records,
    walk_rows,
    walk_keys,
    keys_above,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SCRATCH_BLOCK: tl.constexpr,
    SCRATCH_COLUMNS: tl.constexpr,
    SHARED_QUERY: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Descriptors of the fused backward for sequence `program_id(0)`, slot = tensor * B + sequence; program B makes
    the others: lse, delta and the dq scratch. Program B + 1, where there is one, splits the list of key tiles.

    Tensors: query, dout, key, value, dk, dv. Those of query and dout begin at the first row that sees a key: what comes
    in for the rows before arrives as zeros.
    """
    sequence = tl.program_id(0)
    if sequence == num_sequences:
        slot = 6 * num_sequences
        for stat in tl.static_range(2):
            tlx.make_tensor_descriptor(
                desc_ptr=descriptor_slot(table, slot + stat),
                base=delta_ptr if stat else lse_ptr,
                shape=[statistics],
                strides=[tl.constexpr(1)],
                block_shape=[BLOCK],
            )
        tlx.make_tensor_descriptor(
            desc_ptr=descriptor_slot(table, slot + 2),
            base=scratch_ptr,
            shape=[scratch_rows, SCRATCH_COLUMNS],
            strides=[SCRATCH_COLUMNS, tl.constexpr(1)],
            block_shape=[SCRATCH_BLOCK, SCRATCH_COLUMNS],
        )
    elif sequence > num_sequences:
        split_records(
            tiles_ptr, first_ptr, rest_ptr, num_records, num_sequences, walk_rows, walk_keys, keys_above
        )  # fmt: skip
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
        describe_rows(table, slot, k_ptr, kv_start, n_kv, k_row_stride, k_head_stride, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, v_ptr, kv_start, n_kv, v_row_stride, v_head_stride, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dk_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
        slot += num_sequences
        describe_rows(table, slot, dv_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, BLOCK)
