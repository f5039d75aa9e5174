"""TensorFlow's own tests of its monitored session (71-171 in the table): running, what hooks see of
it, stopping, step functions, recovery.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting, counting_graph, run_session
from tests.support.waiting import ticks
from tests.tensorflow.blocks import DyingCreator, MakeSession, both_kinds, lost

pytestmark = pytest.mark.every_python

# -- making one, and running


async def test_the_traceback_ends_where_the_error_was_raised() -> None:
    """An error of an operation is the same object outside, and its traceback still ends in the
    user's function.
    """
    error = ValueError("bad batch")
    graph = ah.Graph()

    @graph.train_op
    async def train() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(ValueError, match="bad batch") as caught:
        await run_session(
            ah.AsyncMonitoredSession(graph, [RecordingHook(suspend=True)]), 1, "train"
        )
    assert caught.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "train"


# -- should_stop


async def test_a_failed_run_is_no_stop() -> None:
    """An error of a run that the body catches is no stop: the next run works, and the end is
    clean.
    """
    hook = FaultInjectionHook({("before_run", 1): OSError("once")})
    async with counting(hook) as session:
        with pytest.raises(OSError, match="once"):
            await session.run("train")
        assert not session.should_stop()
        assert not session.coord.should_stop()
        assert await session.run("train") == 1
    assert hook.phases()[-2:] == ["end", "close"]


# -- the singular one


async def test_the_raw_session() -> None:
    """`raw_session()` is the session that hooks get; None when it is closed."""
    given: list[ah.Session] = []

    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        given.append(session)

    session = ah.session.AsyncSingularMonitoredSession(
        counting_graph(), [PhaseHook("after_create_session", keep)]
    )
    async with session:
        raw = session.raw_session()
        assert isinstance(raw, ah.Session)
        assert given == [raw]
        assert await raw.run("loss") == 10
    assert session.raw_session() is None
    assert given[0].closed


# -- step functions (150-164)


async def test_request_stop_raises_in_the_caller() -> None:
    """It reaches the caller of `run_step_fn` as StopRequestedError, and, unlike TensorFlow's, it is
    a stop from then on.
    """

    async def step_fn(context: ah.session.StepContext) -> None:
        context.request_stop()

    async with counting() as session:
        with refused(ah.StopRequestedError, "the step function requested a stop"):
            await session.run_step_fn(step_fn)
        assert session.should_stop()


@both_kinds
@pytest.mark.parametrize(
    ("script", "reason", "hooked", "steps"),
    [
        (
            ["hooked", "next", "ask"],
            "two are enough",
            1,
            1,
        ),  # in a loop: code after it does not run
        (["raw", "ask"], "two are enough", 0, 1),  # no `before_run` of a run that does not begin
        (["stop", "next"], "over", 0, 0),  # the function is not entered after a stop
        (
            ["hooked", "stop", "raw", "hooked"],
            "over",
            1,
            2,
        ),  # a stop in it lets it make raw runs, and none with hooks
    ],
)
async def test_a_stop_ends_the_block_cleanly(
    make: MakeSession, script: list[str], reason: str, hooked: int, steps: int
) -> None:
    """By the function itself, immediately, or by others at its next run with hooks; `end` is
    called.
    """
    hook = RecordingHook()
    left = [*script]

    async def step_fn(context: ah.session.StepContext) -> None:
        while (what := left.pop(0)) != "next":
            if what == "ask":
                context.request_stop("two are enough")
            elif what == "stop":
                session.request_stop("over")
            else:
                await (
                    context.run_with_hooks("train")
                    if what == "hooked"
                    else context.session.run("train")
                )

    async with make(counting_graph(), [hook]) as session:
        if script[0] == "stop":
            session.request_stop("over")
        while True:
            await session.run_step_fn(step_fn)
    assert session.stop_reason == reason
    assert hook.phases() == [
        "begin",
        "after_create_session",
        *["before_run", "after_run"] * hooked,
        "end",
        "close",
    ]
    assert session.global_step.latest.step == steps


# -- what a step function may be


async def test_a_function_with_other_parameters_is_no_step_function() -> None:
    """A function that cannot be called with one context is an error; nothing is run."""

    async def none_at_all() -> None: ...

    async def one_too_many(context: ah.session.StepContext, extra: int) -> None: ...

    hook = RecordingHook()
    async with counting(hook) as session:
        for fn in (none_at_all, one_too_many):
            with pytest.raises(TypeError, match="positional argument"):
                await session.run_step_fn(fn)  # type: ignore[arg-type]
    assert "before_run" not in hook.phases()


# -- recovery


async def test_the_context_has_the_current_session() -> None:
    """After recovery `session` of the context, also of a kept one, is the new open session."""
    contexts: list[ah.session.StepContext] = []
    sessions: list[ah.Session] = []

    async def step_fn(context: ah.session.StepContext) -> Any:
        contexts.append(context)
        sessions.append(context.session)
        if len(contexts) == 1:
            raise lost()
        assert contexts[0].session is context.session
        return await context.session.run("loss")

    async with counting(recovery=NO_BACKOFF) as session:
        assert await session.run_step_fn(step_fn) == 10
        assert [raw.closed for raw in sessions] == [True, False]
    assert len(sessions) == 2


# -- recovery (111-120 and 132-136)


Use = Callable[[ah.AsyncMonitoredSession], Awaitable[Any]]


async def run_with_hooks(session: ah.AsyncMonitoredSession) -> Any:
    async def step_fn(context: ah.session.StepContext) -> Any:
        return await context.run_with_hooks("loss")

    return await session.run_step_fn(step_fn)


async def run_raw(session: ah.AsyncMonitoredSession) -> Any:
    async def step_fn(context: ah.session.StepContext) -> Any:
        return await context.session.run("loss")

    return await session.run_step_fn(step_fn)


USES: dict[str, Use] = {
    "run": lambda session: session.run("loss"),
    "step function with hooks": run_with_hooks,
    "step function without": run_raw,
}
each_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


async def fail(error: BaseException) -> None:
    """Fail, as a background task does."""
    raise error


# -- what is recovered from


async def test_recovery_keeps_variables_and_step() -> None:
    """Unlike TensorFlow's without a checkpoint, a recovered session continues from the values and
    the step that were reached.

    A run that failed left nothing; one whose `after_run` failed was complete, and is made once
    more.
    """
    hook = FaultInjectionHook(
        {("before_run", 3): ah.AbortedError("lost"), ("after_run", 4): ah.UnavailableError("away")}
    )
    async with counting(hook, recovery=NO_BACKOFF) as session:
        seen = [(await session.run(["total", "train"], {"x": 10}))[0] for _ in range(4)]
        assert seen == [0, 10, 20, 40]
        assert session.global_step.latest.step == 5


# -- background tasks


@each_use
async def test_a_lost_background_task_is_recovered_from(use: Use) -> None:
    """A recoverable failure of a task of the created session is no stop: the next run replaces the
    session first.
    """
    creator = DyingCreator([9, 9])
    async with ah.AsyncMonitoredSession(creator, recovery=NO_BACKOFF) as session:
        session.coord.start_soon(fail, ah.AbortedError("lost"))
        await ticks()
        assert not session.should_stop()
        assert await use(session) == 10
        assert not session.should_stop()
        assert [raw.closed for raw in creator.made] == [True, False]
        assert await use(session) == 10
    assert len(creator.made) == 2


async def test_what_a_run_raises_beside_a_lost_task_is_recovered_too() -> None:
    """If a task is lost and the run fails because of it with another error, both are recovered
    from.
    """

    async def lose(run_context: ah.SessionRunContext) -> None:
        if run_context.attempt == 1:
            session.coord.request_stop(ah.AbortedError("the reader is gone"))
            raise OSError("nothing to read")

    async with counting(PhaseHook("before_run", lose), recovery=NO_BACKOFF) as session:
        assert await session.run("train") == 1
        assert session.status().recoveries == 1
