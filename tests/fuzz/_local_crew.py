"""Processes that use one run of the local store, and do what they are told; for the programmes that kill and stop them.

They are forked, so that a new one costs milliseconds, by a process that has no event loop and no thread. Orders and answers are
lines of JSON in pipes. What a process has begun to add to the step, and what was acknowledged, it counts in shared memory:
that is still there when it has been killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import mmap
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohooks import AiohooksError
from aiohooks.stores.local import LocalStepStore

PATIENCE_SECS = 30.0
"""After which an answer that has not come counts as stuck."""

Prepare = Callable[[], object]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class StuckError(Exception):
    """An answer has not come."""


class Crew:
    """One process, seen from the one that forked it."""

    def __init__(
        self,
        directory: Path,
        run: str,
        *,
        loop: MakeLoop = asyncio.new_event_loop,
        prepare: Prepare | None = None,
        member: type[Member] | None = None,
    ) -> None:
        """Forks it; it calls `prepare` before it opens the store, and does what a `member` can."""
        orders_in, self._orders = os.pipe()
        self._answers, answers_out = os.pipe()
        # Each number is one store of eight bytes: `struct.pack_into` writes zeros first, and one may be killed between.
        self._counts = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._numbers = 0
        self._read = b""
        self._early: dict[int, dict[str, Any]] = {}
        self.pid: int = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._orders)
                os.close(self._answers)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                logging.getLogger("aiohooks").setLevel(logging.CRITICAL)
                if prepare is not None:
                    prepare()
                serving = (member or Member)(directory, run, orders_in, answers_out, self._counts)
                with asyncio.Runner(loop_factory=loop) as runner:
                    runner.run(serving.serve())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(orders_in)
        os.close(answers_out)
        self.status: int | None = None

    def order(self, do: str, **what: Any) -> int:
        """Tells it to do something; returns the number of the answer to come."""
        self._numbers += 1
        # One that has died does not listen.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps({"number": self._numbers, "do": do, **what}).encode() + b"\n")
        return self._numbers

    def answer(self, number: int, secs: float = PATIENCE_SECS) -> dict[str, Any]:
        """The answer to an order; an empty one if the process has died."""
        until = time.monotonic() + secs
        while number not in self._early:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise StuckError(f"process {self.pid} has not answered in {secs:g} s")
            data = os.read(self._answers, 1 << 16)
            if not data:
                return {}
            *lines, self._read = (self._read + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                self._early[told["number"]] = told
        return self._early.pop(number)

    def do(self, do: str, **what: Any) -> dict[str, Any]:
        """Orders, and waits for the answer."""
        return self.answer(self.order(do, **what))

    @property
    def counts(self) -> tuple[int, int]:
        """How much it has begun to add to the step, and how much of that was acknowledged."""
        return self._counts[0], self._counts[1]

    def send(self, number: int) -> float:
        """Sends a signal; returns when."""
        os.kill(self.pid, number)
        return time.monotonic()

    def ends_within(self, secs: float) -> bool:
        """Waits for its end, so long at most."""
        watch = os.pidfd_open(self.pid)
        try:
            return bool(select.select([watch], [], [], secs)[0])
        finally:
            os.close(watch)

    def stopped(self) -> None:
        """Waits until a stop signal has taken effect."""
        os.waitpid(self.pid, os.WUNTRACED)

    def reap(self) -> int:
        """Waits for its end; the status is negative for a signal."""
        if self.status is None:
            if not self.ends_within(PATIENCE_SECS):
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.status = -signal.SIGKILL
                self._close()
                raise StuckError(f"process {self.pid} has not ended")
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._close()
        return self.status

    def _close(self) -> None:
        os.close(self._orders)
        os.close(self._answers)


class Member:
    """The process itself."""

    def __init__(self, directory: Path, run: str, orders: int, answers: int, counts: memoryview[int]) -> None:
        self.store = LocalStepStore(directory, run=run)
        self._orders = orders
        self._answers = answers
        self._counts = counts
        self._quit = asyncio.Event()
        self._read = b""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._orders, self._listen)
        await self._quit.wait()
        loop.remove_reader(self._orders)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.aclose()

    def _listen(self) -> None:
        data = os.read(self._orders, 1 << 16)
        if not data:
            self._quit.set()
            return
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            task = asyncio.ensure_future(self._obey(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _obey(self, order: dict[str, Any]) -> None:
        number, do = order.pop("number"), order.pop("do")
        work: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, do)
        try:
            told = {"result": await work(**order)}
        except AiohooksError as error:
            told = {"error": type(error).__name__, "text": str(error)}
        self.tell({"number": number, "at": time.monotonic(), **told})

    def tell(self, told: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(told).encode() + b"\n")

    # The orders.

    async def ping(self) -> None:
        await asyncio.sleep(0)

    async def wait(self, step: int) -> int:
        return await self.store.wait_for(step)

    async def parked(self) -> int:
        """Once the engine knows what it waits for."""
        await self.store.value()
        await asyncio.gather(*self.store._tasks)  # pyright: ignore[reportPrivateUsage] - one of them may be arming
        return self.store.statistics().waiting

    async def advance(self, times: int, by: int = 1) -> int:
        step = 0
        for _ in range(times):
            self._counts[0] += by
            step = await self.store.advance(by)
            self._counts[1] += by
        return step

    async def advance_together(self, callers: int, times: int) -> int:
        """Several callers; counts all at the end."""

        async def one() -> None:
            for _ in range(times):
                await self.store.advance()

        await asyncio.gather(*(one() for _ in range(callers)))
        return callers * times

    async def go_on_advancing(self, pause: int = 0) -> None:
        while True:
            await self.advance(1)
            if not pause or self._counts[0] % pause == 0:
                await asyncio.sleep(0)

    async def go_on_waiting(self) -> None:
        """Waits for steps near and far, some of them only for a moment."""
        near = far = None
        while True:
            step = (await self.store.value()).step
            near = asyncio.ensure_future(self.store.wait_for(step + 3))
            far = asyncio.ensure_future(self.store.wait_for(step + 1000))
            await asyncio.sleep(0)
            far.cancel()
            await asyncio.wait([near, far])

    async def lead(self) -> int:
        """Leads, and publishes, until it quits."""
        terming: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def term() -> None:
            with self.store.publisher("chief"):
                async with self.store.lead() as term:
                    await self.store.mark_initialised()
                    terming.set_result(term.number)
                    await self._quit.wait()

        task = asyncio.ensure_future(term())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await terming

    async def hold(self) -> None:
        """Takes the lock of the run for good, as if it had been stopped in the middle of something."""
        await self.store.value()
        fd = os.open(self.store.directory, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)

    async def value(self) -> int:
        return (await self.store.value()).step

    async def quit(self) -> None:
        self._quit.set()
        await asyncio.sleep(0)
