"""TensorFlow's own tests of scaffolds, session managers and the global step (71-80, 190-224 in the
table).

What tests/session/test_creators.py, tests/graph/test_variables.py and tests/graph/test_graph.py
have got is not here again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import invalid, refused
from tests.support.sessions import counting_graph
from tests.support.waiting import parked

pytestmark = pytest.mark.every_python


def noting(record: list[str], name: str) -> Any:
    """Make a function of a scaffold that records its name."""

    async def note(session: ah.Session) -> None:
        record.append(name)

    return note


async def test_a_scaffold_has_what_it_was_given() -> None:
    """A scaffold adds nothing: parts that were left out are None, the others are kept as they
    are.
    """

    async def ready(session: ah.Session) -> None: ...

    empty = ah.Scaffold()
    assert (
        empty.init_fn
        is empty.ready_for_local_init_fn
        is empty.local_init_fn
        is empty.ready_fn
        is None
    )
    assert ah.Scaffold(ready_fn=ready).ready_fn is ready
    with pytest.raises(AttributeError):
        ah.Scaffold().ready_fn = ready  # type: ignore[misc]


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


async def test_init_may_feed_the_graph() -> None:
    """`init_fn` may run operations with feeds: what they change is there when the block is
    entered.
    """

    async def init(session: ah.Session) -> None:
        assert await session.run("train", {"x": 37}) == 37

    creator = ah.ChiefSessionCreator(counting_graph(), scaffold=ah.Scaffold(init_fn=init))
    async with ah.AsyncMonitoredSession(creator) as session:
        assert await session.run(["total", "global_step"]) == [37, 1]


async def test_local_init_alone_is_enough() -> None:
    """A scaffold may have any part without the others: only `local_init_fn`, or only a check before
    it.
    """
    calls: list[str] = []

    async def not_ready(session: ah.Session) -> str:
        return "a table"

    scaffold = ah.Scaffold(local_init_fn=noting(calls, "local_init"))
    await ah.ChiefSessionCreator(counting_graph(), scaffold=scaffold).create_session()
    assert calls == ["local_init"]
    creator = ah.ChiefSessionCreator(
        counting_graph(), scaffold=ah.Scaffold(ready_for_local_init_fn=not_ready)
    )
    with refused(
        ah.errors.NotReadyError, "did not make the model ready for local_init", "a table"
    ) as caught:
        await creator.create_session()
    assert isinstance(caught.value, RuntimeError)


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
    """A worker's `local_init_fn` is called when the chief's variables are ready, not before, and
    its `init_fn` never.
    """
    record: list[str] = []
    variables, graph = ah.Variables(), counting_graph()

    parts = {
        name: noting(record, name)
        for name in ("init_fn", "ready_for_local_init_fn", "local_init_fn", "ready_fn")
    }
    worker = ah.WorkerSessionCreator(graph, variables=variables, scaffold=ah.Scaffold(**parts))
    creating = await parked(worker.create_session(), 5)
    assert record == []
    await ah.ChiefSessionCreator(graph, variables=variables).create_session()
    await creating
    assert record == ["ready_for_local_init_fn", "local_init_fn", "ready_fn"]


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
    calls: list[str] = []

    async def missing(session: ah.Session) -> list[str]:
        return ["w", "x"]

    parts: dict[str, Any] = {"local_init_fn": noting(calls, "local_init"), part: missing}
    variables, graph = ah.Variables(), counting_graph()
    await ah.ChiefSessionCreator(graph, variables=variables).create_session()
    worker = ah.WorkerSessionCreator(graph, variables=variables, scaffold=ah.Scaffold(**parts))
    with refused(ah.errors.NotReadyError, says, "['w', 'x']"):
        await worker.create_session()
    assert calls == (["local_init"] if part == "ready_fn" else [])


async def test_a_later_chief_still_initialises_what_is_local() -> None:
    """With initialised variables `init_fn` is left out, `local_init_fn` is not."""
    record: list[str] = []
    variables, graph = ah.Variables(), counting_graph()
    scaffold = ah.Scaffold(
        init_fn=noting(record, "init"), local_init_fn=noting(record, "local_init")
    )
    for _ in range(2):
        await ah.ChiefSessionCreator(graph, variables=variables, scaffold=scaffold).create_session()
    assert record == ["init", "local_init", "local_init"]


# -- the global step


async def test_every_graph_has_its_global_step() -> None:
    """There is one in each graph, always the same node, found by name; its value is a plain whole
    number.
    """
    graph, other = ah.Graph(), ah.Graph()
    assert graph.global_step is graph.global_step is graph.nodes["global_step"]
    assert graph.global_step is not other.global_step
    step = await ah.Session(graph, global_step=ah.MemoryStepStore(7)).run(graph.global_step)
    assert step == 7
    assert type(step) is int
    for add in (graph.placeholder, lambda name: graph.variable(name, 0)):
        with refused(ah.errors.GraphError, "'global_step' is already the name of") as caught:
            add("global_step")
        assert isinstance(caught.value, ValueError)


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
