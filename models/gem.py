"""A GEM-like model, from public facts: event encoder, InterFormer layers with a Wukong interaction, a head a task.

Two sides exchange at every layer and neither is pooled early (InterFormer, Zeng et al., arXiv 2411.09852). Non-sequence
tokens X (B, n, d) and, for every stream, event tokens S (T, d) pass layer l together::

    X_sum = Gate(LCE(X))                                   n_sum tokens that stand for the non-sequence side
    S_sum = Gate([CLS || PMA || recent K])                 a fixed number of tokens an example for each stream
    X'    = Interaction([X || S_sum, every stream])        Wukong
    S'    = S + MHA(S + PFFN(X_sum, S))                    events seen through X_sum, then by one another

CLS is X_sum of layer 1, put before each sequence once: rows that ask the events what the candidate asks. The heads read
[X_sum || S_sum] of what the last layer gives, the tokens X that came in, and how the candidate meets the taste of each
stream (`TasteMatch`). Events stay jagged from the tables to the summary, nothing is padded, and nothing waits for the
device.

Shape legend: B examples, n non-sequence tokens, T event tokens of a stream over the batch (CLS rows included once they
are there), d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gemattn import JaggedAttention, SharedQueryPooling, make_schedule
from gemattn.kernels.schedule import Schedule
from gemattn.nn import MaskedFusion, position_angles, time_angles
from gemattn.spec import Impl
from models.features import EventStream, FeatureSchema
from models.heads import TaskHeads
from models.inputs import EventFeatures, Events, FieldTokens, candidate_mates, segment_of
from models.interaction import Gate, LinearCompression, PersonalizedFeedForward, WukongLayer
from models.jagged import prepend, rows_from_end, rows_from_start
from models.taste import TasteMatch, taste_tables


@dataclass(frozen=True)
class StreamConfig:
    """What may differ from stream to stream.

    Args:
        num_heads: attention heads.
        window: tokens that an event sees on either side of itself; None: all of its sequence.
        num_seeds: learned queries that pool the stream (PMA).
        num_recent: latest events that enter the summary as they are.
        tokens: whether the events become tokens; without, taste alone reads the stream, at little cost for its length.
        num_tastes: weighted sums of the events that the candidate is held against, see `TasteMatch`; 0 for none. Of a
            stream that shares no table with the candidate there are none.
    """

    num_heads: int = 2
    window: int | None = None
    num_seeds: int = 2
    num_recent: int = 0
    tokens: bool = True
    num_tastes: int = 1

    def __post_init__(self) -> None:
        if self.num_tastes < 0:
            raise ValueError(f"num_tastes must be at least 0, got {self.num_tastes}")


@dataclass(frozen=True)
class GemConfig:
    """Sizes of the model. Published GEM has no public dimensions; the defaults fit a data set of 100,000 events.

    Args:
        embedding_dim: width of every table but those of taste.
        embedding_scale: of the tables at the start, see `models.inputs.table_std`.
        dim: d, width of the tokens.
        num_layers: InterFormer layers.
        num_sum: n_sum, tokens of X_sum and CLS rows before each sequence.
        stream: of streams that ``streams`` does not name.
        streams: stream name -> its own config.
        rotary: what turns queries and keys: the log age of the events (ROTE), their position (RoPE), or nothing.
        time_scale: seconds; ages are told apart linearly below it, by their ratio above it.
        num_similarities: inner products with the candidate that an event has for each feature they share.
        taste_dim: width of the tables of taste, see `taste_tables`.
        taste_std: of a match at the start; small, so that taste counts only once it has been learned.
        dense_hidden: width between the two layers that make a token of the dense floats.
        fusion_hidden: width between the layers of the event encoder's two perceptrons.
        ffn_dim: hidden width of the personalised feed-forward, see `PersonalizedFeedForward`.
        interaction_rank: k of Wukong.
        interaction_hidden: widths between the layers of Wukong's MLP.
        head_hidden: widths between the layers of each task's head.
        dropout: within Wukong's MLP and the heads.
        token_dropout: of the two residual branches on event tokens.
        field_dropout: of the entries of the non-sequence tokens.
    """

    embedding_dim: int = 32
    embedding_scale: float = 2.0
    dim: int = 32
    num_layers: int = 1
    num_sum: int = 2
    stream: StreamConfig = StreamConfig()
    streams: Mapping[str, StreamConfig] = field(default_factory=dict)
    rotary: Literal["time", "position", "none"] = "time"
    time_scale: float = 60.0
    num_similarities: int = 4
    taste_dim: int = 16
    taste_std: float = 0.1
    dense_hidden: int = 64
    fusion_hidden: int = 32
    ffn_dim: int = 64
    interaction_rank: int = 4
    interaction_hidden: tuple[int, ...] = (128,)
    head_hidden: tuple[int, ...] = (64,)
    dropout: float = 0.1
    token_dropout: float = 0.0
    field_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_sum < 1:
            raise ValueError(
                f"num_layers and num_sum must be at least 1, got num_layers={self.num_layers}, num_sum={self.num_sum}"
            )
        if self.rotary not in ("time", "position", "none"):
            raise ValueError(f"rotary is {self.rotary!r}, wanted 'time', 'position' or 'none'")


class StreamTokens(NamedTuple):
    """A stream within the model: event tokens behind the CLS rows of their example."""

    values: Tensor
    """(T, d)."""
    offsets: Tensor
    """(B + 1,)."""
    segment: Tensor
    """(T,) the example of each row."""
    angles: Tensor | None
    """(T, D / 2) rotary angles of one head."""
    schedule: Schedule | None
    pooling_schedule: Schedule | None


class FieldSummary(nn.Module):
    """``X_sum = Gate(LCE(X))``."""

    def __init__(self, num_tokens: int, num_sum: int, dim: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.compression = LinearCompression(num_tokens, num_sum, device=device)
        self.gate = Gate(dim, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_sum, d)."""
        return self.gate(self.compression(x))


