"""FBGEMM's jagged flash attention is `jagged_attention` with scale 1.0, divided by max_seq_len."""

import pytest
import torch

import gemattn
from gemattn.testing import JaggedInputs, make_inputs

pytest.importorskip("fbgemm_gpu", reason="needs fbgemm_gpu: pip install fbgemm-gpu-cpu, or fbgemm-gpu on CUDA")
pytest.importorskip("fbgemm_gpu.sll", reason="needs fbgemm_gpu.sll, which this FBGEMM does not have")

LENGTHS = [17, 33, 1, 0, 8]
LONGER = 40  # FBGEMM divides by the number it is given, not by the longest sequence


def compare(theirs, inputs: JaggedInputs, max_seq_len: int, **tolerance: float) -> None:
    """out, dq, dk, dv of `theirs(query, key, value)` on (T, H, D) against ours, both times max_seq_len."""
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    ours = gemattn.jagged_attention(*leaves, inputs.q_offsets, scale=1.0) / max_seq_len
    grads = torch.autograd.grad(ours, leaves, inputs.dout)
    other_leaves = [x.clone().requires_grad_() for x in leaves]
    other = theirs(*other_leaves)
    other_grads = torch.autograd.grad(other, other_leaves, inputs.dout)
    names = ("out", "dq", "dk", "dv")
    for name, wanted, x in zip(names, (other, *other_grads), (ours, *grads), strict=True):
        if inputs.query.numel():
            assert wanted.abs().max() > 0, name
        torch.testing.assert_close(
            x * max_seq_len, wanted * max_seq_len, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 5], [0, 0, 4], [0, 0]], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 24])
def test_basic(lengths, head_dim):
    inputs = make_inputs(lengths, heads=1, head_dim=head_dim, dtype=torch.float64)

    def basic(query, key, value):
        flat = (x.squeeze(1) for x in (query, key, value))
        return torch.ops.fbgemm.sll_jagged_flash_attention_basic(*flat, inputs.q_offsets, LONGER).unsqueeze(1)

    compare(basic, inputs, LONGER, rtol=1e-10, atol=1e-12)


def test_basic_in_float32():
    inputs = make_inputs(LENGTHS, heads=1, head_dim=16)

    def basic(query, key, value):
        flat = (x.squeeze(1) for x in (query, key, value))
        return torch.ops.fbgemm.sll_jagged_flash_attention_basic(*flat, inputs.q_offsets, LONGER).unsqueeze(1)

    compare(basic, inputs, LONGER, rtol=1e-5, atol=1e-5)


def test_their_mask_has_no_equivalent():
    """`use_mask` hides the keys before a query, after the softmax and without normalising again."""
    inputs = make_inputs([3, 5], heads=1, head_dim=8, dtype=torch.float64)
    query, key, value = (x.squeeze(1) for x in (inputs.query, inputs.key, inputs.value))
    masked = torch.ops.fbgemm.sll_jagged_flash_attention_basic(query, key, value, inputs.q_offsets, LONGER, True)
    for start, end in ((0, 3), (3, 8)):
        probabilities = (query[start:end] @ key[start:end].T).softmax(1).triu()
        torch.testing.assert_close(masked[start:end] * LONGER, probabilities @ value[start:end])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("heads", [1, 3])
def test_multi_head(heads, head_dim):
    inputs = make_inputs(LENGTHS, heads=heads, head_dim=head_dim, device="cuda")

    def multi_head(query, key, value):
        heads_first = (x.transpose(0, 1) for x in (query, key, value))
        out = torch.ops.fbgemm.sll_multi_head_jagged_flash_attention(
            *heads_first, inputs.q_offsets, LONGER, allow_tf32=False
        )
        return out.transpose(0, 1)

    compare(multi_head, inputs, LONGER, rtol=1e-4, atol=1e-4)
