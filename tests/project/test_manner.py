"""The manner of the code, as far as a program can see it and no linter does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.source import ROOT, python_files

STILL_TO_BE_REWRITTEN = {
    "aiohooks/dispatch/": "issue 38",
}
"""The places where the patterns are still allowed, and the issue that ends this."""
LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)
BUILTINS = ("bool", "dict", "list", "set", "tuple")


def patterns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each pattern that makes a stranger stop."""
    for node in ast.walk(tree):
        for value in stand_ins(node):
            if isinstance(value, ast.Name) and value.id in BUILTINS:
                yield value.lineno, f"{value.id} as a function that does nothing"
        if isinstance(node, LOOPS) and isinstance(node.iter, ast.IfExp):
            yield node.iter.lineno, "a loop over a conditional expression"
        elif isinstance(node, ast.Name) and node.id in ("one", "each"):
            yield node.lineno, f"the name {node.id!r}"
        elif isinstance(node, ast.arg) and node.arg in ("one", "each"):
            yield node.lineno, f"the name {node.arg!r}"
        elif isinstance(node, ast.Assign) and sets_attributes(node):
            yield node.lineno, "several attributes set together"


def stand_ins(node: ast.AST) -> list[ast.expr | None]:
    """Return the values in a node that may be called later: a builtin there does nothing."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp):
        return [*node.values]
    if isinstance(node, ast.arguments):
        return [*node.defaults, *node.kw_defaults]
    return []


def sets_attributes(node: ast.Assign) -> bool:
    """Return whether several values are assigned, at least one of them to an attribute."""
    target = node.targets[0]
    if not isinstance(node.value, ast.Tuple) or not isinstance(target, ast.Tuple):
        return False
    return any(isinstance(element, ast.Attribute) for element in target.elts)


def patterns_by_place() -> dict[str, list[str]]:
    """Return what is found in the library, by the place that may still have it, or by ''."""
    found: dict[str, list[str]] = {place: [] for place in ("", *STILL_TO_BE_REWRITTEN)}
    for path in python_files("aiohooks"):
        name = path.relative_to(ROOT).as_posix()
        places = [place for place in STILL_TO_BE_REWRITTEN if name.startswith(place)]
        for line, text in patterns(ast.parse(path.read_text(encoding="utf-8"))):
            found[places[0] if places else ""].append(f"{name}:{line}: {text}")
    return found


def test_rewritten_code_has_none_of_the_patterns() -> None:
    """Code that makes a reader stop is only where an issue is still to rewrite it."""
    found = patterns_by_place()
    assert found.pop("") == []
    assert [place for place, lines in found.items() if not lines] == []