class SequenceSummary(nn.Module):
    """``S_sum = Gate([CLS || PMA || recent K])``."""

    def __init__(
        self, dim: int, num_sum: int, config: StreamConfig, *, impl: Impl, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.num_sum, self.num_recent = num_sum, config.num_recent
        self.num_tokens = num_sum + config.num_seeds + config.num_recent
        self.norm = nn.LayerNorm(dim, device=device)
        self.pooling = SharedQueryPooling(dim, config.num_heads, config.num_seeds, device=device, impl=impl)
        self.gate = Gate(dim, device=device)

    def forward(self, stream: StreamTokens) -> Tensor:
        """(B, num_tokens, d); an example without events has its CLS rows, what PMA reads from them, and zeros."""
        parts = [rows_from_start(stream.values, stream.offsets, self.num_sum)]
        normed = (self.norm(stream.values), stream.offsets)
        parts.append(self.pooling(normed, rotary=stream.angles, schedule=stream.pooling_schedule))
        if self.num_recent:
            parts.append(rows_from_end(stream.values, stream.offsets, self.num_recent, skip=self.num_sum))
        return self.gate(torch.cat(parts, dim=1))


class SequenceBlock(nn.Module):
    """``S' = S + MHA(S + PFFN(X_sum, S))``, pre-norm: the sequence side of an InterFormer layer."""

    def __init__(
        self, config: GemConfig, stream: StreamConfig, *, impl: Impl, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        window = None if stream.window is None else (stream.window, stream.window)
        self.feed_forward_norm = nn.LayerNorm(config.dim, device=device)
        self.feed_forward = PersonalizedFeedForward(config.dim, config.ffn_dim, config.num_sum, device=device)
        self.attention_norm = nn.LayerNorm(config.dim, device=device)
        self.attention = JaggedAttention(config.dim, stream.num_heads, window=window, device=device, impl=impl)
        self.dropout = nn.Dropout(config.token_dropout)

    def forward(self, x_sum: Tensor, stream: StreamTokens) -> StreamTokens:
        """(B, n_sum, d) and a stream -> the stream with other values."""
        tokens = stream.values
        update = self.feed_forward(x_sum, self.feed_forward_norm(tokens), stream.segment)
        tokens = tokens + self.dropout(update)
        normed = (self.attention_norm(tokens), stream.offsets)
        update, _ = self.attention(normed, rotary=stream.angles, schedule=stream.schedule)
        return stream._replace(values=tokens + self.dropout(update))


class InterFormerLayer(nn.Module):
    """One exchange between the two sides; see the head of this file."""

    def __init__(
        self,
        num_tokens: int,
        streams: Mapping[str, StreamConfig],
        config: GemConfig,
        *,
        impl: Impl,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.summary = Summary(num_tokens, streams, config, impl=impl, device=device)
        self.blocks = nn.ModuleDict(
            {name: SequenceBlock(config, stream, impl=impl, device=device) for name, stream in streams.items()}
        )
        self.interaction = WukongLayer(
            num_tokens + self.summary.num_sequence_tokens,
            config.dim,
            num_products=num_tokens - num_tokens // 2,
            num_linear=num_tokens // 2,
            rank=config.interaction_rank,
            hidden_dims=config.interaction_hidden,
            dropout=config.dropout,
            device=device,
        )

    def forward(self, x: Tensor, streams: dict[str, StreamTokens]) -> tuple[Tensor, dict[str, StreamTokens]]:
        """X (B, n, d) and the streams, to X' and S'."""
        x_sum, s_sum = self.summary(x, streams)
        streams = {name: block(x_sum, streams[name]) for name, block in self.blocks.items()}
        return self.interaction(torch.cat([x, s_sum], dim=1)), streams


class Summary(nn.Module):
    """X_sum of the non-sequence tokens, and S_sum of all streams side by side."""

    def __init__(
        self,
        num_tokens: int,
        streams: Mapping[str, StreamConfig],
        config: GemConfig,
        *,
        impl: Impl,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.fields = FieldSummary(num_tokens, config.num_sum, config.dim, device=device)
        self.sequences = nn.ModuleDict(
            {
                name: SequenceSummary(config.dim, config.num_sum, stream, impl=impl, device=device)
                for name, stream in streams.items()
            }
        )
        self.num_sequence_tokens = sum(summary.num_tokens for summary in self.sequences.values())

    def forward(self, x: Tensor, streams: dict[str, StreamTokens]) -> tuple[Tensor, Tensor]:
        """X_sum (B, n_sum, d) and S_sum (B, num_sequence_tokens, d)."""
        summaries = [summary(streams[name]) for name, summary in self.sequences.items()]
        return self.fields(x), torch.cat([x[:, :0], *summaries], dim=1)


class Gem(nn.Module):
    """Everything of the GEM-like model but the tables.

    Args:
        schema: of the data.
        config: sizes.
        impl: of the attention, as in `gemattn.jagged_attention`.
        device: "meta" builds without memory; `reset_parameters` then gives the values.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        config: GemConfig,
        *,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        unknown = sorted(set(config.streams) - set(schema.stream_names))
        if unknown:
            raise ValueError(f"GemConfig.streams names {unknown}, the schema has streams {list(schema.stream_names)}")
        self.config, self.impl = config, impl
        stream_configs = {name: config.streams.get(name, config.stream) for name in schema.stream_names}
        streams = {name: stream for name, stream in stream_configs.items() if stream.tokens}
        self.fields = FieldTokens(
            schema,
            embedding_dim=config.embedding_dim,
            dim=config.dim,
            dense_hidden=config.dense_hidden,
            dropout=config.field_dropout,
            device=device,
        )
        self.encoders = nn.ModuleDict(
            {
                stream.name: EventEncoder(schema, stream, config, device=device)
                for stream in schema.streams
                if stream.name in streams
            }
        )
        self.layers = nn.ModuleList(
            InterFormerLayer(self.fields.num_tokens, streams, config, impl=impl, device=device)
            for _ in range(config.num_layers)
        )
        self.summary = Summary(self.fields.num_tokens, streams, config, impl=impl, device=device)
        self.stream_configs = streams
        weighed = [s for s in schema.streams if stream_configs[s.name].num_tastes and candidate_mates(schema, s)]
        self.tastes = nn.ModuleDict(
            {
                stream.name: TasteMatch(
                    schema,
                    stream,
                    num_tastes=stream_configs[stream.name].num_tastes,
                    embedding_dim=config.embedding_dim,
                    embedding_scale=config.embedding_scale,
                    taste_dim=config.taste_dim,
                    taste_std=config.taste_std,
                    time_scale=config.time_scale,
                    hidden_dim=config.fusion_hidden,
                    device=device,
                )
                for stream in weighed
            }
        )
        self.taste_tables = taste_tables(schema, weighed)
        read = {key for stream in schema.streams if stream.name in streams for key in stream.keys}
        read.update(key for taste in self.tastes.values() for key in taste.outcome_keys)
        self.event_keys = (*schema.candidate_keys, *(key for key in schema.event_keys if key in read))
        width = config.dim * (config.num_sum + self.summary.num_sequence_tokens)
        num_matches = sum(taste.width for taste in self.tastes.values())
        width += config.dim * self.fields.num_tokens + num_matches
        self.heads = TaskHeads(
            width, schema.tasks, hidden_dims=config.head_hidden, dropout=config.dropout, device=device
        )
        self.direct = nn.Linear(num_matches, len(schema.tasks), bias=False, device=device) if num_matches else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A better match speaks for every task at the start; the modules below have reset themselves."""
        if self.direct is not None:
            nn.init.constant_(self.direct.weight, self.direct.in_features**-0.5)

    def forward(self, dense: Tensor, pooled: Any, embedded: Any, ages: Any, vectors: Any = None) -> Tensor:
        """(B, K) logits.

        Args:
            dense: (B, number of dense features).
            pooled: `KeyedTensor` of the sparse fields; None where the schema has none.
            embedded: {key: JaggedTensor} of the candidate and the events.
            ages: `KeyedJaggedTensor` of seconds.
            vectors: {key: JaggedTensor} of the tables of taste; None where there are none.
        """
        x = fields = self.fields(dense, pooled, embedded)
        cls = self.layers[0].summary.fields(x)
        matches = [taste(embedded, vectors, ages) for taste in self.tastes.values()]
        streams = {}
        for name, encoder in self.encoders.items():
            events, tokens = encoder(embedded, ages)
            streams[name] = self._begin(events, tokens, cls, self.stream_configs[name])
        for layer in self.layers:
            x, streams = layer(x, streams)
        x_sum, s_sum = self.summary(x, streams)
        logits = self.heads(torch.cat([torch.cat([fields, x_sum, s_sum], dim=1).flatten(1), *matches], dim=1))
        return logits if self.direct is None else logits + self.direct(torch.cat(matches, dim=1))

    def _begin(self, events: Events, tokens: Tensor, cls: Tensor, config: StreamConfig) -> StreamTokens:
        values, offsets, row = prepend(tokens, events.offsets, events.segment, cls)
        num_rows = values.shape[0]
        segment = segment_of(offsets, num_rows)
        head_dim = self.config.dim // config.num_heads
        angles = None
        if self.config.rotary == "position":
            angles = position_angles(offsets, num_rows, head_dim)
        elif self.config.rotary == "time":
            # The CLS rows stand at the time of the example: age 0, angle 0.
            angles = time_angles(events.ages, head_dim, self.config.time_scale)
            angles = angles.new_zeros(num_rows, angles.shape[1]).index_copy_(0, row, angles)
        schedule = pooling_schedule = None
        if self.impl in ("triton", "tlx") or (self.impl == "auto" and values.is_cuda):
            schedule = make_schedule(offsets, query_rows=num_rows)
            pooling_schedule = make_schedule(
                None, offsets, query_rows=config.num_seeds, key_rows=num_rows, shared_query=True
            )
        return StreamTokens(values, offsets, segment, angles, schedule, pooling_schedule)


class EventEncoder(nn.Module):
    """Aligned embeddings, products with the candidate and time -> one token an event."""

    def __init__(
        self,
        schema: FeatureSchema,
        stream: EventStream,
        config: GemConfig,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = EventFeatures(
            schema,
            stream,
            embedding_dim=config.embedding_dim,
            embedding_scale=config.embedding_scale,
            time_scale=config.time_scale,
            num_similarities=config.num_similarities,
        )
        self.fusion = MaskedFusion(
            self.features.width,
            config.dim,
            hidden_dim=config.fusion_hidden,
            mask_dim=config.fusion_hidden,
            device=device,
        )
        self.norm = nn.LayerNorm(config.dim, device=device)

    def forward(self, embedded: Any, ages: Any) -> tuple[Events, Tensor]:
        """The stream's events, and their tokens (T, d)."""
        events = self.features(embedded, ages)
        return events, self.norm(self.fusion(events.features))
