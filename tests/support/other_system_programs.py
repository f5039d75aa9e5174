"""Uses the library on another system, as far as that can be made here.

python -m tests.support.other_system_programs win32 signals
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.support.other_systems import become

if __name__ == "__main__":  # and not in the processes that it starts, which import this module
    become(sys.argv[1])  # type: ignore[arg-type]

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService
from aiohooks.distributed import Task
from aiohooks.distributed.local import run_processes, run_tasks
from aiohooks.errors import CheckpointError, UnsupportedSystemError
from tests.support import smoke

PACKAGES = (
    "aiohooks",
    "aiohooks.checkpoint",
    "aiohooks.dispatch",
    "aiohooks.distributed",
    "aiohooks.errors",
    "aiohooks.hooks",
    "aiohooks.session",
    "aiohooks.stores",
    "aiohooks.stores.local",
    "aiohooks.testing",
    "aiohooks.version_gate",
    "aiohooks.adapters.asgi",
    "aiohooks.adapters.trackers",
)


async def step(batch: float) -> dict[str, float]:
    """One step of a training."""
    return {"loss": batch}


async def imports() -> None:
    """Every public name is there."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            assert getattr(module, name) is not None


async def core() -> None:
    """Hook groups, sessions, records and a step store work."""
    await smoke.core()


async def tasks() -> None:
    """A chief and workers run as tasks."""
    assert await run_tasks(task_id_of, num_workers=2) == [0, 1, 2]


async def signals() -> None:
    """A signal stops a session, and then the program ends with it."""
    async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
        signal.raise_signal(signal.SIGTERM)
        await session.coord.wait_for_stop()
        assert session.stop_signal is signal.SIGTERM


async def http() -> None:
    """A service replies over HTTP."""

    async def until_stopped(session: ah.AsyncMonitoredSession) -> None:
        await session.coord.wait_for_stop()

    service = SessionService(ah.AsyncMonitoredSession(step, name="trainer"), until_stopped)
    config = uvicorn.Config(service, port=0, log_level="error", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    async with service.lifespan():
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        reply = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/health")
        with reply:
            assert reply.status == 200
        await server.shutdown()


async def refusals() -> None:
    """What cannot work is refused at its first use, with what to do instead."""
    with pytest.raises(UnsupportedSystemError, match="Use run_tasks"):
        await run_processes(task_id_of, store="redis://localhost")
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(CheckpointError, match=r"use Linux, macOS, or Linux in Windows \(WSL\)"):
            ah.checkpoint.Saver(Path(folder, "checkpoints"))
        assert os.listdir(folder) == []


async def no_inotify() -> None:
    """The local store is refused when it is made, and so are processes that would share one."""
    for use in (
        lambda: ah.open_step_store("local://"),
        lambda: asyncio.run(run_processes(task_id_of)),
    ):
        with pytest.raises(UnsupportedSystemError, match=r"needs Linux.* use redis://"):
            await asyncio.to_thread(use)


async def unix() -> None:
    """What needs Unix works: checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        smoke.FOLDER = Path(folder)
        await smoke.checkpoint()


async def task_id_of(task: Task) -> int:
    """Return which task it is."""
    return task.task_id


PROGRAMS: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = {
    program.__name__: program
    for program in (imports, core, tasks, signals, http, refusals, no_inotify, unix)
}

if __name__ == "__main__":
    ah.run(PROGRAMS[sys.argv[2]])
