"""Plain functions in place of coroutine functions, and what annotations say of a function.

plain_call           a plain function as a coroutine function
threaded             a plain function as one that calls it in a worker thread
call_in_thread       calls a function in a worker thread
annotations_of       the annotations of a function, evaluated
without_awaitables   an annotation, with the results of its awaitables in their place
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
from typing import Any, Literal, cast

import anyio.to_thread

from aiohooks._core.calls import copy_back
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._core.validate import is_coroutine_function
from aiohooks.errors import InvalidHookError

Awaits = Literal["never", "perhaps", "always"]

# -- annotations


class _UnknownType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return cls


class Unknown(metaclass=_UnknownType):
    """Stands for a name that exists for type checkers only."""

    def __class_getitem__(cls, parameters: object) -> Any:
        return cls


class _Names(dict[str, Any]):
    """The names that the annotations of a function may use, with an `Unknown` for each other."""

    def __init__(self, module: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        # Before Python 3.13, `types.CoroutineType` takes no parameters.
        super().__init__({"CoroutineType": Coroutine, **names})
        self._module = module

    def __missing__(self, name: str) -> Any:
        for known in (self._module, vars(builtins)):
            if name in known:
                return known[name]
        self[name] = types.new_class(name, (Unknown,))
        return self[name]


def annotations_of(function: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function, by parameter; `names` may not be global."""
    module = vars(sys.modules.get(getattr(function, "__module__", ""), builtins))
    known = _Names(module, names)
    return {
        parameter: _evaluated(annotation, module, known)
        for parameter, annotation in _written_annotations(function).items()
    }


def _written_annotations(function: Any) -> dict[str, Any]:
    try:
        annotations: Any = getattr(function, "__annotations__", None)
    except NameError:
        # Python 3.14 evaluates annotations here, with names that exist for type checkers only.
        annotationlib: Any = importlib.import_module("annotationlib")
        text = annotationlib.Format.STRING
        annotations = annotationlib.get_annotations(function, format=text)
    is_mock = type(annotations) is not dict
    return {} if is_mock else cast("dict[str, Any]", annotations)


def _evaluated(annotation: Any, module: Mapping[str, Any], names: _Names) -> Any:
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, {}, names)  # noqa: S307
        except Exception:
            return Unknown
    # For texts inside of it, and without the notes of `Annotated`. Since Python 3.14 a mapping is
    # copied, so that it must have all names.
    owner = types.SimpleNamespace(__annotations__={"annotation": annotation})
    words = {word: names[word] for word in re.findall(r"[^\W\d]\w*", str(annotation))}
    with contextlib.suppress(Exception):
        return typing.get_type_hints(owner, dict(module), words)["annotation"]
    return annotation


def union_parts(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    annotation = getattr(annotation, "__value__", annotation)  # of `type Answer = ...`
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def without_awaitables(annotation: Any) -> tuple[Any, Awaits]:
    """Return an annotation with the results of awaitables in their place, and if it has any."""
    results: list[Any] = []
    awaits: set[Awaits] = set()
    for part in union_parts(annotation):
        kind = typing.get_origin(part) or part
        if isinstance(kind, type) and issubclass(kind, Awaitable):
            arguments = typing.get_args(part)
            results.append(arguments[-1] if arguments else Any)
            awaits.add("always")
        else:
            results.append(part)
            awaits.add("never")
    result = results[0] if len(results) == 1 else typing.Union[tuple(results)]  # noqa: UP007
    return result, awaits.pop() if len(awaits) == 1 else "perhaps"


# -- kinds


def function_kind(function: Any) -> str:
    """Return what a function is, for messages: "a plain function", "an async generator", ..."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:  # an object with `__call__`
        kind = cast("Any", type(function))
        method = getattr(kind, "__call__", None)  # noqa: B004
        code = getattr(method, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if not isinstance(flags, int):
        return "a plain function"  # a mock, whose attributes are mocks
    if flags & inspect.CO_ASYNC_GENERATOR:
        return "an async generator"
    if flags & inspect.CO_GENERATOR:
        return "a generator"
    return "a coroutine function" if is_coroutine_function(function) else "a plain function"


def wraps_others(function: object) -> bool:
    """Return whether a function of a hook is an async generator, which wraps the other hooks."""
    return function_kind(function) == "an async generator"


# -- calls


def plain_call(function: Callable[..., Any], who: str) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function.

    It can wait only if the function is annotated to return awaitables.
    """

    @functools.wraps(function)
    async def call(*args: Any, **keywords: Any) -> Any:
        return _plain_result(function(*args, **keywords), who)

    @functools.wraps(function)
    async def call_and_wait(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        return await result if inspect.isawaitable(result) else result

    return call_and_wait if returns_awaitable(function) else call


def _plain_result(result: Any, who: str) -> Any:
    """Return the result of a plain function; raise if it is an awaitable."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    raise InvalidHookError(
        f"{who} is a plain function, and returned {result!r}; write it as `async def`, or annotate"
        " it"
    )


def returns_awaitable(function: Any) -> bool:
    """Return whether a function is annotated to return an awaitable, always or sometimes."""
    while isinstance(function, functools.partial):
        function = function.func
    _, awaits = without_awaitables(annotations_of(function, {}).get("return", Any))
    return awaits != "never"


def threaded(function: Callable[..., Any], who: str) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function that calls it in a worker thread."""

    @functools.wraps(function)
    async def call(*args: Any, **keywords: Any) -> Any:
        return _plain_result(await call_in_thread(function, args, keywords), who)

    return call


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
            call, grace_secs=grace_secs, what=f"thread of {function!r}", on_cancel=on_cancel
        )
    finally:
        copy_back([(before, context)])
