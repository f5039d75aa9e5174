"""The project's own files, read and not imported: what the tests of its shape look at."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "aiohooks"

Kind = Literal["top", "inner", "types"]
"""Where an import stands: on a module's own level, inside a function, or under `if
TYPE_CHECKING`.
"""


@dataclass(frozen=True)
class Import:
    """One imported name: `from {module} import {name}`, or `import {module}` with no name."""

    importer: str
    module: str
    name: str | None
    kind: Kind
    line: int

    def __str__(self) -> str:
        what = f"from {self.module} import {self.name}" if self.name else f"import {self.module}"
        return f"{self.importer}:{self.line}: {what}"


def python_files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    """The syntax tree of a file; not kept, for the trees of all files are a million objects."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def modules() -> dict[str, Path]:
    """The library's modules by dotted name."""
    found: dict[str, Path] = {}
    for path in python_files(PACKAGE):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(importer: str) -> tuple[Import, ...]:
    """Every import of a module of the library; names of modules are distinguished from names inside
    them.
    """
    return tuple(_imports(importer, tree(modules()[importer]), "top", modules()))


def _imports(importer: str, node: ast.AST, kind: Kind, known: Collection[str]) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(importer, alias.name, None, kind, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{importer}:{child.lineno}: imports are written absolute"
            assert child.module is not None
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                if whole in known:
                    yield Import(importer, whole, None, kind, child.lineno)
                else:
                    yield Import(importer, child.module, alias.name, kind, child.lineno)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _imports(importer, ast.Module([statement], []), "types", known)
            for statement in child.orelse:
                yield from _imports(importer, ast.Module([statement], []), kind, known)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(importer, child, "types" if kind == "types" else "inner", known)
        else:
            yield from _imports(importer, child, kind, known)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def defined_names(module: str) -> frozenset[str]:
    """What a module makes itself on its own level, imports left out."""
    return frozenset(_defined(tree(modules()[module]).body))


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Assign() | ast.AnnAssign():
                yield from _stored(statement)
            case ast.If() | ast.Try() | ast.With():
                for part in ("body", "orelse", "finalbody"):
                    yield from _defined(getattr(statement, part, []))
            case _:
                pass


def _stored(statement: ast.stmt) -> Iterator[str]:
    return (
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def own_functions(
    body: list[ast.stmt],
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """The functions and classes of a module and the methods of its classes, with their dotted
    names.
    """
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield statement.name, statement
            for name, inner in own_functions(statement.body):
                yield f"{statement.name}.{name}", inner
        elif isinstance(statement, ast.If | ast.Try):
            for part in ("body", "orelse"):
                yield from own_functions(getattr(statement, part, []))
