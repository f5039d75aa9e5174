"""House rules that no linter knows."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.source import ROOT, own_functions, python_files, tree

TEST_FILES = python_files("tests")
# Measures how long hooks take that do wait: it is what is measured there, and no test leans on it.
# Programs in virtual time.
MAY_SLEEP = tuple(
    ROOT / "tests" / name
    for name in (
        "benchmarks",
        "testing/explored_programs.py",
        "testing/test_exploration.py",
        "testing/test_network.py",
        "fuzz/explored",
        "fuzz/random_programs",
    )
)
# A fault comes at a random moment of a real server's life: a pause of random length, and nothing is
# waited for by it.
RANDOM_MOMENTS = "chance.random()"
OPTIONS = (
    "time.sleep(slow_disk_secs)",
    "time.sleep(chosen.choice(LATE_SECS))",
)  # options of the whole run

SKIPPED_FOLDERS = {".git", ".venv", "venv", "build", "dist", "htmlcov", "__pycache__"}
# Written so that the patterns do not find themselves.
NOT_FOR_THE_TREE = {
    "a path of one machine": re.compile(
        r"(?<![\w.])/(?:work|farm|root|home)/\w|/tmp/(?:v|w|team|bash_jobs)\b"
    ),
    "a host of a package registry": re.compile(
        r"(?:pypi|debian|npmjs)[.](?:org|com)|pythonhosted[.]org"
    ),
}


def relative(path: Path) -> str:
    """How a file is named in a test's name."""
    return str(path.relative_to(ROOT))


def test_a_test_says_which_law_it_checks() -> None:
    """Every test function has a docstring: the law that it checks."""
    silent = [
        f"{relative(path)}: {name}"
        for path in TEST_FILES
        for name, node in own_functions(tree(path).body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and ast.get_docstring(node) is None
    ]
    assert not silent


def test_nothing_sleeps() -> None:
    """Neither the library nor a test waits for time to pass; `sleep(0)` is a suspension point and
    nothing else.
    """
    found = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in python_files("aiohooks", "tests")
        if not any(map(path.is_relative_to, MAY_SLEEP))
        for node in ast.walk(tree(path))
        if sleeps(node) and isinstance(node, ast.Call)
    ]
    assert [
        text for text in found if RANDOM_MOMENTS not in text and not text.endswith(OPTIONS)
    ] == []


def sleeps(node: ast.AST) -> bool:
    """Whether this is a call of a `sleep` for anything but a literal 0."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio" | "anyio"), attr="sleep")):
            return not (
                node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            )
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")):
            return True
        case _:
            return False


def text_files() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(
            part in SKIPPED_FOLDERS or part.endswith(("_cache", ".egg-info")) for part in parts
        )
        if path.is_file() and not hidden and parts[0] not in (".hypothesis", ".coverage"):
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_nothing_of_one_machine_is_in_the_tree() -> None:
    """No file names a path of the machine it was written on, or a registry that packages come
    from.
    """
    found = [
        f"{relative(path)}:{number}: {what}: {line[:80]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in NOT_FOR_THE_TREE.items()
        if pattern.search(line)
    ]
    assert not found, "\n".join(itertools.islice(found, 20))
