"""The faults: changes of one expression or statement inside a function, found with `ast` and made
in the text of its module.

Left out is what no behaviour depends on: docstrings, annotations, assertions for type checkers,
`__repr__`, the texts of errors and log records, code for another version of Python.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef

INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
# The order of these arguments does not matter, or only a type checker sees them.
UNORDERED = {
    "min",
    "max",
    "isinstance",
    "issubclass",
    "cast",
    "getattr",
    "hasattr",
    "setattr",
    "contextlib.suppress",
}
TEXTS = {"add_note", "Cast"}
LOGGER = re.compile(r"_?(logger|log)\.(debug|info|warning|error|exception|critical|log)$")


@dataclass(frozen=True)
class Mutant:
    """One fault of one module."""

    module: str
    """Its path from the root of the repository."""
    function: str
    """The qualified name of the function, without those inside it."""
    first_line: int
    """Where the function's code begins: at its first decorator."""
    lines: tuple[int, int]
    """The lines that a test must run to notice anything: first and last."""
    line: int
    change: str
    """What changes, on one line. With module and function, this is what the mutant is known by."""
    start: int
    end: int
    text: str
    """What is written in place of the module's text from `start` to `end`."""

    def applied(self, source: str) -> str:
        """Return the module with the fault."""
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.change}"


def mutants(module: str, source: str) -> list[Mutant]:
    """Return all faults of a module, in the order of its lines."""
    text = _Text(source)
    return [
        _mutant(module, name, function, statement, node, new, text)
        for name, function in _functions(ast.parse(source).body, "")
        for statement, node, new in _changes(function)
    ]


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions of a module or class that run on this version of Python, with their
    qualified names.
    """
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function) and node.name not in ("__repr__", "__str__"):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.If):
            yield from _functions(_live_branch(node), prefix)


def _live_branch(node: ast.If) -> list[ast.stmt]:
    condition = ast.unparse(node.test)
    if "sys.version_info" in condition or "sys.platform" in condition:
        return node.body if eval(condition, {"sys": sys}) else node.orelse
    return [] if condition == "TYPE_CHECKING" else node.body + node.orelse


def _changes(function: Function) -> Iterator[tuple[ast.stmt, ast.expr | ast.stmt, str]]:
    """Yield the faults of a function: the statement, the part of it that is replaced, and the new
    text.
    """
    stored = Counter(
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )  # a name that is set only once is missed by whatever uses it

    def visit(statement: ast.stmt) -> Iterator[tuple[ast.stmt, ast.expr | ast.stmt, str]]:
        if isinstance(
            statement, ast.Assert | ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom
        ):
            return
        if isinstance(statement, ast.If) and "sys." in ast.unparse(statement.test):
            for inner in _live_branch(statement):
                yield from visit(inner)
            return
        yield from ((statement, statement, new) for new in _statement_faults(statement, stored))
        if (
            isinstance(statement, ast.If | ast.While)
            and (new := _negated(statement.test)) is not None
        ):
            yield statement, statement.test, new
        for child in _children(statement):
            if isinstance(child, ast.stmt):
                yield from visit(child)
            else:
                yield from (
                    (statement, node, new)
                    for node in _expressions(child)
                    for new in _expression_faults(node)
                )

    for statement in function.body:
        yield from visit(statement)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is directly inside a node and may be changed."""
    children: Iterable[ast.AST]
    match node:
        case ast.AnnAssign(value=value):
            children = [value] if value else []
        case ast.Raise():  # its text; dropping it whole is a fault of its own
            children = []
        case ast.Call(func=function) if _is_text(function):
            children = []
        case ast.keyword(arg="strict"):  # of `zip`, where the lengths are the same anyway
            children = []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            children = node.body
        case _:
            children = ast.iter_child_nodes(node)
    for child in children:
        if isinstance(child, ast.stmt | ast.expr):
            yield child
        else:  # a handler, a keyword, an item of a `with`, with expressions and statements in it
            yield from _children(child)


def _is_text(function: ast.expr) -> bool:
    name = ast.unparse(function)
    return bool(LOGGER.search(name)) or name.endswith(("Error", *TEXTS))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.JoinedStr | ast.Lambda | ast.stmt):
        if isinstance(node, ast.Lambda):
            yield from _expressions(node.body)
        return
    if isinstance(node, ast.expr):
        yield node
    for child in _children(node):
        yield from _expressions(child)


def _statement_faults(statement: ast.stmt, stored: Counter[str]) -> Iterator[str]:
    match statement:
        case ast.Expr(value=ast.Call(func=function)) if not ast.unparse(function).endswith("debug"):
            yield "pass"
        case ast.Expr(value=ast.Await()) | ast.Raise() | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Assign(value=ast.Call(func=ast.Name(id="cast"))):  # only for type checkers
            pass
        case ast.Assign(targets=[ast.Name(id=name)]) if stored[name] > 1:
            yield "pass"
        case ast.Return(value=ast.Constant(value=None | False)):  # None is as false as False
            pass
        case ast.Return(value=ast.expr()):
            yield "return None"
        case ast.Continue():
            yield "break"
        case ast.Break():
            yield "continue"
        case _:
            pass


def _expression_faults(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, ops=[op, *more], comparators=right):
            for changed in (INVERSE[type(op)], BOUNDARY.get(type(op))):
                if changed is not None:
                    yield f"({ast.unparse(ast.Compare(left, [changed(), *more], right))})"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield str(value + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_string(
            left, right
        ):
            yield f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))})"
        case ast.Call(func=function, args=[first, second, *rest]) if not (
            isinstance(first, ast.Starred) or isinstance(second, ast.Starred) or _is_text(function)
        ):
            if ast.unparse(function) not in UNORDERED and ast.unparse(first) != ast.unparse(second):
                yield ast.unparse(ast.Call(function, [second, first, *rest], node.keywords))
        case ast.IfExp(test=test) if (new := _negated(test)) is not None:
            yield f"({ast.unparse(node.body)} if {new} else {ast.unparse(node.orelse)})"
        case _:
            pass


def _is_string(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
        for node in nodes
    )


def _negated(test: ast.expr) -> str | None:
    """Return the negated condition, or None where that is a fault of the expression itself."""
    return (
        None
        if isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant)
        else f"(not ({ast.unparse(test)}))"
    )


def _mutant(
    module: str,
    name: str,
    function: Function,
    statement: ast.stmt,
    node: ast.expr | ast.stmt,
    new: str,
    text: _Text,
) -> Mutant:
    body = getattr(
        statement, "body", None
    )  # a condition is noticed by the tests that run it, not by those of its block
    last = (
        max(statement.lineno, body[0].lineno - 1)
        if body
        else statement.end_lineno or statement.lineno
    )
    start, end = (
        text.offset(node.lineno, node.col_offset),
        text.offset(node.end_lineno or 0, node.end_col_offset or 0),
    )
    first, stop = text.starts[statement.lineno - 1], text.starts[last]
    before, after = text.source[first:stop], text.source[first:start] + new + text.source[end:stop]
    return Mutant(
        module,
        name,
        min(one.lineno for one in (function, *function.decorator_list)),
        (statement.lineno, last),
        node.lineno,
        f"{_on_a_line(before)}  =>  {_on_a_line(after)}",
        start,
        end,
        new,
    )


def _on_a_line(statement: str) -> str:
    """Return a statement as it would be on one line."""
    text = re.sub(r"([(\[{])\s+", r"\1", statement)
    return " ".join(re.sub(r",?\s+([)\]}])", r"\1", text).split())


class _Text:
    """Where the lines of a module start: `ast` counts columns in bytes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Return the place in the text."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())
