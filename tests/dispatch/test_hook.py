"""How a hook takes part: the values of its registration."""

from __future__ import annotations

import aiohooks as ah
from tests.support.checks import invalid


class Observer:
    async def on(self) -> None: ...


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
