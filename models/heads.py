"""One prediction head a task, and the loss over tasks.

Shape legend: B examples, K tasks, W width of what the heads read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.interaction import Perceptron


class TaskHeads(nn.Module):
    """A perceptron for every task over the same features. It has no bias: the model keeps that, see `RankingModel`.

    Args:
        in_dim: W.
        tasks: names, in the order of the columns of ``Batch.labels``.
        hidden_dims: widths between.
        dropout: after every activation.
    """

    def __init__(
        self,
        in_dim: int,
        tasks: Sequence[str],
        *,
        hidden_dims: Sequence[int],
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(
            {task: Perceptron(in_dim, hidden_dims, 1, dropout=dropout, bias=False, device=device) for task in tasks}
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, W) -> (B, K), logits less those of the base rates."""
        return torch.cat([head(x) for head in self.heads.values()], dim=1)


class MultiTaskLoss(nn.Module):
    """``sum_t task_weight_t * sum_b w_b BCE_bt / max(sum_b w_b, 1)``.

    The floor of 1 keeps a batch without weight at loss 0 instead of 0 / 0.

    Args:
        num_tasks: K.
        task_weights: one a task; default 1 each.

    Raises:
        ValueError: a number of task weights other than K, or one that is negative or not finite.
    """

    def __init__(self, num_tasks: int, task_weights: Sequence[float] | None = None) -> None:
        super().__init__()
        task_weights = (1.0,) * num_tasks if task_weights is None else tuple(task_weights)
        if len(task_weights) != num_tasks:
            raise ValueError(f"task_weights has {len(task_weights)} entries, wanted one for each of {num_tasks} tasks")
        if not all(0 <= weight < float("inf") for weight in task_weights):
            raise ValueError(f"task_weights is {task_weights}, wanted finite weights of at least 0")
        self.task_weights = task_weights

    def forward(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """(B, K) logits, (B, K) labels of 0 and 1, (B,) weights -> scalar, in float32."""
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        by_task = weights @ losses / weights.sum().clamp(min=1)
        return sum(by_task[i] * weight for i, weight in enumerate(self.task_weights))
