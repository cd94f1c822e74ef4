import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

import gemattn
from gemattn.bench import model
from gemattn.bench.__main__ import main
from gemattn.bench.model_inputs import ModelRecipe, import_beside, make_inputs, pad_left
from gemattn.bench.model_padded import PaddedAttention, padded_attention
from gemattn.nn import JaggedTransformerBlock, SharedQueryPooling
from models.features import check_batch

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RECIPE = ModelRecipe(batch=5, streams={"clicks": 6, "impressions": 11}, items=50)


class EventCollection(nn.Module):
    """Tables under a name by which they are found."""

    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, ids):
        return self.table(ids)


EventCollection.__name__ = "EventEmbeddingCollection"


class StandIn(nn.Module):
    """A small model of the kind: tokens of every stream, two leading rows, a block over all streams, a pooling each."""

    def __init__(self, schema, window=None):
        super().__init__()
        self.schema = schema
        self.tables = EventCollection(schema.candidate[0].num_ids, 16)
        self.lead = nn.Parameter(torch.randn(2, 16))
        self.block = JaggedTransformerBlock(16, 2, num_kv_heads=1, window=window)
        self.pooling = SharedQueryPooling(16, 2, 3)
        self.head = nn.Linear(16, len(schema.tasks))

    def forward(self, batch):
        values, lengths = [], []
        for stream in self.schema.streams:
            part = batch.events[f"{stream.name}.item"]
            for tokens in self.tables(part.values()).split(part.lengths().tolist()):
                values += [self.lead, tokens]
            lengths.append(part.lengths() + 2)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)))
        tokens, _ = self.block((torch.cat(values), offsets))
        pooled, row = [], 0
        for part in lengths:
            rows = tokens[row : row + int(part.sum())]
            own = torch.cat((torch.zeros(1, dtype=torch.int64), part.cumsum(0)))
            pooled.append(self.pooling((rows, own)).mean(1))
            row += len(rows)
        logits = self.head(torch.stack(pooled).sum(0))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(RECIPE, CPU)


def trainer_for(inputs, **options):
    stand_in = StandIn(inputs.schema, **options)
    return model.Trainer(stand_in, torch.optim.SGD(stand_in.parameters(), lr=0.01), CPU)


def test_both_batches_are_valid(inputs):
    check_batch(inputs.jagged, inputs.schema)
    check_batch(inputs.padded, inputs.schema)
    assert inputs.tokens == sum(int(inputs.jagged.ages[name].values().numel()) for name in RECIPE.streams)
    assert inputs.padded.ages.values().numel() == 5 * (6 + 11)


def test_padding_goes_before_the_events(inputs):
    values, lengths = pad_left(torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]), 3, 0)
    assert values.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 3]
    assert lengths.tolist() == [3, 3, 3]
    for n, part in zip(
        inputs.lengths["clicks"].tolist(), inputs.padded.ages["clicks"].values().view(5, 6), strict=True
    ):
        assert (part[: 6 - n] == 1e7).all()
        assert (part[6 - n :].diff() < 0).all() and part[-1] > 0  # oldest first


