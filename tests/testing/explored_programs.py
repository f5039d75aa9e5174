"""Programs for `explore`: planted bugs of different kinds, and correct programs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import aiohooks as ah
from aiohooks.testing import (
    always,
    choose,
    may_happen,
    unreliable,
)
from aiohooks.testing.exploration import DISTURBANCES, Disturbance

Program = Callable[..., Awaitable[Any]]


class Defect(NamedTuple):
    """A program with a planted bug."""

    problem: str
    """The beginning of what `explore` reports."""
    program: Program
    disturb: list[Disturbance]
    most: int
    """The most disturbances to which it is shrunk."""


DEFECTS: dict[str, Defect] = {}
CORRECT: dict[str, tuple[Program, list[Disturbance]]] = {}


def defect(problem: str, *without: Disturbance, most: int = 3) -> Callable[[Program], Program]:
    """Add a program with a planted bug, which is explored without these disturbances."""

    def add(program: Program) -> Program:
        DEFECTS[program.__name__] = Defect(problem, program, other_kinds(without), most)
        return program

    return add


def correct(*without: Disturbance) -> Callable[[Program], Program]:
    """Add a program in which nothing is to be found, without these disturbances."""

    def add(program: Program) -> Program:
        CORRECT[program.__name__] = (program, other_kinds(without))
        return program

    return add


def other_kinds(without: Sequence[Disturbance]) -> list[Disturbance]:
    """Return all kinds of disturbances but these."""
    return [kind for kind in DISTURBANCES if kind not in without]


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
    first = asyncio.Lock()
    second = asyncio.Lock()

    async def use(one: asyncio.Lock, other: asyncio.Lock, secs: float) -> None:
        await asyncio.sleep(secs)
        async with one:
            await asyncio.sleep(0)
            async with other:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(use(first, second, 0))
        group.create_task(use(second, first, 0.01))


@defect("a cancel was lost")
async def a_cancel_swallowed_in_a_finally() -> None:
    background = asyncio.create_task(asyncio.sleep(100))
    try:
        await asyncio.sleep(1)
    finally:
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background
            await asyncio.sleep(0)


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


@defect("a deadlock")
async def a_timer_that_wakes_no_task() -> None:
    def again() -> None:
        asyncio.get_running_loop().call_later(1, again)

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
async def a_file_left_open() -> None:
    open(__file__)  # noqa: ASYNC230, SIM115
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


ONLY_ORDER: tuple[Disturbance, ...] = ("cancel", "slow")
"""What is left out where a bug is one of the order alone."""


@defect("an error: ExceptionGroup", *ONLY_ORDER, most=9)
async def a_value_used_before_a_slow_start() -> None:
    connection = None

    async def connect() -> None:
        nonlocal connection
        await asyncio.sleep(0)
        connection = object()

    async def use() -> None:
        await turns(6)
        assert connection is not None

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(connect())
        tasks.create_task(use())


@defect("an error: AssertionError", *ONLY_ORDER, most=20)
async def a_cache_filled_with_an_old_value() -> None:
    cache: dict[str, int] = {}
    version = 0

    async def write() -> None:
        nonlocal version
        for _ in range(3):
            version += 1
            await asyncio.sleep(0)
            cache["version"] = version
            await asyncio.sleep(0)

    async def read() -> None:
        found = version
        await turns(2)
        if "version" not in cache:
            await asyncio.sleep(0)
            cache["version"] = found

    async with asyncio.TaskGroup() as tasks:
        for act in (write, read, read):
            tasks.create_task(act())
    assert cache["version"] == version


@defect("a deadlock", *ONLY_ORDER, most=20)
async def three_philosophers() -> None:
    forks = [asyncio.Lock() for _ in range(3)]

    async def eat(left: asyncio.Lock, right: asyncio.Lock, thoughts: int) -> None:
        await turns(thoughts)
        async with left:
            await turns(2)
            async with right:
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(eat(forks[number], forks[(number + 1) % 3], 5 * number))


@defect("an error: AssertionError", *ONLY_ORDER, most=20)
async def a_head_that_is_the_same_again() -> None:
    head = "a"
    freed = False
    popped_freed = False

    async def pop() -> None:
        nonlocal popped_freed
        expected = head
        await turns(4)
        if head == expected:
            popped_freed = freed

    async def replace() -> None:
        nonlocal head, freed
        await turns(3)
        head = "b"
        freed = True
        await turns(3)
        head = "a"
        await turns(3)
        freed = False

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pop())
        tasks.create_task(replace())
    assert not popped_freed


@defect("an error: AssertionError", *ONLY_ORDER, most=60)
async def a_round_that_passes_all_tasks_in_their_middle() -> None:
    passed = 0
    positions = [0] * 8

    async def walk(number: int) -> None:
        nonlocal passed
        for position in range(6):
            await asyncio.sleep(0)
            positions[number] = position
            others_wait = all(other <= 1 for other in positions[number + 1 :])
            if number == passed and position >= 3 and others_wait:
                passed += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(walk(number))
    assert passed < 2


async def turns(number: int) -> None:
    """Let other tasks run so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


