"""The API reference: every public name with its signature and docstring.

`python -m tests.support.reference_page --write docs/reference.md` writes the page.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import operator
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohooks
import aiohooks.distributed.ray
from tests.support.signature_text import annotation_text, signature_text
from tests.support.source import modules, tree

INTRODUCTION = """\
# API reference

<!-- Written by `python -m tests.support.reference_page --write docs/reference.md` from the docstrings; change those. -->

Everything is imported from `aiohooks`, unless its section says otherwise. [The lifecycle](lifecycle.md) says what is called
when; [the step store](step-store.md) and [the helpers for tests](testing.md) have pages of their own."""

# Each section: its title, the package its names come from, and the names in the order in which they are read.
SECTIONS = (
    (
        "Sessions",
        "aiohooks",
        "AsyncMonitoredSession AsyncSingularMonitoredSession monitored_training_session Steps StepContext SessionStatus Activity "
        "RecoveryPolicy Backoff SignalPolicy Session run",
    ),
    (
        "Hooks to write",
        "aiohooks",
        "SessionRunHook SessionRunContext SessionRunArgs SessionRunValues configure HookRegistration Every EveryTimer",
    ),
    (
        "Hooks to use",
        "aiohooks",
        "StopAtStepHook GlobalStepWaiterHook LoggingHook StepCounterHook NanHook FeedFnHook FinalOpsHook BlockingHook",
    ),
    (
        "Checkpoints",
        "aiohooks",
        "CheckpointSaverHook CheckpointSaverListener Saver KeepNewest KeepBest KeepEvery KeepPolicy Checkpoint Restored Stateful",
    ),
    (
        "Hooks that decide",
        "aiohooks",
        "EarlyStoppingHook EvaluatorHook Evaluation StopAtTimeHook LambdaHook hook",
    ),
    (
        "Hooks that observe",
        "aiohooks",
        "SummarySaverHook CSVHook JSONLinesHook HistoryHook ProgressHook ProfilerHook HookTimingHook HookTimes PhaseTime Blocker "
        "WatchdogHook Stall",
    ),
    ("Graph and variables", "aiohooks", "Graph Placeholder Variable Operation get_default_graph Variables"),
    ("Chiefs and workers", "aiohooks", "SessionCreator ChiefSessionCreator WorkerSessionCreator Scaffold"),
    ("Coordination and time", "aiohooks", "Coordinator Clock current_clock"),
    ("Step stores", "aiohooks", "StepStore MemoryStepStore open_step_store Position Term"),
    ("Published versions", "aiohooks", "VersionGate Ticket VersionGateHook"),
    ("From `aiohooks.version_gate`", "aiohooks.version_gate", "Admission GateStatistics"),
    ("From `aiohooks.stores`", "aiohooks.stores", "Changes Publisher StoreStatistics SharedStepStore RemoteStepStore"),
    ("Engines: `aiohooks.stores.local`", "aiohooks.stores.local", "LocalStepStore default_directory"),
    ("Engines: `aiohooks.stores.redis`", "aiohooks.stores.redis", "RedisStepStore"),
    ("Engines: `aiohooks.stores.nats`", "aiohooks.stores.nats", "NatsStepStore"),
    ("Engines: `aiohooks.stores.ray`", "aiohooks.stores.ray", "RayStepStore"),
    ("Services: `aiohooks.adapters.asgi`", "aiohooks.adapters.asgi", "SessionService ServiceHealth"),
    ("Launchers: `aiohooks.distributed`", "aiohooks.distributed", "Task"),
    ("Launchers: `aiohooks.distributed.local`", "aiohooks.distributed.local", "run_tasks run_processes"),
    ("Launchers: `aiohooks.distributed.ray`", "aiohooks.distributed", "ray.run"),  # another one than `run`
    (
        "From `aiohooks.testing`",
        "aiohooks.testing",
        "RecordingHook FaultInjectionHook ManualClock no_leaks check_step_store step_store_checks",
    ),
)
ERRORS = "Errors"

# Public by name only: what the parts of the library call of each other.
NOT_FOR_USERS = {
    "ChiefSessionCreator.gave_up",
    "Coordinator.bind",
    "Coordinator.cancel_tasks",
    "Coordinator.look",
    "Coordinator.on_failure",
    "Coordinator.owns",
    "Coordinator.raised",
    "Coordinator.retire",
    "Coordinator.wind_down",
    "Graph.hold",
    "Graph.release",
    "Publisher.parked",
    "ChiefSessionCreator.aclose",
    "Scaffold.local_init",
    "Session.stateful_hooks",
    "Session.driven_by",
    "StepContext.call",
    "StepStore.inline",
    "Variables.claim",
    "Variables.discard",
    "Variables.fail",
    "Variables.initialise",
    "Variables.mark_ready",
    "Variables.missing",
    "Variables.prepare",
    "Variables.put",
    "Variables.read",
}


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, contents()]
    for title, package, names in SECTIONS:
        parts.append(f"## {title}")
        for name in names.split():
            parts += entry(name, operator.attrgetter(name)(importlib.import_module(package)))
    parts += [f"## {ERRORS}", code(drawn_tree())]
    for error in errors():
        parts += [f"### {error.__name__}", prose(error)]
    return "\n\n".join(part for part in parts if part) + "\n"


def errors() -> list[type[aiohooks.AiohooksError]]:
    """The public errors by name, the base of all first."""
    found = [thing for name in aiohooks.errors.__all__ if inspect.isclass(thing := getattr(aiohooks.errors, name))]
    return [one for one in found if one is aiohooks.AiohooksError] + [
        one for one in found if issubclass(one, aiohooks.AiohooksError) and one is not aiohooks.AiohooksError
    ]


def names() -> set[str]:
    """The names that have an entry."""
    return {name for _, _, names in SECTIONS for name in names.split()} | {error.__name__ for error in errors()}


def contents() -> str:
    """A line of links for each section."""
    lines = [
        f"- [{title}](#{anchor(title)}): {', '.join(f'[{name}](#{anchor(name)})' for name in names.split())}"
        for title, _, names in SECTIONS
    ]
    return "\n".join([*lines, f"- [{ERRORS}](#{anchor(ERRORS)})"])


def anchor(title: str) -> str:
    """How a heading is named in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def entry(name: str, thing: Any) -> Iterator[str]:
    """The parts of one public name."""
    yield f"### {name}"
    if not inspect.isclass(thing):
        yield code(f"{kind_of(thing)} {name}{signature_text(thing)}")
        yield prose(thing)
        return
    public = [base for base in thing.__mro__[1:] if getattr(aiohooks, base.__name__, None) is base]
    bases = [base.__name__ for base in public if not any(other is not base and issubclass(other, base) for other in public)]
    made_by_users = thing.__init__ is not object.__init__ and not getattr(thing, "_is_protocol", False)
    if re.search(r"(^|[.;] )[Mm]ade by\b", f"{inspect.getdoc(thing)}\n{inspect.getdoc(thing.__init__)}", re.MULTILINE):
        made_by_users = False
    yield code(f"class {name}{signature_text(thing) if made_by_users or issubclass(thing, tuple) else ''}")
    if bases:
        yield f"A {' and a '.join(f'[{base}](#{anchor(base)})' for base in bases)}."
    yield prose(thing)
    if made_by_users and "__init__" in vars(thing) and not dataclasses.is_dataclass(thing):
        yield prose(thing.__init__)
    yield "\n".join(f"- `{name}.{attribute}`{kind}: {text}" for attribute, kind, text in attributes(thing))
    for method, function in methods(thing):
        yield f"#### {name}.{method}"
        yield code(f"{kind_of(function)} {method}{signature_text(function, bound=True)}")
        yield prose(function)


