"""Plain functions where coroutine functions are called: in turn, or in a worker thread.

plain_call           a plain function as a coroutine function
threaded             a plain function as one that calls it in a worker thread
call_in_thread       calls a function so
evaluated            an annotation that may be a text
without_awaitables   an annotation of what may be an awaitable
"""

from __future__ import annotations

import collections.abc
import contextlib
import contextvars
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio.to_thread

from aiohooks._core.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._core.contexts import copy_back
from aiohooks.errors import InvalidHookError

_ONLY_NONE = re.compile(
    r"\b(typing|Union|Optional|\w*Awaitable\w*|\w*Coroutine\w*|None)\b|\bAny, *Any,|[][|,. ]"
)
"""All that stands in a text which says that None is returned, perhaps as an awaitable."""
_AWAITABLES = (collections.abc.Awaitable, collections.abc.Coroutine, types.CoroutineType)


def evaluated(annotation: Any, function: Any) -> Any:
    """Return an annotation of a function, as its text if it has names that exist for type checkers
    only.
    """
    with contextlib.suppress(Exception):
        owner = types.SimpleNamespace(__annotations__={"return": annotation})
        return typing.get_type_hints(owner, vars(sys.modules[function.__module__]))["return"]
    return annotation


def without_awaitables(annotation: Any) -> tuple[Any, Any]:
    """Return an annotation with what its awaitables give in their place; and None, "always" or
    "perhaps" an awaitable.
    """
    annotation = getattr(annotation, "__value__", annotation)  # of `type Answer = ...`
    annotation = getattr(annotation, "__forward_arg__", annotation)  # of a quoted part of a union
    if isinstance(annotation, str):
        is_awaited = "Callable" not in annotation and any(
            name in annotation for name in ("Awaitable", "Coroutine")
        )
        answer = Any if _ONLY_NONE.sub("", annotation) else None
        awaits = (
            "always"
            if re.fullmatch(r"([\w.]+\.)?(Awaitable|Coroutine)\[[^|]*\]", annotation)
            else "perhaps"
        )
        return (answer, awaits) if is_awaited else (annotation, None)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [without_awaitables(one) for one in args]
        found = {awaits for _, awaits in parts}
        union: Any = typing.Union[tuple(part for part, _ in parts)]  # noqa: UP007
        return union, found.pop() if len(found) == 1 else "perhaps"
    if (origin or annotation) in _AWAITABLES:
        return args[-1] if args else Any, "always"
    return annotation, None


def plain_call(function: Callable[..., Any], who: str) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function, which can wait only if the function is
    annotated to return awaitables.
    """
    given: Any = function
    inner: Any = given.func if isinstance(given, functools.partial) else function
    returned = evaluated(getattr(inner, "__annotations__", {}).get("return"), inner)

    @functools.wraps(function)
    async def call(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # or Python warns that it was never awaited
            raise InvalidHookError(
                f"{who} is a plain function, and returned {result!r}; write it as `async def`, or"
                " annotate it"
            )
        return result

    @functools.wraps(function)
    async def call_and_wait(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        return await result if inspect.isawaitable(result) else result

    return call if without_awaitables(returned)[1] is None else call_and_wait


def threaded(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function that calls it in a worker thread."""

    @functools.wraps(function)
    async def call(*args: Any, **keywords: Any) -> Any:
        return await call_in_thread(function, args, keywords)

    return call


async def call_in_thread(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    grace_secs: float = DEFAULT_GRACE_SECS,
    on_cancel: Callable[[], object] | None = None,
) -> Any:
    """Call a function in a worker thread, and return its result; the caller gets what it leaves set
    in its context.

    A cancel calls `on_cancel` and waits for the thread, which cannot be stopped, for at most
    `grace_secs`.
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
