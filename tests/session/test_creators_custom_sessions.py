"""Sessions with step stores and raw sessions that are not the library's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.hooks import RequestingHook
from tests.support.sessions import NO_BACKOFF, counting_graph
from tests.support.waiting import parked, ticks, until_true

pytestmark = pytest.mark.every_python


class SlowStore(ah.MemoryStepStore):
    """A store whose `advance` suspends, as a remote engine's does."""

    inline: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[int] = []

    async def advance(self, by: int = 1) -> int:
        self.asked.append(by)
        await self.gate.wait()
        return await super().advance(by)


async def test_variables_are_there_before_the_step() -> None:
    """Where advancing suspends, variables are assigned before it: a task that sees the step finds its variables."""
    store = SlowStore()
    session = ah.Session(counting_graph(), global_step=store)
    running = asyncio.create_task(session.run("train"))
    await ticks()
    assert (session.variables.snapshot(), store.latest.step, store.asked) == ({"total": 1}, 0, [1])
    store.gate.set()
    assert await running == 1
    assert (store.latest.step, session.committed_step) == (1, 1)


async def test_a_commit_that_has_begun_is_finished() -> None:
    """A run that is cancelled while its step is committed is committed as a whole, and then cancelled."""
    store = SlowStore()
    session = ah.Session(counting_graph(), global_step=store)
    running = asyncio.create_task(session.run("train"))
    await ticks()
    running.cancel()
    await ticks()
    assert not running.done()
    store.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (session.variables.snapshot(), store.latest.step) == ({"total": 1}, 1)


class RefusingStore(SlowStore):
    """A store that refuses the first step, after it has suspended."""

    async def advance(self, by: int = 1) -> int:
        step = await super().advance(by)
        if len(self.asked) == 1:
            raise ah.UnavailableError("no")
        return step


async def test_a_run_that_read_what_was_undone_is_repeated() -> None:
    """Variables are there before their step; a run that had read those of a step that was refused begins again."""
    graph, read, gate = ah.Graph(), list[int](), asyncio.Event()
    graph.placeholder("waits")
    graph.variable("v", 1)

    @graph.train_op(updates="v")
    async def double(v: int, waits: bool) -> int:
        read.append(v)
        if waits:
            await gate.wait()
        return 2 * v

    session = ah.Session(graph, global_step=(store := RefusingStore()))
    refused = await parked(session.run("double", {"waits": False}))
    await until_true(lambda: store.asked)
    waiting = await parked(session.run("double", {"waits": True}))
    await until_true(lambda: len(read) == 2)
    store.gate.set()
    with pytest.raises(ah.UnavailableError):
        await refused
    gate.set()
    assert await waiting == session.variables.snapshot()["v"] == 2
    assert read == [1, 2, 1]


async def test_runs_that_do_not_train_do_not_wait_for_the_store() -> None:
    """A run without a train operation does not wait for the store."""
    store = SlowStore()
    session = ah.Session(counting_graph(), global_step=store)
    assert await session.run("loss") == 10
    assert store.asked == []


async def test_a_monitored_session_on_a_slow_store() -> None:
    """Hooks get the committed step, even if the store advances later."""
    store = SlowStore()
    store.gate.set()
    async with ah.AsyncMonitoredSession(counting_graph(), [ah.StopAtStepHook(last_step=3)], global_step=store) as session:
        async for _ in session.steps("train"):
            pass
    assert (store.latest.step, session.stop_reason) == (3, "step 3 reached the last step, 3")


class OptionSession(ah.Session):
    """A session that accepts options, and writes metadata."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metadata: list[Any] = []

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        self.metadata.append(run_metadata)
        if options is not None and run_metadata is not None:
            run_metadata["seen"] = dict(options)
        return await super().run(fetches, feed_dict)


class OptionCreator:
    """Makes such sessions, and keeps the metadata of their runs."""

    graph = counting_graph()

    def __init__(self) -> None:
        self.metadata: list[Any] = []

    async def create_session(self) -> ah.Session:
        session = OptionSession(self.graph)
        self.metadata = session.metadata
        return session


@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "hooked"])
async def test_options_reach_a_session_that_accepts_them(hooked: bool) -> None:
    """Options are passed to the session's own `run`; metadata that it writes reaches the hooks."""
    hook = RequestingHook("total", None, {"trace": True})
    creator = OptionCreator()
    async with ah.AsyncMonitoredSession(creator, [hook] if hooked else []) as session:
        assert await session.run("train", None, {"level": 2}) == 1
        assert await session.run("train") == 1
    if not hooked:
        assert creator.metadata == [{"seen": {"level": 2}}, None]
    if hooked:
        assert [values.run_metadata for values in hook.values] == [
            {"seen": {"level": 2, "trace": True}},
            {"seen": {"trace": True}},
        ]


