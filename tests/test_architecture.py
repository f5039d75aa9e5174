"""The floors of the package, and the other rules that can be read off its imports."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.source import PACKAGE, ROOT, Import, defined_names, imports, modules, python_files, tree

# Each floor imports from the floors below it, and from its neighbours as long as that makes no circle.
# A new module takes its place here first. A name ending in a slash is a folder.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"_errors", "_checks", "_clock", "_running", "_shield"}),
    frozenset({"_hook", "_graph", "_variables", "_every", "_stateful", "stores/"}),
    frozenset(
        {
            "_fetches",
            "_crew",
            "_fan_out",
            "_interrupt",
            "_coordinator",
            "_recovery",
            "_join",
            "_plan",
            "_stacks",
            "_status",
            "checkpoint/",
            "version_gate/",
        }
    ),
    frozenset({"_session", "_session_creator", "_restoring"}),
    frozenset(
        {
            "_monitored_session",
            "_ending",
            "_hooked_run",
            "_looking",
            "_phases",
            "_recoverable",
            "_run_gate",
            "_signals",
            "_singular_session",
            "_source",
            "_step_context",
            "_steps",
            "_turns",
            "hooks/",
        }
    ),
    frozenset({"_run", "_training", "adapters/", "distributed/", "testing/"}),
    frozenset({"__init__", "__main__"}),
)

# Every hook is handed these two, so annotations on the lower floors may name them; nothing else points upward.
HANDED_TO_HOOKS = {("aiohooks._session", "Session"), ("aiohooks._coordinator", "Coordinator")}

# What an extra brings (by the name it is imported as), and the one module that may import it.
EXTRAS: dict[str, str] = {
    "uvloop": "aiohooks._run",
    "numpy": "aiohooks.checkpoint._arrays",
    "safetensors": "aiohooks.checkpoint._arrays",
    "msgspec": "aiohooks.checkpoint._state",
    "tensorboardX": "aiohooks.hooks._tensorboard",
    "rich": "aiohooks.hooks._rich",
    "matplotlib": "aiohooks.hooks._plot",
    "pyinstrument": "aiohooks.hooks._pyinstrument",
    "redis": "aiohooks.stores.redis",
    "nats": "aiohooks.stores._nats_wire",
    "ray": "aiohooks.stores._ray_cluster",
    "starlette": "aiohooks.adapters.asgi",
}

FORBIDDEN_ATTRIBUTES = {
    ("asyncio", "TaskGroup"),  # these three lose errors or wake-ups on supported Pythons
    ("asyncio", "wait_for"),
    ("asyncio", "Condition"),
    ("time", "sleep"),
}
FORBIDDEN_MODULES = {"marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}

LONGEST_FILE = 400


def place(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    parts = module.split(".")[1:]
    if not parts:
        return "__init__"
    return f"{parts[0]}/" if len(parts) > 1 or modules()[module].name == "__init__.py" else parts[0]


def floor(module: str) -> int:
    """The number of a module's floor."""
    for number, names in enumerate(FLOORS):
        if place(module) in names:
            return number
    raise AssertionError(f"{module} has no floor yet: add it to FLOORS")


def inside(*kinds: str) -> list[Import]:
    """The library's imports of itself, of these kinds."""
    return [one for module in modules() for one in imports(module) if one.kind in kinds and one.module.split(".")[0] == PACKAGE]


def lines(found: list[Import]) -> str:
    """What a failing test shows."""
    return "\n".join(map(str, found))


def test_every_module_has_a_floor() -> None:
    """The table of floors names every module of the package and nothing else."""
    assert {place(module) for module in modules()} == frozenset().union(*FLOORS)


def test_imports_go_downward() -> None:
    """What runs imports from its own floor or a lower one, on a module's own level and inside functions alike."""
    wrong = [one for one in inside("top", "inner") if floor(one.module) > floor(one.importer)]
    assert not wrong, lines(wrong)


def test_imports_make_no_circle() -> None:
    """Modules import each other in one direction only, also on one floor and inside functions."""
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for one in inside("top", "inner"):
        sorter.add(one.importer, one.module)
    sorter.prepare()  # raises CycleError, which names the circle


def test_annotations_point_upward_only_to_what_hooks_are_handed() -> None:
    """An import for annotations alone may make a circle on its floor; upward it names only Session and Coordinator."""
    wrong = [
        one
        for one in inside("types")
        if floor(one.module) > floor(one.importer) and (one.module, one.name) not in HANDED_TO_HOOKS
    ]
    assert not wrong, lines(wrong)


def test_hooks_never_import_the_session() -> None:
    """A built-in hook is a user of the session's contract as any other: it runs without importing a session."""
    sessions = {name for number in (3, 4) for name in FLOORS[number]} - {"hooks/"}
    wrong = [one for one in inside("top", "inner") if place(one.importer) == "hooks/" and place(one.module) in sessions]
    assert not wrong, lines(wrong)


