"""From a name, a schema and options to a model: tables, a body, and the loss.

The tables are TorchRec's, one `EmbeddingBagCollection` for what is pooled and one `EmbeddingCollection` for what is a
sequence, and `forward` hands them the batch's ids untouched: DistributedModelParallel shards them and
TrainPipelineSparseDist finds where their inputs come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from gemattn.spec import Impl
from models.baselines import BaselineConfig, Din, DinConfig, HistoryFree, MeanPooled
from models.features import Batch, FeatureSchema
from models.gem import Gem, GemConfig, StreamConfig
from models.heads import MultiTaskLoss
from models.inputs import table_std

Config = GemConfig | BaselineConfig | DinConfig

MODELS: dict[str, type[Config]] = {
    "gem": GemConfig,
    "mlp": BaselineConfig,
    "mean": BaselineConfig,
    "din": DinConfig,
}
"""Names of the models -> their config."""

_BASELINES = {"mlp": HistoryFree, "mean": MeanPooled, "din": Din}


class RankingModel(nn.Module):
    """Tables, the body that turns their embeddings into logits, and the loss.

    Args:
        schema: of the data.
        body: `Gem` or a baseline. It has ``event_keys``, what it reads of ``Batch.events``, and may have
            ``taste_tables``, see `models.taste.taste_tables`.
        embedding_dim: width of every table of the schema.
        embedding_scale: of the normal distributions that the tables start from, see `models.inputs.table_std`.
        taste_dim: width of the tables of taste.
        task_weights: of the tasks' losses, default 1 each.
        device: of the tables and of the bias; "meta" builds without memory.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        body: nn.Module,
        *,
        embedding_dim: int,
        embedding_scale: float,
        taste_dim: int = 0,
        task_weights: Sequence[float] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        device = None if device is None else torch.device(device)
        used = {
            name: (rows, tuple(key for key in keys if key in body.event_keys))
            for name, (rows, keys) in schema.event_tables().items()
        }
        bags = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=embedding_dim,
                feature_names=list(keys),
                pooling=PoolingType.MEAN,
                init_fn=partial(nn.init.normal_, std=table_std(rows, embedding_scale)),
            )
            for name, (rows, keys) in schema.id_tables().items()
        ]
        taste = getattr(body, "taste_tables", {})
        self.ebc = EmbeddingBagCollection(tables=bags, device=device) if bags else None
        self.ec = _sequence_tables(used, embedding_dim, embedding_scale, device)
        self.taste = _sequence_tables(taste, taste_dim, embedding_scale, device) if taste else None
        self.body = body
        self.bias = nn.Parameter(torch.zeros(len(schema.tasks), device=device))
        self.loss = MultiTaskLoss(len(schema.tasks), task_weights)

    def reset_parameters(self) -> None:
        """Initialises the bias and the whole body, innermost modules first; the tables are TorchRec's to initialise.

        DistributedModelParallel gives memory to what was built on the meta device and calls ``reset_parameters`` of the
        modules that hold parameters themselves, children before parents. Some modules of the body hold none and yet
        start their children's weights in a way of their own. This module holds the bias, so it is called, and last.
        """
        nn.init.zeros_(self.bias)
        self.body.apply(_reset)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, a scalar, and the logits (B, K)."""
        pooled = None if self.ebc is None else self.ebc(batch.ids)
        embedded = self.ec(batch.events)
        vectors = () if self.taste is None else (self.taste(batch.events),)
        logits = self.body(batch.dense, pooled, embedded, batch.ages, *vectors) + self.bias
        return self.loss(logits, batch.labels, batch.weights), logits


def _sequence_tables(
    tables: Mapping[str, tuple[int, tuple[str, ...]]], dim: int, scale: float, device: torch.device | None
) -> EmbeddingCollection:
    """The tables that some key reads, by name: (rows, keys)."""
    configs = [
        EmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=list(keys),
            init_fn=partial(nn.init.normal_, std=table_std(rows, scale)),
        )
        for name, (rows, keys) in tables.items()
        if keys
    ]
    return EmbeddingCollection(tables=configs, device=device)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def make_config(name: str, options: Mapping[str, Any]) -> Config:
    """The config of a model from plain options, as a recipe or a JSON file has them.

    Args:
        name: of the model, one of `MODELS`.
        options: fields of its config. Lists become tuples, and mappings become `StreamConfig` where those are wanted;
            so ``make_config(name, dataclasses.asdict(config)) == config``.

    Raises:
        ValueError: an unknown name or field; the message lists the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"model is {name!r}, wanted one of {list(MODELS)}")
    values = dict(options)
    if name == "gem":
        if isinstance(values.get("stream"), Mapping):
            values["stream"] = _make(StreamConfig, values["stream"], "stream")
        if "streams" in values:
            values["streams"] = {
                key: _make(StreamConfig, stream, f"streams[{key!r}]") if isinstance(stream, Mapping) else stream
                for key, stream in values["streams"].items()
            }
    return _make(MODELS[name], values, f"options of {name!r}")


def _make(kind: type, options: Mapping[str, Any], what: str) -> Any:
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{what}: unknown {unknown}, known are {known}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def build_model(
    name: str,
    schema: FeatureSchema,
    *,
    impl: Impl = "auto",
    device: torch.device | str | None = None,
    task_weights: Sequence[float] | None = None,
    **options: Any,
) -> RankingModel:
    """A model by name.

    Args:
        name: one of `MODELS`.
        schema: of the data.
        impl: of the attention, as in `gemattn.jagged_attention`; baselines have none.
        device: "meta" builds without memory, for DistributedModelParallel or for ``to_empty`` and `reset_parameters`.
        task_weights: of `RankingModel`.
        options: fields of the model's config, see `make_config`.

    Returns:
        A module: batch -> (loss, logits (B, K)).

    Raises:
        ValueError: an unknown name or option, or options that do not fit the schema.
    """
    config = make_config(name, options)
    if isinstance(config, GemConfig):
        body: nn.Module = Gem(schema, config, impl=impl, device=device)
    else:
        body = _BASELINES[name](schema, config, device=device)
    return RankingModel(
        schema,
        body,
        embedding_dim=config.embedding_dim,
        embedding_scale=config.embedding_scale,
        taste_dim=config.taste_dim if isinstance(config, GemConfig) else 0,
        task_weights=task_weights,
        device=device,
    )
