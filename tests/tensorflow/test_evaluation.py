"""TensorFlow's own tests of evaluating (225-229 and 273-280 in the table), and a recorded scenario."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.checks import refused
from tests.support.evaluations import total
from tests.support.sessions import NO_BACKOFF, counting_graph

pytestmark = pytest.mark.every_python

both_modes = pytest.mark.parametrize("mode", ["inline", "background"])


def evaluating_graph(inputs: int | None = None, steps: int = 1) -> ah.Graph:
    """A graph whose `evaluate` adds one to `count`, as often as there are inputs; `accuracy` is the share of right answers."""
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


async def evaluate_once(graph: ah.Graph, hooks: list[ah.SessionRunHook], final: Any, evaluations: int | None) -> Any:
    """Do what the original's function of that name does: so many evaluations, or all, then the final operations."""
    finally_ = ah.FinalOpsHook(final)
    limit = [] if evaluations is None else [ah.StopAtStepHook(num_steps=evaluations)]
    async with ah.AsyncMonitoredSession(graph, [*hooks, *limit, finally_]) as session:
        while not session.should_stop():
            await session.run("evaluate")
    return finally_.final_ops_values


async def test_a_perfect_model() -> None:
    """One evaluation, and the value of the final operation."""
    assert await evaluate_once(evaluating_graph(), [], "accuracy", 1) == 1.0


async def test_inputs_that_end() -> None:
    """Without a number of evaluations the end of the input is a clean end; values counted until then are kept."""
    assert await evaluate_once(evaluating_graph(inputs=4), [], ["accuracy", "count", "global_step"], None) == [1.0, 4, 4]


async def test_so_many_evaluations_and_a_final_operation() -> None:
    """The final operations see all evaluations; the caller's list of hooks is not touched."""
    mine: list[ah.SessionRunHook] = [RecordingHook()]
    before = list(mine)
    assert await evaluate_once(evaluating_graph(), mine, "count", 5) == 5
    assert mine == before


async def test_an_evaluation_that_counts_twice() -> None:
    """A run that advances the step by two needs half as many runs."""
    recorder = RecordingHook()
    assert await evaluate_once(evaluating_graph(steps=2), [recorder], "global_step", 6) == 6
    assert recorder.phases().count("after_run") == 3


async def test_only_a_final_operation() -> None:
    """With no evaluations only the final operations are run."""
    recorder = RecordingHook()
    assert await evaluate_once(evaluating_graph(), [recorder], "accuracy", 0) == 0.0
    assert recorder.phases() == ["begin", "after_create_session", "end", "close"]


async def test_the_recorded_scenario() -> None:
    """Three evaluations, then the final operations; the calls of a hook in between, one by one."""
    recorder = RecordingHook()
    assert await evaluate_once(evaluating_graph(), [recorder], "count", 3) == 3
    runs = ["before_run", "after_run"] * 3
    assert recorder.phases() == ["begin", "after_create_session", *runs, "end", "close"]


# -- evaluating in memory, while training


async def training(hook: EvaluatorHook, runs: int, *others: ah.SessionRunHook) -> dict[int, Any]:
    """Return the evaluations of a training of so many steps."""
    async with ah.AsyncMonitoredSession(counting_graph(), [hook, *others], recovery=NO_BACKOFF) as session:
        for _ in range(runs):
            await session.run("train")
    return hook.results


@both_modes
async def test_runs_eval_metrics(mode: Any) -> None:
    """Ten steps and every four: before the first, at 4, at 8, and at the end."""
    hook = EvaluatorHook(total, every=ah.Every(steps=4), mode=mode, at_begin=True)
    assert list(await training(hook, 10)) == [0, 4, 8, 10]


@both_modes
async def test_uses_the_latest_values_of_variables(mode: Any) -> None:
    """Each evaluation sees the values as its step left them."""
    hook = EvaluatorHook(total, every=ah.Every(steps=5), mode=mode, at_begin=True)
    assert await training(hook, 10) == {0: 0, 5: 5, 10: 10}


@both_modes
async def test_a_nested_session_evaluates(mode: Any) -> None:
    """A whole session of its own may evaluate, with another graph and hooks of its own; the last results are those of the end."""
    counted: list[str] = []

    async def evaluate(evaluation: Evaluation) -> dict[str, Any]:
        graph, final = evaluating_graph(inputs=3), ah.FinalOpsHook(["accuracy", "count"])
        recorder = RecordingHook()
        async with ah.AsyncMonitoredSession(graph, [recorder, final]) as session:
            while not session.should_stop():
                await session.run("evaluate")
        counted.extend(recorder.phases())
        accuracy, count = final.final_ops_values
        return {"accuracy": accuracy, "count": count, "total": evaluation.variables["total"]}

    outer = RecordingHook()
    hook = EvaluatorHook(evaluate, every=ah.Every(steps=2), mode=mode)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook, outer]) as session:
        for _ in range(5):
            await session.run("train")
    assert hook.results == {step: {"accuracy": 1.0, "count": 3, "total": step} for step in (2, 4, 5)}
    assert counted.count("end") == 3
    assert outer.phases().count("before_run") == 5


@both_modes
async def test_several_workers_each_evaluate(mode: Any) -> None:
    """Workers that share variables and step may each have one; it sees the common values."""
    variables, steps, graph = ah.Variables(), ah.MemoryStepStore(), counting_graph()
    hooks = [EvaluatorHook(total, every=ah.Every(steps=3), mode=mode, at_end=False) for _ in range(2)]

    async def work(hook: EvaluatorHook) -> None:
        async with ah.AsyncMonitoredSession(graph, [hook], global_step=steps, variables=variables) as session:
            for _ in range(6):
                await session.run("train")
                await asyncio.sleep(0)

    await asyncio.gather(*map(work, hooks))
    assert steps.latest.step == 12
    assert all(hook.results for hook in hooks)
    assert all(found == step for hook in hooks for step, found in hook.results.items())


async def test_a_recovery_does_not_evaluate_once_more() -> None:
    """The evaluation before the first run is not repeated each time a session is made."""
    hook = EvaluatorHook(total, every=ah.Every(steps=100), at_begin=True)
    lost = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
    assert list(await training(hook, 3, lost)) == [0, 3]


@pytest.mark.parametrize("every", [None, 0, -1, 100])
def test_a_period_must_be_an_every(every: Any) -> None:
    """The period of evaluations is an Every, and nothing else."""
    with refused(ah.errors.InvalidArgumentError, "every is", "give an Every"):
        EvaluatorHook(total, every=every)
