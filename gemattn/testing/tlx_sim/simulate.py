"""`simulate`: kernels launched inside run on the simulated chip."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from gemattn import dispatch
from gemattn.kernels.interpreter import install
from gemattn.kernels.tlx._tlx import tlx
from gemattn.testing.tlx_sim.addresses import Addresses
from gemattn.testing.tlx_sim.descriptors import DescriptorTable
from gemattn.testing.tlx_sim.language import Language
from gemattn.testing.tlx_sim.launch import Launch
from gemattn.testing.tlx_sim.report import Report
from gemattn.testing.tlx_sim.rewrite import Mutation
from gemattn.testing.tlx_sim.schedule import Policy

CAPABILITIES = {90: (9, 0), 100: (10, 0)}


@dataclass
class Run:
    """What `simulate` gives: the report of all launches so far."""

    arch: int
    report: Report
    policy: Policy
    language: Language
    explicit_fences: bool
    descriptors: DescriptorTable = field(default_factory=DescriptorTable)
    addresses: Addresses = field(default_factory=Addresses)


@contextlib.contextmanager
def simulate(
    arch: int = 90,
    seed: int = 0,
    policy: str = "adversarial",
    processors: int = 4,
    explicit_fences: bool = True,
    mutation: Mutation | None = None,
) -> Iterator[Run]:
    """Run every kernel that is launched inside on CPU tensors, on a simulated chip, and report what is wrong with it.

    An autotuned kernel runs with the first configuration that its pruning leaves.

    Args:
        arch: 90 (Hopper) or 100 (Blackwell).
        seed: of the schedule; the same seed gives the same interleaving.
        policy: "random", "late" (engines as late as can be), "early", "starve" (some tasks run last), "priority"
            (tasks in an order that changes at random), or "adversarial": one of these, by the seed.
        processors: how many the chip has, for kernels that fit their grid to it.
        explicit_fences: whether a kernel must itself fence ordinary stores before `async_descriptor_store` reads them.
            fbtriton 3.7.4 adds that fence where it is missing; False takes it as added. Before matrix products it is
            always taken as added, before other copies never.
        mutation: changes kernel sources before they run; see `gemattn.testing.tlx_sim.mutate`.

    Raises:
        SimulationError: from the launch, when it deadlocks or a kernel fails. All else is only reported.
    """
    if arch not in CAPABILITIES:
        raise ValueError(f"arch is {arch!r}, wanted 90 or 100")
    install()
    language = Language(mutation)
    run = Run(arch, Report(arch, seed, policy), Policy(policy, seed), language, explicit_fences)
    kept = interpreter.interpreter_builder, interpreter.interpreter_semantic
    scope = interpreter._LangPatchScope()
    try:
        _patch(scope, run, processors)
        yield run
    finally:
        scope.restore()
        interpreter.interpreter_builder, interpreter.interpreter_semantic = kept


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _left_to_tensors(operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`constant + tensor` is the tensor's business, as it is in the compiler."""

    @functools.wraps(operator)
    def apply(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else operator(self, other)

    return apply


def _run_first_configuration(self: Any, *args: Any, **options: Any) -> Any:
    """In place of measuring the configurations that pruning leaves."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.prune_configs(options)[0]
    chosen = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **options, **chosen})
    return self.fn.run(*args, **options, **chosen)


def _patch(scope: Any, run: Run, processors: int) -> None:
    for language in (tl, tl.core):
        for owner in (language, language.tensor, language.math):
            interpreter._patch_builtin(owner, None, scope)
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
        scope.set_attr(language, "map_elementwise", run.language.map_elementwise)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, None, scope)
    for owner in (tlx.buffered_tensor, tlx.mbarrier, tlx.clc_response, tlx.tensor_descriptor_ptr):
        get = owner.__getitem__
        scope.set_attr(owner, "__getitem__", lambda self, place, get=get: run.language.call(get, self, place))

    for name in (f"__{x}__" for x in _OPERATORS + _COMPARISONS):
        scope.set_attr(tl.constexpr, name, _left_to_tensors(getattr(tl.constexpr, name)))

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        if not warmup:
            Launch(run, self.fn, options).run(grid, args)

    for kind in (JITFunction, interpreter.InterpretedFunction):
        scope.set_attr(kind, "run", launch)
    scope.set_attr(Autotuner, "run", _run_first_configuration)
    capability = CAPABILITIES[run.arch]
    properties = SimpleNamespace(
        multi_processor_count=processors, major=capability[0], minor=capability[1], name=f"simulated sm_{run.arch}"
    )
    scope.set_attr(torch.cuda, "get_device_properties", lambda device=None: properties)
    scope.set_attr(dispatch, "simulated", capability)
    scope.set_attr(tlx.barrier, "is_hip", lambda: False)  # it would ask a driver
