"""The tile lists that jagged kernels walk, built on the device without a host sync.

A jagged batch has a number of tiles that only the device knows. The list of a kernel's programs therefore has a length
known from shapes alone, ``T // BLOCK + B + 2``, which no batch exceeds: every segment adds at most one partial tile to
its full ones, and there are B sequences and two stretches of slack rows. What is left over is marked unused.
"""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Rows of one record. Kernels with smaller tiles split a record, so one schedule serves every kernel."""

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None  # a graph could not hold the question

LENGTH_CLASSES = (512, 256, 128)
"""Lengths at which kernels change their tiles: what a sequence gets depends on its own lengths alone."""


class Schedule(NamedTuple):
    """Tiles of one batch, shared by every layer and by backward. Tensors only, all on one device.

    A record ``(segment, block, rows, work)`` covers rows ``[block * BLOCK, (block + 1) * BLOCK)`` of its segment, as
    far as the segment's ``rows`` reach; ``work`` is the sequence's length on the other side. Segments ``0 .. B - 1``
    are the sequences, ``B`` is the slack before the first sequence, ``B + 1`` the slack after the last one, ``-1`` an
    unused record. Every row of the tensors is in exactly one record, so a kernel that walks the list writes its whole
    output. Records of the sequences with the most work come first.
    """

    q_offsets: Tensor
    """(B + 1,) int64, clamped to [0, query rows] and monotone; with a shared query ``arange(B + 1) * S``."""
    kv_offsets: Tensor
    """(B + 1,) int64, clamped to [0, key rows] and monotone."""
    q_tiles: Tensor
    """(query rows // BLOCK + B + 2, 4) int32 records over the rows of the output."""
    kv_tiles: Tensor
    """(key rows // BLOCK + B + 2, 4) int32 records over the rows of key and value."""
    q_longer: Tensor
    """(3,) int32: how many records of ``q_tiles``, the first ones, have more work than each of LENGTH_CLASSES."""
    kv_longer: Tensor
    """(3,) int32: the same for ``kv_tiles``."""

    def check(
        self, *, sequences: int, query_rows: int, key_rows: int, shared_query: bool, device: torch.device
    ) -> None:
        """Raise ValueError unless these shapes are what `make_schedule` gives for such a batch. No sync.

        The values are not looked at: kernels stay inside their tensors whatever a schedule holds. `check_values` does.
        """
        out_rows = query_rows * sequences if shared_query else query_rows
        wanted = (
            ("q_offsets", self.q_offsets, torch.int64, (sequences + 1,)),
            ("kv_offsets", self.kv_offsets, torch.int64, (sequences + 1,)),
            ("q_tiles", self.q_tiles, torch.int32, (num_records(out_rows, sequences), 4)),
            ("kv_tiles", self.kv_tiles, torch.int32, (num_records(key_rows, sequences), 4)),
            ("q_longer", self.q_longer, torch.int32, (len(LENGTH_CLASSES),)),
            ("kv_longer", self.kv_longer, torch.int32, (len(LENGTH_CLASSES),)),
        )
        for name, tensor, dtype, shape in wanted:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"schedule.{name} is {type(tensor).__name__}; want a tensor")
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(
                    f"schedule.{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; {sequences} sequences, "
                    f"{query_rows} query rows and {key_rows} key rows want {dtype} of shape {shape}: "
                    "was the schedule made of another batch?"
                )
            if tensor.device != device:
                raise ValueError(f"schedule.{name} is on {tensor.device}; want the tensors' device {device}")

    def check_values(self, wanted: "Schedule") -> None:
        """Raise ValueError unless this holds what `wanted`, made of the batch at hand, holds. Syncs."""
        for name, ours, theirs in zip(self._fields, self, wanted, strict=True):
            if ours.dim() == 2:  # the order of records is a matter of speed
                ours, theirs = (((x[:, 0].long() << 32) + x[:, 1]).sort().values for x in (ours, theirs))
            if not torch.equal(ours, theirs):
                raise ValueError(
                    f"schedule.{name} is not that of these offsets: was the schedule made of another batch?"
                )


def num_records(rows: int, num_sequences: int) -> int:
    """Length of the tile list of a tensor of ``rows`` rows and ``num_sequences`` sequences."""
    return rows // BLOCK + num_sequences + 2