def kind_of(function: Any) -> str:
    """How its definition begins."""
    return "async def" if inspect.iscoroutinefunction(function) else "def"


def own_classes(cls: type[Any]) -> list[type[Any]]:
    """The class, and what it inherits from classes of the library that have no entry of their own."""
    return [one for one in cls.__mro__ if one is cls or (one.__module__.startswith("aiohooks._") and not issubclass(one, tuple))]


def methods(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """The public methods, but for those that a base with an entry of its own explains."""
    for one in own_classes(cls):
        for name in vars(one):
            known = any(name in vars(base) for base in cls.__mro__[1:] if getattr(aiohooks, base.__name__, None) is base)
            if inspect.isroutine(getattr(cls, name)) and not (known or is_hidden(cls, name)):
                yield name, getattr(cls, name)


def is_hidden(cls: type[Any], name: str) -> bool:
    """Whether this attribute has no place on the page."""
    return name.startswith("_") or f"{cls.__name__}.{name}" in NOT_FOR_USERS


def attributes(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """The properties, and the attributes with a text below them: name, type, text."""
    for one in own_classes(cls):
        if not issubclass(one, tuple):
            yield from assigned(one)
        for name, member in vars(one).items():
            if isinstance(member, property) and not is_hidden(cls, name) and member.fget is not None:
                returns = inspect.signature(member.fget).return_annotation
                yield name, f" (`{annotation_text(returns)}`)", " ".join(prose(member).partition("\n\n")[0].split())


@functools.cache
def classes() -> dict[str, Path]:
    """The files of the library's classes by their names; of those of one name the first."""
    found: dict[str, Path] = {}
    for path in modules().values():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, path)
    return found


def assigned(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """The attributes that the class, or its `__init__`, assigns with a text below."""
    place = classes()[cls.__name__]  # by name, as a public class gives the package as its module
    body = next(node.body for node in tree(place).body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    made = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    for statements in (body, *(node.body for node in made)):
        for statement, below in itertools.pairwise(statements):
            if not isinstance(statement, ast.AnnAssign | ast.Assign) or not isinstance(below, ast.Expr):
                continue
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "_")
            if not is_hidden(cls, name) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                kind = f" (`{ast.unparse(statement.annotation)}`)" if isinstance(statement, ast.AnnAssign) else ""
                yield name, kind, " ".join(below.value.value.split())


def code(text: str) -> str:
    """A block that is not run."""
    return f"```text\n{text}\n```"


def prose(thing: Any) -> str:
    """A docstring as Markdown: Google's sections become lists, what is indented becomes a block."""
    blocks: list[str] = []
    for block in re.split(r"\n\n(?! )", inspect.getdoc(thing) or ""):
        head, _, rest = block.partition("\n")
        title = re.fullmatch(r"(Args|Returns|Raises|Attributes|Example):", head)
        if title is not None:
            blocks += section(title[1], textwrap.dedent(rest))
        elif "\n    " in block or block.startswith("    "):
            words, indented = re.split(r"\n*^(?=    )", block, maxsplit=1, flags=re.MULTILINE)
            blocks += [words, code(textwrap.dedent(indented).strip("\n"))]
        else:
            blocks.append(block)
    return "\n\n".join(block for block in blocks if block)


def section(title: str, text: str) -> list[str]:
    """One of Google's sections."""
    if title == "Example":
        return ["Example:", code(text.strip("\n"))]
    items = re.split(r"\n(?! )", text.strip("\n"))
    joined = [" ".join(item.split()) for item in items]
    if title == "Returns":
        return [f"Returns: {' '.join(joined)}"]
    listed = [re.sub(r"^(\*{0,2}\w+): ", r"`\1`: ", item) for item in joined]
    return [f"{ {'Args': 'Arguments'}.get(title, title) }:\n\n" + "\n".join(f"- {item}" for item in listed)]


def drawn_tree() -> str:
    """The tree of errors, as the docstring of their module draws it."""
    text = inspect.getdoc(importlib.import_module("aiohooks.errors")) or ""
    return textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    ")))


def main() -> None:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    file: Path | None = parser.parse_args().write
    if file is None:
        print(page(), end="")
    else:
        file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
