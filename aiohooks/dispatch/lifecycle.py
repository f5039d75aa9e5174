"""A hook interface: a class whose public methods are what hooks can implement; and the checks of
hooks against it.
"""

from __future__ import annotations

import dis
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from aiohooks._core.diagnostics import logger
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_mapping,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import HookRegistration, hook_name, registration_of
from aiohooks.dispatch.plain import evaluated, without_awaitables
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

How = Literal["first", "chain", "wrap", "together", "race", "merge"]
"""How the results of several hooks become one; see `point`."""
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__aiohooks_point__"
_ABSTRACT = "__isabstractmethod__"
NO_VALUE = object()
"""The default of data that a class only declares: by an annotation, or as a slot."""


def point(how: How) -> Callable[[F], F]:
    """Mark a method of a hook interface that returns something: how the results of several hooks
    become one.

    Args:
        how: `"first"`: the hooks are called in turn, and the first result that is not None wins;
            the rest are not called. `"together"`: they run concurrently, and the first result in
            registration order that is not None wins. `"race"`: they run concurrently, the earliest
            result wins, and the others are cancelled; their errors are logged then. `"merge"`: they
            run concurrently, and their results are joined in registration order: lists, tuples, or
            dicts of different keys. `"chain"`: the hooks are called in turn, and each result
            replaces an argument: the only one, the one annotated as the method's result is, or the
            last one if several are or nothing is annotated. None leaves it as it is. `"wrap"`: the
            argument that is annotated as a callable which returns an awaitable, or is named like
            `call_next`, calls the next hook. The one of the last hook calls the class's own method,
            or, where that is abstract or does nothing, what the caller gave. The arguments that it
            is given replace the last ones of the call. Where the argument is not clear, name it:
            `chain(argument="message")`, `wrap(argument="app")`. In all of them a failing hook ends
            the call with its error, and one that exceeds its `timeout` with a `HookTimeoutError`: a
            hook that guards refuses then. With `on_error="log"`, and while it is disabled, it has
            no result: the others decide, as if it allowed the call. `timeout` and `on_error` are
            those of `configure`.

    Raises:
        InvalidArgumentError: `how` is something else.
    """
    check_choice(how, "the argument of @point", *typing.get_args(How))

    def mark(method: F) -> F:
        setattr(method, _MARK, how)
        return method

    return mark


class _Way(str):
    """A way with the argument that it is about."""

    argument: str


def chain(*, argument: str) -> How:
    """Return `"chain"` with the argument that each result replaces, as in `results={"on_send":
    ah.chain(argument="message")}`.

    Raises:
        InvalidArgumentError: `argument` is not a name.
    """
    return _way("chain", argument)


def wrap(*, argument: str) -> How:
    """Return `"wrap"` with the argument that calls the next hook, as in `results={"handle":
    ah.wrap(argument="app")}`.

    Raises:
        InvalidArgumentError: `argument` is not a name.
    """
    return _way("wrap", argument)


def _way(how: How, argument: str) -> How:
    check_instance(argument, str, "argument")
    way = _Way(how)
    way.argument = argument
    return typing.cast("How", way)


