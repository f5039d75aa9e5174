"""A lifecycle: a class whose public methods are what hooks can implement; and the checks of hooks against it."""

from __future__ import annotations

import dis
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from aiohooks._validate import check_choice, check_instance, check_mapping, is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import HookRegistration, registration_of
from aiohooks.dispatch.plain import evaluated, without_awaitables
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

How = Literal["first", "chain", "wrap", "together", "race", "merge"]
"""How the answers of several hooks become one; see `point`."""
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__aiohooks_point__"
NO_VALUE = object()
"""The default of data that a class only declares: by an annotation, or as a slot."""


def point(how: How) -> Callable[[F], F]:
    """Mark a method of a lifecycle that returns something: how the answers of several hooks become one.

    Args:
        how: `"first"`: the hooks are called in turn, and the first answer that is not None wins; the rest are not called.
            `"together"`: the hooks overlap, and the first answer in registration order that is not None wins. `"race"`: the hooks
            overlap, the answer that is there first wins, and the others are cancelled; their errors are logged then. `"merge"`:
            the hooks overlap, and their answers are joined in registration order: lists, tuples, or dicts of different keys.
            `"chain"`: the hooks are called in turn, and each answer takes the place of an argument: of the only one, of the one
            annotated as the method's answer is, or of the last one if several are or nothing is annotated. None leaves it as it
            is. `"wrap"`: the argument that is annotated as a callable which returns an awaitable, or is named like `call_next`,
            calls the next hook. The one of the last hook calls the class's own method, or, where that is abstract or does
            nothing, what the caller gave. The arguments that it is given replace the last ones of the call.
            Where the argument is not clear, name it: `chain(argument="message")`, `wrap(argument="app")`.
            In all of them a failing hook ends the call with its error, and one that exceeds its `timeout` with a
            `HookTimeoutError`: a hook that guards refuses then. With `on_error="log"`, and while it is disabled, it has no
            answer: the others decide, as if it allowed the call. `timeout` and `on_error` are those of `configure`.

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
    """Return `"chain"` with the argument whose place the answers take, as in `results={"on_send": ah.chain(argument="message")}`.

    Raises:
        InvalidArgumentError: `argument` is not a name.
    """
    return _way("chain", argument)


def wrap(*, argument: str) -> How:
    """Return `"wrap"` with the argument that calls the next hook, as in `results={"handle": ah.wrap(argument="app")}`.

    Raises:
        InvalidArgumentError: `argument` is not a name.
    """
    return _way("wrap", argument)


def _way(how: How, argument: str) -> How:
    check_instance(argument, str, "argument")
    way = _Way(how)
    way.argument = argument
    return typing.cast("How", way)


class Point(NamedTuple):
    """A method of a lifecycle."""

    name: str
    is_async: bool
    how: How | Literal["none", "any", "one"]
    """How answers become one. Where it is not marked: `"none"`, nothing is returned; `"any"`, that is not known; `"one"`, only
    one hook may answer."""
    positional: tuple[str, ...]
    """The names of the parameters that may be given by position, without `self`."""
    keywords: tuple[str, ...]
    """The names of those that are given by keyword only."""
    variadic: tuple[bool, bool]
    """Whether it takes any positional arguments, and any keywords."""
    answers_hook: bool
    """Whether it returns a hook, which would take the place of the group."""
    does_nothing: bool
    """Whether its own body is empty, or raises `NotImplementedError`."""
    argument: str | None
    """The argument whose place answers take, or that calls the next hook; None for the last one that is given."""
    calls_next: bool
    """Whether an argument calls the next hook: the answer of a hook counts, also None."""
    advice: str
    """What to do where several hooks answer."""
    is_either: bool
    """Whether it is a plain method that returns an answer, or an awaitable of it if a hook may wait."""
    fitting: WeakSet[Any]
    """Functions of classes of hooks that can be called so."""


# What is known of a class since its first group. Nothing in it refers to the class, which is freed like any other.
_points: WeakKeyDictionary[type[Any], dict[Any, tuple[ref[Any], Point]]] = WeakKeyDictionary()
"""Its points, each with the function that it describes."""
_hook_classes: WeakKeyDictionary[type[Any], WeakSet[type[Any]]] = WeakKeyDictionary()
"""The classes of hooks without a method whose name is nearly that of a point."""


class Lifecycle:
    """The methods of a class that hooks can implement."""

    def __init__(
        self,
        kind: Callable[..., Any],
        results: Mapping[str, How] | How | None = None,
        *,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        generators: bool = True,
        hint: str = "",
    ) -> None:
        """Read the public methods of `kind`.

        Args:
            kind: a class, or a typing alias of one.
            results: how the answers of several hooks become one, by the name of the method; or one way for all methods that
                return something.
            methods: further methods, which the class leaves out.
            generators: whether a hook may implement a coroutine method as an async generator, which wraps it.
            hint: what to do with a hook whose methods are plain functions.

        Raises:
            InvalidHookError: `kind` is not a class, or has no public methods.
            InvalidArgumentError: `results` names a method that `kind` does not have, or an unknown way; `methods` one that
                it has.
        """
        origin: object = typing.get_origin(kind) or kind
        if not isinstance(origin, type):
            raise InvalidHookError(f"{kind!r} is not a class; give the class whose methods the hooks implement")
        self.kind: type[Any] = origin
        self.is_protocol: bool = getattr(origin, "_is_protocol", False)
        self._generators = generators
        self._hint = hint
        default = results if isinstance(results, str) else None
        if default is not None:
            check_choice(default, "results", *typing.get_args(How))
        else:
            check_mapping(results, "results")
        by_name: Mapping[str, How] = results if isinstance(results, Mapping) else {}
        for name, how in by_name.items():
            check_choice(how, f"results[{name!r}]", *typing.get_args(How))
        self.members: dict[str, Any] = {}
        """What the class and its bases have."""
        declared: dict[str, Any] = {}
        for base in reversed(origin.__mro__):
            self.members.update(vars(base))
            declared |= dict.fromkeys(getattr(base, "__annotations__", ()), NO_VALUE)
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {name: NO_VALUE for name in declared if not name.startswith("_")}
        """The public data of the class, and its properties."""
        for name, method in (methods or {}).items():
            if name in self.members or name in declared:
                raise InvalidArgumentError(f"methods has {name!r}, which {origin.__name__} has itself; give what it leaves out")
            self.members[name] = method
        points = _points.setdefault(origin, {})
        names = sorted(name for name in self.members if not name.startswith("_"))
        if inspect.isfunction(self.members.get("__call__")):
            names.append("__call__")
        for name in names:
            member = self.members[name]
            if inspect.isfunction(member):
                if name == "__call__" and self.points and not (_does_nothing(member) or _is_abstract(member)):
                    continue  # it calls the other methods
                way = by_name.get(name)
                key = name, way, default, getattr(way or default, "argument", None), generators
                known = points.get(key)
                if known is None or known[0]() is not member:
                    known = points[key] = ref(member), _point(origin, name, member, way, default)
                self.points[name] = known[1]
            elif not callable(member) and not isinstance(member, (classmethod, staticmethod)):
                self.attributes[name] = NO_VALUE if inspect.ismemberdescriptor(member) else member
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {origin.__name__}; {did_you_mean(name, self.points)}"
                )
        if not self.points:
            raise InvalidHookError(f"{origin.__name__} has no public methods, so hooks cannot implement any")

    def has_member(self, hook: object) -> bool:
        """Return whether `hook` is an object of the class."""
        try:
            return isinstance(hook, self.kind)
        except TypeError:  # a protocol that cannot be checked at runtime
            names = (*self.points, *self.attributes)
            return self.kind in type(hook).__mro__ or all(hasattr(hook, name) for name in names)

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and not the one of the class."""
        # The object that stands for a group has methods of its own that no hook implements; its class does not show them.
        is_set = name in getattr(hook, "__dict__", ())
        if name == "__call__" and not is_set and not callable(hook):
            return False  # its class has one, which makes objects
        method = None if is_set else getattr(type(hook), name, None)
        if method is None:
            method = getattr(hook, name, None)
        function = getattr(method, "__func__", method)
        return method is not None and all(function is not vars(base).get(name) for base in self.kind.__mro__)

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        return [each for each in self.points.values() if self.overrides(hook, each.name)]

    def check(self, hook: object, *, plain: bool = False) -> list[Point]:
        """Return the methods that `hook` implements; raise unless it can be called as the lifecycle says.

        With `plain`, coroutine methods may be plain functions.

        Raises:
            InvalidHookError: a method has another kind of function or another signature; or its name is nearly that of one.
        """
        if isinstance(hook, (types.FunctionType, types.MethodType)):
            raise InvalidHookError(f"{hook!r} is a function; add it to a HookGroup with `on`, or give a hook with methods")
        points = self.implemented(hook)
        for each in points:
            method = getattr(hook, each.name)
            function = method.__func__ if isinstance(method, types.MethodType) else None
            if function not in each.fitting:
                self._check_method(hook_name(hook), method, each, plain=plain)
                if inspect.isfunction(function) and not plain:
                    each.fitting.add(function)
        if "__call__" in self.members and "__call__" not in self.points and callable(hook) and self.overrides(hook, "__call__"):
            raise InvalidHookError(
                f"{hook_name(hook)}.__call__ decides which of its methods are called, so a group cannot call them"
            )
        checked = _hook_classes.setdefault(self.kind, WeakSet())
        if type(hook) not in checked:
            self._check_names(hook)
            checked.add(type(hook))
        return points

    def _check_method(self, who: str, method: Any, each: Point, *, plain: bool) -> None:
        kind = self.kind.__name__
        is_generator = inspect.isasyncgenfunction(method)
        wraps = self._generators and each.how != "wrap" and is_generator
        if not each.is_async and (is_generator or inspect.isgeneratorfunction(method)):
            own = self.members[each.name]
            if inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
                raise InvalidHookError(
                    f"{who}.{each.name} is a generator as {kind}.{each.name} is, which a group cannot stand for; "
                    "use this hook beside the group"
                )
            if not is_generator and each.how in ("none", "any"):
                raise InvalidHookError(
                    f"{who}.{each.name} is a generator, and no one would iterate over it; write it without `yield`"
                )
        if wraps and each.calls_next and each.does_nothing:
            raise InvalidHookError(
                f"{who}.{each.name} is an async generator, but an argument of {kind}.{each.name} calls the next one; "
                f'write it as `async def` that calls it, and give results={{"{each.name}": "wrap"}}'
            )
        may_be_plain = plain or not inspect.iscoroutinefunction(self.members[each.name])
        if each.is_async and not is_coroutine_function(method) and not wraps and (is_generator or not may_be_plain):
            raise InvalidHookError(f"{who}.{each.name} is not a coroutine function; write it as `async def`{self._hint}")
        if not each.is_async and (is_generator or is_coroutine_function(method)):
            raise InvalidHookError(
                f"{who}.{each.name} is {'an async generator' if is_generator else 'a coroutine function'}, "
                f"but {kind}.{each.name} is a plain one; write it as `def`; or, if what it returns is awaited, "
                f"derive a class in which it is annotated so, as in `-> Awaitable[None] | None`"
            )
        if each.answers_hook:
            raise InvalidHookError(
                f"{who}.{each.name} returns a hook, which would take the place of the group; use this hook beside the group"
            )
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            return  # written in C
        positional = [None] * (len(each.positional) + each.variadic[0])
        keywords = dict.fromkeys((*each.keywords, *(("any_other",) if each.variadic[1] else ())))
        try:
            signature.bind(*positional, **keywords)
        except TypeError as error:
            given, wanted = _without_annotations(signature), _without_annotations(inspect.signature(self.members[each.name]))
            raise InvalidHookError(f"{who}.{each.name}{given} cannot take the call {kind}.{each.name}{wanted}: {error}") from None

    def _check_names(self, hook: object) -> None:
        names = {name for base in type(hook).__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
        for name in sorted(names.difference(self.points)):
            if not name.startswith("_") and is_coroutine_function(getattr(hook, name)):
                for known in self.points:
                    if _one_edit_apart(name, known):
                        raise InvalidHookError(
                            f"{hook_name(hook)}.{name} is not a method of {self.kind.__name__} and would never be called; "
                            f"did you mean {known!r}? A helper's name begins with an underscore"
                        )


def registered_hooks(
    hooks: Iterable[object], numbers: Counter[str] | None = None, known: Container[int] = ()
) -> tuple[RegisteredHook, ...]:
    """Check registrations and name the hooks: by their class, numbered where there are several.

    Args:
        hooks: hooks and registrations.
        numbers: how many hooks have had each name before; counts these.
        known: the ids of hooks that there are already.

    Raises:
        InvalidHookError: one is a class, or is listed twice.
    """
    registrations: dict[int, HookRegistration] = {}
    for one in hooks:
        registration = registration_of(one)
        if id(registration.hook) in registrations or id(registration.hook) in known:
            raise InvalidHookError(f"hooks has {registration.hook!r} twice; make two objects of it if both are meant")
        registrations[id(registration.hook)] = registration
    count = Counter(hook_name(one.hook) for one in registrations.values())
    numbers = Counter() if numbers is None else numbers
    registered: list[RegisteredHook] = []
    for one in registrations.values():
        name = hook_name(one.hook)
        numbers[name] += 1
        is_one = count[name] == numbers[name] == 1
        registered.append(RegisteredHook(name if is_one else f"{name}#{numbers[name]}", one))
    return tuple(registered)


def check_options(registered: RegisteredHook, points: Iterable[Point]) -> None:
    """Raise unless the attributes of a registration hold for all of these methods.

    Raises:
        InvalidHookError: one of them would have no effect.
    """
    registration, queued, threads = registered.registration, False, False
    if registration.timeout is None and not (registration.observer or registration.background or registration.thread):
        return
    for each in points:
        who = f"{registered.name}.{each.name}"
        method = getattr(registered.hook, each.name)
        is_plain = not is_coroutine_function(method) and not inspect.isasyncgenfunction(method)
        threads |= each.is_async and is_plain
        if registration.thread and not each.is_async:
            raise InvalidHookError(f"{who} is called as a plain method, which cannot wait for a thread; give its hook no thread")
        can_end = each.is_async and not (each.is_either and is_plain)
        if registration.timeout is not None and not can_end and not registration.thread:
            raise InvalidHookError(f"{who} is a plain function, which no time limit can end; give its hook no timeout")
        if registration.observer and (each.calls_next or inspect.isasyncgenfunction(getattr(registered.hook, each.name))):
            raise InvalidHookError(f"{who} wraps the calls of others, so it cannot only observe; give its hook no observer=True")
        queued |= each.is_async and each.how == "none"
        if registration.background and inspect.isasyncgenfunction(getattr(registered.hook, each.name)):
            raise InvalidHookError(f"{who} is an async generator: it wraps the calls of others, and cannot run in the background")
    if registration.thread and not threads:
        raise InvalidHookError(f"{registered.name} is to be called in a thread, but has no plain method for a coroutine method")
    if registration.background and not queued:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )


