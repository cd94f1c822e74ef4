"""Clause 6: strides."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemattn.testing.conformance.clause import clause, over
from gemattn.testing.conformance.subject import DTYPES, Subject, verify
from gemattn.testing.inputs import JaggedInputs


def fused_views(inputs: JaggedInputs) -> dict[str, Tensor]:
    """query, key and value as views (T, H, D) of one (T, H + 2 G, D) projection."""
    heads, kv_heads = inputs.query.shape[1], inputs.key.shape[1]
    fused = torch.cat((inputs.query, inputs.key, inputs.value), dim=1)
    return dict(zip(("query", "key", "value"), fused.split([heads, kv_heads, kv_heads], dim=1), strict=True))


def _layouts(inputs: JaggedInputs) -> dict[str, dict[str, Any]]:
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "dout")}
    spaced = {name: x.new_zeros(2 * x.shape[0], *x.shape[1:]) for name, x in tensors.items()}
    for name, x in tensors.items():
        spaced[name][::2] = x
    return {
        "views of one projection": fused_views(inputs),
        "heads first": {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in tensors.items()},
        "columns first": {name: x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for name, x in tensors.items()},
        "every other row": {name: x[::2] for name, x in spaced.items()},
        "transposed dlse": {"dlse": inputs.dlse.T.contiguous().T if inputs.dlse is not None else None},
    }


@clause(6, cases=over(dtype=DTYPES), owed="kernels")
def strides(subject: Subject, dtype: torch.dtype) -> None:
    """Views of one fused projection and any other strides give, bitwise, what contiguous tensors give."""
    inputs = subject.inputs([20, 7], heads=2, kv_heads=1, dtype=dtype)
    expected = subject.run(inputs)
    for about, changes in _layouts(inputs).items():
        subject.assert_all_same(subject.run(replace(inputs, **changes)), expected, about)
    one = torch.tensor(1.5, device=subject.device)
    expanded: dict[str, Tensor] = {"dout": one.to(dtype).expand(inputs.query.shape), "dlse": one.expand(2, 27)}
    filled = {name: x.contiguous() for name, x in expanded.items()}
    expected = subject.run(replace(inputs, **filled))
    subject.assert_all_same(subject.run(replace(inputs, **expanded)), expected, "expanded gradients")


@clause(6, cases=over(backward=(False, True)), owed="kernels", gpus=1)
def no_copies(subject: Subject, backward: bool) -> None:
    """Views of one fused projection are not copied: with them the memory high-water mark rises by what it rises by with
    tensors of their own, and forward by the results alone."""
    heads, head_dim, rows = 4, 64, 1 << 16
    inputs = subject.inputs([rows], heads=heads, head_dim=head_dim, dtype=torch.bfloat16)
    tensor = inputs.query.numel() * inputs.query.element_size()

    def rise(tensors: Sequence[Tensor]) -> float:
        """In tensors of query's size."""
        query, key, value = (x.detach().requires_grad_(backward) for x in tensors)
        out = subject.function(query, key, value, inputs.q_offsets)

        def step() -> Any:
            if backward:
                return torch.autograd.grad(out, (query, key, value), inputs.dout, retain_graph=True)
            return subject.function(query, key, value, inputs.q_offsets)

        step()  # compiles
        torch.cuda.synchronize(subject.device)
        before = torch.cuda.memory_allocated(subject.device)
        torch.cuda.reset_peak_memory_stats(subject.device)
        kept = step()
        torch.cuda.synchronize(subject.device)
        peak = torch.cuda.max_memory_allocated(subject.device)
        del kept
        return (peak - before) / tensor

    views = list(fused_views(inputs).values())
    of_views, of_copies = rise(views), rise([x.contiguous() for x in views])
    verify(of_views <= of_copies + 0.25, f"memory rose by {of_views:.2f} tensors, {of_copies:.2f} without views")
    verify(backward or of_views <= 1.5, f"memory rose by {of_views:.2f} tensors of query's size, allowed 1.5")
