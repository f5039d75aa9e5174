"""Worker processes that use one run of the local store, for the programs that kill and stop them.

They are forked, so that a new one costs milliseconds, by a process that has no event loop and no thread. Commands and results
are lines of JSON in pipes. Each worker counts in shared memory what it has begun to add to the step and what was acknowledged,
so that the counts outlive it when it is killed.
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
from tests.support.waiting import HANG_SECS

Prepare = Callable[[], object]
MakeLoop = Callable[[], asyncio.AbstractEventLoop]


class StuckError(Exception):
    """A result did not come in time, or a process did not end."""


class WorkerProcess:
    """One worker, as the process that forked it sees it."""

    def __init__(
        self,
        directory: Path,
        run: str,
        *,
        loop: MakeLoop = asyncio.new_event_loop,
        prepare: Prepare | None = None,
        worker: type[Worker] | None = None,
    ) -> None:
        """Fork it; it calls `prepare` before it opens the store, and has the commands of `worker`."""
        commands_in, self._commands = os.pipe()
        self._results, results_out = os.pipe()
        # Each number is one store of eight bytes: `struct.pack_into` writes zeros first, and the process may be killed between.
        self._counts = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._numbers = 0
        self._partial_line = b""
        self._unclaimed: dict[int, dict[str, Any]] = {}
        self.pid: int = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._commands)
                os.close(self._results)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                logging.getLogger("aiohooks").setLevel(logging.CRITICAL)
                if prepare is not None:
                    prepare()
                serving = (worker or Worker)(directory, run, commands_in, results_out, self._counts)
                with asyncio.Runner(loop_factory=loop) as runner:
                    runner.run(serving.serve())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(commands_in)
        os.close(results_out)
        self.status: int | None = None

    def start(self, command: str, **arguments: Any) -> int:
        """Send a command; return its number, for `result`."""
        self._numbers += 1
        # A dead worker does not read.
        with contextlib.suppress(BrokenPipeError):
            message = {"number": self._numbers, "command": command, **arguments}
            os.write(self._commands, json.dumps(message).encode() + b"\n")
        return self._numbers

    def result(self, number: int, secs: float = HANG_SECS) -> dict[str, Any]:
        """Wait for the result of a command; return an empty one if the worker has died."""
        until = time.monotonic() + secs
        while number not in self._unclaimed:
            if not select.select([self._results], [], [], max(0.0, until - time.monotonic()))[0]:
                raise StuckError(f"process {self.pid} has not answered in {secs:g} s")
            data = os.read(self._results, 1 << 16)
            if not data:
                return {}
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                result = json.loads(line)
                self._unclaimed[result["number"]] = result
        return self._unclaimed.pop(number)

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        return self.result(self.start(command, **arguments))

    @property
    def counts(self) -> tuple[int, int]:
        """How much it has begun to add to the step, and how much of that was acknowledged."""
        return self._counts[0], self._counts[1]

    def send(self, number: int) -> float:
        """Send a signal; return the time."""
        os.kill(self.pid, number)
        return time.monotonic()

    def ends_within(self, secs: float) -> bool:
        """Wait up to `secs` seconds for its end; return whether it has ended."""
        watch = os.pidfd_open(self.pid)
        try:
            return bool(select.select([watch], [], [], secs)[0])
        finally:
            os.close(watch)

    def wait_stopped(self) -> None:
        """Wait until a stop signal has taken effect."""
        os.waitpid(self.pid, os.WUNTRACED)

    def reap(self) -> int:
        """Wait for its end; return its status, which is negative for a signal."""
        if self.status is None:
            if not self.ends_within(HANG_SECS):
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.status = -signal.SIGKILL
                self._close()
                raise StuckError(f"process {self.pid} has not ended")
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._close()
        return self.status

    def _close(self) -> None:
        os.close(self._commands)
        os.close(self._results)


class Worker:
    """The worker itself; its public coroutine methods are the commands."""

    def __init__(self, directory: Path, run: str, commands: int, results: int, counts: memoryview[int]) -> None:
        self.store = LocalStepStore(directory, run=run)
        self._commands = commands
        self._results = results
        self._counts = counts
        self._quit = asyncio.Event()
        self._partial_line = b""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._commands, self._read_commands)
        await self._quit.wait()
        loop.remove_reader(self._commands)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.aclose()

    def _read_commands(self) -> None:
        data = os.read(self._commands, 1 << 16)
        if not data:
            self._quit.set()
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._start_task(self._run_command(json.loads(line)))

    def _start_task(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_command(self, message: dict[str, Any]) -> None:
        number, command = message.pop("number"), message.pop("command")
        method: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, command)
        try:
            result = {"result": await method(**message)}
        except AiohooksError as error:
            result = {"error": type(error).__name__, "text": str(error)}
        os.write(self._results, json.dumps({"number": number, "at": time.monotonic(), **result}).encode() + b"\n")

    # The commands.

    async def ping(self) -> None:
        await asyncio.sleep(0)

    async def wait(self, step: int) -> int:
        return await self.store.wait_for(step)

    async def parked(self) -> int:
        """Return the number of waits, once the engine knows of them."""
        await self.store.value()
        await asyncio.gather(*self.store._tasks)  # pyright: ignore[reportPrivateUsage] - one of them may be subscribing
        return self.store.statistics().waiting

    async def advance(self, times: int, by: int = 1) -> int:
        step = 0
        for _ in range(times):
            self._counts[0] += by
            step = await self.store.advance(by)
            self._counts[1] += by
        return step

    async def keep_advancing(self) -> None:
        while True:
            await self.advance(1)
            await asyncio.sleep(0)

    async def lead(self) -> int:
        """Lead, and publish, until it quits; return the number of the term."""
        number: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def lead() -> None:
            with self.store.publisher("chief"):
                async with self.store.lead() as term:
                    await self.store.mark_initialised()
                    number.set_result(term.number)
                    await self._quit.wait()

        self._start_task(lead())
        return await number

    async def hold_lock(self) -> None:
        """Take the lock of the run for good, as if the process had been stopped while it held it."""
        await self.store.value()
        fd = os.open(self.store.directory, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)

    async def value(self) -> int:
        return (await self.store.value()).step

    async def quit(self) -> None:
        self._quit.set()
        await asyncio.sleep(0)
