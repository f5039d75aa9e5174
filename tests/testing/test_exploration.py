"""`explore`: what it finds in programs with one defect each, what it does not find in exact ones,
and how it repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
import threading
import time
from typing import Any

import anyio
import anyio.from_thread
import pytest

import aiohooks as ah
from aiohooks._core.clock import wake
from aiohooks.errors import InvalidArgumentError, UnsupportedSystemError
from aiohooks.testing import (
    ExplorationError,
    ManualClock,
    always,
    choose,
    explore,
    may_happen,
    unreliable,
)
from aiohooks.testing.exploration import Disturbance
from tests.testing.explored_programs import (
    CORRECT,
    DEFECTS,
    Program,
    _step,
    two_locks_in_another_order,
)


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_defect_is_found_made_small_and_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each planted bug is found within 1,000 seeds, with few disturbances, and its replay finds the
    same again.
    """
    problem, program, kinds, most = DEFECTS[name]
    monkeypatch.setattr("aiohooks.testing._schedule_run._MOST_STEPS", 2_000)
    monkeypatch.setattr("aiohooks.testing._schedule_run._MOST_TURNS", 2_000)
    with pytest.raises(ExplorationError) as found:
        await explore(program, disturb=kinds)
    assert str(found.value).startswith(problem)
    assert len(found.value.replay.split()) <= most
    with pytest.raises(ExplorationError) as again:
        await explore(program, replay=found.value.replay)
    assert str(again.value).startswith(problem)
    assert len(again.value.replay) <= len(found.value.replay)


async def test_the_message_says_where_tasks_waited_and_how_to_repeat_it() -> None:
    """A deadlock names both lines; the replay is in the message."""
    with pytest.raises(ExplorationError) as found:
        await explore(two_locks_in_another_order)
    text = str(found.value)
    assert text.count("two_locks_in_another_order.<locals>.use") >= 2
    assert f"replay={found.value.replay!r}" in text
    assert "disturbed: " in text


class Listener:
    """What hooks implement."""

    async def notify(self, number: int) -> None:
        """Do nothing."""


class Slow:
    """Waits, and is entered and left."""

    def __init__(self) -> None:
        self.open = False
        self.send = unreliable(self._send, ConnectionError)

    async def __aenter__(self) -> Slow:
        await asyncio.sleep(0)
        self.open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.open = False
        await asyncio.sleep(0.1)

    async def _send(self, number: int) -> None:
        await asyncio.sleep(0.01)

    async def notify(self, number: int) -> None:
        assert self.open
        await self.send(number)


async def group() -> None:
    """Call a group from several tasks."""
    hooks = [
        Slow(),
        ah.configure(Slow(), timeout=50),
        ah.configure(Slow(), background=True, max_pending=1),
    ]
    async with ah.HookGroup(Listener, hooks) as listeners, anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(listeners.hooks.notify, number)


async def trio_like_group() -> None:
    """Use what anyio has."""
    send, receive = anyio.create_memory_object_stream[int](1)
    got: list[int] = []
    async with anyio.create_task_group() as tasks, send, receive:
        tasks.start_soon(send.send, 1)
        got.append(await receive.receive())
    assert got == [1]


class Recording(ah.SessionRunHook):
    """Waits, and is closed once."""

    def __init__(self) -> None:
        self.closed = 0

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)

    async def close(self, exc: BaseException | None) -> None:
        self.closed += 1


async def session() -> None:
    """Run a session that handles signals."""
    hook = Recording()
    try:
        async with ah.AsyncMonitoredSession(
            _step, [hook, ah.StopAtStepHook(num_steps=3)], handle_signals=True
        ) as one:
            async for _ in one.steps("loss"):
                await asyncio.sleep(0)
    finally:
        assert hook.closed <= 1


