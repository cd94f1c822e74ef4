"""Recipes: all of a training run that is not a path, a device or a seed. Each is a function that returns a `Recipe`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Args:
        model: options for ``models.build_model``, beyond the model's name and the schema.
        max_events: histories are cut to their latest events, so many a stream.
        max_past: and so many of the long stream ``past`` of MovieLens-100K.
        batch_size: examples a rank and step.
        epochs: at most; training stops earlier when ``patience`` evaluations in a row are no better than the best.
        evals_per_epoch: evaluations on valid an epoch, evenly spaced, the last one at its end.
        dense_lr: learning rate of AdamW for everything but the tables.
        betas: AdamW's.
        weight_decay: AdamW's, for weights of two or more dimensions.
        table_lr: learning rate of RowWiseAdagrad, which updates the tables in backward.
        table_weight_decay: decoupled, on whole tables: a step scales them by 1 - rate * decay.
        taste_lr, taste_weight_decay: the same of the tables of taste, which the GEM-like model alone has.
        warmup_steps: both learning rates rise linearly over so many steps.
        final_lr: and fall along a half cosine to this share of themselves at the last step; 1 keeps them up.
        id_dropout: feature -> probability to train an example with the unknown id in place of the feature's ids.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    max_events: int = 50
    max_past: int = 200
    batch_size: int = 512
    epochs: int = 4
    evals_per_epoch: int = 2
    patience: int = 3
    dense_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    table_lr: float = 0.02
    table_weight_decay: float = 0.0
    taste_lr: float = 0.02
    taste_weight_decay: float = 0.0
    warmup_steps: int = 0
    final_lr: float = 1.0
    id_dropout: Mapping[str, float] = field(default_factory=dict)

    def table_rates(self, name: str) -> tuple[float, float]:
        """Learning rate and weight decay of a table, by the name of its parameter or module in the model."""
        if name.split(".")[0] == "taste":
            return self.taste_lr, self.taste_weight_decay
        return self.table_lr, self.table_weight_decay

    def lr_factor(self, step: int, num_steps: int) -> float:
        """What scales both learning rates at this step, 0 <= step, of so many in all."""
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        fallen = 0.5 * (1.0 + cos(pi * min(step / num_steps, 1.0)))
        return warm * (self.final_lr + (1.0 - self.final_lr) * fallen)


def ml_100k(model: str) -> Recipe:
    """MovieLens-100K: small and overfit within a few epochs, so with decay, dropout and early stopping."""
    recipe = Recipe(
        max_events=30,
        batch_size=256,
        epochs=3,
        evals_per_epoch=2,
        patience=4,
        dense_lr=2e-3,
        betas=(0.9, 0.99),
        weight_decay=0.05,
        table_lr=0.01,
        table_weight_decay=1.0,
        warmup_steps=50,
        final_lr=0.02,
    )
    if model == "gem":
        options = {"num_sum": 4, "head_hidden": (128, 64), "dropout": 0.3, "field_dropout": 0.1}
        options |= {"taste_dim": 32, "taste_std": 0.3, "num_similarities": 0}
        # The transformer reads the latest events, taste a long past.
        options["streams"] = {"ratings": {"num_tastes": 0}, "past": {"tokens": False}}
        return replace(recipe, epochs=2, evals_per_epoch=1, taste_weight_decay=1.0, model=options)
    if model == "din":
        return replace(recipe, dense_lr=4e-3, weight_decay=0.6)
    return recipe


def synthetic(model: str) -> Recipe:
    """The made-up log of ``examples/data/synthetic.py``."""
    return Recipe(max_events=30, epochs=3, id_dropout={"user": 0.3})


def tiny(model: str) -> Recipe:
    """A run of seconds, on either data set: it shows that everything works, not how well."""
    return Recipe(max_events=10, max_past=10, epochs=1, evals_per_epoch=1, dense_lr=2e-3, table_lr=0.05)


RECIPES: dict[str, Callable[[str], Recipe]] = {"ml-100k": ml_100k, "synthetic": synthetic, "tiny": tiny}
