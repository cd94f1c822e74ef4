"""The bridge between TorchRec's jagged types and what the operator takes: values and offsets.

TorchRec is not imported here. Its types are known by what they offer (`values`, `offsets`, `stride_per_key`), and a
result is built by the class of the object that came in.

Kinds of `sequences`, all of embedded tokens with values (T, E):

=========================  ============================  ==========================================================
kind                       sequences                     what comes back from `repack`
=========================  ============================  ==========================================================
`KeyedJaggedTensor`        F keys x batch B              same keys, weights, strides, lengths and offsets tensors
`JaggedTensor`             B                             same weights, lengths and offsets tensors
`dict[str, JaggedTensor]`  sum of the entries' B         same keys in the same order; each entry as a `JaggedTensor`
``(values, offsets)``      B                             (values, offsets), for use without TorchRec
=========================  ============================  ==========================================================

Whatever the kind, it is one launch. A `KeyedJaggedTensor` is one already: its offsets run over all keys, and strides
that differ by key do not matter to them. The entries of a dict (what an `EmbeddingCollection` gives) are concatenated:
one copy of the values, which buys one matrix product a projection, one attention launch and one schedule in place of
one an entry.

Everything is decided from shapes; nothing waits for the device. The functions are leaves for `torch.fx`, which cannot
follow the isinstance tests inside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemattn.attention import check_offset_values

GAP = 1024
"""Rows of slack between two entries of a dict that stand as one sequence, see `_concatenate`."""


class Tokens(NamedTuple):
    """What a layer works on."""

    values: Tensor
    """(T, E), slack rows cleared to 0."""
    offsets: Tensor
    """(n + 1,) int32 or int64."""
    inside: Tensor
    """(T, 1) bool: the row belongs to a sequence. False for slack."""


@torch.fx.wrap
def unpack(sequences: Any, *, width: int | None = None, name: str = "sequences") -> Tokens:
    """Values, offsets and the mask of rows that belong to a sequence.

    Args:
        sequences: any of the kinds above.
        width: E that the values must have.
        name: of the argument, for messages.

    Returns:
        `Tokens`. Slack rows (before ``offsets[0]``, past ``offsets[-1]``) are cleared, because a NaN there would reach
        the weight gradient of every linear layer that reads them (0 * NaN). For a dict, slack between two entries
        stands as sequences of its own, so that n may exceed the number of its sequences.

    Raises:
        TypeError: another kind, or values that are ids.
        ValueError: values that are not (T, width), offsets that are not (n + 1,), an empty dict.
    """
    keys, parts = _parts(sequences, width, name)
    return _join(keys, parts, [_gaps(part) for part in parts])


@torch.fx.wrap
def unpack_pair(sequences: Any, context: Any, *, width: int, context_width: int) -> tuple[Tokens, Tokens]:
    """`unpack` of queries and of the context they attend to; the context is `sequences` itself where it is None.

    Dicts are paired by key. Other kinds may be mixed (a `KeyedJaggedTensor` of one key and a `JaggedTensor`, say):
    sequence i attends to sequence i.

    Raises:
        TypeError, ValueError: as `unpack`; a dict with something else; keys or numbers of sequences that differ.
    """
    keys, parts = _parts(sequences, width, "sequences")
    if context is None:
        if context_width != width:
            raise ValueError(f"context is None, wanted tokens of context_dim {context_width} (embed_dim is {width})")
        tokens = _join(keys, parts, [_gaps(part) for part in parts])
        return tokens, tokens
    context_keys, context_parts = _parts(context, context_width, "context")
    if keys is None or context_keys is None:
        if keys is not context_keys:
            raise TypeError("one of sequences and context is a dict, wanted both or neither")
        pairs = list(zip(["context"], parts, context_parts, strict=True))
    else:
        if set(keys) != set(context_keys):
            raise ValueError(f"context has keys {sorted(context_keys)}, wanted those of sequences, {sorted(keys)}")
        by_key = dict(zip(context_keys, context_parts, strict=True))
        context_parts = [by_key[key] for key in keys]
        pairs = [(f"context[{key!r}]", a, b) for key, a, b in zip(keys, parts, context_parts, strict=True)]
    for where, (_, offsets), (_, context_offsets) in pairs:
        if offsets.shape[0] != context_offsets.shape[0]:
            raise ValueError(
                f"{where} has {context_offsets.shape[0] - 1} sequences, wanted the {offsets.shape[0] - 1} of sequences"
            )
    gaps = [max(_gaps(a), _gaps(b)) for _, a, b in pairs]
    return _join(keys, parts, gaps), _join(keys, context_parts, gaps)


@torch.fx.wrap
def repack(sequences: Any, values: Tensor) -> Any:
    """The kind of `sequences` with `values` (T, any width) in place of its own; everything else is the same object."""
    sequences = _waited(sequences)
    if isinstance(sequences, tuple):
        return values, sequences[1]
    if not isinstance(sequences, Mapping):
        return _with_values(sequences, values)
    rows = [entry.values().shape[0] for entry in sequences.values()]
    pieces = torch.split(values, rows)
    return {key: _with_values(entry, x) for (key, entry), x in zip(sequences.items(), pieces, strict=True)}


@torch.fx.wrap
def split_pooled(sequences: Any, pooled: Tensor) -> Tensor | dict[str, Tensor]:
    """(n, ...) of n sequences -> (B, ...); for a `KeyedJaggedTensor` or a dict {key: (B of that key, ...)}."""
    sequences = _waited(sequences)
    if isinstance(sequences, Mapping):
        result, start = {}, 0
        for key, entry in sequences.items():
            count = entry.offsets().shape[0] - 1
            result[key] = pooled[start : start + count]
            start += count + _gaps((entry.values(), entry.offsets())) + 1  # see `_concatenate`
        return result
    if hasattr(sequences, "stride_per_key"):
        return dict(zip(sequences.keys(), torch.split(pooled, sequences.stride_per_key()), strict=True))
    return pooled


@torch.fx.wrap
def join_rows(sequences: Any, rows: Any, *, name: str) -> Tensor | None:
    """A tensor that has a row a token, in the order of `unpack`: a dict of tensors is concatenated, a tensor is itself.

    Raises:
        ValueError: a dict with other keys or numbers of rows than `sequences`.
    """
    if not isinstance(rows, Mapping):
        return rows
    sequences = _waited(sequences)
    if not isinstance(sequences, Mapping) or set(rows) != set(sequences):
        wanted = f"a dict of the keys {sorted(sequences)}" if isinstance(sequences, Mapping) else "a tensor"
        raise ValueError(f"{name} is a dict of the keys {sorted(rows)}, wanted {wanted} like the tokens it belongs to")
    for key, entry in sequences.items():
        if rows[key].shape[0] != entry.values().shape[0]:
            raise ValueError(
                f"{name}[{key!r}] has {rows[key].shape[0]} rows, wanted {entry.values().shape[0]}, one a token"
            )
    return torch.cat([rows[key] for key in sequences])


def clear_slack(x: Tensor, inside: Tensor) -> Tensor:
    """x (T, ...) with 0 in the rows outside every sequence, whose incoming gradients (NaN too) are dropped."""
    return torch.where(inside, x, 0)


Part = tuple[Tensor, Tensor]
"""Values (T, E) and offsets (B + 1,) of a single jagged tensor."""


def _parts(sequences: Any, width: int | None, name: str) -> tuple[list[str] | None, list[Part]]:
    """The keys of a dict (None for the other kinds) and the jagged tensors within."""
    sequences = _waited(sequences)
    if isinstance(sequences, Mapping):
        if not sequences:
            raise ValueError(f"{name} is an empty dict, wanted at least one JaggedTensor")
        parts = [_part(entry, width, f"{name}[{key!r}]") for key, entry in sequences.items()]
        return list(sequences), parts
    return None, [_part(sequences, width, name)]


def _part(jagged: Any, width: int | None, name: str) -> Part:
    if isinstance(jagged, tuple) and len(jagged) == 2 and all(isinstance(x, Tensor) for x in jagged):
        values, offsets = jagged
    elif not isinstance(jagged, Tensor) and hasattr(jagged, "values") and hasattr(jagged, "offsets"):
        values, offsets = jagged.values(), jagged.offsets()
    else:
        raise TypeError(
            f"{name} is a {type(jagged).__name__}, wanted a KeyedJaggedTensor, a JaggedTensor, a dict of JaggedTensors "
            "or a tuple (values, offsets)"
        )
    if not values.is_floating_point():
        raise TypeError(
            f"{name} holds {values.dtype} ids, wanted embedded tokens (T, {'E' if width is None else width}): "
            "embed them first, with gemattn.nn.EventEncoder or TorchRec's EmbeddingCollection"
        )
    if values.dim() != 2 or (width is not None and values.shape[1] != width):
        shape = f"(T, {'E' if width is None else width})"
        hint = "" if values.dim() != 1 else ", embedded for example by gemattn.nn.EventEncoder"
        raise ValueError(f"{name} has values of shape {tuple(values.shape)}, wanted {shape}{hint}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} has offsets of shape {tuple(offsets.shape)}, wanted (B + 1,)")
    if offsets.device != values.device:
        raise ValueError(f"{name} has offsets on {offsets.device}, wanted the values' device {values.device}")
    return values, offsets


def _gaps(part: Part) -> int:
    return -(-part[0].shape[0] // GAP)


def _inside(values: Tensor, offsets: Tensor) -> Tensor:
    row = torch.arange(values.shape[0], device=offsets.device, dtype=offsets.dtype)
    return ((row >= offsets[0]) & (row < offsets[-1])).unsqueeze(1)


def _join(keys: list[str] | None, parts: list[Part], gaps: list[int]) -> Tokens:
    inside = torch.cat([_inside(*part) for part in parts]) if len(parts) > 1 else _inside(*parts[0])
    values, offsets = parts[0] if keys is None else _concatenate(keys, parts, gaps)
    return Tokens(clear_slack(values, inside), offsets, inside)


def _concatenate(keys: list[str], parts: list[Part], gaps: list[int]) -> Part:
    """One jagged tensor of the entries of a dict, one after another.

    An entry's slack, of a length that only the device knows, comes to lie between sequences. It stands there as
    sequences of its own, of at most GAP rows each so that a large buffer's slack does not cost the square of its size:
    as many as the entry's rows could need (`gaps`), most of them empty, and one for what the next entry has before its
    first offset. So an entry of B sequences takes B + gap + 1. Slack tokens are cleared and their results dropped.
    """
    offsets, base = [], 0
    for key, gap, (values, entry_offsets) in zip(keys, gaps, parts, strict=True):
        rows = values.shape[0]
        if os.environ.get("GEMATTN_CHECK") == "1":
            check_offset_values(f"offsets of {key!r}", entry_offsets, rows)
        # The kernels' own clamp would let a bad entry reach into its neighbour.
        entry = entry_offsets.to(torch.int64).clamp(0, rows)
        step = torch.arange(1, gap + 1, device=entry.device) * GAP
        offsets += [entry + base, (entry[-1] + step).clamp(max=rows) + base]
        base += rows
    return torch.cat([values for values, _ in parts]), torch.cat(offsets)


def _with_values(jagged: Any, values: Tensor) -> Any:
    if not hasattr(jagged, "stride_per_key"):
        return type(jagged)(
            values=values,
            weights=jagged.weights_or_none(),
            lengths=jagged.lengths_or_none(),
            offsets=jagged.offsets(),
        )
    variable = jagged.variable_stride_per_key()
    return type(jagged)(
        keys=jagged.keys(),
        values=values,
        weights=jagged.weights_or_none(),
        lengths=jagged.lengths_or_none(),
        offsets=jagged.offsets(),
        stride=jagged.stride(),
        stride_per_key=jagged.stride_per_key(),
        stride_per_key_per_rank=jagged.stride_per_key_per_rank() if variable else None,
        length_per_key=jagged.length_per_key_or_none(),
        offset_per_key=jagged.offset_per_key_or_none(),
        inverse_indices=jagged.inverse_indices_or_none(),
    )


def _waited(sequences: Any) -> Any:
    """What a sharded TorchRec module returned: a lazy object that stands for the dict it is still waiting for."""
    wait = getattr(type(sequences), "_wait_async", None)
    return sequences if wait is None else wait(sequences)
