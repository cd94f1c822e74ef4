"""Kernel source to Python that the simulator can run.

Every call goes through the simulator, which gives builtins what the compiler would give them and runs other kernel
functions rewritten in the same way. The body of each `async_task` becomes a function. Line numbers stay.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

_CALL, _VALUE, _TASKS, _REGISTER = "_sim_call", "_sim_value", "_sim_tasks", "_sim_register"


class Mutation(Protocol):
    """A change of kernels' sources."""

    def concerns(self, file: str, first: int, last: int) -> bool:
        """Whether it may change a function on these lines."""

    def __call__(self, tree: ast.Module, file: str) -> None:
        """Change a function's tree."""

    def __hash__(self) -> int:
        """What it gives is remembered."""


class Hooks:
    """What rewritten code calls."""

    def __init__(
        self,
        call: Callable[..., Any],
        value: Callable[[Any, str], Any],
        run_tasks: Callable[..., None],
    ):
        """call(function, ...), value(assigned value, name of the variable), run_tasks([(body, arguments, line)])."""
        self.call, self.value, self.run_tasks = call, value, run_tasks


class Rewriter:
    """Rewrites functions once each."""

    def __init__(self, hooks: Hooks, mutation: Mutation | None = None):
        """`mutation` changes sources before they are rewritten."""
        self.hooks = hooks
        self.mutation = mutation
        self.files: set[str] = set()
        self._done: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function to call in place of `function`, a plain Python function."""
        if function not in self._done:
            self._done[function] = self._rewrite(function)
        return self._done[function]

    def _rewrite(self, function: Callable[..., Any]) -> Callable[..., Any]:
        mutation = self.mutation
        if mutation is not None and not mutation.concerns(*_lines(function.__code__)):
            mutation = None
        code, file = _compile(function, mutation)
        self.files.add(file)
        space: dict[str, Any] = {}
        exec(code, function.__globals__, space)
        cells = (c.cell_contents for c in function.__closure__ or ())
        return space["_sim_make"](self.hooks.call, self.hooks.value, self.hooks.run_tasks, *cells)


@functools.cache
def _compile(function: Callable[..., Any], mutation: Mutation | None) -> tuple[CodeType, str]:
    """Code of a module that defines `_sim_make`, which makes the function, and the file that it names."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function) or "?"
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    if mutation is not None:
        mutation(tree, file)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    _Transformer().visit(definition)
    outer = [_CALL, _VALUE, _TASKS, *function.__code__.co_freevars]
    maker = ast.FunctionDef(
        name="_sim_make",
        args=ast.arguments(
            posonlyargs=[], args=[ast.arg(n) for n in outer], kwonlyargs=[], kw_defaults=[], defaults=[]
        ),
        body=[definition, ast.Return(_name(definition.name))],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([maker], []))
    return compile(module, file, "exec"), file


def _lines(code: CodeType) -> tuple[str, int, int]:
    """(File, first line, last line.)"""
    inner = [_lines(x)[2] for x in code.co_consts if isinstance(x, CodeType)]
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code.co_filename, code.co_firstlineno, max(lines + inner)


def _name(identifier: str) -> ast.Name:
    return ast.Name(identifier, ast.Load())


def _is_with(node: ast.stmt, attribute: str) -> bool:
    if not isinstance(node, ast.With) or not isinstance(node.items[0].context_expr, ast.Call):
        return False
    function = node.items[0].context_expr.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == attribute


def _at(line: int, statements: list[ast.stmt]) -> list[ast.stmt]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt | ast.expr):
                node.lineno = node.end_lineno = line
    return statements


def _assigned(body: list[ast.stmt]) -> list[str]:
    names: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


class _Transformer(ast.NodeTransformer):
    def __init__(self) -> None:
        self.tasks = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Defaults and annotations are evaluated where Triton evaluates them: at definition.
        node.body = [x for s in node.body for x in self._statements(s)]
        return node

    def _statements(self, statement: ast.stmt) -> list[ast.stmt]:
        result = self.visit(statement)
        return result if isinstance(result, list) else [result]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(_name(_CALL), [node.func, *node.args], node.keywords), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        target = node.targets[0]
        name = target.id if isinstance(target, ast.Name) else ""
        node.value = ast.copy_location(ast.Call(_name(_VALUE), [node.value, ast.Constant(name)], []), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        # A constant: it stays a plain value.
        self.generic_visit(node)
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_With(self, node: ast.With) -> Any:
        if not _is_with(node, "async_tasks"):
            self.generic_visit(node)
            return node
        number, self.tasks = self.tasks, self.tasks + 1
        register, scope = f"{_REGISTER}{number}", f"_sim_scope{number}"
        body = [x for s in node.body for x in self._task(s, register, scope)]
        before = ast.parse(f"{register} = []\n{scope} = dict(locals())").body
        after = ast.parse(f"{_TASKS}({register})").body
        return [*_at(node.lineno, before), *body, *_at(node.lineno, after)]

    def _task(self, statement: ast.stmt, register: str, scope: str) -> list[ast.stmt]:
        """A task, or a condition around tasks."""
        if isinstance(statement, ast.If):
            statement.test = self.visit(statement.test)
            statement.body = [x for s in statement.body for x in self._task(s, register, scope)]
            statement.orelse = [x for s in statement.orelse for x in self._task(s, register, scope)]
            return [statement]
        if not _is_with(statement, "async_task"):
            raise SyntaxError(f"line {statement.lineno}: only tasks, and conditions around them, stand in async_tasks")
        assert isinstance(statement, ast.With) and isinstance(statement.items[0].context_expr, ast.Call)
        number, self.tasks = self.tasks, self.tasks + 1
        # A name assigned in the task begins with its value outside, which Python would hide.
        names = _assigned(statement.body)
        begin = ast.parse("\n".join(f"if {n!r} in {scope}: {n} = {scope}[{n!r}]" for n in names)).body
        begin = _at(statement.lineno, begin)
        body = [x for s in statement.body for x in self._statements(s)]
        function = ast.FunctionDef(
            name=f"_sim_task{number}",
            args=ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]),
            body=[*begin, *body],
            decorator_list=[],
        )
        call = self.visit(statement.items[0].context_expr)
        record = ast.Tuple([_name(function.name), call, ast.Constant(statement.lineno)], ast.Load())
        add = ast.Expr(ast.Call(ast.Attribute(_name(register), "append", ast.Load()), [record], []))
        return [ast.copy_location(function, statement), ast.copy_location(add, statement)]
