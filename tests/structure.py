"""Prints figures of the library's structure as a Markdown table: how large its parts are, and how
many a run goes through.

    python -m tests.structure
    python -m tests.structure --library DIR
    python -m tests.structure --compare DIR

DIR is a folder that holds an `aiohooks` package, such as another checkout. `--library` measures
that one instead of this checkout; `--compare` puts it in a column before the library. Each library
is measured in a process of its own. Nothing is known about the names of private modules, so that
layouts can be compared.

The files are counted like this:

- modules, lines: all `.py` files below the package and all their lines, also empty ones;
- internal imports a module: how many other modules of the library a module imports, on average.
  Imports inside functions count, those under `if TYPE_CHECKING` do not. A name imported from a
  package is an import of its `__init__`;
- longest import chain: the modules on the longest path along these imports, both ends included. The
  package above an imported module, which Python imports as well, is not on the path. If there is a
  circle, it is printed instead;
- names at the front door: the length of `aiohooks.__all__`.

What is counted at run time is said in `tests/support/structure_traces.py`.
"""

from __future__ import annotations

import argparse
import graphlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.source import PACKAGE, ROOT, imports, modules

Graph = Mapping[str, frozenset[str]]
"""The other modules of the library that each module imports."""


@dataclass(frozen=True)
class Shape:
    """The figures that the files alone give."""

    modules: int
    lines: int
    longest: int
    imports: float
    chain: int | str


def shape(root: Path = ROOT) -> Shape:
    """Reads the files of the library in `root`."""
    lengths = [
        len(path.read_text(encoding="utf-8").splitlines()) for path in modules(root).values()
    ]
    graph = import_graph(root)
    count = sum(map(len, graph.values()))
    return Shape(len(lengths), sum(lengths), max(lengths), count / len(graph), longest_chain(graph))


def import_graph(root: Path = ROOT) -> Graph:
    """Which module imports which, when the program runs."""
    known = modules(root).keys()
    return {
        module: frozenset(one.module for one in imports(module, root) if one.kind != "types")
        & known - {module}
        for module in known
    }


def longest_chain(graph: Graph) -> int | str:
    """The number of modules on the longest path; a circle, if there is one."""
    lengths: dict[str, int] = {}
    try:
        for module in graphlib.TopologicalSorter(graph).static_order():
            lengths[module] = 1 + max((lengths[other] for other in graph[module]), default=0)
    except graphlib.CycleError as error:
        return "circle: " + " <- ".join(error.args[1])
    return max(lengths.values())


def figures(root: Path) -> dict[str, str]:
    """Everything about the library in `root`, which must be the first one to be imported by this
    process.
    """
    sys.path.insert(0, str(root))
    # Imported here, for this imports the library.
    from tests.support import structure_traces as traces

    if traces.LIBRARY.parent != root:
        raise SystemExit(f"{traces.LIBRARY} was imported, and not the library in {root}")
    found = shape(root)
    return {
        "modules": f"{found.modules}",
        "lines": f"{found.lines:,}",
        "max lines a module": f"{found.longest}",
        "internal imports a module": f"{found.imports:.1f}",
        "longest import chain": f"{found.chain}",
        "names at the front door": f"{traces.front_door()}",
        **traces.figures(),
    }


def measured(root: Path) -> dict[str, str]:
    """What `figures` says in a new process."""
    command = [sys.executable, "-m", "tests.structure", "--json", "--library", str(root)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A Markdown table with a column for each library; all have the same rows."""
    rows = next(iter(columns.values()))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(column[row] for column in columns.values())] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def folder(path: str) -> Path:
    """An argument that must be a folder with the library in it."""
    found = Path(path).resolve()
    if not (found / PACKAGE / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{found} holds no package {PACKAGE}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--library",
        type=folder,
        default=ROOT,
        metavar="DIR",
        help="the library to measure, this checkout if left out",
    )
    parser.add_argument(
        "--compare", type=folder, metavar="DIR", help="another one, as it was before"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures of the library as JSON"
    )
    options = parser.parse_args(argv)
    if options.json:
        print(json.dumps(figures(options.library)))
        return
    if options.compare is None:
        columns = {"aiohooks": measured(options.library)}
    else:
        columns = {"before": measured(options.compare), "now": measured(options.library)}
    print(f"Python {platform.python_version()}; at run time: calls / functions / files\n")
    print(table(columns))


if __name__ == "__main__":
    main()
