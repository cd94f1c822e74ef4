"""Mends Triton's interpreter (``TRITON_INTERPRET=1``), which runs kernels on the CPU in numpy.

What is mended, each only as far as the installed Triton needs it:

- Two methods of the builder, ``create_dot`` and ``create_descriptor_store``, take fewer arguments than the front end
  passes.
- A bfloat16 tensor is held as the uint16 bit pattern of its elements, and arithmetic takes the patterns for numbers.
  Here every operation widens bfloat16 to float32 first and rounds its result to nearest even, as the hardware does.
- ``int(tensor)`` of a scalar fails with numpy 2.4 in older Tritons.
- Every call of a device function patched the whole language module anew, which took most of the time.

Floating-point warnings of numpy (inf - inf, a maximum of NaNs alone) are silenced: a kernel may well compute them.
"""

import functools
import os
import warnings

_installed = False


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter. Triton reads the variable when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def install() -> None:
    """Mend the interpreter of the installed Triton. A second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    from triton.runtime import interpreter

    _mend_arity(interpreter)
    _mend_bfloat16(interpreter)
    _mend_scalars(interpreter)
    _patch_language_once(interpreter)
    _silence_warnings(interpreter)


def _replace(owner, name, make):
    """Replace ``owner.name`` by ``make(original)`` where it exists."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(make(original)))


def _mend_arity(interpreter):
    builder = interpreter.InterpreterBuilder

    def dot(original):
        # The options that follow (input precision, two CTAs, ...) steer hardware; numpy multiplies in full precision.
        return lambda self, a, b, d, *options, **named: original(self, a, b, d, None, 0)

    def descriptor_store(original):
        return lambda self, desc, value, indices, *options, **named: original(self, desc, value, indices)

    _replace(builder, "create_dot", dot)
    _replace(builder, "create_descriptor_store", descriptor_store)


def _mend_bfloat16(interpreter):
    import numpy as np
    import triton.language as tl

    handle = interpreter.TensorHandle

    def is_bfloat16(x):
        return isinstance(x, handle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16

    def widen(x):
        """A bfloat16 handle as float32; anything else as it is."""
        if not is_bfloat16(x):
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def round_to_bfloat16(x, to_zero=False):
        """numpy numbers -> bit patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
        wide = np.asarray(x).astype(np.float32)
        bits = wide.view(np.uint32)
        # Half of the last place kept, less one, plus the parity of that place: a tie carries over only if it is odd.
        # The sum cannot wrap but for NaNs, which are set apart.
        rounded = bits if to_zero else bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        pattern = np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded >> 16)
        return pattern.astype(np.uint16)

    def narrow(x):
        """A float32 handle as bfloat16. A comparison keeps its booleans under its operands' type."""
        data = x.data if x.data.dtype == np.bool_ else round_to_bfloat16(x.data)
        return handle(data, tl.bfloat16)

    def in_float32(original):
        def operation(self, *operands, **named):
            if not any(is_bfloat16(x) for x in operands):
                return original(self, *operands, **named)
            return narrow(original(self, *(widen(x) for x in operands), **named))

        return operation

    def cast(original):
        def operation(self, source, target_type, *rounding):
            target = target_type.scalar
            if tl.bfloat16 not in (source.dtype.scalar, target):
                return original(self, source, target_type, *rounding)
            if source.dtype.scalar == target:
                return source
            source = widen(source)
            if target == tl.bfloat16:
                to_zero = any(mode == interpreter._ir.ROUNDING_MODE.RTZ for mode in rounding)
                return handle(round_to_bfloat16(source.data, to_zero), tl.bfloat16)
            return handle(source.data.astype(interpreter._get_np_dtype(target_type)), target)

        return operation

    def dot(original):
        def operation(self, a, b, d, *options):
            # numpy multiplies float32 by BLAS and half precision by a slow loop; either product is exact in float32.
            a, b = (
                handle(x.data.astype(np.float32), tl.float32) if x.data.dtype == np.float16 else widen(x)
                for x in (a, b)
            )
            result = original(self, a, b, widen(d), *options)
            return narrow(result) if is_bfloat16(d) else result

        return operation

    def reduction(original):
        def operation(self, inputs):
            if not isinstance(inputs, tuple):
                return operation(self, (inputs,))[0]
            wide = tuple(
                tl.core.tensor(widen(x.handle), _like(tl, x.type, tl.float32)) if is_bfloat16(x.handle) else x
                for x in inputs
            )
            results = original(self, wide)
            return tuple(
                tl.core.tensor(narrow(y.handle), _like(tl, y.type, tl.bfloat16))
                if is_bfloat16(x.handle) and y.dtype == tl.float32
                else y
                for x, y in zip(inputs, results, strict=False)
            )

        return operation

    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "ternary_op", "unary_op", "create_fma", "create_rsqrt", "create_erf"):
        _replace(builder, name, in_float32)
    for name in ("cast_impl", "create_fp_to_fp"):
        _replace(builder, name, cast)
    _replace(builder, "create_dot", dot)
    _replace(interpreter.ReduceScanOpInterface, "apply", reduction)
    builder.get_bf16 = lambda self, value: handle(round_to_bfloat16(np.array([value])), tl.bfloat16)


def _like(tl, kind, element):
    return tl.block_type(element, kind.shape) if kind.is_block() else element


def _mend_scalars(interpreter):
    def with_scalars(original):
        def patch(tensor, scope):
            original(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        return patch

    _replace(interpreter, "_patch_lang_tensor", with_scalars)


def _patch_language_once(interpreter):
    import triton.language as tl

    def unless_patched(original):
        # Patching replaces builtins by plain functions, so one builtin tells whether a module was patched. A device
        # function runs inside a kernel, whose own patch has reached at least the methods of tensors.
        @functools.cache
        def modules(function):
            return tuple(module for module in (tl, tl.core) if any(x is module for x in function.__globals__.values()))

        def call(self, *args, **kwargs):
            if any(tl.core.is_builtin(module.load) for module in modules(self.fn)):
                return original(self, *args, **kwargs)
            try:
                return self.rewrite()(*args, **kwargs)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error

        return call

    _replace(interpreter.InterpretedFunction, "__call__", unless_patched)


def _silence_warnings(interpreter):
    import numpy as np

    def silently(original):
        def run(self, *args, **kwargs):
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                return original(self, *args, **kwargs)

        return run

    _replace(interpreter.GridExecutor, "__call__", silently)
