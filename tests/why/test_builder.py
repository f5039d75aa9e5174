"""Making the wait-for graph: what tasks and threads wait for, and who holds it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import re
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from aiohooks._why.builder import wait_graph
from tests.support.hangs import unfolded
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python
Start = Callable[..., asyncio.Task[Any]]


@contextlib.asynccontextmanager
async def starting() -> AsyncGenerator[Start]:
    """Yield what starts tasks that are cancelled in the end."""
    tasks: list[asyncio.Task[Any]] = []

    def start(coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        tasks.append(asyncio.create_task(coro, name=name))
        return tasks[-1]

    try:
        yield start
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def lines() -> list[str]:
    """Return the text of the graph, when all tasks wait."""
    await ticks()
    graph = wait_graph({asyncio.get_running_loop(): threading.get_ident()})
    return unfolded(str(graph)).splitlines()


async def lines_with(pattern: str) -> list[str]:
    """Return the text of the graph when a line has the pattern: threads take a moment."""
    text = await lines()
    while not found(text, pattern):
        text = await lines()
    return text


def found(text: list[str], pattern: str) -> bool:
    """Return whether a line has this; `@` is a place."""
    return any(re.search(pattern.replace("@", r"\S+\.py:\d+"), line) for line in text)


class Holder:
    """Has a lock that tasks take in several ways."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncGenerator[None]:
        """Hold it in a function of one's own."""
        async with self.lock:
            yield

    async def hold(self, how: str) -> None:
        """Hold it until cancelled."""
        if how == "with":
            async with self.lock:
                await asyncio.Event().wait()
        else:
            async with self.entered():
                await asyncio.Event().wait()

    async def want(self) -> None:
        """Wait for it."""
        async with self.lock:
            pass


async def test_since_when_a_task_waits() -> None:
    """The second question shows the seconds since the first one that found the same wait."""
    async with starting() as start:
        first, second = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            await first.wait()
            await second.wait()

        start(wait(), "waits")
        assert found(await lines(), r"^task 'waits', .*wait at @ waits for asyncio.Event.wait$")
        secs = r"^task 'waits', .*wait at @, \S+ s waits for asyncio.Event.wait$"
        assert found(await lines(), secs)
        first.set()
        assert not found(await lines(), secs)


@pytest.mark.parametrize("how", ["with", "context manager"])
async def test_the_holder_of_a_lock(how: str) -> None:
    """A lock is held by the task in whose `with` block it is, however it was entered; not by others
    that wait for it.
    """
    async with starting() as start:
        holder = Holder()
        start(holder.hold(how), "holder")
        await ticks()
        start(holder.want(), "first")
        start(holder.want(), "second")
        text = await lines()
        assert found(
            text,
            r"task '(?:first|second)', .* waits for asyncio.Lock.acquire <- task 'holder',"
            r" Holder.hold at @ <- asyncio.Event",
        )
        assert (
            sum(
                found([line], r"task '(?:first|second)', .* waits for asyncio.Lock")
                for line in text
            )
            == 2
        )
        assert not found(text, r"<- task '(first|second)'")


async def test_a_task_that_enters_a_block_does_not_hold_its_lock() -> None:
    """It waits for the one that has acquired it, and that is no deadlock."""
    async with starting() as start:
        holder = Holder()
        await holder.lock.acquire()

        async def want() -> None:
            async with holder.entered():
                pass

        start(want(), "wants")
        text = await lines()
        assert found(
            text,
            r"^task 'wants'.* waits for asyncio.Lock.acquire \(its holder is not known: no task is"
            r" in a `with` block of it",
        )
        assert len(text) == 2, text


