"""Wukong's interaction layer (Zhang et al., arXiv 2403.02545): factorisation machines stacked like a transformer.

And what InterFormer (arXiv 2411.09852) puts around it: the gate, and the feed-forward that one side steers.

Shape legend: B examples, n tokens in, m tokens out, d width, k rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Sequential):
    """Linear layers with GELU (and dropout) between them; the last one is linear.

    Args:
        in_dim: width of the input.
        hidden_dims: widths between; empty for a single linear layer.
        out_dim: width of the result.
        dropout: after every activation.
        bias: of the last layer.
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dims: Sequence[int],
        out_dim: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        layers: list[nn.Module] = []
        for hidden_dim in hidden_dims:
            layers += [nn.Linear(in_dim, hidden_dim, device=device), nn.GELU(), nn.Dropout(dropout)]
            in_dim = hidden_dim
        super().__init__(*layers, nn.Linear(in_dim, out_dim, bias=bias, device=device))


class LinearCompression(nn.Module):
    """``W X``: every token out is a weighted sum of the tokens in (Wukong's LCB, InterFormer's LCE).

    Args:
        num_in: n.
        num_out: m.
    """

    def __init__(self, num_in: int, num_out: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows of unit expected norm, so that tokens of one size give tokens of that size."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, m, d)."""
        return self.weight @ x


class FactorizationBlock(nn.Module):
    """``reshape(MLP(LN(flatten(X (X^T Y)))))``: all pairwise products of tokens, compressed (Wukong's FMB).

    ``X X^T`` holds the inner product of every pair of tokens; a learned Y (n, k) compresses its columns, and
    ``X (X^T Y)`` costs n d k in place of n n d.

    Args:
        num_in: n.
        dim: d.
        num_out: m.
        rank: k.
        hidden_dims: of the MLP.
        dropout: within the MLP.
    """

    def __init__(
        self,
        num_in: int,
        dim: int,
        num_out: int,
        *,
        rank: int,
        hidden_dims: Sequence[int],
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.empty(num_in, rank, device=device))
        self.norm = nn.LayerNorm(num_in * rank, device=device)
        self.mlp = Perceptron(num_in * rank, hidden_dims, num_out * dim, dropout=dropout, device=device)
        self.num_out = num_out
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Columns of Y of unit expected norm; the rest as PyTorch has it."""
        nn.init.normal_(self.projection, std=self.projection.shape[0] ** -0.5)
        self.norm.reset_parameters()
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, m, d)."""
        products = x @ (x.mT @ self.projection)
        return self.mlp(self.norm(products.flatten(1))).unflatten(1, (self.num_out, -1))


class WukongLayer(nn.Module):
    """``LN([FMB(X) (n_F, d); LCB(X) (n_L, d)] + X)``. A stack of l layers reaches products of 2^l tokens.

    Where n_F + n_L differs from n, the residual is a learned linear compression of X.

    Args:
        num_in: n.
        dim: d.
        num_products: n_F, tokens out of the factorisation block.
        num_linear: n_L, tokens out of the linear compression; may be 0.
        rank, hidden_dims, dropout: of `FactorizationBlock`.
    """

    def __init__(
        self,
        num_in: int,
        dim: int,
        num_products: int,
        num_linear: int,
        *,
        rank: int,
        hidden_dims: Sequence[int],
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.products = FactorizationBlock(
            num_in, dim, num_products, rank=rank, hidden_dims=hidden_dims, dropout=dropout, device=device
        )
        self.linear = LinearCompression(num_in, num_linear, device=device) if num_linear else None
        num_out = num_products + num_linear
        self.residual = None if num_out == num_in else LinearCompression(num_in, num_out, device=device)
        self.norm = nn.LayerNorm(dim, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_F + n_L, d)."""
        out = self.products(x)
        if self.linear is not None:
            out = torch.cat([out, self.linear(x)], dim=1)
        return self.norm(out + (x if self.residual is None else self.residual(x)))


class Gate(nn.Module):
    """``sigmoid(W x + b) * x``, entry by entry; starts almost open (b = 1, W = 0)."""

    def __init__(self, dim: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim, device=device))
        self.bias = nn.Parameter(torch.empty(dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W = 0, b = 1."""
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return torch.sigmoid(F.linear(x, self.weight, self.bias)) * x


class PersonalizedFeedForward(nn.Module):
    """PFFN: a feed-forward whose weights are made from each example's X_sum.

    InterFormer multiplies an example's events by ``W_p = f(X_sum)`` (d, d). A full W_p an example costs B d d memory
    and a matrix product an example; here it is factored, ``W_p = U diag(f(X_sum)) V`` with U (d, h) and V (h, d) shared
    and f linear, which two dense products over all events apply, and the activation makes a gated feed-forward of it::

        PFFN(X_sum, s) = (act(s U + u) * f(X_sum)) V + v

    Without activation and biases this is s W_p, of rank at most h.

    Args:
        dim: d.
        hidden_dim: h.
        num_sum: tokens of X_sum.
        activation: GELU if True, else none.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_sum: int,
        *,
        activation: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weights_of = nn.Linear(num_sum * dim, hidden_dim, device=device)
        self.up = nn.Linear(dim, hidden_dim, device=device)
        self.down = nn.Linear(hidden_dim, dim, device=device)
        self.activation = activation

    def forward(self, x_sum: Tensor, tokens: Tensor, segment: Tensor) -> Tensor:
        """(B, n_sum, d), (T, d), (T,) -> (T, d)."""
        hidden = self.up(tokens)
        if self.activation:
            hidden = F.gelu(hidden)
        return self.down(hidden * self.weights_of(x_sum.flatten(1)).index_select(0, segment))
