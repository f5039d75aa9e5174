"""The arguments of a call, by the parameters of the method of the hook interface.

Hooks may use other names, so that they get by position what may be given so.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]
"""What a call passes by position, and by name."""
NO_ARGUMENTS: Arguments = ((), {})
Key = int | str | None
"""The place of an argument that may be given by position, or the name of another one; None for no
argument.
"""
Values = dict[Key, Any]
"""The arguments of a call."""
LAST = sys.maxsize
"""The place of the last of `*args`, where that is the chosen argument."""


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
        kinds = [parameter.kind for parameter in parameters]
        self.takes_more_positions: bool = inspect.Parameter.VAR_POSITIONAL in kinds
        self.takes_more_keywords: bool = inspect.Parameter.VAR_KEYWORD in kinds
        self._count: int = sum(kind in _POSITIONAL for kind in kinds)
        self.keys: dict[str, Key] = {}
        """The key of each parameter, but not of those that take any others."""
        self._by_name: dict[str, Key] = {}  # of those that may be given by name
        self._defaults: Values = {}
        for place, parameter in enumerate(parameters):
            key = place if parameter.kind in _POSITIONAL else parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            self.keys[parameter.name] = key
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                self._by_name[parameter.name] = key
            if parameter.default is not parameter.empty:
                self._defaults[key] = parameter.default
        if not self.keys and self.takes_more_positions:
            self.keys[parameters[0].name] = LAST
        self.chosen: Key = None
        """The argument that results replace, or that calls the next hook."""

    def reject_call(self, signature: inspect.Signature) -> str:
        """Return why a hook with this signature cannot take every call that the method takes.

        The longest and the shortest call are tried; the text is empty if it takes both.
        """
        longest: Values = dict.fromkeys(self.keys.values())
        shortest: Values = dict.fromkeys(longest.keys() - self._defaults.keys() - {LAST})
        if self.takes_more_positions:
            longest[LAST] = None
        if self.takes_more_keywords:
            longest["any_other"] = None
        try:
            for values in (longest, shortest):
                args, keywords = self.for_hooks(values)
                signature.bind(*args, **keywords)
        except TypeError as error:
            return str(error)
        return ""

    # -- a call

    def values(self, args: tuple[Any, ...], keywords: Keywords) -> Values:
        """Return the arguments of a call by their keys.

        Raises:
            TypeError: the method has no parameter for an argument, two arguments for a parameter,
                or none for one that has no default.
        """
        if keywords or len(args) != self._count:
            named = keywords
            if self.takes_more_keywords:
                # Before Python 3.13, `bind` rejects the name of a positional-only parameter.
                named = {name: keywords[name] for name in self._by_name if name in keywords}
            self.signature.bind(*args, **named)
        values = {self._by_name.get(name, name): value for name, value in keywords.items()}
        values.update(enumerate(args))
        if self.chosen == LAST and values:
            _, values[LAST] = values.popitem()
        return values

    def for_hooks(self, values: Values) -> Arguments:
        """Return the positions and the keywords of a call with these values.

        Hooks may use other names for what can be passed by position, so all of that is. A parameter
        that is left out before another one has its default.
        """
        filled = {**self._defaults, **values}
        args = [filled[place] for place in self._places(values)]
        return tuple(args), {key: values[key] for key in values if isinstance(key, str)}

    def _places(self, values: Values, ignored: Key = None) -> list[int]:
        """Return the places up to the last one that has a value, apart from an ignored one."""
        given = [key for key in values if isinstance(key, int) and key != ignored]
        left_out = range(min(self._count, max(given, default=0)))
        return sorted({*given, *left_out} - {ignored})

    def call_for_hooks(self, args: tuple[Any, ...], keywords: Keywords) -> Arguments:
        """Return the arguments of a call of the object as those of a call of hooks."""
        if not keywords:
            return args, keywords
        return self.for_hooks(self.values(args, keywords))

    def chosen_value(self, values: Values) -> Any:
        """Return the chosen argument, or its default, or None."""
        return {**self._defaults, **values}.get(self.chosen)

    # -- a call of the next hook

    def _passed_keys(self, values: Values) -> list[Key]:
        """Return the keys of the arguments that hooks pass by position to the next one.

        Keyword-only ones are among them if the chosen argument is one itself, or if there are no
        others.
        """
        keys: list[Key] = [*self._places(values, self.chosen)]
        if isinstance(self.chosen, str) or not keys:
            keys += [key for key in self.keys.values() if isinstance(key, str) and key in values]
        return [key for key in keys if key != self.chosen]

    def changed(self, values: Values, args: tuple[Any, ...], keywords: Keywords) -> Values:
        """Return the values with the changes that a hook makes when it calls the next one.

        What is passed by name replaces the value of that name, and what is passed by position the
        last positions, apart from the chosen argument.

        Args:
            values: the values that the hook was called with.
            args: what the hook passes by position.
            keywords: what the hook passes by name.
        """
        named = {self._by_name.get(name, name): value for name, value in keywords.items()}
        changed = {**values, **named}
        replaced = [key for key in self._passed_keys(changed) if key not in named]
        # The hook passes what its own caller has left out, or more than the method takes.
        unused = (key for key in itertools.count() if key not in changed and key != self.chosen)
        excess = max(0, len(args) - len(replaced))
        changed.update(dict.fromkeys(itertools.islice(unused, excess)))
        replaced = [key for key in self._passed_keys(changed) if key not in named]
        changed.update(zip(reversed(replaced), reversed(args), strict=False))
        return changed

    def for_function(self, values: Values, function: Callable[..., Any]) -> Arguments:
        """Return the positions and the keywords of a call of a function that is no hook.

        It gets the last positions, as many as it takes, and by name what it takes by name only.
        """
        filled = {**self._defaults, **values}
        passed = self._passed_keys(values)
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # it is written in C
            return tuple(filled[key] for key in passed), {}
        kinds = [parameter.kind for parameter in parameters]
        names = {parameter.name for parameter in parameters if parameter.kind is _KEYWORD_ONLY}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            names.update(key for key in values if isinstance(key, str))
        names.discard(str(self.chosen))
        args = [filled[key] for key in passed if key not in names]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            most = sum(kind in _POSITIONAL for kind in kinds)
            args = args[max(0, len(args) - most) :]
        return tuple(args), {name: values[name] for name in names if name in values}


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
