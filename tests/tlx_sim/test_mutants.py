"""The mutation score: what is tried, what is told, and the reasons of those that are benign."""

from pathlib import Path

import pytest

pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from gemattn.testing.tlx_sim import score
from gemattn.testing.tlx_sim.__main__ import FILES
from gemattn.testing.tlx_sim.benign import BENIGN, Benign, why_benign, without_mutant
from gemattn.testing.tlx_sim.mutate import mutants
from gemattn.testing.tlx_sim.summary import Summary

KERNEL = """
@triton.jit
def _produce(bufs, free, full):
    tlx.barrier_wait(free[0], 1)
    tlx.barrier_wait(free[0], 1)
    tlx.async_dot(a, b, c, mBarriers=[full[0], full[1]])
    signals = [full[0]] if a else []
    tlx.async_dot(a, b, c, mBarriers=signals)


@triton.jit
def _wait():
    tl.inline_asm_elementwise("cp.async.bulk.wait_group 0;", "=r", [], tl.int32, False, 1)
    tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], tl.int32, False, 1)
"""


@pytest.fixture
def found(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    return mutants(str(file))


def test_mutants_have_names_that_no_line_number_is_part_of(found):
    product = "async_dot(a, b, c, mBarriers=[full[0], full[1]])"
    assert [(m.function, m.key) for m in found][:-1] == [
        ("_produce", "barrier_wait(free[0], 1): remove"),
        ("_produce", "barrier_wait(free[0], 1): flip phase"),
        ("_produce", "barrier_wait(free[0], 1) (2nd): remove"),
        ("_produce", "barrier_wait(free[0], 1) (2nd): flip phase"),
        ("_produce", f"{product}: drop barrier 0"),
        ("_produce", f"{product}: drop barrier 1"),
        ("_produce", "async_dot(a, b, c, mBarriers=signals): drop barrier 0"),
    ]
    assert (found[-1].function, found[-1].change, found[-1].kind) == ("_wait", "remove", "wait")
    assert found[0].concerns(found[0].file, 1, 4) and not found[0].concerns(found[0].file, 5, 11)


def test_the_summary_tells_what_was_missed_benign_or_not_reached(found):
    table = (
        Benign("kernel.py", "_produce", "order", (found[2].key, found[3].key)),
        Benign("kernel.py", "_gone", "why", ("fence(): remove",)),
    )
    schedules = [1, 4, 0, 2, 0, 0, 7, 0]
    verdicts = [score.Verdict(m, m.line < 13, n, "a race") for m, n in zip(found, schedules, strict=True)]
    summary = Summary.of(verdicts, table)
    text = "\n".join(summary.lines())
    assert "caught 4 of 6 that are really wrong, 66.7% (1 benign, 1 not reached)" in text
    assert "commit 1/3, phase flip 2/2, wait 1/1" in text
    assert "1 by the first schedule, all by schedule 7" in text
    assert f"missed: {found[4]}" in text and f"not reached: {found[7]}" in text
    assert f"benign: {found[2]}\n        order" in text
    assert f"out of date: {found[3]}: it is caught" in text
    assert "out of date: kernel.py _gone fence(): remove: there is no such mutant" in text
    assert not summary.good
    assert Summary.of(verdicts[:2], ()).good


def test_a_line_that_no_scenario_reaches_is_told(monkeypatch, found):
    monkeypatch.setattr(score, "once", lambda *args, **kwargs: score.Outcome((), ""))
    verdicts = score.score(["hopper forward"], [found[0].file], 2, lambda text: None)
    assert [v.reached for v in verdicts] == [False] * len(found)
    assert f"    not reached: {found[0]}" in Summary.of(verdicts, ()).lines()


def test_every_reason_is_of_a_mutant():
    everything = [m for _, files in FILES.values() for file in files() for m in mutants(file)]
    assert not without_mutant(everything)
    assert {x.file for x in BENIGN} <= {Path(m.file).name for m in everything}
    assert sum(bool(why_benign(m)) for m in everything) == sum(len(x.mutants) for x in BENIGN)


ENOUGH = {
    "hopper": [
        "forward, short",
        "forward, D 128",
        "backward, short",
        "backward, D 128",
        "backward, fused, D 128",
        "backward, shared query",
    ],
    "blackwell": [
        "forward, shared query, window",
        "backward, D 128",
        "backward, shared query",
        "backward, shared query, window",
    ],
}
"""Scenarios that reach all lines, the quickest ones."""


@pytest.mark.parametrize("architecture", ENOUGH)
def test_scenarios_reach_every_synchronisation_of_the_package(architecture):
    outcomes = [score.once(f"{architecture} {name}", seed=1) for name in ENOUGH[architecture]]
    reached = set().union(*(o.reached for o in outcomes))
    everything = [m for file in score.own_files(architecture) for m in mutants(file)]
    missing = [str(m) for m in everything if (score.short(m.file), m.line) not in reached]
    assert len(everything) > 80 and not missing, missing
