"""A data set in memory, and its batches by index arithmetic alone.

`EventData` holds flat arrays; example n's history in a stream is one slice of that stream's events, found once on load.
A batch is a gather, one to two milliseconds for 512 examples of 50 events, so no worker processes are needed.

Shape legend: N examples, E events of a stream, D dense features, K tasks, B examples of a batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.features import UNKNOWN_ID, Batch, FeatureSchema, check_ids, check_labels

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Any number of ids an example: example n has ``values[offsets[n]:offsets[n + 1]]``."""

    values: Ints
    offsets: Ints

    @staticmethod
    def single(values: Ints) -> "Ragged":
        """One id an example."""
        return Ragged(values, np.arange(len(values) + 1))


@dataclass(frozen=True)
class StreamData:
    """The events of one stream, and which of them each example may see.

    Attributes:
        ids: one (E,) array a feature of the stream, in schema order.
        times: (E,) seconds.
        begin, end: (N,) example n sees events ``[begin[n], end[n])``, the latest last, all strictly earlier than it.
    """

    ids: tuple[Ints, ...]
    times: Ints
    begin: Ints
    end: Ints

    def recent(self, max_events: int) -> "StreamData":
        """The same with every history cut to its latest ``max_events``."""
        return StreamData(self.ids, self.times, np.maximum(self.begin, self.end - max_events), self.end)


