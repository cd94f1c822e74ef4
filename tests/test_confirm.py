"""When the TLX kernels of an unconfirmed GPU are checked, and when a call is refused instead."""

import contextlib
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gemattn
from gemattn import comparison, confirm, dispatch, ops, reference
from gemattn.testing import make_inputs

B200 = torch.device("cuda", 0)
NAMES_IT = r"gemattn\.self_check\(\)"


@pytest.fixture
def b200(monkeypatch):
    """A process that sees B200s and has checked none; returns the devices checked since."""
    checked = []
    monkeypatch.setattr(dispatch, "_capability", lambda index: (10, 0))
    monkeypatch.setattr(confirm, "_verdicts", {})
    monkeypatch.setattr(confirm, "differences", lambda device: checked.append(device) or "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return checked


class Kernels:
    """The reference in the place of the TLX kernels, with the errors that a test plants."""

    def __init__(self):
        self.calls = []
        self.wrong = None
        self.error = None

    def forward(self, query, *others):
        self.calls.append((query.shape[2], query.dtype, others[-1].shared_query))
        if self.error is not None:
            raise self.error
        return self._spoil(("out", "lse"), reference.forward(query, *others))

    def backward(self, *arguments):
        return self._spoil(("dq", "dk", "dv"), reference.backward(*arguments))

    def _spoil(self, names, results):
        return tuple(x * 1.05 if name == self.wrong else x for name, x in zip(names, results, strict=True))


@pytest.fixture
def kernels(monkeypatch):
    """The CPU counts as a B200 that has met no kernel; returns those that it would run."""
    kernels = Kernels()
    monkeypatch.setattr(dispatch, "simulated", (10, 0))
    monkeypatch.setattr(dispatch, "_installed", torch.compiler.assume_constant_result(lambda module: True))
    monkeypatch.setattr(dispatch, "unconfirmed", lambda device: True)
    monkeypatch.setattr(confirm, "_verdicts", {})
    monkeypatch.setitem(sys.modules, "gemattn.kernels.tlx", kernels)
    monkeypatch.setattr(ops, "_module", {"tlx": kernels}.__getitem__)
    torch._dynamo.reset()
    return kernels


CHECK = [(64, torch.bfloat16, False), (128, torch.float16, False), (128, torch.bfloat16, True)]
CALL = (64, torch.float16, False)


def arguments():
    inputs = make_inputs([3, 0, 5], heads=2, head_dim=64, dtype=torch.float16)
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value)]
    return *leaves, inputs.q_offsets


def attend(*arguments):
    return gemattn.jagged_attention(*arguments, impl="tlx")


def test_the_first_call_checks_and_the_next_does_not(kernels):
    attend(*arguments())
    attend(*arguments())
    assert kernels.calls == [*CHECK, CALL, CALL]


@pytest.mark.parametrize("wrong", ["out", "lse", "dq", "dk", "dv"])
def test_the_first_call_refuses_wrong_kernels_and_so_does_the_next(kernels, wrong):
    kernels.wrong = wrong
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{wrong} \(causal, head size 64.* is 5.*\n.*GEMATTN_DISABLE_TLX"):
            attend(*arguments())
    assert kernels.calls == CHECK


def test_any_error_of_the_check_is_explained_and_remembered(kernels):
    kernels.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match=r"(?s)OutOfMemoryError: CUDA out of memory.*GEMATTN_DISABLE_TLX") as raised:
        attend(*arguments())
    assert raised.value.__cause__ is kernels.error
    kernels.error = None
    with pytest.raises(RuntimeError, match="OutOfMemoryError"):
        attend(*arguments())
    assert len(kernels.calls) == 1
    gemattn.self_check("cpu")
    attend(*arguments())
    assert kernels.calls[1:] == [*CHECK, CALL]


def test_a_device_that_cannot_run_the_kernels_is_no_failure_of_theirs(kernels, monkeypatch):
    monkeypatch.setenv("GEMATTN_DISABLE_TLX", "1")
    with pytest.raises(gemattn.UnsupportedError, match="GEMATTN_DISABLE_TLX=1 is set"):
        gemattn.self_check("cpu")
    assert not confirm._verdicts


def test_checks_inside_activation_checkpointing(kernels):
    wanted, found = arguments(), arguments()
    checkpoint(attend, *found, use_reentrant=False).sum().backward()
    attend(*wanted).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(found[:3], wanted[:3], strict=True))
    assert kernels.calls[:3] == CHECK


