"""Trains the GEM-like model and each baseline on several seeds, and compares them on the same test events.

    python examples/compare.py                     # MovieLens-100K, three seeds: up to 45 minutes on 2 CPU cores
    python examples/compare.py --out runs/NAME     # goes on with a comparison that was interrupted

Runs that are complete in --out are not trained again. The folder ends up with results.json and results.md; the exit
status is 1 if what the README claims does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.run_folder import new_folder
from models import MODELS

SUBJECT = "gem"
# Test NE on MovieLens-100K of a logistic regression on running statistics, and of an independent DIN, by task.
LOGISTIC_REGRESSION = {"engaged": 0.8495, "loved": 0.8566}
INDEPENDENT_DIN = {"engaged": 0.827, "loved": 0.827}
RESAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """What one run says of the test examples, in the order of the examples."""

    examples: NDArray[np.int64]
    users: NDArray[np.int64]
    logits: Floats  # (N, K)
    labels: Floats  # (N, K)

    @staticmethod
    def read(path: Path) -> "Predictions":
        """The test_predictions.npz of a run."""
        with np.load(path) as saved:
            order = np.argsort(saved["examples"])
            parts = [saved[name][order] for name in ("examples", "users", "logits", "labels")]
        return Predictions(parts[0], parts[1], parts[2].astype(np.float64), parts[3].astype(np.float64))


def log_loss(logits: Floats, labels: Floats) -> Floats:
    """Cross-entropy an example, in nats."""
    return np.logaddexp(0.0, logits) - labels * logits


def entropy(labels: Floats) -> float:
    """Cross-entropy of the constant prediction at the mean label, in nats."""
    rate = labels.mean()
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def auc(logits: Floats, labels: Floats) -> float:
    """Probability that a positive is ranked above a negative; ties count half."""
    _, place, count = np.unique(logits, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2.0)[place]
    positives = labels.sum()
    negatives = len(labels) - positives
    return float((rank[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def paired_difference(ours: Floats, theirs: Floats, labels: Floats, users: NDArray[np.int64]) -> dict[str, float]:
    """Difference in NE, ours - theirs, with a 95% interval from resampling users.

    The examples of one user go together, and both models see the same resample, so what is hard for all cancels out.

    Args:
        ours: (N,) log loss of each example, the mean over seeds.
        theirs: the same of the other model.
        labels: (N,).
        users: (N,) whose example it is.
    """
    _, owner = np.unique(users, return_inverse=True)
    num_users = int(owner.max()) + 1
    sums = [np.bincount(owner, weights, num_users) for weights in (ours - theirs, labels, np.ones_like(labels))]
    picked = np.random.default_rng(0).multinomial(num_users, np.full(num_users, 1.0 / num_users), size=RESAMPLES)
    difference, positives, count = (picked @ part for part in sums)
    rate = (positives / count).clip(1e-9, 1 - 1e-9)
    resampled = difference / count / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"ne": float((ours - theirs).mean() / entropy(labels)), "low": float(low), "high": float(high)}


def train_all(args: argparse.Namespace, out: Path) -> None:
    """Every model on every seed, ``args.jobs`` at a time; raises RuntimeError naming the log of a run that failed."""
    script = Path(__file__).with_name("train_gem.py")
    runs = [(model, seed) for seed in range(args.seeds) for model in args.models]

    def train(run: tuple[str, int]) -> None:
        model, seed = run
        folder = out / f"{model}-{seed}"
        if (folder / "summary.json").is_file():
            print(f"{folder.name}: complete already", flush=True)
            return
        command = [sys.executable, str(script), "--model", model, "--seed", str(seed), "--data", args.data]
        command += ["--data-dir", str(args.data_dir)]
        if args.device:
            command += ["--device", args.device]
        resumable = (folder / "checkpoints" / "index.json").is_file()
        command += ["--resume" if resumable else "--run-dir", str(folder)]
        if args.recipe:
            command += ["--recipe", args.recipe]
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with (folder / "log.txt").open("a") as log:
            # One thread a run: several small runs side by side are faster than one run with several threads.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"} if args.jobs > 1 else None
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        if status != 0:
            raise RuntimeError(f"{folder.name} ended with status {status}: see {folder / 'log.txt'}")
        print(f"{folder.name}: {time.perf_counter() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(train, run) for run in runs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def collect(out: Path, models: Sequence[str], seeds: int) -> dict[str, Any]:
    """Mean and spread of NE and AUC a model and task, and how the GEM-like model differs from each other, paired."""
    tasks = list(json.loads((out / f"{models[0]}-0" / "summary.json").read_text())["tasks"])
    predictions = {
        model: [Predictions.read(out / f"{model}-{seed}" / "test_predictions.npz") for seed in range(seeds)]
        for model in models
    }
    common = predictions[models[0]][0]
    for model, runs in predictions.items():
        for seed, run in enumerate(runs):
            if not (np.array_equal(run.examples, common.examples) and np.array_equal(run.labels, common.labels)):
                raise RuntimeError(f"{model}-{seed} was tested on other examples than {models[0]}-0: remove its folder")
    results: dict[str, Any] = {"seeds": seeds, "test_examples": len(common.examples), "models": {}, "paired": {}}
    losses = {
        model: np.stack([log_loss(run.logits, run.labels) for run in runs]) for model, runs in predictions.items()
    }
    for model, runs in predictions.items():
        results["models"][model] = {}
        for k, task in enumerate(tasks):
            labels = common.labels[:, k]
            ne = [float(loss[:, k].mean() / entropy(labels)) for loss in losses[model]]
            aucs = [auc(run.logits[:, k], labels) for run in runs]
            results["models"][model][task] = {
                "ne": ne,
                "ne_mean": float(np.mean(ne)),
                "ne_spread": float(np.std(ne)),
                "auc": aucs,
                "auc_mean": float(np.mean(aucs)),
                "auc_spread": float(np.std(aucs)),
            }
    for model in models:
        if SUBJECT in models and model != SUBJECT:
            results["paired"][model] = {
                task: paired_difference(
                    losses[SUBJECT].mean(axis=0)[:, k],
                    losses[model].mean(axis=0)[:, k],
                    common.labels[:, k],
                    common.users,
                )
                for k, task in enumerate(tasks)
            }
    return results


def check_claims(results: Mapping[str, Any], data: str) -> list[tuple[str, bool, bool]]:
    """(claim, whether it must hold, whether it holds)."""
    claims = []
    if SUBJECT in results["models"]:
        for other, tasks in results["paired"].items():
            for task, difference in tasks.items():
                strict = other != "din"
                holds = difference["ne"] < 0 if strict else difference["ne"] <= 0
                claims.append((f"{task}: NE of {SUBJECT} {'below' if strict else 'not above'} {other}'s", True, holds))
        if data == "ml-100k":
            for task, values in results["models"][SUBJECT].items():
                ne, must, aim = values["ne_mean"], LOGISTIC_REGRESSION[task], INDEPENDENT_DIN[task]
                claims.append((f"{task}: NE of {SUBJECT} below {must}, a logistic regression", True, ne < must))
                claims.append((f"{task}: NE of {SUBJECT} at or below {aim}, an independent DIN", False, ne <= aim))
    return claims


def format_results(results: Mapping[str, Any]) -> str:
    """Two Markdown tables: the models, and the paired differences."""
    tasks = list(next(iter(results["models"].values())))
    head = ["model"] + [f"{task} {metric}" for task in tasks for metric in ("NE", "AUC")]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for model, values in results["models"].items():
        cells = [
            f"{values[task][f'{metric}_mean']:.4f} ± {values[task][f'{metric}_spread']:.4f}"
            for task in tasks
            for metric in ("ne", "auc")
        ]
        lines.append([model, *cells])
    tables = [lines]
    if results["paired"]:
        lines = [[f"NE of {SUBJECT} minus that of", *tasks], ["---"] + ["---:"] * len(tasks)]
        for model, values in results["paired"].items():
            cells = [f"{d['ne']:+.4f} ({d['low']:+.4f} to {d['high']:+.4f})" for d in (values[task] for task in tasks)]
            lines.append([model, *cells])
        tables.append(lines)
    text = "\n\n".join("\n".join("| " + " | ".join(cells) + " |" for cells in lines) for lines in tables)
    return (
        f"Mean ± standard deviation over {results['seeds']} seeds, {results['test_examples']:,} test examples; paired "
        f"differences with a 95% interval from resampling users.\n\n{text}\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = 1 if torch.cuda.is_available() else max(1, min(os.cpu_count() or 1, 8))
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    add("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1; default: 3")
    add("--data", choices=["ml-100k", "synthetic"], default="ml-100k", help="default: ml-100k")
    add("--recipe", help="default: the one named like the data")
    add("--jobs", type=int, default=jobs, help="runs at a time; default: one a core, or 1 on a GPU")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU; all jobs share it")
    add("--out", type=Path, help="default: runs/compare-DATE-TIME")
    add("--data-dir", type=Path, default=Path("data"), help="where fetched data are kept; default: data")
    args = parser.parse_args(argv)
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: wanted at least 1, got {getattr(args, name)}")
    out = args.out or new_folder("compare")
    try:
        train_all(args, out)
        results = collect(out, args.models, args.seeds)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --out {out}", file=sys.stderr)
        return 130
    claims = check_claims(results, args.data)
    results["claims"] = [{"claim": claim, "must": must, "holds": holds} for claim, must, holds in claims]
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    text = format_results(results)
    (out / "results.md").write_text(text)
    print(f"\n{text}")
    for claim, must, holds in claims:
        print(f"{'holds' if holds else 'FAILS' if must else 'not reached'}: {claim}")
    return 0 if all(holds for _, must, holds in claims if must) else 1


if __name__ == "__main__":
    sys.exit(main())
