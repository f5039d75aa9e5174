"""Session creators: the order of a scaffold, chiefs that initialise once, workers that wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting_graph, double
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python

SCAFFOLD = ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn")


def recording_scaffold(record: list[str], **answers: Any) -> ah.Scaffold:
    """Make a scaffold that records its calls; `answers` are what the functions return, one after the other."""

    def function(name: str) -> Any:
        async def call(session: ah.Session) -> Any:
            await asyncio.sleep(0)
            assert not session.closed
            record.append(name)
            return answers[name].pop(0) if answers.get(name) else None

        return call

    return ah.Scaffold(**{name: function(name) for name in SCAFFOLD})


# -- the scaffold


async def test_the_order_of_a_chiefs_scaffold() -> None:
    """init, ready_for_local_init, local_init, ready: after `begin` and before `after_create_session`."""
    record: list[str] = []
    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=recording_scaffold(record))

    async def note(what: str) -> None:
        record.append(what)

    hooks = [
        PhaseHook("begin", lambda: note("begin")),
        PhaseHook("after_create_session", lambda session, coord: note("after_create_session")),
    ]
    async with ah.AsyncMonitoredSession(creator, hooks):
        assert record == ["begin", *SCAFFOLD, "after_create_session"]


async def test_variables_have_their_values_when_init_is_called() -> None:
    """`init_fn` finds the initial values, may run the graph, and may assign others."""

    async def init(session: ah.Session) -> None:
        assert await session.run("total") == 0
        session.variables.assign({"total": 40})

    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=ah.Scaffold(init_fn=init))
    async with ah.AsyncMonitoredSession(creator) as session:
        await session.run("train", {"x": 2})
        assert await session.run("total") == 42


async def test_a_session_publishes_while_it_is_created() -> None:
    """A worker that waits for its steps already knows its publisher, however long the initialisation takes."""
    steps = ah.MemoryStepStore()
    publishers: list[tuple[str, ...]] = []

    async def init(session: ah.Session) -> None:
        publishers.append(steps.statistics().publishers)

    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=ah.Scaffold(init_fn=init), global_step=steps)
    async with ah.AsyncMonitoredSession(creator):
        assert publishers == [steps.statistics().publishers]
        assert len(publishers[0]) == 1


async def test_initialising_happens_once_local_initialising_each_time() -> None:
    """A recovery, and a second chief on the same variables, do not initialise again; `local_init_fn` is for every session."""
    record: list[str] = []
    variables, graph = ah.Variables(), counting_graph()
    scaffold = recording_scaffold(record)

    async def lose(run_context: ah.SessionRunContext) -> None:
        if run_context.attempt == 1:
            raise ah.AbortedError("lost")

    creator = ah.ChiefSessionCreator(graph, scaffold=scaffold, variables=variables)
    recovery = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
    async with ah.AsyncMonitoredSession(creator, [PhaseHook("before_run", lose)], recovery=recovery) as session:
        await session.run("train")
        assert record == [*SCAFFOLD, *SCAFFOLD[1:]]
        record.clear()
        other = ah.ChiefSessionCreator(graph, scaffold=scaffold, variables=variables)
        async with ah.AsyncMonitoredSession(other):
            assert record == [*SCAFFOLD[1:]]
    assert variables.snapshot() == {"total": 1}


@pytest.mark.parametrize("missing", [False, "weights", ["weights", "bias"], ("bias",), {"weights": 1}], ids=repr)
@pytest.mark.parametrize("name", ["ready_for_local_init_fn", "ready_fn"])
async def test_a_chief_whose_model_is_not_ready_fails(name: str, missing: Any) -> None:
    """If a ready function returns names, the creation fails with NotReadyError; the next chief starts from the beginning."""
    record: list[str] = []
    variables, graph = ah.Variables(), counting_graph()
    scaffold = recording_scaffold(record, **{name: [missing]})
    creator = ah.ChiefSessionCreator(graph, scaffold=scaffold, variables=variables)
    with refused(
        ah.errors.NotReadyError, "did not make the model ready", "missing, as", "something" if missing is False else str(missing)
    ):
        await creator.create_session()
    assert record == list(SCAFFOLD[: SCAFFOLD.index(name) + 1])
    assert not variables.ready
    assert variables.snapshot() == {}
    record.clear()
    session = await creator.create_session()
    assert record == list(SCAFFOLD)
    await session.aclose()


@pytest.mark.parametrize("answer", [None, True, [], "", (), {}], ids=repr)
async def test_what_means_ready(answer: Any) -> None:
    """None, True and everything empty mean that nothing is missing."""
    scaffold = recording_scaffold([], ready_for_local_init_fn=[answer], ready_fn=[answer])
    session = await ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold).create_session()
    assert await session.run("total") == 0


async def test_an_invalid_answer_of_a_ready_function_is_refused() -> None:
    """A number says neither ready nor what is missing."""
    scaffold = recording_scaffold([], ready_fn=[5])
    with refused(ah.errors.InvalidArgumentError, "5", "None"):
        await ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold).create_session()


async def test_a_scaffold_borrows_what_it_does_not_have() -> None:
    """`copy_from_scaffold` fills in the functions that were not given, and those only."""
    one, two = recording_scaffold([]), recording_scaffold([])
    mixed = ah.Scaffold(init_fn=one.init_fn, copy_from_scaffold=two)
    assert mixed.init_fn is one.init_fn
    assert (mixed.ready_fn, mixed.local_init_fn) == (two.ready_fn, two.local_init_fn)
    assert ah.Scaffold(copy_from_scaffold=one) == one


async def test_a_failed_creation_closes_its_session() -> None:
    """A session that was made and could not be initialised is closed, of a chief and of a worker."""
    made: list[ah.Session] = []

    async def fail(session: ah.Session) -> None:
        made.append(session)
        raise OSError("no data")

    graph, variables = counting_graph(), ah.Variables()
    scaffold = ah.Scaffold(local_init_fn=fail)
    with pytest.raises(OSError, match="no data"):
        await ah.ChiefSessionCreator(graph, scaffold=scaffold, variables=variables).create_session()
    await ah.ChiefSessionCreator(graph, variables=variables).create_session()
    with pytest.raises(OSError, match="no data"):
        await ah.WorkerSessionCreator(graph, scaffold=scaffold, variables=variables).create_session()
    assert [session.closed for session in made] == [True, True]


# -- chiefs and workers


async def test_workers_wait_for_the_chief() -> None:
    """Workers are woken when the chief's initialisation is complete, and see its values; only it was initialised."""
    graph, variables, steps = counting_graph(), ah.Variables(), ah.MemoryStepStore()
    record: list[str] = []
    gate = asyncio.Event()

    async def init(session: ah.Session) -> None:
        session.variables.assign({"total": 100})
        record.append("chief begins")
        await gate.wait()
        record.append("chief has initialised")

    async def work(number: int) -> int:
        creator = ah.WorkerSessionCreator(graph, variables=variables, global_step=steps)
        async with ah.AsyncMonitoredSession(creator) as session:
            record.append(f"worker {number} starts")
            return int(await session.run("train", {"x": number}))
        raise AssertionError("not reached")

    workers = [asyncio.create_task(work(number)) for number in (1, 2)]
    await ticks()
    scaffold = ah.Scaffold(init_fn=init)
    chief = ah.ChiefSessionCreator(graph, scaffold=scaffold, variables=variables, global_step=steps)
    entering = asyncio.create_task(ah.AsyncMonitoredSession(chief).__aenter__())
    await ticks()
    assert record == ["chief begins"]
    gate.set()
    session = await entering
    assert await asyncio.gather(*workers) == [1, 2]
    assert record == ["chief begins", "chief has initialised", "worker 1 starts", "worker 2 starts"]
    assert (await session.run("total"), steps.latest.step) == (103, 2)
    await session.aclose()


