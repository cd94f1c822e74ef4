"""Every clause of the contract on the implementations of this package, and the suite itself."""

import os
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gemattn
from gemattn.testing import conformance, make_inputs, poisoned_memory
from gemattn.testing.conformance import report, runner
from gemattn.testing.conformance.__main__ import main
from gemattn.testing.conformance.subject import Subject, own_results, select

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("clause", "case"), conformance.cases())
def test_reference(clause, case):
    conformance.check(clause, "reference", case=case, whole=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/kernels/test_gpu_triton.py runs them compiled")
@pytest.mark.parametrize(("clause", "case"), conformance.cases())
def test_triton_in_the_interpreter(clause, case):
    pytest.importorskip("triton")
    conformance.check(clause, "triton", case=case, whole=True)


def test_every_clause_of_the_contract_has_a_test():
    assert {clause.contract for clause in conformance.CLAUSES.values()} == set(range(1, 13))


def test_importing_the_suite_leaves_triton_alone_and_running_it_turns_the_interpreter_on():
    code = (
        "import sys, os; from gemattn.testing import conformance; assert 'triton' not in sys.modules;"
        "os.environ.pop('TRITON_INTERPRET', None);"
        "[result] = conformance.run('triton', device='cpu', clauses=['choice_is_not_of_the_batch']);"
        "assert result.status == 'passed', result; assert os.environ['TRITON_INTERPRET'] == '1'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def wrong_scale(query, *args, scale=None, **options):
    """An implementation that forgets the default scale."""
    return gemattn.jagged_attention(query, *args, scale=1.0 if scale is None else scale, **options, impl="reference")


def refusing(*args, **options):
    raise gemattn.UnsupportedError("takes nothing")


def test_a_function_is_an_implementation_too():
    [result] = conformance.run(wrong_scale, device="cpu", clauses=["masks_compose"])
    assert result.status == "failed" and result.error == "AssertionError" and "norm" in result.message
    with pytest.raises(AssertionError, match="clause 7, masks_compose"):
        conformance.check("masks_compose", wrong_scale, device="cpu")
    with pytest.raises(unittest.SkipTest, match="unsupported: takes nothing"):
        conformance.check("masks_compose", refusing, device="cpu")
    with pytest.raises(AssertionError, match="takes nothing"):
        conformance.check("masks_compose", refusing, device="cpu", whole=True)
    [result] = conformance.run(refusing, device="cpu", clauses=["masks_compose"])
    assert (result.status, result.message) == ("unsupported", "takes nothing")


def test_what_was_not_run_is_not_passed():
    for result in conformance.run("tlx", device="cpu", clauses=["1", "5"]):
        assert result.status == "not run here" and "CUDA" in result.message
    for result in conformance.run("reference", device="cpu", clauses=["many_sequences"]):
        assert (result.status, result.message) == ("not run here", "needs a GPU")
    with pytest.raises(ValueError, match="unknown clauses nonsense"):
        conformance.run("reference", clauses=["nonsense"])


def dying(*args, **options):
    os._exit(3)


def test_a_process_that_dies_fails_its_case():
    [result] = conformance.run("reference", device="cpu", clauses=["choice_is_not_of_the_batch"], jobs=2)
    assert result.status == "passed"
    [result] = conformance.run(dying, device="cpu", clauses=["masks_compose"], jobs=2)
    assert (result.status, result.error) == ("failed", "BrokenProcessPool")


def hanging(*args, **options):
    while True:
        pass


def test_a_case_that_hangs_fails():
    [result] = conformance.run(hanging, device="cpu", clauses=["masks_compose"], timeout=1)
    assert result.status == "failed" and result.error == "TimeoutError"


def test_table_and_json_and_matrix(tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--impl", "reference", "--device", "cpu", "--clauses", "autocast", "strides", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "autocast" in printed and "3 cases" not in printed.splitlines()[0]
    assert "not owed  (kernels owe it)" in printed
    about, results = report.read_json(path)
    assert about["impl"] == "reference" and about["torch"] == torch.__version__
    assert [r.status for r in results] == ["not owed", "not owed", "passed", "passed"]
    text = conformance.matrix([(about, results), (about | {"impl": "other"}, [replace(results[2], status="failed")])])
    assert "| 11 | `autocast` | passed | FAILED 1 of 1 |" in text
    assert "| 6 | `strides` | not owed | not in this run |" in text
    assert f"| reference, cpu | {about['machine']} |" in text and about["date"] in text
    assert main(["--impl", f"{__name__}:wrong_scale", "--device", "cpu", "--clauses", "masks_compose"]) == 1


def test_the_support_matrix_is_what_its_results_say(tmp_path):
    runs = sorted((ROOT / "docs/support").glob("*.json"))
    assert runs
    out = tmp_path / "support.md"
    assert main(["--matrix", *map(str, runs), "--out", str(out)]) == 0
    assert out.read_text() == (ROOT / "docs/support.md").read_text()


def test_selected_sequences_are_those_of_the_whole():
    inputs = make_inputs([3, 0, 5], [2, 4, 1])
    subject = Subject("reference", "cpu")
    chosen = select(inputs, [2, 0])
    assert torch.equal(chosen.query, torch.cat((inputs.query[3:8], inputs.query[:3])))
    assert chosen.kv_offsets.tolist() == [0, 1, 3]
    whole = own_results(inputs, subject.run(inputs), 2)
    subject.assert_all_same(own_results(chosen, subject.run(chosen), 0), whole)
    with pytest.raises(AssertionError, match="3 of 3 values differ"):
        Subject("triton", "cpu").assert_same("x", torch.ones(3), torch.zeros(3))


def test_poisoned_memory_holds_nan_and_ends():
    with poisoned_memory():
        for x in (torch.empty(2), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(2)):
            assert x.isnan().all()
        assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
    assert torch.empty.__name__ == "empty" and not hasattr(torch.empty, "__wrapped__")


def test_results_come_for_every_case_in_order():
    names = ["flops", "autocast"]
    results = conformance.run("reference", device="cpu", clauses=names)
    assert [(r.clause, r.case) for r in results] == [
        (clause.name, case) for clause in runner.chosen(names) for case in clause.cases
    ]


def test_the_cases_for_a_memory_checker_run(capsys):
    pytest.importorskip("triton")
    from gemattn.testing import memcheck

    assert memcheck.main(["--impl", "triton", "--every", "97"]) == 0
    assert capsys.readouterr().out.startswith("3 cases of triton")
