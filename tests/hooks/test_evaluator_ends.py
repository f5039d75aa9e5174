"""EvaluatorHook: evaluations that are cancelled, take too long, or fail."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.evaluations import Gate, failing, total, train
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph
from tests.support.waiting import ticks, until_true
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

MODES: tuple[Literal["inline", "background"], ...] = ("inline", "background")
both_modes = pytest.mark.parametrize("mode", MODES)

# -- cancelled, and too slow


async def test_a_failing_loop_cancels_what_is_unfinished(caplog: pytest.LogCaptureFixture) -> None:
    """When the block ends with an error nothing is waited for: the evaluation is cancelled, and a warning names its step."""
    gate = Gate()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode="background", max_pending=2)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(4):
            await session.run("train")
        await ticks()
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await run_block(ah.AsyncMonitoredSession(counting_graph(), [hook]), body)
    assert (gate.began, gate.cancelled, hook.results) == ([2], [2], {})
    assert "not evaluated, because the session ended with KeyError('body'): steps [2, 4]" in caplog.text


@pytest.mark.parametrize(("mode", "runs"), [("inline", 1), ("background", 2), ("background", 0)])
async def test_a_cancelled_loop_cancels_the_evaluation(mode: Any, runs: int) -> None:
    """A cancellation of the loop gets through wherever it waits: for the evaluation, for room, and at the end."""
    gate = Gate()
    hook = EvaluatorHook(gate, every=ah.Every(steps=1), mode=mode)
    looping = asyncio.create_task(train(hook, runs))
    await ticks(30)
    assert not looping.done()
    looping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looping
    assert looping.cancelled()
    assert gate.cancelled == gate.began != []


@both_modes
@pytest.mark.parametrize("suspend", [False, True])
async def test_an_evaluation_that_takes_too_long(mode: Any, suspend: bool) -> None:
    """`timeout_secs` is for each evaluation; the error says which one it was, and it is over, also beside slow hooks."""
    gate = Gate()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode=mode, timeout_secs=5)
    with ManualClock() as clock:
        looping = asyncio.create_task(train(hook, 3, RecordingHook(suspend=suspend)))
        await ticks(30)
        assert gate.began == [2]
        clock.advance(4)
        await ticks(30)
        assert gate.cancelled == []
        gate.let(0)
        clock.advance(1)
        if mode == "background":  # it was the end that waited for it, and then evaluates the last step
            await until_true(lambda: gate.began == [2, 3])
            gate.let()
        with refused(
            ah.errors.HookTimeoutError, "the evaluation at step 2 took longer than 5 s; give it more with timeout_secs="
        ):
            await looping
    assert gate.cancelled == [2]
    assert list(hook.results) == ([] if mode == "inline" else [3])


@both_modes
async def test_a_hooks_own_timeout_holds_too(mode: Any) -> None:
    """The time limit of a registration ends the wait for the evaluation as any hook's."""
    gate = Gate()
    hook = ah.configure(EvaluatorHook(gate, every=ah.Every(steps=1), mode=mode), timeout=5)
    with ManualClock() as clock:

        async def loop() -> None:
            async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
                for _ in range(2):
                    await session.run("train")

        looping = asyncio.create_task(loop())
        await ticks(30)
        clock.advance(5)
        with refused(ah.errors.HookTimeoutError, "EvaluatorHook.after_run"):
            await looping
    assert gate.cancelled == [1]


@both_modes
async def test_an_inner_timeout_is_the_evaluations_own(mode: Any) -> None:
    """A TimeoutError of the function itself comes out as it is."""

    async def evaluate(evaluation: Evaluation) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine") as caught:
        await train(EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, timeout_secs=5), 2)
    assert type(caught.value) is TimeoutError


async def test_a_worker_that_somebody_cancels_is_started_again() -> None:
    """Whoever cancels the task takes no evaluation away: it begins again, and the run that waits for it does not hang."""
    gate = Gate()
    hook = EvaluatorHook(gate, every=ah.Every(steps=1), mode="background")
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        await session.run("train")
        await ticks()
        running = asyncio.create_task(session.run("train"))
        await ticks(20)
        (worker,) = [task for task in asyncio.all_tasks() if task.get_name() == "evaluation"]
        worker.cancel()
        await ticks(20)
        assert (gate.began, gate.cancelled) == ([1, 1], [1])
        gate.let(3)
        await running
    assert list(hook.results) == [1, 2]


