"""A method of a hook interface, and the modes in which the results of several hooks become one.

point, chain, wrap   mark a method with its mode
Point                a method of a hook interface that hooks can implement, with its mode
Parameters           the parameters of a method, and the arguments of its calls
annotations_of       the annotations of a function, evaluated
function_kind        whether a function is a plain one, a coroutine function or a generator
has_empty_body       whether the body of a function is empty

A mode is how the results of several hooks become one: `Mode` has those that a user can give, and
`ModeOrNone` those of methods for which no mode is given. The modes "chain" and "wrap" are about one
argument of the method, the chosen argument: each result of a chain replaces it, and in a wrap it
calls the next hook.

A hook may have other names for its parameters than the interface, so hooks get all arguments by
position that can be given by position.
"""

from __future__ import annotations

import builtins
import collections.abc
import contextlib
import dis
import functools
import importlib
import inspect
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakSet

from aiohooks._core.validate import check_choice, is_coroutine_function
from aiohooks.errors import InvalidHookError, did_you_mean, safe_repr

Args = tuple[Any, ...]
Keywords = Mapping[str, Any]
NO_KEYWORDS: Keywords = {}
Arguments = tuple[Args, Keywords]
"""The arguments of a call by position, and by name."""
NO_ARGUMENTS: Arguments = ((), NO_KEYWORDS)
Key = int | str | None
"""The key of a parameter: its place, from 0, if it may be given by position, or else its name. None
stands for no parameter.
"""
Values = dict[Key, Any]
"""The arguments of a call, by the key of their parameter. For a call `f(5, unit="s")`, they are
`{0: 5, "unit": "s"}` if `unit` is keyword-only, and `{0: 5, 1: "s"}` if it is not. A parameter
without an argument is missing. Further arguments, for `*args` or `**kwargs`, have their place or
name as the key.
"""


