"""The monitored session: a function as the step, what hooks ask of a run and get, the stop, the run
context.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import (
    NO_BACKOFF,
    counting,
    counting_graph,
    doubling,
    failing_step,
    make_runs,
    outcome,
    use_up,
)

pytestmark = pytest.mark.every_python


# -- a function as the step


async def test_a_coroutine_function_is_a_session() -> None:
    """A coroutine function is the step: fed by its parameters, fetched by the keys it returns or as
    a whole, one step a run.
    """
    async with doubling() as session:
        assert await session.run("loss") == 2
        assert await session.run(["loss", "global_step"], {"batch": 5}) == [10, 1]
        assert await session.run("double", {"batch": 3}) == {"loss": 6, "batch": 3}
        assert session.global_step.latest.step == 3
        assert session.graph.step_operation is session.graph.nodes["double"]


@pytest.mark.parametrize(
    "hooks",
    [[], [RecordingHook()], [RecordingHook(fetches="loss")]],
    ids=["none", "silent", "fetching"],
)
async def test_every_run_runs_the_step(hooks: list[ah.SessionRunHook]) -> None:
    """Whatever is fetched, a run of a step function runs it once, for each feed: nothing, a
    parameter, the global step.
    """

    async def step(batch: int = 1) -> dict[str, int]:
        return {"loss": 2 * batch}

    async with ah.AsyncMonitoredSession(step, hooks) as session:
        for _ in range(2):
            assert await session.run([]) == []
            assert await session.run({"a": ()}) == {"a": ()}
            assert await session.run("batch", {"batch": 5}) == 5
            assert await session.run(["batch"]) == [1]
        assert await session.run("global_step") == 8
        assert await session.run(["loss", "batch", "step"]) == [2, 1, {"loss": 2}]
        assert [values async for values in session.steps(feeds=[3, 4])] == [(), ()]
        assert session.global_step.latest.step == 12


async def collide(state: int = 0, *, global_step: int) -> dict[str, int]:
    """Return keys that are names of the graph too: a step."""
    return {"loss": 1, "state": state + 1, "global_step": 777, "collide": 2}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("state", "a parameter"),
        ("global_step", "the global step"),
        ("collide", "the function itself"),
    ],
)
@pytest.mark.parametrize("by_hook", [False, True], ids=["caller", "hook"])
async def test_a_name_that_may_mean_two_things_is_refused(
    name: str, what: str, by_hook: bool
) -> None:
    """A key of the result that is also a parameter, the function or the global step cannot be
    fetched; nothing is committed.
    """
    hooks = [RequestingHook(name if by_hook else "loss"), RequestingHook()]
    async with ah.AsyncMonitoredSession(collide, hooks) as session:
        for fetches in (["loss"], "loss") if by_hook else (name, ["loss", name], {"a": name}):
            says = (
                f"'{name}' is fetched, and is both {what} and a key of the result of step"
                " 'collide'; rename the key"
            )
            with refused(ah.errors.FetchError, says):
                await session.run(fetches)
        assert session.global_step.latest.step == 0


@pytest.mark.parametrize("fetches", [[], (), {}, [(), {}]], ids=repr)
async def test_a_run_of_a_graph_that_fetches_nothing_is_refused(fetches: Any) -> None:
    """Unless a hook fetches something: nothing at all would run, and a loop of such runs would
    never end.
    """
    says = (
        "neither the caller nor a hook fetches anything, so nothing would run; operations are:"
        " ['loss', 'train']"
    )
    for hooks in ([], [RecordingHook()], [RecordingHook(fetches=[])]):
        async with counting(*hooks) as session:
            with refused(ah.errors.FetchError, says):
                await session.run(fetches)
            with refused(ah.errors.FetchError, says):
                await anext(session.steps(fetches))
    async with counting(RecordingHook(fetches="train")) as session:
        assert await session.run(fetches) == fetches
        assert session.global_step.latest.step == 1


# -- the stop


@pytest.mark.parametrize("place", ["before it", "begin", "after_create_session"])
async def test_a_stop_before_the_first_run_is_not_lost(place: str) -> None:
    """A stop requested before `async with`, in `begin`, or on creation ends the loop before its
    first run.
    """

    async def stop(*_: object) -> None:
        session.request_stop(place)

    losses: list[int] = []
    session = doubling(PhaseHook(place, stop))
    if place == "before it":
        await stop()
    assert await outcome(session, lambda session: use_up(session.steps("loss"), losses)) is None
    assert (losses, session.stop_reason, session.global_step.latest.step) == ([], place, 0)


# -- the run context


async def test_a_task_of_a_run_does_not_keep_its_feeds() -> None:
    """A task that was started in a run lives on, and the batch of the run is freed at its end."""
    gate = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    class Batch: ...

    async def step(batch: Batch) -> None:
        tasks.append(asyncio.create_task(gate.wait()))

    async with ah.AsyncMonitoredSession(step, [RecordingHook()]) as session:
        batch = Batch()
        freed = weakref.ref(batch)
        await session.run((), {"batch": batch})
        del batch
        gc.collect()
        assert freed() is None
        gate.set()
        await tasks[0]


async def test_the_repr_of_a_context() -> None:
    """The context's repr has what a person debugging needs."""
    context = ah.SessionRunContext(
        ah.SessionRunArgs("loss"), ah.Session(counting_graph()), global_step=5, attempt=2
    )
    assert repr(context) == "<SessionRunContext step=5 attempt=2 stop_requested=False>"
    context.request_stop("in a test")
    assert context.stop_requested
    assert context.original_args == ah.SessionRunArgs("loss")


class MetricsHook(ah.SessionRunHook):
    """Copies what the others have added to the metrics, and adds a number of its own, in both
    phases.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[dict[str, Any]] = []

    def add(self, context: ah.SessionRunContext, phase: str) -> None:
        self.seen.append(dict(context.metrics))
        context.metrics[f"{self.name} {phase}"] = context.global_step

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.add(run_context, "before")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.add(run_context, "after")


async def test_hooks_add_to_the_metrics_of_a_run_in_order() -> None:
    """A hook sees what those with a lower order added in the phase, and all of the phase before; an
    attempt begins with none.
    """
    last = MetricsHook("last")
    first = MetricsHook("first")
    hooks: list[Any] = [ah.configure(last, order=1), first]
    async with ah.AsyncMonitoredSession(
        failing_step(None, ah.AbortedError("once")), hooks, recovery=NO_BACKOFF
    ) as session:
        await make_runs(session, 2, "loss")
    before = {step: {"first before": step, "last before": step} for step in (1, 2)}
    assert first.seen == [{}, before[1], {}, {}, before[2]]
    steps = [{"first before": 1}, {**before[1], "first after": 1}, {"first before": 2}]
    assert last.seen == [*steps, {"first before": 2}, {**before[2], "first after": 2}]
