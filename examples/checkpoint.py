"""Checkpoints of a run: model, optimizer, random state and position, by torch.distributed.checkpoint.

``checkpoints/index.json`` says which folder is the last and which the best, how far training was, and under which
configuration. It is replaced in one step after a folder is complete, so a run that dies while it saves still has its
checkpoint before. Folders that the index no longer names are removed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: the current epoch, from 0.
        step: batches trained in this epoch (not those that a pipeline has drawn ahead).
        global_step: batches trained in all.
        examples: examples trained in all, over all ranks.
        train_seconds: time in training steps.
        seconds: time in all, set-up and evaluations included.
        best_ne: lowest mean NE on valid; None before the first evaluation.
        evals_since_best: evaluations in a row that were no better.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    examples: int = 0
    train_seconds: float = 0.0
    seconds: float = 0.0
    best_ne: float | None = None
    evals_since_best: int = 0


class CheckpointError(ValueError):
    """There is no checkpoint, or it belongs to another configuration; the message says where they differ."""


class Checkpoints:
    """The checkpoints in ``run_dir``; every method is called by all ranks.

    Args:
        run_dir: the run's folder.
        config: what a checkpoint must agree on to be continued, JSON values by name.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        self.folder = run_dir / "checkpoints"
        # As JSON would give it back, so that tuples equal lists when they are compared.
        self._config = json.loads(json.dumps(config))
        self._last: str | None = None
        self._best: str | None = None
        self._saves = 0

    @property
    def last(self) -> Path:
        """Folder of the last checkpoint."""
        if self._last is None:
            raise CheckpointError(f"{self.folder}: no checkpoint yet")
        return self.folder / self._last

    def exists(self) -> bool:
        """Whether this run has been saved."""
        return (self.folder / "index.json").is_file()

    def save(self, model: nn.Module, optimizer: Any, progress: Progress, *, is_best: bool) -> None:
        """Saves everything that training needs to go on; ``is_best`` keeps it as the best model so far."""
        self._saves += 1
        name = f"step-{progress.global_step:07d}.{self._saves}"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **_random_state()}
        dcp.save(state, checkpoint_id=self.folder / name)
        self._last = name
        self._best = name if is_best else self._best
        if dist.get_rank() == 0:
            index = {"last": name, "best": self._best, "saves": self._saves, "progress": asdict(progress)}
            part = self.folder / "index.json.part"
            part.write_text(json.dumps({**index, "config": self._config}, indent=2) + "\n")
            os.replace(part, self.folder / "index.json")
            for old in self.folder.glob("step-*"):
                if old.name not in (self._last, self._best):
                    shutil.rmtree(old)
        dist.barrier()

    def load(self, model: nn.Module, optimizer: Any) -> Progress:
        """Restores the last checkpoint in place.

        Raises:
            CheckpointError: no checkpoint, or one of another configuration, each field that differs with both values.
        """
        path = self.folder / "index.json"
        if not path.is_file():
            raise CheckpointError(f"nothing to resume: {path} does not exist")
        index = json.loads(path.read_text())
        _check_config(path, index["config"], self._config)
        self._last, self._best, self._saves = index["last"], index["best"], index["saves"]
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **_random_state()}
        dcp.load(state, checkpoint_id=self.last)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state)
        return Progress(**index["progress"])

    def load_best(self, model: nn.Module) -> None:
        """Restores the weights with the best NE on valid."""
        if self._best is None:
            raise CheckpointError(f"{self.folder}: no evaluation has been saved yet")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=self.folder / self._best)
        model.load_state_dict(state["model"])


def _check_config(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    nothing = "nothing"
    differ = [
        f"{name}: the checkpoint has {saved.get(name, nothing)!r}, this run {ours.get(name, nothing)!r}"
        for name in sorted(saved.keys() | ours.keys())
        if saved.get(name, nothing) != ours.get(name, nothing)
    ]
    if differ:
        raise CheckpointError(f"{path}: the checkpoint is of another configuration; " + "; ".join(differ))


def _random_state() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    rank = dist.get_rank()
    torch.set_rng_state(state[f"random.{rank}.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state[f"random.{rank}.cuda"])
