"""Mutants that are right all the same: what else gives the order that the synchronisation seems to give.

One that no schedule shows and that is not here counts as missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gemattn.testing.tlx_sim.mutate import Mutant


@dataclass(frozen=True)
class Benign:
    """Mutants of a function that are harmless for one reason."""

    file: str
    function: str
    why: str
    mutants: tuple[str, ...]
    """Each as `Mutant.key` gives it."""


_BLACKWELL = "blackwell_fa_ws_pipelined_persistent.py"
_HOPPER = "hopper_fa_ws_pipelined_pingpong_persistent.py"
_FIRST = "The first use of a buffer: a program does one tile, so the wait passes at once."
_LAST = "The last signal of its barrier: a program does one tile, so nobody waits for it."
_PRODUCTS_FENCE = "The compiler puts its own fence before products that read what tasks have stored (seen in PTX)."

BENIGN = (
    Benign(
        "backward_fused.py",
        "_produce",
        "The wait for q_free of the same block is before it, and each consumer frees its do before its q.",
        ("barrier_wait(do_free[buf], phase ^ 1): remove",),
    ),
    Benign("backward_fused.py", "_gradient_block", _PRODUCTS_FENCE, ("fence('async_shared'): remove",)),
    Benign(
        "backward_key.py",
        "_produce",
        "The wait for q_free of the same block is before it, and each consumer frees its do before its q.",
        ("barrier_wait(do_free[buf], phase ^ 1): remove",),
    ),
    Benign(
        "buffers.py",
        "skip_blocks",
        "The other consumer waits for the same copy before it frees the block, and no block's second tensor is waited "
        "for before its first, which comes into a buffer that both have freed.",
        ("barrier_wait(second_full[buf], phase): remove",),
    ),
    Benign(
        "backward_query.py",
        "_stream_keys",
        "The wait for k_free of the same block is before it, and each consumer frees its values before its keys.",
        ("barrier_wait(v_free[buf], phase ^ 1): remove",),
    ),
    Benign(
        "backward_tile.py",
        "_produce",
        "The wait for k_free is before it, of this tile's turn or a later one, and each consumer frees its lse first.",
        ("barrier_wait(lse_free[buf], phase ^ 1): remove",),
    ),
    Benign("backward_tile.py", "_consume", _PRODUCTS_FENCE, ("fence('async_shared'): remove",)),
    Benign("backward.py", "_clear_what_is_not_finite", _PRODUCTS_FENCE, ("fence('async_shared'): remove",)),
    Benign(
        "backward.py",
        "_compute",
        "s_full is of products that were issued after the same ab_full: the copies are complete. The kernel waits all "
        "the same, for PTX does not promise that order to ordinary reads.",
        ("barrier_wait(ab_full[buf], phase): remove", "barrier_wait(ab_full[buf], phase) (2nd): remove"),
    ),
    Benign(
        _HOPPER,
        "_attn_fwd_ws_pipelined_pingpong_persistent",
        "The waits for both q_empties are before it: both consumers are at the last product of the tile before, and so "
        "done with the values two blocks before.",
        ("barrier_wait(v_empties[kv_bufIdx], kv_phase ^ 1): remove",),
    ),
    Benign(
        _HOPPER,
        "_attn_fwd_ws_pipelined_pingpong_persistent",
        "One product is in flight, so it waits for nothing.",
        ("async_dot_wait(1, acc): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_softmax_inner_loop",
        "The scores that the group has waited for were issued after acc_fulls of the block before, which comes after "
        "alpha was read; a tile's first ones after qk_empties, likewise.",
        ("barrier_wait(tlx.local_view(alpha_empties, cid), qk_phase ^ 1): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_attn_fwd_ws",
        "The request to launch control before waits until every task, the storing one among them, has done the tile "
        "before.",
        ("barrier_wait(o_empties[cid], phase ^ 1): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_attn_fwd_ws",
        "The wait for q_empties[0] is before it: committed after every product that reads the second query, and that "
        "reads the block three blocks before.",
        (
            "barrier_wait(k_empty, k_phase ^ 1): remove",
            "barrier_wait(q_empties[q_bufIdx], q_phase ^ 1) (2nd): remove",
            "barrier_wait(v_empty, v_phase ^ 1): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_1cta",
        _FIRST,
        (
            "barrier_wait(qk_empties[tmem_buf_id], tmem_phase ^ 1): remove",
            "barrier_wait(dp_empties[tmem_buf_id], tmem_phase ^ 1): remove",
            "barrier_wait(dv_empties[kv_buf_id], kv_phase ^ 1): remove",
            "barrier_wait(dk_empties[kv_buf_id], kv_phase ^ 1): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_1cta",
        "The wait for p_fulls of the block before: each warp signals it after qk_empties.",
        ("barrier_wait(qk_empties[tmem_buf_id], tmem_phase ^ 1) (2nd): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_1cta",
        "The wait for dsT_tmem_fulls of the same dS is before it: signalled last, after dp_empties and ds_fulls.",
        (
            "barrier_wait(ds_fulls[ds_buf_id_prev], ds_phase_prev): remove",
            "barrier_wait(dp_empties[tmem_buf_id], tmem_phase ^ 1) (2nd): remove",
            "barrier_wait(ds_fulls[ds_buf_id], ds_phase): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_1cta",
        _LAST,
        (
            "async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_buf_id], dk_tiles[kv_buf_id], use_acc=num_steps > 1, "
            "mBarriers=[q_empties[q_buf_id], dk_fulls[tmem_buf_id]]): drop barrier 0",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_2cta",
        _FIRST,
        (
            "barrier_wait(qk_empties[tmem_buf_id], tmem_phase ^ 1): remove",
            "barrier_wait(dv_empties[kv_buf_id], kv_phase ^ 1): remove",
            "barrier_wait(dk_empties[kv_buf_id], kv_phase ^ 1): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_2cta",
        "The wait for p_fulls of the block before: each program signals it after qk_empties.",
        ("barrier_wait(qk_empties[tmem_buf_id], tmem_phase ^ 1) (2nd): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_2cta",
        "The wait for qk_empties of the same block is before it: signalled after P is stored.",
        ("barrier_wait(p_fulls[tmem_buf_id], tmem_phase) (2nd): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_2cta",
        "The same phase was waited for before the loop.",
        ("barrier_wait(kt_fulls[kv_buf_id], kv_phase) (2nd): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_mma_dots_2cta",
        _LAST,
        (
            "async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_buf_id], dk_tiles[kv_buf_id], use_acc=num_steps > 1, "
            "mBarriers=[q_empties[q_buf_id], dk_fulls[kv_buf_id], dp_empties[ds_buf_id]], two_ctas=True): drop "
            "barrier 0",
            "async_dot(dsT_tmem_tiles[ds_buf_id], q_tiles[q_buf_id], dk_tiles[kv_buf_id], use_acc=num_steps > 1, "
            "mBarriers=[q_empties[q_buf_id], dk_fulls[kv_buf_id], dp_empties[ds_buf_id]], two_ctas=True): drop "
            "barrier 2",
            "tcgen05_commit(kt_empties[kv_buf_id], two_ctas=True): remove",
            "tcgen05_commit(k_empties[kv_buf_id], two_ctas=True): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_load_1cta",
        _FIRST,
        (
            "barrier_wait(k_empties[kv_buf_id], kv_phase ^ 1): remove",
            "barrier_wait(q_empties[q_buf_id], q_phase ^ 1): remove",
            "barrier_wait(m_empties[m_buf_id], m_phase ^ 1): remove",
            "barrier_wait(do_empties[do_buf_id], do_phase ^ 1): remove",
            "barrier_wait(d_empties[d_buf_id], d_phase ^ 1): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_load_1cta",
        "The wait for q_empties of the block two before is before it: that product came after the statistics were read "
        "(dsT_tmem_fulls).",
        (
            "barrier_wait(m_empties[m_buf_id], m_phase ^ 1) (2nd): remove",
            "barrier_wait(d_empties[d_buf_id], d_phase ^ 1) (2nd): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_load_2cta",
        _FIRST,
        (
            "barrier_wait(k_empties[kv_buf_id], kv_phase ^ 1): remove",
            "barrier_wait(qt_empties[q_buf_id], q_phase ^ 1): remove",
            "barrier_wait(m_empties[m_buf_id], m_phase ^ 1): remove",
            "barrier_wait(do_empties[do_buf_id], do_phase ^ 1): remove",
            "barrier_wait(dot_empties[do_buf_id], do_phase ^ 1): remove",
            "barrier_wait(d_empties[d_buf_id], d_phase ^ 1): remove",
            "barrier_wait(kt_empties[kv_buf_id], kv_phase ^ 1): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_load_2cta",
        "The wait for dot_empties of the block before: that product was issued after the one that reads these rows, "
        "and products complete in order.",
        ("barrier_wait(q_empties[prev_q_buf_id], prev_q_phase ^ 1): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_load_2cta",
        "The wait for m_empties of the block before is before it: signalled after that block's delta was read.",
        ("barrier_wait(d_empties[d_buf_id], d_phase ^ 1) (2nd): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_bwd_compute_inner_loop",
        "The arrivals at m_empties and d_empties before make all warps meet (bar.sync in PTX).",
        ("named_barrier_wait(DP_READ_DONE_BAR, NUM_COMPUTE_THREADS): remove",),
    ),
    Benign(_BLACKWELL, "_bwd_compute_inner_loop", _PRODUCTS_FENCE, ("fence('async_shared') (2nd): remove",)),
    Benign(
        _BLACKWELL,
        "_attn_bwd_ws",
        "The compute task has fenced its own rows of dS before it announces the copy; the others come by that copy.",
        ("fence('async_shared'): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_attn_bwd_ws",
        _LAST,
        (
            "barrier_arrive(dv_empties[kv_buf_id], 1, remote_cta_rank=0): remove",
            "barrier_arrive(dv_empties[kv_buf_id]): remove",
            "barrier_arrive(dk_empties[kv_buf_id], 1, remote_cta_rank=0): remove",
            "barrier_arrive(k_empties[kv_buf_id]): remove",
            "barrier_arrive(dk_empties[kv_buf_id]): remove",
        ),
    ),
    Benign(
        _BLACKWELL,
        "_attn_bwd_ws",
        "The wait for k_mma_done follows, which is committed later.",
        ("barrier_wait(dk_fulls[kv_buf_id], kv_phase): remove",),
    ),
    Benign(
        _BLACKWELL,
        "_attn_bwd_ws",
        "No configuration of the tutorial has warp barriers in two programs.",
        ("barrier_arrive(dq_empties[tmem_buf_id]): remove",),
    ),
)


def why_benign(mutant: Mutant, table: Iterable[Benign] = BENIGN) -> str:
    """The reason why a mutant is harmless, or nothing."""
    file = Path(mutant.file).name
    for entry in table:
        if (entry.file, entry.function) == (file, mutant.function) and mutant.key in entry.mutants:
            return entry.why
    return ""


def without_mutant(mutants: Iterable[Mutant], table: Iterable[Benign] = BENIGN) -> list[str]:
    """What the table says of these mutants' files that is of none of them: the source has changed."""
    places = {(Path(m.file).name, m.function, m.key) for m in mutants}
    files = {file for file, _, _ in places}
    listed = [(x.file, x.function, key) for x in table if x.file in files for key in x.mutants]
    return [f"{file} {function} {key}" for file, function, key in listed if (file, function, key) not in places]
