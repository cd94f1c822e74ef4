"""What consumers of several kernels on sm_90 do with buffers in shared memory."""

import triton
import triton.language as tl

from gemattn.kernels.tlx._tlx import read_descriptor, tlx
from gemattn.kernels.tlx.common import ROWS, ring


@triton.jit
def skip_blocks(count, blocks, full, free, second_full, second_free, STAGES: tl.constexpr):
    """Give back blocks of two tensors without a product, as this consumer's rows or keys see nothing of them.

    Freed only once they are in: an arrival before would count for the block that was in the buffer before.
    """
    for _step in tl.range(0, blocks):
        buf, phase = ring(count, STAGES)
        tlx.barrier_wait(full[buf], phase)
        tlx.barrier_wait(second_full[buf], phase)
        tlx.barrier_arrive(second_free[buf], 1)
        tlx.barrier_arrive(free[buf], 1)
        count += 1
    return count


@triton.jit
def store_rows(table, all_rows, slot, buf, start, row, n_rows, column, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows [row, row + ROWS) of a sequence, which begins at row `start`, as far as its `n_rows` reach, from a buffer.

    `all_rows` describes the rows of all sequences. Only where some of these are not the sequence's is its own
    descriptor, in `slot`, needed: to acquire it takes a while. The fence is in both branches, as the compiler adds one
    of its own to a branch that has none.
    """
    if row + ROWS <= n_rows:
        tlx.fence("async_shared")
        tlx.async_descriptor_store(all_rows, buf, [(start + row).to(tl.int32), column])
    else:
        tlx.fence("async_shared")
        own_rows = read_descriptor(table, slot, [ROWS, HEAD_DIM], DTYPE)
        tlx.async_descriptor_store(own_rows, buf, [row, column])
