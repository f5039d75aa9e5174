"""EvaluatorHook: which steps are evaluated, on which values, the effect on the training, and what a
recovery repeats.
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
from tests.support.evaluations import GatedEvaluation, both_modes, results_of, total
from tests.support.hooks import RestoringHook
from tests.support.sessions import counting
from tests.support.waiting import ticks

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
