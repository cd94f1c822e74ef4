"""The builder calls of TLX that Triton's interpreter lacks: memory, views, barriers, tasks of a cluster."""

import dataclasses

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from gemattn.testing.tlx_sim.barriers import Barrier
from gemattn.testing.tlx_sim.inline_asm import run_inline_asm
from gemattn.testing.tlx_sim.machine import Machine
from gemattn.testing.tlx_sim.memory import Alias, Buffers, Group

Handle = interpreter.TensorHandle


@dataclasses.dataclass(frozen=True)
class Options(interpreter.InterpreterOptions):
    """What TLX asks of the compiler's options."""

    num_warps: int = 4
    warp_size: int = 32
    sanitize_overflow: bool = False


class InlineResult:
    """What the front end takes the results of inline assembly from."""

    def __init__(self, handle):
        """Of one result."""
        self.handle = handle

    def get_result(self, place):
        """The result."""
        return self.handle


def scalar(handle):
    """The Python number of a scalar handle, or of what is one already."""
    value = getattr(handle, "data", handle)
    return value.item() if isinstance(value, np.ndarray) else tl.core._unwrap_if_constexpr(value)


def whole(handle):
    """The view that a handle stands for; of an allocation of one buffer, that buffer."""
    return handle.view(0) if isinstance(handle, Buffers) else handle