def _gather_slices(begin: Ints, lengths: Ints) -> Ints:
    """Positions ``begin[i] .. begin[i] + lengths[i] - 1`` for every i, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begin - ends + lengths, lengths)


@dataclass(frozen=True)
class EventData:
    """Examples with their histories, checked against the schema on construction.

    Attributes:
        users: (N,) whose example it is; not a feature, it groups the examples for statistics.
        times: (N,) seconds.
        dense: (N, D) float32.
        ids: one `Ragged` a feature of ``schema.ids``.
        candidate: one (N,) array a feature of ``schema.candidate``.
        streams: one `StreamData` a stream of the schema.
        labels: (N, K) float32 of 0 and 1.
        weights: (N,) float32.
        splits: "train", "valid" and "test": which examples belong to each, in time order.

    Raises:
        ValueError: naming the feature, id and table of an id outside its table; the task and example of a label that is
            neither 0 nor 1; the stream and example of a history that is not in
            time order or not strictly earlier than its example.
    """

    schema: FeatureSchema
    users: Ints
    times: Ints
    dense: NDArray[np.float32]
    ids: tuple[Ragged, ...]
    candidate: tuple[Ints, ...]
    streams: tuple[StreamData, ...]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    splits: Mapping[str, Ints] = field(repr=False)

    def __post_init__(self) -> None:
        schema = self.schema
        for feature, ragged in zip(schema.ids, self.ids, strict=True):
            check_ids(feature.name, torch.from_numpy(ragged.values), feature)
        columns = [*self.candidate, *(ids for stream in self.streams for ids in stream.ids)]
        for (key, feature), ids in zip(schema.event_features(), columns, strict=True):
            check_ids(key, torch.from_numpy(ids), feature)
        check_labels(torch.from_numpy(self.labels), schema.tasks)
        if self.dense.shape != (len(self), len(schema.dense)):
            raise ValueError(f"dense: wanted ({len(self)}, {len(schema.dense)}), got {self.dense.shape}")
        if not np.isfinite(self.dense).all():
            column = int((~np.isfinite(self.dense)).any(axis=0).argmax())
            raise ValueError(f"dense: feature {schema.dense[column]!r} holds a value that is not finite")
        for name in ("train", "valid", "test"):
            if not len(self.splits[name]):
                raise ValueError(f"split {name!r} has no examples")
        for spec, stream in zip(schema.streams, self.streams, strict=True):
            leak = find_leak(stream, self.times)
            if leak is not None:
                raise ValueError(
                    f"stream {spec.name!r}: the history of example {leak} must be in time order and strictly earlier "
                    f"than the example's time {self.times[leak]}"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, examples: Ints, dropped: Mapping[str, NDArray[np.bool_]] | None = None) -> Batch:
        """The examples of these indices, in this order.

        Args:
            examples: (B,) indices, 0 <= index < N; B = 0 gives an empty batch.
            dropped: feature of ``schema.ids`` -> (B,) where to put the unknown id in place of the feature's ids.
        """
        lengths = [stream.end[examples] - stream.begin[examples] for stream in self.streams]
        positions = [
            _gather_slices(stream.begin[examples], length) for stream, length in zip(self.streams, lengths, strict=True)
        ]
        return Batch(
            dense=torch.from_numpy(self.dense[examples]),
            ids=self._ids(examples, dropped or {}),
            events=self._events(examples, lengths, positions),
            ages=self._ages(examples, lengths, positions),
            labels=torch.from_numpy(self.labels[examples]),
            weights=torch.from_numpy(self.weights[examples]),
        )

    def _ids(self, examples: Ints, dropped: Mapping[str, NDArray[np.bool_]]) -> KeyedJaggedTensor:
        values, lengths = [], []
        for feature, ragged in zip(self.schema.ids, self.ids, strict=True):
            begin = ragged.offsets[examples]
            length = ragged.offsets[examples + 1] - begin
            ids = ragged.values[_gather_slices(begin, length)]
            if feature.name in dropped:
                ids[np.repeat(dropped[feature.name], length)] = UNKNOWN_ID
            values.append(ids)
            lengths.append(length)
        return _keyed(self.schema.id_keys, values, lengths, np.int64)

    def _events(self, examples: Ints, lengths: list[Ints], positions: list[Ints]) -> KeyedJaggedTensor:
        all_values = [ids[examples] for ids in self.candidate]
        all_lengths = [np.ones(len(examples), dtype=np.int64) for _ in self.candidate]
        for stream, length, position in zip(self.streams, lengths, positions, strict=True):
            all_values += [ids[position] for ids in stream.ids]
            all_lengths += [length for _ in stream.ids]
        return _keyed(self.schema.event_keys, all_values, all_lengths, np.int64)

    def _ages(self, examples: Ints, lengths: list[Ints], positions: list[Ints]) -> KeyedJaggedTensor:
        values = [
            np.repeat(self.times[examples], length) - stream.times[position]
            for stream, length, position in zip(self.streams, lengths, positions, strict=True)
        ]
        return _keyed(self.schema.stream_names, values, lengths, np.float32)


def find_leak(stream: StreamData, times: Ints) -> int | None:
    """The first example whose history is not in time order or not strictly earlier than its time; None if none is."""
    held = np.flatnonzero(stream.end > stream.begin)
    first, last = stream.begin[held], stream.end[held] - 1
    # Descents before each event: a slice in time order has none inside, and then its last event is its latest.
    descents = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.diff(stream.times) < 0)])
    bad = held[(descents[last] > descents[first]) | (stream.times[last] >= times[held])]
    return int(bad[0]) if len(bad) else None


def _keyed(keys: tuple[str, ...], values: list[Ints], lengths: list[Ints], dtype: type) -> KeyedJaggedTensor:
    empty = np.empty(0, dtype=np.int64)
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(np.concatenate([empty, *values]).astype(dtype, copy=False)),
        lengths=torch.from_numpy(np.concatenate([empty, *lengths])),
    )


@dataclass(frozen=True)
class Batches:
    """One rank's batches of a split; iterate anew for each epoch.

    Every rank gets the same number of batches, whatever their sizes: the examples are cut into global batches of
    ``batch_size * world_size``, and each of those, the last short one included, is shared out evenly, so no rank ever
    waits for one that has finished. A rank that is left without an example gets one of weight 0, which adds nothing to
    loss, gradients or metrics: TorchRec's EmbeddingCollection cannot take a batch of none.

    Args:
        batch_size: examples a rank and batch.
        shuffle: a new order each epoch, the same on all ranks, drawn from ``seed`` and the epoch.
        id_dropout: feature of ``schema.ids`` -> probability to replace its ids by the unknown id, drawn anew an epoch.
    """

    data: EventData
    split: str
    batch_size: int
    shuffle: bool = False
    id_dropout: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        unknown = sorted(set(self.id_dropout) - set(self.data.schema.id_keys))
        if unknown:
            raise ValueError(f"id_dropout names {unknown}, the schema has ids {list(self.data.schema.id_keys)}")

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return -(-len(self.data.splits[self.split]) // (self.batch_size * self.world_size))

    @property
    def num_examples(self) -> int:
        """Examples an epoch over all ranks."""
        return len(self.data.splits[self.split])

    def examples_in(self, start: int, stop: int) -> int:
        """Examples of batches ``start`` to ``stop``, over all ranks."""
        step = self.batch_size * self.world_size
        return min(stop * step, self.num_examples) - min(start * step, self.num_examples)

    def epoch(self, epoch: int = 0, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """This rank's batches ``start`` to ``stop`` (the last one) of an epoch; nothing depends on those before."""
        examples = self.examples(epoch)
        dropped = self._dropped(epoch)
        for part in islice(self._parts(), start, stop):
            idle = part.stop == part.start
            chosen = examples[part.start : part.start + 1] if idle else examples[part]
            batch = self.data.batch(chosen, {name: drop[chosen] for name, drop in dropped.items()})
            if idle:
                batch.weights.zero_()
            yield batch.pin_memory() if self.pin_memory else batch

    def examples(self, epoch: int = 0) -> Ints:
        """All examples of the split in the order of this epoch (of all ranks)."""
        examples = self.data.splits[self.split]
        if self.shuffle:
            examples = np.random.default_rng([self.seed, epoch, 0]).permutation(examples)
        return examples

    def own_examples(self, epoch: int = 0) -> Ints:
        """This rank's examples in the order in which `epoch` yields them, without the one of weight 0 at the end."""
        examples = self.examples(epoch)
        return np.concatenate([examples[:0], *(examples[part] for part in self._parts())])

    def _parts(self) -> Iterator[slice]:
        step = self.batch_size * self.world_size
        for low in range(0, self.num_examples, step):
            size = min(step, self.num_examples - low)
            yield slice(low + size * self.rank // self.world_size, low + size * (self.rank + 1) // self.world_size)

    def _dropped(self, epoch: int) -> dict[str, NDArray[np.bool_]]:
        # Drawn an example, not a batch: the same whatever the batch size, the rank or the batch an epoch resumes from.
        return {
            name: np.random.default_rng([self.seed, epoch, 1 + i]).random(len(self.data)) < probability
            for i, (name, probability) in enumerate(sorted(self.id_dropout.items()))
        }