def hook_name(hook: object) -> str:
    """Return the name of a hook in messages: that of its class, or of the function that it was made of."""
    return getattr(hook, "__aiohooks_name__", None) or type(hook).__name__


def _point(kind: type[Any], name: str, method: Any, given: How | None, default: How | None) -> Point:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    is_async = inspect.iscoroutinefunction(method)
    answer = evaluated(method.__annotations__.get("return", Any), method)
    awaits = None
    if not is_async:
        answer, awaits = without_awaitables(answer)
        is_async = awaits is not None
    annotations = {one.name: evaluated(one.annotation, method) for one in parameters}
    returns_none = answer in (None, type(None), "None")
    nexts = _next_names(annotations, unsure=not returns_none)
    lacks: dict[str, str] = {}
    if not parameters:
        lacks["chain"] = "it has no argument whose place an answer could take"
    if not parameters or not is_async:
        lacks["wrap"] = "only a coroutine method can that has an argument which calls the next"
    if not is_async:
        lacks["race"] = 'the calls of a plain method do not overlap; give "first"'
    how: Any = given or getattr(method, _MARK, None)
    asked, argument = how or default, None
    if asked in ("chain", "wrap") and asked not in lacks:
        found = _next_names(annotations, unsure=True) if asked == "wrap" else _chained_names(annotations, answer)
        if not found and len(annotations) == 1 and how is not None:
            found = [name for name, one in annotations.items() if _callable(one) != "no"]
        argument, lack = _argument_for(asked, found, [one.name for one in parameters if one.kind not in _VARIADIC])
        if lack:
            lacks[asked] = lack
    advice = f'give results={{"{name}": "first"}}, or "together", "chain" or "wrap", or put @point on the method'
    if how is None:
        if returns_none and not nexts:
            how = "none"
        elif default is not None and default not in lacks and (default == "wrap" or not nexts):
            how = default
        else:
            is_unclear = default == "chain" and default in lacks and bool(parameters)
            how = "any" if answer in (Any, "Any") and not nexts and not is_unclear else "one"
            if default in lacks:
                advice += f'; "{default}" cannot hold: {lacks[default]}'
        if nexts and how == "one":
            advice = f'give results={{"{name}": "wrap"}}, or "together" if it does not'
            advice = f'"wrap" cannot hold: {lacks["wrap"]}' if "wrap" in lacks else advice
            advice = f"{' or '.join(map(repr, nexts))} calls the next one, which would run several times; {advice}"
    if how in lacks:
        raise InvalidHookError(f"{kind.__name__}.{name} cannot {how}: {lacks[how]}")
    names_of = {parameter.kind: [one.name for one in parameters if one.kind is parameter.kind] for parameter in parameters}
    Kind = inspect.Parameter
    return Point(
        name,
        is_async,
        typing.cast("How", str(how)),
        (*names_of.get(Kind.POSITIONAL_ONLY, ()), *names_of.get(Kind.POSITIONAL_OR_KEYWORD, ())),
        tuple(names_of.get(Kind.KEYWORD_ONLY, ())),
        (Kind.VAR_POSITIONAL in names_of, Kind.VAR_KEYWORD in names_of),
        _is_hook(answer, kind),
        _does_nothing(method) or (how == "wrap" and _is_abstract(method)),
        argument if how in ("chain", "wrap") else None,
        how == "wrap" or (how == "one" and bool(nexts)),
        advice,
        awaits == "perhaps",
        WeakSet(),
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _argument_for(way: How, found: list[str], names: list[str]) -> tuple[str | None, str]:
    """Return the argument that a way is about, None for the last one that is given; and what is wrong, if that is not clear."""
    argument = getattr(way, "argument", None)
    if argument is not None:
        return argument, "" if argument in names else f"it has no argument {argument!r}; {did_you_mean(argument, names)}"
    if len(found) == 1:
        return found[0] if found[0] in names else None, ""
    does = "takes the answer" if way == "chain" else "calls the next"
    choices = ", ".join(names) or "it has none"
    return None, f"it is not clear which argument {does}; name it with ah.{way}(argument=...): {choices}"


_NEXT_NAMES = (
    *("call_next", "next", "nxt", "next_call", "next_handler", "next_app", "next_middleware", "next_fn"),
    *("handler", "continuation", "get_response", "inner", "proceed"),
)


def _next_names(annotations: Mapping[str, Any], *, unsure: bool) -> list[str]:
    """Return the parameters that seem to call the next hook: by annotation, by name; if `unsure`, all that are called."""
    kinds = {name: _callable(annotation) for name, annotation in annotations.items()}
    named = [name for name, kind in kinds.items() if name.strip("_") in _NEXT_NAMES and kind != "no"]
    awaited = [name for name, kind in kinds.items() if kind == "awaited"]
    called = [name for name, kind in kinds.items() if kind == "yes" and unsure]
    return [name for name in awaited if name in named] or awaited or named or called


def _callable(annotation: Any) -> Literal["awaited", "yes", "unknown", "no"]:
    """Return whether an annotation is that of something that is called, and whether what it returns is awaited."""
    annotation = getattr(annotation, "__value__", annotation)  # of `type Next = ...`
    if annotation is Callable or str(annotation).partition("[")[0].endswith(("Callable", "Optional", "Union", "Annotated")):
        return "unknown" if "Callable" not in str(annotation) else "awaited" if _is_awaited(annotation) else "yes"
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in (Any, object, type, types.UnionType, inspect.Parameter.empty):
        return "unknown"
    call: Any = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        return "no"
    is_awaited = inspect.iscoroutinefunction(call) or _is_awaited(getattr(call, "__annotations__", {}).get("return"))
    return "awaited" if is_awaited else "unknown"


def _is_awaited(annotation: Any) -> bool:
    return any(name in str(annotation) for name in ("Awaitable", "Coroutine", "Future"))


def _chained_names(annotations: Mapping[str, Any], answer: Any) -> list[str]:
    """Return the parameters whose place an answer may take: the only one, those annotated as it is, or the last one."""
    if len(annotations) == 1 or (answer is Any and all(one is inspect.Parameter.empty for one in annotations.values())):
        return [*annotations][-1:]
    same = [name for name, one in annotations.items() if _without_none(one) == _without_none(answer)]
    return same[-1:] if [*annotations][-1:] == same[-1:] else same


def _without_none(annotation: Any) -> list[Any]:
    if isinstance(annotation, str):
        return [annotation.removesuffix(" | None")]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return [one for one in (typing.get_args(annotation) if is_union else [annotation]) if one is not type(None)]


def _is_hook(annotation: Any, kind: type[Any]) -> bool:
    bases = kind.__mro__[:-1]
    if isinstance(annotation, str):
        return annotation.split("[")[0].strip("'\" ") in {"Self", *(base.__name__ for base in bases)}
    return str(annotation) == "typing.Self" or (typing.get_origin(annotation) or annotation) in bases


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(one.opname, one.argval) for one in dis.get_instructions(code)]


async def _waits_for_nothing() -> None: ...


def _returns_nothing() -> None: ...


_EMPTY_BODIES = [_instructions(one.__code__) for one in (_waits_for_nothing, _returns_nothing)]
_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}


def _does_nothing(method: types.FunctionType) -> bool:
    """Return whether the body is empty, or only raises `NotImplementedError`."""
    instructions = _instructions(method.__code__)
    only_raises = "NotImplementedError" in method.__code__.co_names and _RETURNS.isdisjoint(name for name, _ in instructions)
    return only_raises or instructions in _EMPTY_BODIES


def _is_abstract(method: types.FunctionType) -> bool:
    return bool(getattr(method, "__isabstractmethod__", False))


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Shorten a signature for a message: those of agent frameworks are hundreds of characters long."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether one letter more, less, changed or exchanged with its neighbour makes `a` of `b`."""
    at = next((number for number, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
    a, b = a[at:], b[at:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or a[1::-1] + a[2:] == b
