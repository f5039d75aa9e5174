"""`explore`: what it finds in programs with one defect each, what it does not find in exact ones,
and how it repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
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
from aiohooks.testing.exploration import DISTURBANCES, Disturbance

Program = Callable[..., Awaitable[Any]]
DEFECTS: dict[str, tuple[str, Program, list[Disturbance]]] = {}


def defect(problem: str, *without: Disturbance) -> Callable[[Program], Program]:
    """Add a program in which `explore` has to find a problem that begins so, where no others
    distract it.
    """

    def add(program: Program) -> Program:
        DEFECTS[program.__name__] = (
            problem,
            program,
            [one for one in DISTURBANCES if one not in without],
        )
        return program

    return add


@defect("an error: AssertionError", "failure")
async def a_lost_update() -> None:
    balance = 0

    async def add(delay: int) -> None:
        nonlocal balance
        for _ in range(delay):
            await asyncio.sleep(0)
        before = balance
        await asyncio.sleep(0)
        balance = before + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(add(0))
        group.create_task(add(3))
    assert balance == 2


@defect("a deadlock")
async def two_locks_in_another_order() -> None:
    first, second = asyncio.Lock(), asyncio.Lock()

    async def use(one: asyncio.Lock, other: asyncio.Lock, secs: float) -> None:
        await asyncio.sleep(secs)
        async with one:
            await asyncio.sleep(0)
            async with other:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(use(first, second, 0))
        group.create_task(use(second, first, 0.01))


@defect("a cancel was lost", "timeout")
async def a_cancel_swallowed_in_a_finally() -> None:
    background = asyncio.create_task(asyncio.sleep(100))
    try:
        await asyncio.sleep(1)
    finally:
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background
            await asyncio.sleep(0)


@defect("a time limit was lost", "cancel")
async def a_time_limit_swallowed() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(1)


@defect("tasks are left: sleep")
async def a_forgotten_cleanup() -> None:
    background = asyncio.create_task(asyncio.sleep(100))
    await asyncio.sleep(1)
    background.cancel()
    await asyncio.wait([background])


@defect("a cancel was invented")
async def a_cancel_of_its_own() -> None:
    with contextlib.suppress(TimeoutError):
        await unreliable(asyncio.sleep, TimeoutError)(1)
        return
    raise asyncio.CancelledError


@defect("an error was lost: Task exception was never retrieved")
async def an_error_not_retrieved() -> None:
    async def fail() -> None:
        raise ValueError("not retrieved")

    await asyncio.wait([asyncio.create_task(fail())])


@defect("an error was lost: ")
async def a_coroutine_not_awaited() -> None:
    asyncio.sleep(1)  # type: ignore[unused-coroutine]


@defect("an error: AssertionError")
async def an_answer_lost_and_the_call_repeated() -> None:
    payments: list[int] = []

    async def pay(amount: int) -> None:
        payments.append(amount)

    try:
        await unreliable(pay, ConnectionError)(5)
    except ConnectionError:
        await pay(5)
    assert payments == [5]


@defect("an error: JSONDecodeError")
async def a_file_written_in_place(folder: Path) -> None:
    file = folder / "step.json"
    step = json.loads(file.read_text()) if file.exists() else 0
    with file.open("w") as out:
        await asyncio.sleep(0)
        out.write(json.dumps(step + 1))


@defect("a session is left open")
async def a_session_left_open() -> None:
    session = ah.AsyncMonitoredSession(_step)
    await session.__aenter__()
    await session.run([])
    await asyncio.sleep(1)


@defect("it does not end")
async def a_loop_without_an_end() -> None:
    for _ in iter(int, 1):
        await asyncio.sleep(0)


@defect("it does not end")
async def a_loop_that_swallows_its_cancels() -> None:
    for _ in iter(int, 1):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


@defect("a deadlock")
async def a_timer_that_wakes_no_task() -> None:
    def again() -> None:
        asyncio.get_running_loop().call_later(1, again)

    again()
    await asyncio.Event().wait()


@defect("a deadlock")
async def a_timer_that_is_due_again_and_again() -> None:
    def again() -> None:
        asyncio.get_running_loop().call_later(0, again)

    again()
    await asyncio.Event().wait()


@defect("a deadlock")
async def a_file_that_is_never_read() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(b"data")
        asyncio.get_running_loop().add_reader(reader, lambda: None)
        try:
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().remove_reader(reader)


@defect("an error was lost: ")
async def a_file_left_open(folder: Path) -> None:
    (folder / "steps").open("w")
    await asyncio.sleep(0)


@defect("an error: ValueError")
async def an_answer_that_is_not_handled() -> None:
    if choose(200, 404, 500, name="status") == 500:
        raise ValueError


@defect("it does not always hold: AssertionError")
async def a_balance_that_is_wrong_for_a_while() -> None:
    accounts = [5, 0]

    def check() -> None:
        assert sum(accounts) == 5

    with always(check):
        accounts[0] -= 1
        await asyncio.sleep(0)
        accounts[1] += 1


@defect("an error: ConnectionError")
async def a_connection_that_drops() -> None:
    connected = True

    def drop() -> None:
        nonlocal connected
        connected = False

    with may_happen(drop):
        await asyncio.sleep(1)
    if not connected:
        raise ConnectionError


async def _step() -> dict[str, int]:
    await asyncio.sleep(0.001)
    return {"loss": 1}


@pytest.mark.parametrize("name", DEFECTS)
async def test_a_defect_is_found_made_small_and_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is found within 1,000 seeds, with three disturbances at most, and its replay finds the
    same again.
    """
    problem, program, kinds = DEFECTS[name]
    monkeypatch.setattr("aiohooks.testing._schedule_run._MOST_STEPS", 2_000)
    monkeypatch.setattr("aiohooks.testing._schedule_loop._MOST_TURNS", 2_000)
    with pytest.raises(ExplorationError) as found:
        await explore(program, disturb=kinds)
    assert str(found.value).startswith(problem)
    assert len(found.value.replay.split()) <= 3
    with pytest.raises(ExplorationError) as again:
        await explore(program, replay=found.value.replay)
    assert str(again.value).startswith(problem)
    assert again.value.replay == found.value.replay