class Point:
    """A method of a hook interface."""

    def __init__(
        self, kind: type[Any], name: str, method: Any, given: How | None, default: How | None
    ) -> None:
        """Read a method of `kind`; `given` is the way of it, `default` that of all methods that
        return something.

        Raises:
            InvalidHookError: the way that is given for it, or marked on it, cannot hold.
        """
        parameters = list(inspect.signature(method).parameters.values())[1:]
        annotations = {one.name: evaluated(one.annotation, method) for one in parameters}
        answer, awaits = evaluated(method.__annotations__.get("return", Any), method), "always"
        if not inspect.iscoroutinefunction(method):
            answer, awaits = without_awaitables(answer)
        returns_none = answer in (None, type(None), "None")

        def names(*kinds: Any) -> tuple[str, ...]:
            return tuple(one.name for one in parameters if one.kind in kinds)

        Kind = inspect.Parameter
        self.name: str = name
        self.is_async: bool = awaits is not None
        self.is_either: bool = awaits == "perhaps"
        """Whether it is a plain method that returns a result, or an awaitable of it if a hook may
        wait.
        """
        self.positional: tuple[str, ...] = names(Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)
        """The names of the parameters that may be given by position, without `self`."""
        self.keywords: tuple[str, ...] = names(Kind.KEYWORD_ONLY)
        """The names of those that are given by keyword only."""
        self.variadic: tuple[bool, bool] = (
            bool(names(Kind.VAR_POSITIONAL)),
            bool(names(Kind.VAR_KEYWORD)),
        )
        """Whether it takes any positional arguments, and any keywords."""
        self.answers_hook: bool = _is_hook(answer, kind)
        """Whether it returns a hook, which would take the place of the group."""
        self.fitting: WeakSet[Any] = WeakSet()
        """Functions of classes of hooks that can be called so."""
        lacks = {
            "chain": "" if parameters else "it has no argument that a result could replace",
            "wrap": (
                ""
                if parameters and awaits
                else "only a coroutine method can that has an argument which calls the next"
            ),
            "race": "" if awaits else 'plain methods do not run concurrently; give "first"',
        }
        nexts = _next_names(annotations, unsure=not returns_none)
        said: How | None = given or getattr(method, _MARK, None)
        asked = said or default
        self.argument: str | None = None
        """The argument that results replace, or that calls the next hook; None for the last one
        that is given.
        """
        if asked in ("chain", "wrap") and not lacks[asked]:
            found = (
                _next_names(annotations, unsure=True)
                if asked == "wrap"
                else _chained_names(annotations, answer)
            )
            if not found and len(annotations) == 1 and said is not None:
                found = [
                    one for one, annotation in annotations.items() if _callable(annotation) != "no"
                ]
            self.argument, lacks[asked] = _argument_for(
                asked, found, (*self.positional, *self.keywords)
            )
        lack = lacks.get(asked or "")
        if said is not None and lack:
            raise InvalidHookError(f"{kind.__name__}.{name} cannot {said}: {lack}")
        self.how: How | Literal["none", "any", "one"] = "one"
        """How results become one. Where it is not marked: `"none"`, nothing is returned; `"any"`,
        that is not known; `"one"`, only one hook may return a result.
        """
        if said is None and returns_none and not nexts:
            self.how = "none"
        elif asked is not None and not lack and (said is not None or asked == "wrap" or not nexts):
            self.how = typing.cast("How", str(asked))
        elif (
            answer in (Any, "Any") and not nexts and not (asked == "chain" and lack and parameters)
        ):
            self.how = "any"
        self.calls_next: bool = self.how == "wrap" or (self.how == "one" and bool(nexts))
        """Whether an argument calls the next hook: the result of a hook counts, also None."""
        self.does_nothing: bool = _does_nothing(method) or (
            self.how == "wrap" and getattr(method, _ABSTRACT, False)
        )
        """Whether its own body is empty, or raises `NotImplementedError`."""
        self.advice: str = (
            f'give results={{"{name}": "first"}}, or "together", "chain" or "wrap", or put @point'
            " on the method"
        )
        """What to do where several hooks return a result."""
        if nexts:
            does = (
                f"{' or '.join(map(repr, nexts))} calls the next one, which would run several times"
            )
            give = f'give results={{"{name}": "wrap"}}, or "together" if it does not'
            self.advice = (
                f'{does}; "wrap" cannot hold: {lacks["wrap"]}'
                if lacks["wrap"]
                else f"{does}; {give}"
            )
        elif lack:
            self.advice += f'; "{default}" cannot hold: {lack}'


# What is known of a class since its first group. Nothing in it refers to the class, which is freed
# like any other.
_known: WeakKeyDictionary[
    type[Any], tuple[dict[Any, tuple[ref[Any], Point]], WeakSet[type[Any]]]
] = WeakKeyDictionary()
"""Its points, each with the function that it describes; and the classes of hooks without a name
that is nearly that of one.
"""


