import json
import math

import pytest

from gemattn.bench import plots, report, results
from gemattn.bench.timing import busy_of_trace
from gemattn.bench.worker import repeats


def times(median, spread=0.01):
    return {
        "median": median,
        "q20": median * (1 - spread),
        "q80": median * (1 + spread),
        "samples": 5,
        "busy": None,
        "tflop_s": 1 / median,
        "over_floor": median / 0.5,
    }


def figures(forward, backward, setup=None):
    return {
        "forward": times(forward),
        "backward": times(backward),
        "setup": setup and times(setup),
        "errors": {"out": 1e-3},
        "peak_bytes": 1 << 30,
        "first_forward_s": 1.0,
        "first_backward_s": 2.0,
    }


def shape(name, suite, ours, rival):
    return {
        "name": name,
        "suite": suite,
        "sequences": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 128,
        "longest": int(name.split("_")[2]),
        "floor": {"forward": 0.5, "backward": 0.5},
        "providers": {"triton": ours, "fa4": rival},
    }


@pytest.fixture
def measured():
    return {
        "schema": 1,
        "kind": "attention",
        "meaningless": False,
        "finished": True,
        "command": ["python", "-m", "gemattn.bench", "attention"],
        "started": "2026-12-01T00:00:00+00:00",
        "seconds": 1.0,
        "machine": {"gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "triton": "triton 3.6.0"},
        "clocks": {"driver_version": "580", "clocks_sm": 1980.0, "clocks_mem": 3201.0, "power_limit": 700.0},
        "providers": {
            "triton": {"kind": "ours", "absent": None, "version": "gemattn"},
            "fa4": {"kind": "rival", "absent": None, "version": "4"},
            "fla": {"kind": "rival", "absent": "not installed", "version": None},
        },
        "ceilings": {"copy_tb_s": 4.24, "matrix_tflop_s": 724.0, "source": "measured"},
        "shapes": [
            shape("self_half_256", "self", figures(1.0, 2.0, setup=1.0), figures(2.0, 2.0)),
            shape("self_half_512", "self", figures(1.0, 4.0, setup=3.0), figures(8.0, 2.0)),
            shape("self_half_1024", "self", {"reason": "wrong result: dk: error 1"}, figures(8.0, 2.0)),
        ],
    }


def test_geometric_mean():
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert report.geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert math.isnan(report.geometric_mean([]))


def test_ratios(measured):
    forward, backward = report.ratios(measured)
    # Rival over ours: 2 and 8 forward, 1 and 1/2 backward; the shape with a wrong result counts for nothing.
    assert forward.mean == pytest.approx(4.0)
    assert (forward.worst, forward.worst_shape, forward.shapes) == (2.0, "self_half_256", 2)
    assert backward.mean == pytest.approx(math.sqrt(0.5))
    assert (backward.worst, backward.worst_shape) == (0.5, "self_half_512")
    # With ours' set-ups of 1 and 3 ms counted: 2 / 2 and 8 / 4 forward; backward as before.
    assert forward.mean_with_setup == pytest.approx(math.sqrt(2.0))
    assert backward.mean_with_setup == backward.mean


def test_time_over_floor(measured):
    assert report.over_floor(measured, "self", "triton", "forward") == pytest.approx(2.0)
    assert report.over_floor(measured, "self", "fa4", "forward") == pytest.approx((4 * 16 * 16) ** (1 / 3))
    assert math.isnan(report.over_floor(measured, "hsp", "triton", "forward"))


def test_texts(measured):
    summary = report.summary(measured)
    assert (
        "triton against fa4: 4.00x, 1.41x with the set-up of a batch in it (2 shapes; worst 2.00x, self_half_256)"
        in summary
    )
    assert "cut" not in summary
    text = report.markdown(measured)
    assert "| self | forward | triton | fa4 | 4.00 (1.41) | 2 | 2.00, self_half_256 |" in text
    assert "- triton on self_half_1024: wrong result: dk: error 1" in text
    assert "- fla: not installed" in text
    assert "NVIDIA H200, driver 580, torch 2.11.0" in text
    assert "WRONG" in report.row(measured["shapes"][2], ["triton", "fa4"])
    assert report.row({"name": "x", "skipped": "the budget was spent"}, []).endswith("skipped: the budget was spent")
    measured["meaningless"] = True
    assert report.MEANINGLESS in report.markdown(measured) and report.MEANINGLESS in report.summary(measured)


def test_quantiles():
    assert results.quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.2) == pytest.approx(1.8)
    summary = results.times([1.0, 2.0, 3.0, 4.0, 5.0], flops=6 * 10**12, floor=1.5)
    assert (summary["median"], summary["q80"], summary["samples"]) == (3.0, pytest.approx(4.2), 5)
    assert summary["tflop_s"] == pytest.approx(2000.0)  # 6 TFLOP in 3 ms
    assert summary["over_floor"] == pytest.approx(2.0)


