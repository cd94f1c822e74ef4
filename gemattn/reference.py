"""The eager reference: it defines the semantics, runs anywhere, takes float64 and differentiates twice.

Sequences are sorted by size, cut into groups of like size and padded within a group, so that a CPU can train with it.
It reads lengths on the host (a sync on CUDA), copies and pads; the kernels do none of that.

Three plain functions, no autograd of their own: `forward`, `backward` and `double_backward`; `gemattn.ops` ties them
together. Suffixes: b sequences of a group, n queries, m keys, g key/value heads, r query heads a key/value head, d head
size. Padded rows are exact zeros on every side of a product, so a neighbour's NaN never enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gemattn.kernels.schedule import sanitize_offsets
from gemattn.spec import UNLIMITED, AttentionSpec

_GROUP_ELEMENTS = 1 << 22
"""Padded scores a group may hold, over all heads: 16 MiB in float32, for each of a few score-sized tensors."""


class _Group(NamedTuple):
    """Sequences padded to one size. Index tensors point at row 0 where the mask is False."""

    q_index: Tensor  # (b, n) rows of query; with a shared query rows of (S)
    q_mask: Tensor  # (b, n)
    out_index: Tensor  # (b, n) rows of out; equal to q_index without a shared query
    kv_index: Tensor  # (b, m)
    kv_mask: Tensor  # (b, m)
    visible: Tensor  # (b, n, m)
    seen: Tensor  # (b, n) rows that see a key


def _groups(
    q_offsets: Tensor | None, kv_offsets: Tensor, query_rows: int, key_rows: int, heads: int, spec: AttentionSpec
) -> Iterator[_Group]:
    device = kv_offsets.device
    kv_starts = sanitize_offsets(kv_offsets, key_rows)
    n_kv = kv_starts.diff()
    if q_offsets is None:
        out_starts = torch.arange(kv_starts.numel(), device=device) * query_rows
    else:
        out_starts = sanitize_offsets(q_offsets, query_rows)
    n_q = out_starts.diff()
    cost = torch.maximum(n_q, n_kv)
    order = torch.argsort(cost, stable=True)
    sizes = torch.stack((n_q[order], n_kv[order])).tolist()  # the one host sync
    todo = [i for i, (nq, nkv) in enumerate(zip(*sizes, strict=True)) if nq and nkv]
    start = 0
    while start < len(todo):
        stop, most_q, most_kv = start, 0, 0
        while stop < len(todo):
            most_q_next = max(most_q, sizes[0][todo[stop]])
            most_kv_next = max(most_kv, sizes[1][todo[stop]])
            if stop > start and (stop + 1 - start) * most_q_next * most_kv_next * heads > _GROUP_ELEMENTS:
                break
            stop, most_q, most_kv = stop + 1, most_q_next, most_kv_next
        members = order[torch.tensor(todo[start:stop], device=device)]
        start = stop
        i = torch.arange(most_q, device=device)[None, :]
        j = torch.arange(most_kv, device=device)[None, :]
        nq, nkv = n_q[members][:, None], n_kv[members][:, None]
        q_mask, kv_mask = i < nq, j < nkv
        out_index = torch.where(q_mask, out_starts[members][:, None] + i, 0)
        q_index = torch.where(q_mask, i, 0) if q_offsets is None else out_index
        kv_index = torch.where(kv_mask, kv_starts[members][:, None] + j, 0)
        lo, hi = visible_range(i, nq, nkv, spec)
        visible = (j[:, None] >= lo[..., None]) & (j[:, None] < hi[..., None]) & q_mask[..., None]
        yield _Group(q_index, q_mask, out_index, kv_index, kv_mask, visible, (hi > lo) & q_mask)


def visible_range(i: Tensor, n_q: Tensor, n_kv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The keys [lo, hi) that row `i` sees (see `AttentionSpec`); integer tensors that broadcast."""
    position = i + (n_kv - n_q)
    lo = torch.zeros_like(position) if spec.window_left == UNLIMITED else (position - spec.window_left).clamp(min=0)
    hi = n_kv.expand_as(position)
    if spec.window_right != UNLIMITED:
        hi = torch.minimum(hi, position + spec.window_right + 1)
    return lo, hi


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _take(x: Tensor, index: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
    """(T, H, D) -> (b, g, r * n, d) in the compute dtype, zeros where masked.

    The query heads of one key/value head are stacked along the rows, so that every product is one batched matmul.
    """
    rows = x[index].to(_compute_dtype(x.dtype)).masked_fill(~mask[..., None, None], 0)
    b, n, heads, d = rows.shape
    rows = rows.view(b, n, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)
    return rows.reshape(b, kv_heads, heads // kv_heads * n, d)


def _rows(x: Tensor, n: int) -> Tensor:
    """(b, g, r * n, d) -> (b, n, g * r, d), the inverse of `_take`'s layout."""
    b, g, rn, d = x.shape
    return x.view(b, g, rn // n, n, d).permute(0, 3, 1, 2, 4).reshape(b, n, g * (rn // n), d)


def _take_stat(x: Tensor, index: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
    """(H, rows) -> (b, g, r * n, 1), 0 where masked."""
    values = x[:, index].masked_fill(~mask, 0)  # (H, b, n)
    heads, b, n = values.shape
    return values.view(kv_heads, heads // kv_heads, b, n).permute(2, 0, 1, 3).reshape(b, kv_heads, -1, 1)


def _tile_mask(visible: Tensor, ratio: int) -> Tensor:
    """(b, n, m) -> (b, 1, r * n, m)."""
    return visible[:, None].expand(-1, ratio, -1, -1).flatten(1, 2)[:, None]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """out (rows, H, D) in the input dtype, lse (H, rows) float32 (float64 for float64 inputs)."""
    heads, kv_heads = query.shape[1], key.shape[1]
    rows = query.shape[0] if q_offsets is not None else query.shape[0] * (kv_offsets.numel() - 1)
    out = query.new_zeros(rows, heads, query.shape[2])
    lse = query.new_full((heads, rows), -math.inf, dtype=_compute_dtype(query.dtype))
    for group in _groups(q_offsets, kv_offsets, query.shape[0], key.shape[0], heads, spec):
        q = _take(query, group.q_index, group.q_mask, kv_heads)
        k = _take(key, group.kv_index, group.kv_mask, kv_heads)
        v = _take(value, group.kv_index, group.kv_mask, kv_heads)
        scores = (q @ k.mT * spec.scale).masked_fill(~_tile_mask(group.visible, heads // kv_heads), -math.inf)
        # Not exp(scores - lse): the rounding of a large lse would scale the whole row. Rows that see no key are NaN
        # here and not stored; a row that sees keys, all of them with scores of -inf, shows NaN.
        p = torch.softmax(scores, dim=-1)
        stat = torch.logsumexp(scores, dim=-1, keepdim=True)
        n = group.seen.shape[1]
        flat = group.seen.flatten().nonzero().squeeze(1)
        target = group.out_index.flatten()[flat]
        out[target] = _rows(p @ v, n).flatten(0, 1)[flat].to(out.dtype)
        lse[:, target] = _rows(stat, n).squeeze(-1).flatten(0, 1)[flat].T
    return out, lse


class _Tiles(NamedTuple):
    """What backward and double backward recompute for a group; (b, g, r * n, .) and (b, g, m, .)."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    p: Tensor
    dp: Tensor
    dp_centred: Tensor  # dp - rowsum(p * dp) + dlse; in this order, or a row of one key loses dlse's last digits
    ds: Tensor  # gradient of the scaled scores, p * dp_centred
    visible: Tensor  # (b, 1, r * n, m)


def _recompute(
    group: _Group,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> _Tiles:
    heads, kv_heads = query.shape[1], key.shape[1]
    q = _take(query, group.q_index, group.q_mask, kv_heads)
    k = _take(key, group.kv_index, group.kv_mask, kv_heads)
    v = _take(value, group.kv_index, group.kv_mask, kv_heads)
    do = _take(dout, group.out_index, group.seen, kv_heads)  # gradients of rows that see no key are ignored, NaN too
    visible = _tile_mask(group.visible, heads // kv_heads)
    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    p = torch.softmax(scores, dim=-1).masked_fill(~visible, 0)
    dp = (do @ v.mT).masked_fill(~visible, 0)
    dp_centred = dp - (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        dp_centred = dp_centred + _take_stat(dlse, group.out_index, group.seen, kv_heads)
    return _Tiles(q, k, v, do, p, dp, dp_centred, p * dp_centred, visible)


class _Sums:
    """Gradients accumulated over groups in the compute dtype and rounded once."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor):
        self.like = (query, key, value)
        self.sums = tuple(x.new_zeros(x.shape, dtype=_compute_dtype(x.dtype)) for x in self.like)

    def add(self, group: _Group, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        # Rows that see no key are left out: their share would be 0 times a key, which may be NaN.
        where = ((group.q_index, group.seen), (group.kv_index, group.kv_mask), (group.kv_index, group.kv_mask))
        for total, grad, (index, mask) in zip(self.sums, (dq, dk, dv), where, strict=True):
            flat = mask.flatten().nonzero().squeeze(1)
            total.index_add_(0, index.flatten()[flat], _rows(grad, mask.shape[1]).flatten(0, 1)[flat])

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(self.sums, self.like, strict=True))
        return dq, dk, dv


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    schedule: list[Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the input dtype: ds = p * (dp - rowsum(p * dp) + dlse), as in the FlashAttention paper."""
    sums = _Sums(query, key, value)
    for group in _groups(q_offsets, kv_offsets, query.shape[0], key.shape[0], query.shape[1], spec):
        t = _recompute(group, dout, dlse, query, key, value, spec.scale)
        sums.add(group, t.ds @ t.k * spec.scale, t.ds.mT @ t.q * spec.scale, t.p.mT @ t.do)
    return sums.result()


def double_backward(
    ddq: Tensor,
    ddk: Tensor,
    ddv: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `backward` as a function of (dout, dlse, query, key, value), given those of its three results.

    With s the scaled scores, c = d/d(ds) and L the scalar <ddq, dq> + <ddk, dk> + <ddv, dv>::

        c       = scale * (ddq k^T + q ddk^T)             u       = rowsum(c * p)
        dL/ddp  = p * (c - u)                             dL/ddlse = u
        dL/dp   = c * (dp - rowsum(p * dp) + dlse) - u * dp + do ddv^T
        dL/ds   = p * (dL/dp - rowsum(p * dL/dp))
        dL/ddo  = dL/ddp v + p ddv                        dL/dv   = (dL/ddp)^T do
        dL/dq   = scale * (dL/ds k + ds ddk)              dL/dk   = scale * ((dL/ds)^T q + ds^T ddq)
    """
    kv_heads = key.shape[1]
    sums = _Sums(query, key, value)
    g_dout = dout.new_zeros(dout.shape, dtype=_compute_dtype(dout.dtype))
    g_dlse = lse.new_zeros(lse.shape)
    for group in _groups(q_offsets, kv_offsets, query.shape[0], key.shape[0], query.shape[1], spec):
        t = _recompute(group, dout, dlse, query, key, value, spec.scale)
        gq = _take(ddq, group.q_index, group.q_mask, kv_heads)
        gk = _take(ddk, group.kv_index, group.kv_mask, kv_heads)
        gv = _take(ddv, group.kv_index, group.kv_mask, kv_heads)
        c = ((gq @ t.k.mT + t.q @ gk.mT) * spec.scale).masked_fill(~t.visible, 0)
        u = (c * t.p).sum(-1, keepdim=True)
        l_dp = t.p * (c - u)
        l_p = c * t.dp_centred - u * t.dp + (t.do @ gv.mT).masked_fill(~t.visible, 0)
        l_s = t.p * (l_p - (t.p * l_p).sum(-1, keepdim=True))
        sums.add(
            group,
            (l_s @ t.k + t.ds @ gk) * spec.scale,
            (l_s.mT @ t.q + t.ds.mT @ gq) * spec.scale,
            l_dp.mT @ t.do,
        )
        flat = group.seen.flatten().nonzero().squeeze(1)
        target = group.out_index.flatten()[flat]
        n = group.seen.shape[1]
        g_dout[target] = _rows(l_dp @ t.v + t.p @ gv, n).flatten(0, 1)[flat]
        g_dlse[:, target] = _rows(u, n).squeeze(-1).flatten(0, 1)[flat].T
    return g_dout.to(dout.dtype), g_dlse, *sums.result()
