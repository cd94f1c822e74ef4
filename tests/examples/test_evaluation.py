"""NE and AUC by torchrec.metrics, and the comparison's own, against the definitions."""

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec")

from examples import compare
from examples.evaluation import compute_metrics, mean_ne


@pytest.fixture
def predictions():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(700, 2))
    labels = (rng.random((700, 2)) < 1 / (1 + np.exp(-(logits + rng.normal(size=(700, 2)))))).astype(np.float32)
    return logits.astype(np.float32), labels, rng.integers(0, 3, size=700).astype(np.float32)


def expected_ne(logits, labels, weights) -> float:
    logits = logits.astype(np.float64)
    probability = 1 / (1 + np.exp(-logits))
    rate = (weights * labels).sum() / weights.sum()
    loss = -(weights * (labels * np.log(probability) + (1 - labels) * np.log(1 - probability))).sum()
    constant = -(weights * (labels * np.log(rate) + (1 - labels) * np.log(1 - rate))).sum()
    return loss / constant


def expected_auc(logits, labels, weights) -> float:
    """Every pair of a positive and a negative, weighted."""
    positive, negative = labels == 1, labels == 0
    better = logits[positive][:, None] > logits[negative][None]
    pair = weights[positive][:, None] * weights[negative][None]
    return (better * pair).sum() / pair.sum()


def test_metrics_follow_their_definitions(one_process, predictions):
    logits, labels, weights = predictions
    metrics = compute_metrics(["a", "b"], *(torch.from_numpy(part) for part in predictions))
    for k, task in enumerate("ab"):
        assert metrics[task]["ne"] == pytest.approx(expected_ne(logits[:, k], labels[:, k], weights), rel=1e-6)
        assert metrics[task]["auc"] == pytest.approx(expected_auc(logits[:, k], labels[:, k], weights), rel=1e-5)
    assert mean_ne(metrics) == pytest.approx((metrics["a"]["ne"] + metrics["b"]["ne"]) / 2)


def test_the_base_rate_itself_has_ne_one(one_process):
    labels = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    logits = torch.full((4, 1), float(np.log(0.25 / 0.75)))
    assert compute_metrics(["a"], logits, labels, torch.ones(4))["a"]["ne"] == pytest.approx(1.0, rel=1e-6)


def test_comparison_agrees_with_the_metrics(one_process, predictions):
    logits, labels, _ = predictions
    metrics = compute_metrics(["a", "b"], torch.from_numpy(logits), torch.from_numpy(labels), torch.ones(700))
    for k, task in enumerate("ab"):
        loss = compare.log_loss(logits[:, k].astype(np.float64), labels[:, k])
        assert loss.mean() / compare.entropy(labels[:, k]) == pytest.approx(metrics[task]["ne"], rel=1e-6)
        assert compare.auc(logits[:, k], labels[:, k]) == pytest.approx(metrics[task]["auc"], rel=1e-5)
    tied = np.array([0.0, 0.0, 1.0, 1.0])
    assert compare.auc(tied, np.array([0.0, 1.0, 0.0, 1.0])) == 0.5


def test_paired_difference_sees_what_single_means_do_not():
    """Two models that differ by .01 everywhere: users vary far more than that, the difference hardly at all."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 25)
    labels = (rng.random(1000) < 0.5).astype(np.float64)
    hard = rng.normal(1.0, 0.5, size=40)[users]
    difference = compare.paired_difference(hard, hard + 0.01, labels, users)
    assert difference["ne"] == pytest.approx(-0.01 / compare.entropy(labels))
    assert difference["low"] <= difference["ne"] <= difference["high"] < 0
    assert difference["high"] - difference["low"] < 0.001
    noisy = compare.paired_difference(hard, hard[rng.permutation(1000)], labels, users)
    assert noisy["low"] < 0 < noisy["high"]


def write_run(folder, logits, labels, examples):
    folder.mkdir()
    (folder / "summary.json").write_text('{"tasks": {"engaged": {}, "loved": {}}}')
    users = examples // 10
    np.savez(folder / "test_predictions.npz", examples=examples, users=users, logits=logits, labels=labels)


def test_claims_hold_or_fail_with_the_numbers(tmp_path):
    rng = np.random.default_rng(0)
    labels = (rng.random((300, 2)) < 0.4).astype(np.float32)
    good, bad = 3.0 * (2 * labels - 1), np.zeros((300, 2), dtype=np.float32)
    order = rng.permutation(300)  # another order of the same events is the same test
    for seed in range(2):
        write_run(tmp_path / f"gem-{seed}", good[order], labels[order], order)
        write_run(tmp_path / f"mean-{seed}", bad, labels, np.arange(300))
        write_run(tmp_path / f"din-{seed}", good, labels, np.arange(300))
    results = compare.collect(tmp_path, ["gem", "mean", "din"], 2)
    assert results["models"]["gem"]["loved"]["auc"] == [1.0, 1.0]
    assert results["paired"]["mean"]["engaged"]["high"] < 0
    assert results["paired"]["din"]["engaged"]["ne"] == 0.0
    claims = compare.check_claims(results, "ml-100k")
    assert [must for _, must, _ in claims].count(False) == 2 and all(holds for _, _, holds in claims)
    text = compare.format_results(results)
    assert "| din | +0.0000 (+0.0000 to +0.0000) |" in text and "2 seeds, 300 test examples" in text

    swapped = {"models": {**results["models"], "gem": results["models"]["mean"]}, "paired": {"mean": {}}}
    swapped["paired"]["mean"] = {task: {"ne": 1e-3} for task in ("engaged", "loved")}
    assert not any(holds for _, _, holds in compare.check_claims(swapped, "ml-100k"))

    write_run(tmp_path / "mlp-0", bad[:299], labels[:299], np.arange(299))
    with pytest.raises(RuntimeError, match="mlp-0 was tested on other examples"):
        compare.collect(tmp_path, ["gem", "mlp"], 1)
