"""EvaluatorHook: evaluations that are cancelled, take too long, or fail."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import Any, Literal

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.evaluations import GatedEvaluation, failing, results_of, total
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph
from tests.support.waiting import ticks, until_true
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

MODES: tuple[Literal["inline", "background"], ...] = ("inline", "background")
both_modes = pytest.mark.parametrize("mode", MODES)

# -- cancelled, and too slow


async def test_a_failing_loop_cancels_pending_evaluations(caplog: pytest.LogCaptureFixture) -> None:
    """When the block ends with an error, the evaluation is cancelled without a wait, and a warning names its step."""
    gate = GatedEvaluation()
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
    """A cancellation of the loop is delivered wherever it waits: for an evaluation, for a free slot, and at the end."""
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=1), mode=mode)
    looping = asyncio.create_task(results_of(hook, runs))
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
    """`timeout_secs` limits each evaluation; the error names it, and the evaluation has ended, even next to slow hooks."""
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=2), mode=mode, timeout_secs=5)
    with ManualClock() as clock:
        looping = asyncio.create_task(results_of(hook, 3, RecordingHook(suspend=suspend)))
        await ticks(30)
        assert gate.began == [2]
        clock.advance(4)
        await ticks(30)
        assert gate.cancelled == []
        gate.release(0)
        clock.advance(1)
        if mode == "background":  # the end waited for it, and then evaluates the last step
            await until_true(lambda: gate.began == [2, 3])
            gate.release()
        with refused(ah.errors.HookTimeoutError, "the evaluation at step 2 took longer than its timeout of 5 s; give it more"):
            await looping
    assert gate.cancelled == [2]
    assert list(hook.results) == ([] if mode == "inline" else [3])


@both_modes
async def test_the_timeout_of_the_registration(mode: Any) -> None:
    """The timeout of a registration ends the wait for the evaluation as for any hook."""
    gate = GatedEvaluation()
    hook = ah.configure(EvaluatorHook(gate, every=ah.Every(steps=1), mode=mode), timeout=5)
    with ManualClock() as clock:

        async def loop() -> None:
            async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
                for _ in range(2):
                    await session.run("train")

        looping = asyncio.create_task(loop())
        await ticks(30)
        clock.advance(5)
        with refused(ah.errors.HookTimeoutError, "EvaluatorHook.after_run") as caught:
            await looping
    if mode == "inline":
        assert any("at GatedEvaluation.__call__" in note for note in caught.value.__notes__), (
            "the line where the evaluation waits"
        )
    assert gate.cancelled == [1]


@both_modes
async def test_a_timeout_error_of_the_function(mode: Any) -> None:
    """A TimeoutError of the function itself is raised unchanged."""

    async def evaluate(evaluation: Evaluation) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine") as caught:
        await results_of(EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, timeout_secs=5), 2)
    assert type(caught.value) is TimeoutError


async def test_a_cancelled_worker_is_started_again() -> None:
    """A cancelled worker loses no evaluation: it is started again, and the run that waits for it does not hang."""
    gate = GatedEvaluation()
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
        gate.release(3)
        await running
    assert list(hook.results) == [1, 2]


async def test_a_stop_ends_an_evaluation_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    """A wait inside an evaluation that the stop ends is not a failure; the last step is evaluated anyway."""
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
async def test_an_error_is_raised_in_the_run_or_the_next(mode: Any) -> None:
    """Inline, an error is raised in the run at which it was due; from the background in the next one; as the same object."""
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
async def test_an_error_of_the_last_evaluations_is_raised_at_the_end(mode: Any) -> None:
    """If no run follows, an error is raised at the end; the last step is evaluated before."""
    hook = EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=2), mode="background")
    with pytest.raises(KeyError, match="mine"):
        await results_of(hook, 3)
    assert hook.results == {3: 3}
    with pytest.raises(KeyError, match="mine"):
        await results_of(EvaluatorHook(failing(KeyError("mine")), every=ah.Every(steps=9), mode=mode), 3)


@both_modes
async def test_errors_that_are_only_logged(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With `on_error="log"` training and evaluations continue: the failed evaluation is not repeated."""
    hook = EvaluatorHook(failing(None, KeyError("mine")), every=ah.Every(steps=1), mode=mode, max_pending=3)
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.configure(hook, on_error="log")]) as session:
        for _ in range(6):
            await session.run("train")
            await ticks()
    assert list(hook.results) == [1, 3, 4, 5, 6]
    assert caplog.text.count("KeyError: 'mine'") == 1


async def test_pending_evaluations_continue_after_a_logged_error() -> None:
    """After an error that is only logged, the next run starts the pending evaluations; no new one has to be due."""
    gate, evaluate = asyncio.Event(), failing(KeyError("mine"))

    async def gated(evaluation: Any) -> Any:
        await gate.wait()
        return await evaluate(evaluation)

    hook = EvaluatorHook(gated, every=ah.Every(at=(1, 2, 3)), mode="background", max_pending=3, at_end=False)
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.configure(hook, on_error="log")]) as session:
        for _ in range(3):
            await session.run("train")
        gate.set()
        await ticks(20)
        assert (hook.pending, hook.results) == ((2, 3), {})
        for _ in range(2):
            await session.run("train")
            await ticks(20)
        assert hook.results == {2: 2, 3: 3}


