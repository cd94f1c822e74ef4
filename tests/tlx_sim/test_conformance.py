"""Every clause of the contract on the simulated Blackwell chip, one case of each.

The whole of them, on either chip: python -m gemattn.testing.conformance --impl tlx --device sm_100 --schedules 2.
"""

import unittest

import pytest
import torch

pytest.importorskip("gemattn.testing.tlx_sim", reason="needs fbtriton", exc_type=ImportError)

from triton.tools.tensor_descriptor import TensorDescriptor

import gemattn
from gemattn.testing import conformance
from gemattn.testing.conformance import runner
from gemattn.testing.conformance.__main__ import main
from gemattn.testing.conformance.subject import Subject
from tests.tlx_sim import planted

CASES = {
    "empty_sequences": "bfloat16",
    "nothing_to_attend_to": "bfloat16, True",
    "gradients_of_rows_that_see_no_key": "bfloat16, shared",
    "rows_without_keys_beside_a_nan": "bfloat16",
    "isolation_under_a_shared_query": "bfloat16",
    "scores_that_are_all_minus_infinity": "bfloat16",
    "slack_rows": "bfloat16, cross, causal",
    "offset_dtypes": "int32, int64",
    "corrupted_offsets": "bfloat16, int32",
    "wrong_arguments_are_named": "",
    "same_buffers_other_lengths": "shared",
    "strides": "bfloat16",
    "head_sizes": "128",
    "dtypes": "128, float16",
    "head_ratios": "bfloat16, 4 / 2",
    "masks": "bfloat16, cross, both sides",
    "masks_of_wide_heads": "shared, causal, left side",
    "masks_compose": "",
    "batch_invariance": "bfloat16, cross, causal, left side",
    "determinism": "bfloat16, shared",
    "choice_is_not_of_the_batch": "",
    "one_incoming_gradient": "bfloat16, cross, dlse",
    "one_wanted_gradient": "key",
    "scales": "bfloat16, -0.7",
    "equal_rows": "bfloat16",
    "no_double_backward": "",
    "opcheck": "shared",
    "export": "cross",
    "autocast": "float16",
    "checkpointing": "cross",
    "no_input_is_mutated": "cross",
    "flops": "",
    "scores_are_scaled_in_float32": "float16, cross",
    "gradients_accumulate_in_float32": "bfloat16",
}
ELSEWHERE = {"isolation", "fullgraph_compile"}
"""Eleven runs, and three compilations: the long command's. test_blackwell.py and test_confirm.py have shorter forms."""


def test_every_clause_that_can_be_simulated_is():
    simulated = {c.name for c in runner.ordered() if c.owed != "reference" and not c.gpus}
    assert set(CASES) | ELSEWHERE == simulated


@pytest.mark.parametrize("clause", CASES)
def test_blackwell_keeps(clause):
    conformance.check(clause, "tlx", case=CASES[clause], device="sm_100", whole=True)


@pytest.mark.parametrize("fault", ["no fence", ""])
def test_what_the_simulator_finds_is_a_failure(fault):
    """Right results do not make up for it."""

    def racing(*arguments, **options):
        source, target = (TensorDescriptor(torch.zeros(96, 64), [96, 64], [64, 1], [16, 64]) for _ in range(2))
        planted.copy_kernel[(1,)](source, target, 16, 2, fault, num_warps=4)
        return gemattn.jagged_attention(*arguments, **options, impl="reference")

    result = runner.run_case(Subject(racing, "sm_90"), conformance.CLAUSES["flops"], "", schedules=2)
    assert result.status == ("failed" if fault else "passed") and fault in result.message


def test_a_chip_runs_its_own_implementation_alone():
    for impl in ("reference", "triton"):
        with pytest.raises(unittest.SkipTest, match="the simulator runs TLX kernels"):
            conformance.check("flops", impl, device="sm_90")


def test_the_command_names_the_chip(capsys):
    assert (
        main(["--impl", "tlx", "--device", "sm_90", "--schedules", "2", "--clauses", "scores_are_scaled_in_float32"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "sm_90 simulated" in printed and "2 schedules a case" in printed and "4 passed" in printed
    assert gemattn.dispatch.simulated is None
