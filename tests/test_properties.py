"""Random batches against the float64 oracle, by hypothesis. GEMATTN_EXAMPLES=1000 searches longer, from fresh seeds."""

import os
from dataclasses import replace

import pytest
import torch

from gemattn.kernels import interpreter
from gemattn.kernels.schedule import make_schedule
from gemattn.testing import make_inputs
from gemattn.testing.conformance.subject import Subject, own_results, select

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

EXAMPLES = int(os.environ.get("GEMATTN_EXAMPLES", "0"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def searched(examples):
    """A small fixed set of examples in CI, a long fresh search where GEMATTN_EXAMPLES asks for one."""
    return hypothesis.settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


lengths = st.one_of(st.just(0), st.just(0), st.integers(1, 20), st.sampled_from([63, 64, 65, 70]))
sides = st.one_of(st.none(), st.integers(0, 80))


@st.composite
def batches(draw, dtypes):
    """(inputs, options): self, cross or shared, lengths with many zeros, grouped heads, slack, odd layouts."""
    kind = draw(st.sampled_from(["self", "cross", "shared"]))
    sequences = draw(st.integers(0, 4))
    of = st.lists(lengths, min_size=sequences, max_size=sequences)
    q_lengths, kv_lengths = draw(of), draw(of)
    kv_heads, ratio = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    inputs = make_inputs(
        None if kind == "shared" else q_lengths,
        None if kind == "self" else kv_lengths,
        shared_rows=draw(st.integers(0, 20)) if kind == "shared" else None,
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 40])),
        dtype=draw(st.sampled_from(dtypes)),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        slack=draw(st.sampled_from([0, 0, 1, 130])),
        with_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        device=DEVICE,
    )
    for name in ("query", "key", "value", "dout"):
        inputs = replace(inputs, **{name: draw(layouts(getattr(inputs, name)))})
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "scale": draw(st.sampled_from([None, 0.0, -0.5, 2.0])),
    }
    return inputs, options


@st.composite
def layouts(draw, x):
    """The same values under other strides."""
    layout = draw(st.sampled_from(["contiguous", "wide rows", "heads first", "columns first"]))
    if layout == "wide rows":
        return torch.cat((x, x, x), dim=1)[:, x.shape[1] : 2 * x.shape[1]]
    if layout == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "columns first":
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return x


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@searched(50)
@hypothesis.given(batches([torch.float64, *FLOATS]))
def test_the_reference_matches_the_oracle(batch):
    inputs, options = batch
    Subject("reference", DEVICE).check(inputs, **options)


@pytest.fixture
def triton():
    pytest.importorskip("triton")
    if DEVICE == "cpu" and not interpreter.interpreting():
        pytest.skip("needs a GPU or Triton's interpreter")
    return Subject("triton", DEVICE)


@searched(12)
@hypothesis.given(batch=batches(FLOATS))
def test_the_kernels_match_the_oracle(triton, batch):
    inputs, options = batch
    triton.check(inputs, **options)


@searched(5)
@hypothesis.given(batch=batches(FLOATS), data=st.data())
def test_a_sequence_is_the_same_in_any_batch(triton, batch, data):
    inputs, options = batch
    sequences = inputs.kv_offsets.numel() - 1
    hypothesis.assume(sequences)
    order = data.draw(st.lists(st.integers(0, sequences - 1), min_size=1, max_size=3))
    whole = triton.run(inputs, deterministic=True, **options)
    chosen = select(inputs, order)
    results = triton.run(chosen, deterministic=True, **options)
    for place, b in enumerate(order):
        triton.assert_all_same(own_results(chosen, results, place), own_results(inputs, whole, b), f"sequence {b}")


@searched(100)
@hypothesis.given(
    st.lists(st.integers(-(2**62), 2**62) | st.integers(-5, 70), min_size=1, max_size=6), st.integers(0, 60)
)
def test_a_schedule_of_any_offsets_covers_every_row_once(values, rows):
    schedule = make_schedule(torch.tensor(values), query_rows=rows)
    starts = schedule.q_offsets.tolist()
    assert starts == torch.tensor(values).clamp(0, rows).cummax(0).values.tolist()
    sequences = len(values) - 1
    segments = {b: (starts[b], starts[b + 1]) for b in range(sequences)}
    segments |= {sequences: (0, starts[0]), sequences + 1: (starts[-1], rows)}
    covered = [0] * rows
    for segment, block, *_ in schedule.q_tiles.tolist():
        if segment >= 0:
            start, end = segments[segment]
            for row in range(start + 128 * block, min(end, start + 128 * (block + 1))):
                covered[row] += 1
    assert covered == [1] * rows