def test_nothing_inside_imports_the_front_door_or_the_testing_helpers() -> None:
    """`aiohooks` and `aiohooks.testing` are for users; no other module of the library imports them."""
    wrong = [
        one
        for one in inside("top", "inner", "types")
        if place(one.module) in ("__init__", "testing/") and place(one.importer) not in ("__init__", "testing/")
    ]
    assert not wrong, lines(wrong)


def test_names_come_from_the_module_that_defines_them() -> None:
    """A name is imported from where it is made, or through the front door of a folder from outside of that folder."""
    wrong: list[Import] = []
    for one in inside("top", "inner", "types"):
        if one.name is None or one.name in defined_names(one.module):
            continue
        is_front_door = modules()[one.module].name == "__init__.py"
        handed_on = {each.name for each in imports(one.module) if each.kind == "top"}
        if not (is_front_door and one.name in handed_on and place(one.importer) != place(one.module)):
            wrong.append(one)
    assert not wrong, lines(wrong)


def test_only_anyio_is_imported_besides_the_standard_library() -> None:
    """The core needs anyio alone; each extra is imported at the top of the one module that is about it."""
    wrong: list[Import] = []
    seen: set[str] = set()
    for module in modules():
        for one in imports(module):
            root = one.module.split(".")[0]
            if root in EXTRAS:
                seen.add(root)
                allowed = one.kind in ("top", "types") and module == EXTRAS[root]
            else:
                allowed = root in {PACKAGE, "anyio"} or root in sys.stdlib_module_names
            if not allowed:
                wrong.append(one)
    assert not wrong, lines(wrong)
    assert seen == set(EXTRAS)


@pytest.mark.parametrize("path", python_files(PACKAGE, "examples"), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    """A module opens with a docstring."""
    assert ast.get_docstring(tree(path))


def test_no_file_is_long() -> None:
    """No file is above 400 lines: a longer one has a seam."""
    counts = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(PACKAGE, "tests", "examples")
    }
    assert {path: count for path, count in counts.items() if count > LONGEST_FILE} == {}


def test_what_is_forbidden_is_not_used() -> None:
    """The library has no asyncio primitive known to be broken, no blocking or polling sleep, no pickle, no shell."""
    found = [
        f"{module}:{node.lineno}: {what}"
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.expr | ast.stmt) and (what := forbidden(node)) is not None
    ]
    assert not found, "\n".join(found)


def forbidden(node: ast.AST) -> str | None:
    """What is wrong with a node, if anything."""
    match node:
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_ATTRIBUTES:
            return f"{owner}.{name}"
        case ast.ImportFrom(module=str(owner)):
            if owner in FORBIDDEN_MODULES:
                return owner
            return next((f"{owner}.{a.name}" for a in node.names if (owner, a.name) in FORBIDDEN_ATTRIBUTES), None)
        case ast.Import():
            return next((a.name for a in node.names if a.name in FORBIDDEN_MODULES), None)
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio" | "anyio"), attr="sleep")):
            if not (len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0):
                return "a sleep; sleep(0) is a suspension point, anything else a poll"
        case ast.keyword(arg="shell", value=ast.Constant(value=True)):
            return "shell=True"
        case ast.Call() if any(forbidden(keyword) for keyword in node.keywords):
            return "shell=True"
        case _:
            pass
    return None


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.TaskGroup()",
        "from asyncio import wait_for",
        "time.sleep(0)",
        "asyncio.sleep(0.1)",
        "asyncio.sleep(secs)",
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "run('ls', shell=True)",
    ],
)
def test_the_search_finds_what_is_forbidden(code: str) -> None:
    """Each forbidden thing is found in a line that has it (the search itself works)."""
    assert any(forbidden(node) for node in ast.walk(ast.parse(code)))


def test_the_stores_reach_no_session() -> None:
    """The step stores import themselves and the ground floor only: they are taken up without any session."""
    reached: set[str] = set()
    ahead = [module for module in modules() if place(module) == "stores/"]
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached.add(module)
            ahead += [one.module for one in imports(module) if one.module in modules() and one.kind != "types"]
    assert {place(module) for module in reached} <= {"stores/", *FLOORS[0]}


# Refuses what is neither standard library nor anyio's own need, so a missing extra is what it would be for a user.
ONLY_CORE = """
    import importlib.abc, sys
    allowed = {"aiohooks", "anyio", "idna", "sniffio", "typing_extensions", *sys.stdlib_module_names}

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
    assert "aiohooks._session" not in loaded and "aiohooks._graph" not in loaded, loaded
"""

WHOLE_CORE = """
    import aiohooks, aiohooks.testing
    async def main(): return 42
    assert aiohooks.run(main) == 42
"""


@pytest.mark.parametrize(
    "parts",
    [pytest.param((NO_FRONT_DOOR, STORES_ALONE), id="stores alone"), pytest.param((WHOLE_CORE,), id="the core")],
)
def test_it_runs_on_the_standard_library_and_anyio(parts: tuple[str, ...]) -> None:
    """The stores without the session, and the whole core without any extra, import and work with anyio alone."""
    program = "".join(map(textwrap.dedent, (ONLY_CORE, *parts)))
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True, timeout=60)
