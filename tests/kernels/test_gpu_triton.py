"""The compiled Triton kernels on a GPU: the contract, clause by clause, and what is theirs alone."""

import pytest
import torch

from gemattn.testing import conformance, make_inputs, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # compiling takes most of it


@pytest.mark.parametrize(("clause", "case"), conformance.cases())
def test_contract(clause, case):
    conformance.check(clause, "triton", case=case, device="cuda", whole=True)


def test_other_lengths_compile_nothing():
    from gemattn.kernels.triton.forward import forward_kernel
    from gemattn.kernels.triton.key_gradient import key_gradient_kernel
    from gemattn.kernels.triton.query_gradient import query_gradient_kernel

    kernels = (forward_kernel, query_gradient_kernel, key_gradient_kernel)

    def compiled():
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in kernels]

    shapes = {"heads": 2, "head_dim": 40, "dtype": torch.float16, "device": "cuda"}
    run(make_inputs([3, 5, 200], **shapes), "triton")
    before = compiled()
    for lengths in ([1], [0], [16] * 16, [1] * 33, [128, 4000], [7] * 1000):
        run(make_inputs(lengths, **shapes), "triton")
        run(make_inputs(lengths, slack=13, **shapes), "triton")
    assert compiled() == before
