"""What the frames of tasks and threads have: the names of what they wait for, the locks that they
hold, what they refer to.

Before Python 3.13 a frame keeps what its variables were when they were asked for. So those of user
code are only asked for where a thread waits for a lock; coroutines that are suspended show what
they have to the garbage collector.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import linecache
import types
from asyncio import locks
from collections.abc import Sequence
from typing import Any, cast

import anyio

from aiohooks._why.tasks import coroutine_of, is_library, links_of

_EXITS = "__aexit__", "__exit__"
_CONDITIONS = locks.Condition, anyio.Condition


def position(frame: types.FrameType) -> ast.expr | None:
    """Return the expression that a frame evaluates now: of a call, what is called; of a `with`
    statement, its object.
    """
    if frame.f_lasti < 0:
        return None
    linecache.lazycache(frame.f_code.co_filename, frame.f_globals)
    return _expression_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _expression_at(code: types.CodeType, instruction: int) -> ast.expr | None:
    line, last, column, end = _positions(code, instruction)
    if line is None or last is None or column is None or end is None:
        return None
    with contextlib.suppress(
        SyntaxError, ValueError, IndexError
    ):  # where there is no source, or another one
        lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : last]]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][column:].lstrip()
        node: Any = ast.parse(b"".join(lines)).body[0]
        if isinstance(node, (ast.With, ast.AsyncWith)) and len(node.items) == 1:
            node = node.items[0].context_expr
        node = node.value if isinstance(node, ast.Expr) else node
        node = node.value if isinstance(node, ast.Await) else node
        node = (
            node.func.value
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            else node
        )
        return node if isinstance(node, ast.expr) else None
    return None


def _positions(
    code: types.CodeType, instruction: int
) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the first and last line and column of an instruction."""
    return next(
        itertools.islice(code.co_positions(), instruction // 2, None), (None, None, None, None)
    )


def expression(frames: Sequence[types.FrameType], thing: object) -> str:
    """Return the name under which the innermost of the user's own functions knows something, if it
    calls a method of it.
    """
    inner = [*itertools.takewhile(is_library, reversed(frames))]
    if len(inner) == len(frames):
        return ""
    if inner:
        called = inner[-1].f_locals.get("self")
        if called is not thing and attribute(called, "_lock") is not thing:  # of a condition
            return ""
    node = position(frames[-len(inner) - 1])
    return (
        ""
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
        else f" `{ast.unparse(node)}`"
    )


def value_of(node: ast.expr | None, frame: types.FrameType) -> Any:
    """Return the value of a name or an attribute in a frame; no code of users is called for it."""
    if isinstance(node, ast.Name):
        scopes = frame.f_locals, frame.f_globals
        return next((scope[node.id] for scope in scopes if node.id in scope), None)
    if isinstance(node, ast.Attribute):
        return attribute(value_of(node.value, frame), node.attr)
    return None


def attribute(owner: object, name: str) -> Any:
    """Return an attribute of an object, None if it has none; no code of users is called for it."""
    found = inspect.getattr_static(owner, name, None)
    return found.__get__(owner) if isinstance(found, types.MemberDescriptorType) else found


def entered(frame: types.FrameType) -> list[Any]:
    """Return the objects whose `with` blocks a frame that runs is in; not the one that it is about
    to enter.
    """
    line, _, column, _ = _positions(frame.f_code, frame.f_lasti)
    if is_library(frame) or line is None:
        return []
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
        blocks = [
            one
            for one in ast.walk(tree)
            if isinstance(one, ast.With) and line <= (one.end_lineno or 0)
        ]
        names = (item.context_expr for one in blocks for item in one.items)
        at = line, column or 0
        return [
            value_of(one, frame)
            for one in names
            if (one.end_lineno or 0, one.end_col_offset or 0) <= at
        ]
    return []


def held_by(task: asyncio.Task[Any]) -> list[Any]:
    """Return the objects whose `with` blocks a suspended task is in: its coroutines keep their
    exits on the stack.
    """
    held: list[Any] = []
    links = [(frame, coro) for frame, coro in links_of(coroutine_of(task)) if frame is not None]
    for (frame, coro), inner in itertools.zip_longest(links, links[1:]):
        inside = _exited_by(coro)
        if inside and inner is not None and getattr(inner[1], "__name__", "") == "__aenter__":
            inside.pop()  # it waits for this one
        held += itertools.chain.from_iterable(inside)
        owner = (
            frame.f_locals.get("self")
            if frame.f_code.co_name == "wait" and is_library(frame)
            else None
        )
        if isinstance(owner, _CONDITIONS):  # which is released meanwhile
            held = [
                one for one in held if one is not owner and one is not attribute(owner, "_lock")
            ]
    return held


def _exited_by(coro: object) -> list[list[Any]]:
    """Return the objects whose exits a coroutine or a generator has on its stack, each with those
    that it enters in turn.
    """
    found: list[list[Any]] = []
    referents = gc.get_referents(coro)
    for one, after in itertools.zip_longest(referents, referents[1:]):
        if isinstance(one, (types.MethodType, types.BuiltinMethodType)) and one.__name__ in _EXITS:
            owner: Any = one.__self__
        elif isinstance(one, types.FunctionType) and one.__name__ in _EXITS:
            owner = after  # Python 3.14 has the object behind its function
        else:
            found += _exited_by(cast("Any", one)) if inspect.isasyncgen(one) else []
            continue
        entered, attributes = [owner], _attributes(owner)
        if type(owner).__module__ == "contextlib":
            # Of `contextmanager` and `asynccontextmanager`, and of an exit stack.
            entered += itertools.chain.from_iterable(_exited_by(attributes.get("gen")))
            exits = (callback for _, callback in attributes.get("_exit_callbacks", ()))
            entered += [one.__self__ for one in exits if isinstance(one, types.MethodType)]
        elif isinstance(owner, _CONDITIONS):
            entered.append(attribute(owner, "_lock"))
        found.append(entered)
    return found


def _attributes(one: object) -> dict[str, Any]:
    """Return the attributes of an object, but of no module or class; no code of users is called for
    it.
    """
    if type(one).__dictoffset__ and not isinstance(
        one, types.ModuleType | type | types.FunctionType
    ):
        with contextlib.suppress(AttributeError):
            found: Any = object.__getattribute__(one, "__dict__")
            return dict(found)
    return {}
