"""The attention of the padded twin: SDPA with a key mask, put in the place of `jagged_attention` in the modules.

Modules of `gemattn.nn` and `models` call a global of their own named `jagged_attention`; while `padded_attention` is
active it is another function. Everything else of the model runs as it is, on the padded batch's rows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gemattn import attention
from gemattn.bench.model_inputs import StepInputs


@contextlib.contextmanager
def padded_attention(inputs: StepInputs) -> Iterator[None]:
    """Replace the operator by `PaddedAttention` in every module that has taken it by name."""
    original = attention.jagged_attention
    replacement = PaddedAttention(inputs)
    places = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("gemattn.nn", "models")) and getattr(module, "jagged_attention", None) is original
    ]
    for module in places:
        module.jagged_attention = replacement  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in places:
            module.jagged_attention = original  # type: ignore[attr-defined]


class PaddedAttention:
    """`jagged_attention` for a batch whose sequences are all as long within a stream.

    A call holds the B sequences of one stream, known by its length, or those of all streams one after another. Tokens
    that a model puts before the events (CLS) make sequences longer than the stream's L by the same few rows; they are
    seen by everyone, as in the jagged model.
    """

    def __init__(self, inputs: StepInputs) -> None:
        self.limits = inputs.limits
        self.lengths = inputs.lengths
        self.batch = len(inputs.jagged)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_offsets: Tensor | None = None,
        kv_offsets: Tensor | None = None,
        *,
        shared_query: bool = False,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """out as `jagged_attention` gives it, for the padded rows too."""
        offsets = q_offsets if kv_offsets is None else kv_offsets
        assert offsets is not None
        sequences = offsets.shape[0] - 1
        parts = self._streams(sequences, key.shape[0])
        out, row, q_row = [], 0, 0
        for name, length in parts:
            rows = self.batch * length
            k, v = (self._heads_first(x[row : row + rows], length) for x in (key, value))
            if shared_query:
                q_length = query.shape[0]
                q = query.transpose(0, 1).expand(self.batch, -1, -1, -1)
            else:
                # In self-attention as long as the keys, else as many rows a sequence.
                q_length = length if query.shape[0] == key.shape[0] else query.shape[0] // sequences
                q = self._heads_first(query[q_row : q_row + self.batch * q_length], q_length)
            mask = self._mask(name, q_length, length, causal, window)
            gqa = q.shape[1] != k.shape[1]
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
            out.append(result.transpose(1, 2).flatten(0, 1))
            row, q_row = row + rows, q_row + self.batch * q_length
        return torch.cat(out)

    def _heads_first(self, x: Tensor, length: int) -> Tensor:
        return x.unflatten(0, (self.batch, length)).transpose(1, 2)

    def _streams(self, sequences: int, rows: int) -> list[tuple[str, int]]:
        """(name, rows a sequence) of the streams in a call.

        Raises:
            ValueError: the call fits no stream.
        """
        each = rows // self.batch
        if sequences == self.batch:
            fitting = [name for name, limit in self.limits.items() if limit <= each]
            if fitting:
                return [(max(fitting, key=lambda name: self.limits[name]), each)]
        elif sequences == self.batch * len(self.limits):
            extra, rest = divmod(each - sum(self.limits.values()), len(self.limits))
            if extra >= 0 and rest == 0:
                return [(name, limit + extra) for name, limit in self.limits.items()]
        raise ValueError(
            f"an attention call of {sequences} sequences and {rows} key rows fits no stream of {self.limits} "
            f"at batch {self.batch}: the padded twin of this model cannot be measured"
        )

    def _mask(
        self, name: str, q_length: int, length: int, causal: bool, window: tuple[int | None, int | None] | None
    ) -> Tensor:
        """(B, 1, 1 or q_length, length) bool: rows before the events and the true events, within the window.

        The window counts places of the jagged sequence, in which the events follow the rows before them at once.
        """
        lengths = self.lengths[name][:, None]
        index = torch.arange(length, device=lengths.device)
        extra, added = length - self.limits[name], self.limits[name] - lengths
        mask = ((index < extra) | (index >= extra + added))[:, None, None]
        left, right = window or (None, None)
        right = 0 if causal else right
        place = torch.where(index < extra, index, index - added)
        row = place
        if q_length != length:  # bottom-right: the last query stands at the last key
            row = torch.arange(q_length, device=lengths.device) + (lengths + extra - q_length)
        distance = (place[:, None] - row[..., None])[:, None]  # (B, 1, q_length, length)
        if left is not None:
            mask = mask & (distance >= -left)
        if right is not None:
            mask = mask & (distance <= right)
        return mask
