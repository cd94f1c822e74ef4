"""One TMA descriptor for each tensor, box and sequence of backward; slot = tensor * B + sequence."""

import triton
import triton.language as tl

from gemattn.kernels.tlx.common import RECORD_ROWS, ROWS, first_seeing_row
from gemattn.kernels.tlx.descriptors import describe_keys, describe_rows, describe_statistics

Q_TILE: tl.constexpr = tl.constexpr(0)
DO_TILE: tl.constexpr = tl.constexpr(1)
K_TILE: tl.constexpr = tl.constexpr(2)
V_TILE: tl.constexpr = tl.constexpr(3)
Q_BLOCK: tl.constexpr = tl.constexpr(4)
DO_BLOCK: tl.constexpr = tl.constexpr(5)
K_BLOCK: tl.constexpr = tl.constexpr(6)
V_BLOCK: tl.constexpr = tl.constexpr(7)
DK: tl.constexpr = tl.constexpr(8)
DV: tl.constexpr = tl.constexpr(9)
DQ: tl.constexpr = tl.constexpr(10)
STATISTICS: tl.constexpr = tl.constexpr(11)
"""Two of them: lse and delta, at slots 11 B and 11 B + 1."""


@triton.jit(do_not_specialize=["num_sequences", "statistics", "window_right"])
def describe_backward_kernel(
    table, q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, q_offsets_ptr, kv_offsets_ptr,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, dout_row_stride,
    dout_head_stride, num_sequences, statistics, window_right, heads, HEAD_DIM: tl.constexpr,
    SHARED_QUERY: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Descriptors of sequence `program_id(0)`; program B makes those of the statistics.

    Tiles are boxes of 128 rows, blocks of 64. Those of query and dO begin at the first row that sees a key: what comes
    in for the rows before, NaN too, arrives as zeros. dQ of a shared query has no descriptor.
    """
    sequence = tl.program_id(0)
    if sequence == num_sequences:
        describe_statistics(table, STATISTICS * num_sequences, lse_ptr, delta_ptr, statistics, ROWS)
    else:
        q_start = tl.load(q_offsets_ptr + sequence)
        n_q = (tl.load(q_offsets_ptr + sequence + 1) - q_start).to(tl.int32)
        kv_start = tl.load(kv_offsets_ptr + sequence)
        n_kv = (tl.load(kv_offsets_ptr + sequence + 1) - kv_start).to(tl.int32)
        seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
        q_first = seeing.to(tl.int64) if SHARED_QUERY else q_start + seeing
        do_first = q_start + seeing
        rows = n_q - seeing
        stride = heads * HEAD_DIM
        for block in tl.static_range(2):
            slot = (Q_BLOCK if block else Q_TILE) * num_sequences + sequence
            describe_rows(
                table,
                slot,
                q_ptr,
                q_first,
                rows,
                q_row_stride,
                q_head_stride,
                heads,
                HEAD_DIM,
                ROWS if block else RECORD_ROWS,
            )
            slot += num_sequences
            describe_rows(
                table,
                slot,
                dout_ptr,
                do_first,
                rows,
                dout_row_stride,
                dout_head_stride,
                heads,
                HEAD_DIM,
                ROWS if block else RECORD_ROWS,
            )
            slot += num_sequences
            describe_keys(
                table, slot, num_sequences, k_ptr, v_ptr, kv_start, n_kv, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, heads, HEAD_DIM, ROWS if block else RECORD_ROWS,
            )  # fmt: skip
        slot = DK * num_sequences + sequence
        describe_rows(table, slot, dk_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, RECORD_ROWS)
        slot += num_sequences
        describe_rows(table, slot, dv_ptr, kv_start, n_kv, stride, HEAD_DIM, heads, HEAD_DIM, RECORD_ROWS)
        if not SHARED_QUERY:
            slot += num_sequences
            describe_rows(table, slot, dq_ptr, q_start, n_q, stride, HEAD_DIM, heads, HEAD_DIM, RECORD_ROWS)
