"""Wukong against its formula, written out with loops."""

import pytest
import torch
from torch.nn import functional as F

from models.interaction import FactorizationBlock, LinearCompression, Perceptron, WukongLayer

B, N, D, K = 3, 5, 4, 2


def products_by_loop(block: FactorizationBlock, x: torch.Tensor) -> torch.Tensor:
    """MLP(LN(flatten(X (X^T Y)))), entry (i, r) being sum_j <x_i, x_j> Y_jr."""
    out = []
    for example in x:
        compressed = torch.zeros(N, K)
        for i in range(N):
            for r in range(K):
                for j in range(N):
                    compressed[i, r] += (example[i] * example[j]).sum() * block.projection[j, r]
        normed = F.layer_norm(compressed.flatten(), (N * K,), block.norm.weight, block.norm.bias)
        hidden = F.gelu(block.mlp[0].weight @ normed + block.mlp[0].bias)
        out.append((block.mlp[3].weight @ hidden + block.mlp[3].bias).view(block.num_out, D))
    return torch.stack(out)


@pytest.mark.parametrize(("num_products", "num_linear"), [(3, 2), (2, 1), (4, 0), (5, 4)])
def test_wukong_is_its_formula(num_products: int, num_linear: int) -> None:
    torch.manual_seed(0)
    layer = WukongLayer(N, D, num_products, num_linear, rank=K, hidden_dims=(6,)).eval()
    torch.nn.init.normal_(layer.norm.weight)
    torch.nn.init.normal_(layer.products.norm.bias)
    x = torch.randn(B, N, D)
    expected = []
    for example, product in zip(x, products_by_loop(layer.products, x), strict=True):
        rows = [product]
        if num_linear:
            assert layer.linear is not None
            rows.append(layer.linear.weight @ example)
        residual = example if num_products + num_linear == N else layer.residual.weight @ example
        expected.append(F.layer_norm(torch.cat(rows) + residual, (D,), layer.norm.weight, layer.norm.bias))
    torch.testing.assert_close(layer(x), torch.stack(expected))


def test_residual_is_the_identity_only_where_the_counts_agree() -> None:
    assert WukongLayer(N, D, 3, 2, rank=K, hidden_dims=()).residual is None
    assert WukongLayer(N, D, 3, 3, rank=K, hidden_dims=()).residual is not None
    assert WukongLayer(N, D, N, 0, rank=K, hidden_dims=()).linear is None


def test_products_tell_apart_what_sums_cannot() -> None:
    # Equal sums, other inner products: x_0 . x_1 is 1 in the first example and -1 in the second.
    torch.manual_seed(0)
    block = FactorizationBlock(2, 2, 1, rank=2, hidden_dims=(8,))
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [1.0, -1.0]]])
    assert not torch.allclose(*block(x))


def test_examples_do_not_meet() -> None:
    layer = WukongLayer(N, D, 3, 2, rank=K, hidden_dims=(6,))
    x = torch.randn(B, N, D, requires_grad=True)
    layer(x)[1].square().sum().backward()
    assert x.grad is not None
    assert x.grad[1].abs().sum() > 0
    assert torch.equal(x.grad[[0, 2]], torch.zeros(2, N, D))


def test_compression_keeps_the_size_of_tokens() -> None:
    torch.manual_seed(0)
    out = LinearCompression(64, 8)(torch.randn(100, 64, 16))
    assert out.shape == (100, 8, 16)
    assert 0.7 < out.std().item() < 1.3


def test_perceptron_without_hidden_layers_is_linear() -> None:
    linear = Perceptron(3, (), 2, bias=False)
    assert [tuple(p.shape) for p in linear.parameters()] == [(2, 3)]
    x = torch.randn(4, 3)
    torch.testing.assert_close(linear(x), x @ next(linear.parameters()).T)
