"""The API reference: every public name with its signature and docstring.

`python -m tests.support.reference_page --write docs/reference.md` writes the page. A method or attribute whose docstring
starts with "Internal:" is for other parts of the library and is left out.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.source import imports, modules, tree

# The public packages and modules in reading order; their `__all__` have the names.
PACKAGES = (
    *("aiohooks.session", "aiohooks.dispatch", "aiohooks.graph", "aiohooks.hooks", "aiohooks.checkpoint", "aiohooks.stores"),
    *("aiohooks.stores.local", "aiohooks.stores.redis", "aiohooks.stores.nats", "aiohooks.stores.ray", "aiohooks.version_gate"),
    *("aiohooks.distributed", "aiohooks.distributed.local", "aiohooks.distributed.ray", "aiohooks.adapters.asgi"),
    "aiohooks.adapters.opentelemetry",
    "aiohooks.adapters.prometheus",
    *("aiohooks.adapters.trackers", "aiohooks.adapters.trackers.mlflow", "aiohooks.adapters.trackers.wandb"),
    "aiohooks.adapters.trackers.tensorboard",
    *("aiohooks.testing", "aiohooks", "aiohooks.errors"),
)
INTRODUCTION = """\
# API reference

<!-- Written by `python -m tests.support.reference_page --write docs/reference.md` from the docstrings; change those. -->

Each heading is the path below `aiohooks`: `AsyncMonitoredSession` is `aiohooks.AsyncMonitoredSession`, and `hooks.Stall` is
`aiohooks.hooks.Stall`. [The lifecycle](explanations/lifecycle.md) describes what is called when."""
LONGEST_LINE = 100


class Text:
    """Text that a signature shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def page() -> str:
    """Return the whole page."""
    contents = [
        f"- [{package}](#{anchor(package)}): {', '.join(f'[{name}](#{anchor(name)})' for name in entries)}"
        for package, entries in sections().items()
    ]
    parts = [INTRODUCTION, "\n".join(contents)]
    for package, entries in sections().items():
        words = prose(importlib.import_module(package))
        parts += [f"## `{package}`", words if package == "aiohooks.errors" else words.partition("\n\n")[0]]
        for name, thing in entries.items():
            parts += [f"### {name}", *entry(thing)]
    return "\n\n".join(part for part in parts if part) + "\n"


@functools.cache
def sections() -> dict[str, dict[str, Any]]:
    """Return the public objects of each package, by their import path below `aiohooks`.

    Each object is in one section: the package that it is defined in, also if it is imported from `aiohooks`.
    """
    defined_in = {one.name: one.module for one in imports("aiohooks") if one.name is not None}
    found: dict[str, dict[str, Any]] = {package: {} for package in PACKAGES}
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    for name in modules["aiohooks"].__all__:
        getattr(modules["aiohooks"], name)  # which gives each its public path
    for package, module in modules.items():
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                home = package if package != "aiohooks" else package_of(defined_in[name])
                found[home][f"{thing.__module__}.{name}".removeprefix("aiohooks.")] = thing
    return {package: dict(sorted(entries.items(), key=_order)) for package, entries in found.items() if entries}


def _order(item: tuple[str, Any]) -> tuple[bool, str]:
    # The base of all errors comes first.
    return not item[0].endswith("AiohooksError"), item[0].rpartition(".")[2].lower()


def package_of(module: str) -> str:
    """Return the public package that a module belongs to: `aiohooks` for those in none of the others."""
    return max((package for package in PACKAGES if f"{module}.".startswith(f"{package}.")), key=len)


@functools.cache
def documented() -> frozenset[Any]:
    """Return all objects with an entry."""
    return frozenset(thing for entries in sections().values() for thing in entries.values())


def path_of(thing: Any) -> str:
    """Return the heading of an object's entry."""
    return next(name for entries in sections().values() for name, each in entries.items() if each is thing)


