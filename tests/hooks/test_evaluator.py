"""EvaluatorHook: which steps are evaluated, on which values, the effect on the training, and what a
recovery repeats; evaluations that are cancelled or fail.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.session import session_events
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.evaluations import GatedEvaluation, both_modes, failing, results_of, total
from tests.support.hooks import PhaseHook, RestoringHook
from tests.support.sessions import counting, run_session, use_up
from tests.support.waiting import forever, ticks
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python


# -- which steps


@both_modes
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8, 10]),
        ({"at_begin": True}, [0, 4, 8, 10]),
        ({"every": ah.Every(steps=1), "max_results": 3}, [8, 9, 10]),
        ({"at_end": False}, [4, 8]),
        ({"every": ah.Every(steps=100)}, [10]),
    ],
)
async def test_which_steps_are_evaluated(
    mode: Any, options: dict[str, Any], steps: list[int]
) -> None:
    """Every boundary and the last step are evaluated once, in order, on their own values; the
    newest results are kept.
    """
    hook = EvaluatorHook(total, **{"every": ah.Every(steps=4), "mode": mode, **options})
    results = await results_of(hook, 10)
    assert list(results.items()) == [(step, step) for step in steps]
    assert hook.pending == ()
    # Results and counting belong to the session.
    assert await results_of(hook, 0, start=100) == ({100: 0} if options.get("at_end", True) else {})


# -- on which values


async def test_the_graph_is_run_on_those_values() -> None:
    """`evaluation.run` computes operations on the values and the step of the evaluation, whatever
    the training has done since.
    """
    graph = ah.Graph()
    graph.placeholder("images")
    graph.variable("weights", np.zeros(2))
    graph.variable("other", 7)
    graph.train_op(adds_to="weights", name="train")(lambda: np.ones(2))
    graph.operation(name="score")(
        lambda images, weights, global_step: (float(images @ weights), global_step)
    )
    gate = asyncio.Event()

    async def evaluate(evaluation: Evaluation) -> Any:
        await gate.wait()
        images = np.array([1, 10])
        assert (await evaluation.session.run("weights")).tolist() == [5, 5]
        by_node = {graph.node("images"): images, graph.node("weights"): np.ones(2)}
        return await evaluation.run(["score", "other"], {"images": images}), await evaluation.run(
            "score", by_node
        )

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=3), mode="background", at_end=False)
    async with ah.AsyncMonitoredSession(graph, [hook, recorder := RecordingHook()]) as session:
        for _ in range(5):
            await session.run("train")
        gate.set()
    assert hook.results == {3: ([(33.0, 3), 7], (11.0, 3))}
    assert recorder.phases().count("before_run") == 5


@both_modes
async def test_an_evaluation_does_not_train(mode: Any) -> None:
    """Operations that change variables or advance the step are refused by name, and nothing has
    changed.
    """

    async def evaluate(evaluation: Evaluation) -> None:
        await evaluation.run({"it": ["train"]})

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=2), mode=mode)
    with refused(ah.errors.FetchError, "evaluating {'it': ['train']} would train"):
        await results_of(hook, 3)
    assert hook.results == {}


@both_modes
async def test_snapshot(mode: Any) -> None:
    """`snapshot` is called when the evaluation is due; its result is evaluated."""
    model = {"weight": 0}

    async def step() -> None:
        model["weight"] += 1

    async def evaluate(evaluation: Evaluation) -> Any:
        await ticks()
        assert evaluation.variables == {}
        return evaluation.snapshot

    hook = EvaluatorHook(
        evaluate, every=ah.Every(steps=2), mode=mode, snapshot=lambda: dict(model), at_end=False
    )
    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        for _ in range(5):
            await session.run("step")
    assert hook.results == {2: {"weight": 2}, 4: {"weight": 4}}


@both_modes
async def test_a_nested_session_evaluates(mode: Any) -> None:
    """A whole session of its own may evaluate, with another graph and hooks of its own; the last
    results are those of the end.
    """
    inner = RecordingHook()

    async def evaluate(evaluation: Evaluation) -> tuple[int, int]:
        graph = ah.Graph()
        graph.variable("count", 0)
        graph.train_op(adds_to="count", name="evaluate")(lambda: 1)
        final = ah.hooks.FinalOpsHook("count")
        async with ah.AsyncMonitoredSession(
            graph, [inner, final, ah.StopAtStepHook(last_step=3)]
        ) as session:
            await use_up(session.steps("evaluate"))
        return final.final_ops_values, evaluation.variables["total"]

    outer = RecordingHook()
    hook = EvaluatorHook(evaluate, every=ah.Every(steps=2), mode=mode)
    assert await results_of(hook, 5, outer) == {step: (3, step) for step in (2, 4, 5)}
    assert inner.phases().count("end") == 3
    assert outer.phases().count("before_run") == 5


# -- none is skipped, and their number is bounded


@both_modes
async def test_others_wait_for_evaluations_of_earlier_steps(mode: Any) -> None:
    """A save waits for those of steps before, and for no other; inline there are none."""
    gate = GatedEvaluation()
    hook = EvaluatorHook(gate, every=ah.Every(steps=1), mode=mode, max_pending=2, at_end=False)
    async with counting(hook) as session:
        gate.release(2 if mode == "inline" else 0)
        for _ in range(2):
            await session.run("train")
        saving = session.coord.events.saving
        await saving.emit(1, Path())
        finishing = asyncio.create_task(saving.emit(2, Path()))
        await ticks(20)
        assert finishing.done() is (mode == "inline")
        gate.release()
        await finishing
        assert gate.ended[0] == 1
        gate.release()


# -- results are passed on


@both_modes
async def test_on_result(mode: Any) -> None:
    """The function, plain or async, is called with each step and result; callbacks of the event
    before, with the numbers and whether it was extra.
    """
    calls: list[Any] = []

    class Watches(ah.SessionRunHook):
        async def begin(self) -> None:
            session_events().evaluated.subscribe(self.note)

        async def note(self, step: int, metrics: dict[str, float], is_extra: bool) -> None:
            calls.append(("event", step, metrics, is_extra))

    async def sum_of(evaluation: Evaluation) -> Any:
        return {"total": await total(evaluation), "name": "not a number"}

    async def waits(step: int, result: Any) -> None:
        await ticks()
        calls.append(("async", step, result))

    plain = functools.partial(lambda *args: calls.append(args), "plain")
    every = ah.Every(steps=2)
    await results_of(EvaluatorHook(total, every=every, mode=mode, on_result=plain), 3, Watches())
    assert calls[:2] == [("event", 2, {}, False), ("plain", 2, 2)]
    assert calls[2:] == [("event", 3, {}, True), ("plain", 3, 3)]
    await results_of(EvaluatorHook(sum_of, every=every, mode=mode, on_result=waits), 2, Watches())
    assert calls[4] == ("event", 2, {"total": 2.0}, False)
    assert calls[5:] == [("async", 2, {"total": 2, "name": "not a number"})]


async def test_results_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A log line has the result, the step, and how long it took."""
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")

    async def evaluate(evaluation: Evaluation) -> Any:
        clock.advance(2)
        return {"accuracy": 0.125, "count": 5}

    with ManualClock() as clock:
        await results_of(EvaluatorHook(evaluate, every=ah.Every(steps=9)), 1)
    assert [
        record.getMessage() for record in caplog.records if record.name == "aiohooks.hooks"
    ] == ["evaluation at step 1: {'accuracy': 0.125, 'count': 5} (2.000 sec)"]