def make_schedule(
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None = None,
    *,
    query_rows: int,
    key_rows: int | None = None,
    shared_query: bool = False,
) -> Schedule:
    """Build the tile lists of one batch. No host sync, on CPU and CUDA; may be captured in a CUDA graph.

    Args:
        q_offsets: (B + 1,) int32 or int64 prefix sums of the query lengths. None exactly when ``shared_query``.
        kv_offsets: the same for keys and values; None in self-attention. Required with ``shared_query``.
        query_rows: ``query.shape[0]``: T_q, or S with ``shared_query``.
        key_rows: ``key.shape[0]``; None in self-attention, where it is ``query_rows``.
        shared_query: the same ``query_rows`` rows ask every sequence.

    Offsets that leave [0, rows] or decrease are clamped and made monotone, so nothing outside the tensors is touched.

    Raises:
        TypeError: offsets that are no strided int32 or int64 tensors, row counts that are no integers,
            a ``shared_query`` that is no bool.
        ValueError: missing or superfluous arguments, wrong rank, different devices or different B.
    """
    if not isinstance(shared_query, bool):
        raise TypeError(f"shared_query is a {type(shared_query).__name__}; want a bool")
    if shared_query:
        if q_offsets is not None:
            raise ValueError("q_offsets must be None with shared_query=True: every sequence has the same query rows")
        if kv_offsets is None:
            raise ValueError("kv_offsets is None; shared_query=True needs the offsets of the keys")
    elif q_offsets is None:
        raise ValueError("q_offsets is None; only shared_query=True goes without it")
    query_rows = _checked_rows("query_rows", query_rows)
    if key_rows is None:
        if kv_offsets is not None and kv_offsets is not q_offsets:
            raise ValueError("key_rows is None; it is needed when kv_offsets differs from q_offsets")
        key_rows = query_rows
    key_rows = _checked_rows("key_rows", key_rows)
    self_attention = not shared_query and (kv_offsets is None or kv_offsets is q_offsets) and key_rows == query_rows

    if q_offsets is not None:
        _check_offsets("q_offsets", q_offsets)
    if kv_offsets is not None:
        _check_offsets("kv_offsets", kv_offsets)
    if q_offsets is not None and kv_offsets is not None and kv_offsets is not q_offsets:
        if kv_offsets.device != q_offsets.device:
            raise ValueError(f"kv_offsets is on {kv_offsets.device}, q_offsets on {q_offsets.device}; want one device")
        if kv_offsets.shape != q_offsets.shape:
            raise ValueError(
                f"kv_offsets has {kv_offsets.shape[0]} entries, q_offsets {q_offsets.shape[0]}; want B + 1 in both"
            )

    kv = q_offsets if kv_offsets is None else kv_offsets
    assert kv is not None
    if self_attention:
        assert q_offsets is not None
        offsets, _, tiles, _, longer, _ = _build(q_offsets, q_offsets, query_rows, key_rows)
        return Schedule(offsets, offsets, tiles, tiles, longer, longer)
    return Schedule(*_build(q_offsets, kv, query_rows, key_rows))


def _build(q_offsets: Tensor | None, kv_offsets: Tensor, query_rows: int, key_rows: int) -> tuple[Tensor, ...]:
    """The fields of a `Schedule`; the key side is of no meaning where both offsets are one tensor."""
    if kv_offsets.device.type == "cuda" and _TRITON_INSTALLED:
        return _tile_lists(q_offsets, kv_offsets, query_rows, key_rows)
    kv_starts = sanitize_offsets(kv_offsets, key_rows)
    kv_lengths = kv_starts.diff()
    if q_offsets is kv_offsets:
        tiles, longer = _tiles(kv_starts, kv_lengths, kv_lengths, key_rows)
        return kv_starts, kv_starts, tiles, tiles, longer, longer
    if q_offsets is None:
        sequences = kv_starts.shape[0] - 1
        q_starts = torch.arange(sequences + 1, device=kv_offsets.device) * query_rows
        q_lengths = torch.full((sequences,), query_rows, dtype=torch.int64, device=kv_offsets.device)
        out_rows = sequences * query_rows
    else:
        q_starts = sanitize_offsets(q_offsets, query_rows)
        q_lengths = q_starts.diff()
        out_rows = query_rows
    q_tiles, q_longer = _tiles(q_starts, q_lengths, kv_lengths, out_rows)
    kv_tiles, kv_longer = _tiles(kv_starts, kv_lengths, q_lengths, key_rows)
    return q_starts, kv_starts, q_tiles, kv_tiles, q_longer, kv_longer


