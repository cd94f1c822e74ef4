"""The contract as a suite: every clause on any implementation, a result for each case.

>>> from gemattn.testing import conformance
>>> results = conformance.run("triton")                  # or a function of jagged_attention's signature
>>> print(conformance.table(results))

On a command line ``python -m gemattn.testing.conformance --impl triton``. In pytest::

    @pytest.mark.parametrize(("clause", "case"), conformance.cases())
    def test_contract(clause, case):
        conformance.check(clause, "triton", case=case)

Without a GPU kernels run in Triton's interpreter, and clauses that need a GPU are "not run here", never passed.
"""

from gemattn.testing.conformance.clause import CLAUSES, Clause
from gemattn.testing.conformance.report import matrix, table
from gemattn.testing.conformance.runner import Result, check, ordered, run


def cases() -> list[tuple[str, str]]:
    """(clause, case) of the whole suite, in the order of the contract."""
    return [(clause.name, case) for clause in ordered() for case in clause.cases]


__all__ = ["CLAUSES", "Clause", "Result", "cases", "check", "matrix", "run", "table"]