def test_a_plain_function_is_refused() -> None:
    """A function that blocks is called in a thread by its caller."""
    with refused(ah.errors.InvalidHookError, "not a coroutine function; write it as `async def`"):
        EvaluatorHook(lambda evaluation: 1, every=ah.Every(steps=1))  # type: ignore[arg-type, return-value]
    assert repr(EvaluatorHook(total, every=ah.Every(steps=1))).endswith(
        "at=()), evaluated step None)"
    )


# -- recoveries and restarts


def state(evaluated: int | None, counted_from: int, unfinished: bool = False) -> dict[str, Any]:
    """Return a saved state."""
    return {
        "evaluated_step": evaluated,
        "timer": {"step": counted_from, "secs": 0.0},
        "unfinished": unfinished,
    }


@both_modes
async def test_a_restored_state(mode: Any) -> None:
    """What was due when it was saved is made immediately, an unfinished one again, and a finished
    run's last step not again.
    """
    for saved, start, runs, steps in (
        (state(4, 4), 8, 1, [8, 9]),  # saved at a boundary, before this hook's turn
        (state(8, 8, unfinished=True), 8, 1, [8, 9]),
        (state(10, 10), 10, 0, []),
    ):
        hook = EvaluatorHook(total, every=ah.Every(steps=4), mode=mode)
        assert [*await results_of(hook, runs, RestoringHook(hook, saved), start=start)] == steps
    assert await results_of(hook, 0, start=10) == {10: 0}


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


@both_modes
async def test_a_cancellation_in_what_gets_the_result_is_an_error(mode: Any) -> None:
    """Other code cancels what `on_result` awaits: the evaluation fails, and is not repeated without
    end.
    """
    evaluated = list[int]()

    async def evaluate(evaluation: Evaluation) -> dict[str, float]:
        evaluated.append(evaluation.step)
        return {"value": 1.0}

    async def on_result(step: int, result: Any) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    hook = EvaluatorHook(evaluate, every=ah.Every(steps=1), mode=mode, on_result=on_result)
    with pytest.raises(ah.errors.HookCancelledError, match="the evaluation at step 1"):
        await run_session(counting(hook), 3, "train")
    assert evaluated == [1]
