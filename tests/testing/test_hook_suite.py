"""The conformance suite of hooks, of sessions and of any class: a bad one fails the check that is
about it, a good one none.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
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
        self.losses, self.best = list(state["losses"]), state["best"]


class AgentHooks:
    """A lifecycle with a method of each kind."""

    async def on_start(self, agent: str) -> None: ...
    async def on_tool(self, tool: str, *, depth: int = 0) -> None: ...
    @ah.point("first")
    async def decide(self, call: Any) -> str | None: ...
    @ah.point("chain")
    async def rewrite(self, prompt: str) -> str:
        return prompt

    @ah.point("wrap")
    async def call_tool(self, call: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call_next(call)

    def on_log(self, line: str) -> None: ...


async def call_next(call: Any) -> Any:
    await asyncio.sleep(0)
    return call


GIVEN: dict[str, Any] = {"call_tool": ("call", call_next)}
GROUP: dict[str, Any] = {"kind": AgentHooks}


class Good(AgentHooks):
    """Implements all of them, and waits in each; it has a task, a context variable and a block of
    its own.
    """

    async def __aenter__(self) -> None:
        self.seen: list[Any] = []

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def on_start(self, agent: str) -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        token = current.set(tool)
        try:
            await asyncio.sleep(0)
        finally:
            current.reset(token)

    async def decide(self, call: Any) -> str | None:
        self.seen.append(call)
        await asyncio.sleep(0)
        return "no"

    async def rewrite(self, prompt: str) -> str:
        return f"{prompt}!"

    async def call_tool(self, call: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call_next(call)

    def on_log(self, line: str) -> None:
        self.seen.append(line)


class InSlots:
    """Derives from nothing and has no `__dict__`."""

    __slots__ = ("count",)
    count: int

    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        await asyncio.sleep(0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be changed."""

    async def on_start(self, agent: str) -> None:
        await asyncio.sleep(0)


class Around:
    """An async generator."""

    async def on_start(self, agent: str) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)


@pytest.mark.parametrize("check", hook_checks())
async def test_a_good_hook_passes(check: str) -> None:
    """A hook that waits in each method, starts a task and has a state passes each check."""
    await check_hook(Losses, check)


@pytest.mark.parametrize("check", hook_checks(kind=AgentHooks))
@pytest.mark.parametrize(
    "make",
    [Good, InSlots, Frozen, Around, lambda: ah.configure(InSlots(), timeout=60, on_error="log")],
)
async def test_good_hooks_of_a_class_pass(make: Callable[[], Any], check: str) -> None:
    """A hook of whatever class passes each check; a method is called with what is given, or with
    None.
    """
    calls = GIVEN | {"decide": {"call": 3}} if make is Good else None
    await check_hook(make, check, kind=AgentHooks, calls=calls)


async def test_all_checks_run_on_a_graph() -> None:
    """Without a name all checks are run; the author's own graph, fetches and feeds are used, and
    registrations are hooks.
    """
    made: list[Losses] = []

    def make() -> HookRegistration:
        made.append(Losses())
        return ah.configure(made[-1], timeout=60)

    await check_hook(make, make_source=counting_graph, fetches="train", feed_dict={"x": 3})
    assert {loss for hook in made for loss in hook.losses} == {30}
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


class NeedsItsSession(Losses):
    session: ah.Session

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.session = session

    async def close(self, exc: BaseException | None) -> None:
        assert self.session.closed


class AnswersErrors(Losses):
    async def close(self, exc: BaseException | None) -> None:
        if isinstance(exc, OSError):
            raise RuntimeError("instead")