class MemoryBuilder(interpreter.InterpreterBuilder):
    """Memory, views, barriers and clusters."""

    def __init__(self, machine: Machine):
        """For one launch."""
        super().__init__()
        self.machine = machine
        self.options = Options(arch=f"sm{machine.arch}")

    def __getattr__(self, name):
        # Layouts and types of the compiler's own mean nothing here.
        if name.startswith("make_") or (name.startswith("get_") and name.endswith("_type")):
            return lambda *args, **kwargs: None
        raise AttributeError(f"the TLX simulator does not model {name}")

    # Numbers.

    def get_int32(self, value):
        return Handle(np.array([value & 0xFFFFFFFF], np.uint32).view(np.int32), tl.int32)

    # The launch.

    def create_get_program_id(self, axis):
        return Handle(np.array([self.machine.program.place[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis):
        return Handle(np.array([self.machine.grid[axis]], np.int32), tl.int32)

    def create_cluster_cta_rank(self):
        return Handle(np.array([self.machine.program.rank], np.int32), tl.int32)

    def create_cluster_size_1d(self):
        return Handle(np.array([len(self.machine.program.cluster)], np.int32), tl.int32)

    def create_clock64(self):
        return Handle(np.array([self.machine.report.statistics["choices"]], np.int64), tl.int64)

    def create_thread_id(self, axis):
        return Handle(np.array([0], np.int32), tl.int32)

    # Global memory.

    def create_masked_load(self, pointers, mask, other, *options, **named):
        element = pointers.get_element_ty()
        self.machine.addresses.check(pointers.data, mask.data, interpreter._get_np_dtype(element).itemsize)
        return super().create_masked_load(pointers, mask, other, *options, **named)

    def create_masked_store(self, pointers, value, mask, *options):
        self.machine.addresses.check(pointers.data, mask.data, value.data.dtype.itemsize)
        return super().create_masked_store(pointers, value, mask, *options)

    def create_atomic_rmw(self, operation, pointers, value, mask, *options):
        self.machine.addresses.check(pointers.data, mask.data, value.data.dtype.itemsize)
        return super().create_atomic_rmw(operation, pointers, value, mask, *options)

    # Allocation.

    def create_local_alloc(self, shape, element, layout, reused, alias):
        return self._allocate("smem", shape, element, reused, alias)

    def create_tmem_alloc(self, shape, element, layout, reused, alias):
        return self._allocate("tmem", shape, element, reused, alias)

    def _allocate(self, space, shape, element, reused, alias):
        self.machine.step()
        program = self.machine.program
        count, *shape = (int(scalar(n)) for n in shape)
        folded = space == "tmem" and shape[0] == 64 and len(program.cluster) > 1
        buffers = Buffers(space, count, tuple(shape), element, interpreter._get_np_dtype(element), folded)
        if reused is not None:
            reused.view(0)  # its place is needed now
            buffers.place(reused.storage, reused.base, buffers.size)
        elif alias is not None:
            buffers.alias = alias
            alias.members.append(buffers)
        else:
            buffers.alias = Alias(program.memory, space, None, [buffers])
            buffers.alias.settle()
        program.allocations.append(buffers)
        self.machine.check_capacity()
        return buffers

    def create_storage_alias_spec(self, space, size):
        return Alias(self.machine.program.memory, space, size)

    def create_reuse_group(self, elements, kind, size):
        return Group(list(elements), kind == "distinct", size)

    def create_set_buffer_overlap(self, alias, tree):
        alias.settle(tree)
        self.machine.check_capacity()

    def name(self, handle, name):
        """Tell an allocation the name of the variable that holds it."""
        if isinstance(handle, Buffers) and handle.name == "?":
            handle.name = name
        if isinstance(handle, list):
            for place, barrier in enumerate(handle):
                if isinstance(barrier, Barrier) and barrier.name == "?":
                    barrier.name = f"{name}[{place}]"

    # Views.

    def create_memdesc_subview(self, handle, place):
        place = int(scalar(place))
        if isinstance(handle, list):
            if not 0 <= place < len(handle):
                raise IndexError(f"index {place} of {len(handle)} barriers, {handle[0].name} the first")
            return handle[place]
        return handle.view(place) if isinstance(handle, Buffers) else handle.index(place)

    def create_memdesc_subslice(self, handle, begins, shape):
        return whole(handle).slice([int(scalar(b)) for b in begins], [int(scalar(n)) for n in shape])

    def create_tmem_subslice(self, handle, begin, size):
        view = whole(handle)
        return view.slice([0] * (len(view.shape) - 1) + [int(scalar(begin))], [*view.shape[:-1], int(scalar(size))])

    def create_memdesc_trans(self, handle, order):
        return whole(handle).transpose([int(scalar(d)) for d in order])

    def create_memdesc_reshape(self, handle, shape):
        return whole(handle).reshape([int(scalar(n)) for n in shape])

    def create_memdesc_reinterpret(self, handle, element, shape):
        shape = [int(scalar(n)) for n in shape]
        return whole(handle).reinterpret(element, interpreter._get_np_dtype(element), shape)

    def create_require_layout(self, handle, layout, **options):
        return handle

    def create_release_layout(self, handle):
        return handle

    def create_assert_same_layout(self, *args):
        pass

    create_assert_same_layout_expected = create_dump_layout = create_assert_same_layout

    # Loads and stores by the task itself.

    def _load(self, handle, what, warps_meet):
        machine, view = self.machine, whole(handle)
        machine.step()
        actor = machine.actor(what, warps_meet)
        machine.touch(view, actor, False)
        machine.check_written(view, actor.what, actor.place)
        return Handle(view.read(), view.element)

    def _store(self, handle, value, what, warps_meet):
        machine, view = self.machine, whole(handle)
        machine.step()
        machine.touch(view, machine.actor(what, warps_meet), True)
        view.write(np.broadcast_to(value.data, view.logical or view.shape))

    def create_local_load(self, handle, token=None, **options):
        return self._load(handle, "local_load", False)

    def create_local_store(self, handle, value):
        self._store(handle, value, "local_store", False)

    def create_tmem_load(self, handle, layout, token=None, **options):
        return self._load(handle, "local_load", True)

    def create_tmem_store(self, handle, value):
        self._store(handle, value, "local_store", True)

    def create_local_gather(self, source, indices, axis):
        values, places = self.create_local_load(source), self.create_local_load(indices)
        return Handle(np.take_along_axis(values.data, places.data.astype(np.int64), axis), values.dtype)

    def create_remote_store(self, handle, value, rank):
        self._store(self.peer(whole(handle), int(scalar(rank))), value, "remote_shmem_store", False)

    def peer(self, view, rank):
        """The same place in another program of the cluster."""
        mine, other = self.machine.program, self._other(rank)
        pairs = zip(other.allocations, mine.allocations, strict=False)
        theirs = next((t for t, x in pairs if isinstance(x, Buffers) and x.storage is view.storage), None)
        if theirs is None:
            raise RuntimeError(f"{view.label} is used before program {rank} of the cluster has made it")
        theirs.view(0)
        label = f"{view.label} of {other.name}"
        return dataclasses.replace(view, storage=theirs.storage, label=label)

    def _other(self, rank):
        cluster = self.machine.program.cluster
        if not 0 <= rank < len(cluster):
            raise IndexError(f"program {rank} of a cluster of {len(cluster)}")
        return cluster[rank]

    # Arithmetic that numpy does otherwise, and what the interpreter leaves out.

    def create_maxnumf(self, a, b):
        return self.binary_op(a, b, np.fmax)

    def create_minnumf(self, a, b):
        return self.binary_op(a, b, np.fmin)

    def create_inline_asm(self, text, constraints, values, types, pure, pack):
        return InlineResult(run_inline_asm(text, values, Handle))

    def vote_ballot_sync(self, mask, pred):
        # Which lanes agree depends on the layout; that any does is all that can be told here.
        return Handle(np.where(pred.data, -1, 0).astype(np.int32), tl.int32)
