"""The Hopper kernels on a GPU: the contract, clause by clause, and which calls are theirs."""

import pytest
import torch

import gemattn
from gemattn import dispatch
from gemattn.testing import conformance, make_inputs, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # compiling takes most of it


@pytest.mark.parametrize(("clause", "case"), conformance.cases())
def test_contract(clause, case):
    conformance.check(clause, "tlx", case=case, device="cuda")


@pytest.fixture
def hopper():
    """Skips where the kernels cannot run; a fixture, because markers are evaluated without a GPU too."""
    x = torch.empty(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    reasons = gemattn.unsupported_reasons("tlx", x, x, x, torch.tensor([0, 1], device="cuda"))
    if reasons:
        pytest.skip("; ".join(reasons))


def test_what_tma_cannot_describe_is_refused(hopper):
    x = torch.randn(10, 2, 65, device="cuda", dtype=torch.bfloat16)[..., :64]
    offsets = torch.tensor([0, 10], device="cuda")
    assert any("multiples of 16 bytes" in r for r in gemattn.unsupported_reasons("tlx", x, x, x, offsets))
    assert gemattn.resolve(x, x, x, offsets) == "triton"


def test_auto_takes_them_and_a_switch_turns_them_off(hopper, monkeypatch):
    x = torch.randn(10, 2, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 10], device="cuda")
    assert gemattn.resolve(x, x, x, offsets) == "tlx"
    assert gemattn.resolve(x.float(), x.float(), x.float(), offsets) == "triton"
    monkeypatch.setenv("GEMATTN_DISABLE_TLX", "1")
    assert gemattn.resolve(x, x, x, offsets) == "triton"
    with pytest.raises(dispatch.UnsupportedError, match="GEMATTN_DISABLE_TLX"):
        gemattn.jagged_attention(x, x, x, offsets, impl="tlx")


def test_the_gradient_of_a_shared_query_is_repeatable(hopper):
    """Without asking for it: partial sums are added in a fixed order."""
    inputs = make_inputs(
        None, [700, 64, 0, 1000, 129] * 40, shared_rows=200, head_dim=128, dtype=torch.bfloat16, device="cuda"
    )
    first = run(inputs, "tlx")
    for _ in range(20):
        again = run(inputs, "tlx")
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_self_check_passes_where_syncs_are_errors_and_refuses_to_be_captured(hopper):
    kept = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gemattn.self_check()
        assert torch.cuda.get_sync_debug_mode() == 2
    finally:
        torch.cuda.set_sync_debug_mode(kept)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="captured"):
        gemattn.self_check()
