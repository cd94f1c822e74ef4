"""Row statistics, which backward kernels read a block of 64 rows at a time."""

import functools

import triton
import triton.language as tl

from gemattn.kernels.launcher import Launcher
from gemattn.kernels.tlx.common import LOG2E, RECORD_ROWS, first_seeing_row, read_tile, stat_block, tile_range


@triton.jit
def row_statistics(
    program, programs, tiles_ptr, longer_ptr, offsets_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr,
    num_tiles, heads, num_sequences, out_rows, do_row_stride, do_head_stride, window_right, HEAD_DIM: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Statistics (blocks, H, 64): lse (base 2, +inf for a row that takes no part), ``delta = rowsum(dO * O) - dlse``.

    The share of one of any number of programs; a tile is the rows of one record and head, of the records up to length
    class END.
    """
    BLOCK: tl.constexpr = 64
    _first_tile, num_tiles = tile_range(longer_ptr, num_tiles, heads, -1, END)
    for tile in tl.range(program, num_tiles, programs):
        segment, head, first_row, n_q, n_kv, q_start = read_tile(
            tiles_ptr, offsets_ptr, tile, num_tiles, heads, num_sequences
        )
        head = head.to(tl.int64)
        if (segment >= 0) & (segment < num_sequences):
            columns = tl.arange(0, HEAD_DIM)
            seeing = first_seeing_row(n_q, n_kv, window_right, HAS_RIGHT)
            for part in tl.static_range(RECORD_ROWS // BLOCK):
                lane = tl.arange(0, BLOCK)
                rows = first_row + part * BLOCK + lane
                if first_row + part * BLOCK < n_q:
                    takes_part = (rows >= seeing) & (rows < n_q)
                    place = q_start + rows
                    out = tl.load(
                        out_ptr + (place * heads + head)[:, None] * HEAD_DIM + columns[None, :],
                        mask=takes_part[:, None],
                        other=0.0,
                    )
                    dout = tl.load(
                        dout_ptr + (place * do_row_stride + head * do_head_stride)[:, None] + columns[None, :],
                        mask=takes_part[:, None],
                        other=0.0,
                    )
                    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
                    lse = tl.load(lse_ptr + head * out_rows + place, mask=takes_part, other=float("inf")) * LOG2E
                    if HAS_DLSE:
                        delta -= tl.load(dlse_ptr + head * out_rows + place, mask=takes_part, other=0.0)
                    stat = stat_block(q_start, segment, first_row // BLOCK + part, head, heads, BLOCK)
                    tl.store(stat_ptr + stat + lane, lse)
                    tl.store(delta_ptr + stat + lane, delta)


@triton.jit(do_not_specialize=["num_tiles", "num_sequences", "out_rows", "window_right"])
def prepare_kernel(
    tiles_ptr, longer_ptr, offsets_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr, stat_ptr, delta_ptr,
    num_tiles, heads, num_sequences, out_rows, do_row_stride, do_head_stride, window_right, HEAD_DIM: tl.constexpr,
    HAS_DLSE: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """`row_statistics`, any grid."""
    row_statistics(
        tl.program_id(0), tl.num_programs(0), tiles_ptr, longer_ptr, offsets_ptr, out_ptr, dout_ptr, lse_ptr, dlse_ptr,
        stat_ptr, delta_ptr, num_tiles, heads, num_sequences, out_rows, do_row_stride, do_head_stride, window_right,
        HEAD_DIM, HAS_DLSE, HAS_RIGHT, END,
    )  # fmt: skip


@functools.cache
def prepare(head_dim: int, has_dlse: bool, has_right: bool, end: int, **options: int) -> Launcher:
    """`prepare_kernel` with its constants and the compiler's options."""
    return Launcher(
        prepare_kernel, HEAD_DIM=head_dim, HAS_DLSE=has_dlse, HAS_RIGHT=has_right, END=end, num_warps=4, **options
    )