# -- session_factory


class ClosingSession(ah.Session):
    """A session that has something to close, and no `run` of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.closes = 0

    async def aclose(self) -> None:
        self.closes += 1
        await super().aclose()


async def test_a_factory_makes_each_session_of_a_chief() -> None:
    """A chief's first session and the one of each recovery come from its factory, and each is closed once."""
    made: list[ClosingSession] = []
    failures = [ah.AbortedError("once")]
    graph = counting_graph()

    def factory(graph: ah.Graph, **parts: Any) -> ah.Session:
        made.append(ClosingSession(graph, **parts))
        return made[-1]

    @graph.operation
    def fails() -> None:
        if failures:
            raise failures.pop()

    hook = RequestingHook("total")
    creator = ah.ChiefSessionCreator(graph, session_factory=factory)
    async with ah.AsyncMonitoredSession(creator, [hook], recovery=NO_BACKOFF) as session:
        assert await session.run(["train", "fails"]) == [1, None]
        assert [one.closes for one in made] == [1, 0]
        assert made[0].variables is made[1].variables
    assert [one.closes for one in made] == [1, 1]
    assert [values.results for values in hook.values] == [0]


@pytest.mark.parametrize("is_chief", [True, False])
async def test_a_training_session_of_another_class(is_chief: bool) -> None:
    """`monitored_training_session` passes the class to its creator; options reach the `run` of the subclass."""
    graph, variables = counting_graph(), ah.Variables()
    chief = ah.monitored_training_session(graph, variables=variables, log_step_count=None, session_factory=OptionSession)
    async with chief as session:
        if not is_chief:
            worker = ah.monitored_training_session(graph, is_chief=False, variables=variables, session_factory=OptionSession)
            async with worker as session:
                assert await session.run("train", options={"level": 2}) == 1
        else:
            assert await session.run("train", options={"level": 2}) == 1


async def test_a_subclass_without_a_run_is_run_as_a_session_is() -> None:
    """A run in which nothing is fetched is refused in a subclass too, which leaves `run` as it is."""
    creator = ah.ChiefSessionCreator(counting_graph(), session_factory=ClosingSession)
    async with ah.AsyncMonitoredSession(creator) as session:
        with refused(ah.errors.FetchError, "neither the caller nor a hook fetches anything"):
            await session.run([])


@pytest.mark.parametrize("kind", ["chief", "worker"])
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda graph, **parts: None, "returned None; return a Session"),
        (lambda graph, **parts: ClosingSession(ah.Graph(), **parts), "another graph than it was given"),
        (lambda graph, **parts: ClosingSession(graph, variables=parts["variables"]), "another global_step"),
        (lambda graph, **parts: ClosingSession(graph, global_step=parts["global_step"]), "another variables"),
    ],
)
async def test_what_is_not_the_session_is_refused(kind: str, factory: Any, words: str) -> None:
    """What a factory returns has to be a session of what it was given; another one is closed."""
    made: list[Any] = []

    def keeping(graph: ah.Graph, **parts: Any) -> Any:
        made.append(factory(graph, **parts))
        return made[-1]

    graph, variables = counting_graph(), ah.Variables()
    creator: ah.SessionCreator = ah.ChiefSessionCreator(graph, variables=variables, session_factory=keeping)
    if kind == "worker":
        await ah.ChiefSessionCreator(graph, variables=variables).create_session()
        creator = ah.WorkerSessionCreator(graph, variables=variables, session_factory=keeping)
    with refused(ah.errors.InvalidArgumentError, "session_factory=", words):
        await ah.AsyncMonitoredSession(creator).__aenter__()
    assert [one.closes for one in made if one is not None] == [1] * (made[0] is not None)


def test_what_is_no_factory_is_refused() -> None:
    """A factory is a class or a plain function."""

    async def factory(graph: ah.Graph, **parts: Any) -> ah.Session:
        return ah.Session(graph, **parts)

    for wrong, words in ((3, ["session_factory is 3"]), (factory, ["coroutine function", "Scaffold"])):
        with refused(ah.errors.InvalidArgumentError, *words):
            ah.ChiefSessionCreator(ah.Graph(), session_factory=cast("Any", wrong))
        with refused(ah.errors.InvalidArgumentError, *words):
            ah.WorkerSessionCreator(ah.Graph(), variables=ah.Variables(), session_factory=cast("Any", wrong))
