"""The order of the packages, and the other rules that can be read off the imports."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from docs.site.pictures import LAYERS
from tests.support.processes import run_python
from tests.support.source import (
    PACKAGE,
    Import,
    imports,
    modules,
    tree,
)
from tests.support.versions import CORE, requirements

# In this order: each imports from those above it and from itself. docs/design/architecture.md
# says what is in each.
PACKAGES = (
    "errors",
    "_core",
    "_why",
    "dispatch",
    "stores",
    "version_gate",
    "checkpoint",
    "graph",
    "session",
    "hooks",
    "training",
    "distributed",
    "adapters",
    "testing",
    "__init__",
    "_command_line",
    "__main__",
)
# What a built-in hook knows of a session: the contract of every hook, and what hooks are handed.
KNOWN_TO_HOOKS = {
    "session",
    "session.hook",
    "session.coordinator",
    "session.status",
}

# What an extra brings (by the name it is imported as), and the modules that may import it.
EXTRAS: dict[str, str] = {
    "uvloop": "aiohooks.session.run",
    "numpy": "aiohooks.checkpoint._encoding",
    "msgspec": "aiohooks.checkpoint._encoding",
    "torch": "aiohooks.checkpoint._torch",
    "fsspec": "aiohooks.checkpoint._remote",
    "tensorboardX": "aiohooks.hooks._tensorboard",
    "rich": "aiohooks.hooks._rich",
    "redis": "aiohooks.stores.redis",
    "ray": "aiohooks.stores.ray, aiohooks.distributed.ray",
    "starlette": "aiohooks.adapters.asgi.app",
    "tensorflow": "aiohooks.adapters.tensorflow",
    "opentelemetry": "aiohooks.adapters.opentelemetry",
    "prometheus_client": "aiohooks.adapters.prometheus",
    "mlflow": "aiohooks.adapters.trackers.mlflow",
    "wandb": "aiohooks.adapters.trackers.wandb",
}
DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api", "mlflow": "mlflow-skinny"}
"""What brings them, where that has another name."""


def package(module: str) -> str:
    """Return the entry of PACKAGES that a module belongs to."""
    parts = module.split(".")[1:]
    return parts[0] if parts else "__init__"


def position(module: str) -> int:
    """Return the place of a module's package in the order."""
    assert package(module) in PACKAGES, f"{module} has no place yet: add its package to PACKAGES"
    return PACKAGES.index(package(module))


def inside() -> list[Import]:
    """The library's imports of itself, of every kind."""
    return [
        imported
        for module in modules()
        for imported in imports(module)
        if imported.module.split(".")[0] == PACKAGE
    ]


def lines(found: list[Import]) -> str:
    """What a failing test shows."""
    return "\n".join(map(str, found))


def test_every_module_has_a_place() -> None:
    """The order names every package of the library and nothing else."""
    assert {package(module) for module in modules()} == set(PACKAGES)


def test_imports_go_one_way() -> None:
    """A package imports only from those above it, on a module's own level, inside functions and for
    annotations alike.
    """
    wrong = [
        imported for imported in inside() if position(imported.module) > position(imported.importer)
    ]
    assert not wrong, lines(wrong)


def test_the_picture_shows_the_order() -> None:
    """In the picture of the architecture page no package imports from its own row or one above."""
    rows = {name: number for number, (names, _) in enumerate(LAYERS) for name in names.split(", ")}
    assert set(rows) == set(PACKAGES) - {"__init__", "__main__"}
    ends = [(package(imported.importer), package(imported.module)) for imported in inside()]
    wrong = {
        (importer, used)
        for importer, used in ends
        if importer in rows and importer != used and rows[importer] >= rows[used]
    }
    assert wrong == set()


def test_imports_make_no_circle() -> None:
    """Modules import each other in one direction only, also on one floor, inside functions and for
    annotations.
    """
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for imported in inside():
        sorter.add(imported.importer, imported.module)
    sorter.prepare()  # raises CycleError, which names the circle


OF_PYTHON = {"_replace", "_fields", "_asdict", "_field_defaults", "_exit"}
"""Public in spite of their underscore: of named tuples, and of `os`."""


def test_no_module_uses_private_names_of_another() -> None:
    """A name with an underscore is used where it is made: in its module, by the methods of its
    class, by what derives from it.
    """
    makes = {module: private_names(path) for module, path in modules().items()}
    everywhere = {name for names in makes.values() for name in names}
    wrong = [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in everywhere - makes[module] - OF_PYTHON
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    ]
    assert not wrong, "\n".join(wrong)
    taken = [
        imported
        for imported in inside()
        if imported.name is not None and re.match(r"_(?!_)", imported.name)
    ]
    assert not taken, lines(taken)


