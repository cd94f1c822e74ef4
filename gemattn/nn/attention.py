"""`JaggedAttention`: projections around `gemattn.jagged_attention`, on TorchRec's jagged types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemattn import rec
from gemattn.attention import Window, jagged_attention
from gemattn.kernels.schedule import Schedule
from gemattn.nn.rotary import apply_rotary
from gemattn.rec import Tokens
from gemattn.spec import Impl

torch.fx.wrap("jagged_attention")


class _Projections(nn.Module):
    """Query, key, value and output projections with heads: what self-, cross- and shared-query attention share.

    The three input projections stay three products of the (T, E) values: a module each keeps parameter names, hooks and
    quantisation or low-rank swaps working, and joining the weights would copy them in every step.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        context_dim: int | None,
        bias: bool,
        qk_norm: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        context_dim = embed_dim if context_dim is None else context_dim
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "context_dim": context_dim,
        }
        for name, size in sizes.items():
            check_size(name, size)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads is {num_kv_heads}, wanted a divisor of num_heads, {num_heads}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim is {embed_dim}, wanted a multiple of num_heads, {num_heads}, or head_dim given"
                )
            head_dim = embed_dim // num_heads
        check_size("head_dim", head_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.context_dim = context_dim

        def linear(in_features: int, out_features: int) -> nn.Linear:
            return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

        def norm() -> nn.RMSNorm | None:
            return nn.RMSNorm(head_dim, eps=1e-6, device=device, dtype=dtype) if qk_norm else None

        self.q_proj = linear(embed_dim, num_heads * head_dim)
        self.k_proj = linear(context_dim, num_kv_heads * head_dim)
        self.v_proj = linear(context_dim, num_kv_heads * head_dim)
        self.out_proj = linear(num_heads * head_dim, embed_dim)
        self.q_norm = norm()
        self.k_norm = norm()

    def reset_parameters(self) -> None:
        """PyTorch's own initial values of every layer, so that whoever resets the layers one by one gets the same."""
        for module in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.q_norm, self.k_norm):
            if module is not None:
                module.reset_parameters()

    def _heads(
        self,
        projected: Tensor,
        norm: nn.RMSNorm | None = None,
        angles: Tensor | None = None,
        inside: Tensor | None = None,
    ) -> Tensor:
        """(T, heads * D) -> (T, heads, D), normalised and turned in float32, rounded once."""
        weight, eps = (None, None) if norm is None else (norm.weight, norm.eps)
        return _normalise_and_turn(projected.unflatten(-1, (-1, self.head_dim)), weight, eps, angles, inside)

    def extra_repr(self) -> str:
        kv_heads = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        context = "" if self.context_dim == self.embed_dim else f", context_dim={self.context_dim}"
        return f"{self.embed_dim}, num_heads={self.num_heads}{kv_heads}, head_dim={self.head_dim}{context}"