@pytest.mark.plain_tasks  # an eager one would wait for itself before its name is bound
async def test_futures_that_are_shielded_or_gathered() -> None:
    """What sets them is awaited: not the task that awaits them, and not the one that has made
    them.
    """
    async with starting() as start:
        made: list[Any] = []

        async def make() -> None:
            inner = start(asyncio.wait([maker]), "inner")
            made.extend(
                (
                    asyncio.shield(inner),
                    asyncio.gather(inner, return_exceptions=True),
                    asyncio.as_completed([inner]),
                )
            )
            await asyncio.Event().wait()

        maker = start(make(), "maker")
        future = asyncio.get_running_loop().create_future()
        start(shielded(future), "shield")
        sleeps, waits = (
            start(anyio.sleep_forever(), "sleeps"),
            start(asyncio.Event().wait(), "waits"),
        )
        start(gathered(future, asyncio.shield(sleeps), waits), "gather")
        start(shielded(asyncio.gather(waits, future, return_exceptions=True)), "both")
        text = await lines()
        assert found(text, r"^task 'shield', shielded at \S+$"), text
        assert found(text, r"^task 'gather', .* waits for task 'sleeps'"), text
        assert found(text, r"^task 'gather', .* waits for task 'waits'"), text
        assert len([line for line in text if line.startswith("task 'both'")]) == 1, text
        assert found(text, r"^task 'both', .* waits for task 'waits'"), text
        assert found(text, r"^task 'inner' waits for task 'maker', .*make at @ <- asyncio.Event"), (
            text
        )
        assert not found(text, "^deadlock"), text


async def test_what_asyncio_and_anyio_have() -> None:
    """Semaphores, limiters, queues, events, conditions, groups, gathered and shielded tasks."""
    async with starting() as start:
        semaphore, limiter, queue = (
            asyncio.BoundedSemaphore(1),
            anyio.CapacityLimiter(1),
            asyncio.Queue[int](),
        )
        condition, event = asyncio.Condition(), asyncio.Event()

        async def hold(what: Any) -> None:
            async with what:
                await event.wait()

        async def get() -> None:
            await queue.get()

        async def in_group() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(event.wait(), name="member")

        async def notified() -> None:
            async with condition:
                await condition.wait()

        for name, what in (("semaphore", semaphore), ("limiter", limiter)):
            start(hold(what), f"holds {name}")
            start(hold(what), f"wants {name}")
        member = start(asyncio.Event().wait(), "inner")
        for name, coro in {
            "get": get(),
            "group": in_group(),
            "condition": notified(),
            "gather": gathered(member),
            "shield": shielded(member),
            "wait": waits(member),
        }.items():
            start(coro, name)
        text = await lines()
        for pattern in (
            (
                r"'wants semaphore', .* waits for asyncio.Semaphore.acquire"
                r" <- perhaps task 'holds semaphore'"
            ),
            (
                r"'wants limiter', .* waits for anyio.CapacityLimiter.acquire"
                r" <- perhaps task 'holds limiter'"
            ),
            r"'get', .* waits for asyncio.Queue.get$",
            r"'group', .* waits for task 'member'",
            r"'condition', .* waits for asyncio.Condition.wait$",
            r"'gather', .* waits for task 'inner'",
            r"'shield', .* waits for task 'inner'",
            r"'wait', .* waits for task 'inner'",
        ):
            assert found(text, pattern), "\n".join((pattern, *text))