class SwallowsCancels(ah.SessionRunHook):
    async def after_run(self, *_: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    on_start = after_run


class AnswersCancels(InSlots):
    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise RuntimeError("instead") from None


class LeavesATask(ah.SessionRunHook):
    tasks: list[asyncio.Task[Any]] = []  # noqa: RUF012 - of all of them, to be ended by the test

    async def before_run(self, *_: object) -> None:
        self.tasks.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
        await asyncio.sleep(0)

    async def on_start(self, agent: str) -> None:
        await self.before_run()


class SetsAVariable(ah.SessionRunHook):
    async def after_run(self, *_: object) -> None:
        current.set("left behind")

    on_start = after_run


class WorksOnce(Good):
    async def __aenter__(self) -> None:
        assert not hasattr(self, "seen"), "used before"
        await super().__aenter__()


class NeedsATool(InSlots):
    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        tool.upper()


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
    ("make", "check", "options", "why"),
    [
        (FailsInEnd, "ends_cleanly", {}, "in end"),
        (NeedsARun, "ends_without_a_run", {}, "list index out of range"),
        (NeedsTwoRuns, "ends_at_a_stop", {}, "one run is too few"),
        (BeginsOnce, "works_again", {}, "begun again"),
        (IsCreatedOnce, "recovers", {}, "created again"),
        (
            NeedsItsSession,
            "leaves_errors_alone",
            {},
            "OSError.'of another hook, in begin'. was to be raised alone",
        ),
        (AnswersErrors, "leaves_errors_alone", {}, "RuntimeError.'instead'"),
        (
            SwallowsCancels,
            "passes_on_cancels",
            {},
            "in its after_run: it has swallowed the cancel, so its task continued",
        ),
        (
            SetsAVariable,
            "restores_context_variables",
            {},
            "context variable 'current' was 'none', and is 'left behind'",
        ),
        (ForgetsTheBest, "restores_its_state", {}, "'best': 1.0}, and is .*'best': inf}"),
        (IsRenamed, "restores_its_state", {}, r"and is {'losses': \[\], 'best': inf}"),
        (
            SwallowsCancels,
            "passes_on_cancels",
            GROUP,
            r"cancelled at wait \d, in its on_start: it has swallowed the cancel",
        ),
        (
            SwallowsCancels,
            "ends_at_a_time_limit",
            GROUP,
            "cut off by its time limit at wait 1, in its on_start: it has",
        ),
        (
            AnswersCancels,
            "leaves_errors_alone",
            GROUP,
            "of another hook, in on_tool'. was to be raised alone, and Exc",
        ),
        (WorksOnce, "works_again", GROUP | {"calls": GIVEN}, "used before"),
        (
            SetsAVariable,
            "restores_context_variables",
            GROUP,
            "'current' was 'none', and is 'left behind'",
        ),
        (NeedsATool, "ends_cleanly", GROUP, "'NoneType' object has no attribute 'upper'"),
    ],
)
async def test_a_bad_hook_fails(
    make: Callable[[], Any], check: str, options: dict[str, Any], why: str
) -> None:
    """The check for what the hook gets wrong fails, says what it was, and has the name of the check
    as a note.
    """
    with pytest.raises((AssertionError, AttributeError, LookupError, OSError), match=why) as caught:
        await check_hook(make, check, **options)
    notes = " ".join(caught.value.__notes__)
    assert f"this fails the check {check}:" in notes
    assert (
        'on_tool was called with None; for other arguments: calls={"on_tool": (...)}' in notes
    ) is (make is NeedsATool)


@pytest.mark.may_leak
@pytest.mark.parametrize(
    ("check", "options", "when"),
    [
        ("ends_cleanly", {}, "leaks:\n  - "),
        ("passes_on_cancels", {}, r"cancelled at wait \d, .*: "),
        ("passes_on_cancels", GROUP, r"cancelled at wait \d, .*: "),
        ("ends_at_a_time_limit", GROUP, r"cut off by its time limit at wait \d, .*: "),
        ("leaves_nothing_when_it_fails", GROUP, r"failed at wait \d, .*: "),
    ],
)
async def test_a_hook_that_leaks_fails(check: str, options: dict[str, Any], when: str) -> None:
    """What a hook leaves behind is found after each check, and when it was cut off, with the line
    that started it.
    """
    line = LeavesATask.before_run.__code__.co_firstlineno + 1
    place = rf"LeavesATask\.before_run \({__file__}:{line}\)"
    with pytest.raises(
        AssertionError, match=rf"{when}task 'forgotten' still runs, started at {place}"
    ):
        await check_hook(LeavesATask, check, **options)
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


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (
            None,
            (
                r"call_tool\(call.* cannot be called with .*: one of them calls the next hook; .*"
                r' calls=\{"call_tool": \(\.\.\.\)\}'
            ),
        ),
        (
            GIVEN | {"on_start": (1, 2)},
            r"on_start\(agent.* cannot be called with \(1, 2\): too many",
        ),
        (GIVEN | {"on_begin": ()}, "calls has 'on_begin', which is no method of .*Good"),
    ],
)
async def test_calls_that_cannot_be_made_are_refused(calls: Any, why: str) -> None:
    """The error names the method, what is missing, and where to give it."""
    with pytest.raises(InvalidArgumentError, match=why):
        await check_hook(Good, "ends_cleanly", kind=AgentHooks, calls=calls)