@pytest.mark.parametrize(
    ("program", "seeds", "kinds"),
    [
        (group, 400, {"order", "slow", "failure", "cancel"}),
        (trio_like_group, 400, {"order", "cancel"}),
        (session, 400, {"order", "slow", "cancel"}),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
async def test_groups_and_sessions_keep_their_promises(
    program: Program, seeds: int, kinds: set[Disturbance]
) -> None:
    """Under all disturbances; and each kind that can happen does."""
    explored = await explore(program, seeds=seeds, disturb=kinds)
    assert explored.schedules == seeds + 1
    assert {*explored.disturbances} == kinds


@pytest.mark.parametrize("name", CORRECT)
async def test_a_correct_program_raises_no_alarm(name: str) -> None:
    """Tasks that a cancel has ended may finish in the turn in which the program ends."""
    program, kinds = CORRECT[name]
    assert (await explore(program, seeds=300, disturb=kinds)).schedules == 301


async def uses_a_thread_that_waits_for_a_timer() -> None:
    await anyio.to_thread.run_sync(anyio.from_thread.run, anyio.sleep, 1)


async def uses_a_subprocess() -> None:
    await asyncio.create_subprocess_exec("true")


async def uses_a_socket() -> None:
    with socket.socket() as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", 1))


async def uses_another_server() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def uses_a_thread_that_waits_for_more() -> None:
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: os.read(reader, 1))
    thread.start()
    try:
        await asyncio.sleep(1)
    finally:
        os.write(writer, b"1")
        thread.join()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (uses_a_subprocess, "subprocess_exec is outside of an exploration's schedule; replace"),
        (uses_a_socket, "sock_connect is outside of an exploration's schedule; replace"),
        (uses_another_server, "no server of this program listens at 127.0.0.1:1; an exploration"),
        (uses_a_thread_that_waits_for_a_timer, "a deadlock: a thread has not ended within 0.1 s"),
        (uses_a_thread_that_waits_for_more, "a deadlock: a thread has not ended within 0.1 s, at "),
    ],
)
async def test_what_is_outside_of_the_schedule_is_rejected(
    program: Program, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first run, with what to do."""
    monkeypatch.setattr("aiohooks.testing._schedule_run._THREAD_SECS", 0.1)
    with pytest.raises(ExplorationError, match=re.escape(says)) as caught:
        await explore(program)
    assert "(the first run, 1 schedules)" in str(caught.value)


async def test_all_problems_of_a_schedule_are_reported() -> None:
    """The end of the program comes first, then tasks that are left, then lost errors."""

    async def program() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "lost"})
        asyncio.create_task(asyncio.sleep(1))  # noqa: RUF006 - it is left
        raise ValueError("the first")

    with pytest.raises(ExplorationError) as caught:
        await explore(program)
    assert str(caught.value).splitlines()[:3] == [
        "an error: ValueError('the first') (the first run, 1 schedules)",
        "  also tasks are left: sleep",
        "  also an error was lost: lost",
    ]


async def test_the_same_seeds_are_the_same_schedules() -> None:
    """Twice the same, and from another first seed others."""
    first, again, other = [
        await explore(session, seeds=range(seed, seed + 30)) for seed in (0, 0, 30)
    ]
    assert first == again
    assert first != other


async def test_all_orders_of_a_small_program() -> None:
    """Three tasks of two parts each have 6! / 2!^3 = 90 orders. No event loop has 18 of them, in
    which a step overtakes the callback of a task that ended before; each other one is tried once.
    """
    orders: list[str] = []

    async def race() -> None:
        order = ""

        async def act(name: str) -> None:
            nonlocal order
            order += name
            await asyncio.sleep(0)
            order += name

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(act(name))
        orders.append(order)

    explored = await explore(race, disturb=["order"], exhaust=100)
    assert (explored.schedules, len(orders), len({*orders})) == (72, 72, 72)


async def test_one_cancel_at_every_wait_and_two() -> None:
    """With a cancel each: before each step of a task, and before the callback that would end a
    wait; with two: pairs of them.
    """
    ends: list[str] = []

    async def program() -> None:
        ends.append("")
        try:
            for number in "12":
                wait = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_soon(wake, wait)
                await wait
                ends[-1] += number
        finally:
            await asyncio.sleep(0)

    explored = await explore(program, disturb=["cancel"], exhaust=1)
    assert sorted(ends) == ["", "", "1", "1", "12", "12"]  # and once it does not begin
    assert explored.disturbances == {"cancel": 6}
    twice = await explore(program, disturb=["cancel"], exhaust=2)
    assert twice.schedules > explored.schedules


async def test_outside_of_an_exploration_nothing_is_chosen_and_nothing_happens() -> None:
    """The first value is returned; events and checks are not called."""
    with may_happen(lambda: 1 / 0), always(lambda: 1 / 0):
        assert choose("usual", "other") == "usual"
        await asyncio.sleep(0)


async def test_events_are_counted_by_name() -> None:
    """An event has the name of its function, or its own."""

    def drop() -> None:
        pass

    async def program() -> None:
        with may_happen(drop), may_happen(lambda: None, "some times"):
            await asyncio.sleep(0)

    explored = await explore(program, seeds=50, disturb=["event"])
    assert {*explored.disturbances} == {"event:drop", "event:some_times"}


async def test_a_cancelled_scope_of_anyio_waits_for_its_cleanup() -> None:
    """It is cancelled in each turn of the loop, and time passes all the same."""

    async def program() -> None:
        with anyio.move_on_after(1):
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(5)
        assert asyncio.get_running_loop().time() == 6

    await explore(program, seeds=5, disturb=["order"])


async def test_time_passes_while_a_task_ignores_repeated_cancels() -> None:
    """A scope of anyio cancels at every turn of the loop; a task that ignores this until a timer
    fires ends all the same.
    """

    async def ignore_cancels() -> None:
        timer = asyncio.ensure_future(asyncio.sleep(3))
        while not timer.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([timer])

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ignore_cancels)
            await asyncio.sleep(1)
            tasks.cancel_scope.cancel()

    await explore(program, seeds=5, disturb=["order"])


async def test_a_problem_that_does_not_come_again_says_so() -> None:
    """What is not decided by the schedule cannot be repeated by it."""
    runs = 0

    async def program() -> None:
        nonlocal runs
        runs += 1
        assert runs != 3

    with pytest.raises(ExplorationError, match="it did not come again with the same disturbances"):
        await explore(program)


async def test_a_replay_of_a_program_that_has_changed_is_tried() -> None:
    """A choice that there is no longer is the last one that there is; others are left out."""
    explored = await explore(trio_like_group, replay="order@1=99 order@999=1 cancel@999=1")
    assert (explored.schedules, explored.disturbances) == (1, {"order": 1})


async def test_time_is_virtual_and_threads_work() -> None:
    """An hour passes immediately, and what a thread returns arrives."""
    began = time.monotonic()
    main = threading.main_thread()

    async def wait() -> None:
        await asyncio.sleep(3600)
        assert await asyncio.to_thread(threading.current_thread) is not main
        assert await anyio.to_thread.run_sync(os.getpid) == os.getpid()

    await explore(wait, seeds=5, disturb=["order"])
    assert time.monotonic() - began < 3600


async def test_time_that_passes_in_an_unreliable_call_is_time() -> None:
    """A time limit of the program's own may end then."""

    async def limited() -> None:
        async with asyncio.timeout(0.5):
            await unreliable(asyncio.sleep)(0)

    assert (await explore(limited, seeds=100, disturb=["slow"])).disturbances["slow"] > 10


async def test_the_loop_that_explores_is_as_it_was_before() -> None:
    """The clock of the caller, its task and its loop are what they were."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    before = logging.root.manager.disable, gc.isenabled()
    with ManualClock() as clock:
        later = asyncio.create_task(asyncio.sleep(0))
        await explore(trio_like_group, seeds=5)
        assert (asyncio.current_task(), asyncio.get_running_loop(), clock.now()) == (task, loop, 0)
        assert (logging.root.manager.disable, gc.isenabled()) == before
        await later


@pytest.mark.parametrize("frozen", [True, False])
async def test_what_a_program_has_frozen_remains_frozen(frozen: bool) -> None:
    """Where a large program has taken its objects out of garbage collections, the next ones are not
    slow; else nothing is.
    """
    gc.freeze() if frozen else gc.unfreeze()
    try:
        await explore(trio_like_group, seeds=5)
        assert (gc.get_freeze_count() > 0) is frozen
    finally:
        gc.freeze()


async def test_outside_of_an_exploration_unreliable_functions_are_reliable() -> None:
    """They do what the function does."""

    async def double(number: int, *, times: int = 2) -> int:
        return number * times

    assert await unreliable(double, ConnectionError)(4, times=3) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"program": len},
            "program is <built-in function len>; give a coroutine function without arguments",
        ),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": [0.5]}, "a seed is 0.5"),
        ({"exhaust": 0}, "exhaust is 0"),
        ({"disturb": ["orders"]}, "a kind in disturb is 'orders'"),
        ({"disturb": []}, "disturb is empty; give a kind, or leave it out for all kinds"),
        (
            {"replay": "order@998=1 cancel@999=1"},
            "replay has order@998, cancel@999, and the program comes to none of these places",
        ),
        (
            {"replay": "cancel@3"},
            "replay is 'cancel@3'; give what an ExplorationError has as its `replay`",
        ),
    ],
)
async def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """With the value, and what to give."""
    with pytest.raises(InvalidArgumentError) as refused:
        await explore(**{"program": trio_like_group, **arguments})
    assert message in str(refused.value)


async def test_an_event_loop_that_cannot_be_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explore` raises an error if the event loop of a Python lacks the queue that a schedule
    replaces.
    """

    async def program() -> None: ...

    def without_queue(loop: asyncio.SelectorEventLoop, selector: object = None) -> None:
        vars(loop)["_closed"] = True  # so that nothing has to be closed

    monkeypatch.setattr(asyncio.SelectorEventLoop, "__init__", without_queue)
    with pytest.raises(UnsupportedSystemError, match="explore cannot choose"):
        await explore(program, seeds=1)
