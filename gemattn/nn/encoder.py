"""`EventEncoder`: streams of aligned ids, embedded by TorchRec and fused into one token an event."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gemattn import rec
from gemattn.nn.attention import check_size


class MaskedFusion(nn.Module):
    """``S = MLP_lce(S_cat * (1 + MLP_mask(S_cat)))``: W concatenated features -> one token of width d.

    The event encoder of InterFormer (arXiv 2411.09852), after MaskNet (arXiv 2102.07619): the mask lets the features of
    an event weigh one another by products before they are mixed linearly. The 1 could hide in the last bias of the
    mask; written out, it lets fresh embeddings through, which a mask around 0 would all but remove.

    Args:
        in_dim: W, width of the features of an event, concatenated.
        out_dim: d.
        hidden_dim: between the two layers of MLP_lce; default 2 d.
        mask_dim: between the two layers of MLP_mask; default W.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        hidden_dim: int | None = None,
        mask_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_dim = 2 * out_dim if hidden_dim is None else hidden_dim
        mask_dim = in_dim if mask_dim is None else mask_dim
        sizes = {"in_dim": in_dim, "out_dim": out_dim, "hidden_dim": hidden_dim, "mask_dim": mask_dim}
        for name, size in sizes.items():
            check_size(name, size)

        def linear(width_in: int, width_out: int) -> nn.Linear:
            return nn.Linear(width_in, width_out, device=device, dtype=dtype)

        self.mask_up, self.mask_down = linear(in_dim, mask_dim), linear(mask_dim, in_dim)
        self.lce_up, self.lce_down = linear(in_dim, hidden_dim), linear(hidden_dim, out_dim)

    def reset_parameters(self) -> None:
        """PyTorch's own initial values of every layer."""
        for linear in (self.mask_up, self.mask_down, self.lce_up, self.lce_down):
            linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(T, W) -> (T, d)."""
        mask = 1 + self.mask_down(F.relu(self.mask_up(x)))
        return self.lce_down(F.relu(self.lce_up(x * mask)))


class EventEncoder(nn.Module):
    """A `KeyedJaggedTensor` of ids -> ``{stream: JaggedTensor of tokens (T, output_dim)}``.

    An event of a stream has one id of each of the stream's features, so the keys ``f"{stream}.{feature}"`` have equal
    lengths. Their embeddings are concatenated on the feature axis and fused by `MaskedFusion`, one a stream. Stream and
    feature names may not hold a dot.

    The tables are a TorchRec `EmbeddingCollection` and a submodule: DistributedModelParallel shards it, and the train
    pipelines find it.

    Args:
        embedding_collection: knows every key; one embedding size for all.
        streams: stream name -> names of its features.
        output_dim: d, width of the tokens.
        hidden_dim, mask_dim: of `MaskedFusion`.
        side_dim: floats an event has besides its ids (its log age, say): they pass a linear layer and are added. 0:
            none.
        device, dtype: of the layers made here (not of the tables).

    Parameters: ``embedding_collection``, ``fusion.{stream}`` and, with side inputs, ``side.{stream}``.

    Raises:
        ValueError: a key that no table has, or that several tables have (its name is then ambiguous); bad names or
        sizes.

    Example:
        >>> encoder = EventEncoder.from_tables(
        ...     [EmbeddingConfig(name="item", num_embeddings=1000, embedding_dim=16, feature_names=["clicks.item"]),
        ...      EmbeddingConfig(name="shop", num_embeddings=50, embedding_dim=16, feature_names=["clicks.shop"])],
        ...     {"clicks": ("item", "shop")}, output_dim=64)
        >>> encoder(ids)["clicks"].values()  # (T, 64)
    """

    def __init__(
        self,
        embedding_collection: Any,
        streams: Mapping[str, Sequence[str]],
        output_dim: int,
        *,
        hidden_dim: int | None = None,
        mask_dim: int | None = None,
        side_dim: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not streams:
            raise ValueError("streams is empty, wanted at least one stream of features")
        if isinstance(side_dim, bool) or not isinstance(side_dim, int) or side_dim < 0:
            raise ValueError(f"side_dim is {side_dim!r}, wanted an int of at least 0")
        known = [name for names in embedding_collection.embedding_names_by_table() for name in names]
        self.stream_keys: dict[str, tuple[str, ...]] = {}
        for stream, features in streams.items():
            if isinstance(features, str) or not features:
                raise ValueError(f"streams[{stream!r}] is {features!r}, wanted a sequence of feature names")
            for name in (stream, *features):
                if not name or "." in name:
                    raise ValueError(f"streams[{stream!r}]: {name!r} is no name, wanted one without a dot")
            if hasattr(nn.ModuleDict(), stream):
                raise ValueError(f"streams: {stream!r} is a method or attribute of nn.ModuleDict, wanted another name")
            self.stream_keys[stream] = keys = tuple(f"{stream}.{feature}" for feature in features)
            for key in keys:
                if key not in known:
                    raise ValueError(f"streams: no table has the feature {key!r}; the tables have {sorted(known)}")
        self.output_dim = output_dim
        self.side_dim = side_dim
        self.embedding_collection = embedding_collection
        width = embedding_collection.embedding_dim()
        self.fusion = nn.ModuleDict(
            {
                stream: MaskedFusion(
                    width * len(keys), output_dim, hidden_dim=hidden_dim, mask_dim=mask_dim, device=device, dtype=dtype
                )
                for stream, keys in self.stream_keys.items()
            }
        )
        self.side = nn.ModuleDict()
        if side_dim:
            for stream in self.stream_keys:
                self.side[stream] = nn.Linear(side_dim, output_dim, bias=False, device=device, dtype=dtype)

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[Any],
        streams: Mapping[str, Sequence[str]],
        output_dim: int,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> EventEncoder:
        """The encoder with an `EmbeddingCollection` of its own.

        Args:
            tables: `torchrec.modules.embedding_configs.EmbeddingConfig`; their feature names are
                ``f"{stream}.{feature}"``.
            device: of the tables and the layers.
            options: the other options of `EventEncoder`.
        """
        from torchrec.modules.embedding_modules import EmbeddingCollection

        device = None if device is None else torch.device(device)
        return cls(EmbeddingCollection(list(tables), device=device), streams, output_dim, device=device, **options)

    def reset_parameters(self) -> None:
        """Of the layers made here; tables are initialised by TorchRec, by the init_fn of their configs."""
        for module in (*self.fusion.values(), *self.side.values()):
            assert isinstance(module, MaskedFusion | nn.Linear)
            module.reset_parameters()

    def forward(self, events: Any, side: Any = None) -> dict[str, Any]:
        """Embed, then fuse.

        Args:
            events: `KeyedJaggedTensor` of ids; it may hold keys of tables that no stream names.
            side: with `side_dim`, {stream: (T, side_dim) floats}, or with ``side_dim=1`` a `KeyedJaggedTensor` of 1-D
                floats whose keys are the streams.

        Returns:
            {stream: `JaggedTensor` with values (T, output_dim)}; lengths and offsets are those of the stream's first
            key.

        Raises:
            ValueError: naming a missing key, features of a stream that are not aligned, or side inputs that do not fit.
                Lengths are compared, with a sync, only under ``GEMATTN_CHECK=1``; totals always.
        """
        _check_keys(events, self.stream_keys)
        # The id KJT goes to the collection untouched: train pipelines must be able to trace where it comes from.
        return self.fuse(self.embedding_collection(events), side)

    def fuse(self, embedded: Any, side: Any = None) -> dict[str, Any]:
        """The second half of `forward`, for embeddings that were looked up together with other features."""
        tokens = {}
        for stream, keys in self.stream_keys.items():
            x = self.fusion[stream](_concatenated(embedded, keys))
            if self.side_dim:
                x = x + self.side[stream](_side_of(side, stream, embedded, keys[0], self.side_dim))
            tokens[stream] = rec.repack(embedded[keys[0]], x)
        return tokens


def check_ids(kjt: Any, tables: Mapping[str, int] | Sequence[Any]) -> None:
    """Holds ids against their tables before they are looked up: embedding kernels read out of bounds on a bad id.

    Meant for batches that are still on the CPU; on a GPU it waits for the device.

    Args:
        kjt: `KeyedJaggedTensor` of ids. Rows past the last offset are not looked at.
        tables: {key: number of ids}, or TorchRec embedding configs. Keys that `kjt` lacks are ignored here.

    Raises:
        TypeError: the values are not integers.
        ValueError: naming the feature, the first id outside ``0 .. size - 1``, and the size; or a key without a table.
    """
    if isinstance(tables, Mapping):
        sizes = dict(tables)
    else:
        sizes = {key: table.num_embeddings for table in tables for key in table.feature_names}
    ids = kjt.values()
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"kjt has {ids.dtype} values, wanted int32 or int64 ids")
    ends = kjt.offset_per_key()
    for i, key in enumerate(kjt.keys()):
        if key not in sizes:
            raise ValueError(f"kjt has the feature {key!r}, which no table has; the tables have {sorted(sizes)}")
        part, size = ids[ends[i] : ends[i + 1]], sizes[key]
        if not part.numel():
            continue
        low, high = (x.item() for x in part.aminmax())
        if low < 0 or high >= size:
            first = part[(part < 0) | (part >= size)][0].item()
            raise ValueError(f"feature {key!r} has the id {first}, its table holds ids 0 to {size - 1}")


@torch.fx.wrap
def _check_keys(events: Any, stream_keys: dict[str, tuple[str, ...]]) -> None:
    present = set(events.keys())
    missing = [key for keys in stream_keys.values() for key in keys if key not in present]
    if missing:
        raise ValueError(f"events lacks the keys {missing}; it has {list(events.keys())}")


@torch.fx.wrap
def _concatenated(embedded: Any, keys: tuple[str, ...]) -> Tensor:
    """Embeddings of the aligned features of a stream, side by side: (T, F * width)."""
    first = embedded[keys[0]]
    for key in keys[1:]:
        count, wanted = embedded[key].values().shape[0], first.values().shape[0]
        if count != wanted:
            raise ValueError(f"events: {key!r} has {count} ids and {keys[0]!r} {wanted}, wanted as many in one stream")
        if os.environ.get("GEMATTN_CHECK") == "1" and not torch.equal(embedded[key].lengths(), first.lengths()):
            raise ValueError(f"events: the lengths of {key!r} and {keys[0]!r} differ, wanted equal ones in one stream")
    return torch.cat([embedded[key].values() for key in keys], dim=1)


@torch.fx.wrap
def _side_of(side: Any, stream: str, embedded: Any, key: str, width: int) -> Tensor:
    if side is None:
        raise ValueError(f"side is None, wanted {width} floats for every event of {stream!r}")
    if stream not in side.keys():  # noqa: SIM118 (a KeyedJaggedTensor has keys but no membership test)
        raise ValueError(f"side lacks the stream {stream!r}; it has {list(side.keys())}")
    floats = side[stream]
    floats = floats if isinstance(floats, Tensor) else floats.values()
    floats = floats.unsqueeze(1) if floats.dim() == 1 else floats
    rows = embedded[key].values().shape[0]
    if floats.shape != (rows, width):
        raise ValueError(f"side[{stream!r}] has shape {tuple(floats.shape)}, wanted ({rows}, {width}), a row an event")
    return floats
