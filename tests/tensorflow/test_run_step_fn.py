"""TensorFlow's own tests of step functions (150-164 in the table): what they may do, how they stop,
and recovery.
"""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import refused
from tests.support.sessions import NO_BACKOFF, counting, counting_graph
from tests.tensorflow.blocks import MakeSession, both_kinds, lost

pytestmark = pytest.mark.every_python


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
    hook, left = RecordingHook(), [*script]

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
        assert [one.closed for one in sessions] == [True, False]
    assert len(sessions) == 2
