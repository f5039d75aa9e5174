"""Programs that hang, each for a reason of its own: `python -m tests.support.hangs NAME [URL]`
prints "ready" and hangs.

The line at which the user's code waits, and what it waits for, has the comment `# NAME`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import aiohooks as ah
from aiohooks.session import why


def unfolded(text: str) -> str:
    """Return the text of a wait-for graph with each chain of waits in one line."""
    return text.replace("\n    ", " ")


def disable_why() -> None:
    """Undo `enable_why`."""
    if (server := why._server) is not None:
        server.stop()
        why._server = None
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        if signal.getsignal(number) is why._print_why:
            signal.signal(number, signal.SIG_DFL)


def ready() -> None:
    """Say that the program is about to hang."""
    print("ready", flush=True)


async def train_step() -> None:
    """Do nothing."""


class Deadlock(ah.SessionRunHook):
    """Takes one lock, and then another."""

    def __init__(self, first: asyncio.Lock, second: asyncio.Lock) -> None:
        self.first, self.second = first, second

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Hold one, and wait for the other."""
        async with self.first:
            await asyncio.sleep(0)
            async with self.second:  # deadlock
                ready()


class InThread(ah.SessionRunHook):
    """Calls a function in a thread, which wants a lock that another thread has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    async def begin(self) -> None:
        """Start the other thread."""
        entered = threading.Event()

        def hold() -> None:
            with self.lock:
                entered.set()
                threading.Event().wait()

        threading.Thread(target=hold, name="uploader", daemon=True).start()
        entered.wait()

    def wanted(self) -> None:
        """Wait for the lock."""
        with self.lock:  # thread_lock
            pass

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Wait for the thread."""
        await asyncio.to_thread(self.wanted)  # awaits thread_lock


class Block(ah.SessionRunHook):
    """Blocks the event loop."""

    async def after_run(self, *_: object) -> None:
        """Wait, and do not await."""
        threading.Event().wait()  # blocked_loop


class HoldInterpreter(ah.SessionRunHook):
    """Calls C code that holds the interpreter's lock."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Sleep in C, from where no other thread can run."""
        ctypes.PyDLL(None).sleep(3600)


class Nest(ah.SessionRunHook):
    """Runs another session in each step."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Evaluate."""
        async with ah.AsyncMonitoredSession(train_step, [Forget()], name="evaluation") as session:
            await session.run(())  # outer nested


class Forget(ah.SessionRunHook):
    """Waits for an event that is never set."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Wait."""
        await asyncio.Event().wait()  # nested


async def fail() -> None:
    """Fail like a server that is away."""
    raise ah.UnavailableError("the data server is away")


async def run_steps(*hooks: ah.SessionRunHook, store: ah.StepStore | None = None) -> None:
    """Run steps until one hangs."""
    async with ah.AsyncMonitoredSession(
        train_step, hooks, global_step=store, name="chief"
    ) as session:
        for _ in range(9):
            await session.run(())  # run


async def deadlock(url: str) -> None:
    """Two hooks take two locks in different orders."""
    one, other = asyncio.Lock(), asyncio.Lock()
    await run_steps(Deadlock(one, other), Deadlock(other, one))


async def thread_lock(url: str) -> None:
    """A thread has a lock, and does not give it back."""
    await run_steps(InThread())


async def slow_disk(url: str) -> None:
    """The disk never answers."""
    hook = ah.CheckpointSaverHook(url, every=ah.Every(steps=1))
    os.fsync = lambda _: threading.Event().wait()  # type: ignore[assignment]  # slow_disk
    await run_steps(hook)


async def waits_for_step(url: str) -> None:
    """A worker waits for a step of another process."""
    async with ah.open_step_store(url, run="digits") as store:
        await run_steps(ah.hooks.GlobalStepWaiterHook(40), store=store)


async def publishes(url: str) -> None:
    """A chief makes a few steps, and then waits for what never comes."""
    async with (
        ah.open_step_store(
            url, run="digits", **({} if url.startswith("local:") else {"lease_secs": 3600.0})
        ) as store,
        ah.AsyncMonitoredSession(train_step, global_step=store, name="trainer") as session,
    ):
        for _ in range(3):
            await session.run(())
        ready()
        await asyncio.Event().wait()  # publishes


async def two_runs(directory: str) -> None:
    """The actor waits for new weights, and the learner for new rollouts."""
    async with asyncio.TaskGroup() as group:
        group.create_task(run_until("rollouts", "weights", f"local://{directory}"))
        group.create_task(run_until("weights", "rollouts", f"local://{directory}"))


async def run_until(own: str, other: str, url: str) -> None:
    """Run steps of a run that wait for a step of another one."""
    async with (
        ah.open_step_store(url, run=own) as store,
        ah.open_step_store(url, run=other) as awaited,
    ):

        class Want(ah.SessionRunHook):
            async def before_run(self, run_context: ah.SessionRunContext) -> None:
                await awaited.wait_for(9)  # two_runs

        await run_steps(Want(), store=store)


async def recovery(url: str) -> None:
    """The pause of a recovery is long."""
    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=600.0, max_secs=600.0, jitter=False))
    async with ah.AsyncMonitoredSession(fail, recovery=policy, name="chief") as session:
        await session.run(())  # recovery


async def blocked_loop(url: str) -> None:
    """A hook blocks the loop."""
    await run_steps(Block())


async def c_code(url: str) -> None:
    """A hook is in C code that lets no other thread run."""
    await run_steps(HoldInterpreter())


async def task_done(url: str) -> None:
    """A reader forgets `task_done`."""
    jobs: asyncio.Queue[int] = asyncio.Queue()

    async def read() -> None:
        while True:
            await jobs.get()

    async with ah.AsyncMonitoredSession(train_step, name="chief") as session:
        reader = session.start_soon(read, name="reader")
        await session.run(())
        jobs.put_nowait(1)
        await jobs.join()  # task_done
        reader.cancel()


async def nested(url: str) -> None:
    """A session in a hook of another one waits."""
    await run_steps(Nest())


async def engine_away(url: str) -> None:
    """The engine of the step store does not answer any more."""
    async with ah.open_step_store(url, run="digits") as store:
        hung = asyncio.get_running_loop().create_future()

        class Away(ah.SessionRunHook):
            async def after_run(self, *_: object) -> None:
                if not hung.done():
                    hung.set_result(None)
                    ready()
                    await asyncio.to_thread(sys.stdin.readline)  # until the engine is away

        await run_steps(Away(), store=store)


def line_of(comment: str) -> str:
    """Return the place of the line that has a comment, as messages have it."""
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"hangs.py:{number}"


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    name, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    if name not in ("publishes", "engine_away"):
        ready()
    ah.run(globals()[name], url)
