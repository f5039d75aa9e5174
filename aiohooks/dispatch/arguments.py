"""The arguments of a call, by the names that the method of the hook interface has for them.

Hooks may use other names, so that they get by position what may be given so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]
"""What a call passes by position, and by name."""
NO_ARGUMENTS: Arguments = ((), {})
Key = str | int
"""The name of an argument, or the place of one that is given by position only; `LAST` is the last
of `*args`.
"""
Values = dict[Key, Any]
"""The arguments that a caller gives, in order of the parameters."""
LAST = sys.maxsize


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
        self.takes_more_positions: bool = False
        self.takes_more_keywords: bool = False
        self._positional: dict[str, Key] = {}  # the keys of those that may be given by position
        self._keyword_only: list[str] = []
        self._defaults: dict[Key, Any] = {}
        for place, parameter in enumerate(parameters):
            key: Key = parameter.name
            if parameter.kind is parameter.VAR_POSITIONAL:
                self.takes_more_positions = True
            elif parameter.kind is parameter.VAR_KEYWORD:
                self.takes_more_keywords = True
            elif parameter.kind is parameter.KEYWORD_ONLY:
                self._keyword_only.append(parameter.name)
            else:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    key = place  # there may be a keyword of its name
                self._positional[parameter.name] = key
            if parameter.default is not parameter.empty:
                self._defaults[key] = parameter.default
        self._keys: tuple[Key, ...] = tuple(self._positional.values())
        self.chosen: str | None = None
        """The argument that results replace, or that calls the next hook; None for the last one."""

    @property
    def names(self) -> list[str]:
        """The names of all parameters, but not of those that take any others."""
        return [*self._positional, *self._keyword_only]

    def reject_call(self, signature: inspect.Signature) -> str:
        """Return why a hook with this signature cannot take every call that the method takes.

        The longest and the shortest call are tried; the text is empty if it takes both.
        """
        more_keywords = ["any_other"] * self.takes_more_keywords
        count = len(self._keys) + self.takes_more_positions
        longest = count, [*self._keyword_only, *more_keywords]
        needed = [key for key in self._keys if key not in self._defaults]
        needed_keywords = [name for name in self._keyword_only if name not in self._defaults]
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
            TypeError: the method has no parameter for an argument, two arguments for a parameter,
                or none for one that has no default.
        """
        values: Values = dict(zip(self._keys, args, strict=False))
        more = args[len(self._keys) :]
        # Not where any keyword is taken: `bind` rejects the name of a positional-only parameter.
        is_unclear = not self.takes_more_keywords or not values.keys().isdisjoint(keywords)
        has_too_many = bool(more) and not self.takes_more_positions
        if has_too_many or (keywords and is_unclear):
            self.signature.bind(*args, **keywords)  # it raises if the method would
        if more:
            values.update(enumerate(more[:-1], len(self._keys)))
            values[LAST] = more[-1]
        if not keywords:
            return values
        values.update(keywords)
        return self._filled(values, without=self.chosen_key(values))

    def _filled(self, values: Values, *, without: Key | None = None) -> Values:
        """Return the values with the defaults of parameters that are left out before another one.

        A parameter that is left out before `without` alone keeps being left out.
        """
        filled: Values = {}
        left_out: list[Key] = []
        for key in self._keys:
            if key not in values:
                left_out.append(key)
                continue
            if key != without:
                filled.update((key, self._default(key)) for key in left_out)
                left_out = []
            filled[key] = values[key]
        return {**filled, **values}

    def _default(self, key: Key) -> Any:
        if key not in self._defaults:
            raise TypeError(f"missing a required argument: {key!r}")
        return self._defaults[key]

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
        args += [keywords.pop(place) for place in self._more_places(values)]
        return tuple(args), keywords

    def for_hooks(self, values: Values) -> Arguments:
        """Return the positions and the keywords of a call of hooks with these values.

        Hooks may use other names for what can be passed by position, so all of that is.
        """
        return self.spread(self._filled(values))

    def call_for_hooks(self, args: tuple[Any, ...], keywords: Keywords) -> Arguments:
        """Return the arguments of a call of the object as those of a call of hooks."""
        if not keywords:
            return args, keywords
        return self.for_hooks(self.values(args, keywords))

    # -- the chosen argument

    def chosen_key(self, values: Values) -> Key:
        """Return the key of the chosen argument."""
        if self.chosen is not None:
            return self._positional.get(self.chosen, self.chosen)
        if LAST in values:
            return LAST
        return next(reversed(values), LAST)

    def chosen_value(self, values: Values) -> Any:
        """Return the chosen argument, or its default, or None."""
        key = self.chosen_key(values)
        return values.get(key, self._defaults.get(key))

    def _passed_keys(self, values: Values) -> list[Key]:
        """Return the keys of the values that hooks pass by position when they call the next one.

        Keyword-only ones are among them if the chosen argument is one itself, or if there are no
        others.
        """
        keys: list[Key] = [key for key in self._keys if key in values]
        keys += self._more_places(values)
        chosen = self.chosen_key(values)
        if chosen in self._keyword_only or not {*keys} - {chosen}:
            keys += [name for name in self._keyword_only if name in values]
        return [key for key in keys if key != chosen]

    def _more_places(self, values: Values) -> list[int]:
        """Return the keys of values for `*args`, in order."""
        return sorted(key for key in values if isinstance(key, int) and key >= len(self._keys))

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
            may_drop: whether what the method has no parameter for is dropped.

        Raises:
            TypeError: there are such positions, and they must not be dropped.
        """
        changed: Values = dict(values)
        for name, value in keywords.items():
            if name in self.names or self.takes_more_keywords or not may_drop:
                changed[name] = value
        replaced = [key for key in self._passed_keys(changed) if key not in keywords]
        # The hook passes what its own caller has left out.
        chosen = self.chosen_key(values)
        left_out = [key for key in self._keys if key not in changed and key != chosen]
        added: list[Key] = [*left_out[: max(0, len(args) - len(replaced))]]
        excess = len(args) - len(replaced) - len(added)
        if excess > 0 and self.takes_more_positions:
            places = [place for place in self._more_places(changed) if place != LAST]
            first = len(self._keys) + len(places)
            added += range(first, first + excess)
        elif excess > 0 and not may_drop:
            raise TypeError(
                f"the next one is called with {len(args)} positional arguments, but it has"
                f" {len(args) - excess} beside the one that calls the next"
            )
        # In order of the parameters, which need not be the order in which they were given.
        changed.update(dict.fromkeys(added))
        replaced = [key for key in self._passed_keys(changed) if key not in keywords]
        changed.update(zip(reversed(replaced), reversed(args), strict=False))
        return changed

    def for_function(self, values: Values, function: Callable[..., Any]) -> Arguments:
        """Return the positions and the keywords of a call of a function that is no hook.

        It gets the last positions, as many as it takes, and by name what it takes by name only.
        """
        passed = self._passed_keys(values)
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # it is written in C
            return tuple(values[key] for key in passed), {}
        kinds = [parameter.kind for parameter in parameters.values()]
        names = {name for name in parameters if parameters[name].kind is _KEYWORD_ONLY}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            names.update(key for key in values if isinstance(key, str))
        names.difference_update(self._keys, [self.chosen_key(values)])
        args = [values[key] for key in passed if key not in names]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            most = sum(kind in _POSITIONAL for kind in kinds)
            args = args[max(0, len(args) - most) :]
        return tuple(args), {name: values[name] for name in names if name in values}


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
