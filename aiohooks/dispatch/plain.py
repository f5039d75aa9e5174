"""Plain functions in place of coroutine functions, and what annotations say of a function.

plain_call           a plain function as a coroutine function
threaded             a plain function as one that calls it in a worker thread
call_in_thread       calls a function in a worker thread
annotations_of       the annotations of a function, evaluated
split_awaitables     the members of a union, without and with awaitables around them
function_kind        whether a function is a plain one, a coroutine function or a generator
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, cast

import anyio.to_thread

from aiohooks._core.calls import copy_back
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._core.validate import is_coroutine_function
from aiohooks.errors import InvalidHookError

# -- annotations


class Unknown:
    """Stands for a class that exists for type checkers only; each name has a subclass."""

    def __class_getitem__(cls, parameters: object) -> Any:
        return cls


def annotations_of(function: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function, by parameter; `names` may not be global.

    An annotation that cannot be evaluated stays as it is.
    """
    module = sys.modules.get(getattr(function, "__module__", ""), builtins)
    # Before Python 3.13, `types.CoroutineType` takes no parameters.
    known = {**vars(builtins), **vars(module), "CoroutineType": Coroutine, **names}
    evaluated = written_annotations(function).copy()
    for word in re.findall(r"[^\W\d]\w*", str(evaluated)):
        if word not in known:
            known[word] = type(word, (Unknown,), {})
    for parameter, annotation in evaluated.items():
        owner = types.SimpleNamespace(__annotations__={parameter: annotation})
        with contextlib.suppress(Exception):
            evaluated.update(typing.get_type_hints(owner, known))
    return evaluated


def written_annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function or a class itself, by name; some may be texts."""
    try:
        annotations: Any = getattr(owner, "__annotations__", None)
    except NameError:
        # Python 3.14 evaluates annotations here, with names that exist for type checkers only.
        annotationlib: Any = importlib.import_module("annotationlib")
        annotations = annotationlib.get_annotations(owner, format=annotationlib.Format.STRING)
    is_mock = type(annotations) is not dict
    return {} if is_mock else cast("dict[str, Any]", annotations)


def union_parts(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    annotation = getattr(annotation, "__value__", annotation)  # of `type Answer = ...`
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (types.NoneType if annotation is None else annotation,)


def class_of(annotation: Any) -> type[Any]:
    """Return the class of an annotation, without its parameters; `object` if it is no class."""
    kind = typing.get_origin(annotation) or annotation
    return kind if isinstance(kind, type) else object


def split_awaitables(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Return the members of a union that are not awaitables, and the results of its awaitables."""
    plain: list[Any] = []
    awaited: list[Any] = []
    for part in union_parts(annotation):
        if issubclass(class_of(part), Awaitable):
            result = (typing.get_args(part) or [Any])[-1]
            awaited += union_parts(result)
        else:
            plain.append(part)
    return plain, awaited


def returns_awaitable(function: Any) -> bool:
    """Return whether a function is annotated to return an awaitable, always or sometimes."""
    while isinstance(function, functools.partial):
        function = function.func
    _, awaited = split_awaitables(annotations_of(function, {}).get("return", Any))
    return bool(awaited)


# -- kinds

ASYNC_GENERATOR = "an async generator"


def function_kind(function: Any) -> str:
    """Return the kind of a function, for messages: "a plain function", "an async generator", ..."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:  # an object with `__call__`
        kind: Any = type(cast("object", function))
        code = getattr(getattr(kind, "__call__", None), "__code__", None)  # noqa: B004
    flags = getattr(code, "co_flags", 0)
    if type(flags) is not int:
        return "a plain function"  # a mock, whose attributes are mocks
    if flags & inspect.CO_ASYNC_GENERATOR:
        return ASYNC_GENERATOR
    if flags & inspect.CO_GENERATOR:
        return "a generator"
    return "a coroutine function" if is_coroutine_function(function) else "a plain function"


# -- calls


def plain_call(function: Callable[..., Any], who: str) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function, which cannot wait."""

    async def call(*args: Any, **keywords: Any) -> Any:
        return _plain_result(function(*args, **keywords), who)

    return functools.update_wrapper(call, function)


def threaded(function: Callable[..., Any], who: str) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function that calls it in a worker thread."""

    async def call(*args: Any, **keywords: Any) -> Any:
        return _plain_result(await call_in_thread(function, args, keywords), who)

    return functools.update_wrapper(call, function)


def _plain_result(result: Any, who: str) -> Any:
    """Return the result of a plain function; raise if it is an awaitable."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    raise InvalidHookError(
        f"{who} is a plain function, and returned {result!r}; write it as `async def`"
    )


async def call_in_thread(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    grace_secs: float = DEFAULT_GRACE_SECS,
    on_cancel: Callable[[], object] | None = None,
) -> Any:
    """Call a function in a worker thread and return its result.

    What the function leaves set in its context is set for the caller. A cancel calls `on_cancel`
    and waits for the thread, which cannot be stopped, for at most `grace_secs`.
    """
    context = contextvars.copy_context()
    before = context.copy()
    call = anyio.to_thread.run_sync(functools.partial(context.run, function, *args, **keywords))
    try:
        return await shielded(
            call,
            grace_secs=grace_secs,
            what=f"thread of {function!r}",
            on_cancel=on_cancel,
        )
    finally:
        copy_back([(before, context)])
