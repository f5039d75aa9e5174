"""The public names, what they are called with, and where they say they come from."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import aiohooks as ah
from tests.support.processes import run_python
from tests.support.source import ROOT

# Errors that derive from another class besides AiohooksError: what a caller would expect to catch.
ERRORS: dict[str, type[BaseException]] = {
    "CheckpointBusyError": ah.errors.CheckpointError,
    "CheckpointError": OSError,
    "CheckpointMismatchError": ah.errors.CheckpointError,
    "EffectError": RuntimeError,
    "CorruptCheckpointError": ah.errors.CheckpointError,
    "FeedConflictError": RuntimeError,
    "FetchError": ValueError,
    "GraphError": ValueError,
    "GraphFinalizedError": RuntimeError,
    "HookTimeoutError": TimeoutError,
    "HookGroupClosedError": RuntimeError,
    "InvalidArgumentError": ValueError,
    "InvalidHookError": TypeError,
    "NanLossDuringTrainingError": RuntimeError,
    "NestedRunError": RuntimeError,
    "NotReadyError": RuntimeError,
    "ProducerFinishedError": ah.StopRequestedError,
    "PublisherFinishedError": ah.StopRequestedError,
    "SessionClosedError": RuntimeError,
    "SessionNotReadyError": TimeoutError,
    "SessionStalledError": TimeoutError,
    "StepTimeoutError": TimeoutError,
    "StopRequestedError": RuntimeError,
    "StoreResetError": ah.errors.StoreUnavailableError,
    "StoreRefusedError": ah.errors.StoreUnavailableError,
    "StoreUnavailableError": ah.UnavailableError,
    "UnsupportedSystemError": RuntimeError,
    "UpdateConflictError": ah.AbortedError,
    "WrongLoopError": RuntimeError,
}

SIGNATURES = dict(
    line.partition(" ")[::2]
    for line in (ROOT / "tests" / "project" / "public_api.txt")
    .read_text(encoding="utf-8")
    .splitlines()
)
"""What users call, and with what: a line of `public_api.txt` for each name.

A default that is no plain value shows as the name of its type. Names without a signature are made
by the library and not by users.
"""

# Errors that steps raise, and the base class of all; the others are in aiohooks.errors alone.
COMMON_ERRORS = {
    "AiohooksError",
    "AbortedError",
    "OutOfRangeError",
    "StopRequestedError",
    "UnavailableError",
}
PUBLIC = {*COMMON_ERRORS, *(name for name in SIGNATURES if "." not in name)}

# Packages of their own: what they offer beside what the front door has.
PACKAGES = (
    "aiohooks.adapters.asgi",
    "aiohooks.adapters.opentelemetry",
    "aiohooks.adapters.prometheus",
    "aiohooks.adapters.trackers",
    "aiohooks.adapters.trackers.mlflow",
    "aiohooks.adapters.trackers.tensorboard",
    "aiohooks.adapters.trackers.wandb",
    "aiohooks.checkpoint",
    "aiohooks.dispatch",
    "aiohooks.distributed",
    "aiohooks.errors",
    "aiohooks.graph",
    "aiohooks.hooks",
    "aiohooks.session",
    "aiohooks.stores",
    "aiohooks.stores.local",
    "aiohooks.stores.ray",
    "aiohooks.stores.redis",
    "aiohooks.testing",
    "aiohooks.training",
    "aiohooks.version_gate",
)


class Shown:
    """Stands for a default in a signature's text."""

    def __init__(self, default: object) -> None:
        self.default = default

    def __repr__(self) -> str:
        if isinstance(self.default, tuple) and all(isinstance(kind, type) for kind in self.default):
            names = ", ".join(kind.__name__ for kind in self.default)
            return f"({names})"
        plain = self.default is None or isinstance(self.default, bool | int | float | str)
        return repr(self.default) if plain else f"<{type(self.default).__name__}>"


