"""A training step of the GEM-like model, jagged against the same model on padded tensors with SDPA.

The model, its sharded tables and its optimizers are those of `examples/train_gem.py`, under bfloat16 autocast. Both
twins share the weights and take steps in turn; the loss of both on the same batch is compared first. Tokens and FLOPs
count true events in both, so padding shows as lost speed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent
from torch.utils.flop_counter import FlopCounterMode

from gemattn.bench import machine, results
from gemattn.bench.model_inputs import ModelRecipe, StepInputs, import_beside, make_inputs
from gemattn.bench.model_padded import padded_attention
from gemattn.bench.report import MEANINGLESS
from gemattn.bench.run import in_turn

RECIPES = {
    "short": ModelRecipe(batch=1024, streams={"clicks": 256, "impressions": 512}),
    "long": ModelRecipe(batch=512, streams={"clicks": 1024, "impressions": 2048}),
    "tiny": ModelRecipe(batch=8, streams={"clicks": 16, "impressions": 24}, items=1000),
}

PHASES = ("forward", "backward", "optimizer")
EMBEDDING = "bench::embedding"
LOSS_TOLERANCE = 0.02
"""Relative difference of the twins' losses that rounding to bfloat16 may make."""

# Outermost profiler events whose device time counts for a share, by a part of their names.
_ATTENTION = ("gemattn::jagged_attention_", "aten::scaled_dot_product_attention", "aten::_scaled_dot_product")
_EMBEDDINGS = (EMBEDDING, "fbgemm::split_embedding", "SplitLookup", "aten::embedding")


@dataclass
class Twin:
    """One way to run the model: its batch, and what must be active around a step."""

    batch: Any
    around: Callable[[], AbstractContextManager[None]]
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})


class Trainer:
    """Takes training steps and times their phases."""

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        mark_embeddings(model)

    def loss(self, twin: Twin) -> Tensor:
        """The loss of a twin's batch, under autocast."""
        with twin.around(), torch.autocast(self.device.type, torch.bfloat16):
            loss: Tensor = self.model(twin.batch)[0]
        return loss

    def step(self, twin: Twin) -> list[float]:
        """Milliseconds of forward, backward and optimizer of one step."""
        marks = [self._mark()]
        loss = self.loss(twin)
        marks.append(self._mark())
        with twin.around():  # activation checkpointing runs forward again in backward
            loss.backward()
        marks.append(self._mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self._mark())
        self.synchronize()
        return [self._between(a, b) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return float(a.elapsed_time(b)) if self.device.type == "cuda" else 1e3 * (b - a)


def mark_embeddings(model: nn.Module) -> None:
    """Put the forward pass of every outermost embedding collection into a profiler range named `EMBEDDING`."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or "Embedding" not in type(module).__name__ or "Collection" not in type(module).__name__:
            continue
        inside.update(module.modules())
        ranges: list[Any] = []

        def enter(*_: Any, ranges: list[Any] = ranges) -> None:
            ranges.append(torch.profiler.record_function(EMBEDDING))
            ranges[-1].__enter__()

        def leave(*_: Any, ranges: list[Any] = ranges) -> None:
            ranges.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def compare_losses(trainer: Trainer, jagged: Twin, padded: Twin) -> tuple[float, float]:
    """Both twins' losses in evaluation mode.

    Raises:
        ValueError: they differ by more than rounding, so the padded twin is not the same model.
    """
    trainer.model.eval()
    with torch.no_grad():
        a, b = (float(trainer.loss(twin)) for twin in (jagged, padded))
    trainer.model.train()
    if not abs(a - b) <= LOSS_TOLERANCE * abs(a):
        raise ValueError(f"the loss is {a:.4f} jagged and {b:.4f} padded: not the same model, so not timed")
    return a, b


def count_flops(trainer: Trainer, twin: Twin) -> int:
    """FLOPs of one training step by PyTorch's counter: matrix products and attention, of the rows that are there."""
    with FlopCounterMode(display=False) as counter:
        trainer.step(twin)
    return int(counter.get_total_flops())


def shares(trainer: Trainer, twin: Twin) -> dict[str, float]:
    """Shares of one profiled step: attention and embedding, forward and backward together.

    On a GPU they are kernel time over the step's time, on a CPU host time.
    """
    on_gpu = trainer.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=activities) as profiler:
        total = sum(trainer.step(twin))
    events = list(profiler.events())
    return {
        "attention": outermost_ms(events, _ATTENTION, on_gpu) / total,
        "embedding": outermost_ms(events, _EMBEDDINGS, on_gpu) / total,
    }


def outermost_ms(events: list[FunctionEvent], names: tuple[str, ...], on_gpu: bool) -> float:
    """Milliseconds in events whose name holds one of `names`, those below another such event left out."""

    def wanted(event: FunctionEvent) -> bool:
        return any(name in event.name for name in names)

    total = 0.0
    for event in filter(wanted, events):
        parent = event.cpu_parent
        while parent is not None and not wanted(parent):
            parent = parent.cpu_parent
        if parent is None:
            total += event.device_time_total if on_gpu else event.cpu_time_total
    return total / 1e3


