"""TensorFlow's own tests of evaluating (225-229 and 273-280 in the table), and a recorded
scenario.
"""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.testing import RecordingHook
from tests.support.sessions import counting, make_runs

pytestmark = pytest.mark.every_python

both_modes = pytest.mark.parametrize("mode", ["inline", "background"])


def evaluating_graph(inputs: int) -> ah.Graph:
    """A graph whose `evaluate` adds one to `count`, as often as there are inputs; `accuracy` is the
    share of right answers.
    """
    graph = ah.Graph()
    graph.variable("count", 0)
    left = iter(range(inputs))

    @graph.train_op(adds_to="count")
    def evaluate() -> int:
        if next(left, None) is None:
            raise ah.OutOfRangeError("no more inputs")
        return 1

    graph.operation(name="accuracy")(lambda count: count / max(count, 1))
    return graph


# -- evaluating in memory, while training


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
