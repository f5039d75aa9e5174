"""The arguments of a call, by the names that the method of the hook interface has for them.

Hooks may use other names, so that they get by position what may be given so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]
Key = str | int
"""The name of an argument, or the place of one that is given by position only."""
Values = dict[Key, Any]
"""The arguments that a caller gives, in order of the parameters; then those for `*args`, whose keys
are places, and those for `**keywords`.
"""


class Parameters:
    """The parameters of a method of a hook interface, without `self`."""

    def __init__(self, member: Any) -> None:
        """Read the parameters of a method, as it stands in its class."""
        function = getattr(member, "__func__", member)
        # Without annotations, which may refer to the class: nothing here keeps it alive.
        parameters = [
            parameter.replace(annotation=parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
        ]
        if not isinstance(member, staticmethod):
            del parameters[0]
        self.signature: inspect.Signature = inspect.Signature(parameters)
        self.by_position: dict[str, Key] = {}
        """The keys of those that may be given by position, by name."""
        self.keyword_only: list[str] = []
        self.takes_more_positions: bool = False
        self.takes_more_keywords: bool = False
        self._defaults: dict[Key, Any] = {}
        for place, parameter in enumerate(parameters):
            self._add(place, parameter)
        self._keys: tuple[Key, ...] = tuple(self.by_position.values())
        self.chosen: str | None = None
        """The argument that results replace, or that calls the next hook; None for the last one."""

    def _add(self, place: int, parameter: inspect.Parameter) -> None:
        key: Key = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            self.takes_more_positions = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            self.takes_more_keywords = True
        elif parameter.kind is parameter.KEYWORD_ONLY:
            self.keyword_only.append(parameter.name)
        else:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                key = place
            self.by_position[parameter.name] = key
        if parameter.default is not parameter.empty:
            self._defaults[key] = parameter.default

    @property
    def names(self) -> list[str]:
        """The names of all parameters, but not of those that take any others."""
        return [*self.by_position, *self.keyword_only]

    def unknown(self, keywords: Keywords) -> dict[str, Any]:
        """Return the keywords that the method has no parameter for."""
        if self.takes_more_keywords:
            return {}
        return {name: keywords[name] for name in keywords if name not in self.names}

    def reject_call(self, signature: inspect.Signature) -> str:
        """Return why a hook with this signature cannot take every call that the method takes.

        The longest and the shortest call are tried; the text is empty if it takes both.
        """
        more_keywords = ["any_other"] * self.takes_more_keywords
        longest = len(self._keys) + self.takes_more_positions, [*self.keyword_only, *more_keywords]
        needed = [key for key in self._keys if key not in self._defaults]
        needed_keywords = [name for name in self.keyword_only if name not in self._defaults]
        try:
            for positions, keywords in (longest, (len(needed), needed_keywords)):
                signature.bind(*[None] * positions, **dict.fromkeys(keywords))
        except TypeError as error:
            return str(error)
        return ""

    # -- a call

    def values(self, args: tuple[Any, ...], keywords: Keywords) -> Values:
        """Return the arguments of a call by their keys.

        A parameter that is left out before another one has its default there, but not if only the
        chosen argument comes after it: what calls the next hook is no value of the call.

        Raises:
            TypeError: an argument is given twice, or one that is left out has no default.
        """
        values: Values = dict(zip(self._keys, args, strict=False))
        values.update(enumerate(args[len(self._keys) :], len(self._keys)))
        if not keywords:
            return values
        if not values.keys().isdisjoint(keywords):
            self.signature.bind(*args, **keywords)  # it raises, and names what is given twice
        values.update(keywords)
        return self._filled(self._sorted(values), without=self.chosen_key(values))

    def _filled(self, values: Values, *, without: Key | None = None) -> Values:
        """Return the values with the defaults of parameters that are left out before another one.

        A parameter that is left out before `without` alone keeps being left out.
        """
        given = [place for place, key in enumerate(self._keys) if key in values and key != without]
        before = self._keys[: max(given, default=0)]
        left_out = [key for key in before if key not in values]
        if not self._defaults.keys() >= set(left_out):
            args, keywords = self.spread(values)
            self.signature.bind(*args, **keywords)  # it raises, and names what is missing
        defaults = {key: self._defaults[key] for key in left_out}
        return self._sorted({**values, **defaults}) if defaults else values

    def _sorted(self, values: Values) -> Values:
        places = sorted(key for key in values if isinstance(key, int))
        order = dict.fromkeys((*self._keys, *self.keyword_only, *places))
        return {key: values[key] for key in order if key in values} | values

    def spread(self, values: Values) -> Arguments:
        """Return the positions and the keywords of a call with these values.

        Parameters are passed by position until one is left out, and the others by name.
        """
        keywords: dict[Any, Any] = dict(values)
        args: list[Any] = []
        for key in self._keys:
            if key not in values:
                break
            args.append(keywords.pop(key))
        # There are values for `*args` only if no parameter before them is left out.
        places = [key for key in keywords if isinstance(key, int)]
        args.extend(keywords.pop(place) for place in places)
        return tuple(args), keywords

    def for_hooks(self, values: Values) -> Arguments:
        """Return the positions and the keywords of a call of hooks with these values.

        Hooks may use other names for what can be passed by position, so all of that is.

        Raises:
            TypeError: a parameter that is left out before another one has no default.
        """
        return self.spread(self._filled(values))

    def call_for_hooks(self, args: tuple[Any, ...], keywords: Keywords) -> Arguments:
        """Return the arguments of a call of the object as those of a call of hooks."""
        if not keywords:
            return args, keywords
        return self.for_hooks(self.values(args, keywords))

    # -- the chosen argument

    @property
    def chosen_place(self) -> Key | None:
        """The place of the chosen argument, or its name if it is passed by name only."""
        if self.chosen in self.by_position:
            return [*self.by_position].index(self.chosen)
        return self.chosen

    def chosen_key(self, values: Values) -> Key:
        """Return the key of the chosen argument."""
        if self.chosen is not None:
            return self.by_position.get(self.chosen, self.chosen)
        places = [key for key in values if isinstance(key, int)]
        return max(places, default=next(reversed(values), 0))

    def chosen_value(self, values: Values) -> Any:
        """Return the chosen argument, or its default, or None."""
        key = self.chosen_key(values)
        return values.get(key, self._defaults.get(key))

    def changed(
        self,
        values: Values,
        args: tuple[Any, ...],
        keywords: Keywords,
        *,
        may_drop: bool,
    ) -> Values:
        """Return the values with the changes that a hook makes when it calls the next one.

        What is passed by name replaces the value of that name, and what is passed by position the
        last positions, apart from the chosen argument.

        Args:
            values: the values that the hook was called with.
            args: what the hook passes by position.
            keywords: what the hook passes by name.
            may_drop: whether positions without a value to replace are dropped.

        Raises:
            TypeError: there are such positions, and they must not be dropped.
        """
        changed: Values = dict(values)
        changed.update(keywords)
        chosen = self.chosen_key(values)
        fixed = {chosen, *keywords}
        replaced = self._positions(values, fixed)
        for key in self._keys:
            # The hook passes what its own caller has left out.
            is_left_out = key not in changed and key in self._defaults
            if is_left_out and len(replaced) < len(args):
                replaced.append(key)
        if not replaced:
            replaced = [key for key in self.keyword_only if key in values and key not in fixed]
        excess = len(args) - len(replaced)
        if excess > 0 and self.takes_more_positions:
            replaced += self._more_places(changed, chosen, excess)
        elif excess > 0 and not may_drop:
            raise TypeError(
                f"the next one is called with {len(args)} positional arguments, but it has"
                f" {len(replaced)} beside the one that calls the next"
            )
        places = [*self._sorted(dict.fromkeys(replaced))]
        changed.update(zip(reversed(places), reversed(args), strict=False))
        return self._sorted(changed)

    def _positions(self, values: Values, fixed: set[Key]) -> list[Key]:
        """Return the keys of values that are passed by position, except those that are fixed."""
        return [
            key
            for key in values
            if key not in fixed and (isinstance(key, int) or key in self._keys)
        ]

    def _more_places(self, values: Values, chosen: Key, count: int) -> list[Key]:
        """Return further places of `*args`; the chosen argument is moved behind them if it is the
        last.
        """
        places = [key for key in values if isinstance(key, int)]
        first = max(places, default=len(self._keys) - 1) + 1
        if self.chosen is None:
            first -= 1
            values[first + count] = values.pop(chosen)
        return [*range(first, first + count)]

    def for_function(self, values: Values, function: Callable[..., Any]) -> Arguments:
        """Return the positions and the keywords of a call of a function that is no hook.

        It gets the last positions, as many as it takes, and by name what it has a parameter for. If
        the method has keyword-only parameters alone, these are the positions.
        """
        parameters = _parameters(function)
        most = _most_positions(parameters, len(values))
        positions: list[Key] = []
        if most:
            positions = self._positions(values, set()) or self._without_place(values, parameters)
        keywords = {
            key: value
            for key, value in values.items()
            if isinstance(key, str) and key not in positions and _takes_name(parameters, key)
        }
        args = [values[key] for key in positions]
        return tuple(args[-most:]), keywords

    def _without_place(
        self,
        values: Values,
        parameters: Iterable[inspect.Parameter],
    ) -> list[Key]:
        """Return keyword-only parameters of the method that a function does not take by name."""
        return [
            name
            for name in self.keyword_only
            if name in values and not _takes_name(parameters, name)
        ]


def _takes_name(parameters: Iterable[inspect.Parameter], name: str) -> bool:
    """Return whether a function takes an argument of this name by name."""
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return True
        if parameter.name == name and parameter.kind is parameter.KEYWORD_ONLY:
            return True
    return False


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; of one that does not tell them, any."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def _most_positions(parameters: Iterable[inspect.Parameter], most: int) -> int:
    """Return how many positional arguments a function takes, `most` at most."""
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return most
    return min(most, len(positional))
