"""What the GEM-like model is compared with: no history, the mean of the history, and DIN. Same inputs, same heads.

Shape legend: B examples, T events of one stream over the batch, n non-sequence tokens, d width, h heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.features import FeatureSchema
from models.heads import TaskHeads
from models.inputs import EventFeatures, Events, FieldTokens, segment_sum
from models.interaction import Perceptron


@dataclass(frozen=True)
class BaselineConfig:
    """Sizes of the history-free and the mean-pooled baseline.

    Args:
        embedding_dim: width of every table.
        embedding_scale: of the tables at the start, see `models.inputs.table_std`.
        dim: d, width of the tokens.
        dense_hidden: width between the two layers that make a token of the dense floats.
        head_hidden: widths between the layers of each task's head.
        time_scale: seconds; ages are told apart linearly below it, by their ratio above it.
        dropout: within the heads.
        field_dropout: of the entries that the heads read.
    """

    embedding_dim: int = 32
    embedding_scale: float = 2.0
    dim: int = 32
    dense_hidden: int = 64
    head_hidden: tuple[int, ...] = (128, 64)
    time_scale: float = 60.0
    dropout: float = 0.1
    field_dropout: float = 0.0


@dataclass(frozen=True)
class DinConfig(BaselineConfig):
    """Sizes of DIN.

    Args:
        num_heads: h, weights an event gets.
        attention_hidden: width between the two layers that give an event its weights.
    """

    num_heads: int = 2
    attention_hidden: int = 64


class HistoryFree(nn.Module):
    """The non-sequence tokens side by side, into the heads."""

    def __init__(
        self, schema: FeatureSchema, config: BaselineConfig, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.event_keys = schema.candidate_keys
        self.fields = _fields(schema, config, device)
        self.heads = _heads(self.fields.num_tokens * config.dim, schema, config, device)
        self.dropout = nn.Dropout(config.field_dropout)

    def forward(self, dense: Tensor, pooled: Any, embedded: Any, ages: Any) -> Tensor:
        """(B, K); see `models.gem.Gem.forward`."""
        return self.heads(self.dropout(self.fields(dense, pooled, embedded).flatten(1)))


class MeanPooled(nn.Module):
    """Each stream's events, mapped linearly to d and averaged: p. The heads read the non-sequence tokens, p and p * q.

    q is the candidate, mapped linearly to d: without the product no first layer of a head could compare the two.
    """

    def __init__(
        self, schema: FeatureSchema, config: BaselineConfig, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.fields = _fields(schema, config, device)
        self.event_keys = schema.event_keys
        self.candidate = Candidate(schema, config, device=device)
        self.events = _events(schema, config)
        self.tokens = nn.ModuleDict(
            {name: nn.Linear(events.width, config.dim, device=device) for name, events in self.events.items()}
        )
        width = (self.fields.num_tokens + 2 * len(self.events)) * config.dim
        self.heads = _heads(width, schema, config, device)
        self.dropout = nn.Dropout(config.field_dropout)

    def forward(self, dense: Tensor, pooled: Any, embedded: Any, ages: Any) -> Tensor:
        """(B, K); see `models.gem.Gem.forward`."""
        x = self.fields(dense, pooled, embedded)
        query = self.candidate(embedded)
        parts = [x.flatten(1)]
        for name, features in self.events.items():
            events = features(embedded, ages)
            total = segment_sum(self.tokens[name](events.features), events.segment, x.shape[0])
            mean = total / _lengths(events)
            parts += [mean, mean * query]
        return self.heads(self.dropout(torch.cat(parts, dim=1)))


class Din(nn.Module):
    """Deep Interest Network (Zhou et al., arXiv 1706.06978): events weighted by a perceptron of event and candidate.

    The weights are not normalised, as in the paper: their sum tells how much of the history speaks to the candidate.
    The weighted sum is divided by the root of the history's length, so that its size does not grow with it.
    """

    def __init__(self, schema: FeatureSchema, config: DinConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.fields = _fields(schema, config, device)
        self.event_keys = schema.event_keys
        self.candidate = Candidate(schema, config, device=device)
        self.events = _events(schema, config)
        self.tokens = nn.ModuleDict(
            {name: nn.Linear(events.width, config.dim, device=device) for name, events in self.events.items()}
        )
        self.weights = nn.ModuleDict(
            {
                name: Perceptron(4 * config.dim, (config.attention_hidden,), config.num_heads, device=device)
                for name in self.events
            }
        )
        width = (self.fields.num_tokens + config.num_heads * len(self.events)) * config.dim
        self.heads = _heads(width, schema, config, device)
        self.dropout = nn.Dropout(config.field_dropout)

    def forward(self, dense: Tensor, pooled: Any, embedded: Any, ages: Any) -> Tensor:
        """(B, K); see `models.gem.Gem.forward`."""
        x = self.fields(dense, pooled, embedded)
        query = self.candidate(embedded)
        parts = [x.flatten(1)]
        for name, features in self.events.items():
            events = features(embedded, ages)
            tokens = self.tokens[name](events.features)  # (T, d)
            asked = query.index_select(0, events.segment)
            weights = self.weights[name](torch.cat([asked, tokens, asked - tokens, asked * tokens], dim=1))  # (T, h)
            weighted = (weights.unsqueeze(2) * tokens.unsqueeze(1)).flatten(1)  # (T, h d)
            parts.append(segment_sum(weighted, events.segment, x.shape[0]) / _lengths(events).sqrt())
        return self.heads(self.dropout(torch.cat(parts, dim=1)))


class Candidate(nn.Module):
    """The candidate's embeddings, mapped linearly to one vector."""

    def __init__(
        self, schema: FeatureSchema, config: BaselineConfig, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.keys = schema.candidate_keys
        self.projection = nn.Linear(len(self.keys) * config.embedding_dim, config.dim, device=device)

    def forward(self, embedded: Any) -> Tensor:
        """(B, d)."""
        return self.projection(torch.cat([embedded[key].values() for key in self.keys], dim=1))


def _fields(schema: FeatureSchema, config: BaselineConfig, device: torch.device | str | None) -> FieldTokens:
    return FieldTokens(
        schema,
        embedding_dim=config.embedding_dim,
        dim=config.dim,
        dense_hidden=config.dense_hidden,
        device=device,
    )


def _events(schema: FeatureSchema, config: BaselineConfig) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            stream.name: EventFeatures(
                schema,
                stream,
                embedding_dim=config.embedding_dim,
                embedding_scale=config.embedding_scale,
                time_scale=config.time_scale,
                num_similarities=0,
            )
            for stream in schema.streams
        }
    )


def _heads(width: int, schema: FeatureSchema, config: BaselineConfig, device: torch.device | str | None) -> TaskHeads:
    return TaskHeads(width, schema.tasks, hidden_dims=config.head_hidden, dropout=config.dropout, device=device)


def _lengths(events: Events) -> Tensor:
    """(B, 1) events of each example, at least 1."""
    return events.offsets.diff().clamp(min=1).unsqueeze(1).to(events.features.dtype)
