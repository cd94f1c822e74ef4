"""Batches for the training-step benchmark: made-up event streams, jagged, and the same padded.

`models` is imported by name: it lies beside the package, not inside it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gemattn.bench.shapes import SEED


@dataclass(frozen=True)
class ModelRecipe:
    """Size of a training step.

    Args:
        batch: examples B.
        streams: name -> longest history L; lengths are uniform on 1/16 L .. L. No two L may be equal.
        items: rows of the table that candidate and events share.
        model: options of `models.build_model` beyond name and schema.
    """

    batch: int
    streams: Mapping[str, int]
    items: int = 1_000_000
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepInputs:
    """A batch and its padded twin.

    Attributes:
        schema: of `models.features`.
        jagged, padded: `Batch` each. In the padded one every history has its stream's L events, the added ones first
            (id 0), so that the latest events stay the last ones.
        lengths: stream name -> (B,) true lengths on the device.
        limits: stream name -> L.
    """

    schema: Any
    jagged: Any
    padded: Any
    lengths: dict[str, Tensor]
    limits: dict[str, int]

    @property
    def tokens(self) -> int:
        """True events of the batch."""
        return sum(int(lengths.sum()) for lengths in self.lengths.values())


def import_beside(name: str) -> ModuleType:
    """A module of the repository that is not in the wheel.

    Raises:
        ValueError: it is not there, so this is not the repository's root.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise ValueError(
                f"{name} is not importable: run this from the root of the repository, models/ is not in the wheel"
            ) from None
        raise ValueError(f"{name} needs {error.name}, which is not installed: pip install 'gemattn[train]'") from None


def make_inputs(recipe: ModelRecipe, device: torch.device) -> StepInputs:
    """Draw a batch, seeded, and pad it. The padded batch gives every event of the true one the same values."""
    features = import_beside("models.features")
    if len(set(recipe.streams.values())) < len(recipe.streams):
        raise ValueError(f"streams are {dict(recipe.streams)}, wanted a different longest history for each")
    item = features.IdFeature("item", recipe.items, table="item")
    category = features.IdFeature("category", 1_000, table="category")
    surface = features.IdFeature("surface", 8)
    schema = features.FeatureSchema(
        dense=tuple(f"dense_{i}" for i in range(16)),
        ids=(features.IdFeature("user", recipe.items), features.IdFeature("segment", 100)),
        candidate=(item, category),
        streams=tuple(features.EventStream(name, (item, category, surface)) for name in recipe.streams),
        tasks=("click", "conversion"),
    )
    generator = torch.Generator().manual_seed(SEED)
    size = recipe.batch

    def ids(feature: Any, count: int) -> Tensor:
        return torch.randint(1, feature.num_ids, (count,), generator=generator)

    lengths = {
        name: torch.randint(max(1, limit // 16), limit + 1, (size,), generator=generator)
        for name, limit in recipe.streams.items()
    }
    ones = torch.ones(size, dtype=torch.int64)
    events = {key: (ids(f, size), ones) for key, f in zip(schema.candidate_keys, schema.candidate, strict=True)}
    ages = {}
    for stream in schema.streams:
        total = int(lengths[stream.name].sum())
        for key, feature in zip(stream.keys, stream.features, strict=True):
            events[key] = ids(feature, total), lengths[stream.name]
        ages[stream.name] = _ages(lengths[stream.name], generator), lengths[stream.name]
    parts = {
        "dense": torch.randn(size, len(schema.dense), generator=generator),
        "ids": _kjt({feature.name: (ids(feature, size), ones) for feature in schema.ids}),
        "labels": torch.randint(0, 2, (size, len(schema.tasks)), generator=generator).float(),
        "weights": torch.ones(size),
    }
    jagged = features.Batch(events=_kjt(events), ages=_kjt(ages), **parts)
    owner = {key: stream.name for stream in schema.streams for key in stream.keys}
    for key, (values, own) in events.items():
        if key in owner:
            events[key] = pad_left(values, own, recipe.streams[owner[key]], 0)
    ages = {name: pad_left(values, own, recipe.streams[name], 1e7) for name, (values, own) in ages.items()}
    padded = features.Batch(events=_kjt(events), ages=_kjt(ages), **parts)
    return StepInputs(
        schema,
        jagged.to(device),
        padded.to(device),
        {name: own.to(device) for name, own in lengths.items()},
        dict(recipe.streams),
    )


def pad_left(values: Tensor, lengths: Tensor, limit: int, fill: float) -> tuple[Tensor, Tensor]:
    """(T,) values of (B,) lengths -> (B * limit,) with `fill` before each sequence, and the new lengths."""
    valid = torch.arange(limit) >= limit - lengths[:, None]
    padded = values.new_full(valid.shape, fill)
    padded[valid] = values
    return padded.flatten(), torch.full_like(lengths, limit)


def _ages(lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Seconds from each event to the example, oldest first: an hour's gap on average."""
    parts = []
    for length in lengths.tolist():
        gaps = 1 + 3600 * torch.rand(length, generator=generator) * 2
        parts.append(gaps.cumsum(0).flip(0))
    return torch.cat(parts)


def _kjt(parts: dict[str, tuple[Tensor, Tensor]]) -> Any:
    """A `KeyedJaggedTensor` of key -> (values, lengths)."""
    torchrec = import_beside("torchrec")
    values, lengths = zip(*parts.values(), strict=True)
    return torchrec.KeyedJaggedTensor(list(parts), torch.cat(values), lengths=torch.cat(lengths))
