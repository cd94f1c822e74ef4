"""Launches without a GPU, up to the driver's: what `Launcher` hands over against what Triton's own path does.

    python tests/kernels/record_launches.py

Nothing is compiled: a kernel stands for what Triton asked its compiler for. CPU tensors stand for those of a GPU.
Prints one JSON object: check -> "" or what went wrong. Run it as a process of its own, Triton's interpreter off.
"""

import dataclasses
import itertools
import json
import random
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from ahead_of_time import Asked, StandIn, batch, compile_nothing
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gemattn.kernels import launcher
from gemattn.kernels.launcher import Launcher
from gemattn.spec import AttentionSpec

LAUNCHES: list[tuple[Any, ...]] = []


def note_launch(x, y, z, stream, function, packed, metadata, enter, leave, *arguments):  # type: ignore[no-untyped-def]
    if enter:
        enter(metadata)
    values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    LAUNCHES.append(((x, y, z), stream, function, packed, values, tuple(map(type, values))))
    if leave:
        leave(metadata)


Asked.launch = staticmethod(note_launch)
driver = StandIn(GPUTarget("cuda", 90, 32))
compile_nothing()
triton_run, launch = JITFunction.run, Launcher.__call__
in_triton = itertools.count()


def counted(self, *args, **options):  # type: ignore[no-untyped-def]
    next(in_triton)
    return triton_run(self, *args, **options)


JITFunction.run = launcher._TRITONS_RUN = counted  # type: ignore[method-assign]


def times_in_triton() -> int:
    """So far, this question not counted."""
    return in_triton.__reduce__()[1][0]


def same_as_triton(self: Launcher, grid: Any, pointers: Any, numbers: Any, lean: bool | None = True) -> None:
    """Launch in Triton's way, then twice in ours; the second time without Triton where `lean`, None: either."""
    first = len(LAUNCHES)
    self.kernel[grid](*pointers, *numbers, **self.constants)
    launch(self, grid, pointers, numbers)
    before = times_in_triton()
    launch(self, grid, pointers, numbers)
    assert lean is None or lean == (times_in_triton() == before), (self.kernel, numbers)
    wanted, *ours = LAUNCHES[first:]
    assert ours == [wanted, wanted], f"{ours} instead of {wanted}"


def properties(arch: int) -> None:
    """Of the GPU that there is not."""
    driver.target = GPUTarget("cuda", arch, 32)
    driver.properties()


SPECS = (
    AttentionSpec(0.125),
    AttentionSpec(1.0, -1, 0),
    AttentionSpec(-2.0, 16, 1),
    AttentionSpec(0.0, 5, -1),
    AttentionSpec(0.125, deterministic=True),
)


def attention(implementation: Any, head_dims: tuple[int, ...], grouped_backward: bool) -> set[str]:
    """Every launch of an implementation is the same as Triton's; the names of its kernels."""
    first = len(LAUNCHES)
    for (head_dim, dtype), kind in itertools.product(
        zip(head_dims, (torch.bfloat16, torch.float16), strict=True), ("self", "fused", "cross", "shared", "grouped")
    ):
        tensors = batch(head_dim, dtype, kind, *((4, 2) if kind == "grouped" else ()))
        for spec in SPECS:
            spec = dataclasses.replace(spec, shared_query=kind == "shared")
            out, lse = implementation.forward(*tensors, spec)
            for dlse in (None, torch.zeros_like(lse)):
                if kind != "grouped" or grouped_backward:
                    implementation.backward(torch.zeros_like(out), dlse, *tensors[:3], out, lse, *tensors[3:], spec)
    return {function[0] for _, _, function, *_ in LAUNCHES[first:]}


def check_hopper() -> None:
    properties(90)
    names = attention(hopper, (64, 128), grouped_backward=False)
    assert names == {
        "describe_forward_kernel", "forward_kernel", "describe_backward_kernel", "query_gradient_kernel",
        "key_gradient_kernel", "one_tile_gradient_kernel", "prepare_kernel", "prepare_fused_kernel",
        "fused_gradient_kernel", "finish_kernel", "add_partials_kernel",
    }, names  # fmt: skip


def check_blackwell() -> None:
    properties(100)
    names = attention(blackwell, (64, 128), grouped_backward=False)
    assert names == {
        "describe_forward_kernel", "forward_kernel", "describe_backward_kernel", "prepare_kernel", "gradient_kernel"
    }, names  # fmt: skip


def check_portable() -> None:
    properties(90)
    names = attention(portable, (40, 128), grouped_backward=True)
    assert names == {
        "forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "shared_query_gradient_kernel"
    }, names  # fmt: skip


def check_tile_lists() -> None:
    properties(90)
    first = len(LAUNCHES)
    for dtype, rows in itertools.product((torch.int32, torch.int64), (1, 16, 100)):
        offsets = torch.tensor([0, 3, 16], dtype=dtype)
        for q_offsets in (None, offsets, offsets + 1):
            tile_list.tile_lists(q_offsets, offsets, rows, 16, 4, 5, 128)
    assert len(LAUNCHES) == first + 3 * 18


@triton.jit(do_not_specialize=["count"])
def some_kernel(table, x_ptr, stride, other_stride, count, scale, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK) * stride, scale)