class Lifecycle:
    """The methods of a class that hooks can implement."""

    def __init__(
        self,
        kind: Callable[..., Any],
        results: Mapping[str, How] | How | None = None,
        *,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        in_group: bool = True,
        hint: str = "",
    ) -> None:
        """Read the public methods of `kind`.

        Args:
            kind: a class, or a typing alias of one.
            results: the ways of `point`, by the name of the method; or one for all methods that
                return something.
            methods: further methods, which the class leaves out.
            in_group: whether hooks may implement a coroutine method as an async generator, which
                wraps it, and have further ones.
            hint: what to do with a hook whose methods are plain functions.

        Raises:
            InvalidHookError: `kind` is not a class, or has no public methods.
            InvalidArgumentError: `results` has an unknown method or way, or `methods` a method that
                `kind` has.
        """
        origin: object = typing.get_origin(kind) or kind
        if not isinstance(origin, type):
            raise InvalidHookError(
                f"{kind!r} is not a class; give the class whose methods the hooks implement"
            )
        self.kind: type[Any] = origin
        self.is_protocol: bool = getattr(origin, "_is_protocol", False)
        self._in_group = in_group
        self._hint = hint
        default = results if isinstance(results, str) else None
        check_mapping(None if default is not None else results, "results")
        by_name: Mapping[str, How] = results if isinstance(results, Mapping) else {}
        asked = (
            {"results": default}
            if default is not None
            else {f"results[{name!r}]": how for name, how in by_name.items()}
        )
        for what, how in asked.items():
            check_choice(how, what, *typing.get_args(How))
        bases = origin.__mro__[::-1]
        declared = (
            name
            for base in bases
            for name in getattr(base, "__annotations__", ())
            if not name.startswith("_")
        )
        self.members: dict[str, Any] = dict.fromkeys(declared, NO_VALUE)
        """What the class and its bases have."""
        for base in bases:
            self.members.update(vars(base))
        for name, method in (methods or {}).items():
            if name in self.members:
                raise InvalidArgumentError(
                    f"methods has {name!r}, which {origin.__name__} has itself; give what it"
                    " leaves out"
                )
            self.members[name] = method
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {}
        """The public data of the class, and its properties."""
        points, self._checked = _known.setdefault(origin, ({}, WeakSet()))
        names = sorted(name for name in self.members if not name.startswith("_"))
        if inspect.isfunction(self.members.get("__call__")):
            names.append("__call__")
        for name in names:
            member = self.members[name]
            if inspect.isfunction(member):
                if (
                    name == "__call__"
                    and self.points
                    and not (_does_nothing(member) or getattr(member, _ABSTRACT, False))
                ):
                    continue  # it calls the other methods
                way = by_name.get(name)
                key = name, way, default, getattr(way or default, "argument", None), in_group
                known = points.get(key)
                if known is None or known[0]() is not member:
                    known = points[key] = ref(member), Point(origin, name, member, way, default)
                self.points[name] = known[1]
            elif not callable(member) and not isinstance(member, (classmethod, staticmethod)):
                self.attributes[name] = NO_VALUE if inspect.ismemberdescriptor(member) else member
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {origin.__name__};"
                    f" {did_you_mean(name, self.points)}"
                )
        if not self.points:
            raise InvalidHookError(
                f"{origin.__name__} has no public methods, so hooks cannot implement any"
            )

    def has_member(self, hook: object) -> bool:
        """Return whether `hook` is an object of the class."""
        try:
            return isinstance(hook, self.kind)
        except TypeError:  # a protocol that cannot be checked at runtime
            return self.kind in type(hook).__mro__ or all(
                hasattr(hook, name) for name in (*self.points, *self.attributes)
            )

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and not the one of the class."""
        # The object that stands for a group has methods of its own that no hook implements; its
        # class does not show them.
        owner = hook if name in getattr(hook, "__dict__", ()) else type(hook)
        if name == "__call__" and owner is not hook and not callable(hook):
            return False  # its class has one, which makes objects
        method = getattr(owner, name, None)
        if method is None:
            method = getattr(hook, name, None)
        function = getattr(method, "__func__", method)
        return all(
            [function is not vars(base).get(name) for base in self.kind.__mro__]
        )  # one has None

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        return [each for each in self.points.values() if self.overrides(hook, each.name)]

    def check(self, hook: object, *, plain: bool = False) -> list[Point]:
        """Return the methods that `hook` implements; raise unless it can be called as the interface
        says.

        With `plain`, coroutine methods may be plain functions.

        Raises:
            InvalidHookError: a method has another kind of function or another signature; or its
                name is nearly that of one.
        """
        if isinstance(hook, (types.FunctionType, types.MethodType)):
            raise InvalidHookError(
                f"{hook!r} is a function; give it to compose_functions, or add it to a HookGroup"
                " with `on`"
            )
        points = self.implemented(hook)
        for each in points:
            method = getattr(hook, each.name)
            function = method.__func__ if isinstance(method, types.MethodType) else None
            if function not in each.fitting:
                self._check_method(f"{hook_name(hook)}.{each.name}", method, each, plain=plain)
                if inspect.isfunction(function) and not plain:
                    each.fitting.add(function)
        if (
            "__call__" in self.members
            and "__call__" not in self.points
            and self.overrides(hook, "__call__")
        ):
            raise InvalidHookError(
                f"{hook_name(hook)}.__call__ decides which of its methods are called, so a group"
                " cannot call them"
            )
        if type(hook) not in self._checked:
            self._check_names(hook, plain=plain)
            self._checked.add(type(hook))
        return points

    def _check_method(self, who: str, method: Any, each: Point, *, plain: bool) -> None:
        known, own = f"{self.kind.__name__}.{each.name}", self.members[each.name]
        kind, own_kind = _function_kind(method), _function_kind(own)
        wraps = self._in_group and each.how != "wrap" and kind == "an async generator"
        problem = ""
        if each.answers_hook:
            problem = (
                "returns a hook, which would take the place of the group; use this hook beside the"
                " group"
            )
        elif wraps and each.is_async and each.calls_next and each.does_nothing:
            problem = (
                f"is an async generator, but an argument of {known} calls the next one; "
                f'write it as `async def` that calls it, and give results={{"{each.name}": "wrap"}}'
            )
        elif each.is_async:
            may_be_plain = kind != "an async generator" and (
                plain or own_kind != "a coroutine function"
            )
            if not wraps and not may_be_plain and kind != "a coroutine function":
                problem = f"is not a coroutine function; write it as `async def`{self._hint}"
        elif "generator" in kind and "generator" in own_kind:
            problem = (
                f"is a generator as {known} is, which a group cannot stand for; use this hook"
                " beside the group"
            )
        elif kind == "a generator" and each.how in ("none", "any"):
            problem = "is a generator, and no one would iterate over it; write it without `yield`"
        elif kind in ("a coroutine function", "an async generator"):
            problem = (
                f"is {kind}, but {known} is a plain one; write it as `def`; or, if what it returns"
                " is awaited, derive a class in which it is annotated so, as in `->"
                " Awaitable[None] | None`"
            )
        if problem:
            raise InvalidHookError(f"{who} {problem}")
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            return  # written in C
        positional = [None] * (len(each.positional) + each.variadic[0])
        keywords = dict.fromkeys([*each.keywords, *["any_other"] * each.variadic[1]])
        try:
            signature.bind(*positional, **keywords)
        except TypeError as error:
            given, wanted = (
                _without_annotations(signature),
                _without_annotations(inspect.signature(own)),
            )
            raise InvalidHookError(
                f"{who}{given} cannot take the call {known}{wanted}: {error}"
            ) from None

    def _check_names(self, hook: object, *, plain: bool) -> None:
        names = {
            name
            for base in type(hook).__mro__
            for name, value in vars(base).items()
            if inspect.isfunction(value)
        }
        names = {name for name in names.difference(self.points) if not name.startswith("_")}
        others = [name for name in sorted(names) if is_coroutine_function(getattr(hook, name))]
        for name in sorted(names) if plain else others:
            for known in self.points:
                is_another_word = (
                    len(known) <= 3 and name[0] != known[0]
                )  # `send` is not a misspelt `end`
                if not is_another_word and _one_edit_apart(name, known):
                    raise InvalidHookError(
                        f"{hook_name(hook)}.{name} is not a method of {self.kind.__name__} and"
                        f" would never be called; did you mean {known!r}? A helper's name begins"
                        " with an underscore"
                    )
        if others and self._in_group and self.has_member(hook):
            logger.warning(
                "a group does not call %s of %s, as %s has none; if something calls them, give"
                " methods=%s",
                ", ".join(others),
                hook_name(hook),
                self.kind.__name__,
                tuple(others),
            )


def registered_hooks(
    hooks: Iterable[object], numbers: Counter[str] | None = None, known: Container[int] = ()
) -> tuple[RegisteredHook, ...]:
    """Check registrations and name the hooks: by their class, numbered where there are several.

    `numbers` says how many hooks have had each name, and counts these; `known` has the ids of hooks
    that there are already.

    Raises:
        InvalidHookError: one is a class, or is listed twice.
    """
    registrations: dict[int, HookRegistration] = {}
    for one in hooks:
        registration = registration_of(one)
        if id(registration.hook) in registrations or id(registration.hook) in known:
            raise InvalidHookError(
                f"hooks has {registration.hook!r} twice; make two objects of it if both are meant"
            )
        registrations[id(registration.hook)] = registration
    names = [hook_name(one.hook) for one in registrations.values()]
    count = Counter(names)
    numbers = Counter[str]() if numbers is None else numbers
    registered: list[RegisteredHook] = []
    for name, one in zip(names, registrations.values(), strict=True):
        numbers[name] += 1
        is_one = count[name] == numbers[name] == 1
        registered.append(RegisteredHook(name if is_one else f"{name}#{numbers[name]}", one))
    return tuple(registered)


def check_options(registered: RegisteredHook, points: Iterable[Point]) -> None:
    """Raise unless the attributes of a registration hold for all of these methods.

    Raises:
        InvalidHookError: one of them would have no effect.
    """
    options, hook = registered.registration, registered.hook
    if options.timeout is None and not (options.observer or options.background or options.thread):
        return
    kinds = [(each, _function_kind(getattr(hook, each.name))) for each in points]
    for each, kind in kinds:
        wraps, is_plain = (
            kind == "an async generator",
            kind not in ("an async generator", "a coroutine function"),
        )
        problem = ""
        if options.thread and not each.is_async:
            problem = (
                "is called as a plain method, which cannot wait for a thread; give its hook no"
                " thread"
            )
        elif (
            options.timeout is not None
            and not options.thread
            and (not each.is_async or (each.is_either and is_plain))
        ):
            problem = "is a plain function, which no time limit can end; give its hook no timeout"
        elif options.observer and (each.calls_next or wraps):
            problem = (
                "wraps the calls of others, so it cannot only observe; give its hook no"
                " observer=True"
            )
        elif options.background and wraps:
            problem = (
                "is an async generator: it wraps the calls of others, and cannot run in the"
                " background"
            )
        if problem:
            raise InvalidHookError(f"{registered.call_name(each.name)} {problem}")
    if options.thread and all(
        kind in ("an async generator", "a coroutine function") for _, kind in kinds
    ):
        raise InvalidHookError(
            f"{registered.name} is to be called in a thread, but has no plain method for a"
            " coroutine method"
        )
    if options.background and not any(each.is_async and each.how == "none" for each, _ in kinds):
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )


def _function_kind(function: object) -> str:
    if inspect.isasyncgenfunction(function):
        return "an async generator"
    if is_coroutine_function(function):
        return "a coroutine function"
    return "a generator" if inspect.isgeneratorfunction(function) else "a plain function"


def _argument_for(way: How, found: list[str], names: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the argument that a way is about, None for the last one that is given; and what is
    wrong, if that is not clear.
    """
    argument: str | None = getattr(way, "argument", None)
    if argument is not None:
        return (
            argument,
            (
                ""
                if argument in names
                else f"it has no argument {argument!r}; {did_you_mean(argument, names)}"
            ),
        )
    if len(found) == 1:
        return found[0] if found[0] in names else None, ""
    does = "takes the result" if way == "chain" else "calls the next"
    choices = ", ".join(names) or "it has none"
    return (
        None,
        f"it is not clear which argument {does}; name it with ah.{way}(argument=...): {choices}",
    )


