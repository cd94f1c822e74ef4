"""When the TLX kernels of an unconfirmed GPU are checked, and when a call is refused instead."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gemattn
from gemattn import confirm, dispatch

B200 = torch.device("cuda", 0)


@pytest.fixture
def b200(monkeypatch):
    """A process that sees a B200 and has not checked it; returns the devices checked since."""
    checked = []
    monkeypatch.setattr(dispatch, "_capability", lambda index: (10, 0))
    monkeypatch.setattr(confirm, "_confirmed", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(confirm, "_compare", lambda device, head_dim: checked.append((device, head_dim)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return checked


def test_the_first_eager_call_checks_once_a_device(b200):
    for _ in range(2):
        confirm.require_confirmed(B200)
    assert b200 == [(B200, 64), (B200, 128)]
    confirm.require_confirmed(torch.device("cuda", 1))
    assert len(b200) == 4


def test_an_unchecked_device_refuses_capture_and_names_the_function(b200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"gemattn\.self_check\(\)"):
        confirm.require_confirmed(B200)
    assert not b200
    gemattn.self_check()
    confirm.require_confirmed(B200)


def test_an_unchecked_device_refuses_compilation(b200, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"gemattn\.self_check\(\)"):
        confirm.require_confirmed(B200)
    assert not b200


def test_a_failed_check_fails_again(b200, monkeypatch):
    def fail(device, head_dim):
        raise RuntimeError("dq is off")

    monkeypatch.setattr(confirm, "_compare", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dq is off"):
            confirm.require_confirmed(B200)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_confirmed_kinds_are_not_checked(b200, monkeypatch, capability):
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    confirm.require_confirmed(B200)
    assert not b200


def test_dispatch_offers_tlx_on_hopper_and_blackwell_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", lambda module: True)
    monkeypatch.delenv("GEMATTN_DISABLE_TLX", raising=False)
    x, spec = torch.zeros(4, 1, 64, dtype=torch.bfloat16), None
    for capability, offered in (((9, 0), True), ((10, 0), True), ((10, 3), True), ((8, 9), False), ((12, 0), False)):
        monkeypatch.setattr(dispatch, "simulated", capability)
        assert (not dispatch.reasons("tlx", x, x, x, spec)) == offered, capability
    monkeypatch.setenv("GEMATTN_DISABLE_TLX", "1")
    monkeypatch.setattr(dispatch, "simulated", (10, 0))
    assert dispatch.reasons("tlx", x, x, x, spec) == ["GEMATTN_DISABLE_TLX=1 is set"]


def test_auto_takes_tlx_for_wide_heads_of_16_bits_and_the_portable_kernels_for_the_rest(monkeypatch):
    monkeypatch.setattr(dispatch, "_installed", lambda module: True)
    monkeypatch.delenv("GEMATTN_DISABLE_TLX", raising=False)
    taken = {}
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(dispatch, "_capability", lambda index, capability=capability: capability)
        with FakeTensorMode():
            offsets = torch.zeros(3, dtype=torch.int64, device="cuda:0")
            for head_dim in (32, 64, 96, 128):
                x = torch.empty(4, 2, head_dim, dtype=torch.bfloat16, device="cuda:0")
                taken[capability[0], head_dim] = gemattn.resolve(x, x, x, offsets)
    assert taken == {
        **{(9, 32): "triton", (9, 64): "tlx", (9, 96): "triton", (9, 128): "tlx"},
        **{(10, 32): "triton", (10, 64): "tlx", (10, 96): "triton", (10, 128): "tlx"},
    }


def test_reasons_against_tlx_can_be_traced(monkeypatch):
    """A compiled model decides while it is traced, where the offset of a view into its storage is not known."""
    monkeypatch.setattr(dispatch, "simulated", (9, 0))
    monkeypatch.setattr(dispatch, "_installed", torch.compiler.assume_constant_result(lambda module: True))

    def layer(x):
        return x * 2 if dispatch.reasons("tlx", x, x, x, None) else x + 1

    x = torch.zeros(6, 2, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert compiled(x).eq(1).all() and compiled(x[2:]).eq(1).all()
    assert compiled(x[..., :24]).eq(0).all()
