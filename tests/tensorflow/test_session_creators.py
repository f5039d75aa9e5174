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
