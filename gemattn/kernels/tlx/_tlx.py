"""The only import of TLX, and what TLX lacks."""

import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import builtin
from triton.language.extra.cuda.inline_ptx_lib import _mul_f32x2 as mul_f32x2  # two values an instruction: sm_100
from triton.language.extra.cuda.inline_ptx_lib import _sub_f32x2 as sub_f32x2

__all__ = ["descriptor_slot", "mul_f32x2", "read_descriptor", "sub_f32x2", "tlx"]

_DESCRIPTOR_BYTES = 128


# Triton's own acquire adds a barrier of the warp group and a wait for memory to each fence.
_ACQUIRE = "{ fence.proxy.tensormap::generic.acquire.gpu [$1], 128; mov.b32 $0, 0; }"


def _place(table, index, _semantic):
    index = _semantic.cast(_semantic.to_tensor(index), tl.int64)
    return _semantic.add(table, _semantic.mul(index, _semantic.to_tensor(_DESCRIPTOR_BYTES), True), True)


@builtin
def descriptor_slot(table, index, _semantic=None):
    """Place `index` of a table of TMA descriptors, an int8 pointer to memory aligned to 128 bytes."""
    return tlx.tensor_descriptor_ptr(_place(table, index, _semantic).handle, 1, _DESCRIPTOR_BYTES)


@builtin
def read_descriptor(table, index, block_shape, dtype, _semantic=None):
    """The TMA descriptor that an earlier kernel wrote to place `index` of the table.

    The copy engine may still hold what stood at that address before: the fence has it look again.
    """
    place = _place(table, index, _semantic)
    tl.inline_asm_elementwise(_ACQUIRE, "=r,l", [place], tl.int32, is_pure=False, pack=1, _semantic=_semantic)
    slot = tlx.tensor_descriptor_ptr(place.handle, 1, _DESCRIPTOR_BYTES)
    return tlx.reinterpret_tensor_descriptor(slot, block_shape, dtype, _semantic=_semantic)
