"""The command that measures the structure; what the figures of this library should be is not said
here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.structure import Shape, main, shape
from tests.support.source import PACKAGE, ROOT

CHAIN = {
    "__init__.py": "from aiohooks.a import x\n",
    "a.py": "import os\nimport aiohooks.folder\n\nx = 1\n",
    "folder/__init__.py": "def f():\n    from aiohooks import b\n    from aiohooks.b import y\n",
    "b.py": "y = 1\nif TYPE_CHECKING:\n    from aiohooks.a import x\n",
}
"""A package: file by file, what is in it."""


def written(root: Path, files: dict[str, str]) -> Path:
    """Puts a package into `root`."""
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_modules_lines_and_imports_are_counted(tmp_path: Path) -> None:
    """Imports inside functions and of packages count, each module once; those for types and of
    other libraries do not.
    """
    assert shape(written(tmp_path, CHAIN)) == Shape(
        modules=4, lines=11, longest=4, imports=3 / 4, chain=4
    )


def test_a_circle_of_imports_is_named(tmp_path: Path) -> None:
    """Where imports make a circle, no chain is the longest one: the circle is given."""
    found = shape(written(tmp_path, CHAIN | {"b.py": "from aiohooks import a\n"})).chain
    assert isinstance(found, str)
    assert all(module in found for module in ("aiohooks.a", "aiohooks.b", "aiohooks.folder"))


def test_the_command_compares_two_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each library is measured by itself; every figure is there, and files that are not imported
    change no call.
    """
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE)
    written(tmp_path, {"one_more.py": "x = 1\n"})
    main(["--compare", str(tmp_path)])
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    ]
    assert rows[0] == ["", "before", "now"]
    figures = {name: (before, now) for name, before, now in rows[2:]}
    assert int(figures["modules"][0]) == int(figures["modules"][1]) + 1
    calls = {name: cells for name, cells in figures.items() if " / " in cells[1]}
    assert len(calls) >= 10
    for before, now in calls.values():
        assert before == now
        count, functions, files = map(int, now.split(" / "))
        assert count >= functions >= files > 0
    assert int(figures["... listings of its directory"][1]) > 0


def test_a_folder_without_a_library_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library of this checkout is never measured in place of another one that is not there."""
    with pytest.raises(SystemExit):
        main(["--library", str(tmp_path)])
    assert "holds no package aiohooks" in capsys.readouterr().err