class Bank:
    """A server of payments, with a client that pays again when a connection is lost."""

    def __init__(self, remembers: bool) -> None:
        self.paid: list[bytes] = []
        self.remembers = remembers
        self.handlers: set[asyncio.Task[Any]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each line."""
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            async for line in reader:
                if not (self.remembers and line in self.paid):
                    self.paid.append(line)
                writer.write(b"paid\n")
                await writer.drain()

    async def pay(self, port: int, payment: bytes) -> None:
        """Pay once, by as many requests as it takes."""
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.closing(writer):
                    writer.write(payment)
                    if await reader.readline() == b"paid\n":
                        return
            await asyncio.sleep(1)

    async def serve(self, clients: int) -> None:
        """Serve so many clients, which pay at the same time."""
        async with await asyncio.start_server(self.handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with asyncio.TaskGroup() as tasks:
                for number in range(clients):
                    tasks.create_task(self.pay(port, f"{number}\n".encode()))
        await asyncio.wait(self.handlers)
        assert len(self.paid) == clients


@defect("an error: AssertionError", "cancel")
async def a_payment_made_again_after_a_lost_connection() -> None:
    await Bank(remembers=False).serve(1)


async def _step() -> dict[str, int]:
    await asyncio.sleep(0.001)
    return {"loss": 1}


@correct()
async def gathered_sleeps() -> None:
    """Wait for several coroutines."""
    await asyncio.gather(asyncio.sleep(0.1), asyncio.sleep(0.1), asyncio.sleep(0.2))


@correct()
async def a_queue_with_a_time_limit() -> None:
    """Wait for an element that does not come, and end a task."""
    timer = asyncio.create_task(asyncio.sleep(0.05))
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Queue[int]().get(), 0.1)
    finally:
        timer.cancel()
        await asyncio.wait([timer])


@correct("cancel", "failure")
async def a_connection() -> None:
    """Send lines over a connection, and wait for the end of both sides."""
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.write(await reader.read())
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer):
            writer.write(b"data")
            writer.write_eof()
            assert await reader.read() == b"data"
        await served.wait()


@correct("cancel")
async def clients_that_pay_again() -> None:
    """Use a network that loses connections."""
    await Bank(remembers=True).serve(2)


@correct()
async def a_task_that_polls() -> None:
    """Wait for another task by looking again and again."""
    is_ready = False

    async def prepare() -> None:
        nonlocal is_ready
        await turns(5)
        is_ready = True

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prepare())
        while not is_ready:  # noqa: ASYNC110 - it is what the program is about
            await asyncio.sleep(0)


@correct()
async def a_thread() -> None:
    """Wait for a thread."""
    assert await asyncio.to_thread(sum, (1, 2)) == 3
