"""What a clause is: a named function that runs an implementation and asserts, with what it needs and who owes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Owed = Literal["all", "kernels", "reference"]


class NotRunHere(Exception):
    """This machine, or this implementation's kind, cannot show the clause; the message says why."""


@dataclass(frozen=True)
class Clause:
    """One promise of the contract. `cases` are the arguments of `function` by name; each is a result of its own."""

    name: str
    contract: int
    text: str
    function: Callable[..., None]
    cases: dict[str, dict[str, Any]]
    owed: Owed
    gpus: int

    def not_owed(self, reference: bool) -> str | None:
        """Why the implementation does not owe this, or None."""
        if self.owed == "kernels" and reference:
            return "kernels owe it"
        if self.owed == "reference" and not reference:
            return "the reference alone owes it"
        return None


CLAUSES: dict[str, Clause] = {}
"""All clauses by name, in the order of the contract."""


def clause(
    contract: int, *, cases: dict[str, dict[str, Any]] | None = None, owed: Owed = "all", gpus: int = 0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function ``f(subject, **case)`` as a clause under its own name; its docstring is what it promises.

    Args:
        contract: number of the contract's clause.
        cases: arguments by name; None: one case without arguments.
        owed: by whom.
        gpus: how many CUDA GPUs it takes to show it; 0 where a CPU shows it too.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        text = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        assert text and name not in CLAUSES, name
        CLAUSES[name] = Clause(name, contract, text, function, cases or {"": {}}, owed, gpus)
        return function

    return register


def over(**axes: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Every combination of the axes' values, named by them; a dict is an axis of named values."""
    named = [
        [(str(key), x[key] if isinstance(x, dict) else key) for key in x] if isinstance(x, dict) else
        [(str(value).removeprefix("torch."), value) for value in x]
        for x in axes.values()
    ]  # fmt: skip
    return {
        ", ".join(name for name, _ in choice): dict(zip(axes, (value for _, value in choice), strict=True))
        for choice in itertools.product(*named)
    }