async def test_what_else_is_waited_for() -> None:
    """A task under a time limit, in a group of anyio; the function of others; streams, a
    generator's lock.
    """
    async with starting() as start, contextlib.AsyncExitStack() as stack:
        semaphore, condition, barrier, event = (
            anyio.Semaphore(1),
            anyio.Condition(),
            asyncio.Barrier(3),
            asyncio.Event(),
        )
        send, receive = anyio.create_memory_object_stream[int](0)
        one, other = socket.socketpair()
        loop = asyncio.get_running_loop()
        for stream in (send, receive, one, other):
            stack.enter_context(stream)
        one.setblocking(False)

        async def hold() -> None:
            async with semaphore:
                await event.wait()

        async def in_group() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(event.wait, name="member")

        async def notified() -> None:
            async with condition:
                await condition.wait()

        async def read_from_stream() -> None:
            await receive.receive()

        async def by_completion(task: asyncio.Task[Any]) -> None:
            for next_one in asyncio.as_completed([task]):
                await next_one

        async def values() -> AsyncGenerator[int]:
            async with lock:
                yield 1

        async def iterate() -> None:
            async for _ in values():
                await event.wait()

        lock = asyncio.Lock()
        start(hold(), "holds semaphore")
        start(iterate(), "iterates")
        member = start(asyncio.Event().wait(), "inner")
        await ticks()
        for name, coro in {
            "semaphore": hold(),
            "barrier": barrier.wait(),
            "group": in_group(),
            "limited": asyncio.wait_for(member, 1000),
            "condition": notified(),
            "receive": read_from_stream(),
            "completed": by_completion(member),
            "lock": lock.acquire(),
            "socket": loop.sock_recv(one, 1),
            "stream": asyncio.StreamReader().read(1),
        }.items():
            start(coro, name)
        text = await lines()
        for pattern in (
            (
                r"'semaphore', .* waits for anyio.Semaphore.acquire <- perhaps task"
                r" 'holds semaphore'"
            ),
            r"'barrier'.* waits for asyncio.Barrier.wait$",
            r"'group', .* waits for task 'member'",
            r"'limited'.* waits for task 'inner'",
            r"'condition', .* waits for anyio.Condition.wait$",
            r"'receive', .* waits for anyio.MemoryObjectReceiveStream.receive$",
            r"'completed', .* waits for asyncio.(as_completed|_AsCompletedIterator)",
            r"'lock'.* waits for asyncio.Lock.acquire <- task 'iterates'",
            r"'stream'.* waits for asyncio.StreamReader.read$",
            (
                r"'socket'.* waits for asyncio.BaseSelectorEventLoop.sock_recv$"
                if isinstance(loop, asyncio.SelectorEventLoop)
                else ""
            ),  # or in C
        ):
            assert found(text, pattern), "\n".join((pattern, *text))


POOL = """
import asyncio, contextlib
class Pool:
    def __init__(self):
        self.free = asyncio.Semaphore(1)
    @contextlib.asynccontextmanager
    async def _acquired(self):
        async with self.free:
            yield
    def acquire(self):
        return Connection(self)
class Connection:
    def __init__(self, pool):
        self.entered = pool._acquired()
    async def __aenter__(self):
        await self.entered.__aenter__()
    async def __aexit__(self, *error):
        await self.entered.__aexit__(*error)
async def connect():
    await asyncio.Event().wait()
"""


def pool() -> dict[str, Any]:
    """Return the content of an installed package with a pool of one connection."""
    namespace: dict[str, Any] = {"__name__": "pool"}
    exec(compile(POOL, "/lib/site-packages/pool.py", "exec"), namespace)
    return namespace


async def test_the_line_is_not_that_of_an_installed_package() -> None:
    """A package may wait for its caller: the line is the caller's, if there is one, and the
    package's function follows.
    """
    async with starting() as start:
        connect = pool()["connect"]

        async def upload() -> None:
            await connect()

        start(upload(), "calls it")
        start(connect(), "its own")
        text = await lines()
        assert found(
            text,
            r"'calls it', .*upload at \S*test_builder.py:\d+ waits for pool.connect"
            r" <- asyncio.Event.wait$",
        )
        assert found(
            text,
            r"'its own', connect at /lib/site-packages/pool.py:\d+ waits for asyncio.Event.wait$",
        )


async def test_an_exhausted_pool() -> None:
    """The tasks that use its connections are named."""
    async with starting() as start:
        connections = pool()["Pool"]()

        async def upload() -> None:
            async with connections.acquire():
                await asyncio.Event().wait()

        start(upload(), "has it")
        await ticks()
        start(upload(), "wants it")
        assert found(
            await lines(),
            r"'wants it', .*upload at @ waits for pool.Connection.__aenter__"
            r" <- perhaps task 'has it', .*upload at @",
        )


async def gathered(*awaitables: Awaitable[Any]) -> None:
    """Wait under `gather`."""
    await asyncio.gather(*awaitables, asyncio.sleep(0))


async def shielded(future: asyncio.Future[Any]) -> None:
    """Wait under `shield`."""
    await asyncio.shield(future)


async def until_done(future: concurrent.futures.Future[None]) -> None:
    """Wait for a future of another library."""
    await asyncio.wrap_future(future)


async def waits(task: asyncio.Task[Any]) -> None:
    """Wait under `wait`."""
    await asyncio.wait([task])


