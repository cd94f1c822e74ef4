"""SDPA on padded tensors, by cuDNN or by what PyTorch chooses, the conversion from and to jagged ones counted."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemattn.bench.case import Case
from gemattn.bench.providers.base import Prepared, Provider, needs_cuda


class PaddedSdpa(Provider):
    """Pad, attend, take the valid rows. Padded keys are hidden by a mask unless causality or equal lengths do it."""

    def __init__(self, backend: str | None = None) -> None:
        self.backend = None if backend is None else SDPBackend.__members__[backend]

    def absent(self, device: torch.device) -> str | None:
        """No GPU or no cuDNN, where that is asked for."""
        if self.backend is None:
            return None
        if reason := needs_cuda(device):
            return reason
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def version(self) -> str:
        """PyTorch's and cuDNN's."""
        return f"torch {torch.__version__}" + (
            "" if self.backend is None else f", cuDNN {torch.backends.cudnn.version()}"
        )

    def refuses(self, case: Case) -> str | None:
        """A window (SDPA would need a dense mask of every pair), or too little memory."""
        if case.shape.window is not None:
            return "SDPA has no window without a dense mask of every pair"
        need, free = padded_bytes(case), free_bytes(case.query.device)
        return None if need <= free else f"needs {need / 2**30:.0f} GiB padded, {free / 2**30:.0f} GiB are free"

    def prepare(self, case: Case) -> Prepared:
        """The rows' places and the mask, where one is needed, are built once a batch."""
        batch, q_length, kv_length = case.shape.sequences, int(case.q_lengths.max()), int(case.kv_lengths.max())

        def build() -> tuple[Tensor, Tensor, Tensor | None]:
            device = case.query.device
            mask = None if mask_free(case) else key_mask(case.kv_offsets.diff(), kv_length)
            return (
                padded_rows(case.out_offsets, int(case.q_lengths.sum()), q_length).to(device),
                padded_rows(case.kv_offsets, int(case.kv_lengths.sum()), kv_length).to(device),
                mask,
            )

        q_rows, kv_rows, mask = build()

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=case.shape.causal,
                    enable_gqa=case.shape.groups != case.shape.heads,
                )

        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            nonlocal mask
            if case.shape.shared_rows is None:
                q = pad(query, q_rows, batch, q_length)
            else:
                q = query.transpose(0, 1).expand(batch, -1, -1, -1).contiguous()
            k, v = (pad(x, kv_rows, batch, kv_length) for x in (key, value))
            try:
                out = attend(q, k, v)
            except RuntimeError:
                if mask is None or mask.shape[2] == q_length:
                    raise
                # Some versions of cuDNN take no mask that is broadcast over the query rows.
                mask = mask.expand(-1, -1, q_length, -1).contiguous()
                out = attend(q, k, v)
            return out.transpose(1, 2).reshape(-1, *query.shape[1:]).index_select(0, q_rows)

        return Prepared(call, build)


def mask_free(case: Case) -> bool:
    """Whether no valid row would see a padded key: keys all as long, or causal self-attention."""
    return (case.shape.causal and case.shape.key is None) or bool((case.kv_lengths == case.kv_lengths[0]).all())


def padded_rows(offsets: Tensor, rows: int, length: int) -> Tensor:
    """(rows,) int64: where row i of the jagged tensor lies in the padded one, seen as (B * length) rows."""
    index = torch.arange(rows, device=offsets.device)
    sequence = torch.searchsorted(offsets, index, right=True) - 1
    return index - offsets[sequence] + sequence * length


def key_mask(lengths: Tensor, length: int) -> Tensor:
    """(B, 1, 1, length) bool, true where a key is valid."""
    return (torch.arange(length, device=lengths.device) < lengths[:, None])[:, None, None]


def pad(x: Tensor, rows: Tensor, batch: int, length: int) -> Tensor:
    """(T, H, D) -> (B, H, length, D), zeros where padded."""
    padded = x.new_zeros(batch * length, *x.shape[1:]).index_copy(0, rows, x)
    return padded.view(batch, length, *x.shape[1:]).transpose(1, 2)


def padded_bytes(case: Case) -> int:
    """Device memory that forward and backward take beyond the inputs: two copies of each padded tensor and of its
    gradient (one on its way in, one on its way out), and a bfloat16 mask of all pairs where one may be needed.
    """
    shape = case.shape
    batch, q_length, kv_length = shape.sequences, int(case.q_lengths.max()), int(case.kv_lengths.max())
    row = shape.head_dim * case.query.element_size()
    tensors = batch * row * (4 * q_length * shape.heads + 4 * kv_length * shape.groups)
    mask = 0 if mask_free(case) else 2 * batch * q_length * kv_length
    return 2 * tensors + mask


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor may take on the device: what the driver has left and what PyTorch holds unused."""
    if device.type != "cuda":
        return 1 << 40
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