class Parameters:
    """The parameters of a method of a hook interface, without `self`."""

    def __init__(self, member: Any, label: str) -> None:
        """Read the parameters of a method, as it stands in its class.

        `label` is its name in messages.
        """
        self._label = label
        # Annotations may refer to the class, which this object must not keep alive.
        signature = without_annotations(inspect.signature(member))
        _, *parameters = signature.parameters.values()
        self.signature: inspect.Signature = inspect.Signature(parameters)
        self.keys: dict[str, Key] = {}
        """The key of each parameter, except for `*args` and `**kwargs`."""
        # The number of parameters that may be given by position: their keys are the places below.
        self._count = 0
        # The keys of the parameters that may be given by name.
        self._key_by_name: dict[str, Key] = {}
        self._defaults: Values = {}
        # Whether there is a parameter `*args`, and one `**kwargs`.
        self._takes_more_places = False
        self._takes_any_names = False
        for place, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._takes_more_places = True
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_any_names = True
                continue
            key: Key = parameter.name
            if parameter.kind is not parameter.KEYWORD_ONLY:
                key = place
                self._count += 1
            self.keys[parameter.name] = key
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                self._key_by_name[parameter.name] = key
            if parameter.default is not parameter.empty:
                self._defaults[key] = parameter.default
        required = {*self.keys.values()} - self._defaults.keys()
        self.fewest: int = len(required)
        """How many arguments a call without keyword arguments has at least."""
        self.most: int = sys.maxsize if self._takes_more_places else self._count
        """How many arguments a call without keyword arguments has at most."""
        if any(isinstance(key, str) for key in required):
            # Each call has to give this argument by name.
            self.most = -1
        self.chosen: Key = None
        """The key of the chosen argument, which the results of a chain replace, or with which a
        hook calls the next hook. None for other modes. `Point._choose_argument` sets it.
        """

    def find_call_problem(self, signature: inspect.Signature) -> str:
        """Return why a hook with this signature cannot take every call that the method takes.

        The text is empty if it can. The longest and the shortest call of the method are tried: a
        hook that takes both takes the calls between them, too. If the method takes any names, the
        names of the hook's own parameters are tried as well.
        """
        longest: Values = dict.fromkeys(self.keys.values())
        shortest: Values = dict.fromkeys(longest.keys() - self._defaults.keys())
        if self._takes_more_places:
            # One more than the hook has parameters: only `*args` takes so many.
            last_place = self._count + len(signature.parameters)
            longest.update(dict.fromkeys(range(self._count, last_place + 1)))
        calls = [longest, shortest]
        if self._takes_any_names:
            longest["any_other_name"] = None
            # A name of the hook's own parameters is another one, too. The hook cannot take it if it
            # gets an argument for that parameter by position.
            calls.append(longest | dict.fromkeys(self._other_names(signature)))
        try:
            for values in calls:
                args, keywords = self.for_hooks(values)
                signature.bind(*args, **keywords)
        except TypeError as error:
            return str(error)
        return ""

    def _other_names(self, signature: inspect.Signature) -> list[Key]:
        """Return the names of a hook's parameters that `**kwargs` of the method takes."""
        names: list[Key] = []
        for name, parameter in signature.parameters.items():
            # Before Python 3.13, `bind` would wrongly reject the name of a positional-only one.
            if name not in self._key_by_name and parameter.kind is not parameter.POSITIONAL_ONLY:
                names.append(name)
        return names

    # -- a call

    def values(self, args: Args, keywords: Keywords) -> Values:
        """Return the arguments of a call by their keys.

        Raises:
            TypeError: the method has no parameter for an argument, two arguments for a parameter,
                or none for one that has no default.
        """
        # Hot path: a complete call without keyword arguments needs no check.
        if keywords or not self.fewest <= len(args) <= self.most:
            named = keywords
            if self._takes_any_names:
                # `**kwargs` takes any other name, which needs no check. Before Python 3.13, `bind`
                # would wrongly reject the name of a positional-only parameter among them.
                named = {name: keywords[name] for name in self._key_by_name if name in keywords}
            try:
                self.signature.bind(*args, **named)
            except TypeError as error:
                raise TypeError(f"{self._label}(): {error}") from None
        values = self._by_key(keywords)
        values.update(enumerate(args))
        return values

    def _by_key(self, keywords: Keywords) -> Values:
        """Return keyword arguments by the keys of their parameters."""
        # A name without a parameter is one for `**kwargs`, and is its own key.
        return {self._key_by_name.get(name, name): value for name, value in keywords.items()}

    def for_hooks(self, values: Values) -> Arguments:
        """Return the arguments with which hooks are called, by position and by name.

        Hooks may have other names for their parameters, so all arguments are passed by position
        that can be. If a parameter is left out before one that is passed by position, its default
        fills the place.
        """
        values_or_defaults = {**self._defaults, **values}
        args = tuple(values_or_defaults[place] for place in self._places(values))
        keywords = {key: value for key, value in values.items() if isinstance(key, str)}
        return args, keywords

    def _places(self, keys: Iterable[Key]) -> range:
        """Return the places from 0 up to the last place among the keys."""
        places = [key for key in keys if isinstance(key, int)]
        return range(max(places, default=-1) + 1)

    def chosen_value(self, values: Values) -> Any:
        """Return the chosen argument, or its default, or None."""
        default = self._defaults.get(self.chosen)
        return values.get(self.chosen, default)

    # -- a call of the next hook

    def _passed_keys(self, values: Values) -> list[Key]:
        """Return the keys of the arguments that a hook may pass by position to `call_next`.

        `call_next` is the chosen argument here. Its positional arguments replace those of the
        method: of `(request, call_next)`, the request. Keyword-only arguments follow them if the
        chosen argument is keyword-only itself, or if the method has no other positional argument:
        of `(*, request, call_next)`, the request, too.
        """
        given_keys = values.keys() - {self.chosen}
        keys: list[Key] = [*self._places(given_keys)]
        other_places = {*range(self._count)} - {self.chosen}
        takes_other_positions = other_places or self._takes_more_places
        # A chosen argument that is keyword-only has a name as its key.
        if not takes_other_positions or isinstance(self.chosen, str):
            keyword_only = [key for key in self.keys.values() if isinstance(key, str)]
            keys += [key for key in keyword_only if key in given_keys]
        return [key for key in keys if key != self.chosen]

    def changed(
        self,
        values: Values,
        args: Args,
        keywords: Keywords,
    ) -> Values:
        """Return the values with the changes that a hook makes when it calls the next hook.

        An argument that the hook passes by name replaces the value of that name. Arguments that it
        passes by position replace the last positional values, apart from the chosen argument: in a
        method `(server, request, call_next)`, `call_next(other)` replaces the request.

        Args:
            values: the values that the hook was called with.
            args: the positional arguments that the hook passes.
            keywords: the keyword arguments that the hook passes.
        """
        by_key = self._by_key(keywords)
        replaced_keys = [key for key in self._passed_keys(values) if key not in by_key]
        if len(args) > len(replaced_keys):
            # The hook passes more arguments than it was called with: some that its caller has left
            # out, or some for `*args`. They fill the places from the first one on.
            places: list[Key] = [*range(len(args) + 1)]
            if self.chosen in places:
                places.remove(self.chosen)
            replaced_keys = places[: len(args)]
        # Both are paired from the end: fewer arguments replace the last values.
        last_keys = reversed(replaced_keys)
        by_key.update(zip(last_keys, reversed(args), strict=False))
        return {**values, **by_key}

    def for_function(
        self,
        values: Values,
        function: Callable[..., Any],
    ) -> Arguments:
        """Return the arguments for the function that the caller has passed as the chosen argument.

        It gets the last positional arguments, as many as it takes: the caller of a method `(server,
        request, call_next)` may pass a function of the request, or of both. It gets by name the
        arguments that hooks get by name.
        """
        passed_keys = self._passed_keys(values)
        values_or_defaults = {**self._defaults, **values}
        args = tuple(values_or_defaults[key] for key in passed_keys)
        while args and not _takes(function, args):
            args = args[1:]
        # The arguments that are not passed by position, apart from the function itself.
        others = {
            key: value
            for key, value in values.items()
            if key != self.chosen and key not in passed_keys
        }
        _, keywords = self.for_hooks(others)
        return args, keywords


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Return a signature without annotations, which may be hundreds of characters long."""
    return inspect.Signature(
        [
            parameter.replace(annotation=parameter.empty)
            for parameter in signature.parameters.values()
        ]
    )


def _takes(function: Callable[..., Any], args: Args) -> bool:
    """Return whether a function takes these positional arguments, or has no signature."""
    # ValueError: a function that is written in C may have no signature.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(function).bind_partial(*args)
        except TypeError:
            return False
    return True


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Mode = Literal["first", "together", "merge", "all", "chain", "wrap"]
MODES: tuple[str, ...] = typing.get_args(Mode)


class Combination(NamedTuple):
    """A mode as a user gives it, perhaps with the name of the chosen argument."""

    mode: Mode
    argument: str | None = None
    may_be_last: bool = False
    """Whether, in a wrap, the last argument calls the next hook if it has no annotation."""


How: TypeAlias = Mode | Combination
"""How the results of several hooks become one. See `point`."""
_MARK = "__aiohooks_point__"
"""The attribute that `point` sets on a method: a `Combination`."""


def point(how: How) -> Callable[[F], F]:
    """Mark a method of a hook interface with the mode in which results of several hooks are
    combined.

    A hook that fails ends the call with its error, and a hook that exceeds its `timeout` with a
    `HookTimeoutError`: a broken guard allows nothing. A hook that fails with `on_error="log"`, or
    is disabled, has no result, and the other hooks decide.

    Args:
        how: a mode, or the result of `chain` or `wrap`.

            `"first"`: the hooks are called one after another, and the first result that is not None
            wins; the rest are not called.

            `"together"`: they run concurrently, and the first result that is not None, in the order
            of the hooks, wins.

            `"merge"`: they run concurrently, and their results are joined in the order of the
            hooks: lists, tuples, or dicts of different keys.

            `"all"`: they run concurrently, and the call returns a list of all results, in the order
            of the hooks.

            `"chain"`: they are called one after another, and each result replaces an argument: the
            only argument, or the argument whose annotation takes every result. None leaves it as it
            is, and `return aiohooks.dispatch.end_chain(value)` ends the chain with a value.

            `"wrap"`: each hook gets a function that calls the next hook, and decides whether to
            call it. It is the argument that is annotated as a callable which returns an awaitable,
            or else, of a method marked with `@point`, the last one if it has no annotation. What a
            hook passes to the function replaces the last arguments of the call. The function of the
            last hook calls the class's own method. Where that is abstract or does nothing, it calls
            the function that the caller passed to the method, with what the hook passes by
            position, or else with the arguments of the call.

    Raises:
        InvalidArgumentError: `how` is none of these.
    """
    combination = checked_how(how, "the argument of @point")._replace(may_be_last=True)

    def mark(method: F) -> F:
        setattr(method, _MARK, combination)
        return method

    return mark


def chain(*, argument: str) -> How:
    """Return the mode `"chain"` in which each result replaces the named `argument`.

    Example: `results={"on_send": ah.chain(argument="message")}`.
    """
    return Combination("chain", argument)


def wrap(*, argument: str) -> How:
    """Return the mode `"wrap"` in which the named `argument` calls the next hook.

    Example: `results={"handle": ah.wrap(argument="app")}`.
    """
    return Combination("wrap", argument)


class ChainEnd:
    """The result of a hook that ends a chain, as `end_chain` returns it."""

    def __init__(self, value: object) -> None:
        self.value: object = value


def end_chain(value: T) -> T:
    """Return this from a hook to end a chain: `value` is the result of the call, and later hooks
    are not called.
    """
    # For a type checker, the hook returns its value.
    return cast("T", ChainEnd(value))


def checked_how(how: How, what: str) -> Combination:
    """Return a mode as a `Combination`. Raise unless it is one that `point` accepts.

    Args:
        how: a mode, or a combination, which is returned unchanged.
        what: the name of the argument in messages.
    """
    if isinstance(how, Combination):
        return how
    check_choice(how, what, *MODES)
    return Combination(how)


# -- a method

ModeOrNone: TypeAlias = Mode | Literal["none", "any", "one"]
"""The mode of a method. If no mode is given, it depends on the annotations of the method:

