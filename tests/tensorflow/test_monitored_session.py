"""TensorFlow's own tests of its monitored session (71-171 in the table): running, what hooks see of
it, stopping.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import counting, counting_graph, run_session
from tests.tensorflow.blocks import ONE_RUN, MakeSession, both_kinds

pytestmark = pytest.mark.every_python

# -- making one, and running


@both_kinds
async def test_variables_have_their_initial_values(make: MakeSession) -> None:
    """A session needs nothing but a graph: its variables have their initial values in the first
    run.
    """
    graph = ah.Graph()
    weights = graph.variable("weights", [1, 2])
    async with make(graph) as session:
        assert await session.run(weights) == [1, 2]
        assert session.global_step.latest.step == 0


@both_kinds
async def test_the_graph_is_the_one_that_was_given(make: MakeSession) -> None:
    """`session.graph` is the source's graph: before, inside and after the block."""
    graph = counting_graph()
    session = make(graph)
    assert session.graph is graph
    async with session:
        assert session.graph is graph
    assert session.graph is graph
    assert make(ah.ChiefSessionCreator(graph)).graph is graph


class Spying(ah.Session):
    """A raw session that keeps the arguments of `run`."""

    def __init__(self, graph: ah.Graph) -> None:
        super().__init__(graph)
        self.calls: list[tuple[Any, ...]] = []

    async def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        *,
        options: Any = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((feed_dict, options, run_metadata))
        if run_metadata is not None:
            run_metadata["took"] = 3
        return await super().run(fetches, feed_dict)


class SpyingCreator:
    """Makes one of these."""

    def __init__(self) -> None:
        self.graph = counting_graph()
        self.session = Spying(self.graph)

    async def create_session(self) -> ah.Session:
        return self.session


async def test_run_passes_all_arguments_on() -> None:
    """Feeds and options reach the raw session as they were given, and its metadata reaches the
    hooks.
    """
    creator = SpyingCreator()
    hook = RequestingHook("loss")
    feeds, options = {"x": 3}, {"trace": True}
    async with ah.AsyncMonitoredSession(creator, [hook]) as session:
        assert await session.run("loss", feeds, options) == 30
    ((feed_dict, seen, _),) = creator.session.calls
    assert feed_dict is feeds
    assert seen == {"trace": True}
    assert hook.values == [ah.SessionRunValues(30, {"trace": True}, {"took": 3})]


async def test_the_traceback_ends_where_the_error_was_raised() -> None:
    """An error of an operation is the same object outside, and its traceback still ends in the
    user's function.
    """
    error = ValueError("bad batch")
    graph = ah.Graph()

    @graph.train_op
    async def train() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(ValueError, match="bad batch") as caught:
        await run_session(
            ah.AsyncMonitoredSession(graph, [RecordingHook(suspend=True)]), 1, "train"
        )
    assert caught.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "train"


# -- what hooks see of a run


async def test_what_a_hook_is_called_with() -> None:
    """A run calls `before_run` and `after_run` once, with one context for both; context and values
    are of this run.
    """
    contexts: list[ah.SessionRunContext] = []
    steps: list[int] = []

    class Hook(RecordingHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
            contexts.append(run_context)
            steps.append(run_context.global_step)
            assert run_context.original_args == ah.SessionRunArgs("train", {"x": 4}, None)
            assert not run_context.stop_requested
            assert run_context.session.graph is graph
            return await super().before_run(run_context)

        async def after_run(
            self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
        ) -> None:
            contexts.append(run_context)
            steps.append(run_context.global_step)
            await super().after_run(run_context, run_values)

    graph = counting_graph()
    hook = Hook(fetches=["loss"])
    async with ah.AsyncMonitoredSession(graph, [hook]) as session:
        assert hook.phases() == ONE_RUN[:2]
        assert await session.run("train", {"x": 4}) == 4
        assert hook.phases() == ONE_RUN
    assert hook.phases() == [*ONE_RUN, "end", "close"]
    assert hook.results == [[40]]
    assert contexts[0] is contexts[1]
    assert steps == [1, 1]


@pytest.mark.parametrize("phase", ["before_run", "after_run"])
async def test_a_session_stops_when_a_hook_asks(phase: str) -> None:
    """`should_stop` is false until a hook requests a stop; that run is finished, and other hooks
    see the stop.
    """
    seen: list[bool] = []

    async def ask(run_context: ah.SessionRunContext, *_: object) -> None:
        if run_context.global_step == 2:
            run_context.request_stop("enough")

    async def look(run_context: ah.SessionRunContext, *_: object) -> None:
        seen.append(run_context.stop_requested)

    hooks = [PhaseHook(phase, ask), PhaseHook("after_run", look)]
    async with counting(*hooks) as session:
        values: list[int] = []
        while not session.should_stop():
            values.append(await session.run("train", {"x": len(values) + 1}))
        assert session.stop_reason == "enough"
    assert values == [1, 2]
    assert seen == [False, True]


# -- should_stop


@both_kinds
async def test_should_stop_after_the_end(make: MakeSession) -> None:
    """`should_stop` is false while the session is open and true when it is closed."""
    async with make(counting_graph()) as session:
        assert not session.should_stop()
    assert session.should_stop()


async def test_should_stop_when_the_coordinator_stops() -> None:
    """A stop of the coordinator is one of the session."""
    async with counting() as session:
        assert not session.should_stop()
        session.coord.request_stop("seen enough")
        assert session.should_stop()
        assert session.stop_reason == "seen enough"


async def test_a_failed_run_is_no_stop() -> None:
    """An error of a run that the body catches is no stop: the next run works, and the end is
    clean.
    """
    hook = FaultInjectionHook({("before_run", 1): OSError("once")})
    async with counting(hook) as session:
        with pytest.raises(OSError, match="once"):
            await session.run("train")
        assert not session.should_stop()
        assert not session.coord.should_stop()
        assert await session.run("train") == 1
    assert hook.phases()[-2:] == ["end", "close"]


# -- the singular one


async def test_the_raw_session() -> None:
    """`raw_session()` is the session that hooks get; None when it is closed."""
    given: list[ah.Session] = []

    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        given.append(session)

    session = ah.session.AsyncSingularMonitoredSession(
        counting_graph(), [PhaseHook("after_create_session", keep)]
    )
    async with session:
        raw = session.raw_session()
        assert isinstance(raw, ah.Session)
        assert given == [raw]
        assert await raw.run("loss") == 10
    assert session.raw_session() is None
    assert given[0].closed


# -- restarts