async def test_the_message_says_where_tasks_waited_and_how_to_repeat_it() -> None:
    """A deadlock names both lines; the replay is in the message."""
    with pytest.raises(ExplorationError) as found:
        await explore(two_locks_in_another_order)
    text = str(found.value)
    assert text.count("two_locks_in_another_order.<locals>.use") >= 2
    assert f"replay={found.value.replay!r}" in text
    assert "disturbed: " in text
    with pytest.raises(
        ExplorationError, match="disturbed: kill, as the program waits at a_file_written_in_place"
    ):
        await explore(a_file_written_in_place, disturb=["kill"])


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


async def saving_session(folder: Path) -> None:
    """Run a session with checkpoints, which is killed and continues."""
    hooks = [
        ah.CheckpointSaverHook(folder, every=ah.Every(steps=1)),
        ah.StopAtStepHook(last_step=3),
    ]
    graph = ah.Graph()
    graph.variable("count", 0)

    @graph.train_op(adds_to="count")
    async def train() -> int:
        await asyncio.sleep(0)
        return 1

    async with ah.AsyncMonitoredSession(
        ah.ChiefSessionCreator(graph, checkpoint_dir=folder), hooks
    ) as one:
        while not one.should_stop():
            step = await one.run(["train", "count"])
            assert step[1] == one.global_step.latest.step - 1


