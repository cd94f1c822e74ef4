"""FlexAttention over the packed batch, with a block mask that keeps sequences apart."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, copied_query, needs_cuda
from gemattn.bench.providers.padded import free_bytes


class Flex(Provider):
    """One long sequence whose mask lets a query see its own sequence's keys."""

    def absent(self, device: torch.device) -> str | None:
        """No GPU, or a torch without it."""
        if reason := needs_cuda(device):
            return reason
        try:
            importlib.import_module("torch.nn.attention.flex_attention")
        except ImportError as error:
            return f"torch {torch.__version__} has no flex_attention: {error}"
        return None

    def refuses(self, case: Case) -> str | None:
        """The memory of the dense mask that the block mask is made from."""
        need, free = mask_bytes(case), free_bytes(case.query.device)
        return (
            None if need <= free else f"its block mask needs {need / 2**30:,.0f} GiB, {free / 2**30:.0f} GiB are free"
        )

    def prepare(self, case: Case) -> Prepared:
        """The block mask is built once a batch."""
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        shape = case.shape
        q_sequence, q_position = coordinates(case.out_offsets, case.kv_offsets, int(case.q_lengths.sum()))
        kv_sequence, kv_position = coordinates(case.kv_offsets, case.kv_offsets, int(case.kv_lengths.sum()))
        left, right = shape.window or (None, None)
        right = 0 if shape.causal else right

        def visible(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            mask = q_sequence[i] == kv_sequence[j]
            if left is not None:
                mask = mask & (kv_position[j] >= q_position[i] - left)
            if right is not None:
                mask = mask & (kv_position[j] <= q_position[i] + right)
            return mask

        def build() -> object:
            rows, keys = q_sequence.shape[0], kv_sequence.shape[0]
            return flex.create_block_mask(visible, None, None, rows, keys, device=str(case.query.device))

        block_mask = build()
        compiled = torch.compile(flex.flex_attention, dynamic=False)

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (copied_query(case, query), key, value))
            out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=shape.groups != shape.heads)
            return out[0].transpose(0, 1)

        return Prepared(call, build)


def coordinates(offsets: Tensor, kv_offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(rows,) sequence of each row, and its position aligned with the last key of the sequence (bottom-right)."""
    index = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(offsets, index, right=True) - 1
    shift = kv_offsets.diff() - offsets.diff()
    return sequence, index - offsets[sequence] + shift[sequence]


def mask_bytes(case: Case) -> int:
    """`create_block_mask` evaluates the mask for every pair of the packed batch: a boolean, and one temporary."""
    return 2 * int(case.q_lengths.sum()) * int(case.kv_lengths.sum())
