"""A learner that is killed with items that it has received, and a worker that sends them.

    python -m tests.support.learner_and_worker learner URL DIRECTORY STEPS KILLED_AT
    python -m tests.support.learner_and_worker worker URL DIRECTORY

The worker sends items through a version gate to a socket in the directory. The learner uses one
item for each step, and saves each step. It kills itself after the save of step `KILLED_AT`, when it
has received all items that the gate admits; 0 for never.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohooks as ah

MAX_LAG = 2


class _Inbox:
    """The items that a learner has received."""

    def __init__(self) -> None:
        self.items = asyncio.Queue[ah.stores.Position]()
        self.changed = asyncio.Event()

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive an item, and answer."""
        epoch, step = map(int, (await reader.readline()).split())
        self.items.put_nowait(ah.stores.Position(epoch, step))
        self.changed.set()
        writer.write(b"received\n")
        await writer.drain()
        writer.close()


class _DieAfterSave(ah.hooks.CheckpointSaverListener):
    """Kills the process after the save of a step, when all places of the gate are shipped."""

    def __init__(self, step: int, inbox: _Inbox) -> None:
        self._step = step
        self._inbox = inbox

    async def after_save(self, session: ah.Session, global_step: int) -> None:
        """Wait for all items that the gate admits, and die."""
        if global_step == self._step:
            while self._inbox.items.qsize() <= MAX_LAG:
                self._inbox.changed.clear()
                await self._inbox.changed.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def store(url: str) -> ah.StepStore:
    """Return the store of the versions, whose leases are short."""
    options = {} if url.startswith("local") else {"lease_secs": 4.0}
    return ah.open_step_store(url, run="weights", on_lost="keep", **options)


async def learn(url: str, directory: Path, steps: int, killed_at: int) -> None:
    """Make the steps up to `steps`, each with an item, and report the last one."""
    inbox = _Inbox()
    socket = directory / "socket"
    socket.unlink(missing_ok=True)  # of the process that was killed
    async with (
        await asyncio.start_unix_server(inbox.receive, socket),
        store(url) as versions,
    ):
        print("ready", flush=True)
        gate = ah.version_gate.VersionGate(versions, max_lag=MAX_LAG)

        async def use_item() -> None:
            while gate.lag_of(await inbox.items.get()) > MAX_LAG:
                pass

        creator = ah.ChiefSessionCreator(
            use_item, checkpoint_dir=directory / "checkpoints", global_step=versions
        )
        listener = _DieAfterSave(killed_at, inbox)
        hooks = [
            ah.StopAtStepHook(last_step=steps),
            ah.CheckpointSaverHook(every=ah.Every(steps=1), background=False, listeners=[listener]),
        ]
        async with ah.AsyncMonitoredSession(creator, hooks, name="learner") as session:
            async for _ in session.steps():
                pass
        print(f"learned {versions.latest.step}")


async def work(url: str, directory: Path) -> None:
    """Send items until the learner has finished."""
    async with store(url) as versions:
        gate = ah.version_gate.VersionGate(versions, max_lag=MAX_LAG)
        try:
            while True:
                async with gate.admit() as ticket:
                    await send(directory / "socket", ticket.position)
        except ah.errors.PublisherFinishedError:
            print("finished")


async def send(socket: Path, position: ah.stores.Position) -> None:
    """Send an item, and wait until the learner has received it, or is gone."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(f"{position.epoch} {position.step}\n".encode())
        await reader.readline()
        writer.close()


def main(role: str, url: str, directory: str, *numbers: str) -> None:
    """Run the process."""
    if role == "worker":
        ah.run(work, url, Path(directory))
    else:
        steps, killed_at = map(int, numbers)
        ah.run(learn, url, Path(directory), steps, killed_at)


if __name__ == "__main__":
    main(*sys.argv[1:])