`"none"`: the method returns nothing. `"any"`: the annotations do not say whether it returns
something, so several hooks may implement it, but a call with a result and several hooks raises an
error. `"one"`: it returns something, and only one hook may implement it.
"""


class Point:
    """A method of a hook interface.

    It has no reference to the class of the method, so that a cache can keep it.
    """

    def __init__(
        self,
        kind: type[Any],
        name: str,
        member: Any,
        own_mode: Combination | None,
        common_mode: Combination | None,
    ) -> None:
        """Read a method of `kind`.

        Args:
            kind: the class.
            name: the name of the method.
            member: the method, as it stands in the class.
            own_mode: the mode that a group gives for this method. If None, that of `point` counts.
            common_mode: the mode that a group gives for all methods that return something.

        Raises:
            InvalidHookError: the mode of the method cannot hold.
        """
        function = inspect.unwrap(member)
        self.name: str = name
        self.label: str = kind.__name__ if name == "__call__" else f"{kind.__name__}.{name}"
        """Its name in messages. For `__call__`, it is that of the class, which may stand for
        functions.
        """
        self.kind: str = function_kind(function)
        """The kind of its function, as `function_kind` returns it."""
        self.has_empty_body: bool = has_empty_body(function)
        """Whether the method's own body is empty, or only raises `NotImplementedError`."""
        self.parameters: Parameters = Parameters(member, self.label)
        self.fitting: WeakSet[Any] = WeakSet()
        """The functions in classes of hooks that were checked, and can be called as the method."""
        annotations = _Annotations(kind, function, self.parameters.keys)
        self.nexts: list[str] = annotations.nexts
        """The arguments that call the next hook, as their annotations say."""
        is_coroutine = self.kind == COROUTINE
        self.is_async: bool = is_coroutine or annotations.returns_awaitable
        """Whether the caller awaits the result of the method, or may do so."""
        self.problem: str = self._find_problem(kind, annotations)
        """Why hooks cannot implement the method, or an empty text if they can."""
        # The mark of `point` is on the function, or on a decorator's function around it.
        mark = getattr(member, _MARK, None) or getattr(function, _MARK, None)
        self.mode: ModeOrNone = self._choose_mode(annotations, own_mode or mark, common_mode)
        """How the results of several hooks become one."""
        if self.mode == "wrap" and getattr(member, "__isabstractmethod__", False):
            # The body of an abstract method is not meant to be called, even if it is not empty.
            self.has_empty_body = True
        self.none_is_result: bool = self._none_is_result()
        """Whether the call returns None if all its hooks do. Otherwise, the class's own method is
        called then.
        """
        self.empty: Callable[[], Any] = (
            list if self.mode == "all" else _container(annotations.results)
        )
        """Makes the empty result of the modes "merge" and "all", if no hook has a result."""

    def _none_is_result(self) -> bool:
        """Return `none_is_result`. It has no meaning in the mode "wrap", as each hook decides."""
        if self.mode == "none":
            return True
        # In a chain or a merge, None always means that a hook has no result.
        if self.mode in ("chain", "merge"):
            return False
        # The only hook gets a function that calls the next one, and has decided not to call it.
        has_decided = self.mode == "one" and bool(self.nexts)
        return has_decided or self.has_empty_body

    def _find_problem(self, kind: type[Any], annotations: _Annotations) -> str:
        """Return why hooks cannot implement the method of `kind`, or an empty text if they can."""
        if "generator" in self.kind:
            return f"is {self.kind}"
        # The class of the method and its bases, without `object`.
        bases = kind.__mro__[:-1]
        if all(part is typing.Self or class_of(part) in bases for part in annotations.results):
            return "returns a hook, which would take the place of the group"
        return ""

    def _choose_mode(
        self,
        annotations: _Annotations,
        own_mode: Combination | None,
        common_mode: Combination | None,
    ) -> ModeOrNone:
        """Return the mode of the method. Set `parameters.chosen` if the mode is about an argument.

        Args:
            annotations: the annotations of the method.
            own_mode: the mode that is given for this method. Raise if the method cannot have it.
            common_mode: the mode that is given for all methods that return something. It is ignored
                if the method cannot have it, as the class may have methods of several kinds.
        """
        returns_none = annotations.results == [types.NoneType]
        if own_mode is not None:
            problem = self._choose_argument(own_mode, annotations)
            if problem:
                raise InvalidHookError(f"{self.label} cannot {own_mode.mode}: {problem}")
            return own_mode.mode
        if common_mode is not None:
            # "wrap" is for methods that call the next hook, even if they return None. Other modes
            # are for the methods that return something, and do not call the next hook.
            applies = common_mode.mode == "wrap" or not (self.nexts or returns_none)
            if applies and not self._choose_argument(common_mode, annotations):
                return common_mode.mode
        if self.nexts:
            # Only one hook may call the next one: if each of several hooks did, the wrapped call
            # would be made several times.
            return "one"
        if returns_none:
            return "none"
        # Neither annotations nor code say whether the method returns something.
        if common_mode is None and annotations.results == [Any] and self.has_empty_body:
            return "any"
        return "one"

    def _choose_argument(
        self,
        combination: Combination,
        annotations: _Annotations,
    ) -> str:
        """Set `parameters.chosen` to the argument that the combination needs, if it needs one.

        A chain needs the argument that each result replaces, and "wrap" the argument that calls the
        next hook. Return why the method cannot have the combination, or an empty text if it can.
        """
        mode = combination.mode
        role = _ARGUMENT_OF.get(mode)  # of the argument, for the message
        if role is None:
            # Results are combined without the arguments.
            return ""
        if mode == "wrap" and not self.is_async:
            return "only a coroutine method can, with an argument that calls the next hook"
        arguments = annotations.arguments
        named = combination.argument
        if named is not None and named not in arguments:
            return f"it has no argument {named!r}; {did_you_mean(named, arguments)}"
        candidates = annotations.candidates(combination)
        if len(candidates) != 1:
            return (
                f"it is not clear which argument {role}; annotate it, or name it with"
                f" ah.{mode}(argument=...): {', '.join(arguments) or 'it has none'}"
            )
        (argument,) = candidates
        self.parameters.chosen = self.parameters.keys[argument]
        return ""

    @property
    def advice(self) -> str:
        """The advice, at the end of a message, for several hooks that return a result."""
        mode = "wrap" if self.nexts else "first"
        results = f'{{"{self.name}": "{mode}"}}'
        if self.name == "__call__":
            # The hooks may be functions: `compose_functions` takes a mode, and no names of methods.
            results = f'"{mode}"'
        return (
            f'give results={results}, or "together", "all", "chain" or "wrap"; if it is not'
            " clear which argument is meant, ah.chain(argument=...) or ah.wrap(argument=...)"
        )

    def wraps(self, hook: object) -> bool:
        """Return whether the method of a hook wraps the calls of other hooks.

        It does in the mode "wrap", or if it is an async generator, whose `yield` makes these calls.
        """
        method = getattr(hook, self.name)
        return self.mode == "wrap" or function_kind(method) == ASYNC_GENERATOR

    def value_of(self, result: Any) -> Any:
        """Return the value of a hook's result, which is a `ChainEnd` if the hook has ended a chain.

        Raises:
            InvalidHookError: the result is a `ChainEnd`, and the method is no chain.
        """
        if not isinstance(result, ChainEnd):
            return result
        if self.mode != "chain":
            raise InvalidHookError(
                f"a hook returned end_chain({safe_repr(result.value)}), but {self.label} is no"
                ' chain; return the value, or give results="chain"'
            )
        return result.value