async def test_an_error_that_is_not_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If the block itself fails before the next run, the evaluation's error is logged."""
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
    """An evaluation that raises the end of its input has failed; it does not end the training cleanly."""
    hook = EvaluatorHook(failing(error), every=ah.Every(steps=1), mode=mode)
    with pytest.raises(ah.AiohooksError, match=r"the evaluation at step 1 ended with .* its input has ended") as caught:
        await results_of(hook, 5)
    assert caught.type is ah.AiohooksError
    assert caught.value.__cause__ is error or isinstance(caught.value.__cause__, RuntimeError)


@both_modes
async def test_a_cancellation_inside_is_a_failure(mode: Any) -> None:
    """A cancellation inside an evaluation is not the session's: it is reported, and nothing hangs."""

    async def evaluate(evaluation: Evaluation) -> Any:
        task = asyncio.ensure_future(asyncio.sleep(0))
        task.cancel()
        await task

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, at_end=False)
    with refused(ah.errors.HookCancelledError, "the evaluation at step 1 was cancelled, and not by its caller"):
        await results_of(hook, 5)


async def leave_a_cancel_uncounted() -> None:
    """Cancel the running task, catch that, and leave its count of cancels too high, as some libraries do for a time limit."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


@both_modes
async def test_the_function_may_leave_the_count_of_cancels_too_high(mode: Any) -> None:
    """Whatever the function does to `cancelling()`, its result counts, and so do later cancellations inside and time limits."""
    ends: list[asyncio.Future[None]] = []

    async def evaluate(evaluation: Evaluation) -> int:
        await leave_a_cancel_uncounted()
        if evaluation.step == 2:
            ends.append(asyncio.get_running_loop().create_future())
            await ends[0]
        elif evaluation.step == 3:
            await asyncio.Event().wait()
        return evaluation.step

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, timeout_secs=5, at_end=False)
    errors: list[BaseException] = []
    with ManualClock() as clock:

        async def loop() -> None:
            async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
                while session.global_step.latest.step < 4:
                    try:
                        await session.run("train")
                        await until_true(lambda: not hook.pending)
                        await session.run("total")
                    except ah.AiohooksError as error:
                        errors.append(error)

        looping = asyncio.create_task(loop())
        await until_true(lambda: ends)
        ends[0].cancel()
        await until_true(lambda: errors)
        await ticks(30)
        clock.advance(5)
        await looping
        assert looping.cancelling() == 0
    assert [type(error) for error in errors] == [ah.errors.HookCancelledError, ah.errors.HookTimeoutError]
    assert hook.results == {1: 1, 4: 4}


@both_modes
async def test_a_function_that_ignores_its_cancellation(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """After the time limit and the grace period the error is raised; a warning says that the evaluation still runs."""
    released = asyncio.Event()
    grace: list[float] = []

    async def evaluate(evaluation: Evaluation) -> None:
        grace.append(evaluation.session.grace_secs)
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, timeout_secs=5, at_end=False)
    with ManualClock() as clock:
        looping = asyncio.create_task(results_of(hook, 1))
        await ticks(30)
        clock.advance(5)
        await ticks(30)
        assert not looping.done()
        clock.advance(grace[0])
        with refused(ah.errors.HookTimeoutError, "the evaluation at step 1 took longer than its timeout of 5 s"):
            await looping
    assert f"the evaluation at step 1 still runs {grace[0]}" in caplog.text
    released.set()
    await ticks()


async def test_the_step_sees_the_context_variables_of_an_evaluation() -> None:
    """What the function sets is seen by the loop, as with any hook that it waits for."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def evaluate(evaluation: Evaluation) -> None:
        variable.set(evaluation.step)

    async with ah.AsyncMonitoredSession(counting_graph(), [EvaluatorHook(evaluate, every=ah.Every(steps=2))]) as session:
        for _ in range(3):
            await session.run("train")
        assert variable.get() == 2


@both_modes
async def test_an_error_of_a_listener_is_an_error(mode: Any) -> None:
    """An error of `on_result` is an error of the evaluation; the result is kept."""

    def listener(step: int, result: Any) -> None:
        raise KeyError("listener")

    hook = EvaluatorHook(total, every=ah.Every(steps=1), mode=mode, on_result=listener)
    with pytest.raises(KeyError, match="listener"):
        await results_of(hook, 3)
    assert hook.results[1] == 1


async def test_hooks_of_equal_names_without_a_checkpoint() -> None:
    """An evaluation at the end asks no hooks for names that only checkpoints need."""
    stopping = [ah.EarlyStoppingHook("loss", patience=9) for _ in range(2)]
    hook = EvaluatorHook(total, every=ah.Every(steps=9))
    async with ah.AsyncMonitoredSession(counting_graph(), [*stopping, hook]) as session:
        await session.run("train")
    assert hook.results == {1: 1}
