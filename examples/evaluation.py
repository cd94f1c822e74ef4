"""Normalised entropy and AUC a task, by torchrec.metrics, over the examples of all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric


def compute_metrics(
    tasks: Sequence[str], logits: Tensor, labels: Tensor, weights: Tensor
) -> dict[str, dict[str, float]]:
    """``{task: {"ne": ..., "auc": ...}}``, the same on every rank; called by all ranks.

    NE is the weighted cross-entropy over that of the constant prediction at the mean label of these very examples, so
    1.0 is no better than knowing the base rate.

    Args:
        tasks: names, K of them.
        logits: (N, K) this rank's; N may differ from rank to rank and be 0.
        labels: (N, K) 0 or 1.
        weights: (N,).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    largest = torch.tensor(len(logits))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    size = max(int(largest), 1)
    infos = [RecTaskInfo(name, f"{name}-label", f"{name}-prediction", f"{name}-weight") for name in tasks]
    # AUC exists only over a window: one that holds everything.
    options = {"batch_size": size, "window_size": size * world_size, "compute_on_all_ranks": True}
    ne = NEMetric(world_size=world_size, my_rank=rank, tasks=infos, **options)
    auc = AUCMetric(world_size=world_size, my_rank=rank, tasks=infos, **options)
    probabilities = logits.double().sigmoid()
    columns = [
        {name: part[:, k].double() for k, name in enumerate(tasks)}
        for part in (probabilities, labels, weights[:, None].expand_as(labels))
    ]
    if len(logits):
        for metric in (ne, auc):
            metric.update(predictions=columns[0], labels=columns[1], weights=columns[2])
    values = {**ne.compute(), **auc.compute()}
    return {
        name: {"ne": float(values[f"ne-{name}|lifetime_ne"]), "auc": float(values[f"auc-{name}|window_auc"])}
        for name in tasks
    }


def mean_ne(metrics: dict[str, dict[str, float]]) -> float:
    """The mean NE over the tasks: what early stopping watches."""
    return sum(task["ne"] for task in metrics.values()) / len(metrics)
