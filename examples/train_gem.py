"""Trains the GEM-like model, or a baseline, on event histories, and ends with a table.

On the GPU if there is one, else on the CPU:

    python examples/train_gem.py
    python examples/train_gem.py --model din --epochs 2
    python examples/train_gem.py --data synthetic      # needs no network

On several processes of one machine, a GPU each or CPU cores:

    torchrun --standalone --nproc-per-node 2 examples/train_gem.py

The run's folder holds metrics.jsonl, TensorBoard events (tensorboard --logdir runs), checkpoints, the logits of the
test examples and summary.json; runs/latest points to it. Ctrl-C saves and says where, and --resume goes on:

    python examples/train_gem.py --resume              # the latest run; or --resume runs/NAME, with the same options
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

from examples.checkpoint import CheckpointError, Checkpoints, Progress
from examples.data import movielens, synthetic
from examples.data.events import Batches, EventData
from examples.data.movielens import DataError
from examples.evaluation import compute_metrics, mean_ne
from examples.profiling import profile_steps
from examples.recipes import RECIPES, Recipe
from examples.run_folder import LATEST, RunLog, flatten, format_metrics, format_summary, new_folder, write_summary
from examples.world import StopRequest, World, hush_libraries
from gemattn import UnsupportedError
from models import MODELS, build_model
from models.features import Batch

LOG_EVERY = 10  # steps
WARMUP_STEPS, PROFILED_STEPS = 5, 20
INTERRUPTED = 130  # exit status, as the shell has it for Ctrl-C


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="gem", help="default: gem")
    add("--impl", choices=["auto", "reference", "triton", "tlx"], default="auto", help="of the attention")
    add("--data", choices=["ml-100k", "synthetic"], default="ml-100k", help="default: ml-100k, fetched on first use")
    add("--recipe", choices=list(RECIPES), help="default: the one named like the data")
    add("--epochs", type=int, help="in place of the recipe's")
    add("--batch-size", type=int, help="examples a process and step, in place of the recipe's")
    add("--seed", type=int, default=0, help="default: 0")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    add("--run-dir", type=Path, help="default: runs/MODEL-DATE-TIME")
    add("--resume", type=Path, nargs="?", const=LATEST, metavar="RUN_DIR", help="go on; default: the latest run")
    add("--data-dir", type=Path, default=Path("data"), help="where fetched data are kept; default: data")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.resume is not None and args.run_dir is not None:
        parser.error("--resume goes on in the folder that it names: leave --run-dir out")
    for name in ("epochs", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: wanted at least 1, got {value}")
    return args


def load_data(args: argparse.Namespace, recipe: Recipe, world: World) -> EventData:
    """The data set; loading checks that every id lies inside its table, which the embedding kernels do not."""
    if args.data == "synthetic":
        return synthetic.load(max_events=recipe.max_events)
    if world.is_first:
        movielens.fetch(args.data_dir)
    dist.barrier()
    return movielens.load(args.data_dir, recipe.max_events, recipe.max_past)


def distribute(model: nn.Module, recipe: Recipe, world: World) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Tables are split over the ranks and updated by RowWiseAdagrad in backward; the rest is replicated, with AdamW."""
    constraints = {}
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            configs = module.embedding_bag_configs()
        elif isinstance(module, EmbeddingCollection):
            configs = module.embedding_configs()
        else:
            continue
        rate, _ = recipe.table_rates(name)
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": rate})
        for config in configs:
            # Whole tables: what fbgemm does on a CPU too, and the optimizer in backward skips data-parallel ones.
            constraints[config.name] = ParameterConstraints(sharding_types=["table_wise"])
    topology = Topology(world_size=world.size, compute_device=world.device.type)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    model = DistributedModelParallel(model, device=world.device, plan=plan, sharders=sharders)

    optimizers = [("tables", model.fused_optimizer)]
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    matrices = {name: parameter for name, parameter in dense.items() if parameter.dim() > 1}
    vectors = {name: parameter for name, parameter in dense.items() if parameter.dim() <= 1}
    for group, parameters, decay in (("matrices", matrices, recipe.weight_decay), ("vectors", vectors, 0.0)):
        optimizers.append((group, keyed_adamw(parameters, recipe, decay)))
    return model, CombinedOptimizer(optimizers)