def check_specialisation() -> None:
    """All that Triton tells apart, in random order through few launchers."""
    launchers = [Launcher(some_kernel, BLOCK=block, num_warps=warps) for block, warps in ((16, 1), (16, 2), (32, 1))]
    memory = torch.zeros(64, dtype=torch.int64)
    pointers = [
        memory.view(dtype)[start:]
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int32)
        for start in (0, 1, 2, 16)
    ]
    integers = (0, 1, 2, 3, 8, 15, 16, 17, 24, 32, 33, 48, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**40)
    scales = (0.5, 1.0, 16.0, 0.0, 1, 16, 2**33, True, 1e30)
    compiled = set()
    for _ in range(3000):
        chosen = random.choice(launchers)
        driver.device, driver.stream = random.choice((0, 1)), random.choice((0, 5))
        small = random.random() < 0.7
        strides = [random.choice(integers[:12] if small else integers) for _ in range(3)]
        tensors = [memory.view(torch.int8) if small else random.choice(pointers), random.choice(pointers)]
        scale = random.choice(scales[:4] if small else scales)
        grid = random.choice(((3,), (3, 2), (3, 2, 5)))
        usual = all(-(2**31) <= n < 2**31 for n in (*strides, scale)) and not any(x.data_ptr() % 16 for x in tensors)
        same_as_triton(chosen, grid, tensors, (*strides, scale), lean=usual)
        compiled.add(str(LAUNCHES[-1][2]))
        assert LAUNCHES[-1][0] == (*grid, 1, 1)[:3] and LAUNCHES[-1][1] == 100 * driver.device + driver.stream
    assert len(compiled) > 300, len(compiled)
    driver.device, driver.stream = 0, 7


def some_launch(one: Launcher, count: int = 5) -> bool:
    """Whether it went through Triton."""
    memory = torch.zeros(64)
    before = times_in_triton()
    launch(one, (1,), (memory, memory), (16, 16, count, 0.5))
    return times_in_triton() > before


def check_what_watches_sees_every_launch() -> None:
    one = Launcher(some_kernel, BLOCK=16)
    assert some_launch(one) and not some_launch(one)
    seen: list[Any] = []
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(seen.append)
        assert some_launch(one) and seen, "a hook was not called"
        hook.remove(seen.append)
        seen.clear()
        assert not some_launch(one)
    some_kernel.add_pre_run_hook(lambda *args, **options: seen.append(args))
    assert some_launch(one) and seen, "a hook before the run was not called"
    some_kernel.pre_run_hooks.clear()
    for owner, name, value in (
        (knobs.runtime, "debug", True),
        (knobs.runtime, "sanitize_overflow", True),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash")),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
    ):
        usual = getattr(owner, name)
        setattr(owner, name, value)
        changed = some_launch(one), LAUNCHES[-1][2]
        setattr(owner, name, usual)
        assert changed[0], name
        assert not some_launch(one), name
        assert name == "add_stages_inspection_hook" or changed[1] != LAUNCHES[-1][2], name


def check_a_simulator_takes_every_launch() -> None:
    one = Launcher(some_kernel, BLOCK=16)
    some_launch(one)
    simulated: list[Any] = []
    JITFunction.run = lambda self, *args, grid, warmup, **options: simulated.append((self, args, grid, options))  # type: ignore[method-assign]
    try:
        count = len(LAUNCHES)
        some_launch(one), some_launch(one)
        assert len(LAUNCHES) == count and len(simulated) == 2 and simulated[0][3] == {"BLOCK": 16}
    finally:
        JITFunction.run = counted  # type: ignore[method-assign]
    assert not some_launch(one)


def check_what_is_kept_is_few() -> None:
    """Numbers that change from batch to batch must not fill the memory."""
    one = Launcher(some_kernel, BLOCK=16)
    memory = torch.zeros(64)
    for n in range(1000):
        launch(one, (n,), (memory, memory), (n, 128 * n, n, n / 7))
    assert len(one._kept) <= 64, len(one._kept)


def check_threads() -> None:
    one = Launcher(some_kernel, BLOCK=16)
    first, errors = len(LAUNCHES), []

    def work(seed: int) -> None:
        try:
            for i in range(200):
                some_launch(one, count=200 * seed + i)
        except Exception:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert sorted(values[4] for *_, values, _ in LAUNCHES[first:]) == list(range(1600))
    assert len({function[0] for _, _, function, *_ in LAUNCHES[first:]}) == 1


from gemattn.kernels.tlx.blackwell import launch as blackwell_forward  # noqa: E402 (after the stand-in)
from gemattn.kernels.tlx.blackwell import launch_backward as blackwell_backward  # noqa: E402
from gemattn.kernels.tlx.hopper import launch as hopper  # noqa: E402
from gemattn.kernels.triton import launch as portable  # noqa: E402
from gemattn.kernels.triton import tile_list  # noqa: E402

blackwell = SimpleNamespace(forward=blackwell_forward.forward, backward=blackwell_backward.backward)


def main() -> None:
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                random.seed(0)
                LAUNCHES.clear()
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    Launcher.__call__ = same_as_triton  # type: ignore[method-assign]
    main()