async def test_a_worker_waits_until_its_deadline_exactly() -> None:
    """A worker without a chief gives up when `max_wait_secs` are over, not before, and names no other time."""
    with ManualClock() as clock:
        hook = RecordingHook()
        creator = ah.WorkerSessionCreator(counting_graph(), variables=ah.Variables(), max_wait_secs=100)
        entering = asyncio.create_task(ah.AsyncMonitoredSession(creator, [hook]).__aenter__())
        await ticks()
        clock.advance(99.75)
        await ticks()
        assert not entering.done()
        clock.advance(0.25)
        with refused(ah.errors.SessionNotReadyError, "within 100 s", "is a chief running") as caught:
            await entering
        assert isinstance(caught.value, TimeoutError)
        assert hook.phases() == ["begin", "close"]
        assert hook.closed_with == [caught.value]
        assert clock.pending == 0


async def test_a_worker_is_in_time_at_its_deadline() -> None:
    """A chief that is ready in the last tick before the deadline is in time."""
    with ManualClock() as clock:
        graph, variables = counting_graph(), ah.Variables()
        worker = ah.WorkerSessionCreator(graph, variables=variables, max_wait_secs=100)
        creating = asyncio.create_task(worker.create_session())
        await ticks()
        clock.advance(99.999)
        await ah.ChiefSessionCreator(graph, variables=variables).create_session()
        assert await (await creating).run("total") == 0


@pytest.mark.parametrize("secs", [None, 1e9])
async def test_a_worker_may_wait_indefinitely(secs: float | None) -> None:
    """`max_wait_secs=None` has no deadline."""
    with ManualClock() as clock:
        graph, variables = counting_graph(), ah.Variables()
        worker = ah.WorkerSessionCreator(graph, variables=variables, max_wait_secs=secs)
        creating = asyncio.create_task(worker.create_session())
        await ticks()
        clock.advance(1e8)
        await ticks()
        assert not creating.done()
        await ah.ChiefSessionCreator(graph, variables=variables).create_session()
        await (await creating).aclose()


