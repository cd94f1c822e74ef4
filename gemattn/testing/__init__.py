"""What the package is tested with, shipped because users write kernels and layers too.

`gemattn.testing.conformance`, the contract as a suite, loads when first used.
"""

import importlib
from typing import Any

from gemattn.testing.inputs import JaggedInputs, make_inputs
from gemattn.testing.oracle import attend, run_oracle
from gemattn.testing.poison import poisoned_memory
from gemattn.testing.tolerance import (
    Implementation,
    assert_close,
    assert_matches_oracle,
    assert_zero_slack,
    compare_with_oracle,
    run,
)

__all__ = [
    "Implementation",
    "JaggedInputs",
    "assert_close",
    "assert_matches_oracle",
    "assert_zero_slack",
    "attend",
    "compare_with_oracle",
    "make_inputs",
    "poisoned_memory",
    "run",
    "run_oracle",
]


def __getattr__(name: str) -> Any:
    if name == "conformance":
        return importlib.import_module("gemattn.testing.conformance")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
