"""The fenced blocks of a page of the documentation, and what runs those of Python."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NOT_RUN = re.compile(r"# not run: (?P<reason>.+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: language, number of the first line, text."""

    language: str
    line: int
    text: str

    @property
    def reason_not_run(self) -> str | None:
        """The reason that the block gives for not being run."""
        found = _NOT_RUN.match(self.text)
        return found["reason"] if found else None


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(
        r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL
    ):
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(
            found[2], line, inspect.cleandoc(f"\n{found[3]}") + "\n" if found[1] else found[3]
        )


def python_blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page."""
    return [block for block in blocks(page) if block.language == "python"]


def printed_blocks(page: Path) -> dict[int, str]:
    """Return what a page says that its Python blocks print: the text blocks below a line that ends
    with "prints:".

    By the number of the Python block's first line.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    printed: dict[int, str] = {}
    python: Block | None = None
    for block in blocks(page):
        if block.language == "python":
            python = block
        elif block.language == "text" and lines[block.line - 4].endswith("prints:"):
            assert python is not None, f"{page.name}:{block.line}: no Python block is above"
            printed[python.line] = block.text
    return printed


def run_blocks(page: Path, chosen: Iterable[Block], capsys: pytest.CaptureFixture[str]) -> None:
    """Run blocks of a page in order, which share their names and print what the page says; "..." is
    any text.

    A block may use `await` outside of a function.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = printed_blocks(page)
    same = doctest.OutputChecker().check_output
    with asyncio.Runner() as runner:
        for block in chosen:
            # Empty lines above make tracebacks show the line numbers of the page.
            code = compile(
                "\n" * (block.line - 1) + block.text,
                page,
                "exec",
                ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,  # of this module, whose annotations are texts
            )
            result = eval(code, names)
            if inspect.iscoroutine(result):
                runner.run(result)
            output = capsys.readouterr().out
            if block.line in printed and not same(printed[block.line], output, doctest.ELLIPSIS):
                assert output == printed[block.line]
