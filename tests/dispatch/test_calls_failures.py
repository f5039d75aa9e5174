"""Failures of a phase: one failure ends it, no hook is left running, and the error names its
hook.
"""

from __future__ import annotations

import pytest

import aiohooks as ah
from tests.support.hooks import five_hooks
from tests.support.sessions import run_once
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


async def test_a_group_among_several_failures_leaves_its_notes_to_its_members() -> None:
    """The members of a flattened group have the hook's note and the group's own notes."""
    group = ExceptionGroup("two rows are bad", [ValueError(1), ValueError(2)])
    group.add_note("in file rows.csv")
    errors = [group, KeyError("b")]

    async def act(number: int, phase: str) -> None:
        if phase == "before_run" and number < len(errors):
            try:
                await (forever() if number else ticks())
            finally:
                raise errors[number]

    with pytest.raises(ExceptionGroup, match="2 calls failed") as raised:
        await run_once(five_hooks(act))
    assert raised.value.exceptions == (*group.exceptions, errors[1])
    for error in group.exceptions:
        assert error.__notes__ == [
            "in file rows.csv",
            "raised by NumberedHook.before_run at step 1",
        ]


async def test_an_error_of_a_call_that_cannot_wait_names_its_hook() -> None:
    """As that of a call in a task does."""

    class Events:
        async def on(self, text: str) -> None: ...

    class Fails:
        async def on(self, text: str) -> None:
            raise OSError(text)

    with pytest.raises(OSError, match="away") as raised:
        await ah.compose(Events, [Fails()]).on("away")
    assert raised.value.__notes__ == ["raised by Fails.on"]
