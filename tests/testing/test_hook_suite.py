"""The conformance suite of hooks, of sessions and of any class: a bad one fails the check that is
about it, a good one none.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.dispatch import HookRegistration
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import RecordingHook, check_hook, hook_checks
from tests.support.sessions import counting_graph, double

pytestmark = pytest.mark.every_python

current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")


class Losses(ah.SessionRunHook):
    """Does all that a hook may do: it waits, asks for a value, has a task of its own, a state and a
    context variable.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.best = float("inf")

    async def begin(self) -> None:
        self.losses.clear()
        await asyncio.sleep(0)

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        coord.start_soon(coord.wait_for_stop)
        await asyncio.sleep(0)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        token = current.set("in a run")
        await asyncio.sleep(0)
        current.reset(token)
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(0)
        self.losses.append(run_values.results)
        self.best = min(self.best, run_values.results)

    async def end(self, session: ah.Session) -> None:
        await asyncio.sleep(0)

    async def close(self, exc: BaseException | None) -> None:
        await asyncio.sleep(0)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        self.best = state["best"]


@pytest.mark.parametrize("check", hook_checks())
async def test_a_good_hook_passes(check: str) -> None:
    """A hook that waits in each method, starts a task and has a state passes each check."""
    await check_hook(Losses, check)


async def test_all_checks_run_on_a_graph() -> None:
    """Without a name all checks are run; the author's own graph and fetches are used, and
    registrations are hooks.
    """
    made: list[Losses] = []

    def make() -> HookRegistration:
        made.append(Losses())
        return ah.configure(made[-1], timeout=60)

    await check_hook(make, make_source=counting_graph, fetches="train")
    assert {loss for hook in made for loss in hook.losses} == {10}
    assert len(made) > 40


class FailsInEnd(Losses):
    async def end(self, session: ah.Session) -> None:
        raise OSError("in end")


class NeedsARun(Losses):
    async def end(self, session: ah.Session) -> None:
        assert self.losses[-1] == 1.0


class NeedsTwoRuns(Losses):
    async def end(self, session: ah.Session) -> None:
        assert len(self.losses) != 1, "one run is too few"


class BeginsOnce(Losses):
    begun = False

    async def begin(self) -> None:
        assert not self.begun, "begun again"
        self.begun = True


class IsCreatedOnce(Losses):
    created = False

    async def after_create_session(self, *_: object) -> None:
        assert not self.created, "created again"
        self.created = True


class AnswersErrors(Losses):
    async def close(self, exc: BaseException | None) -> None:
        if isinstance(exc, OSError):
            raise RuntimeError("instead")


class WaitsAfterACancel(ah.SessionRunHook):
    async def after_run(self, *_: object) -> None:
        try:
            await asyncio.sleep(0)  # where tasks are eager, before anything waits for them
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.Event().wait()


class LeavesATask(ah.SessionRunHook):
    tasks: list[asyncio.Task[Any]] = []  # noqa: RUF012 - of all of them, to be ended by the test

    async def before_run(self, *_: object) -> None:
        self.tasks.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
        await asyncio.sleep(0)


class ForgetsTheBest(Losses):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class IsRenamed(Losses):
    """Two objects of it have another name in the checkpoint, so that nothing is ever loaded."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).count += 1
        self.name = f"losses {self.count}"


@pytest.mark.parametrize(
    ("make", "check", "why"),
    [
        (FailsInEnd, "ends_cleanly", "in end"),
        (NeedsARun, "ends_without_a_run", "list index out of range"),
        (NeedsTwoRuns, "ends_at_a_stop", "one run is too few"),
        (BeginsOnce, "works_again", "begun again"),
        (IsCreatedOnce, "recovers", "created again"),
        (AnswersErrors, "leaves_errors_alone", "in begin'. was to be raised alone, and OSError"),
        (WaitsAfterACancel, "passes_on_cancels", "tasks are left: WaitsAfterACancel.after_run"),
        (ForgetsTheBest, "restores_its_state", "'best': 1.0}, and is .*'best': inf}"),
        (IsRenamed, "restores_its_state", r"and is {'losses': \[\], 'best': inf}"),
    ],
)
async def test_a_bad_hook_fails(make: Callable[[], Any], check: str, why: str) -> None:
    """The check for what the hook gets wrong fails, says what it was, and has the name of the check
    as a note.
    """
    with pytest.raises((AssertionError, LookupError, OSError), match=why) as caught:
        await check_hook(make, check)
    assert f"this fails the check {check}:" in " ".join(caught.value.__notes__)


@pytest.mark.may_leak
@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("ends_cleanly", "leaks:\n  - task 'forgotten' still runs, waits at Event.wait"),
        ("passes_on_cancels", "tasks are left: forgotten"),
    ],
)
async def test_a_hook_that_leaks_fails(check: str, why: str) -> None:
    """What a hook leaves behind is found after each check, and when it was cut off."""
    with pytest.raises(AssertionError, match=why):
        await check_hook(LeavesATask, check)
    while LeavesATask.tasks:
        LeavesATask.tasks.pop().cancel()


async def test_an_unknown_check_is_refused() -> None:
    """The error lists known ones."""
    with pytest.raises(
        InvalidArgumentError, match=r"unknown check 'cancels'; .*known are: .*passes_on_cancels"
    ):
        await check_hook(RecordingHook, "cancels")


async def test_a_hook_may_stop_the_session() -> None:
    """A hook that stops the session after its first run passes all checks."""
    await check_hook(lambda: ah.StopAtStepHook(num_steps=1), make_source=lambda: double)
