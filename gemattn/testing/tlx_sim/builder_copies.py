"""The builder calls of TLX that copy: TMA, bulk copies, copies within a cluster, cluster launch control."""

import math
import re
from collections import deque

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as _memory
from triton._C.libtriton import ir as _ir
from triton.runtime import interpreter

from gemattn.testing.tlx_sim.builder import Handle, InlineResult, scalar, whole
from gemattn.testing.tlx_sim.builder_barriers import BarrierBuilder
from gemattn.testing.tlx_sim.memory import MemoryFault
from gemattn.testing.tlx_sim.schedule import TO_MEMORY, Operation

_REDUCTIONS = {
    _ir.DESCRIPTOR_REDUCE_KIND.ADD: np.add,
    _ir.DESCRIPTOR_REDUCE_KIND.MIN: np.minimum,
    _ir.DESCRIPTOR_REDUCE_KIND.MAX: np.maximum,
    _ir.DESCRIPTOR_REDUCE_KIND.AND: np.bitwise_and,
    _ir.DESCRIPTOR_REDUCE_KIND.OR: np.bitwise_or,
    _ir.DESCRIPTOR_REDUCE_KIND.XOR: np.bitwise_xor,
}


def widened(values, element):
    """Numbers of any floating-point type as float32."""
    if element == tl.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    if element.is_fp8():
        half = interpreter._convert_float(values, element, tl.float16, None).view(np.float16)
        return half.astype(np.float32)
    return values.astype(np.float32)


