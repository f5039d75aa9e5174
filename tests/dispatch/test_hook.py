"""How a hook takes part: the values of its registration."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.dispatch import HookRegistration
from aiohooks.dispatch.hook import HookOptions
from aiohooks.errors import InvalidArgumentError, InvalidHookError
from tests.support.checks import refused


class Observer:
    async def on(self) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"order": 1.5}, ("order of Observer is 1.5", "lower ones come first")),
        ({"order": True}, ("order of Observer is True",)),
        ({"timeout": 0}, ("timeout of Observer is 0",)),
        ({"on_error": "ignore"}, ("on_error of Observer is 'ignore'",)),
        ({"background": 1}, ("background of Observer is 1",)),
        ({"max_pending": 0}, ("max_pending of Observer is 0",)),
        ({"max_pending": None}, ("max_pending of Observer is None",)),
        ({"disable_after": 0, "on_error": "log"}, ("disable_after of Observer is 0",)),
        ({"on_full": "discard"}, ("on_full of Observer is 'discard'",)),
        ({"retry_secs": 0}, ("retry_secs of Observer is 0",)),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], says: tuple[str, ...]) -> None:
    """The error names the option, the hook and the value, whether it comes from `configure` or a registration."""
    with refused(InvalidArgumentError, *says):
        ah.configure(Observer(), **options)
    with refused(InvalidArgumentError, *says):
        ah.HookGroup(Observer, [HookRegistration(Observer(), **options)])


def test_options_have_names_and_defaults_that_say_something() -> None:
    """`configure` takes the options of a registration, and `on` those of `configure`; what is left out is shown as that."""
    options = [name for name in HookRegistration._fields if name not in ("hook", "given")]
    assert options == list(HookOptions.__annotations__)
    parameters = [one for one in inspect.signature(ah.configure).parameters.values() if one.kind is one.KEYWORD_ONLY]
    assert [(one.name, repr(one.default)) for one in parameters] == [(name, "<unset>") for name in options]
    with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):
        ah.HookGroup(Observer).on(Observer.on, ah.HookGroup, later=1)  # type: ignore[call-overload]


def test_options_of_a_function_are_those_of_its_registration() -> None:
    """Also where `on` decorates; an error names the function."""
    group = ah.HookGroup(Observer)

    async def log() -> None: ...

    assert group.on(Observer.on, order=1)(log) is log
    assert group.on(Observer.on, log, order=2, background=True) is log
    for options, says in (({"order": 1.5}, "order of log is 1.5"), ({"timeout": 0}, "timeout of log is 0")):
        with refused(InvalidArgumentError, says):
            group.on(Observer.on, log, **options)


def test_limits_may_be_as_small_as_one() -> None:
    """One pending call and one failure are the least."""
    registration = ah.configure(Observer(), background=True, max_pending=1, disable_after=1, on_error="log")
    assert (registration.max_pending, registration.disable_after) == (1, 1)


def test_a_number_of_pending_calls_needs_calls_that_pend() -> None:
    """Without `background` it would have no effect; a registration may have that already, and a program decide it elsewhere."""
    with refused(InvalidHookError, "max_pending of Observer is 3, but its calls are not queued", "background=True"):
        ah.configure(Observer(), max_pending=3)
    with refused(InvalidHookError, "on_full of Observer is drop", "background=True"):
        ah.configure(Observer(), on_full="drop")
    with refused(InvalidHookError, "disable_after of Observer is 3", 'on_error="log"'):
        ah.configure(Observer(), disable_after=3)
    with refused(InvalidHookError, "retry_secs of Observer is 3", "give disable_after"):
        ah.configure(Observer(), on_error="log", retry_secs=3)
    assert ah.configure(ah.configure(Observer(), background=True), max_pending=3).max_pending == 3
    assert ah.configure(Observer(), background=False, max_pending=3).max_pending == 3


def test_in_order_takes_a_whole_number() -> None:
    """Also without hooks."""
    with refused(InvalidArgumentError, "first is 0.5", "whole number"):
        ah.in_order([], first=0.5)  # type: ignore[arg-type]


def test_a_registration_of_a_registration_is_refused() -> None:
    """`configure` changes a registration; a registration made by hand takes the hook itself."""
    with refused(InvalidHookError, "is a registration of a registration", "give the hook"):
        ah.configure(HookRegistration(ah.configure(Observer())))
