"""HistoryHook: values kept in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.history import HistoryHook
from tests.support.hooks import RestoringHook
from tests.support.sessions import counting_graph, going_back, make_runs, run_session, train


async def test_numbers_by_step() -> None:
    """The due steps are kept, with one plain number for each under its tag."""
    graph = counting_graph()
    graph.operation(name="arrays")(lambda total: np.array([total], dtype=np.float32))
    hook = HistoryHook({"sum": "total", "arrays": "arrays"}, every=ah.Every(steps=2))
    await run_session(ah.AsyncMonitoredSession(graph, [hook]), 7, "train")
    assert hook.steps == [2, 4, 6]
    assert hook.values == {"sum": [1, 3, 5], "arrays": [1.0, 3.0, 5.0]}
    assert [type(value) for value in hook.values["arrays"]] == [float] * 3


@pytest.mark.parametrize(
    ("on_full", "most", "runs", "steps"),
    [
        ("drop_oldest", 5, 11, [7, 8, 9, 10, 11]),
        ("thin", 5, 11, [1, 5, 9, 11]),
        ("thin", 5, 12, [1, 5, 9, 12]),
        ("thin", 10, 200, [1, 33, 65, 97, 129, 161, 193, 200]),
    ],
)
async def test_it_is_bounded(on_full: Any, most: int, runs: int, steps: list[int]) -> None:
    """It keeps at most `max_length` steps: the latest, or some that span the run evenly; always the newest."""
    hook = HistoryHook(["total"], max_length=most, on_full=on_full)
    lengths: list[int] = []

    class Looks(ah.SessionRunHook):
        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            lengths.append(len(hook.steps))
            assert hook.steps[-1] == run_context.global_step

    await train(hook, Looks(), runs=runs)
    assert max(lengths) == most
    assert hook.steps == steps
    assert hook.values["total"] == [step - 1 for step in hook.steps]


async def test_tags_may_change_between_checkpoints() -> None:
    """A tag that the checkpoint did not have is None in its steps; one that is not kept any more is dropped."""
    hook = HistoryHook(["total"])
    await train(hook, RestoringHook(hook, {"steps": [1, 2], "values": {"loss": [5, 6]}, "seen": [2, 1]}), runs=1, start=2)
    assert (hook.steps, hook.values) == ([1, 2, 3], {"total": [None, None, 0]})


@pytest.mark.parametrize(("most", "steps"), [(100, [1, 2, 3, 4]), (2, [1, 4])])
async def test_a_recovery_that_moves_the_step_back(most: int, steps: list[int]) -> None:
    """Steps that a recovery repeats are there once, as in an uninterrupted run."""
    hook = HistoryHook(["loss"], max_length=most)
    async with going_back(hook, at=5, to=2) as session:
        await make_runs(session, 6, "train")
    assert hook.steps == steps
