"""Kernels with one synchronisation missing or wrong: what a simulator must notice."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REMOVED = {
    "barrier_wait": "wait",
    "async_dot_wait": "wait",
    "async_descriptor_store_wait": "wait",
    "barrier_arrive": "arrive",
    "barrier_expect_bytes": "arrive",
    "tcgen05_commit": "commit",
    "fence": "fence",
    "named_barrier_wait": "named barrier",
    "named_barrier_arrive": "named barrier",
}
"""TLX operations that a mutant leaves out, and what kind of synchronisation each is."""

INLINE_WAIT = "inline_asm_elementwise"
"""Inline PTX of a kernel, where it waits for bulk copies."""


@dataclass(frozen=True)
class Mutant:
    """One change of one call in a file; usable as the `mutation` of `simulate`."""

    file: str
    line: int
    column: int
    operation: str
    change: str
    """"remove", "flip phase" or "drop barrier i" of a product's `mBarriers`."""
    function: str
    text: str
    """The call as source text; with " (2nd)" and so on where the function has the same one before."""

    @property
    def kind(self) -> str:
        """Of synchronisation."""
        if self.change == "flip phase":
            return "phase flip"
        if self.change.startswith("drop"):
            return "commit"
        return "wait" if self.operation == INLINE_WAIT else REMOVED[self.operation]

    @property
    def key(self) -> str:
        """Which one of its function it is, whatever the line."""
        return f"{self.text}: {self.change}"

    def concerns(self, file: str, first: int, last: int) -> bool:
        """Whether the call is on these lines."""
        return Path(file) == Path(self.file) and first <= self.line <= last

    def __call__(self, tree: ast.Module, file: str) -> None:
        """Change the call, if it is in this tree."""
        if Path(file) == Path(self.file):
            _Change(self).visit(tree)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.function} {self.key}"


def mutants(file: str) -> list[Mutant]:
    """Every mutant of the kernels in a file."""
    found = []
    for function in ast.parse(Path(file).read_text()).body:
        if isinstance(function, ast.FunctionDef):
            texts: Counter[str] = Counter()
            calls = [x for x in ast.walk(function) if isinstance(x, ast.Call)]
            for call in sorted(calls, key=lambda x: (x.lineno, x.col_offset)):
                text = ast.unparse(call).removeprefix("tlx.")
                changes = list(_changes(call, function))
                if changes:
                    texts[text] += 1
                    text += _ORDINALS[texts[text] - 1]
                where = file, call.lineno, call.col_offset, getattr(call.func, "attr", "")
                found += [Mutant(*where, change, function.name, text) for change in changes]
    return found


_ORDINALS = ("", " (2nd)", " (3rd)", *(f" ({i}th)" for i in range(4, 50)))


def _changes(call: ast.Call, function: ast.FunctionDef) -> Iterator[str]:
    if not isinstance(call.func, ast.Attribute):
        return
    name, module = call.func.attr, getattr(call.func.value, "id", "")
    if name == INLINE_WAIT and "wait_group" in str(getattr(call.args[0], "value", "")):
        yield "remove"
    if module != "tlx":
        return
    if name in REMOVED:
        yield "remove"
    if name == "barrier_wait":
        yield "flip phase"
    for keyword in call.keywords:
        if keyword.arg == "mBarriers":
            yield from (f"drop barrier {place}" for place in range(_count(keyword.value, function)))


def _count(barriers: ast.expr, function: ast.FunctionDef) -> int:
    """How many are listed; in a variable, how many at most where it was assigned last."""
    name, line = ast.unparse(barriers), barriers.lineno
    assigned = [x.value for x in ast.walk(function) if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name]
    before = [barriers, *sorted((x for x in assigned if x.lineno < line), key=lambda x: x.lineno)]
    return max((len(x.elts) for x in ast.walk(before[-1]) if isinstance(x, ast.List)), default=0)


class _Change(ast.NodeTransformer):
    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def visit_Module(self, node: ast.Module) -> ast.AST:
        definition = node.body[0]
        assert isinstance(definition, ast.FunctionDef)
        if definition.lineno <= self.mutant.line <= (definition.end_lineno or 0):
            self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        mutant = self.mutant
        if node.lineno != mutant.line or node.col_offset != mutant.column:
            return node
        if getattr(node.func, "attr", "") != mutant.operation:
            return node
        if mutant.change == "flip phase":
            node.args[1] = ast.copy_location(ast.BinOp(node.args[1], ast.BitXor(), ast.Constant(1)), node)
        elif mutant.change.startswith("drop"):
            keyword = next(k for k in node.keywords if k.arg == "mBarriers")
            place = int(mutant.change.split()[-1])
            if isinstance(keyword.value, ast.List):
                del keyword.value.elts[place]
                if not keyword.value.elts:
                    node.keywords.append(ast.keyword("force_async", ast.Constant(True)))
            else:
                name = ast.unparse(keyword.value)
                keyword.value = ast.parse(f"{name}[:{place}] + {name}[{place + 1}:]", mode="eval").body
                ast.increment_lineno(keyword.value, node.lineno - 1)
        elif mutant.operation == "async_dot_wait":
            return node.args[1]
        else:
            return ast.copy_location(ast.Constant(None), node)
        return node
