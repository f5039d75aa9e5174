"""TensorFlow's own tests of evaluating (225-229 and 273-280 in the table), and a recorded
scenario.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.testing import RecordingHook
from tests.support.evaluations import total
from tests.support.sessions import NO_BACKOFF, counting, counting_graph, make_runs, run_session

pytestmark = pytest.mark.every_python

both_modes = pytest.mark.parametrize("mode", ["inline", "background"])


def evaluating_graph(inputs: int | None = None, steps: int = 1) -> ah.Graph:
    """A graph whose `evaluate` adds one to `count`, as often as there are inputs; `accuracy` is the
    share of right answers.
    """
    graph = ah.Graph()
    graph.variable("count", 0)
    left = iter(range(inputs)) if inputs is not None else None

    @graph.train_op(adds_to="count", steps=steps)
    def evaluate() -> int:
        if left is not None and next(left, None) is None:
            raise ah.OutOfRangeError("no more inputs")
        return 1

    graph.operation(name="accuracy")(lambda count: count / max(count, 1))
    return graph


async def evaluate_once(
    graph: ah.Graph, hooks: list[ah.SessionRunHook], final: Any, evaluations: int | None
) -> Any:
    """Do what the original's function of that name does: so many evaluations, or all, then the
    final operations.
    """
    finally_ = ah.hooks.FinalOpsHook(final)
    limit = [] if evaluations is None else [ah.StopAtStepHook(num_steps=evaluations)]
    async with ah.AsyncMonitoredSession(graph, [*hooks, *limit, finally_]) as session:
        while not session.should_stop():
            await session.run("evaluate")
    return finally_.final_ops_values


@pytest.mark.parametrize(
    ("options", "final", "evaluations", "runs", "value"),
    [
        ({}, "accuracy", 1, 1, 1.0),  # a perfect model
        (
            {"inputs": 4},
            ["accuracy", "count", "global_step"],
            None,
            5,
            [1.0, 4, 4],
        ),  # the end of the input is a clean end
        ({}, "count", 5, 5, 5),  # the final operations see all evaluations
        (
            {"steps": 2},
            "global_step",
            6,
            3,
            6,
        ),  # a run that advances the step by two needs half as many runs
        ({}, "accuracy", 0, 0, 0.0),  # the final operations alone
        ({}, "count", 3, 3, 3),  # the recorded scenario: the calls of a hook in between, one by one
    ],
)
async def test_evaluating_once(
    options: dict[str, int], final: Any, evaluations: int | None, runs: int, value: Any
) -> None:
    """So many evaluations, or all, and the value of the final operations; the caller's list of
    hooks is not touched.
    """
    recorder = RecordingHook()
    mine: list[ah.SessionRunHook] = [recorder]
    assert await evaluate_once(evaluating_graph(**options), mine, final, evaluations) == value
    calls = ["before_run", "after_run"] * runs
    if evaluations is None:
        calls.pop()  # the last run has found no input
    assert recorder.phases() == ["begin", "after_create_session", *calls, "end", "close"]
    assert mine == [recorder]


# -- evaluating in memory, while training


async def training(hook: EvaluatorHook, runs: int, *others: ah.SessionRunHook) -> dict[int, Any]:
    """Return the evaluations of a training of so many steps."""
    await run_session(
        counting(hook, *others, recovery=NO_BACKOFF),
        runs,
        "train",
    )
    return hook.results


@both_modes
@pytest.mark.parametrize(("every", "steps"), [(4, [0, 4, 8, 10]), (5, [0, 5, 10])])
async def test_runs_eval_metrics(mode: Any, every: int, steps: list[int]) -> None:
    """Ten steps: before the first, by the period, and at the end, each with the values as its step
    left them.
    """
    hook = EvaluatorHook(total, every=ah.Every(steps=every), mode=mode, at_begin=True)
    assert await training(hook, 10) == {step: step for step in steps}


@both_modes
async def test_a_nested_session_evaluates(mode: Any) -> None:
    """A whole session of its own may evaluate, with another graph and hooks of its own; the last
    results are those of the end.
    """
    counted: list[str] = []

    async def evaluate(evaluation: Evaluation) -> dict[str, Any]:
        graph, final = evaluating_graph(inputs=3), ah.hooks.FinalOpsHook(["accuracy", "count"])
        recorder = RecordingHook()
        async with ah.AsyncMonitoredSession(graph, [recorder, final]) as session:
            while not session.should_stop():
                await session.run("evaluate")
        counted.extend(recorder.phases())
        accuracy, count = final.final_ops_values
        return {"accuracy": accuracy, "count": count, "total": evaluation.variables["total"]}

    outer = RecordingHook()
    hook = EvaluatorHook(evaluate, every=ah.Every(steps=2), mode=mode)
    async with counting(hook, outer) as session:
        await make_runs(session, 5, "train")
    assert hook.results == {
        step: {"accuracy": 1.0, "count": 3, "total": step} for step in (2, 4, 5)
    }
    assert counted.count("end") == 3
    assert outer.phases().count("before_run") == 5


@both_modes
async def test_several_workers_each_evaluate(mode: Any) -> None:
    """Workers that share variables and step may each have one; it sees the common values."""
    variables, steps, graph = ah.Variables(), ah.MemoryStepStore(), counting_graph()
    hooks = [
        EvaluatorHook(total, every=ah.Every(steps=3), mode=mode, at_end=False) for _ in range(2)
    ]

    async def work(hook: EvaluatorHook) -> None:
        async with ah.AsyncMonitoredSession(
            graph, [hook], global_step=steps, variables=variables
        ) as session:
            for _ in range(6):
                await session.run("train")
                await asyncio.sleep(0)

    await asyncio.gather(*map(work, hooks))
    assert steps.latest.step == 12
    assert all(hook.results for hook in hooks)
    assert all(found == step for hook in hooks for step, found in hook.results.items())
