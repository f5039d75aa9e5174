"""The arguments of a call, by the parameters of the method of the hook interface.

Hooks may use other names, so they get all arguments by position that may be given so.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Args = tuple[Any, ...]
Keywords = Mapping[str, Any]
NO_KEYWORDS: Keywords = {}
Arguments = tuple[Args, Keywords]
"""The arguments of a call by position, and by name."""
NO_ARGUMENTS: Arguments = ((), NO_KEYWORDS)
Key = int | str | None
"""Stands for a parameter: its place if it may be given by position, or else its name. None stands
for no parameter.
"""
Values = dict[Key, Any]
"""The arguments of a call, by the key of their parameter: those of `f(5, unit="s")` are
`{0: 5, "unit": "s"}` if `unit` is keyword-only, and `{0: 5, 1: "s"}` if it is not.
"""


class Parameters:
    """The parameters of a method of a hook interface, without `self`."""

    def __init__(self, member: Any) -> None:
        """Read the parameters of a method, as it stands in its class."""
        # Without annotations, which may refer to the class: nothing here keeps it alive.
        signature = without_annotations(inspect.signature(member))
        _, *parameters = signature.parameters.values()
        self.signature: inspect.Signature = inspect.Signature(parameters)
        self.keys: dict[str, Key] = {}
        """The key of each parameter, except for `*args` and `**kwargs`."""
        self._count = 0  # of the parameters that may be given by position
        self._by_name: dict[str, Key] = {}  # the keys of parameters that may be given by name
        self._defaults: Values = {}
        # An argument for `*args` and one for `**kwargs`, if the method has them.
        self._others: Values = {}
        for place, parameter in enumerate(parameters):
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._others[place] = None
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                self._others["any_other"] = None
                continue
            key: Key = parameter.name
            if parameter.kind is not parameter.KEYWORD_ONLY:
                key = place
                self._count += 1
            self.keys[parameter.name] = key
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                self._by_name[parameter.name] = key
            if parameter.default is not parameter.empty:
                self._defaults[key] = parameter.default
        self.chosen: Key = None
        """The argument that the results of a chain replace, or with which a hook calls the next one
        (`Point._choose_argument` sets it).
        """

    def reject_call(self, signature: inspect.Signature) -> str:
        """Return why a hook with this signature cannot take every call that the method takes.

        The longest and the shortest call are tried. The text is empty if it takes both.
        """
        named: Values = dict.fromkeys(self.keys.values())
        required = named.keys() - self._defaults.keys()
        longest = {**named, **self._others}
        shortest: Values = dict.fromkeys(required)
        try:
            for values in (longest, shortest):
                args, keywords = self.for_hooks(values)
                signature.bind(*args, **keywords)
        except TypeError as error:
            return str(error)
        return ""

    # -- a call

    def values(self, args: Args, keywords: Keywords) -> Values:
        """Return the arguments of a call by their keys.

        Raises:
            TypeError: the method has no parameter for an argument, two arguments for a parameter,
                or none for one that has no default.
        """
        # Otherwise, each parameter has its argument.
        if keywords or len(args) != self._count:
            named = keywords
            if "any_other" in self._others:
                # Before Python 3.13, `bind` rejects the name of a positional-only parameter.
                named = {name: keywords[name] for name in self._by_name if name in keywords}
            self.signature.bind(*args, **named)
        values = self._by_key(keywords)
        values.update(enumerate(args))
        return values

    def _by_key(self, keywords: Keywords) -> Values:
        return {self._by_name.get(name, name): value for name, value in keywords.items()}

    def for_hooks(self, values: Values) -> Arguments:
        """Return the arguments with which hooks are called, by position and by name.

        Hooks may use other names, so all arguments are passed by position that can be. A parameter
        that is left out before another one has its default.
        """
        values_or_defaults = {**self._defaults, **values}
        args = tuple(values_or_defaults[place] for place in self._places(values))
        keywords = {key: value for key, value in values.items() if isinstance(key, str)}
        return args, keywords

    def _places(self, keys: Iterable[Key]) -> range:
        """Return the places from 0 up to the last one among the keys."""
        filled = [key for key in keys if isinstance(key, int)]
        return range(max(filled, default=-1) + 1)

    def chosen_value(self, values: Values) -> Any:
        """Return the chosen argument, or its default, or None."""
        default = self._defaults.get(self.chosen)
        return values.get(self.chosen, default)

    # -- a call of the next hook

    def _passed_keys(self, values: Values) -> list[Key]:
        """Return the keys of the arguments that a hook passes by position to the next one.

        These are the positions without the chosen argument: `request` of `(request, call_next)`.
        Keyword-only arguments follow them if the chosen argument is keyword-only itself, or if the
        method has no other arguments: `request` of `(*, request, call_next)`.
        """
        given = values.keys() - {self.chosen}
        keys: list[Key] = [*self._places(given)]
        positions = {*range(self._count)} - {self.chosen}
        takes_positions = positions or self._count in self._others
        if not takes_positions or isinstance(self.chosen, str):
            named = [key for key in self.keys.values() if isinstance(key, str)]
            keys += [key for key in named if key in given]
        return [key for key in keys if key != self.chosen]

    def changed(
        self,
        values: Values,
        args: Args,
        keywords: Keywords,
    ) -> Values:
        """Return the values with the changes that a hook makes when it calls the next one.

        An argument that is passed by name replaces the value of that name. Arguments that are
        passed by position replace the last positions, apart from the chosen argument: of a method
        `(server, request, call_next)`, `call_next(other)` replaces the request.

        Args:
            values: the values that the hook was called with.
            args: the positions that the hook passes.
            keywords: the keywords that the hook passes.
        """
        by_key = self._by_key(keywords)
        replaced_keys = [key for key in self._passed_keys(values) if key not in by_key]
        if len(args) > len(replaced_keys):
            # The hook passes arguments that its caller has left out, or that the method lacks.
            places: list[Key] = [*range(len(args) + 1)]
            if self.chosen in places:
                places.remove(self.chosen)
            replaced_keys = places[: len(args)]
        last_keys = reversed(replaced_keys)
        by_key.update(zip(last_keys, reversed(args), strict=False))
        return {**values, **by_key}

    def for_function(
        self,
        values: Values,
        function: Callable[..., Any],
    ) -> Arguments:
        """Return the arguments of a call of a function that is no hook, by position and by name.

        It gets the last positions, as many as it takes: the caller of a method `(server, request,
        call_next)` may pass a function of the request, or of both. It gets by name what hooks get
        by name.
        """
        passed_keys = self._passed_keys(values)
        values_or_defaults = {**self._defaults, **values}
        args = tuple(values_or_defaults[key] for key in passed_keys)
        while args and not _takes(function, args):
            args = args[1:]
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
    """Return whether a function takes so many positions, as far as that is known."""
    with contextlib.suppress(ValueError):  # written in C
        try:
            inspect.signature(function).bind_partial(*args)
        except TypeError:
            return False
    return True
