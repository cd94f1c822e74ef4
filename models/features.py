"""What the models read: the schema of a data set's features, and one batch of examples.

A loader (``examples/data``) promises a `FeatureSchema` and yields `Batch` objects that keep it; a model is built from
the schema alone. Nothing here knows a data set, a model or a device.

Shape legend: B examples, F features, T events of one stream summed over the batch, K tasks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

UNKNOWN_ID = 0
"""The id every table keeps for a value that was not seen in training (or was dropped on purpose)."""

CANDIDATE = "candidate"


def _check_name(what: str, name: object) -> None:
    # Names become keys of nn.ModuleDict and parts of "stream.feature": no dots, no blanks.
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{what} must be a Python identifier (letters, digits, underscores), got {name!r}")


def _check_unique(what: str, names: tuple[str, ...]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{what} must differ, but {repeated} came more than once in {list(names)}")


@dataclass(frozen=True)
class IdFeature:
    """A categorical feature: ids ``0 .. num_ids - 1`` into one embedding table; id 0 means unknown.

    Args:
        name: the feature's name, an identifier.
        num_ids: rows of its table.
        table: the table's name (default: the feature's own name). Features that name one table share it and must agree
            on ``num_ids``.
    """

    name: str
    num_ids: int
    table: str | None = None

    def __post_init__(self) -> None:
        _check_name("IdFeature.name", self.name)
        if isinstance(self.num_ids, bool) or not isinstance(self.num_ids, int) or self.num_ids < 1:
            raise ValueError(f"IdFeature {self.name!r}: num_ids must be an int of at least 1, got {self.num_ids!r}")
        if self.table is not None:
            _check_name(f"IdFeature {self.name!r}: table", self.table)

    @property
    def table_name(self) -> str:
        """The table's name: ``table``, or by default the feature's own name."""
        return self.name if self.table is None else self.table


@dataclass(frozen=True)
class EventStream:
    """One kind of event of a user (ratings, clicks, ...): every event carries one id of each feature, in time order.

    In a `KeyedJaggedTensor` the features are the keys ``f"{stream}.{feature}"``; they are aligned: their lengths agree.
    """

    name: str
    features: tuple[IdFeature, ...]

    def __post_init__(self) -> None:
        _check_name("EventStream.name", self.name)
        if self.name == CANDIDATE:
            raise ValueError(f"EventStream.name {CANDIDATE!r} is taken by the candidate's own features")
        if not self.features:
            raise ValueError(f"EventStream {self.name!r}: needs at least one feature")
        _check_unique(f"EventStream {self.name!r}: feature names", tuple(f.name for f in self.features))

    @property
    def keys(self) -> tuple[str, ...]:
        """The stream's keys of ``Batch.events``, in order."""
        return tuple(f"{self.name}.{feature.name}" for feature in self.features)


