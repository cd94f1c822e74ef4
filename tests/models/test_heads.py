"""A head a task; the loss by hand."""

import math

import pytest
import torch

from models.heads import MultiTaskLoss, TaskHeads


def test_every_task_has_weights_of_its_own() -> None:
    heads = TaskHeads(4, ("click", "buy"), hidden_dims=(3,))
    x = torch.randn(5, 4)
    logits = heads(x)
    assert logits.shape == (5, 2)
    torch.testing.assert_close(logits[:, 1:], heads.heads["buy"](x))
    logits[:, 0].sum().backward()
    assert all(p.grad is not None for p in heads.heads["click"].parameters())
    assert all(p.grad is None or not p.grad.any() for p in heads.heads["buy"].parameters())


def test_loss_is_a_weighted_mean_a_task() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    weights = torch.tensor([1.0, 3.0])
    # sigmoid(log 3) = 3/4, so the entries cost log 2, log 4; log 4/3, log 2.
    first = (math.log(2) + 3 * math.log(4 / 3)) / 4
    second = (math.log(4) + 3 * math.log(2)) / 4
    assert MultiTaskLoss(2)(logits, labels, weights).item() == pytest.approx(first + second)
    assert MultiTaskLoss(2, [0.5, 2.0])(logits, labels, weights).item() == pytest.approx(first / 2 + second * 2)


def test_small_and_missing_weight() -> None:
    logits, labels = torch.zeros(2, 1, requires_grad=True), torch.ones(2, 1)
    loss = MultiTaskLoss(1)
    # The weights sum to less than 1: divided by 1.
    assert loss(logits, labels, torch.tensor([0.25, 0.25])).item() == pytest.approx(math.log(2) / 2)
    nothing = loss(logits, labels, torch.zeros(2))
    nothing.backward()
    assert nothing.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 1))
    empty = loss(torch.zeros(0, 1), torch.zeros(0, 1), torch.zeros(0))
    assert empty.item() == 0


def test_weight_zero_takes_an_example_out() -> None:
    logits, labels = torch.randn(3, 2), torch.ones(3, 2)
    kept = MultiTaskLoss(2)(logits[:2], labels[:2], torch.ones(2))
    torch.testing.assert_close(MultiTaskLoss(2)(logits, labels, torch.tensor([1.0, 1.0, 0.0])), kept)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_bad_task_weights_are_named(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="task_weights"):
        MultiTaskLoss(2, weights)
