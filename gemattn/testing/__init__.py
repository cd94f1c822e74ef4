"""What the package is tested with, shipped because users write kernels and layers too."""

from gemattn.testing.inputs import JaggedInputs, make_inputs
from gemattn.testing.oracle import attend, run_oracle
from gemattn.testing.tolerance import assert_close, assert_matches_oracle, assert_zero_slack, run

__all__ = [
    "JaggedInputs",
    "assert_close",
    "assert_matches_oracle",
    "assert_zero_slack",
    "attend",
    "make_inputs",
    "run",
    "run_oracle",
]