@dataclass(frozen=True)
class FeatureSchema:
    """Everything about the inputs that a model is built from.

    Args:
        dense: names of the float features, in the order of the columns of ``Batch.dense``.
        ids: features that are not sequences, single- or multi-valued; pooled by an ``EmbeddingBagCollection``.
        candidate: features of the item in question, exactly one id an example. They are embedded by the same
            ``EmbeddingCollection`` as the streams, so that a candidate and a past event can share a table.
        streams: the event streams of a user.
        tasks: names of the labels, in the order of the columns of ``Batch.labels``.

    Raises:
        ValueError: repeated names; one table with two sizes; a table used both by ``ids`` and by ``candidate`` or
            ``streams`` (TorchRec keeps pooled and sequence tables in two modules, so such a table would not be shared).
    """

    dense: tuple[str, ...]
    ids: tuple[IdFeature, ...]
    candidate: tuple[IdFeature, ...]
    streams: tuple[EventStream, ...]
    tasks: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("FeatureSchema.tasks: needs at least one task")
        _check_unique("FeatureSchema.dense: names", self.dense)
        _check_unique("FeatureSchema.ids: names", self.id_keys)
        _check_unique("FeatureSchema.candidate: names", tuple(f.name for f in self.candidate))
        _check_unique("FeatureSchema.streams: names", tuple(s.name for s in self.streams))
        _check_unique("FeatureSchema.tasks: names", self.tasks)
        both = sorted(self.id_tables().keys() & self.event_tables().keys())
        if both:
            raise ValueError(
                f"tables {both} are named by FeatureSchema.ids and by candidate or streams; pooled and sequence tables "
                "live in two modules and cannot be shared: give one side another `table` name"
            )

    @property
    def id_keys(self) -> tuple[str, ...]:
        """Keys of ``Batch.ids``, in order."""
        return tuple(feature.name for feature in self.ids)

    @property
    def candidate_keys(self) -> tuple[str, ...]:
        """The candidate's keys of ``Batch.events``, in order."""
        return tuple(f"{CANDIDATE}.{feature.name}" for feature in self.candidate)

    @property
    def event_keys(self) -> tuple[str, ...]:
        """Keys of ``Batch.events``, in order: the candidate's, then each stream's."""
        return tuple(key for key, _ in self.event_features())

    @property
    def stream_names(self) -> tuple[str, ...]:
        """Keys of ``Batch.ages``, in order."""
        return tuple(stream.name for stream in self.streams)

    def event_features(self) -> Iterator[tuple[str, IdFeature]]:
        """(key, feature) of everything the ``EmbeddingCollection`` embeds, in the order of ``event_keys``."""
        yield from zip(self.candidate_keys, self.candidate, strict=True)
        for stream in self.streams:
            yield from zip(stream.keys, stream.features, strict=True)

    def id_tables(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Pooled tables: name -> (rows, keys of ``Batch.ids`` that use it)."""
        return _group_by_table((feature.name, feature) for feature in self.ids)

    def event_tables(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Sequence tables: name -> (rows, keys of ``Batch.events`` that use it)."""
        return _group_by_table(self.event_features())


def _group_by_table(features: Iterator[tuple[str, IdFeature]]) -> dict[str, tuple[int, tuple[str, ...]]]:
    tables: dict[str, tuple[int, tuple[str, ...]]] = {}
    for key, feature in features:
        rows, keys = tables.get(feature.table_name, (feature.num_ids, ()))
        if rows != feature.num_ids:
            raise ValueError(
                f"table {feature.table_name!r} has {rows} ids for {list(keys)} but {feature.num_ids} for {key!r}: "
                "features that share a table must agree on num_ids"
            )
        tables[feature.table_name] = (rows, (*keys, key))
    return tables


@dataclass
class Batch(Pipelineable):
    """B examples. All parts are on one device; B = 0 and empty histories are ordinary.

    Attributes:
        dense: (B, len(schema.dense)) float32.
        ids: int64 values, keys ``schema.id_keys``; any number of ids an example.
        events: int64 values, keys ``schema.event_keys``; candidate keys have length 1 everywhere, the keys of one
            stream have equal lengths, oldest event first.
        ages: float32 values, keys ``schema.stream_names``: seconds from the event to the example, > 0; the lengths are
            those of the stream's ids.
        labels: (B, K) float32, 0 or 1.
        weights: (B,) float32, >= 0; weight 0 takes an example out of the loss and of the metrics.
    """

    dense: Tensor
    ids: KeyedJaggedTensor
    events: KeyedJaggedTensor
    ages: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """A copy on this device."""
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            ids=self.ids.to(device, non_blocking=non_blocking),
            events=self.events.to(device, non_blocking=non_blocking),
            ages=self.ages.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of every part until ``stream`` has done what is queued on it."""
        for part in (self.dense, self.ids, self.events, self.ages, self.labels, self.weights):
            part.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, which a GPU can fetch while it computes."""
        return Batch(
            dense=self.dense.pin_memory(),
            ids=self.ids.pin_memory(),
            events=self.events.pin_memory(),
            ages=self.ages.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
        )


def check_batch(batch: Batch, schema: FeatureSchema) -> None:
    """Holds a CPU batch against its schema; embedding kernels read out of bounds on a bad id instead of raising.

    Raises:
        ValueError: naming the feature, what came and what is wanted: keys, shapes, ids outside their table, a candidate
            without exactly one id, streams whose features are not aligned, ages that are not positive, labels that are
            neither 0 nor 1, weights that are negative or not finite.
    """
    size = len(batch)
    for name, part, width in (("dense", batch.dense, len(schema.dense)), ("labels", batch.labels, len(schema.tasks))):
        if part.shape != (size, width) or part.dtype != torch.float32:
            raise ValueError(f"batch.{name}: wanted float32 ({size}, {width}), got {part.dtype} {tuple(part.shape)}")
    if batch.weights.shape != (size,) or batch.weights.dtype != torch.float32:
        got = f"{batch.weights.dtype} {tuple(batch.weights.shape)}"
        raise ValueError(f"batch.weights: wanted float32 ({size},), got {got}")
    check_labels(batch.labels, schema.tasks)
    if not bool((batch.weights >= 0).all() & batch.weights.isfinite().all()):
        raise ValueError("batch.weights: wanted finite weights of at least 0")
    if not bool(batch.dense.isfinite().all()):
        column = int((~batch.dense.isfinite()).any(dim=0).nonzero()[0])
        raise ValueError(f"batch.dense: feature {schema.dense[column]!r} holds a value that is not finite")
    for name, kjt, keys in (
        ("ids", batch.ids, schema.id_keys),
        ("events", batch.events, schema.event_keys),
        ("ages", batch.ages, schema.stream_names),
    ):
        if tuple(kjt.keys()) != keys:
            raise ValueError(f"batch.{name}: wanted keys {list(keys)}, got {list(kjt.keys())}")
        if kjt.stride() != size:
            raise ValueError(f"batch.{name}: wanted {size} examples a key, got {kjt.stride()}")
    _check_ids(batch.ids, {feature.name: feature for feature in schema.ids})
    _check_ids(batch.events, dict(schema.event_features()))
    lengths = dict(zip(schema.event_keys, batch.events.lengths().view(len(schema.event_keys), size), strict=True))
    age_lengths = dict(zip(schema.stream_names, batch.ages.lengths().view(len(schema.streams), size), strict=True))
    for key in schema.candidate_keys:
        if not bool((lengths[key] == 1).all()):
            raise ValueError(
                f"batch.events: {key!r} must have exactly one id an example, got {lengths[key].unique().tolist()}"
            )
    for stream in schema.streams:
        for key in stream.keys:
            if not torch.equal(lengths[key], age_lengths[stream.name]):
                raise ValueError(
                    f"batch.events: the lengths of {key!r} differ from batch.ages' for stream {stream.name!r}"
                )
    if not bool((batch.ages.values() > 0).all()):
        raise ValueError("batch.ages: every event must be strictly earlier than its example (age > 0 seconds)")


def check_labels(labels: Tensor, tasks: tuple[str, ...]) -> None:
    """Raises ValueError naming the first task and example whose label is neither 0 nor 1."""
    bad = ((labels != 0) & (labels != 1)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"labels: task {tasks[column]!r}, example {row}: wanted 0 or 1, got {labels[row, column].item()}"
        )


def _check_ids(kjt: KeyedJaggedTensor, features: dict[str, IdFeature]) -> None:
    for key, feature in features.items():
        check_ids(key, kjt[key].values(), feature)


def check_ids(key: str, ids: Tensor, feature: IdFeature) -> None:
    """Raises ValueError naming ``key``, the first id outside the feature's table, and the table with its size."""
    outside = ((ids < 0) | (ids >= feature.num_ids)).nonzero()
    if len(outside):
        raise ValueError(
            f"feature {key!r}: id {ids[outside[0, 0]].item()} is outside table {feature.table_name!r} of "
            f"{feature.num_ids} ids (0 to {feature.num_ids - 1})"
        )
