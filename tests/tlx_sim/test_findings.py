"""What each fault of a small kernel is reported as, and that the right kernels are reported as right."""

from pathlib import Path

import pytest
import torch

tlx_sim = pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from tests.tlx_sim import planted  # noqa: E402

SEEDS = range(10)


def describe(x, rows):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]])


def line_of(text):
    """The number of the first line of planted.py that holds `text`."""
    lines = Path(planted.__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def copy(fault="", seed=0, rows=16, policy="adversarial"):
    source, target = torch.randn(6 * rows, 64), torch.zeros(6 * rows, 64)
    failed = False
    with tlx_sim.simulate(90, seed, policy) as run:
        try:
            planted.copy_kernel[(1,)](describe(source, rows), describe(target, rows), rows, 2, fault, num_warps=4)
        except tlx_sim.SimulationError:
            failed = True
    return run.report, failed, torch.equal(target, 2 * source)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_kernel_is_right_under_every_schedule(seed):
    report, failed, right = copy(seed=seed)
    assert report.ok and right and not failed, str(report)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", ["no free wait", "no full wait", "no store wait"])
def test_a_race_is_found_under_every_schedule(fault, seed):
    report, _, _ = copy(fault, seed)
    # A producer that does not wait may announce bytes twice in one phase before it overwrites anything.
    assert report.races or report.of_kind("barrier"), str(report)


def test_a_race_names_lines_tasks_and_buffers():
    report, _, _ = copy("no full wait")
    text = "\n".join(map(str, report.races))
    assert "tests/tlx_sim/planted.py" in text
    assert f"planted.py:{line_of('x = tlx.local_load(bufs[buf])')}" in text
    assert f"planted.py:{line_of('async_descriptor_load(source, bufs[slot]')}" in text
    assert "bufs[" in text and "default task" in text and "task at line" in text


def test_a_missing_fence_is_found():
    report, _, _ = copy("no fence")
    assert [x.kind for x in report.findings] == ["missing fence"]
    source, target = torch.randn(96, 64), torch.zeros(96, 64)
    with tlx_sim.simulate(90, explicit_fences=False) as run:
        planted.copy_kernel[(1,)](describe(source, 16), describe(target, 16), 16, 2, "no fence", num_warps=4)
    assert run.report.ok


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("no free arrive", "deadlock", "phase 0 of free[0]"),
        ("bytes", "deadlock", "-2048 bytes outstanding"),
        ("over-arrival", "barrier", "2 arrivals at free[0], which waits for 1"),
        ("index", "bounds", "index 2 of bufs, which has 2 buffers"),
    ],
)
def test_what_ends_a_launch(fault, kind, words):
    report, failed, _ = copy(fault)
    assert failed
    assert report.findings[-1].kind == kind and words in str(report.findings[-1]), str(report)
    assert "planted.py:" in str(report.findings[-1])


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("uninitialised", "uninitialised read"),
        ("capacity", "capacity"),
        ("pending", "pending read"),
        ("named barrier", "barrier"),
        ("outside", "bounds"),
        ("leaves stores", "race"),
        ("", ""),
    ],
)
def test_what_one_task_does_wrong(fault, kind):
    x, out = torch.randn(64, 64).bfloat16(), torch.zeros(64, 64)
    with tlx_sim.simulate(90) as run:
        try:
            planted.misuse_kernel[(1,)](describe(x, 64), out, fault, num_warps=4)
        except tlx_sim.SimulationError:
            assert fault in ("named barrier", "outside")
    assert [x.kind for x in run.report.findings] == ([kind] if kind else []), str(run.report)


@pytest.mark.parametrize("wait", [True, False])
def test_a_sum_overtakes_a_store_unless_it_waits_until_that_has_reached_memory(wait):
    found = set()
    for seed in SEEDS:
        target = torch.zeros(16, 64)
        with tlx_sim.simulate(90, seed) as run:
            planted.overtaking_kernel[(1,)](describe(target, 16), wait, num_warps=4)
        assert run.report.ok, str(run.report)
        assert target.unique().numel() == 1
        found.add(target[0, 0].item())
    assert found == ({2.0} if wait else {1.0, 2.0})


@pytest.mark.parametrize(("fence", "sync"), [(True, True), (False, True), (True, False)])
def test_clusters(fence, sync):
    out = torch.zeros(128)
    with tlx_sim.simulate(90) as run:
        planted.pair_kernel[(2,)](out, fence, sync, num_warps=1, ctas_per_cga=(2, 1, 1))
    if fence and sync:
        assert run.report.ok, str(run.report)
        assert torch.equal(out, torch.cat([100 + torch.arange(64.0), torch.arange(64.0)]))
    elif sync:
        assert {x.kind for x in run.report.findings} == {"missing fence"}
    else:
        assert run.report.races


@pytest.mark.parametrize("acquire", [True, False])
def test_a_descriptor_of_an_earlier_kernel_needs_an_acquire(acquire):
    source, out, table = torch.randn(16, 64), torch.zeros(16, 64), torch.zeros(256, dtype=torch.int8)
    table = table[-table.data_ptr() % 128 :]
    with tlx_sim.simulate(90) as run:
        planted.write_table_kernel[(1,)](table, source, num_warps=4)
        planted.read_table_kernel[(2,)](table, out, acquire, num_warps=4)
    assert torch.equal(out, source)
    assert [x.kind for x in run.report.findings] == ([] if acquire else ["missing fence"])


@pytest.mark.parametrize("policy", ["random", "late", "early", "starve", "priority"])
def test_a_seed_fixes_the_schedule(policy):
    first, again = (copy(seed=3, policy=policy)[0].statistics for _ in range(2))
    assert first == again
    others = [copy(seed=s, policy=policy)[0].statistics for s in (4, 5, 6)]
    assert policy in ("late", "early") or any(x != first for x in others)


def test_nothing_stays_patched():
    import triton.language as tl

    before = tl.load, torch.cuda.get_device_properties
    copy()
    assert (tl.load, torch.cuda.get_device_properties) == before
    with pytest.raises(ValueError, match="arch"), tlx_sim.simulate(80):
        pass
    with pytest.raises(ValueError, match="policy"), tlx_sim.simulate(90, policy="lucky"):
        pass