@pytest.mark.parametrize(
    ("program", "seeds", "kinds"),
    [
        (group, 400, {"order", "slow", "failure", "cancel", "timeout"}),
        (trio_like_group, 400, {"order", "cancel", "timeout"}),
        (session, 400, {"order", "slow", "cancel", "timeout", "stop", "signal"}),
        (saving_session, 60, {"order", "cancel", "timeout", "stop", "kill"}),
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


async def gathered_sleeps() -> None:
    """Wait for several coroutines."""
    await asyncio.gather(asyncio.sleep(0.1), asyncio.sleep(0.1), asyncio.sleep(0.2))


async def a_queue_with_a_time_limit() -> None:
    """Wait for an element that does not come, and end a task."""
    timer = asyncio.create_task(asyncio.sleep(0.05))
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Queue[int]().get(), 0.1)
    finally:
        timer.cancel()
        await asyncio.wait([timer])


async def cancelled_child() -> None:
    """Cancel a task, and wait for its end."""
    child = asyncio.create_task(asyncio.sleep(9))
    try:
        await asyncio.sleep(0.1)
    finally:
        child.cancel()
        await asyncio.gather(child, return_exceptions=True)


async def a_lock_in_a_task_group() -> None:
    """Take turns."""
    lock = asyncio.Lock()

    async def use() -> None:
        async with lock:
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(use())


@pytest.mark.parametrize(
    "program",
    [gathered_sleeps, a_queue_with_a_time_limit, cancelled_child, a_lock_in_a_task_group],
)
async def test_a_correct_program_raises_no_alarm(program: Program) -> None:
    """Tasks that a cancel has ended may finish in the turn in which the program ends."""
    assert (await explore(program, seeds=500)).schedules == 501


async def threads_that_need_the_loop() -> None:
    """Call the loop from threads."""
    loop = asyncio.get_running_loop()

    def sleep() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()

    await asyncio.to_thread(sleep)
    await anyio.to_thread.run_sync(anyio.from_thread.run, anyio.sleep, 0.01)


async def test_a_thread_that_waits_for_the_loop_does_not_stop_the_time() -> None:
    """The time jumps while threads wait for the loop, and the program ends."""
    await explore(threads_that_need_the_loop, seeds=5, disturb=["order", "slow"])


async def test_time_stands_still_while_a_subprocess_works() -> None:
    """A time limit does not end before a process that works, on a clock of its own."""

    async def program() -> None:
        async with asyncio.timeout(30):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "print(1)", stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
        assert output == b"1\n"

    await explore(program, seeds=2, disturb=["order"])


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
    killed = await explore(program, disturb=["kill"], exhaust=2)
    assert killed.schedules == 1  # it takes no directory


async def test_outside_of_an_exploration_nothing_is_chosen_and_nothing_happens() -> None:
    """The first value is returned; events and checks are not called."""
    with may_happen(lambda: 1 / 0), always(lambda: 1 / 0):
        assert choose("usual", "other") == "usual"
        await asyncio.sleep(0)


async def test_events_that_could_not_happen_are_no_disturbances() -> None:
    """Those that return False; and each has the name of its function, or its own."""

    async def program() -> None:
        with may_happen(lambda: False, "never"), may_happen(lambda: None, "some times"):
            await asyncio.sleep(0)

    explored = await explore(program, seeds=50, disturb=["event"])
    assert {*explored.disturbances} == {"event:some_times"}


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
    began, main = time.monotonic(), threading.main_thread()

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
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    before = logging.root.manager.disable, gc.isenabled()
    with ManualClock() as clock:
        later = asyncio.create_task(asyncio.sleep(0))
        await explore(trio_like_group, seeds=5)
        assert (asyncio.current_task(), asyncio.get_running_loop(), clock.now()) == (task, loop, 0)
        assert (logging.root.manager.disable, gc.isenabled()) == before
        await later


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks come with Python 3.12")
async def test_a_context_that_is_entered_twice_stops_no_other_loop() -> None:
    """Its task would remain the current one of the thread; the error is found, and the caller of
    `explore` continues.
    """

    async def program() -> None:
        options: dict[str, Any] = {
            "eager_start": True,
            "context": vars(asyncio)["current_task"]().get_context(),
        }
        asyncio.Task(asyncio.sleep(0), **options)

    task = asyncio.current_task()
    with pytest.raises(ExplorationError, match="cannot enter context"):
        await explore(program)
    assert asyncio.current_task() is task
    await asyncio.sleep(0)


async def test_a_program_with_a_connection_ends() -> None:
    """What asyncio does with a socket runs in its order, so that time passes."""

    async def program() -> None:
        served = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read())
            writer.close()
            await writer.wait_closed()
            served.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.sleep(0.01)
            writer.write(b"data")
            writer.write_eof()
            assert await reader.read() == b"data"
            writer.close()
            await writer.wait_closed()
            await served.wait()

    await explore(program, seeds=20, disturb=["order", "slow"])


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
            (
                "program is <built-in function len>; give a coroutine function, with one argument"
                " at most"
            ),
        ),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": [0.5]}, "a seed is 0.5"),
        ({"exhaust": 0}, "exhaust is 0"),
        ({"disturb": ["orders"]}, "a kind in disturb is 'orders'"),
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
