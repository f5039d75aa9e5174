"""EvaluatorHook: evaluations that are cancelled, take too long, or fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from tests.support.evaluations import GatedEvaluation, both_modes, failing, results_of, total
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting
from tests.support.waiting import forever, ticks
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

EVERY_STEP = ah.Every(steps=1)


# -- cancelled, and too slow


async def test_a_failing_loop_cancels_pending_evaluations(caplog: pytest.LogCaptureFixture) -> None:
    """When the block ends with an error, the evaluation is cancelled without a wait, and a warning
    names its step.
    """
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background", max_pending=2)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(4):
            await session.run("train")
        await ticks()
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await run_block(counting(hook), body)
    assert (gate.began, gate.cancelled, hook.results) == ([2], [2], {})
    assert (
        "not evaluated, because the session ended with KeyError('body'): steps [2, 4]"
        in caplog.text
    )


async def test_a_cancelled_end_begins_no_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    """The last step is not evaluated when the end is cancelled while it waits for an earlier
    evaluation.
    """
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background")
    ending = asyncio.create_task(runs_of(hook, 3))
    while not gate.began:
        await ticks(30)
    await ticks(30)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert (gate.began, gate.cancelled) == ([2], [2])
    assert "session ended with CancelledError(): steps [2]" in caplog.text


async def runs_of(hook: Any, runs: int, *others: Any, **options: Any) -> ah.AsyncMonitoredSession:
    """Make so many runs, with time for the background between them, and return the session."""
    async with counting(hook, *others, **options) as session:
        for _ in range(runs):
            await session.run("train")
            await ticks()
    return session


async def test_a_stop_ends_an_evaluation_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    """A wait inside an evaluation that the stop ends is not a failure; the last step is evaluated
    anyway.
    """
    coords: list[ah.Coordinator] = []
    began: list[int] = []

    async def created(session: ah.Session, coord: ah.Coordinator) -> None:
        coords.append(coord)

    async def evaluate(evaluation: Evaluation) -> Any:
        if not began:
            began.append(evaluation.step)
            await coords[0].until(forever())
        return evaluation.step

    hook = EvaluatorHook(evaluate, every=EVERY_STEP, mode="background")
    async with counting(hook, PhaseHook("after_create_session", created)) as session:
        await session.run("train")
        await ticks()
        session.request_stop("enough")
    assert hook.results == {1: 1}
    assert "the evaluation at step 1 was ended by the stop: enough" in caplog.text


# -- errors


async def await_a_cancelled_task(evaluation: Evaluation) -> None:
    """Be cancelled, and not by the caller."""
    task = asyncio.ensure_future(asyncio.sleep(0))
    task.cancel()
    await task


@both_modes
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: failing(TimeoutError("mine")), TimeoutError, "mine"),
        (
            lambda: failing(ah.OutOfRangeError("no")),
            ah.AiohooksError,
            "the evaluation at step 1 ended with .* its input has ended",
        ),
        (
            lambda: await_a_cancelled_task,
            ah.errors.HookCancelledError,
            "the evaluation at step 1 was cancelled, and not by its",
        ),
    ],
)
async def test_what_is_raised_for_an_error_of_the_function(
    mode: Any, make: Any, error: type[Exception], says: str
) -> None:
    """Its own error as it is; the end of its input, and a cancellation inside, end no training as
    if they were the caller's.
    """
    with pytest.raises(error, match=says) as caught:
        await results_of(EvaluatorHook(make(), every=EVERY_STEP, mode=mode, at_end=False), 5)
    assert caught.type is error


@both_modes
async def test_an_error_is_raised_in_the_run_or_the_next(mode: Any) -> None:
    """Inline, an error is raised in the run at which it was due; from the background in the next
    one; as the same object.
    """
    error = KeyError("mine")
    hook = EvaluatorHook(failing(error), every=ah.Every(steps=2), mode=mode)
    store = ah.MemoryStepStore()
    with pytest.raises(KeyError) as caught:
        await runs_of(hook, 9, global_step=store)
    assert caught.value is error
    assert any(
        "EvaluatorHook." + ("after_run" if mode == "inline" else "before_run") in note
        for note in error.__notes__
    )
    assert store.latest.step == 2
    assert hook.results == {}


@both_modes
async def test_an_error_of_the_last_evaluations_is_raised_at_the_end(mode: Any) -> None:
    """If no run follows, an error is raised at the end; the last step is evaluated before."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=2), mode="background")
    with pytest.raises(KeyError, match="mine"):
        await results_of(hook, 3)
    assert hook.results == {3: 3}
    with pytest.raises(KeyError, match="mine"):
        await results_of(
            EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=9), mode=mode), 3
        )


async def test_an_error_that_is_not_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If the block itself fails before the next run, the evaluation's error is logged."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=EVERY_STEP, mode="background")

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        await ticks()
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await run_block(counting(hook), body)
    assert "raised by the evaluation at step 1" in caplog.text
    assert "KeyError: 'mine'" in caplog.text


@both_modes
async def test_an_error_of_a_listener_is_an_error(mode: Any) -> None:
    """An error of `on_result` is an error of the evaluation; the result is kept."""

    def listener(step: int, result: Any) -> None:
        raise KeyError("listener")

    hook = EvaluatorHook(total, every=EVERY_STEP, mode=mode, on_result=listener)
    with pytest.raises(KeyError, match="listener"):
        await results_of(hook, 3)
    assert hook.results[1] == 1
