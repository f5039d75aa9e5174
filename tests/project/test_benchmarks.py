"""The benchmarks work, and costs that can be counted are what they should be. Nothing here looks at
a watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.benchmarks import dispatchers
from tests.benchmarks.__main__ import main
from tests.benchmarks.measure import TINY, Result, measure
from tests.benchmarks.report import (
    line,
    marks,
)
from tests.benchmarks.rows import DISPATCH, GROUPS, ROWS, SECTIONS, SESSION
from tests.support.needs import MissingError
from tests.support.sessions import run_session
from tests.support.source import ROOT

PAGE = ROOT / "tests" / "benchmarks" / "FIGURES.md"
OTHERS = ("ignite", "tensorflow", "tf-hooks", "aiosignal")


# -- the benchmarks themselves


@pytest.mark.parametrize("name", [name for name in (*SESSION, *DISPATCH) if name not in OTHERS])
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_each_row_can_be_measured(name: str) -> None:
    """Every row gives a bar, a figure and times; those with other processes are in
    `test_store_benchmarks`.
    """
    results = await measure(name, ROWS[name], TINY)
    assert results
    if results[0].missing is not None:
        raise MissingError(results[0].missing)
    for result in results:
        assert_measured(result)


@pytest.mark.parametrize("name", OTHERS)
def test_a_row_about_another_engine_is_measured_or_says_what_is_missing(name: str) -> None:
    """Such a row gives its figure where that engine is installed, and one line that names the
    package where it is not.
    """
    # Not in the loop of a test: what these engines leave behind is theirs.
    results = asyncio.run(measure(name, ROWS[name], TINY))
    if results[0].missing is None:
        for result in results:
            assert_measured(result)
    else:
        assert [result.verdict for result in results] == ["-"]
        assert results[0].missing.endswith("is not installed")
        assert results[0].missing.split()[0] in line(results[0])


def assert_measured(result: Result) -> None:
    """Checks that all of a line is there; a slope, or a loss, out of one round may be anything."""
    assert result.bar is not None or result.row in (
        "checkpoint",
        "group",
        "torch-checkpoint",
    )
    assert result.verdict in (("ok", "MISSED") if result.bar is not None else ("-",))
    assert result.figure is not None
    assert result.figure > 0 or result.row in (
        "marginal",
        "checkpoint",
        "torch-checkpoint",
    )
    assert result.ours_secs is not None
    assert result.theirs_secs is not None


def test_every_row_is_explained() -> None:
    """Each row has a docstring, and tests/benchmarks/FIGURES.md a place for the figures of each
    section.
    """
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name, row in ROWS.items() if not getattr(row, "func", row).__doc__] == []
    sections = [*SECTIONS, dispatchers.SECTION]
    assert [mark for section in sections for mark in marks(section) if mark not in text] == []


def test_rows_are_asked_for_by_name_or_together() -> None:
    """A section or a store stands for all of its rows; what there is none of is refused."""
    assert {name for group in GROUPS.values() for name in group} == set(ROWS)
    assert [name for name in ROWS if name in GROUPS] == []
    with pytest.raises(SystemExit):
        main(["--rows", "no such row"])


# -- costs that can be counted: a run


def driven_by_hand(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that does not suspend to its end, without the loop; what does suspend
    fails.
    """
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def small_graph(graph: ah.Graph | None = None) -> ah.Graph:
    """A graph with a plain, an asynchronous and a train operation, and a variable."""
    graph = graph or ah.Graph()
    graph.placeholder("batch")
    graph.variable("weight", 1)

    @graph.operation
    def loss(batch: int, weight: int) -> int:
        return batch * weight

    @graph.operation
    async def accuracy(batch: int) -> int:
        return batch

    @graph.train_op(adds_to="weight")
    async def train(loss: int) -> int:
        return loss

    return graph


class CannotWait(ah.SessionRunHook):
    """Calls a function in both phases of a run; no method has an `await`."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        self.act()
        return ah.SessionRunArgs(["loss", "accuracy"])

    async def after_run(self, *_: object) -> None:
        self.act()


class Waits(ah.SessionRunHook):
    """Waits once in `before_run`, and calls a function behind that."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)
        self.act()


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_run_whose_hooks_cannot_wait_makes_no_task(count: int) -> None:
    """Such a run never goes back to the event loop, and no task exists during it or after it that
    did not before.
    """
    before = asyncio.all_tasks()
    tasks: list[set[asyncio.Task[Any]]] = []
    hooks = [CannotWait(lambda: tasks.append(asyncio.all_tasks())) for _ in range(count)]
    async with ah.AsyncMonitoredSession(small_graph(), hooks, yield_secs=None) as session:
        for step in range(1, 4):
            driven_by_hand(session.run("train", {"batch": 2}))
            assert session.global_step.latest.step == step
            assert asyncio.all_tasks() == before
    assert tasks == [before] * count * 6


@pytest.mark.parametrize("count", range(5))
async def test_a_run_makes_a_task_for_each_method_that_may_wait(count: int) -> None:
    """Hooks whose method has an `await` have a task each in that phase; beside them and in the
    other phase there is none.
    """
    before = asyncio.all_tasks()
    made: list[int] = []

    def note() -> None:
        made.append(len(asyncio.all_tasks() - before))

    hooks = [*(Waits(note) for _ in range(count)), CannotWait(note)]
    await run_session(
        ah.AsyncMonitoredSession(small_graph(), hooks, yield_secs=None), 1, "train", {"batch": 2}
    )
    assert sorted(made) == sorted([*range(1, count + 1), count, 0])


class CountingGraph(ah.Graph):
    """Counts how often a node is looked up in it."""

    looks = 0

    def node(self, key: object) -> Any:
        self.looks += 1
        return super().node(key)

    @property
    def nodes(self) -> Mapping[str, Any]:
        self.looks += 1
        return super().nodes


async def test_one_plan_is_made_for_each_set_of_fetches() -> None:
    """Only the first run of a set of fetches and feeds looks anything up in the graph; another set
    is planned once more.
    """
    graph = CountingGraph()
    small_graph(graph)
    wanted = [""]

    class Wants(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
            return ah.SessionRunArgs(wanted[0])

    async with ah.AsyncMonitoredSession(graph, [Wants(), Wants()]) as session:
        looks: list[int] = []
        for wanted[0] in ("loss", "loss", "loss", "accuracy", "accuracy", "loss", "accuracy"):
            before = graph.looks
            await session.run("train", {"batch": 2})
            looks.append(graph.looks - before)
    assert [count > 0 for count in looks] == [True, False, False, True, False, False, False]


class CountingClock(ManualClock):
    """Counts the timers."""

    timers = 0

    def call_later(self, secs: float, callback: Callable[[], object]) -> Any:
        self.timers += 1
        return super().call_later(secs, callback)


@pytest.mark.parametrize("count", range(5))
async def test_a_timeout_costs_nothing_where_a_method_cannot_wait(count: int) -> None:
    """A limited hook that cannot wait makes no timer, also beside others; each one that waits makes
    one.
    """
    with CountingClock() as clock:
        hooks = [*(Waits(str) for _ in range(count)), CannotWait(str), CannotWait(str)]
        given = [ah.configure(hook, timeout=5) for hook in hooks]
        async with ah.AsyncMonitoredSession(small_graph(), given, yield_secs=None) as session:
            before = clock.timers
            await session.run("train", {"batch": 2})
            assert clock.timers == before + count
