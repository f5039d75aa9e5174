"""One answer of several hooks: a function for each kind of method (`lifecycle.Point.how`).

answer_any     the only answer, or none: the calls overlap
answer_first   the first that is not None: the rest are not called
answer_chain   each hook gets what the one before it answered
answer_wrap    each hook calls the next one
answer_plain   methods that are plain functions
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, call_groups
from aiohooks.dispatch.lifecycle import Point
from aiohooks.errors import InvalidHookError, add_origin


class Target(NamedTuple):
    """What a method calls."""

    point: Point
    groups: tuple[OrderGroup, ...]
    singles: tuple[OrderGroup, ...]
    """The same calls one by one, for methods whose hooks are called in turn."""
    wrappers: tuple[RegisteredHook, ...]
    """Hooks that implement the method as an async generator."""


async def answer_any(target: Target, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the hooks together; at most one of them answers."""
    return _only_answer(target, await call_groups(target.groups, args, keywords))


def _only_answer(target: Target, answers: list[Any]) -> Any:
    """Return the answer of a method of which nothing says whether it returns something."""
    if len(answers) > 1 and target.point.how == "any" and any(answer is not None for answer in answers):
        name = target.point.name
        raise InvalidHookError(
            f'several hooks implement {name}, and it returned {answers!r}; say what is its result: results={{"{name}": "first"}}'
        )
    return answers[0] if answers and target.point.how != "none" else None


async def answer_first(target: Target, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the hooks in turn up to the first answer that is not None."""
    for single in target.singles:
        answer = (await call_groups((single,), args, keywords))[0]
        if answer is not None:
            return answer
    return None


async def answer_chain(target: Target, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the hooks in turn, each with the answer of the one before it as the last argument."""
    answer: Any = None
    for single in target.singles:
        answer = (await call_groups((single,), args, keywords))[0]
        if answer is not None:
            args, keywords = _with_last(target.point, args, keywords, (answer,))
    return _last(target.point, args, keywords)


async def answer_wrap(target: Target, args: tuple[Any, ...], keywords: dict[str, Any], own: Callable[..., Any]) -> Any:
    """Call the first hook with a function that calls the next one, and so on; the last one gets the caller's own function.

    In between is the method of the class itself, `own`, so that what it does around the call is not lost.
    """
    hooks = [one for single in target.singles for one in single.hooks]

    async def call(number: int, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if number == len(hooks):
            return await own(*args, **keywords)
        registered, answers, inner = hooks[number], list[Any](), list[BaseException]()
        bare_args, bare_keywords = _without_last(target.point, args, keywords)

        async def call_next(*changed: Any, **named: Any) -> Any:
            others = {key: value for key, value in bare_keywords.items() if key not in named}
            new_args, others = _with_last(target.point, bare_args, others, changed)
            own_last = _last(target.point, args, keywords)
            new_args, new_keywords = _and_last(target.point, new_args, {**others, **named}, own_last)
            try:
                answer = await call(number + 1, new_args, new_keywords)
            except BaseException as error:
                inner.append(error)
                raise
            answers.append(answer)
            return answer

        method = getattr(registered.hook, target.point.name)
        own_args, own_keywords = _and_last(target.point, bare_args, bare_keywords, call_next)
        try:
            return await method(*own_args, **own_keywords)
        except Exception as error:
            if any(error is one for one in inner):
                raise  # it has passed through this hook
            who = f"{registered.name}.{target.point.name}"
            add_origin(error, who)
            if registered.registration.on_error != "log":
                raise
            registered.log_failure(who, error)
            return answers[-1] if answers else await call(number + 1, args, keywords)
        finally:
            inner.clear()

    return await call(0, args, keywords)


def answer_plain(target: Target, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Call the hooks of a method that is a plain function, in turn."""
    answers: list[Any] = []
    for single in target.singles:
        registered, name = single.hooks[0], single.names[0]
        try:
            answer = getattr(registered.hook, target.point.name)(*args, **keywords)
        except Exception as error:
            add_origin(error, name)
            if registered.registration.on_error != "log":
                raise
            registered.log_failure(name, error)
            answer = None
        if target.point.how == "first" and answer is not None:
            return answer
        if target.point.how == "chain" and answer is not None:
            args, keywords = _with_last(target.point, args, keywords, (answer,))
        answers.append(answer)
    return _last(target.point, args, keywords) if target.point.how == "chain" else _only_answer(target, answers)


ANSWERS: dict[str, Callable[..., Awaitable[Any]]] = {
    "none": answer_any,
    "any": answer_any,
    "one": answer_any,
    "first": answer_first,
    "chain": answer_chain,
}


# -- arguments


def positional_first(
    names: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give by position what may be given so, as hooks may use other names."""
    given = [*args]
    for name in names[len(args) :]:
        if name not in keywords:
            break
        given.append(keywords.pop(name))
    return tuple(given), keywords


def _last_keyword(each: Point, keywords: dict[str, Any]) -> str | None:
    return next((name for name in reversed(each.keywords) if name in keywords), None)


def _last(each: Point, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the last argument of a call."""
    name = _last_keyword(each, keywords)
    return keywords[name] if name is not None else args[-1] if args else None


def _without_last(each: Point, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = _last_keyword(each, keywords)
    left = {key: value for key, value in keywords.items() if key != name}
    return (args if name is not None else args[:-1]), left


def _and_last(each: Point, args: tuple[Any, ...], keywords: dict[str, Any], last: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if each.keywords:
        return args, {**keywords, each.keywords[-1]: last}
    return (*args, last), {**keywords}


def _with_last(
    each: Point, args: tuple[Any, ...], keywords: dict[str, Any], new: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the last arguments of a call."""
    changed = {**keywords}
    named = [name for name in each.keywords if name in keywords]
    left = list(new)
    while left and named:
        changed[named.pop()] = left.pop()
    return ((*args[: len(args) - len(left)], *left) if left else args), changed
