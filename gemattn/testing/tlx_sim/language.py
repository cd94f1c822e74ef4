"""What kernel code means while it is simulated: calls, values, tasks."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from gemattn.kernels.tlx._tlx import tlx
from gemattn.testing.tlx_sim.builder_products import Builder
from gemattn.testing.tlx_sim.rewrite import Hooks, Mutation, Rewriter

_FUNCTIONS = (JITFunction, interpreter.InterpretedFunction)
_CONSTANTS = (int, float, str)


class Language:
    """Runs rewritten kernel code on a builder."""

    def __init__(self, mutation: Mutation | None):
        """`builder` and `semantic` are set for each launch."""
        self.rewriter = Rewriter(Hooks(self.call, self.value, self.run_tasks), mutation)
        self.builder: Builder | None = None
        self.semantic: Any = None
        self.start_tasks: Callable[[list[tuple[Callable[[], None], Any, int, int]]], None] = lambda tasks: None

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in kernel code."""
        if isinstance(function, _FUNCTIONS):
            return self.rewriter(function.fn)(*args, **kwargs)
        if getattr(function, tl.core.TRITON_BUILTIN, False):
            args = tuple(map(constant, args))
            kwargs = {name: constant(x) for name, x in kwargs.items()}
            return function(*args, **kwargs, _semantic=self.semantic)
        if function in (builtins.max, builtins.min) and any(isinstance(x, tl.tensor) for x in args):
            pick = tl.maximum if function is builtins.max else tl.minimum
            result = args[0]
            for x in args[1:]:
                result = self.call(pick, result, x)
            return result
        return function(*args, **kwargs)

    def value(self, value: Any, name: str) -> Any:
        """A value that is assigned: numbers become tensors, as the compiler makes them."""
        handle = getattr(value, "handle", None)
        if handle is not None and name and isinstance(value, tlx.buffered_tensor | tlx.mbarrier | tlx.clc_response):
            assert self.builder is not None
            self.builder.name(handle, name)
        return self.semantic.to_tensor(value, False)

    def map_elementwise(self, function: Any, *args: Any, **options: Any) -> Any:
        """All elements at once: the operations of the function are elementwise."""
        return self.call(function, *args)

    def run_tasks(self, tasks: list[tuple[Callable[[], None], Any, int]]) -> None:
        """The end of `with async_tasks()`: run every replica of every task to its end."""
        self.start_tasks([(body, task, line, i) for body, task, line in tasks for i in range(task.replicate)])

    @staticmethod
    def as_replica(body: Callable[[], None], replica: int) -> Callable[[], None]:
        """`body` with `async_task_replica_id()` set."""

        def run() -> None:
            stack = tlx.compiler.code_generator._get_region_replica_id_stack()
            stack.append(replica)
            try:
                with np.errstate(all="ignore"):
                    body()
            finally:
                stack.pop()

        return run


def constant(x: Any) -> Any:
    """Python constants as builtins get them from the compiler."""
    return tl.constexpr(x) if isinstance(x, _CONSTANTS) else x
