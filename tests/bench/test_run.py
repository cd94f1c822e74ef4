import pytest

from gemattn.bench import results
from gemattn.bench.client import WorkerError, WorkerLost
from gemattn.bench.providers import Spec
from gemattn.bench.run import Run, in_turn
from gemattn.bench.shapes import select

SHAPES = select("hsp")[:2]


class FakeWorker:
    """Answers like a worker. `faults` maps (do, provider, n-th such request from 1) to an exception."""

    def __init__(self, names, log, faults=()):
        self.specs = [Spec(name, "triton" if name == "ours" else "varlen") for name in names]
        self.log, self.faults = log, dict(faults)
        self.counts, self.restarts, self.answer = {}, 0, None

    def send(self, do, **arguments):
        self.request = do, arguments

    def receive(self):
        do, arguments = self.request
        names = arguments.get("names", [arguments.get("name")])
        for name in names:
            key = do, name
            self.counts[key] = self.counts.get(key, 0) + 1
            fault = self.faults.get((*key, self.counts[key]))
            if fault is not None:
                raise fault
            self.log.append((do, name))
        if do == "describe":
            about = {
                s.name: {"kind": "ours" if s.name == "ours" else "rival", "absent": None, "version": "1"}
                for s in self.specs
            }
            return {"machine": {"gpu": "none", "torch": "2", "cuda": None, "triton": "3"}, "providers": about}
        if do == "ceilings":
            return {"copy_tb_s": 4.0, "matrix_tflop_s": 700.0, "source": "made up"}
        if do == "prepare":
            good = {"errors": {"out": 0.001}, "peak_bytes": 5, "first_forward_s": 1.0, "first_backward_s": 2.0}
            return {name: {"reason": "wrong result: out"} if name == "wrong" else dict(good) for name in names}
        if do == "time":
            return {"forward": [2.0, 4.0], "backward": [5.0], "setup": [0.5] if arguments["name"] == "ours" else []}
        if do == "busy":
            return {"forward": 1.5, "backward": None}
        assert do == "release"
        return None

    def restart(self):
        self.restarts += 1

    def close(self):
        pass


def make_run(tmp_path, workers, **options):
    lines = []
    run = Run(workers, tmp_path / "results.json", say=lines.append, **options)
    run.begin()
    return run, lines


def timed_order(log):
    return [name for do, name in log if do == "time"]


def test_each_round_starts_with_another():
    assert [in_turn(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert in_turn([], 3) == []


def test_providers_take_turns_across_processes(tmp_path):
    log = []
    run, _ = make_run(tmp_path, [FakeWorker(["ours", "b"], log), FakeWorker(["c"], log)], rounds=2)
    run.measure(SHAPES[:1])
    assert timed_order(log) == ["ours", "b", "c", "b", "c", "ours", "c", "ours", "b"]


def test_figures_of_a_run(tmp_path):
    run, lines = make_run(tmp_path, [FakeWorker(["ours", "b"], [])], rounds=3)
    run.measure(SHAPES)
    saved = results.read(tmp_path / "results.json")
    assert saved["finished"] and [shape["name"] for shape in saved["shapes"]] == [shape.name for shape in SHAPES]
    first = saved["shapes"][0]
    ours = first["providers"]["ours"]
    # Three rounds count, of two forward runs and one backward run each.
    assert (ours["forward"]["median"], ours["forward"]["samples"]) == (3.0, 6)
    assert (ours["backward"]["median"], ours["backward"]["samples"]) == (5.0, 3)
    assert ours["setup"]["median"] == 0.5 and first["providers"]["b"]["setup"] is None
    assert (ours["forward"]["busy"], ours["backward"]["busy"]) == (1.5, None)
    work = SHAPES[0].work
    assert first["floor"]["forward"] == pytest.approx(max(work.forward_bytes / 4e9, work.forward_flops / 700e9))
    assert ours["forward"]["over_floor"] == pytest.approx(3.0 / first["floor"]["forward"])
    assert ours["forward"]["tflop_s"] == pytest.approx(work.forward_flops / 3e-3 / 1e12)
    assert any(SHAPES[1].name in line for line in lines)


def test_a_wrong_provider_gets_no_time(tmp_path):
    log = []
    run, _ = make_run(tmp_path, [FakeWorker(["ours", "wrong"], log)], rounds=1)
    saved = run.measure(SHAPES[:1])
    assert saved["shapes"][0]["providers"]["wrong"] == {"reason": "wrong result: out"}
    assert "wrong" not in timed_order(log)


def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    worker = FakeWorker(["ours", "b"], [], {("time", "b", 5): KeyboardInterrupt()})
    run, _ = make_run(tmp_path, [worker], rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run.measure(SHAPES)
    saved = results.read(tmp_path / "results.json")
    assert not saved["finished"]
    assert [shape["name"] for shape in saved["shapes"]] == [SHAPES[0].name]
    assert saved["shapes"][0]["providers"]["b"]["forward"]["median"] == 3.0


def test_a_provider_that_kills_its_process_loses_alone(tmp_path):
    worker = FakeWorker(["ours", "b"], [], {("prepare", "b", 1): WorkerLost("its process ended (SIGSEGV)", "b")})
    run, _ = make_run(tmp_path, [worker], rounds=1)
    first, second = run.measure(SHAPES)["shapes"]
    assert worker.restarts == 1
    assert first["providers"]["b"] == {"reason": "its process ended (SIGSEGV)"}
    assert first["providers"]["ours"]["forward"]["median"] == 3.0
    assert second["providers"]["b"]["forward"]["median"] == 3.0


def test_a_process_lost_while_timing_takes_its_figures_along(tmp_path):
    worker = FakeWorker(["ours", "b"], [], {("time", "b", 2): WorkerLost("no answer in 240 s, killed", "b")})
    other = FakeWorker(["c"], [])
    run, _ = make_run(tmp_path, [worker, other], rounds=1)
    (shape,) = run.measure(SHAPES[:1])["shapes"]
    assert shape["providers"]["ours"] == {"reason": "no answer in 240 s, killed (b was running)"}
    assert shape["providers"]["c"]["forward"]["median"] == 3.0
    assert worker.restarts == 1


def test_a_failing_request_is_a_reason(tmp_path):
    worker = FakeWorker(["ours", "b"], [], {("time", "b", 2): WorkerError("RuntimeError: no")})
    run, _ = make_run(tmp_path, [worker], rounds=1)
    (shape,) = run.measure(SHAPES[:1])["shapes"]
    assert shape["providers"]["b"] == {"reason": "time: RuntimeError: no"}
    assert shape["providers"]["ours"]["forward"]["samples"] == 2


def test_a_spent_budget_skips_shapes(tmp_path):
    run, _ = make_run(tmp_path, [FakeWorker(["ours"], [])], rounds=1, budget_s=0.0)
    saved = run.measure(SHAPES)
    assert [shape["skipped"] for shape in saved["shapes"]] == ["the budget of 0 s was spent"] * 2
    assert not saved["finished"]


def test_a_small_budget_cuts_rounds(tmp_path):
    log = []
    run, _ = make_run(tmp_path, [FakeWorker(["ours"], log)], rounds=1000, budget_s=1e9)
    assert run._measure_one(SHAPES[0], ["ours"], slice_s=1e-9)["rounds"] == 3
    assert len(timed_order(log)) == 4