def test_compare_tells_what_moved(measured):
    new = json.loads(json.dumps(measured))
    new["shapes"][0]["providers"]["triton"]["forward"] = times(0.5)
    new["shapes"][1]["providers"]["triton"]["backward"] = times(4.005)  # within the old spread
    text = results.compare(new, measured)
    assert "self_half_256 triton forward: 1.000 -> 0.500 ms (-50%)" in text
    assert "triton forward: 0.707 over 2 shapes" in text
    assert "fa4 forward: 1.000 over 3 shapes" in text
    assert "self_half_512" not in text
    assert results.compare(measured, measured).endswith("nothing")


def test_files_are_whole_or_refused(measured, tmp_path):
    path = tmp_path / "deep" / "results.json"
    results.write(measured, path)
    assert results.read(path) == measured
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]
    with pytest.raises(ValueError, match="no such file"):
        results.read(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"kind": "attention",\n "sh')
    with pytest.raises(ValueError, match=r"cut.json is no JSON: line 2"):
        results.read(tmp_path / "cut.json")
    (tmp_path / "other.json").write_text('{"kind": "model"}')
    with pytest.raises(ValueError, match="holds no results"):
        results.read(tmp_path / "other.json")


def test_busy_time_counts_overlap_once():
    events = [
        {"cat": "kernel", "ts": 0, "dur": 10},
        {"cat": "kernel", "ts": 5, "dur": 10},  # overlaps: 0 to 15
        {"cat": "gpu_memset", "ts": 20, "dur": 5},
        {"cat": "kernel", "ts": 21, "dur": 1},  # inside
        {"cat": "cpu_op", "ts": 0, "dur": 1000},
        {"ph": "M"},
    ]
    assert busy_of_trace(events) == pytest.approx(0.020)
    assert busy_of_trace(events[4:]) is None


def test_repeats_fill_a_round():
    assert [repeats(ms) for ms in (0.0, 0.5, 2.0, 8.0, 100.0)] == [8, 8, 4, 1, 1]


def test_families_of_the_scaling_plot():
    assert plots.family("self_half_1024") == "self_half"
    assert plots.family("hsp_q256_kv4096_s0.95") == "hsp_s0.95"
    for name in ("self_half_1024_d64", "self_logn_2048", "hsp_q64_kv1024_s0.5", "hsp_q256_kv1024_s0.5_d64", "pma_q32"):
        assert plots.family(name) is None


def test_baseline_is_flash_attention_4(measured):
    assert plots.baseline(measured) == "fa4"
    measured["providers"]["fa4"]["absent"] = "gone"
    assert plots.baseline(measured) is None


def test_plots_are_drawn(measured, tmp_path):
    if reason := plots.matplotlib_missing():
        with pytest.raises(ValueError, match="gemattn"):
            plots.draw(measured, tmp_path)
        pytest.skip(reason)
    drawn = plots.draw(measured, tmp_path)
    assert [path.name for path in drawn] == ["ratio.png", "over_floor.png", "scaling.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
