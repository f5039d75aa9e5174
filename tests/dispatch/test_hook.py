"""How a hook takes part: the values of its registration."""

from __future__ import annotations

import pytest

import aiohooks as ah
from aiohooks.dispatch import HookRegistration
from aiohooks.dispatch.hook import HookOptions
from tests.support.checks import invalid


class Observer:
    async def on(self) -> None: ...


def test_options_have_names_and_defaults_that_say_something() -> None:
    """`configure` takes the options of a registration, and `on` those of `configure`; what is left
    out is shown as that.
    """
    options = [name for name in HookRegistration._fields if name not in ("hook", "given")]
    assert options == list(HookOptions.__annotations__)
    with pytest.raises(TypeError, match="unexpected keyword argument 'odrer'"):
        ah.configure(Observer(), odrer=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'later'"):
        ah.HookGroup(Observer).on(Observer.on, ah.HookGroup, later=1)  # type: ignore[call-overload]


def test_options_of_a_function_are_those_of_its_registration() -> None:
    """Also where `on` decorates; an error names the function."""
    group = ah.HookGroup(Observer)

    async def log() -> None: ...

    assert group.on(Observer.on, order=1)(log) is log
    assert group.on(Observer.on, order=2, background=True)(log) is log
    for options, says in (
        ({"order": 1.5}, "order of log is 1.5"),
        ({"timeout": 0}, "timeout of log is 0"),
    ):
        with invalid(says):
            group.on(Observer.on, **options)(log)