@pytest.mark.parametrize("window", [None, (2, 1), (3, 0)])
def test_padded_twin_is_the_same_model(inputs, window):
    """Loss and gradients in float32, the streams in one call (block) and each in its own (pooling)."""
    torch.manual_seed(0)
    stand_in = StandIn(inputs.schema, window=window)
    jagged = stand_in(inputs.jagged)[0]
    expected = torch.autograd.grad(jagged, list(stand_in.parameters()))
    with padded_attention(inputs):
        padded = stand_in(inputs.padded)[0]
        found = torch.autograd.grad(padded, list(stand_in.parameters()))
    assert padded.item() == pytest.approx(jagged.item(), rel=1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_operator_is_put_back(inputs):
    from gemattn.nn import attention, pooling

    with contextlib.suppress(RuntimeError), padded_attention(inputs):
        assert isinstance(attention.jagged_attention, PaddedAttention)
        raise RuntimeError
    assert attention.jagged_attention is gemattn.jagged_attention
    assert pooling.jagged_attention is gemattn.jagged_attention


def test_a_call_that_fits_no_stream_is_an_error(inputs):
    x = torch.zeros(12, 1, 8)
    with pytest.raises(ValueError, match="call of 3 sequences and 12 key rows fits no stream"):
        PaddedAttention(inputs)(x, x, x, torch.tensor([0, 4, 8, 12]))


def test_a_twin_that_is_another_model_is_not_timed(inputs):
    trainer = trainer_for(inputs)
    jagged = model.Twin(inputs.jagged, contextlib.nullcontext)
    other = model.Twin(inputs.padded, contextlib.nullcontext)  # padding attended to
    with torch.no_grad():
        trainer.model.head.weight.mul_(50)
    with pytest.raises(ValueError, match="not the same model"):
        model.compare_losses(trainer, jagged, other)


def test_measure(inputs):
    torch.manual_seed(0)
    trainer = trainer_for(inputs)
    figures = model.measure(trainer, inputs, 2, lambda line: None)
    assert figures["losses"][0] == pytest.approx(figures["losses"][1], rel=0.02)
    assert figures["tokens"] == inputs.tokens
    for twin in figures["twins"].values():
        seconds = twin["step"]["median"] / 1e3
        assert twin["step"]["samples"] == 2
        assert twin["examples_per_s"] == pytest.approx(5 / seconds)
        assert twin["tokens_per_s"] == pytest.approx(inputs.tokens / seconds)
        assert twin["tflop_s"] == pytest.approx(figures["flops"] / seconds / 1e12)
        assert sum(twin["shares"][phase] for phase in model.PHASES) == pytest.approx(1, abs=0.5)
        assert 0 < twin["shares"]["attention"] < 1
        assert 0 < twin["shares"]["embedding"] < 1
    text = model.table(figures, 989.0)
    assert "of 989 TFLOP/s" in text and "share of attention" in text


def test_flops_count_true_tokens(inputs):
    """Linear layers of the head and the block by hand, attention by the operator's own formula."""
    trainer = trainer_for(inputs)
    flops = model.count_flops(trainer, model.Twin(inputs.jagged, contextlib.nullcontext))
    rows = inputs.tokens + 2 * 2 * 5
    lengths = torch.cat([own + 2 for own in inputs.lengths.values()])
    pairs = int((lengths**2).sum()) + 3 * rows
    # Weights that every row meets: q, k, v (one head of two), out, up, down; k, v of the pooling (its q and out apart).
    matrices = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 16 * 64 + 2 * 16 * 16
    pooled = 10 * 3 * 16 * 16 + 2 * 3 * 16 * 16 + 5 * 16 * 2  # out_proj of 10 x 3 rows, q_proj of 2 x 3, head of 5
    attention = 2 * 8 * (4 + 10) * pairs
    assert flops == 3 * 2 * (rows * matrices + pooled) + attention


def test_smoke_run_of_the_command(tmp_path):
    command = [sys.executable, "-m", "gemattn.bench", "model", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "the same model" in done.stdout and "figures mean nothing" in done.stdout
    saved = json.loads((tmp_path / "model.json").read_text())
    assert saved["meaningless"] and saved["twins"].keys() == {"jagged", "padded"}


def test_errors_say_what_to_do(capsys):
    with pytest.raises(ValueError, match="run this from the root of the repository"):
        import_beside("models.no_such_module")
    if not torch.cuda.is_available():
        assert main(["model", "--recipe", "long"]) == 2
        assert "no CUDA GPU here" in capsys.readouterr().err
    assert main(["model", "--recipe", "huge"]) == 2
    assert "recipe is 'huge', wanted one of short, long, tiny" in capsys.readouterr().err
    with pytest.raises(ValueError, match="wanted a different longest history for each"):
        make_inputs(ModelRecipe(2, {"a": 4, "b": 4}), CPU)