async def test_threads() -> None:
    """A call in an executor's thread, one that has not begun, and what threads wait for."""
    async with starting() as start:
        lock, end = threading.Lock(), threading.Event()
        owner = threading.Thread(target=end.wait, name="owner")
        items: queue.Queue[int] = queue.Queue()

        def want() -> None:
            with lock:
                owner.join()
                items.get()

        owner.start()
        with (
            concurrent.futures.ThreadPoolExecutor(1, "pool") as pool,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(items.put, 1)
            stack.callback(end.set)
            loop = asyncio.get_running_loop()

            async def call(function: Callable[[], object]) -> None:
                await loop.run_in_executor(pool, function)

            thread = r"task 'first', .* waits for thread 'pool_0', .*want at @"
            with lock:
                start(call(want), "first")
                start(call(end.wait), "second")
                elsewhere: concurrent.futures.Future[None] = concurrent.futures.Future()
                start(until_done(elsewhere), "third")
                running: concurrent.futures.Future[None] = concurrent.futures.Future()
                running.set_running_or_notify_cancel()
                start(until_done(running), "fourth")
                text = await lines_with(rf"{thread}$")
            for name in ("second", "third"):
                assert found(text, rf"task '{name}', .* waits for a call that has not begun$"), text
            assert found(text, r"task 'fourth', .* waits for a call that no thread of this process")
            await lines_with(rf"{thread} <- thread 'owner' <- threading.Event.wait$")
            end.set()
            await lines_with(rf"{thread} <- queue.Queue.get$")
            with items.mutex:  # as in code that a signal has interrupted
                assert wait_graph({loop: 0}).edges


async def test_a_thread_that_waits_for_the_loop() -> None:
    """It waits for the task that it has started there, which may close a cycle."""
    async with starting() as start:
        holder = Holder()
        loop = asyncio.get_running_loop()
        calls: list[concurrent.futures.Future[None]] = []

        def wait() -> None:
            calls.append(asyncio.run_coroutine_threadsafe(holder.want(), loop))
            with contextlib.suppress(concurrent.futures.CancelledError):
                calls[0].result()

        async def hold() -> None:
            async with holder.lock:
                await asyncio.to_thread(wait)

        start(hold(), "holds")
        await lines_with(
            r"^deadlock: (?=.*hold at @(?:, \S+ s)? <- thread .*wait at @ <- task )"
            r".*Holder.want at @(?:, \S+ s)? <- asyncio.Lock.acquire <- task 'holds'"
        )
        calls[0].cancel()


async def test_no_code_of_users_is_called() -> None:
    """Objects whose attributes run code are not asked for them."""
    async with starting() as start:
        asked: list[str] = []

        class Curious:
            def __getattr__(self, name: str) -> Any:
                asked.append(name)
                raise RuntimeError(name)

            def __eq__(self, other: object) -> bool:
                asked.append("==")
                raise RuntimeError

            __hash__ = object.__hash__

            async def __aenter__(self) -> None:
                pass

            async def __aexit__(self, *_: object) -> None:
                pass

        async def wait(queue: asyncio.Queue[int], lock: asyncio.Lock) -> None:
            async with Curious(), lock:
                await queue.get()

        holder = Holder()
        start(wait(asyncio.Queue(), holder.lock), "waits")
        await ticks()
        start(holder.want(), "wants")
        assert found(
            await lines(),
            r"task 'wants', .* asyncio.Lock.acquire <- task 'waits', .* <- asyncio.Queue.get$",
        )
        assert asked == []


async def test_the_first_of_several_tasks_is_enough() -> None:
    """A wait for the first of them is no deadlock while another one can end."""
    lock = asyncio.Lock()

    async def both(other: asyncio.Task[Any]) -> None:
        async with lock:
            wanting = asyncio.create_task(lock.acquire(), name="wants it")
            try:
                await asyncio.wait([wanting, other], return_when=asyncio.FIRST_COMPLETED)
            finally:
                wanting.cancel()

    async with starting() as start:
        start(both(start(asyncio.Event().wait(), "other")), "both")
        text = await lines()
        assert found(text, r"task 'both', .*(?:waits for|<-) task 'other'")
        assert found(text, r"task 'wants it'.* asyncio.Lock.acquire <- task 'both'")
        assert not found(text, "deadlock")