def anchor(title: str) -> str:
    """Return the name of a heading in links."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# -- one entry


def entry(thing: Any) -> Iterator[str]:
    """Yield the paragraphs of one object."""
    name = thing.__name__
    if not inspect.isclass(thing):
        yield code(f"{kind_of(thing)} {name}{signature_text(thing)}")
        yield prose(thing)
        return
    bases = [base for base in thing.__mro__[1:] if base in documented()]
    if not issubclass(thing, BaseException):  # the module of the errors draws their tree
        yield code(f"class {name}{signature_text(thing) if is_made_by_users(thing) else ''}")
        nearest = [base for base in bases if not any(issubclass(other, base) for other in bases if other is not base)]
        links = [f"[{path_of(base)}](#{anchor(path_of(base))})" for base in nearest]
        yield f"A subclass of {' and '.join(links)}." if links else ""
    yield prose(thing)
    if "__init__" in vars(thing) and is_made_by_users(thing) and not dataclasses.is_dataclass(thing):
        yield prose(thing.__init__)
    yield "\n".join(f"- `{name}.{attribute}`{kind}: {text}" for attribute, kind, text in attributes(thing))
    for method in dict.fromkeys(method for one in own_classes(thing) for method in vars(one)):
        function = getattr(thing, method)
        inherited = any(method in vars(base) for base in bases)
        if inspect.isroutine(function) and not inherited and not method.startswith("_") and not is_internal(function):
            yield f"#### {name}.{method}"
            yield code(f"{kind_of(function)} {method}{signature_text(function, bound=True)}")
            yield prose(function)


def kind_of(function: Any) -> str:
    """Return how a definition begins."""
    return "async def" if inspect.iscoroutinefunction(function) else "def"


def is_made_by_users(cls: type[Any]) -> bool:
    """Return whether the constructor is shown: not for protocols, errors, and classes whose docstring names their creator."""
    if getattr(cls, "_is_protocol", False) or issubclass(cls, BaseException):
        return False
    if re.search(r"\b([Mm]ade|[Cc]reated|[Rr]eturned) by\b", inspect.getdoc(cls) or ""):
        return False
    return issubclass(cls, tuple) or cls.__init__ is not object.__init__


def is_internal(member: Any) -> bool:
    """Return whether a method or property is only for other parts of the library."""
    return (inspect.getdoc(member) or "").startswith("Internal:")


def own_classes(cls: type[Any]) -> list[type[Any]]:
    """Return the class and those of its bases in the library that neither have an entry nor are shown by one that has."""
    shown = [base for base in cls.__mro__[1:] if base in documented()]
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("aiohooks.") and not issubclass(base, tuple)]
    return [cls, *(base for base in bases if not any(issubclass(other, base) for other in shown))]


def attributes(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the properties and the attributes with a docstring: name, type, text."""
    for one in own_classes(cls):
        if issubclass(one, tuple):
            continue
        yield from assigned(one)
        for name, member in vars(one).items():
            if isinstance(member, property) and not name.startswith("_") and not is_internal(member):
                returns = inspect.signature(member.fget).return_annotation if member.fget else inspect.Signature.empty
                yield name, f" (`{annotation_text(returns)}`)", " ".join(prose(member).partition("\n\n")[0].split())


@functools.cache
def class_definitions() -> dict[str, ast.ClassDef]:
    """Return the classes of the library by name; a public class gives its package, not its file, as its module."""
    found: dict[str, ast.ClassDef] = {}
    for path in modules().values():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, node)
    return found


def assigned(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the attributes that the class body or `__init__` assigns and that are followed by a docstring."""
    body = class_definitions()[cls.__name__].body
    inits = [node.body for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    for statement, below in (pair for statements in (body, *inits) for pair in itertools.pairwise(statements)):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name))
                | ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if not name.startswith("_") and not text.startswith("Internal:"):
                kind = f" (`{ast.unparse(statement.annotation)}`)" if isinstance(statement, ast.AnnAssign) else ""
                yield name, kind, " ".join(text.split())
            case _:
                pass


# -- signatures


def signature_text(thing: Any, *, bound: bool = False) -> str:
    """Return parameters and result as a reader would write them; `bound` leaves out the first parameter."""
    signature = inspect.signature(thing)
    parameters = [
        each.replace(
            annotation=each.empty if each.annotation is each.empty else Text(annotation_text(each.annotation)),
            default=each.empty if each.default is each.empty else Text(default_text(each.default)),
        )
        for each in signature.parameters.values()
    ]
    returns = signature.return_annotation
    hidden = inspect.isclass(thing) or returns is signature.empty
    line = str(inspect.Signature(parameters[1:] if bound else parameters))
    result = "" if hidden else f" -> {annotation_text(returns)}"
    if len(line + result) <= LONGEST_LINE:
        return line + result
    return "(\n    " + ",\n    ".join(split_outside_brackets(line[1:-1])) + f",\n){result}"


def split_outside_brackets(text: str) -> list[str]:
    """Return the parts between the commas that are in no brackets."""
    parts = [""]
    for part in text.split(", "):
        if parts[-1].count("[") + parts[-1].count("(") > parts[-1].count("]") + parts[-1].count(")"):
            parts[-1] += f", {part}"
        else:
            parts.append(part)
    return parts[1:]


def annotation_text(annotation: Any) -> str:
    """Return a type without the modules it comes from."""
    if annotation is inspect.Signature.empty:
        return "Any"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", re.sub(r"ForwardRef\('(.*?)'\)", r"\1", text))


def default_text(default: Any) -> str:
    """Return a default as it would be written; `...` for a sentinel or an object."""
    if default is None or isinstance(default, bool | int | float | str):
        return repr(default)
    if isinstance(default, tuple):
        return f"({', '.join(one.__name__ if inspect.isclass(one) else repr(one) for one in default)})"
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        values = ((field, getattr(default, field.name)) for field in dataclasses.fields(default))
        given = [f"{field.name}={value!r}" for field, value in values if value not in (field.default, ())]
        return f"{type(default).__name__}({', '.join(given)})"
    return "..."


# -- docstrings


def code(text: str) -> str:
    """Return a block that is not run."""
    return f"```text\n{text}\n```"


def prose(thing: Any) -> str:
    """Return a docstring as Markdown: Google's sections become lists, indented text becomes a block."""
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
    """Return one of Google's sections."""
    if title == "Example":
        return ["Example:", code(text.strip("\n"))]
    items = [" ".join(item.split()) for item in re.split(r"\n(?! )", text.strip("\n"))]
    if title == "Returns":
        return [f"Returns: {' '.join(items)}"]
    listed = [re.sub(r"^(\*{0,2}\w+): ", r"`\1`: ", item) for item in items]
    return [f"{ {'Args': 'Arguments'}.get(title, title) }:\n\n" + "\n".join(f"- {item}" for item in listed)]


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE")
    file: Path | None = parser.parse_args().write
    if file is None:
        print(page(), end="")
    else:
        file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