_ARGUMENT_OF = {"chain": "takes the result", "wrap": "calls the next hook"}
"""The modes that are about an argument, and what this argument does, for messages."""


class _Annotations:
    """The evaluated annotations of a method.

    They may refer to the class of the method. No `Point` keeps them, so that the class is freed
    like any other.
    """

    def __init__(
        self,
        kind: type[Any],
        function: types.FunctionType,
        names: Iterable[str],
    ) -> None:
        """Evaluate the annotations of `function`, a method of `kind` with these parameters."""
        # An annotation in quotes may name the class itself. If the class was defined in a function,
        # the name is not in the namespace of the module.
        classes_by_name = {base.__name__: base for base in kind.__mro__}
        annotations = annotations_of(function, classes_by_name)
        self.arguments: dict[str, Any] = {}
        for name in names:
            self.arguments[name] = annotations.get(name, Any)
        self.nexts: list[str] = [
            name for name, annotation in self.arguments.items() if is_next_function(annotation)
        ]
        """The parameters whose argument is a function that calls the next hook."""
        plain, awaited = split_awaitables(annotations.get("return", Any))
        self.returns_awaitable: bool = bool(awaited)
        """Whether the result is an awaitable, always or sometimes."""
        # Lists, and no sets, as annotations need not be hashable.
        self.results: list[Any] = plain + [part for part in awaited if part not in plain]
        """The types that a result may have, awaited or not."""

    def candidates(self, combination: Combination) -> list[str]:
        """Return the arguments that the results of a chain may replace, or that may call the next
        hook of a wrap. Which argument is meant is clear only if there is exactly one.
        """
        if combination.argument is not None:
            return [combination.argument]
        if combination.mode == "wrap":
            if self.nexts:
                return self.nexts
            if not (combination.may_be_last and self.arguments):
                return []
            # It may be the last argument, if this has no annotation, for which Any stands.
            last = list(self.arguments)[-1]
            return [last] if self.arguments[last] is Any else []
        if len(self.arguments) == 1:
            return [*self.arguments]
        # In a chain, it is an argument that may have each result as its value.
        return [name for name in self.arguments if self._takes_results(name)]

    def _takes_results(self, name: str) -> bool:
        """Return whether the annotation of an argument takes every result, apart from None."""
        if Any in self.results:
            # Without an annotation of the result, nothing is known.
            return False
        parts = (*union_parts(self.arguments[name]), types.NoneType)
        return all(part in parts for part in self.results)


