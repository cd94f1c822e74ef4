"""From a batch to what every model reads: non-sequence tokens, and the features of the events of each stream.

The GEM-like model and the baselines share these modules, so that they differ in what they do with the same inputs.

Shape legend: B examples, n non-sequence tokens, T events of one stream over the batch, E width of the embeddings,
d width of the model, W width of an event's features.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gemattn.nn import log_age, time_angles
from models.features import EventStream, FeatureSchema
from models.interaction import Perceptron

TIME_FREQUENCIES = 8
TIME_FEATURES = 2 * TIME_FREQUENCIES + 1


class Events(NamedTuple):
    """The events of one stream of a batch, jagged."""

    features: Tensor
    """(T, W)."""
    ages: Tensor
    """(T,) seconds from the event to its example."""
    offsets: Tensor
    """(B + 1,)."""
    segment: Tensor
    """(T,) which example an event belongs to, see `segment_of`."""


def segment_of(offsets: Tensor, num_rows: int) -> Tensor:
    """(T,) int64: the sequence of every row, without a host sync.

    Args:
        offsets: (B + 1,).
        num_rows: T. Rows before ``offsets[0]`` get 0, rows from ``offsets[-1]`` on get B - 1: indices that are valid.
    """
    row = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    segment = torch.searchsorted(offsets, row, right=True) - 1
    return segment.clamp(0, max(offsets.shape[0] - 2, 0))


def segment_sum(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """(T, W) -> (B, W): the sum over each example's rows; 0 where it has none."""
    return values.new_zeros(num_segments, values.shape[1]).index_add_(0, segment, values)


def table_std(num_ids: int, embedding_scale: float) -> float:
    """Standard deviation that a table starts from: ``embedding_scale / sqrt(num_ids)``, at most 1.

    As in DLRM: ids of a small table are seen often and start apart from one another; those of a large one are seen
    seldom, and start near 0, where they say nothing until they have learned something.
    """
    return min(1.0, embedding_scale * num_ids**-0.5)


def time_features(ages: Tensor, time_scale: float) -> Tensor:
    """(T,) seconds -> (T, TIME_FEATURES): the log age, and its cosines and sines at frequencies of every order."""
    tau = log_age(ages, time_scale).unsqueeze(1)
    angles = time_angles(ages, 2 * TIME_FREQUENCIES, time_scale)
    return torch.cat([tau / 8, angles.cos(), angles.sin()], dim=1)


def candidate_mates(schema: FeatureSchema, stream: EventStream) -> dict[str, str]:
    """Keys of the stream whose table the candidate uses too (the item of an event) -> the candidate's key."""
    candidates = {feature.table_name: key for key, feature in zip(schema.candidate_keys, schema.candidate, strict=True)}
    return {
        key: candidates[feature.table_name]
        for key, feature in zip(stream.keys, stream.features, strict=True)
        if feature.table_name in candidates
    }


class FieldTokens(nn.Module):
    """Non-sequence tokens X: one of the dense floats, one a sparse field, one a feature of the candidate.

    Args:
        schema: of the data.
        embedding_dim: E.
        dim: d. Where it is not E, every field has a projection of its own.
        dense_hidden: width between the two layers that make a token of the dense floats.
        dropout: of whole entries of the tokens.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        *,
        embedding_dim: int,
        dim: int,
        dense_hidden: int,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.id_keys, self.candidate_keys = schema.id_keys, schema.candidate_keys
        num_fields = len(self.id_keys) + len(self.candidate_keys)
        self.num_tokens = num_fields + bool(schema.dense)
        self.dense = Perceptron(len(schema.dense), (dense_hidden,), dim, device=device) if schema.dense else None
        self.projections = (
            None
            if embedding_dim == dim
            else nn.ModuleList(nn.Linear(embedding_dim, dim, device=device) for _ in range(num_fields))
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, dense: Tensor, pooled: Any, embedded: Any) -> Tensor:
        """(B, n, d).

        Args:
            dense: (B, number of dense features).
            pooled: `KeyedTensor` of the `EmbeddingBagCollection`, (B, E) a key; None without sparse fields.
            embedded: what the `EmbeddingCollection` gives, {key: JaggedTensor}; a candidate's key has B rows.
        """
        fields = [pooled[key] for key in self.id_keys] + [embedded[key].values() for key in self.candidate_keys]
        if self.projections is not None:
            fields = [project(field) for project, field in zip(self.projections, fields, strict=True)]
        if self.dense is not None:
            fields = [self.dense(dense), *fields]
        return self.dropout(torch.stack(fields, dim=1))


class EventFeatures(nn.Module):
    """Features of the events of one stream: embeddings of the aligned ids, similarity to the candidate, time.

    A feature whose table the candidate uses too (the item of an event, the item in question) also gives inner products
    of the two embeddings, one a group of E / num_similarities entries. They are scaled to variance 1 at the start.

    Args:
        schema: of the data.
        stream: one of its streams.
        embedding_dim: E.
        embedding_scale: see `table_std`.
        time_scale: seconds, see `gemattn.nn.time_angles`.
        num_similarities: inner products a shared feature; 0 for none.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        stream: EventStream,
        *,
        embedding_dim: int,
        embedding_scale: float,
        time_scale: float,
        num_similarities: int,
    ) -> None:
        super().__init__()
        self.stream, self.keys, self.time_scale = stream.name, stream.keys, time_scale
        if num_similarities and embedding_dim % num_similarities:
            raise ValueError(
                f"num_similarities is {num_similarities}, wanted a divisor of embedding_dim, {embedding_dim}"
            )
        self.num_similarities = num_similarities
        self.pairs = []
        mates = candidate_mates(schema, stream) if num_similarities else {}
        for key, feature in zip(stream.keys, stream.features, strict=True):
            if key in mates:
                variance = table_std(feature.num_ids, embedding_scale) ** 2
                self.pairs.append((key, mates[key], 1 / (variance * (embedding_dim / num_similarities) ** 0.5)))
        self.width = embedding_dim * len(self.keys) + num_similarities * len(self.pairs) + TIME_FEATURES

    def forward(self, embedded: Any, ages: Any) -> Events:
        """The stream's part of a batch.

        Args:
            embedded: what the `EmbeddingCollection` gives, {key: JaggedTensor}.
            ages: `KeyedJaggedTensor` of seconds, keyed by stream, aligned with the stream's features.
        """
        first, seconds = embedded[self.keys[0]], ages[self.stream].values()
        offsets = first.offsets()
        segment = segment_of(offsets, seconds.shape[0])
        columns = [embedded[key].values() for key in self.keys]
        for key, mate, factor in self.pairs:
            products = embedded[key].values() * embedded[mate].values().index_select(0, segment)
            columns.append(products.unflatten(1, (self.num_similarities, -1)).sum(2) * factor)
        columns.append(time_features(seconds, self.time_scale))
        return Events(torch.cat(columns, dim=1), seconds, offsets, segment)