async def test_workers_of_a_chief_that_gives_up_fail() -> None:
    """When the chief's session fails before the variables are ready, waiting workers fail with its error as the cause."""
    graph, variables = counting_graph(), ah.Variables()
    worker = ah.WorkerSessionCreator(graph, variables=variables)
    waiting = asyncio.create_task(worker.create_session())
    await ticks()

    async def fail(session: ah.Session) -> None:
        raise OSError("no data")

    chief = ah.ChiefSessionCreator(graph, variables=variables, scaffold=ah.Scaffold(init_fn=fail))
    with pytest.raises(OSError, match="no data") as caught:
        await ah.AsyncMonitoredSession(chief).__aenter__()
    with refused(ah.PublisherFailedError, "failed: OSError('no data')"):
        await waiting
    error = waiting.exception()
    assert error is not None
    assert error.__cause__ is caught.value


async def test_two_chiefs_that_begin_together_initialise_once() -> None:
    """Of several chiefs on the same variables one initialises, and the others wait for it."""
    graph, variables = counting_graph(), ah.Variables()
    calls: list[int] = []

    async def init(session: ah.Session) -> None:
        calls.append(1)
        await ticks()

    def chief() -> ah.ChiefSessionCreator:
        return ah.ChiefSessionCreator(graph, variables=variables, scaffold=ah.Scaffold(init_fn=init))

    await asyncio.gather(chief().create_session(), chief().create_session())
    assert len(calls) == 1
    assert variables.ready


async def test_a_recovery_makes_the_initial_values_again() -> None:
    """After an initial value that could not be made, the next attempt makes all of them: none is left of the failed one."""
    fails, made = [ah.UnavailableError("the weights are away")], iter(range(9))

    def load() -> int:
        if fails:
            raise fails.pop()
        return 5

    graph = ah.Graph()
    graph.variable("number", lambda: next(made))
    graph.variable("weights", load)
    async with ah.AsyncMonitoredSession(graph, recovery=NO_BACKOFF) as session:
        assert await session.run(["number", "weights"]) == [1, 5]


async def test_a_failed_initial_value_reaches_every_chief_and_worker() -> None:
    """Each chief gets the error of its own attempt, a worker that of a chief after which no other was trying."""
    errors = [OSError(f"no file {number}") for number in range(3)]
    left = errors.copy()

    def load() -> int:
        raise left.pop(0)

    graph, variables = ah.Graph(), ah.Variables()
    graph.variable("weights", load)

    async def enter(creator: ah.SessionCreator) -> None:
        async with ah.AsyncMonitoredSession(creator):
            pass

    worker = await parked(enter(ah.WorkerSessionCreator(graph, variables=variables)))
    chiefs = [ah.ChiefSessionCreator(graph, variables=variables) for _ in errors]
    *raised, of_worker = await asyncio.gather(*map(enter, chiefs), worker, return_exceptions=True)
    assert raised == errors
    assert isinstance(of_worker, ah.PublisherFailedError)
    assert of_worker.__cause__ is errors[0]


@pytest.mark.plain_tasks
async def test_workers_wait_on_while_another_chief_initialises() -> None:
    """A chief that gives up while another one waits to initialise fails no worker."""
    fails = [OSError("no data")]

    async def init(session: ah.Session) -> None:
        await ticks()
        if fails:
            raise fails.pop()

    graph, variables = counting_graph(), ah.Variables()

    async def enter(creator: ah.SessionCreator) -> int:
        async with ah.AsyncMonitoredSession(creator) as session:
            return int(await session.run("total"))
        raise AssertionError("not reached")

    scaffold = ah.Scaffold(init_fn=init)
    creators: list[ah.SessionCreator] = [ah.WorkerSessionCreator(graph, variables=variables)]
    creators += [ah.ChiefSessionCreator(graph, variables=variables, scaffold=scaffold) for _ in range(2)]
    worker, *chiefs = await asyncio.gather(*map(enter, creators), return_exceptions=True)
    assert worker == 0
    assert [str(result) for result in chiefs] == ["no data", "0"]


async def test_chief_and_worker_may_be_made_of_a_step_function() -> None:
    """A creator takes whatever a session takes to run: a coroutine function too, and a chief restores its steps."""
    variables, steps = ah.Variables(), ah.MemoryStepStore()
    chief = ah.ChiefSessionCreator(double, variables=variables, global_step=steps)
    worker = ah.WorkerSessionCreator(double, variables=variables, global_step=steps)
    async with ah.AsyncMonitoredSession(chief) as first, ah.AsyncMonitoredSession(worker) as second:
        assert [await session.run("loss", {"batch": 3}) for session in (first, second)] == [6, 6]
    assert steps.latest.step == 2


async def test_a_creator_may_be_the_users_own() -> None:
    """Any object with a `graph` and an async `create_session` is a SessionCreator; its store and variables are used."""
    graph, steps = counting_graph(), ah.MemoryStepStore(10)

    class Creator:
        created = 0

        @property
        def graph(self) -> ah.Graph:
            return graph

        async def create_session(self) -> ah.Session:
            self.created += 1
            return ah.Session(graph, global_step=steps)

    creator = Creator()
    async with ah.AsyncMonitoredSession(creator) as session:
        await session.run("train")
        assert session.global_step is steps
    assert (steps.latest.step, creator.created) == (11, 1)