def private_names(path: Path) -> set[str]:
    """Return the names with an underscore that a module makes: functions, classes, attributes."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.add(name)
            case (
                ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name))
            ):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case _:
                pass
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_hooks_never_import_the_session() -> None:
    """A built-in hook is a user of the hook contract like any other: it imports nothing else of the
    session package.
    """
    allowed = {f"{PACKAGE}.{name}" for name in KNOWN_TO_HOOKS}
    for_the_session = {"HookSet", "Merger"}
    wrong = [
        imported
        for imported in inside()
        if package(imported.importer) == "hooks"
        and package(imported.module) == "session"
        and (imported.module not in allowed or imported.name in for_the_session)
    ]
    assert not wrong, lines(wrong)


def test_a_built_in_hook_knows_no_other_hook() -> None:
    """The built-in hooks meet at the events of the session: no family imports another one."""
    helpers = {"hooks", "hooks.every"}
    wrong = [
        found
        for found in inside()
        if package(found.importer) == package(found.module) == "hooks"
        and found.importer != f"{PACKAGE}.hooks"
        and found.module.removeprefix(f"{PACKAGE}.") not in helpers
        and not found.module.startswith(f"{PACKAGE}.hooks._")
    ]
    assert not wrong, lines(wrong)


def test_nothing_inside_imports_the_front_door_or_the_testing_helpers() -> None:
    """`aiohooks` and `aiohooks.testing` are for users, such as the command line; no other module of
    the library imports them.
    """
    wrong = [
        imported
        for imported in inside()
        if package(imported.module) in ("__init__", "testing")
        and package(imported.importer) not in ("__init__", "testing", "_command_line", "__main__")
    ]
    assert not wrong, lines(wrong)


def test_only_anyio_is_imported_besides_the_standard_library() -> None:
    """The core needs anyio alone; each extra is imported at the top of the modules that are about
    it.
    """
    wrong: list[Import] = []
    seen: set[str] = set()
    for module in modules():
        for imported in imports(module):
            root = imported.module.split(".")[0]
            if root in EXTRAS:
                seen.add(root)
                allowed = imported.kind in ("top", "types") and module in EXTRAS[root].split(", ")
            elif root == "typing_extensions":  # type checkers know it without its being installed
                allowed = imported.kind == "types"
            else:
                allowed = root in {PACKAGE, "anyio"} or root in sys.stdlib_module_names
            if not allowed:
                wrong.append(imported)
    assert not wrong, lines(wrong)
    assert seen == set(EXTRAS)


def test_extras_are_what_modules_import() -> None:
    """Each package of an extra is imported by the library, and each package that it imports is in
    an extra.
    """
    in_extras = {
        canonicalize_name(requirement.name)
        for name, group in requirements().items()
        if name != CORE
        for requirement in group
    }
    imported = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in EXTRAS}
    # pytest loads the plugin itself, and torch is imported only where the program has imported it.
    assert in_extras - {"anyio"} == imported - {"pytest", "torch"}


# Refuses what is neither standard library nor anyio's own need, so a missing extra is what it would
# be for a user.
ONLY_CORE = """
    import importlib.abc, sys
    anyio = {"anyio", "idna", "sniffio", "typing_extensions"}
    allowed = {"aiohooks", *anyio, *sys.stdlib_module_names}

    class Refuse(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in allowed:
                raise ModuleNotFoundError(f"No module named {name!r} here", name=name)

    sys.meta_path.insert(0, Refuse())
"""

# A bare package in place of the front door, which would import everything.
NO_FRONT_DOOR = """
    import pathlib, types
    package = types.ModuleType("aiohooks")
    package.__path__ = [str(pathlib.Path.cwd() / "aiohooks")]
    sys.modules["aiohooks"] = package
"""

STORES_ALONE = """
    import asyncio
    from aiohooks.stores import MemoryStepStore

    async def main():
        store = MemoryStepStore()
        waiter = asyncio.create_task(store.wait_for(3))
        await asyncio.sleep(0)
        await store.advance(3)
        assert await waiter == 3
        await store.aclose()

    asyncio.run(main())
    loaded = sorted(name for name in sys.modules if name.startswith("aiohooks."))
    assert "aiohooks.graph.session" not in loaded and "aiohooks.graph.graph" not in loaded, loaded
"""

WHOLE_CORE = """
    import aiohooks, aiohooks.testing
    async def main(): return 42
    assert aiohooks.run(main) == 42
"""


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((NO_FRONT_DOOR, STORES_ALONE), id="stores alone"),
        pytest.param((WHOLE_CORE,), id="the core"),
    ],
)
def test_it_runs_on_the_standard_library_and_anyio(parts: tuple[str, ...]) -> None:
    """The stores without the session, and the whole core without any extra, import and work with
    anyio alone.
    """
    program = "".join(map(textwrap.dedent, (ONLY_CORE, *parts)))
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
