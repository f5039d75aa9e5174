"""Session creators: the order of a scaffold, chiefs that initialise once, workers that wait for
them, sessions of a factory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import invalid, refused
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import counting_graph
from tests.support.waiting import parked

pytestmark = pytest.mark.every_python

SCAFFOLD = ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn")


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
    record = list[str]()
    variables = ah.Variables()
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


# -- chiefs and workers


async def test_a_failed_initial_value_reaches_every_chief_and_worker() -> None:
    """Each chief gets the error of its own attempt, a worker that of a chief after which no other
    was trying.
    """
    errors = [OSError(f"no file {number}") for number in range(3)]
    left = errors.copy()
    graph = ah.Graph()
    variables = ah.Variables()

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
    steps = ah.MemoryStepStore(10)
    hook = RequestingHook("total", None, {"trace": True})

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


# -- TensorFlow's own tests (71-80, 190-224 in the table)


async def test_a_chief_needs_no_scaffold() -> None:
    """Without one the variables are initialised and ready; before, none had a value. A graph may
    have none, or nothing at all.
    """
    variables = ah.Variables()
    assert variables.snapshot() == {}
    session = await ah.ChiefSessionCreator(counting_graph(), variables=variables).create_session()
    assert variables.snapshot() == {"total": 0}
    assert variables.ready
    assert await session.run("total") == 0
    graph = ah.Graph()
    graph.operation(name="one")(lambda: 1)
    assert await (await ah.ChiefSessionCreator(graph).create_session()).run("one") == 1
    assert await (await ah.ChiefSessionCreator(ah.Graph()).create_session()).run([]) == []


async def test_a_ready_function_may_raise_what_is_missing() -> None:
    """The error of a check that fails by raising leaves the creation as it is, and the session is
    closed.
    """
    made: list[ah.Session] = []

    async def check(session: ah.Session) -> None:
        made.append(session)
        if len(made) == 1:
            raise LookupError("the table is not there")

    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=ah.Scaffold(ready_fn=check))
    with pytest.raises(LookupError, match="the table is not there"):
        await creator.create_session()
    assert made[0].closed
    session = await creator.create_session()
    assert session is made[1]
    assert not session.closed


# -- workers


async def test_a_worker_initialises_what_is_its_own() -> None:
    """A worker's functions are called when the chief's variables are ready, not before, and its
    `init_fn` never.
    """
    record = list[str]()
    variables = ah.Variables()
    graph = counting_graph()
    worker = ah.WorkerSessionCreator(
        graph, variables=variables, scaffold=recording_scaffold(record)
    )
    creating = await parked(worker.create_session(), 5)
    assert record == []
    await ah.ChiefSessionCreator(graph, variables=variables).create_session()
    await creating
    assert record == [*SCAFFOLD[1:]]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            "ready_for_local_init_fn",
            "the chief's initialization did not make the model ready for local_init",
        ),
        ("ready_fn", "the chief's initialization did not make the model ready"),
    ],
)
async def test_a_worker_that_is_not_ready_fails(part: str, says: str) -> None:
    """A worker whose own checks return what is missing fails immediately, with its name; waiting
    would not help.
    """
    record = list[str]()
    variables = ah.Variables()
    graph = counting_graph()
    scaffold = recording_scaffold(record, **{part: [["w", "x"]]})
    await ah.ChiefSessionCreator(graph, variables=variables).create_session()
    worker = ah.WorkerSessionCreator(graph, variables=variables, scaffold=scaffold)
    with refused(ah.errors.NotReadyError, says, "['w', 'x']"):
        await worker.create_session()
    assert record == [*SCAFFOLD[1 : SCAFFOLD.index(part) + 1]]


async def test_a_later_chief_still_initialises_what_is_local() -> None:
    """With initialised variables `init_fn` is left out, `local_init_fn` is not."""
    record = list[str]()
    variables = ah.Variables()
    graph = counting_graph()
    scaffold = recording_scaffold(record)
    for _ in range(2):
        await ah.ChiefSessionCreator(graph, variables=variables, scaffold=scaffold).create_session()
    assert record == [*SCAFFOLD, *SCAFFOLD[1:]]


# -- the global step


@pytest.mark.parametrize(
    "step", [1.0, np.float32(2), [1], (1,), np.array([3]), np.zeros(2, int)], ids=repr
)
async def test_the_global_step_is_one_whole_number(step: Any) -> None:
    """Another type, and more than one number, is no step, not to begin with and not later."""
    with invalid("step", "whole number"):
        ah.MemoryStepStore(step)
    steps = ah.MemoryStepStore()
    with invalid("step", "whole number"):
        await steps.raise_to(step)
    assert steps.latest.step == 0


async def test_a_scaffold_that_is_cancelled_by_other_code_fails_the_opening() -> None:
    """It is an error of the creation, and no cancellation of the caller."""

    async def initialize(*_: object) -> None:
        raise asyncio.CancelledError

    creator = ah.ChiefSessionCreator(ah.Graph(), scaffold=ah.Scaffold(init_fn=initialize))
    with pytest.raises(ah.errors.HookCancelledError, match="creating a session"):
        async with ah.AsyncMonitoredSession(creator):
            pass