# -- annotations


class _Unknown:
    """Stands for a class that is imported for type checkers only. Each name has a subclass.

    With it, an annotation such as `"Request | None"` can be evaluated without an import of
    `Request`, and is equal to the same annotation of another parameter.
    """

    def __class_getitem__(cls, parameters: object) -> Any:
        """Return the class for `Request[int]`, too."""
        return cls


def annotations_of(
    function: Any,
    names: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the evaluated annotations of a function, by parameter, and by "return".

    An annotation that cannot be evaluated stays as it is written.

    Args:
        function: the function.
        names: classes by their names, in addition to the names of the function's module.
    """
    module_name = getattr(function, "__module__", "")
    module = sys.modules.get(module_name, builtins)
    unknown: dict[str, Any] = {}
    namespace = ChainMap[str, Any](
        # Before Python 3.13, the `CoroutineType` of `types` takes no parameters.
        {"CoroutineType": Coroutine},
        {**names},
        vars(module),
        {**vars(builtins)},
        unknown,
    )
    evaluated = written_annotations(function).copy()
    # `get_type_hints` fails if one annotation does, so each is evaluated alone.
    for parameter, annotation in evaluated.items():
        owner = types.SimpleNamespace(__annotations__={parameter: annotation})
        with contextlib.suppress(Exception):
            evaluated.update(_evaluated(owner, namespace, unknown))
    return evaluated


def _evaluated(
    owner: object,
    namespace: Mapping[str, Any],
    unknown: dict[str, Any],
) -> dict[str, Any]:
    """Return the evaluated annotations of an object.

    Args:
        owner: the object.
        namespace: the values of the names in the annotations.
        unknown: a part of `namespace`, to which this adds a class for each name that is missing.
    """
    while True:
        try:
            return typing.get_type_hints(owner, {}, namespace)
        except NameError as error:
            # The name may be in the text of an alias, for which Python 3.14 asks no `__missing__`.
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = type(error.name, (_Unknown,), {})


def written_annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function or a class itself, by name. Some may be texts."""
    try:
        annotations: Any = getattr(owner, "__annotations__", None)
    except NameError:
        # Python 3.14 evaluates annotations when they are read. A name that is imported for type
        # checkers only is missing then, so the annotations are read as texts.
        annotationlib: Any = importlib.import_module("annotationlib")
        annotations = annotationlib.get_annotations(owner, format=annotationlib.Format.STRING)
    # A mock has a mock as each of its attributes.
    is_mock = type(annotations) is not dict
    return {} if is_mock else cast("dict[str, Any]", annotations)


def union_parts(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    # An alias such as `type Name = int | None` has its annotation as `__value__`.
    annotation = getattr(annotation, "__value__", annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (types.NoneType if annotation is None else annotation,)


def class_of(annotation: Any) -> type[Any]:
    """Return the class of an annotation, without its parameters. It is `object` for an annotation
    that is no class, such as a type variable.
    """
    kind = typing.get_origin(annotation) or annotation
    return kind if isinstance(kind, type) else object


def split_awaitables(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Split the members of a union: return those that are no awaitables, and the results of the
    awaitables.

    For `str | Awaitable[int]`, these are `[str]` and `[int]`.
    """
    plain: list[Any] = []
    awaited: list[Any] = []
    for part in union_parts(annotation):
        if issubclass(class_of(part), Awaitable):
            # The result is the last parameter, also of `Coroutine[Any, Any, int]`.
            *_, result = typing.get_args(part) or [Any]
            awaited += union_parts(result)
        else:
            plain.append(part)
    return plain, awaited


_CALLABLE: Any = collections.abc.Callable


def is_next_function(annotation: Any) -> bool:
    """Return whether an argument with this annotation calls the next hook: whether it is a callable
    that returns an awaitable.

    The annotation is a `Callable`, or a class with `__call__`, such as a protocol. A callable whose
    result is not annotated does not count.
    """
    for part in union_parts(annotation):
        _, awaited_results = split_awaitables(_result_of_calls(class_of(part), part))
        if awaited_results:
            return True
    return False


def _result_of_calls(kind: type[Any], annotation: Any) -> Any:
    """Return the annotation of the result of calls of an object, or None if it cannot be called.

    Args:
        kind: the class of the object.
        annotation: the annotation of the object: the class, perhaps with parameters.
    """
    if kind is _CALLABLE:
        *_, result = typing.get_args(annotation) or [Any]
        return result
    # A class without a `__call__` of its own has that of its metaclass, which is no function.
    call = getattr(kind, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(call):
        return Awaitable
    if inspect.isfunction(call):
        return annotations_of(call, {}).get("return", Any)
    return None


def _container(results: Iterable[Any]) -> type[Any]:
    """Return the class of the result of a merge without results: dict, tuple or list.

    Args:
        results: the types that the result may have, as annotated.
    """
    kinds = [class_of(part) for part in results]
    if any(issubclass(kind, Mapping) for kind in kinds):
        return dict
    return tuple if tuple in kinds else list


# -- kinds of functions

PLAIN = "a plain function"
COROUTINE = "a coroutine function"
ASYNC_GENERATOR = "an async generator"


def function_kind(function: Any) -> str:
    """Return the kind of a function, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if type(getattr(code, "co_flags", 0)) is not int:
        # A mock has a mock as each of its attributes.
        return PLAIN
    if is_coroutine_function(function):
        return COROUTINE
    if code is None:
        # It may be an object with `__call__`.
        function = getattr(function, "__call__", None)  # noqa: B004
    if inspect.isasyncgenfunction(function):
        return ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return "a generator"
    if is_coroutine_function(inspect.unwrap(function)):
        return "a plain function around a coroutine function"
    return PLAIN


def _instructions(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the bytecode of a function: the name and the argument of each instruction."""
    instructions = dis.get_instructions(function)
    return [(instruction.opname, instruction.argval) for instruction in instructions]


async def _empty_coroutine() -> None: ...


# The bytecode shows whether a body is empty. The source would, too, but may be missing at run time.
_EMPTY_BODIES = [_instructions(_empty_coroutine), _instructions(lambda: None)]
_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}


def has_empty_body(function: types.FunctionType) -> bool:
    """Return whether the body of a function is empty, or only raises `NotImplementedError`."""
    instructions = _instructions(function)
    # A body that only raises never returns.
    if "NotImplementedError" in function.__code__.co_names:
        return _RETURNS.isdisjoint(name for name, _ in instructions)
    return instructions in _EMPTY_BODIES