def test_modes_see_the_call_and_not_the_check(kernels):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    flops, logs = [], []
    for _ in range(2):
        seen = []
        with FlopCounterMode(display=False) as counter, Seen():
            attend(*arguments()[:3], torch.tensor([0, 3, 8]))
        flops.append(counter.get_total_flops())
        logs.append(seen)
    assert flops[0] == flops[1] > 0 and logs[0] == logs[1]
    assert len(kernels.calls) == 5


def test_the_check_depends_on_no_state_of_the_caller_and_leaves_none(kernels):
    packed = []
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.device("meta"),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(),
            torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x),
        ):
            state = torch.get_rng_state()
            gemattn.self_check("cpu")
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
            assert torch.empty(0).device.type == "meta"
    finally:
        torch.set_default_dtype(default)
    assert kernels.calls == CHECK and not packed


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilation_on_an_unchecked_device_is_refused_until_it_is_checked(kernels, backend, fullgraph):
    compiled = torch.compile(lambda *arguments: attend(*arguments) * 2, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=NAMES_IT):
            compiled(*arguments())
    assert not kernels.calls
    gemattn.self_check("cpu")
    torch.testing.assert_close(compiled(*arguments()), attend(*arguments()) * 2)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_may_not_check(kernels, fullgraph):
    compiled = torch.compile(lambda x: (gemattn.self_check("cpu"), x + 1), backend="eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=NAMES_IT):
        compiled(torch.zeros(1))
    assert not kernels.calls


def test_export_on_an_unchecked_device_is_refused(kernels):
    class Layer(torch.nn.Module):
        def forward(self, *arguments):
            return attend(*arguments)

    for strict in (False, True):
        with pytest.raises(RuntimeError, match=NAMES_IT):
            torch.export.export(Layer(), arguments(), strict=strict)
    assert not kernels.calls


def test_programs_made_elsewhere_are_refused_on_an_unchecked_device(kernels):
    class Layer(torch.nn.Module):
        def forward(self, *arguments):
            return attend(*arguments)

    gemattn.self_check("cpu")
    given = arguments()
    out, lse = gemattn.jagged_attention(*given, impl="tlx", return_lse=True)
    exported = torch.export.export(Layer(), given).module()
    compiled = torch.compile(attend, backend="aot_eager")
    assert torch.equal(exported(*given), out) and torch.equal(compiled(*given), out)
    options = (*[None] * 6, -1, -1, 64**-0.5, False, False)

    def forward():
        return torch.ops.gemattn.jagged_attention_tlx(*given, given[3], *options)

    def backward():
        return torch.ops.gemattn.jagged_attention_tlx_backward(
            out, None, *given[:3], out, lse, given[3], given[3], *options
        )

    confirm._verdicts.clear()
    kernels.calls.clear()
    for run in (lambda: exported(*given), lambda: compiled(*given), forward, backward):
        with pytest.raises(RuntimeError, match=NAMES_IT):
            run()
    assert not kernels.calls


def test_the_first_eager_call_checks_once_a_device(b200):
    for _ in range(2):
        confirm.require_confirmed(B200)
    confirm.require_confirmed(torch.device("cuda"))  # the current one, which is the same
    assert b200 == [B200]
    confirm.require_confirmed(torch.device("cuda", 1))
    assert b200 == [B200, torch.device("cuda", 1)]


def test_threads_that_call_at_once_check_once(b200, monkeypatch):
    monkeypatch.setattr(confirm, "differences", lambda device: time.sleep(0.2) or b200.append(device) or "")
    threads = [threading.Thread(target=confirm.require_confirmed, args=(B200,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b200 == [B200]


def test_an_unchecked_device_refuses_capture_and_names_the_function(b200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=NAMES_IT):
        confirm.require_confirmed(B200)
    with pytest.raises(RuntimeError, match=rf"{NAMES_IT} cannot run .* captured"):
        gemattn.self_check()
    assert not b200
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gemattn.self_check()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    confirm.require_confirmed(B200)
    assert b200 == [B200]


@pytest.mark.parametrize("current", [0, 1])
def test_capture_on_the_device_of_the_tensors_or_the_current_one_is_seen(b200, monkeypatch, current):
    """A graph is captured on device 1; the call is for 1 while 0 is current, or for 0 while 1 is."""
    now = [current]

    @contextlib.contextmanager
    def device(place):
        now.append(place.index)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1] == 1)
    with pytest.raises(RuntimeError, match=NAMES_IT):
        confirm.require_confirmed(torch.device("cuda", 1 - current))
    assert not b200


def test_a_gpu_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: False))
    monkeypatch.setattr(comparison, "_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="does not come to an end"):
        comparison._finish(B200)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_confirmed_kinds_are_not_checked(b200, monkeypatch, capability):
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    confirm.require_confirmed(B200)
    confirm.refuse_unconfirmed(B200)
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
