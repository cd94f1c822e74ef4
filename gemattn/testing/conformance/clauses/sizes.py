"""Clauses 7 and 8: types and sizes."""

from dataclasses import replace

import torch

from gemattn.testing.conformance.clause import NotRunHere, clause, over
from gemattn.testing.conformance.subject import DTYPES, KINDS, MASKS, Subject, verify


@clause(7, cases=over(head_dim=range(16, 257, 8)))
def head_sizes(subject: Subject, head_dim: int) -> None:
    """D is any multiple of 8 from 16 to 256."""
    subject.check(subject.few("self", head_dim=head_dim, dtype=torch.bfloat16), causal=True)


@clause(7, cases=over(head_dim=(16, 24, 64, 128, 200, 256), dtype=(torch.float32, torch.float16, torch.bfloat16)))
def dtypes(subject: Subject, head_dim: int, dtype: torch.dtype) -> None:
    """float32, float16 and bfloat16, with narrow and wide heads."""
    subject.check(subject.few("cross", head_dim=head_dim, dtype=dtype))


@clause(7, cases=over(head_dim=(1, 7, 20, 64, 300)), owed="reference")
def float64(subject: Subject, head_dim: int) -> None:
    """The reference takes float64 and any D of at least 1."""
    for kind in KINDS:
        inputs = subject.batch(kind, heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.float64)
        subject.check(inputs, causal=True)


@clause(
    7,
    cases=over(dtype=(torch.float32,), heads={"6 / 2": (6, 2), "4 / 1": (4, 1)})
    | over(dtype=(torch.bfloat16,), heads={"4 / 2": (4, 2), "3 / 3": (3, 3)}),
)
def head_ratios(subject: Subject, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """H a multiple of G, forward and backward, of a plain and of a shared query."""
    options = {"heads": heads[0], "kv_heads": heads[1], "dtype": dtype}
    subject.check(subject.few("cross", **options), causal=True)
    subject.check(subject.few("shared", **options))


@clause(7, cases=over(dtype=DTYPES, kind=KINDS, mask=MASKS))
def masks(subject: Subject, dtype: torch.dtype, kind: str, mask: dict[str, object]) -> None:
    """Causal, window and both, aligned bottom-right, in self-attention, cross-attention and under a shared query."""
    heads = 2 if subject.on_gpu or kind == "cross" else 1
    subject.check(subject.batch(kind, heads=heads, kv_heads=1, dtype=dtype), **mask)


@clause(7, cases=over(kind=KINDS, mask=MASKS))
def masks_of_wide_heads(subject: Subject, kind: str, mask: dict[str, object]) -> None:
    """The same with three heads of size 128."""
    if not subject.compiled:
        raise NotRunHere("the interpreter takes too long")
    batch = subject.batch if subject.on_gpu else subject.few
    subject.check(batch(kind, heads=3, head_dim=128, dtype=torch.bfloat16, slack=70), **mask)


@clause(7)
def masks_compose(subject: Subject) -> None:
    """Causal is a right side of 0, and a side that reaches past every key is no side."""
    inputs = subject.inputs([20, 3], dtype=torch.bfloat16)
    narrow = subject.run(inputs, window=(7, 0))
    subject.assert_all_same(subject.run(inputs, causal=True, window=(7, 4)), narrow, "causal and a right side")
    subject.assert_all_same(subject.run(inputs, causal=True, window=(7, None)), narrow, "causal and no right side")
    unlimited = subject.check(inputs)
    for side in (100, 2**31 - 1):
        wide = subject.check(inputs, window=(side, side))
        for name, x in wide.items():
            verify(torch.allclose(x, unlimited[name], rtol=0.02, atol=0.02), f"{name} differs under a window of {side}")


@clause(7, cases=over(dtype=DTYPES), gpus=1)
def many_sequences(subject: Subject, dtype: torch.dtype) -> None:
    """3,000 sequences, and a shared query on 700."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 70, (3000,), generator=generator).tolist()
    subject.check(subject.inputs(lengths, dtype=dtype), causal=True)
    lengths = torch.randint(0, 200, (700,), generator=generator).tolist()
    subject.check(subject.inputs(None, lengths, shared_rows=40, dtype=dtype))


@clause(7, cases=over(dtype=DTYPES, mask=("full", "causal", "both sides")), gpus=1)
def long_sequences(subject: Subject, dtype: torch.dtype, mask: str) -> None:
    """Sequences of thousands of tokens."""
    subject.check(subject.inputs([5000, 1, 3000], heads=1, dtype=dtype), **MASKS[mask])


@clause(7, owed="kernels", gpus=1)
def tf32_only_where_allowed(subject: Subject) -> None:
    """float32 means float32 unless torch.backends.cuda.matmul.fp32_precision allows TF32."""
    matmul = torch.backends.cuda.matmul
    inputs = subject.inputs([200, 300])
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "ieee"
        exact = subject.check(inputs)
        matmul.fp32_precision = "tf32"
        rough = subject.check(inputs)  # plain PyTorch rounds to TF32 as well
    finally:
        matmul.fp32_precision = before
    verify(not torch.equal(exact["out"], rough["out"]), "TF32 is allowed and not used")


@clause(8, cases=over(layout=("rows", "strides")), owed="kernels", gpus=1)
def more_than_2_to_the_31_elements(subject: Subject, layout: str) -> None:
    """Rows past 2**31 elements: many rows, or rows far apart in a wide buffer."""
    free = torch.cuda.mem_get_info(subject.device)[0]
    if free < 48 << 30:
        raise NotRunHere(f"needs 48 GiB of free GPU memory, found {free >> 30}")
    heads, head_dim, dtype = 8, 128, torch.bfloat16
    names = ("query", "key", "value", "dout")
    small = subject.inputs([300, 200], heads=heads, head_dim=head_dim, dtype=dtype)
    assert small.q_offsets is not None and small.dlse is not None
    expected = subject.run(small)
    device = subject.device
    if layout == "rows":
        before = 2**31 // (heads * head_dim) + 5
        buffers = {name: torch.zeros(before + 500, heads, head_dim, dtype=dtype, device=device) for name in names}
        dlse = torch.zeros(heads, before + 500, device=device)
        dlse[:, before:] = small.dlse
        offsets = small.q_offsets + before
    else:
        before, width = 0, 2**31 // 400
        wide = torch.zeros(500, width - width % 8, dtype=dtype, device=device)
        size = heads * head_dim
        buffers = {n: wide[:, i * size : (i + 1) * size].unflatten(1, (heads, head_dim)) for i, n in enumerate(names)}
        dlse, offsets = small.dlse, small.q_offsets
    for name, buffer in buffers.items():
        buffer[before:] = getattr(small, name)
    large = replace(small, **buffers, q_offsets=offsets, kv_offsets=offsets, dlse=dlse)
    for name, x in subject.run(large).items():
        rows = x.movedim(1, 0) if name == "lse" else x
        wanted = expected[name].movedim(1, 0) if name == "lse" else expected[name]
        verify(torch.equal(rows[before:], wanted), f"{name} differs")
        verify(rows[:before].eq(-torch.inf if name == "lse" else 0).all(), f"{name} of slack rows is not cleared")