def measure(trainer: Trainer, inputs: StepInputs, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Figures of both twins: seconds, phases, shares, memory, examples and tokens a second."""
    jagged = Twin(inputs.jagged, contextlib.nullcontext)
    padded = Twin(inputs.padded, lambda: padded_attention(inputs))
    twins = {"jagged": jagged, "padded": padded}
    losses = compare_losses(trainer, jagged, padded)
    say(f"loss {losses[0]:.4f} jagged, {losses[1]:.4f} padded: the same model")
    peaks: dict[str, int | None] = {}
    for name, twin in twins.items():  # warm-up: compilation, allocator
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(trainer.device)
        for _ in range(2):
            trainer.step(twin)
        peaks[name] = torch.cuda.max_memory_allocated(trainer.device) if trainer.device.type == "cuda" else None
    flops = count_flops(trainer, jagged)
    for number in range(steps + 1):
        for name in in_turn(list(twins), number):
            phases = trainer.step(twins[name])
            if number > 0:  # the first round does not count
                twins[name].seconds.append(sum(phases) / 1e3)
                for phase, ms in zip(PHASES, phases, strict=True):
                    twins[name].phases[phase].append(ms)
    figures: dict[str, Any] = {"flops": flops, "tokens": inputs.tokens, "losses": losses, "twins": {}}
    for name, twin in twins.items():
        step_ms = results.times([1e3 * s for s in twin.seconds])
        seconds = step_ms["median"] / 1e3
        medians = {phase: results.quantile(values, 0.5) for phase, values in twin.phases.items()}
        figures["twins"][name] = {
            "step": step_ms,
            "examples_per_s": len(inputs.jagged) / seconds,
            "tokens_per_s": inputs.tokens / seconds,
            "tflop_s": flops / seconds / 1e12,
            "peak_bytes": peaks[name],
            "shares": {phase: ms / step_ms["median"] for phase, ms in medians.items()} | shares(trainer, twin),
        }
    return figures


@contextlib.contextmanager
def trainer_of(recipe: ModelRecipe, inputs: StepInputs, impl: str, device: torch.device) -> Iterator[Trainer]:
    """The GEM-like model with its tables and optimizers as `examples/train_gem.py` sets them up, in a world of one."""
    models = import_beside("models")
    train = import_beside("examples.train_gem")
    import_beside("examples.world").hush_libraries()
    settings = import_beside("examples.recipes").Recipe()
    world = import_beside("examples.world").World.start(device.type)
    try:
        torch.manual_seed(0)
        options = dict(recipe.model)
        model = models.build_model("gem", inputs.schema, impl=impl, device=torch.device("meta"), **options)
        sharded, optimizer = train.distribute(model, settings, world)
        yield Trainer(sharded, optimizer, world.device)
    finally:
        torch.distributed.destroy_process_group()


def table(figures: dict[str, Any], peak: float | None) -> str:
    """Both twins side by side."""
    rows: dict[str, list[str]] = {}
    for twin in figures["twins"].values():
        cells = {
            "step ms (20 to 80%)": "{median:.1f} ({q20:.1f} to {q80:.1f})".format(**twin["step"]),
            "examples/s": f"{twin['examples_per_s']:,.0f}",
            "true tokens/s": f"{twin['tokens_per_s']:,.0f}",
            "TFLOP/s of true tokens": f"{twin['tflop_s']:.3g}",
            "MFU": "-" if peak is None else f"{100 * twin['tflop_s'] / peak:.1f}% of {peak:.0f} TFLOP/s",
            "peak memory GiB": "-" if twin["peak_bytes"] is None else f"{twin['peak_bytes'] / 2**30:.1f}",
        }
        cells |= {f"share of {name}": f"{100 * share:.0f}%" for name, share in twin["shares"].items()}
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    lines = [f"| | {' | '.join(figures['twins'])} |", "|---|---:|---:|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Entry of the command."""
    name = "tiny" if options.smoke else options.recipe
    if name not in RECIPES:
        raise ValueError(f"recipe is {name!r}, wanted one of {', '.join(RECIPES)}")
    if not options.smoke and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; --smoke shows on any machine that the command works")
    recipe = RECIPES[name]
    device = torch.device("cpu" if options.smoke else "cuda")
    if options.smoke:
        print(MEANINGLESS)
    inputs = make_inputs(recipe, device)
    with trainer_of(recipe, inputs, options.impl, device) as trainer:
        reading = machine.ClockReading() if device.type == "cuda" else SimpleNamespace(result=dict)
        figures = measure(trainer, inputs, options.steps or (2 if options.smoke else 10), print)
    about = machine.describe(device)
    peak = machine.peak_tflops(about["gpu"])
    saved = {
        "schema": 1,
        "kind": "model",
        "meaningless": options.smoke,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": {"name": name, "batch": recipe.batch, "streams": dict(recipe.streams), "model": dict(recipe.model)},
        "impl": options.impl,
        "machine": about,
        "clocks": reading.result(),
        "peak_tflop_s": peak,
        **figures,
    }
    path = options.out / "model.json"
    results.write(saved, path)
    print(f"{name}: batch {recipe.batch}, {inputs.tokens:,} events, {figures['flops'] / 1e12:.3g} TFLOP a step")
    print(table(figures, peak))
    print(f"written: {path}")
    return 0
