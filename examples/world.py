"""The processes of a run: how they find one another, and how they stop together."""

import logging
import os
import signal
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def hush_libraries() -> None:
    """Silences what TorchRec and PyTorch say about their own plans for their own code; errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class World:
    """This process among those of the run, and its device."""

    rank: int
    size: int
    device: torch.device

    @staticmethod
    def start(device_type: str) -> "World":
        """Joins the processes that torchrun started; without torchrun, a world of one."""
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda: PyTorch sees no GPU here")
        device = torch.device("cpu")
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        # Gloo beside NCCL carries what stays on the CPU: metrics, requests to stop, the checkpoints' plans.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        return World(dist.get_rank(), dist.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and talks for all."""
        return self.rank == 0

    def from_first(self, value: Any) -> Any:
        """What the first process has."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, on the first one; an empty list on the others."""
        values: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None, dst=0)
        return values


class StopRequest:
    """Ctrl-C or SIGTERM asks for a stop after the current step; calling this says whether one came to any of the ranks.

    All ranks call it alike. Another signal, some seconds later, does what it would do without this; one that comes at
    once is torchrun's, which passes Ctrl-C on to processes that the terminal told already. As a context manager it puts
    the handlers back that were there before.
    """

    PATIENCE = 3.0  # seconds

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > self.PATIENCE:
            self.__exit__()
            signal.raise_signal(number)

    def __call__(self) -> bool:
        """Whether to stop."""
        asked = self._asked_at is not None
        if self._world.size == 1:
            return asked
        by_anyone = torch.tensor(int(asked))
        dist.all_reduce(by_anyone, op=dist.ReduceOp.MAX)
        return bool(by_anyone)
