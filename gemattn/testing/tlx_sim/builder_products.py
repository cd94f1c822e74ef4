"""The builder calls of TLX that multiply: wgmma and tcgen05."""

import numpy as np

from gemattn.testing.tlx_sim.builder import Handle, scalar, whole
from gemattn.testing.tlx_sim.builder_copies import CopyBuilder, widened
from gemattn.testing.tlx_sim.memory import View


class Pending(Handle):
    """The result of a product that may not be complete."""

    def __init__(self, dtype, machine):
        """Empty at first."""
        self.dtype, self.attr = dtype, {}
        self.machine, self.value, self.settled = machine, None, False

    @property
    def data(self):
        """The numbers; reading them before they are waited for is a finding."""
        if not self.settled:
            machine = self.machine
            place = machine.here()
            machine.report.add(
                "pending read", f"the result of async_dot is used at {place} before async_dot_wait", (place,)
            )
            machine.scheduler.wait(lambda: self.value is not None, lambda: "a product")
            self.settled = True
        return self.value


class Builder(CopyBuilder):
    """All builder calls of TLX."""

    # wgmma.

    def create_warp_group_dot(self, a, b, acc, precision, imprecise, is_async):
        machine = self.machine
        machine.step()
        left, right = (x if isinstance(x, Handle) else whole(x) for x in (a, b))
        reads = [x for x in (left, right) if isinstance(x, View)]
        in_registers = None if isinstance(left, View) else widened(left.data, left.dtype.scalar)
        before = acc if isinstance(acc, Pending) else None
        start = None if before is not None else acc.data
        result = Pending(acc.dtype, machine)

        def run():
            x = widened(left.read(), left.element) if in_registers is None else in_registers
            result.value = x @ widened(right.read(), right.element) + (start if before is None else before.value)

        engine = machine.engine("wgmma")
        result.number = engine.issued + 1
        machine.issue("async_dot", engine, reads, [], run, fenced=True)
        return result

    def create_warp_group_dot_wait(self, handles, outstanding):
        machine = self.machine
        machine.step()
        engine = machine.engine("wgmma")
        machine.settle(engine, int(scalar(outstanding)), "async_dot_wait")
        for handle in handles:
            if isinstance(handle, Pending) and handle.number <= engine.known:
                handle.settled = True
        return handles

    # tcgen05.

    def create_tcgen5_dot(self, a, b, d, use_acc, pred, two_ctas, barriers, is_async):
        machine = self.machine
        machine.step()
        if pred is not None and not scalar(pred):
            return None
        accumulate = use_acc is None or bool(scalar(use_acc))
        both = bool(scalar(two_ctas))
        ranks = range(len(machine.program.cluster)) if both else [machine.program.rank]
        if both and machine.program.rank % 2:
            return None  # the leader issues for both
        parts = []
        for rank in ranks:
            views = [whole(x) for x in (a, b, d)]
            parts.append(views if rank == machine.program.rank else [self.peer(v, rank) for v in views])
        reads = [v for left, right, _ in parts for v in (left, right)]
        targets = [target for _, _, target in parts]

        def run():
            right = np.concatenate([widened(r.read(), r.element) for _, r, _ in parts], axis=1)
            for left, _, target in parts:
                product = widened(left.read(), left.element) @ right
                if accumulate:
                    product = product + widened(target.read(), target.element)
                target.write(self.narrowed(product, target.element))

        engine = machine.engine("tcgen05")
        reads += targets if accumulate else []
        machine.issue("async_dot", engine, reads, targets, run, fenced=True)
        for barrier in barriers:
            self._commit(engine, barrier, both)
        if not is_async:
            machine.settle(engine, 0, "async_dot")
        return None

    def _commit(self, engine, barrier, both):
        machine = self.machine
        signalled = [barrier]
        if both:
            signalled = [
                barrier if p is machine.program else self.remote_barrier(barrier, p.rank)
                for p in machine.program.cluster
            ]
        known = []

        def run():
            for target in signalled:
                target.arrive(1, machine.after(known[0]), known[0].seen_by_async)

        _, actor = machine.issue("tcgen05_commit", engine, [], [], run)
        known.append(actor)

    def create_tcgen05_commit(self, barrier, pred):
        machine = self.machine
        machine.step()
        if scalar(pred):
            self._commit(machine.engine("tcgen05"), barrier, len(machine.program.cluster) > 1)

    def create_tmem_copy(self, source, target):
        machine = self.machine
        machine.step()
        source, target = whole(source), whole(target)
        machine.issue(
            "tmem_copy",
            machine.engine("tcgen05"),
            [source],
            [target],
            lambda: target.write(source.read()),
            fenced=False,
        )
