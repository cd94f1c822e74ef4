"""A plain per-sequence loop over jagged attention, differentiated by autograd: slow, short and easy to believe.

In float64 it is the oracle; in the input's dtype it is the "plain PyTorch" that the tolerance compares with.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from gemattn.testing.inputs import JaggedInputs


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: (n, H, D), (m, G, D), (m, G, D) -> out (n, H, D), lse (H, n).

    Everything is computed in the input's dtype; only the log-sum-exp of the materialised scores is float32 or wider.
    """
    n, heads, head_dim = query.shape
    m, kv_heads, _ = key.shape
    scale = head_dim**-0.5 if scale is None else scale
    key = key.repeat_interleave(heads // kv_heads, dim=1)
    value = value.repeat_interleave(heads // kv_heads, dim=1)
    position = torch.arange(n, device=query.device)[:, None] + (m - n)
    j = torch.arange(m, device=query.device)[None, :]
    visible = torch.ones(n, m, dtype=torch.bool, device=query.device)
    if causal:
        visible &= j <= position
    left, right = (None, None) if window is None else window
    if left is not None:
        visible &= j >= position - left
    if right is not None:
        visible &= j <= position + right
    rows = visible.any(dim=1)
    out = query.new_zeros(n, heads, head_dim)
    lse = query.new_full((heads, n), -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    if not rows.any():
        return out + 0 * query.sum(), lse
    scores = torch.einsum("nhd,mhd->hnm", query[rows], key) * scale
    scores = scores.masked_fill(~visible[rows], -torch.inf)
    out = out.index_put((rows,), torch.einsum("hnm,mhd->nhd", torch.softmax(scores, dim=-1), value))
    lse = lse.masked_scatter(rows, torch.logsumexp(scores.to(lse.dtype), dim=-1))
    return out, lse


def run_oracle(inputs: JaggedInputs, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    """out, lse and, where the inputs hold incoming gradients, dq, dk, dv, by a loop over sequences in `dtype`.

    `options` are `causal`, `window` and `scale` of `gemattn.jagged_attention`. Slack rows and rows that see no key are
    0 (lse -inf), and incoming gradients for them are dropped.
    """
    query, key, value = (x.detach().to(dtype) for x in (inputs.query, inputs.key, inputs.value))
    kv_offsets = inputs.kv_offsets.tolist()
    q_offsets = None if inputs.q_offsets is None else inputs.q_offsets.tolist()
    s = query.shape[0]
    rows = s * (len(kv_offsets) - 1) if q_offsets is None else s
    out = query.new_zeros(rows, *query.shape[1:])
    lse = query.new_full((query.shape[1], rows), -torch.inf, dtype=torch.promote_types(dtype, torch.float32))
    grads = {name: torch.zeros_like(x) for name, x in (("dq", query), ("dk", key), ("dv", value))}
    for b, (start, end) in enumerate(itertools.pairwise(kv_offsets)):
        q_rows = slice(0, s) if q_offsets is None else slice(q_offsets[b], q_offsets[b + 1])
        out_rows = slice(b * s, b * s + s) if q_offsets is None else q_rows
        q, k, v = (x.clone().requires_grad_() for x in (query[q_rows], key[start:end], value[start:end]))
        o, stat = attend(q, k, v, **options)
        out[out_rows], lse[:, out_rows] = o.detach(), stat.detach()
        seen = stat.detach().ne(-torch.inf).any(dim=0) | stat.detach().isnan().any(dim=0)
        loss = q.new_zeros(())
        if inputs.dout is not None:
            loss = loss + (o[seen] * inputs.dout[out_rows][seen].to(dtype)).sum()
        if inputs.dlse is not None:
            loss = loss + (stat[:, seen] * inputs.dlse[:, out_rows][:, seen].to(stat.dtype)).sum()
        if loss.requires_grad:
            dq, dk, dv = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
            for name, rows_, grad in (("dq", q_rows, dq), ("dk", slice(start, end), dk), ("dv", slice(start, end), dv)):
                if grad is not None:
                    grads[name][rows_] += grad
    return {"out": out, "lse": lse, **grads}
