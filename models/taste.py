"""How the candidate meets the taste that a user's events add up to: a factor model over long histories, at little cost.

The events of a stream are reduced to one vector before the candidate is looked at, so an event costs a row of a table
and a small perceptron. That affords histories which are much longer than what a transformer reads, see
`models.gem.StreamConfig`.

Shape legend: B examples, T events of one stream over the batch, E width of the taste tables, m tastes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.features import EventStream, FeatureSchema
from models.inputs import TIME_FEATURES, candidate_mates, segment_of, segment_sum, table_std, time_features
from models.interaction import Perceptron


class TasteMatch(nn.Module):
    """``<sum_j w_j e_j, c> / sqrt(count + 1)`` for each feature that the events of a stream and the candidate share.

    The factor model that stands for a user by the items in the history (asymmetric SVD; Koren, KDD 2008): e_j and c
    come from two tables of which nothing else reads, see `taste_tables`, and w_j is how far a rating lies above what
    was expected. Here w_j is learned from what became of the event and when: all its features but those that it shares
    with the candidate. With those it would learn train's items by heart.

    Args:
        schema: of the data.
        stream: one of its streams; it shares a table with the candidate.
        num_tastes: m, weightings of the events.
        embedding_dim: width of the tables of ``schema``, from which the other features of an event are read.
        embedding_scale: of all tables, see `models.inputs.table_std`.
        taste_dim: E.
        taste_std: of a match at the start.
        time_scale: seconds, see `gemattn.nn.time_angles`.
        hidden_dim: of the perceptron that weighs the events.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        stream: EventStream,
        *,
        num_tastes: int,
        embedding_dim: int,
        embedding_scale: float,
        taste_dim: int,
        taste_std: float,
        time_scale: float,
        hidden_dim: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mates = candidate_mates(schema, stream)
        self.stream, self.time_scale, self.num_tastes = stream.name, time_scale, num_tastes
        self.outcome_keys = tuple(key for key in stream.keys if key not in mates)
        self.pairs = []
        for key, feature in zip(stream.keys, stream.features, strict=True):
            if key in mates:
                variance = table_std(feature.num_ids, embedding_scale) ** 2
                self.pairs.append((key, mates[key], taste_std / (variance * taste_dim**0.5)))
        self.width = len(self.pairs) * num_tastes
        outcome_width = embedding_dim * len(self.outcome_keys) + TIME_FEATURES
        self.weights_of = Perceptron(outcome_width, (hidden_dim,), num_tastes, device=device)

    def forward(self, embedded: Any, vectors: Any, ages: Any) -> Tensor:
        """(B, number of shared features * m).

        Args:
            embedded: {key: JaggedTensor} of the schema's tables.
            vectors: {key: JaggedTensor} of the taste tables.
            ages: `KeyedJaggedTensor` of seconds.
        """
        seconds = ages[self.stream].values()
        offsets = vectors[self.pairs[0][0]].offsets()
        size = offsets.shape[0] - 1
        segment = segment_of(offsets, seconds.shape[0])
        outcome = [embedded[key].values() for key in self.outcome_keys]
        weights = self.weights_of(torch.cat([*outcome, time_features(seconds, self.time_scale)], dim=1))
        weights = weights.unsqueeze(2)
        norm = (offsets.diff() + 1).to(weights.dtype).rsqrt().unsqueeze(1)
        matches = []
        for key, mate, scale in self.pairs:
            weighted = (weights * vectors[key].values().unsqueeze(1)).flatten(1)
            tastes = segment_sum(weighted, segment, size).unflatten(1, (self.num_tastes, -1))
            products = tastes * vectors[mate].values().unsqueeze(1)
            matches.append(products.sum(2) * (scale * norm))
        return torch.cat(matches, dim=1)


def taste_tables(schema: FeatureSchema, streams: Sequence[EventStream]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Tables of taste, as `FeatureSchema.event_tables` has them: name -> (rows, keys of ``Batch.events``).

    Two for each table that the candidate shares with one of these streams: one for the candidate and one for events.
    """
    tables: dict[str, tuple[int, tuple[str, ...]]] = {}
    for stream in streams:
        mates = candidate_mates(schema, stream)
        for key, feature in zip(stream.keys, stream.features, strict=True):
            if key in mates:
                for role, wanted in (("candidate", mates[key]), ("events", key)):
                    name = f"taste_{feature.table_name}_{role}"
                    _, keys = tables.get(name, (feature.num_ids, ()))
                    tables[name] = (feature.num_ids, keys if wanted in keys else (*keys, wanted))
    return tables
