"""The builder calls of TLX that synchronise: mbarriers, named barriers, meetings of a cluster, fences."""

from gemattn.testing.tlx_sim.barriers import Barrier, NamedBarrier
from gemattn.testing.tlx_sim.builder import MemoryBuilder, scalar


class BarrierBuilder(MemoryBuilder):
    """Barriers and fences."""

    def create_alloc_barriers(self, count, arrivals, layout):
        machine = self.machine
        machine.step()
        barriers = [Barrier("?", int(scalar(arrivals)), machine.new_lane()) for _ in range(int(scalar(count)))]
        machine.program.allocations.append(barriers)
        machine.program.memory.barrier_bytes += 8 * len(barriers)
        machine.check_capacity()
        return barriers

    def remote_barrier(self, barrier, rank):
        """The barrier in the same place of another program."""
        mine, other = self.machine.program, self._other(rank)
        for theirs, ours in zip(other.allocations, mine.allocations, strict=False):
            if isinstance(ours, list):
                for place, candidate in enumerate(ours):
                    if candidate is barrier:
                        return theirs[place]
        raise RuntimeError(f"{barrier.name} is used before program {rank} of the cluster has made it")

    def create_barrier_expect(self, barrier, size, pred):
        machine = self.machine
        machine.step()
        if scalar(pred):
            barrier.arrive(1, *machine.release(), expected=int(scalar(size)))

    def create_barrier_wait(self, barrier, phase, pred):
        machine = self.machine
        machine.step()
        if not scalar(pred):
            return
        parity = int(scalar(phase))
        machine.scheduler.wait(lambda: barrier.ended(parity), lambda: barrier.describe(parity))
        machine.acquire(barrier.reached, barrier.reached_async)

    def create_barrier_arrive(self, barrier, count, pred):
        self._arrive(barrier, int(scalar(count)), pred)
        self.machine.task.rendezvous += 1  # the leader arrives once all warps have met

    def create_warp_barrier_arrive(self, barrier, count, pred):
        self._arrive(barrier, int(scalar(count)) * 32 * self.machine.task.warps, pred)

    def _arrive(self, barrier, count, pred):
        machine = self.machine
        machine.step()
        if pred is None or scalar(pred):
            barrier.arrive(count, *machine.release())

    def create_map_to_remote_buffer(self, barrier, rank):
        return self.remote_barrier(barrier, int(scalar(rank)))

    def _named(self, number):
        return self.machine.program.named.setdefault(number, NamedBarrier(number))

    def create_named_barrier_arrive(self, number, threads):
        machine = self.machine
        task = machine.step()
        task.rendezvous += 1
        self._named(scalar(number)).come_in(32 * task.warps, scalar(threads), *machine.release(), None)

    def create_named_barrier_wait(self, number, threads):
        machine = self.machine
        task = machine.step()
        task.rendezvous += 1
        barrier = self._named(scalar(number))
        learned = []
        barrier.come_in(
            32 * task.warps,
            scalar(threads),
            *machine.release(),
            lambda *clocks: learned.append([dict(c) for c in clocks]),
        )
        machine.scheduler.wait(
            lambda: bool(learned),
            lambda: f"named barrier {barrier.number}: {barrier.come} of {barrier.threads} threads have come",
        )
        machine.acquire(*learned[0])

    def create_cluster_barrier(self):
        self.meet()

    def meet(self):
        """Wait for all programs of the cluster."""
        machine = self.machine
        program = machine.program
        program.meetings += 1
        if len(program.cluster) == 1:
            return
        mine = program.meetings
        clocks = program.cluster[0].known_at.setdefault(mine, [])
        clocks.append(machine.release())
        machine.scheduler.wait(
            lambda: all(p.meetings >= mine for p in program.cluster), lambda: "the other programs of the cluster"
        )
        for known in clocks:
            machine.acquire(*known)

    def create_fence_mbarrier_init_cluster(self):
        pass

    def create_fence_async_shared(self, cluster):
        self.machine.step()
        self.machine.fence()

    def create_threadfence(self, scope):
        pass

    def create_barrier(self):
        self.machine.task.rendezvous += 1
