"""Session creators: the order of a scaffold, chiefs that initialise once, workers that wait for
them, sessions of a factory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.checks import invalid, refused
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import NO_BACKOFF, counting_graph, outcome
from tests.support.waiting import advance_clock, parked, raises_after, ticks

pytestmark = pytest.mark.every_python

SCAFFOLD = ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn")
NO_DATA = ah.Scaffold(init_fn=raises_after(1, OSError("no data")))


def recording_scaffold(record: list[str], **answers: Any) -> ah.Scaffold:
    """Make a scaffold that records its calls; `answers` are what the functions return, one after
    the other.
    """

    def function(name: str) -> Any:
        async def call(session: ah.Session) -> Any:
            await asyncio.sleep(0)
            assert not session.closed
            record.append(name)
            return answers[name].pop(0) if answers.get(name) else None

        return call

    return ah.Scaffold(**{name: function(name) for name in SCAFFOLD})


async def total_of(creator: ah.session.SessionCreator) -> int:
    """Open a session and fetch its total."""
    async with ah.AsyncMonitoredSession(creator) as session:
        return int(await session.run("total"))
    raise AssertionError("not reached")


# -- the scaffold


async def test_the_order_of_a_chiefs_scaffold() -> None:
    """init, ready_for_local_init, local_init, ready: after `begin` and before
    `after_create_session`.
    """
    record: list[str] = []

    def noting(phase: str) -> PhaseHook:
        async def note(*_: object) -> None:
            record.append(phase)

        return PhaseHook(phase, note)

    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=recording_scaffold(record))
    async with ah.AsyncMonitoredSession(creator, [noting("begin"), noting("after_create_session")]):
        assert record == ["begin", *SCAFFOLD, "after_create_session"]


async def test_variables_have_their_values_when_init_is_called() -> None:
    """`init_fn` finds the initial values, may run the graph, and assign others; the session
    publishes its steps already.
    """
    steps = ah.MemoryStepStore()

    async def init(session: ah.Session) -> None:
        assert await session.run("total") == 0
        session.variables.assign({"total": 40})
        publishers.extend(steps.statistics().publishers)

    publishers: list[str] = []
    creator = ah.ChiefSessionCreator(
        counting_graph(), scaffold=ah.Scaffold(init_fn=init), global_step=steps
    )
    async with ah.AsyncMonitoredSession(creator) as session:
        await session.run("train", {"x": 2})
        assert await session.run("total") == 42
        assert (publishers, len(publishers)) == ([*steps.statistics().publishers], 1)


@pytest.mark.parametrize(
    "missing", [False, "weights", ["weights", "bias"], ("bias",), {"weights": 1}], ids=repr
)
@pytest.mark.parametrize("name", ["ready_for_local_init_fn", "ready_fn"])
async def test_a_chief_whose_model_is_not_ready_fails(name: str, missing: Any) -> None:
    """If a ready function returns names, the creation fails with NotReadyError; the next chief
    starts from the beginning.
    """
    record, variables = list[str](), ah.Variables()
    scaffold = recording_scaffold(record, **{name: [missing]})
    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold, variables=variables)
    says = (
        "did not make the model ready",
        "missing, as",
        "something" if missing is False else str(missing),
    )
    with refused(ah.errors.NotReadyError, *says):
        await creator.create_session()
    assert record == list(SCAFFOLD[: SCAFFOLD.index(name) + 1])
    assert (variables.ready, variables.snapshot()) == (False, {})
    record.clear()
    await (await creator.create_session()).aclose()
    assert record == list(SCAFFOLD)


@pytest.mark.parametrize("answer", [None, True, [], "", (), {}], ids=repr)
async def test_what_means_ready(answer: Any) -> None:
    """None, True and everything empty mean that nothing is missing; a number says neither."""
    scaffold = recording_scaffold(
        [], ready_for_local_init_fn=[answer, answer], ready_fn=[answer, 5]
    )
    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold)
    assert await (await creator.create_session()).run("total") == 0
    with invalid("5", "None"):
        await creator.create_session()


async def test_a_scaffold_borrows_what_it_does_not_have() -> None:
    """`copy_from_scaffold` fills in the functions that were not given, and those only."""
    one, two = recording_scaffold([]), recording_scaffold([])
    mixed = ah.Scaffold(init_fn=one.init_fn, copy_from_scaffold=two)
    assert mixed.init_fn is one.init_fn
    assert (mixed.ready_fn, mixed.local_init_fn) == (two.ready_fn, two.local_init_fn)
    assert ah.Scaffold(copy_from_scaffold=one) == one


# -- chiefs and workers


async def test_workers_wait_for_the_chief() -> None:
    """Workers are woken when the chief's initialisation is complete, and see its values; only it
    was initialised.
    """
    graph, record, gate = counting_graph(), list[str](), asyncio.Event()
    shared: dict[str, Any] = {"variables": ah.Variables(), "global_step": ah.MemoryStepStore()}

    async def init(session: ah.Session) -> None:
        session.variables.assign({"total": 100})
        record.append("chief begins")
        await gate.wait()
        record.append("chief has initialised")

    async def work(number: int) -> int:
        async with ah.AsyncMonitoredSession(ah.WorkerSessionCreator(graph, **shared)) as session:
            record.append(f"worker {number} starts")
            return int(await session.run("train", {"x": number}))
        raise AssertionError("not reached")

    workers = [await parked(work(number)) for number in (1, 2)]
    chief = ah.ChiefSessionCreator(graph, scaffold=ah.Scaffold(init_fn=init), **shared)
    entering = await parked(ah.AsyncMonitoredSession(chief).__aenter__())
    await ticks()
    assert record == ["chief begins"]
    gate.set()
    session = await entering
    assert await asyncio.gather(*workers) == [1, 2]
    assert record == ["chief begins", "chief has initialised", "worker 1 starts", "worker 2 starts"]
    assert (await session.run("total"), session.global_step.latest.step) == (103, 2)
    await session.aclose()


async def test_a_worker_waits_until_its_deadline_exactly(clock: ManualClock) -> None:
    """A worker without a chief gives up when `max_wait_secs` are over, not before, and names no
    other time.
    """
    hook = RecordingHook()
    creator = ah.WorkerSessionCreator(counting_graph(), variables=ah.Variables(), max_wait_secs=100)
    entering = await parked(ah.AsyncMonitoredSession(creator, [hook]).__aenter__())
    await ticks()
    await advance_clock(clock, 99.75)
    assert not entering.done()
    clock.advance(0.25)
    with refused(ah.errors.SessionNotReadyError, "within 100 s", "is a chief running") as caught:
        await entering
    assert isinstance(caught.value, TimeoutError)
    assert (hook.phases(), hook.closed_with, clock.pending) == (
        ["begin", "close"],
        [caught.value],
        0,
    )


async def test_a_failed_initial_value_reaches_every_chief_and_worker() -> None:
    """Each chief gets the error of its own attempt, a worker that of a chief after which no other
    was trying.
    """
    errors = [OSError(f"no file {number}") for number in range(3)]
    left, graph, variables = errors.copy(), ah.Graph(), ah.Variables()

    def load() -> int:
        raise left.pop(0)

    graph.variable("weights", load)
    worker = await parked(total_of(ah.WorkerSessionCreator(graph, variables=variables)))
    chiefs = [total_of(ah.ChiefSessionCreator(graph, variables=variables)) for _ in errors]
    *raised, of_worker = await asyncio.gather(*chiefs, worker, return_exceptions=True)
    assert raised == errors
    assert isinstance(of_worker, ah.errors.PublisherFailedError)
    assert of_worker.__cause__ is errors[0]


# -- creators and sessions of the user's own


class OptionSession(ah.Session):
    """A session that accepts options, and writes metadata."""

    metadata: list[Any]

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        vars(self).setdefault("metadata", []).append(run_metadata)
        if options is not None and run_metadata is not None:
            run_metadata["seen"] = dict(options)
        return await super().run(fetches, feed_dict)


@pytest.mark.parametrize("hooked", [False, True], ids=["bare", "hooked"])
async def test_a_creator_may_be_the_users_own(hooked: bool) -> None:
    """Any object with a `graph` and an async `create_session`; options reach its session's `run`,
    metadata the hooks.
    """
    steps, hook = ah.MemoryStepStore(10), RequestingHook("total", None, {"trace": True})

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            self.session = OptionSession(self.graph, global_step=steps)
            return self.session

    creator = Creator()
    async with ah.AsyncMonitoredSession(creator, [hook] if hooked else []) as session:
        assert session.global_step is steps
        assert await session.run("train", None, {"level": 2}) == 1
        assert await session.run("train") == 1
    assert steps.latest.step == 12
    if hooked:
        written = [{"seen": {"level": 2, "trace": True}}, {"seen": {"trace": True}}]
        assert [values.run_metadata for values in hook.values] == written
    else:
        assert creator.session.metadata == [{"seen": {"level": 2}}, None]


class ClosingSession(ah.Session):
    """A session that has something to close, and no `run` of its own."""

    closes = 0

    async def aclose(self) -> None:
        self.closes += 1
        await super().aclose()


async def test_a_factory_makes_each_session_of_a_chief() -> None:
    """A chief's first session and the one of each recovery come from its factory, are run as
    others, and closed once.
    """
    made, hook = list[ClosingSession](), RequestingHook("total")

    def factory(graph: ah.Graph, **parts: Any) -> ah.Session:
        made.append(ClosingSession(graph, **parts))
        return made[-1]

    creator = ah.ChiefSessionCreator(counting_graph(), session_factory=factory)
    lost = FaultInjectionHook({("before_run", 1): ah.AbortedError("once")})
    async with ah.AsyncMonitoredSession(creator, [lost], recovery=NO_BACKOFF) as session:
        with refused(ah.errors.FetchError, "neither the caller nor a hook fetches anything"):
            await session.run([])
        assert [one.closes for one in made] == [1, 0]
        assert made[0].variables is made[1].variables
    assert [one.closes for one in made] == [1, 1]
    async with ah.AsyncMonitoredSession(creator, [hook]) as session:
        assert await session.run(["train"]) == [1]
    assert [values.results for values in hook.values] == [0]


@pytest.mark.parametrize("is_chief", [True, False])
async def test_a_training_session_of_another_class(is_chief: bool) -> None:
    """`monitored_training_session` passes the class to its creator; options reach the `run` of the
    subclass.
    """
    graph, options = (
        counting_graph(),
        {"variables": ah.Variables(), "log_step_count": None, "session_factory": OptionSession},
    )
    async with ah.training.monitored_training_session(graph, **options) as session:  # type: ignore[arg-type]
        if is_chief:
            assert await session.run("train", options={"level": 2}) == 1
        else:
            of_a_worker: dict[str, Any] = {**options, "is_chief": False}
            async with ah.training.monitored_training_session(graph, **of_a_worker) as worker:
                assert await worker.run("train", options={"level": 2}) == 1


@pytest.mark.parametrize("kind", ["chief", "worker"])
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda graph, **parts: None, "returned None; return a Session"),
        (
            lambda graph, **parts: ClosingSession(ah.Graph(), **parts),
            "another graph, step store or variables than it was given",
        ),
        (
            lambda graph, **parts: ClosingSession(graph, variables=parts["variables"]),
            "another graph, step store or variables than it was given",
        ),
        (
            lambda graph, **parts: ClosingSession(graph, global_step=parts["global_step"]),
            "another graph, step store or variables than it was given",
        ),
        (None, "no data"),
    ],
)
async def test_a_session_that_cannot_be_used_is_closed(kind: str, factory: Any, words: str) -> None:
    """What a factory returns has to be a session of what it was given, and to be initialised."""
    made: list[Any] = []

    def keeping(graph: ah.Graph, **parts: Any) -> Any:
        made.append((factory or ClosingSession)(graph, **parts))
        return made[-1]

    graph, variables = counting_graph(), ah.Variables()
    scaffold = ah.Scaffold(local_init_fn=None if factory else NO_DATA.init_fn)
    creator: ah.session.SessionCreator = ah.ChiefSessionCreator(
        graph, variables=variables, session_factory=keeping, scaffold=scaffold
    )
    if kind == "worker":
        await ah.ChiefSessionCreator(graph, variables=variables).create_session()
        creator = ah.WorkerSessionCreator(
            graph, variables=variables, session_factory=keeping, scaffold=scaffold
        )
    raised = await outcome(ah.AsyncMonitoredSession(creator))
    assert isinstance(raised, ah.errors.InvalidArgumentError if factory else OSError)
    assert words in str(raised)
    assert ("session_factory=" in str(raised)) is (factory is not None)
    assert [one.closes for one in made if one is not None] == [1] * (made[0] is not None)


def test_a_call_in_place_of_the_step_is_named() -> None:
    """A step that was called by mistake is named, and Python does not warn about its coroutine."""

    async def train_step() -> dict[str, float]:
        return {}

    call: Any = train_step()
    with invalid("train_step(...), a call; give the function: "):
        ah.AsyncMonitoredSession(call)


def test_what_is_no_factory_is_refused() -> None:
    """A factory is a class or a plain function."""

    async def factory(graph: ah.Graph, **parts: Any) -> ah.Session:
        return ah.Session(graph, **parts)

    wrongs: list[tuple[Any, list[str]]] = [
        (3, ["session_factory is 3"]),
        (factory, ["coroutine function", "Scaffold"]),
    ]
    for wrong, words in wrongs:
        with invalid(*words):
            ah.ChiefSessionCreator(ah.Graph(), session_factory=wrong)
        with invalid(*words):
            ah.WorkerSessionCreator(ah.Graph(), variables=ah.Variables(), session_factory=wrong)