def shown(thing: Callable[..., Any] | property) -> str:
    """How something is called, without its types."""
    if not callable(thing):
        return "property"
    signature = inspect.signature(thing)
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default
            if parameter.default is parameter.empty
            else Shown(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return f"async {text}" if inspect.iscoroutinefunction(thing) else text


def find(path: str) -> Any:
    """A public object, or an attribute of a public class as it stands in the class."""
    first, *rest = path.split(".")
    found = getattr(ah, first)
    if inspect.ismodule(found):
        found = getattr(found, rest.pop(0))
    return inspect.getattr_static(found, rest.pop(0)) if rest else found


def names_of(module: ModuleType) -> set[str]:
    """Return the public names of a module, without its submodules."""
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    }


def test_the_public_names_are_these() -> None:
    """`aiohooks.__all__` is exactly the list of `public_api.txt`, and what stands in the front door
    without an underscore, submodules left aside.
    """
    assert set(ah.__all__) == PUBLIC
    assert names_of(ah) - {"Any", "TYPE_CHECKING"} == PUBLIC


def test_the_front_door_is_small() -> None:
    """The front door has at most 40 names: dispatch and a plain session. Others are public in their
    package only.
    """
    assert len(ah.__all__) <= 40


NOT_FOR_A_SESSION = {
    "aiohooks.hooks",
    "aiohooks.version_gate",
    "aiohooks.training",
    "aiohooks.distributed",
    "aiohooks.adapters",
    "aiohooks.testing",
    "aiohooks.checkpoint.saver",
    "aiohooks.stores.shared",
    "aiohooks.stores.engine",
    "aiohooks.stores.open",
    "aiohooks.stores.local",
    # What takes longest to import of what anyio and the standard library have.
    "anyio._backends",
    "hashlib",
    "json",
    "pathlib",
    "difflib",
    "secrets",
    "csv",
    "cProfile",
    "multiprocessing",
    "ctypes",
}
NOT_FOR_A_GROUP = {
    *NOT_FOR_A_SESSION,
    "aiohooks.session",
    "aiohooks.graph",
    "aiohooks.stores",
    "aiohooks.checkpoint",
}
NOT_FOR_A_STORE = {
    *NOT_FOR_A_SESSION,
    "aiohooks.session",
    "aiohooks.graph",
    "aiohooks.checkpoint",
}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        pytest.param(
            "import aiohooks",
            NOT_FOR_A_GROUP,
            id="the front door",
        ),
        pytest.param("from aiohooks import HookGroup", NOT_FOR_A_GROUP, id="a hook group"),
        pytest.param("from aiohooks import MemoryStepStore", NOT_FOR_A_STORE, id="a step store"),
        pytest.param(
            "from aiohooks import AsyncMonitoredSession", NOT_FOR_A_SESSION, id="a session"
        ),
    ],
)
def test_names_are_imported_when_they_are_used(statement: str, unwanted: set[str]) -> None:
    """Importing `aiohooks` loads hook groups, which are small; using another name of it loads what
    that needs, and none of what it does not.
    """
    program = (
        f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert sorted(unwanted.intersection(done.stdout.split())) == []


@pytest.mark.parametrize(
    ("name", "pointer"),
    [
        ("Grph", "; did you mean aiohooks.Graph?"),
        ("WatchdogHok", "; did you mean aiohooks.hooks.WatchdogHook?"),
        ("RedisStepStore", ""),
        ("InvalidHookError", "; it is aiohooks.errors.InvalidHookError"),
        ("WatchdogHook", "; it is aiohooks.hooks.WatchdogHook"),
        ("KeepNewest", "; it is aiohooks.checkpoint.KeepNewest"),
        ("RedisEngine", "; it is aiohooks.stores.redis.RedisEngine"),
        ("no_leaks", "; it is aiohooks.testing.no_leaks"),
    ],
)
def test_a_name_of_another_module_names_that_module(
    name: str, pointer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A public name that is not in `aiohooks` itself is reported with the module that has it, and
    an unknown one with a name that differs by a letter or two, never with another class.
    """
    with pytest.raises(AttributeError) as caught:
        getattr(ah, name)
    # Python itself adds similar names here, if it is not told the name.
    sys.__excepthook__(type(caught.value), caught.value, caught.value.__traceback__)
    message = f"module 'aiohooks' has no attribute '{name}'{pointer}"
    assert capsys.readouterr().err.endswith(f"AttributeError: {message}\n")


@pytest.mark.parametrize(
    ("statement", "pointer"),
    [
        ("from aiohooks import WatchdogHook", "; it is aiohooks.hooks.WatchdogHook"),
        ("from aiohooks import NanHok", "; did you mean aiohooks.NanHook?"),
        ("from aiohooks.hooks import SessionRunHook", "; it is aiohooks.SessionRunHook"),
        ("from aiohooks.session import Coordinator", "; it is aiohooks.Coordinator"),
    ],
)
def test_an_import_names_the_other_module_too(statement: str, pointer: str) -> None:
    """`from package import name` fails with the same pointer as the attribute."""
    with pytest.raises(ImportError, match=re.escape(pointer) + "$"):
        exec(statement)


def test_a_module_is_imported_where_a_package_has_the_same_name() -> None:
    """A module with the name of something in `aiohooks` can be imported from its own package."""
    program = "from aiohooks.session import hook, run; print(hook.__name__, run.__name__)"
    printed = run_python("-c", program).stdout
    assert printed == "aiohooks.session.hook aiohooks.session.run\n"


def test_every_public_name_can_be_pointed_to() -> None:
    """A message can name the module of each public name, apart from adapters of single trackers:
    their import takes seconds.
    """
    for package in PACKAGES:
        if package.startswith("aiohooks.adapters.trackers."):
            continue
        for name in set(importlib.import_module(package).__all__) - PUBLIC:
            assert pointer_of(name).startswith("; it is aiohooks."), (package, name)


def pointer_of(name: str) -> str:
    """What the error for a missing attribute adds."""
    with pytest.raises(AttributeError) as caught:
        getattr(ah, name)
    return str(caught.value).removeprefix(f"module 'aiohooks' has no attribute '{name}'")


@pytest.mark.parametrize("path", [path for path, text in SIGNATURES.items() if text])
def test_signatures(path: str) -> None:
    """Names, kinds and defaults of parameters, and what must be awaited, are as designed."""
    assert shown(find(path)) == SIGNATURES[path]


@pytest.mark.parametrize("name", sorted({*ah.errors.__all__} - {"is_clean_end"}))
def test_errors_are_one_tree(name: str) -> None:
    """An error derives from AiohooksError, and from the builtin that a caller would expect."""
    error = getattr(ah.errors, name)
    assert issubclass(error, ah.AiohooksError)
    builtin = ERRORS.get(name)
    if builtin is None:
        assert not issubclass(error, RuntimeError | ValueError | TypeError | TimeoutError)
    else:
        assert issubclass(error, builtin)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_what_is_public_says_so(name: str) -> None:
    """A public object names the package as its module, carries the name it is found by, and has a
    docstring.
    """
    thing = getattr(ah, name)
    assert (thing.__module__, thing.__qualname__) == (
        "aiohooks.errors" if name in COMMON_ERRORS else "aiohooks",
        name,
    )
    assert inspect.getdoc(thing)


@pytest.mark.parametrize("package", ["aiohooks", *PACKAGES])
def test_what_is_public_is_explained(package: str) -> None:
    """Each method and property of a public class has a docstring, its own or the one it
    overrides.
    """
    module = importlib.import_module(package)
    silent = [
        f"{name}.{attribute}"
        for name in module.__all__
        if inspect.isclass(thing := getattr(module, name))
        for attribute, value in vars(thing).items()
        if not attribute.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        if not inspect.getdoc(getattr(thing, attribute))
    ]
    assert not silent


@pytest.mark.parametrize("package", ["aiohooks", *PACKAGES])
def test_what_is_public_is_on_a_page(package: str) -> None:
    """A reader of docs/ or the README meets each public name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {
        word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))
    }
    assert [name for name in importlib.import_module(package).__all__ if name not in words] == []


@pytest.mark.parametrize("package", ["aiohooks", *PACKAGES])
def test_packages_have_a_front_door(package: str) -> None:
    """A public package lists its names, in order and without doubles."""
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert set(module.__all__) <= names_of(module)
