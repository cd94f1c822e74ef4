"""`JaggedTransformerBlock`: a pre-norm transformer layer on jagged tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemattn import rec
from gemattn.attention import Window
from gemattn.kernels.schedule import Schedule
from gemattn.nn.attention import JaggedAttention, _pair_of_angles, check_size
from gemattn.rec import Tokens
from gemattn.spec import Impl

torch.fx.wrap("_pair_of_angles")


class MLP(nn.Module):
    """Row-wise two-layer perceptron: ``down(gelu(up(x)))``, or ``down(silu(gate) * up)`` (SwiGLU, arXiv 2002.05202).

    Args:
        embed_dim: E, in and out.
        hidden_dim: width between; default 4 E, for "swiglu" 8 / 3 E rounded up to a multiple of 8 (as many weights).
        activation: "gelu" or "swiglu". The latter's gate and up projection are one product, rows [gate; up] of ``up``.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int | None = None,
        *,
        activation: Literal["gelu", "swiglu"] = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation is {activation!r}, wanted 'gelu' or 'swiglu'")
        check_size("embed_dim", embed_dim)
        if hidden_dim is None:
            hidden_dim = 4 * embed_dim if activation == "gelu" else -(-8 * embed_dim // 24) * 8
        check_size("hidden_dim", hidden_dim)
        self.activation = activation
        width = hidden_dim if activation == "gelu" else 2 * hidden_dim
        self.up = nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """PyTorch's own initial values of both layers."""
        self.up.reset_parameters()
        self.down.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        hidden = self.up(x)
        if self.activation == "gelu":
            return self.down(F.gelu(hidden))
        gate, up = torch.chunk(hidden, 2, dim=-1)
        return self.down(F.silu(gate) * up)


class JaggedTransformerBlock(nn.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, each sequence for itself.

    Args:
        embed_dim: E, width of the tokens.
        num_heads: H.
        mlp_dim: hidden width, see `MLP`.
        activation: "gelu" or "swiglu".
        dropout: of the two residual branches (there is none on attention probabilities).
        norm_eps: of both LayerNorms.
        num_kv_heads, head_dim, causal, window, bias, qk_norm, deterministic, device, dtype, impl: as in
            `JaggedAttention`.

    Parameters: ``attention_norm, attention, mlp_norm, mlp``.

    Example, layers that share one schedule and unpack once:
        >>> tokens = gemattn.rec.unpack(kjt)
        >>> rows = tokens.values.shape[0]
        >>> schedule = gemattn.make_schedule(tokens.offsets, query_rows=rows)
        >>> angles = gemattn.nn.position_angles(tokens.offsets, rows, head_dim)
        >>> x = tokens.values
        >>> for block in blocks:
        ...     x, _ = block((x, tokens.offsets), rotary=angles, schedule=schedule)
        >>> kjt = gemattn.rec.repack(kjt, x)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mlp_dim: int | None = None,
        activation: Literal["gelu", "swiglu"] = "gelu",
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        window: Window | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim, norm_eps, device=device, dtype=dtype)
        self.attention = JaggedAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            causal=causal,
            window=window,
            bias=bias,
            qk_norm=qk_norm,
            deterministic=deterministic,
            device=device,
            dtype=dtype,
            impl=impl,
        )
        self.mlp_norm = nn.LayerNorm(embed_dim, norm_eps, device=device, dtype=dtype)
        self.mlp = MLP(embed_dim, mlp_dim, activation=activation, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """As at construction; for a block that was built on the meta device."""
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters()
        self.mlp_norm.reset_parameters()
        self.mlp.reset_parameters()

    def forward(self, sequences: Any, *, rotary: Any = None, schedule: Schedule | None = None) -> Any:
        """Tokens in, tokens of the same kind out.

        Args:
            sequences: as in `JaggedAttention.forward`, values (T, embed_dim).
            rotary: angles (T, head_dim // 2), or a dict of them for a dict of sequences.
            schedule: of `gemattn.make_schedule`, to share among blocks.

        Returns:
            The kind that came in, with the same keys, weights, strides and offset tensors. Rows outside every sequence
            are 0, and so are their gradients, whatever they hold.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted.
        """
        tokens = rec.unpack(sequences, width=self.attention.embed_dim)
        angles = _pair_of_angles(sequences, None, rotary)
        x = tokens.values
        normed = Tokens(self.attention_norm(x), tokens.offsets, tokens.inside)
        x = x + self.dropout(self.attention.attend(normed, normed, angles, schedule))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return rec.repack(sequences, rec.clear_slack(x, tokens.inside))
