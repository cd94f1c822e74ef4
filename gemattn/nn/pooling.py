"""`SharedQueryPooling`: learned queries read every sequence, a fixed number of rows each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gemattn import rec
from gemattn.attention import jagged_attention
from gemattn.kernels.schedule import Schedule
from gemattn.nn.attention import _Projections, check_size
from gemattn.rec import Tokens
from gemattn.spec import Impl

torch.fx.wrap("jagged_attention")


class SharedQueryPooling(_Projections):
    """S learned queries attend to every sequence: pooling by multi-head attention (PMA; Lee et al., arXiv 1810.00825).

    With many queries it is the seed pooling of Kunlun (HSP, arXiv 2602.10016: overcomplete seeds, compressed
    afterwards), whose normalised seeds are ``norm_queries=True``. The queries are projected once, not once a sequence,
    and never
    repeated in memory: the operator shares them.

    Args:
        embed_dim: E, width of the tokens and of the result.
        num_heads: H.
        num_queries: S.
        num_kv_heads: G, a divisor of H; default H.
        head_dim: D; default ``embed_dim // num_heads``.
        bias: of the projections.
        qk_norm: RMSNorm over D of every query and key head.
        norm_queries: LayerNorm over E of the learned queries.
        deterministic: bitwise equal gradients from run to run.
        device: "meta" builds without memory; then `to_empty` and `reset_parameters`.
        dtype: of the parameters; no autocast inside.
        impl: as in `gemattn.jagged_attention`.

    Parameters: ``queries`` (S, E), ``q_proj, k_proj, v_proj, out_proj`` and, as asked for, ``query_norm, q_norm,
    k_norm``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_queries: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        norm_queries: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim, None, bias, qk_norm, device, dtype)
        check_size("num_queries", num_queries)
        self.num_queries = num_queries
        self.deterministic = deterministic
        self.impl = impl
        self.queries = nn.Parameter(torch.empty(num_queries, embed_dim, device=device, dtype=dtype))
        self.query_norm = nn.LayerNorm(embed_dim, device=device, dtype=dtype) if norm_queries else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform queries; PyTorch's own initial values of every layer."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.queries)
        if self.query_norm is not None:
            self.query_norm.reset_parameters()

    def forward(
        self, sequences: Any, *, rotary: Any = None, schedule: Schedule | None = None
    ) -> Tensor | dict[str, Tensor]:
        """What the S queries read from each sequence.

        Args:
            sequences: `KeyedJaggedTensor`, `JaggedTensor`, ``dict[str, JaggedTensor]`` or ``(values, offsets)`` with
                values (T, embed_dim).
            rotary: angles (T, head_dim // 2) of the keys (a dict of them for a dict). The queries stand at angle 0:
                with `time_angles`, at the time of the example.
            schedule: of ``gemattn.make_schedule(None, offsets, query_rows=S, key_rows=T, shared_query=True)``, to
                share.

        Returns:
            (B, S, E) for a `JaggedTensor` or (values, offsets); a dict of (B of the key, S, E) for a
            `KeyedJaggedTensor` or a dict. An empty sequence reads zeros and gives the bias of `out_proj`.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted; ids that are not embedded yet too.
        """
        tokens = rec.unpack(sequences, width=self.embed_dim)
        pooled = self.attend(tokens, rec.join_rows(sequences, rotary, name="rotary"), schedule)
        return rec.split_pooled(sequences, pooled)

    def attend(self, tokens: Tokens, angles: Tensor | None = None, schedule: Schedule | None = None) -> Tensor:
        """The layer on unpacked tokens of n sequences: (n, S, E)."""
        queries = self.queries if self.query_norm is None else self.query_norm(self.queries)
        query = self._heads(self.q_proj(queries), self.q_norm)
        key = self._heads(self.k_proj(tokens.values), self.k_norm, angles, tokens.inside)
        value = self._heads(self.v_proj(tokens.values))
        out = jagged_attention(
            query,
            key,
            value,
            None,
            tokens.offsets,
            shared_query=True,
            deterministic=self.deterministic,
            schedule=schedule,
            impl=self.impl,
        )
        return self.out_proj(out.flatten(1)).unflatten(0, (-1, self.num_queries))

    def extra_repr(self) -> str:
        """Sizes, then the options that differ from their defaults."""
        options = ", deterministic=True" if self.deterministic else ""
        impl = "" if self.impl == "auto" else f", impl={self.impl!r}"
        return f"{super().extra_repr()}, num_queries={self.num_queries}{options}{impl}"