async def test_a_stop_ends_an_evaluation_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    """A wait inside an evaluation that the stop ends is no failure; the last step is evaluated all the same."""
    coords: list[ah.Coordinator] = []
    began: list[int] = []

    async def created(session: ah.Session, coord: ah.Coordinator) -> None:
        coords.append(coord)

    async def evaluate(evaluation: Evaluation) -> Any:
        if not began:
            began.append(evaluation.step)
            await coords[0].until(asyncio.Event().wait())
        return evaluation.step

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode="background")
    async with ah.AsyncMonitoredSession(counting_graph(), [hook, PhaseHook("after_create_session", created)]) as session:
        await session.run("train")
        await ticks()
        session.request_stop("enough")
    assert hook.results == {1: 1}
    assert "the evaluation at step 1 was ended by the stop: enough" in caplog.text


# -- errors


@both_modes
async def test_an_error_comes_out_of_the_run_or_the_next(mode: Any) -> None:
    """Inline it comes out of the run at which it was due, from the background out of the next one, as the same object."""
    error = KeyError("mine")
    hook = EvaluatorHook(failing(error), every=ah.Every(steps=2), mode=mode)
    store = ah.MemoryStepStore()

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(9):
            await session.run("train")
            await ticks()

    with pytest.raises(KeyError) as caught:
        await run_block(ah.AsyncMonitoredSession(counting_graph(), [hook], global_step=store), body)
    assert caught.value is error
    assert any("EvaluatorHook." + ("after_run" if mode == "inline" else "before_run") in note for note in error.__notes__)
    assert store.latest.step == 2
    assert hook.results == {}


@both_modes
async def test_an_error_of_the_last_ones_comes_out_of_the_end(mode: Any) -> None:
    """With no run behind it, an error comes out of the end; the last step is evaluated before."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=2), mode="background")
    with pytest.raises(KeyError, match="mine"):
        await train(hook, 3)
    assert hook.results == {3: 3}
    with pytest.raises(KeyError, match="mine"):
        await train(EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=9), mode=mode), 3)


@both_modes
async def test_errors_that_are_only_logged(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With `on_error="log"` the training goes on, and so do the evaluations: the failed one is not repeated."""
    hook = EvaluatorHook(failing(None, KeyError("mine")), every=ah.Every(steps=1), mode=mode, max_pending=3)
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.configure(hook, on_error="log")]) as session:
        for _ in range(6):
            await session.run("train")
            await ticks()
    assert list(hook.results) == [1, 3, 4, 5, 6]
    assert caplog.text.count("KeyError: 'mine'") == 1


async def test_the_others_go_on_behind_a_logged_error() -> None:
    """After an error that is only logged, the next run starts what is still pending; nothing new has to come due."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(at=(1, 2, 3)), mode="background", max_pending=3, at_end=False)
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.configure(hook, on_error="log")]) as session:
        for _ in range(5):
            await session.run("train")
        await ticks()
        assert (hook.pending, hook.results) == ((2, 3), {})
        for _ in range(2):
            await session.run("train")
            await ticks()
        assert hook.results == {2: 2, 3: 3}


async def test_an_error_that_nobody_meets_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Where the block fails by itself before the next run, the evaluation's error goes to the log."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=1), mode="background")

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        await ticks()
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        await run_block(ah.AsyncMonitoredSession(counting_graph(), [hook]), body)
    assert "the evaluation at step 1 had failed" in caplog.text
    assert "KeyError: 'mine'" in caplog.text


@both_modes
@pytest.mark.parametrize("error", [ah.OutOfRangeError("no more"), StopAsyncIteration()])
async def test_the_end_of_its_input_is_not_the_end_of_the_training(mode: Any, error: Exception) -> None:
    """An evaluation that lets the end of its input escape has failed; it does not end the training cleanly."""
    hook = EvaluatorHook(failing(error), every=ah.Every(steps=1), mode=mode)
    with pytest.raises(ah.AiohooksError, match=r"the evaluation at step 1 ended with .* its input has ended") as caught:
        await train(hook, 5)
    assert caught.type is ah.AiohooksError
    assert caught.value.__cause__ is error or isinstance(caught.value.__cause__, RuntimeError)


@both_modes
async def test_something_cancelled_inside_is_a_failure(mode: Any) -> None:
    """A cancellation of something that the evaluation waited for is not the session's: it is reported, and nothing hangs."""

    async def evaluate(evaluation: Evaluation) -> Any:
        task = asyncio.ensure_future(asyncio.sleep(0))
        task.cancel()
        await task

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, at_end=False)
    with refused(ah.errors.HookCancelledError, "the evaluation at step 1 was cancelled, and not by its session"):
        await train(hook, 5)


@both_modes
async def test_an_error_of_a_listener_is_an_error(mode: Any) -> None:
    """What `on_result` raises comes out as an error of the evaluation; the result is kept."""

    def tell(step: int, result: Any) -> None:
        raise KeyError("listener")

    hook = EvaluatorHook(total, every=ah.Every(steps=1), mode=mode, on_result=tell)
    with pytest.raises(KeyError, match="listener"):
        await train(hook, 3)
    assert hook.results[1] == 1