@torch.library.custom_op("gemattn::tile_lists", mutates_args=())
def _tile_lists(
    q_offsets: Tensor | None, kv_offsets: Tensor, query_rows: int, key_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_build` in one launch; an operator, so that graphs hold it as it is."""
    from gemattn.kernels.triton.tile_list import tile_lists

    sequences = kv_offsets.shape[0] - 1
    rows = query_rows * sequences if q_offsets is None else query_rows
    counts = num_records(rows, sequences), num_records(key_rows, sequences)
    return tile_lists(q_offsets, kv_offsets, rows, key_rows, *counts, BLOCK)


@_tile_lists.register_fake
def _(q_offsets: Tensor | None, kv_offsets: Tensor, query_rows: int, key_rows: int) -> tuple[Tensor, ...]:
    sequences = kv_offsets.shape[0] - 1
    rows = query_rows * sequences if q_offsets is None else query_rows
    starts = kv_offsets.new_empty(sequences + 1, dtype=torch.int64)
    tiles = kv_offsets.new_empty((num_records(rows, sequences), 4), dtype=torch.int32)
    kv_tiles = kv_offsets.new_empty((num_records(key_rows, sequences), 4), dtype=torch.int32)
    longer = kv_offsets.new_empty(len(LENGTH_CLASSES), dtype=torch.int32)
    return starts, torch.empty_like(starts), tiles, kv_tiles, longer, torch.empty_like(longer)


def _checked_rows(name: str, rows: int) -> int:
    # Under torch.compile and torch.export a size may be a SymInt, of which no property may be asked here.
    if isinstance(rows, torch.SymInt):
        return rows
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"{name} is {type(rows).__name__}; want an int, the number of rows of the tensor")
    if rows < 0:
        raise ValueError(f"{name} is {rows}; want at least 0")
    return rows


def _check_offsets(name: str, offsets: Tensor) -> None:
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} is {type(offsets).__name__}; want a tensor of prefix sums")
    if offsets.layout != torch.strided:
        raise TypeError(f"{name} is of layout {offsets.layout}; want torch.strided")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {offsets.dtype}; want torch.int32 or torch.int64")
    if offsets.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}; want one dimension of B + 1 entries")
    if offsets.shape[0] == 0:
        raise ValueError(f"{name} is empty; want B + 1 entries, one even without any sequence")


def sanitize_offsets(offsets: Tensor, rows: int) -> Tensor:
    """Offsets in [0, rows], monotone, int64. No sync."""
    return offsets.to(torch.int64).clamp(0, rows).cummax(0).values


def _tiles(offsets: Tensor, lengths: Tensor, work: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(num_records, 4) int32 records of the segments, those with the most ``work`` first, slack last; and ``longer``.

    ``work`` (B,) is the length of the other side: the number of rows that each row of the sequence meets.
    """
    num_sequences = lengths.shape[0]
    slack = torch.stack((offsets[0], rows - offsets[-1]))
    lengths, work = torch.cat((lengths, slack)), torch.cat((work, torch.full_like(slack, -1)))
    blocks = (lengths + (BLOCK - 1)) // BLOCK
    # A stable order keeps equal sequences in the order of the batch: neighbours in memory, neighbours on the device.
    order = work.argsort(descending=True, stable=True)
    ends = blocks.gather(0, order).cumsum(0)
    record = torch.arange(num_records(rows, num_sequences), device=offsets.device)
    place = torch.searchsorted(ends, record, right=True)
    used = place < num_sequences + 2
    place = place.clamp(max=num_sequences + 1)
    segment = order.gather(0, place)
    block = record - (ends.gather(0, place) - blocks.gather(0, segment))
    fields = torch.stack((segment, block, lengths.gather(0, segment), work.gather(0, segment).clamp(min=0)), dim=1)
    tiles = torch.where(used[:, None], fields, torch.tensor((-1, 0, 0, 0), device=offsets.device))
    is_longer = work > torch.tensor(LENGTH_CLASSES, device=offsets.device)[:, None]
    return tiles.to(torch.int32), (is_longer * blocks).sum(1).to(torch.int32)