def keyed_adamw(parameters: dict[str, Tensor], recipe: Recipe, weight_decay: float) -> KeyedOptimizerWrapper:
    """AdamW that has its state from the start, so that a checkpoint finds a place to be loaded into."""
    options = {"lr": 0.0, "betas": recipe.betas, "weight_decay": weight_decay}
    optimizer = KeyedOptimizerWrapper(parameters, lambda p: torch.optim.AdamW(p, **options))
    optimizer.init_state()  # a step of zero gradients; at learning rate 0 it changes nothing but the count of steps
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    for group in optimizer.param_groups:
        group["lr"] = recipe.dense_lr
    return optimizer


def outputs(pipeline: TrainPipelineSparseDist, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, ...]]:
    """What the model gives for each batch; in training mode each is a whole step, backward and update included."""
    while True:
        try:
            yield pipeline.progress(batches)
        except StopIteration:
            return


def evaluate(pipeline: TrainPipelineSparseDist, model: nn.Module, batches: Batches) -> tuple[Tensor, ...]:
    """Logits (N, K), labels (N, K) and weights (N,) of this rank's examples, in order, on the CPU."""
    model.eval()
    with torch.no_grad():
        parts = [[part.cpu() for part in output[1:]] for output in outputs(pipeline, batches.epoch())]
    model.train()
    n = len(batches.own_examples())  # without the one of weight 0 that an idle rank got
    return tuple(torch.cat(part)[:n] for part in zip(*parts, strict=True))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parse_args(argv)
    hush_libraries()
    world = World.start(args.device)
    try:
        return train(args, world)
    except (DataError, CheckpointError, UnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, world: World) -> int:
    """Trains, tests the best weights and profiles; returns the exit status."""
    start = time.perf_counter()
    recipe = RECIPES[args.recipe or args.data](args.model)
    given = {name: getattr(args, name) for name in ("epochs", "batch_size") if getattr(args, name) is not None}
    recipe = replace(recipe, **given)

    # Data: this process's share of the examples.
    data = load_data(args, recipe, world)
    tasks = data.schema.tasks
    share = {"batch_size": recipe.batch_size, "rank": world.rank, "world_size": world.size, "seed": args.seed}
    share["pin_memory"] = world.device.type == "cuda"
    train_batches = Batches(data, "train", shuffle=True, id_dropout=recipe.id_dropout, **share)
    valid_batches, test_batches = Batches(data, "valid", **share), Batches(data, "test", **share)

    # Model: built without memory, then given its share of the tables and a copy of the rest.
    torch.manual_seed(args.seed)
    model = build_model(args.model, data.schema, impl=args.impl, device=torch.device("meta"), **recipe.model)
    model, optimizer = distribute(model, recipe, world)
    torch.manual_seed(args.seed + world.rank)  # dropout is drawn apart on every rank

    def forward(batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss, logits = model(batch)
        return loss, (loss.detach(), logits.detach(), batch.labels, batch.weights)

    pipeline = TrainPipelineSparseDist(model, optimizer, world.device, custom_model_fwd=forward)
    full_rates = [(group, group["lr"]) for group in optimizer.param_groups]
    tables = {name: table.data for name, table in in_backward_optimizer_filter(model.named_parameters(), include=True)}
    num_steps = recipe.epochs * len(train_batches)

    def before_step(step: int) -> None:
        factor = recipe.lr_factor(step, num_steps)
        for group, rate in full_rates:
            group["lr"] = rate * factor
        # Not fbgemm's own decay, which its CPU kernels leave out in silence.
        for name, table in tables.items():
            rate, decay = recipe.table_rates(name)
            if decay:
                table.mul_(1.0 - rate * factor * decay)

    # The run's folder: new, or one to go on in. Where a run is trained may change on the way, and how long, unless the
    # learning rate counts on it.
    free = {"patience"} | ({"epochs"} if recipe.final_lr == 1.0 else set())
    config = {"model": args.model, "data": args.data, "seed": args.seed, "processes": world.size}
    config |= {f"recipe.{name}": value for name, value in asdict(recipe).items() if name not in free}
    folder = args.resume or args.run_dir or world.from_first(new_folder(args.model))
    folder = folder.resolve()  # runs/latest is about to point elsewhere
    checkpoints = Checkpoints(folder, config)
    if args.resume is not None:
        progress = checkpoints.load(model, optimizer)
    elif checkpoints.exists():
        raise CheckpointError(f"{folder} holds a run already: go on with --resume {folder}, or name another --run-dir")
    else:
        progress = Progress()
    start -= progress.seconds
    log = RunLog.open(folder) if world.is_first else None
    how_to_resume = f"{folder}; go on with --resume {folder}"

    # Training.
    steps = len(train_batches)
    eval_steps = sorted({-(-steps * i // recipe.evals_per_epoch) for i in range(1, recipe.evals_per_epoch + 1)})
    bar = tqdm(total=steps, disable=not world.is_first, unit="step")
    with StopRequest(world) as stop_requested:
        while progress.epoch < recipe.epochs and progress.evals_since_best < recipe.patience:
            bar.set_description(f"epoch {progress.epoch + 1}/{recipe.epochs}")
            bar.n = progress.step
            first_step, last_step = progress.step, next(step for step in eval_steps if step > progress.step)
            interrupted = False
            segment_start = time.perf_counter()
            losses = []
            before_step(progress.global_step)
            for loss, *_ in outputs(pipeline, train_batches.epoch(progress.epoch, first_step, last_step)):
                progress.step += 1
                progress.global_step += 1
                losses.append(loss)
                bar.update()
                if progress.step % LOG_EVERY == 0 or progress.step == last_step:
                    mean_loss = torch.stack(losses).mean().item()
                    losses.clear()
                    if not math.isfinite(mean_loss):
                        raise FloatingPointError(
                            f"the loss is {mean_loss} near step {progress.global_step} in {folder}"
                        )
                    bar.set_postfix(loss=f"{mean_loss:.4f}", refresh=False)
                    if log:
                        log.write("train", progress.global_step, {"loss": mean_loss})
                interrupted = stop_requested()
                if interrupted or progress.step == last_step:
                    break
                before_step(progress.global_step)
            progress.train_seconds += time.perf_counter() - segment_start
            progress.examples += train_batches.examples_in(first_step, progress.step)

            improved = False
            if progress.step == last_step:
                metrics = compute_metrics(tasks, *evaluate(pipeline, model, valid_batches))
                improved = progress.best_ne is None or mean_ne(metrics) < progress.best_ne
                progress.best_ne = mean_ne(metrics) if improved else progress.best_ne
                progress.evals_since_best = 0 if improved else progress.evals_since_best + 1
                if log:
                    log.write("valid", progress.global_step, flatten(metrics))
                    bar.write(f"step {progress.global_step}, valid: {format_metrics(metrics)}", file=sys.stderr)
                if progress.step == steps:
                    progress.epoch, progress.step = progress.epoch + 1, 0
                interrupted = interrupted or stop_requested()
            progress.seconds = time.perf_counter() - start
            checkpoints.save(model, optimizer, progress, is_best=improved)
            if interrupted:
                bar.close()
                if world.is_first:
                    print(f"interrupted; saved in {how_to_resume}", file=sys.stderr)
                return INTERRUPTED
    bar.close()

    try:
        # Test, with the weights that were best on valid.
        checkpoints.load_best(model)
        logits, labels, weights = evaluate(pipeline, model, test_batches)
        metrics = compute_metrics(tasks, logits, labels, weights)
        parts = world.gather((test_batches.own_examples(), logits.numpy(), labels.numpy()))

        # Profile, on training steps that nobody keeps.
        more = itertools.chain.from_iterable(train_batches.epoch(epoch) for epoch in itertools.count(progress.epoch))
        steps_to_profile = outputs(pipeline, itertools.islice(more, WARMUP_STEPS + PROFILED_STEPS))
        for _ in range(WARMUP_STEPS):
            next(steps_to_profile)
        shares = profile_steps(lambda: next(steps_to_profile), PROFILED_STEPS, world.device)
    except KeyboardInterrupt:
        if world.is_first:
            print(f"interrupted; the training is saved in {how_to_resume}", file=sys.stderr)
        return INTERRUPTED
    if log:
        examples, logits, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        users = data.users[examples]
        np.savez(folder / "test_predictions.npz", examples=examples, users=users, logits=logits, labels=labels)
        log.write("test", progress.global_step, flatten(metrics))
        log.close()
        summary = {
            "model": args.model,
            "tasks": metrics,
            "examples_per_s": progress.examples / progress.train_seconds,
            "backward_share": shares.backward,
            "attention_share": shares.attention,
            "seconds": time.perf_counter() - start,
        }
        write_summary(folder, summary)
        print(format_summary(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
