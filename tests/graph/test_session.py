"""The raw session: one run of a graph's operations, all or nothing."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import notes_of
from tests.support.checks import refused
from tests.support.sessions import counting_graph
from tests.support.waiting import HANG_SECS, parked, until_true

pytestmark = pytest.mark.every_python

# -- all or nothing


@pytest.mark.parametrize(
    ("add", "step", "error"),
    [("text", 0, TypeError), (1, 2**53 - 1, ah.errors.InvalidArgumentError)],
    ids=["add", "step"],
)
async def test_a_commit_that_fails_changes_nothing(
    add: Any, step: int, error: type[Exception]
) -> None:
    """If a value cannot be added, or the global step cannot advance, neither the other variables
    nor the step change.
    """
    graph = ah.Graph()
    graph.variable("number", 1)
    graph.variable("other", 1)
    graph.operation(name="more", adds_to="other")(lambda: 1)
    graph.train_op(name="train", adds_to="number")(lambda: add)
    session = ah.Session(graph, global_step=ah.MemoryStepStore(step))
    with pytest.raises(error, match=r"unsupported operand|would lead to step") as caught:
        await session.run(["more", "train"])
    if error is TypeError:
        assert notes_of(caught.value)[0].startswith(
            "the operation returned a value of type str, which cannot be added to variable 'number'"
        )
    assert session.variables.snapshot() == {"number": 1, "other": 1}
    assert session.global_step.latest.step == step


@pytest.mark.parametrize("thread", [False, True])
async def test_an_error_says_which_operation_raised_it(thread: bool) -> None:
    """The error of an operation, also in a thread, is the same object with its cause, and a note of
    its name and the step.
    """
    graph = ah.Graph()
    error = ValueError("bad")

    def train() -> None:
        raise error from KeyError("cause")

    graph.train_op(ah.in_thread(train) if thread else train)
    session = ah.Session(graph, global_step=ah.MemoryStepStore(7))
    with pytest.raises(ValueError, match="bad") as caught:
        await session.run("train")
    assert caught.value is error
    assert error.__notes__ == ["raised by operation 'train' at step 8"]
    assert repr(error.__cause__) == "KeyError('cause')"


# -- updates of overlapping runs


def replacing_graph() -> tuple[ah.Graph, list[int], asyncio.Event]:
    """Make a graph whose `double` waits, then replaces `v` by twice the value that it read, which
    is recorded.
    """
    graph = ah.Graph()
    read = list[int]()
    gate = asyncio.Event()
    graph.variable("v", 1)
    graph.variable("other", 0)

    @graph.train_op(updates="v")
    async def double(v: int) -> int:
        read.append(v)
        await gate.wait()
        return 2 * v

    graph.operation(name="set", updates="v")(lambda: 100)
    graph.operation(name="add", adds_to="v")(lambda: 5)
    graph.operation(name="same", updates="v")(lambda v: v)
    graph.operation(name="change_other", updates="other")(lambda v: v)
    return graph, read, gate


@pytest.mark.parametrize("count", [2, 3, 50])
async def test_a_run_that_was_overtaken_is_repeated(count: int) -> None:
    """No run is lost if several runs read and replace a variable at the same time, in one session
    or in several. A run that was overtaken is repeated.
    """
    graph, read, gate = replacing_graph()
    variables = ah.Variables()
    steps = ah.MemoryStepStore()
    sessions = [ah.Session(graph, variables=variables, global_step=steps) for _ in range(2)]
    runs = [await parked(sessions[number % 2].run("double")) for number in range(count)]
    gate.set()
    assert sorted(await asyncio.gather(*runs)) == [2**number for number in range(1, count + 1)]
    assert (variables.snapshot()["v"], steps.latest.step) == (2**count, count)
    assert set(read) == {2**number for number in range(count)}


async def test_a_run_that_never_comes_through_is_refused() -> None:
    """A run that is overtaken in every attempt ends with UpdateConflictError, from which sessions
    recover; it changes nothing.
    """
    graph = ah.Graph()
    attempts = list[int]()
    graph.variable("v", 0)

    @graph.train_op(updates="v")
    async def train(v: int) -> int:
        attempts.append(v)
        await session.run("overtake")
        return -1

    graph.operation(name="overtake", updates="v")(lambda v: v + 1)
    session = ah.Session(graph)
    with refused(
        ah.errors.UpdateConflictError, "replaces 'v'", "each of its 100 attempts", "adds_to="
    ) as caught:
        await session.run("train")
    assert isinstance(caught.value, ah.AbortedError)
    assert attempts == list(range(100))
    assert (session.variables.snapshot(), session.global_step.latest.step) == ({"v": 100}, 0)


async def test_a_run_of_a_closed_session_is_not_repeated() -> None:
    """A run that was overtaken after its session was closed ends: the session of a recovery has the
    variables now.
    """
    graph, read, gate = replacing_graph()
    session = ah.Session(graph)
    run = await parked(session.run("double"))
    session.variables.assign({"v": 7})
    await session.aclose()
    gate.set()
    with refused(ah.errors.SessionClosedError, "this session is closed"):
        await run
    assert (read, session.variables.snapshot()["v"]) == ([1], 7)


async def test_a_train_operation_may_train_several_steps() -> None:
    """`steps` of all train operations of a run are added to the global step; other runs do not
    advance it.
    """
    graph = ah.Graph()
    graph.train_op(name="one")(lambda: None)
    graph.train_op(name="four", steps=4)(lambda: None)
    graph.operation(name="none")(lambda: None)
    session = ah.Session(graph)
    seen = []
    for fetches in (["one"], ["four", "one"], ["none"], []):
        await session.run(fetches)
        seen.append((session.global_step.latest.step, session.committed_step))
    assert seen == [(1, 1), (6, 6), (6, 6), (6, 6)]


async def test_a_fed_variable_is_for_this_run_only() -> None:
    """Feeding a variable replaces what the run reads; what is added is added to its own value. A
    fed operation does not train.
    """
    session = ah.Session(counting_graph())
    assert await session.run(["total", "train"], {"total": 100}) == [100, 1]
    assert await session.run("train", {"train": 5}) == 5
    assert session.variables.snapshot() == {"total": 1}
    assert session.global_step.latest.step == 1


# -- overlapping operations


async def test_what_an_operation_sets_is_seen_by_those_that_need_it() -> None:
    """Operations see the context variables that were set by the operations whose results they need,
    the last in the graph's order. So does the caller afterwards. Other operations see the caller's.
    """
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="caller")
    graph = ah.Graph()
    seen = dict[str, str]()

    async def call(name: str) -> None:
        seen[name] = request.get()
        if name in ("first", "left"):
            request.set(name)
        await asyncio.sleep(0)

    @graph.operation
    async def first() -> None:
        await call("first")

    @graph.operation
    async def left(first: None) -> None:
        await call("left")

    @graph.operation
    async def right(first: None) -> None:
        await call("right")

    @graph.operation
    async def both(left: None, right: None) -> None:
        await call("both")

    @graph.operation
    async def apart() -> None:
        await call("apart")

    graph.operation(name="plain")(lambda right: seen.setdefault("plain", request.get()))
    await ah.Session(graph).run(["both", "apart", "plain"])
    assert seen == {
        "first": "caller",
        "left": "first",
        "right": "first",
        "both": "left",
        "apart": "caller",
        "plain": "first",
    }
    assert [*seen][:4] == ["first", "apart", "left", "right"]
    assert request.get() == "left"


async def test_what_cannot_wait_has_no_task() -> None:
    """Operations run in the caller's task and context until one of them may wait. That one has a
    task of its own, in which the operations that need its result run, too.
    """
    graph = ah.Graph()
    variable = contextvars.ContextVar[int]("variable")

    @graph.operation
    async def token() -> contextvars.Token[int]:
        return variable.set(1)

    @graph.operation
    async def waits() -> object:
        await asyncio.sleep(0)
        return asyncio.current_task()

    graph.operation(name="reset")(lambda token: variable.reset(token))
    graph.operation(name="before")(asyncio.current_task)
    graph.operation(name="after")(lambda waits: asyncio.current_task())
    before, _, waits_in, after = await ah.Session(graph).run(["before", "reset", "waits", "after"])
    assert before is asyncio.current_task() is not waits_in
    assert after is waits_in


# -- threads


async def test_a_thread_operation_runs_in_a_worker_thread() -> None:
    """`in_thread` runs a blocking function in another thread, beside the loop; a plain one runs in
    the loop's.
    """
    graph = ah.Graph()
    graph.placeholder("x")
    entered = threading.Event()
    leave = threading.Event()

    @graph.operation
    @ah.in_thread
    def blocks(x: int) -> tuple[int, threading.Thread]:
        entered.set()
        assert leave.wait(HANG_SECS)
        return x, threading.current_thread()

    graph.operation(name="inline")(lambda: threading.current_thread())
    run = asyncio.create_task(ah.Session(graph).run(["blocks", "inline"], {"x": 5}))
    await until_true(entered.is_set)
    leave.set()
    (x, thread), inline = await run
    assert x == 5
    assert inline is threading.current_thread()
    assert thread is not inline


# -- sessions


async def test_an_initial_value_may_be_made() -> None:
    """A function as the initial value is called for each session that initialises, once."""
    graph = ah.Graph()
    graph.variable("list", list)
    graph.variable("number", 5)
    session = ah.Session(graph)
    other = ah.Session(graph)
    value = await session.run("list")
    other_value = await other.run("list")
    assert value == other_value == []
    assert value is not other_value
    assert await session.run("list") is value