class CopyBuilder(BarrierBuilder):
    """Copies."""

    def narrowed(self, values, element):
        """float32 numbers in another floating-point type, rounded to nearest even."""
        wide = Handle(values.astype(np.float32), tl.float32)
        return wide.data if element == tl.float32 else self.cast_impl(wide, element).data

    # Descriptors.

    def create_make_tensor_descriptor(self, base, shape, strides, *rest):
        slot, rest = (rest[0], rest[1:]) if isinstance(rest[0], Handle) else (None, rest)
        descriptor = super().create_make_tensor_descriptor(base, shape, strides, *rest)
        if slot is not None:
            number = self.machine.descriptors.put(int(scalar(slot)), descriptor)
            self.machine.program.descriptors.add(number)  # Triton adds the fence for the program itself
        return descriptor

    def create_tensormap_fenceproxy_acquire(self, slot):
        self.machine.program.descriptors.add(self.machine.descriptors.number(int(scalar(slot))))

    def create_reinterpret_tensor_descriptor(self, slot, block):
        machine, address = self.machine, int(scalar(slot))
        descriptor = machine.descriptors.get(address)
        if machine.descriptors.number(address) not in machine.program.descriptors:
            place = machine.here()
            machine.report.add(
                "missing fence", f"a descriptor of an earlier kernel is read at {place} without an acquire", (place,)
            )
        wanted = [int(scalar(n)) for n in block.shape]
        if list(descriptor.block_shape) != wanted or descriptor.base.dtype.element_ty != block.element_ty:
            made = f"{list(descriptor.block_shape)} of {descriptor.base.dtype.element_ty}"
            raise MemoryFault(f"a descriptor made for {made} is read as {wanted} of {block.element_ty}")
        return descriptor

    def create_global_scratch_alloc(self, size, alignment):
        return Handle(
            np.array([self.machine.descriptors.scratch(size, alignment)], np.uint64), tl.pointer_type(tl.int8)
        )

    def create_async_TMA_load(
        self, targets, descriptor, offsets, barrier, pred, result, cache, eviction, volatile, two_ctas
    ):
        machine = self.machine
        machine.step()
        if not scalar(pred):
            return
        if targets:
            raise NotImplementedError("the TLX simulator does not model multicast loads")
        view = whole(result)
        if math.prod(descriptor.block_shape) != math.prod(view.shape):
            raise MemoryFault(f"a load of {list(descriptor.block_shape)} into {view.label} {list(view.shape)}")

        def run():
            view.write(self.create_descriptor_load(descriptor, offsets, None, None).data)

        machine.copy("async_descriptor_load", barrier, [], [view], run, view.nbytes)

    def create_async_TMA_prefetch(self, *args):
        self.machine.step()

    create_prefetch = create_prefetch_tensormap = create_async_TMA_prefetch

    def _bulk_store(self, what, source, write, fenced=False):
        """`write(numbers)` follows the read of shared memory, and is not waited for."""
        machine = self.machine
        machine.step()
        view = whole(source)
        engine = machine.engine("bulk store")
        number = engine.issued + 1

        def run():
            numbers = view.read()

            def reach_memory():
                write(numbers)
                engine.on_the_way.remove(number)

            # A queue of its own: the order in which stores reach memory is not that of their issue.
            machine.scheduler.enqueue(deque(), Operation(TO_MEMORY, reach_memory))

        engine.on_the_way.add(number)
        machine.issue(what, engine, [view], [], run, fenced)

    def create_async_TMA_store(self, descriptor, offsets, source, eviction):
        self._bulk_store(
            "async_descriptor_store",
            source,
            lambda numbers: self.create_descriptor_store(
                descriptor, Handle(numbers, descriptor.base.dtype.element_ty), offsets
            ),
            fenced=not self.machine.explicit_fences,
        )

    def create_descriptor_store(self, descriptor, value, offsets, *options):
        addresses, mask = descriptor.materialize_pointers(offsets)
        self.machine.addresses.check(addresses.data, mask, value.data.dtype.itemsize)
        _memory.store(addresses.data, value.data.reshape(mask.shape), mask)

    def create_async_TMA_reduce(self, kind, descriptor, offsets, source, eviction):
        element = descriptor.base.dtype.element_ty

        def write(numbers):
            old = self.create_descriptor_load(descriptor, offsets, None, None).data
            numbers = numbers.reshape(old.shape)
            if element.is_floating():
                numbers = self.narrowed(_REDUCTIONS[kind](widened(old, element), widened(numbers, element)), element)
            else:
                numbers = _REDUCTIONS[kind](old, numbers)
            self.create_descriptor_store(descriptor, Handle(numbers, element), offsets)

        self._bulk_store("async_descriptor_store", source, write, fenced=not self.machine.explicit_fences)

    def create_async_store(self, source, pointer, size):
        count = int(scalar(size))

        def write(numbers):
            flat = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)[:count]
            self.machine.addresses.check(_bytes_from(pointer, count), np.True_, 1)
            _memory.store(_bytes_from(pointer, count), flat, np.ones(count, np.bool_))

        self._bulk_store("async_store", source, write)

    def create_async_TMA_store_wait(self, outstanding):
        machine = self.machine
        machine.step()
        machine.settle(machine.engine("bulk store"), int(scalar(outstanding)), "async_descriptor_store_wait")

    def create_inline_asm(self, text, constraints, values, types, pure, pack):
        if "fence.proxy.tensormap::generic.acquire" in text:
            self.create_tensormap_fenceproxy_acquire(values[0])
            return InlineResult(Handle(np.zeros(1, np.int32), tl.int32))
        waited = re.search(r"cp\.async\.bulk\.wait_group(\.read)? (\d+)", text)
        if waited is None:
            return super().create_inline_asm(text, constraints, values, types, pure, pack)
        if "@p" in text and not int(scalar(values[0])):  # the first operand is the predicate
            return InlineResult(Handle(np.zeros(1, np.int32), tl.int32))
        self.create_async_TMA_store_wait(int(waited[2]))
        if not waited[1]:  # not only read, but written
            machine = self.machine
            engine = machine.engine("bulk store")
            last = engine.issued - int(waited[2])
            machine.scheduler.wait(
                lambda: min(engine.on_the_way, default=last + 1) > last, lambda: "stores to reach memory"
            )
        return InlineResult(Handle(np.zeros(1, np.int32), tl.int32))

    # Copies without a descriptor.

    def create_async_load(self, source, result, mask, other, cache, eviction, volatile, bulk_size, barrier, bulk):
        machine = self.machine
        machine.step()
        view = whole(result)
        if bulk:
            count = int(scalar(bulk_size))
            part = view.slice([0], [count // view.dtype.itemsize])

            def run():
                addresses = _bytes_from(source, count)
                self.machine.addresses.check(addresses, np.True_, 1)
                raw = _memory.load(addresses, np.ones(count, np.bool_), np.zeros(count, np.uint8), np.dtype(np.uint8))
                part.write(raw.view(view.dtype))

            machine.copy("async_load", barrier, [], [part], run, count)
            return None
        mask = mask or Handle(np.ones(source.data.shape, np.bool_), tl.int1)

        def run_each():
            view.write(self.create_masked_load(source, mask, other, None, None, False).data)

        machine.issue("async_load", machine.engine("async_load"), [], [view], run_each)
        return None

    def create_async_commit_group(self, tokens):
        engine = self.machine.engine("async_load")
        engine.groups.append(engine.issued)

    def create_async_wait(self, tokens, outstanding):
        machine = self.machine
        machine.step()
        engine = machine.engine("async_load")
        done = engine.groups[: len(engine.groups) - int(scalar(outstanding))]
        machine.settle(engine, engine.issued - (done[-1] if done else engine.known), "async_load_wait_group")

    # Copies between the programs of a cluster.

    def create_async_remote_copy(self, source, target, rank, barrier):
        machine = self.machine
        machine.step()
        rank = int(scalar(rank))
        view, remote = whole(source), self.peer(whole(target), rank)
        machine.copy(
            "async_remote_shmem_copy",
            self.remote_barrier(barrier, rank),
            [view],
            [remote],
            lambda: remote.write(view.read()),
            view.nbytes,
        )

    def create_async_remote_store(self, target, value, rank, barrier):
        machine = self.machine
        machine.step()
        rank = int(scalar(rank))
        remote, numbers = self.peer(whole(target), rank), value.data
        machine.copy(
            "async_remote_shmem_store",
            self.remote_barrier(barrier, rank),
            [],
            [remote],
            lambda: remote.write(numbers),
            remote.nbytes,
        )

    # Cluster launch control.

    def create_alloc_clc_responses(self, count, layout):
        return self.create_local_alloc([count, 4], tl.int32, None, None, None)

    def clc_issue(self, response, barrier):
        machine = self.machine
        machine.step()
        cluster = machine.program.cluster
        if machine.program.rank:
            return
        views = [whole(response) if p.rank == 0 else self.peer(whole(response), p.rank) for p in cluster]
        barriers = [barrier if p.rank == 0 else self.remote_barrier(barrier, p.rank) for p in cluster]
        taken = []

        def run():
            # A request may come back empty while programs wait: another processor was quicker.
            waiting = machine.waiting_programs
            taken.append(waiting.popleft() if waiting and machine.scheduler.policy.random.random() < 0.8 else None)

        for view, target in zip(views, barriers, strict=True):

            def answer(view=view):
                if not taken:
                    run()
                x, y, z = taken[0] if taken[0] is not None else (-1, -1, -1)
                view.write(np.array([x, y, z, 0], np.int32))

            machine.copy("clc try_cancel", target, [], [view], answer, 16)

    def clc_query(self, response):
        values = self.create_local_load(response).data
        offset = self.machine.program.rank if values[0] >= 0 else 0
        return [Handle(np.array([n], np.int32), tl.int32) for n in (values[0] + offset, *values[1:3])]


def _bytes_from(pointer, count):
    return pointer.data.reshape(-1)[:1] + np.arange(count, dtype=np.uint64)