class JaggedAttention(_Projections):
    """Multi-head attention within each sequence of jagged tokens.

    Args:
        embed_dim: E, width of the tokens, in and out.
        num_heads: H.
        num_kv_heads: G, a divisor of H; default H.
        head_dim: D; default ``embed_dim // num_heads``.
        context_dim: width of the context's tokens in cross-attention; default `embed_dim`.
        causal: bottom-right aligned, as everywhere in this package.
        window: (left, right), keys a token sees on either side; None on a side for no limit.
        bias: of the four projections.
        qk_norm: RMSNorm over D of every query and key head, before the rotary turn.
        deterministic: bitwise equal gradients from run to run.
        device: "meta" builds without memory; then `to_empty` and `reset_parameters`.
        dtype: of the parameters. There is no autocast inside: the tokens come in this dtype or under your own autocast.
        impl: as in `gemattn.jagged_attention`.

    Parameters are named ``q_proj, k_proj, v_proj, out_proj`` (and ``q_norm, k_norm``), whatever the options.

    Example:
        >>> from torchrec import KeyedJaggedTensor
        >>> attention = gemattn.JaggedAttention(embed_dim=64, num_heads=4, causal=True)
        >>> tokens = KeyedJaggedTensor(["clicks", "buys"], torch.randn(9, 64), lengths=torch.tensor([3, 0, 2, 4]))
        >>> attention(tokens).values().shape  # a KeyedJaggedTensor with the same keys and offsets
        torch.Size([9, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        causal: bool = False,
        window: Window | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim, context_dim, bias, qk_norm, device, dtype)
        self.causal = causal
        self.window = window
        self.deterministic = deterministic
        self.impl = impl

    def forward(
        self,
        sequences: Any,
        context: Any = None,
        *,
        rotary: Any = None,
        schedule: Schedule | None = None,
    ) -> Any:
        """Every token attends to the tokens of its own sequence, or to those of the same sequence of `context`.

        Args:
            sequences: `KeyedJaggedTensor`, `JaggedTensor`, ``dict[str, JaggedTensor]`` or ``(values, offsets)`` with
                values (T, embed_dim).
            context: None for self-attention; else the same kinds with values (T_kv, context_dim) and as many sequences
                (a dict for a dict, with the same keys).
            rotary: angles (T, head_dim // 2) for queries and keys alike; with a context a pair (query angles, key
                angles), either of which may be None. For a dict of sequences each may be a dict of angles. Helpers:
                `gemattn.nn.position_angles`, `gemattn.nn.time_angles`.
            schedule: of `gemattn.make_schedule`, to share among layers; for a dict, of the offsets that
                `gemattn.rec.unpack` gives.

        Returns:
            The kind that came in, with the same keys, weights, strides and offset tensors. Rows outside every sequence
            are 0, and so are their gradients, whatever they hold and whatever gradient comes in for them.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted; ids that are not embedded yet too.
        """
        pair = rec.unpack_pair(sequences, context, width=self.embed_dim, context_width=self.context_dim)
        angles = _pair_of_angles(sequences, context, rotary)
        return rec.repack(sequences, self.attend(pair[0], pair[1], angles, schedule))

    def attend(
        self,
        tokens: Tokens,
        context: Tokens,
        angles: tuple[Tensor | None, Tensor | None] = (None, None),
        schedule: Schedule | None = None,
    ) -> Tensor:
        """The layer on unpacked tokens: (T, embed_dim), slack rows 0. In self-attention `context` is `tokens`."""
        query = self._heads(self.q_proj(tokens.values), self.q_norm, angles[0], tokens.inside)
        key = self._heads(self.k_proj(context.values), self.k_norm, angles[1], context.inside)
        value = self._heads(self.v_proj(context.values))
        out = jagged_attention(
            query,
            key,
            value,
            tokens.offsets,
            context.offsets,
            causal=self.causal,
            window=self.window,
            deterministic=self.deterministic,
            schedule=schedule,
            impl=self.impl,
        )
        return rec.clear_slack(self.out_proj(out.flatten(1)), tokens.inside)

    def extra_repr(self) -> str:
        """Sizes, then the options that differ from their defaults."""
        options = {"causal": self.causal, "window": self.window, "deterministic": self.deterministic}
        shown = "".join(f", {name}={value}" for name, value in options.items() if value)
        return super().extra_repr() + shown + ("" if self.impl == "auto" else f", impl={self.impl!r}")


def check_size(name: str, size: object) -> None:
    """Raises TypeError or ValueError unless `size` is an int of at least 1."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} is {size!r}, wanted an int of at least 1")
    if size < 1:
        raise ValueError(f"{name} is {size}, wanted at least 1")


@torch.fx.wrap
def _pair_of_angles(sequences: Any, context: Any, rotary: Any) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    if isinstance(rotary, tuple | list):
        if len(rotary) != 2:
            raise ValueError(f"rotary has {len(rotary)} entries, wanted angles or a pair (query angles, key angles)")
        query_angles, key_angles = rotary
    elif context is not None:
        raise ValueError("rotary is one set of angles, wanted a pair (query angles, key angles) with a context")
    else:
        query_angles = key_angles = rotary
    query_angles = rec.join_rows(sequences, query_angles, name="rotary")
    key_angles = rec.join_rows(sequences if context is None else context, key_angles, name="rotary")
    return query_angles, key_angles


@torch.fx.wrap
def _normalise_and_turn(
    x: Tensor, weight: Tensor | None, eps: float | None, angles: Tensor | None, inside: Tensor | None
) -> Tensor:
    if weight is None and angles is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        wide = F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps)
    if angles is not None:
        if angles.shape != (x.shape[0], x.shape[2] // 2):
            wanted = (x.shape[0], x.shape[2] // 2)
            raise ValueError(f"rotary has angles of shape {tuple(angles.shape)}, wanted {wanted}, a row a token")
        # An angle of a slack row that is NaN would reach the projections' gradients.
        wide = apply_rotary(wide, angles if inside is None else rec.clear_slack(angles, inside))
    return wide.to(x.dtype)