_NEXT_NAMES = (
    *(
        "call_next",
        "next",
        "nxt",
        "next_call",
        "next_handler",
        "next_app",
        "next_middleware",
        "next_fn",
    ),
    *("handler", "continuation", "get_response", "inner", "proceed"),
)


def _next_names(annotations: Mapping[str, Any], *, unsure: bool) -> list[str]:
    """Return the parameters that seem to call the next hook: by annotation, by name; if `unsure`,
    all that are called.
    """
    kinds = {name: _callable(annotation) for name, annotation in annotations.items()}
    named = [
        name for name, kind in kinds.items() if name.strip("_") in _NEXT_NAMES and kind != "no"
    ]
    awaited = [name for name, kind in kinds.items() if kind == "awaited"]
    called = [name for name, kind in kinds.items() if kind == "yes" and unsure]
    return [name for name in awaited if name in named] or awaited or named or called


def _callable(annotation: Any) -> Literal["awaited", "yes", "unknown", "no"]:
    """Return whether an annotation is that of something that is called, and whether what it returns
    is awaited.
    """
    annotation = getattr(annotation, "__value__", annotation)  # of `type Next = ...`
    if annotation is Callable or str(annotation).partition("[")[0].endswith(
        ("Callable", "Optional", "Union", "Annotated")
    ):
        return (
            "unknown"
            if "Callable" not in str(annotation)
            else "awaited"
            if _is_awaited(annotation)
            else "yes"
        )
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in (
        Any,
        object,
        type,
        types.UnionType,
        inspect.Parameter.empty,
    ):
        return "unknown"
    call: Any = next(
        (vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None
    )
    if call is None:
        return "no"
    is_awaited = inspect.iscoroutinefunction(call) or _is_awaited(
        getattr(call, "__annotations__", {}).get("return")
    )
    return "awaited" if is_awaited else "unknown"


def _is_awaited(annotation: Any) -> bool:
    return any(name in str(annotation) for name in ("Awaitable", "Coroutine", "Future"))


def _chained_names(annotations: Mapping[str, Any], answer: Any) -> list[str]:
    """Return the parameters that a result may replace: the only one, those annotated as it is, or
    the last one.
    """
    if len(annotations) == 1 or (
        answer is Any and all(one is inspect.Parameter.empty for one in annotations.values())
    ):
        return [*annotations][-1:]
    same = [
        name for name, one in annotations.items() if _without_none(one) == _without_none(answer)
    ]
    return same[-1:] if [*annotations][-1:] == same[-1:] else same


def _without_none(annotation: Any) -> list[Any]:
    if isinstance(annotation, str):
        return [annotation.removesuffix(" | None")]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return [
        one
        for one in (typing.get_args(annotation) if is_union else [annotation])
        if one is not type(None)
    ]


def _is_hook(annotation: Any, kind: type[Any]) -> bool:
    bases = kind.__mro__[:-1]
    if isinstance(annotation, str):
        return annotation.split("[")[0].strip("'\" ") in {
            "Self",
            *(base.__name__ for base in bases),
        }
    return (
        str(annotation) == "typing.Self" or (typing.get_origin(annotation) or annotation) in bases
    )


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(one.opname, one.argval) for one in dis.get_instructions(code)]


async def _waits_for_nothing() -> None: ...


_EMPTY_BODIES = [_instructions(one.__code__) for one in (_waits_for_nothing, lambda: None)]
_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}


def _does_nothing(method: types.FunctionType) -> bool:
    """Return whether the body is empty, or only raises `NotImplementedError`."""
    instructions = _instructions(method.__code__)
    only_raises = "NotImplementedError" in method.__code__.co_names and _RETURNS.isdisjoint(
        name for name, _ in instructions
    )
    return only_raises or instructions in _EMPTY_BODIES


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Shorten a signature for a message: those of agent frameworks are hundreds of characters
    long.
    """
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether one letter more, less, changed or exchanged with its neighbour makes `a` of
    `b`.
    """
    at = next(
        (number for number, (one, other) in enumerate(zip(a, b, strict=False)) if one != other),
        min(len(a), len(b)),
    )
    a, b = a[at:], b[at:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or a[1::-1] + a[2:] == b
