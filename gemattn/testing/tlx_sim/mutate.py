"""Kernels with one synchronisation missing or wrong: what a simulator must notice."""

from __future__ import annotations

import ast
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


@dataclass(frozen=True)
class Mutant:
    """One change of one call in a file; usable as the `mutation` of `simulate`."""

    file: str
    line: int
    column: int
    operation: str
    change: str
    """"remove", "flip phase" or "drop barrier i" of a product's `mBarriers`."""

    @property
    def kind(self) -> str:
        """Of synchronisation."""
        if self.change == "flip phase":
            return "phase flip"
        return "commit" if self.change.startswith("drop") else REMOVED[self.operation]

    def __call__(self, tree: ast.Module, file: str) -> None:
        """Change the call, if it is in this tree."""
        if Path(file) == Path(self.file):
            _Change(self).visit(tree)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {self.operation}: {self.change}"


def mutants(file: str) -> list[Mutant]:
    """Every mutant of the kernels in a file."""
    tree = ast.parse(Path(file).read_text())
    return [x for node in ast.walk(tree) if isinstance(node, ast.Call) for x in _of_call(file, node)]


def _of_call(file: str, node: ast.Call) -> Iterator[Mutant]:
    if not isinstance(node.func, ast.Attribute) or getattr(node.func.value, "id", "") != "tlx":
        return
    name = node.func.attr
    where = file, node.lineno, node.col_offset, name
    if name in REMOVED:
        yield Mutant(*where, "remove")
    if name == "barrier_wait":
        yield Mutant(*where, "flip phase")
    for keyword in node.keywords:
        if keyword.arg == "mBarriers" and isinstance(keyword.value, ast.List):
            for place in range(len(keyword.value.elts)):
                yield Mutant(*where, f"drop barrier {place}")


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
            listed = next(k.value for k in node.keywords if k.arg == "mBarriers")
            assert isinstance(listed, ast.List)
            del listed.elts[int(mutant.change.split()[-1])]
            if not listed.elts:
                node.keywords.append(ast.keyword("force_async", ast.Constant(True)))
        elif mutant.operation == "async_dot_wait":
            return node.args[1]
        else:
            return ast.copy_location(ast.Constant(None), node)
        return node
