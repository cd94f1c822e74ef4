"""Launches that cost the host little: Triton's own path is taken once for every specialisation, then left out.

Triton binds and specialises some thirty arguments anew at every launch, and the host falls behind a short kernel. Which
compiled kernel it takes depends on few facts of them: these are the key here, and nothing else of an argument is kept.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

try:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver
except ImportError:  # another Triton: always the ordinary way
    knobs = None

_TRITONS_RUN = JITFunction.run
"""A simulator puts its own in this one's place."""
_INT32 = 2**31


def _nothing_watches() -> bool:
    """Whether no hook of Triton's wants to see launches and no switch changes what it compiles."""
    runtime = knobs.runtime
    return not (
        runtime.launch_enter_hook
        or runtime.launch_exit_hook
        or runtime.debug
        or runtime.sanitize_overflow
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
        or JITFunction.run is not _TRITONS_RUN
    )


try:
    _nothing_watches()
except AttributeError:  # another Triton's knobs
    knobs = None


class Launcher:
    """A kernel with its constants. Its parameters are pointers first, then numbers, then constants.

    Triton chooses the compiled kernel by the constants, the device, the dtypes of pointers and whether they are aligned
    to 16 bytes, the types of numbers, whether integers fit 32 bits, and, of those that it specialises, whether they are
    1 or multiples of 16. For aligned pointers and 32-bit numbers what it chose is kept, by the rest of these; all other
    calls go through Triton, and so does every call while a hook or a debugging switch of Triton's is on.

    Pointers must be tensors of the current device: their addresses are passed on unseen. Threads may launch at the same
    time: the worst that happens is that two of them ask Triton for the same kernel.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        """`constants` are the kernel's and the compiler's."""
        self.kernel = kernel
        self.constants = constants
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._keeps = knobs is not None and type(kernel) is JITFunction
        if not self._keeps:
            return
        variable = [p for p in kernel.params if not p.is_constexpr]
        assert variable == kernel.params[: len(variable)], f"{kernel} has a parameter after its constants"
        numbers = [p for p in variable if not (p.name == "table" or p.name.endswith("_ptr"))]
        self._specialised = [i for i, p in enumerate(numbers) if not (p.do_not_specialize or p.name.endswith("scale"))]
        # Triton's own launch passes them too, and looks at none.
        self._constants_in_order = tuple(constants[p.name] for p in kernel.params[len(variable) :])

    def __call__(self, grid: tuple[int, ...], pointers: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Launch on the current device and its current stream. `grid` has one to three entries."""
        addresses = [*map(Tensor.data_ptr, pointers)]
        if not (
            self._keeps
            and _nothing_watches()
            and not self.kernel.pre_run_hooks
            and reduce(operator.or_, addresses) % 16 == 0
            and min(numbers) >= -_INT32
            and max(numbers) < _INT32
        ):
            self.kernel[grid](*pointers, *numbers, **self.constants)
            return
        active = driver.active
        device = active.get_current_device()
        key = (
            device,
            *[x.dtype for x in pointers],
            *map(type, numbers),
            *[n if (n := numbers[i]) < 16 else 16 + n % 16 for i in self._specialised],
        )
        kernel = self._kept.get(key)
        if kernel is None:
            kernel = self.kernel[grid](*pointers, *numbers, **self.constants)
            if isinstance(kernel, CompiledKernel) and kernel.metadata.target.backend == "cuda":
                self._kept[key] = kernel
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        kernel.run(
            x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None,
            *addresses, *numbers, *self._constants_in_order,
        )  # fmt: skip
