"""The server of `tests.fuzz.service_stop`: a service whose session is held in one phase of its
life.

    python -m tests.fuzz._stopped_service SERVER PHASE LISTENER_FD GRACE_SECS

`GET /go` lets the session enter the phase, and "held" is printed once it is there; most phases end
after a byte on the standard input. Every phase has the reason that clients which wait for a step
must get.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import hypercorn.asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService
from aiohooks.checkpoint import Saver
from tests.support.checkpoint_files import Call, Seam
from tests.support.hooks import EveryPhaseHook

SERVERS = ("uvicorn", "hypercorn")
SERVER_GRACES = 5
"""How long a server waits for its clients, in grace periods of the session."""
LIMIT_GRACES = SERVER_GRACES + 2
"""How long the end of the process may take, from the signal on: see "Ending" in
docs/guides/services.md.
"""
BACKLOG = 4096

SIGTERM = "the session makes no more steps: the server received SIGTERM"
EARLIER = "the session makes no more steps: enough"
FAILED = "the session failed: OSError: out of paper"


class Hold:
    """Where the session waits in the middle of its phase."""

    def __init__(self) -> None:
        self._go = threading.Event()

    def enter(self) -> None:
        """Let the session enter its phase."""
        self._go.set()

    @property
    def entered(self) -> bool:
        return self._go.is_set()

    async def wait_entered(self) -> None:
        """Wait for the request to enter the phase."""
        await asyncio.to_thread(self._go.wait)

    def hold(self) -> None:
        """Wait in the phase until there is a byte on the standard input; in a thread."""
        self._go.wait()
        print_held()
        os.read(0, 1)

    async def __call__(self) -> None:
        """The same in the loop."""
        await asyncio.to_thread(self.hold)


def print_held() -> None:
    """Notify the process of the clients that the session is in the phase."""
    os.write(1, b"held\n")


Loop = Callable[[ah.AsyncMonitoredSession], Awaitable[None]]
Make = Callable[[Hold, str], tuple[ah.AsyncMonitoredSession, Loop]]
"""Makes a session that is held in its phase, and its loop of steps; gets the directory of its
checkpoints as well.
"""


class Phase(NamedTuple):
    """A phase of the session's life."""

    make: Make
    reason: str = SIGTERM
    """What clients get that wait for a step."""
    notifies: bool = True
    """Whether something in the session prints that it is in the phase; otherwise it is there from
    the beginning, or has ended.
    """
    ends: bool = False
    """Whether the loop ends the session before the signal."""


async def wait_for_feeds(session: ah.AsyncMonitoredSession) -> None:
    """Wait for a feed that does not come."""
    await session.until(asyncio.Event().wait())


async def keep_stepping(session: ah.AsyncMonitoredSession) -> None:
    """Make one step after the other."""
    async for _ in session.steps("train"):
        await asyncio.sleep(0)


def after_hold(hold: Hold, then: Loop) -> Loop:
    """Return a loop that begins when the session may enter the phase."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await hold.wait_entered()
        await then(session)

    return loop


def run_once(fetch: str) -> Loop:
    """Return a loop that makes one run, and then waits for feeds."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await session.run(fetch)
        await wait_for_feeds(session)

    return loop


async def stop_itself(session: ah.AsyncMonitoredSession) -> None:
    """Stop the session, and return."""
    session.request_stop("enough")


def model() -> ah.Graph:
    """Return a model with something to save."""
    graph = ah.Graph()
    graph.variable("weights", 0)

    @graph.train_op(adds_to="weights")
    async def train() -> int:
        return 1

    return graph


async def save(directory: str) -> None:
    """Make a checkpoint to restore."""
    async with session_of(
        saved_model(directory), ah.CheckpointSaverHook(every=ah.Every(steps=1))
    ) as session:
        await session.run("train")


class HoldingHook(EveryPhaseHook):
    """Holds the session in one of its calls, the n-th."""

    def __init__(self, hold: Hold, method: str, n: int = 1) -> None:
        self._hold = hold
        self._method = method
        self._left = n

    async def in_phase(self, phase: str, *args: Any) -> None:
        if phase == self._method:
            self._left -= 1
            if self._left == 0:
                await self._hold()


class HoldingDisk(Seam):
    """A file system that holds the session at an operation, once the phase may be entered."""

    def __init__(self, hold: Hold, name: str, *, immediately: bool) -> None:
        super().__init__()
        self._hold = hold
        self._name = name
        self._immediately = immediately

    def do(self, call: Call) -> Any:
        if call.name == self._name and (self._immediately or self._hold.entered):
            self._name = ""
            self._hold.hold()
        return call.make()


def session_of(source: Any, *hooks: ah.SessionRunHook, **options: Any) -> ah.AsyncMonitoredSession:
    """Make the session."""
    return ah.AsyncMonitoredSession(source, hooks, **options)


def saved_model(directory: str) -> ah.ChiefSessionCreator:
    """Return what creates a session with checkpoints."""
    return ah.ChiefSessionCreator(model(), checkpoint_dir=directory)


# The phases.


def in_hook(method: str, then: Loop) -> Make:
    """Return a phase inside a hook."""
    return lambda hold, directory: (
        session_of(model(), HoldingHook(hold, method)),
        after_hold(hold, then),
    )


def waiting_for(options: Callable[[], dict[str, Any]], loop: Loop) -> Make:
    """Return a phase of a session with these options, which is not held."""
    return lambda hold, directory: (session_of(**{"source": model(), **options()}), loop)


def ending(then: Loop) -> Make:
    """Return a phase after the loop has ended."""
    return lambda hold, directory: (session_of(model()), after_hold(hold, then))


def restoring(hold: Hold, directory: str) -> tuple[ah.AsyncMonitoredSession, Loop]:
    """A slow disk, when a checkpoint is restored."""
    Saver._fs = HoldingDisk(hold, "readv", immediately=True)
    return session_of(saved_model(directory)), wait_for_feeds


def saving(hold: Hold, directory: str) -> tuple[ah.AsyncMonitoredSession, Loop]:
    """A slow disk, when a checkpoint is written."""
    Saver._fs = HoldingDisk(hold, "fsync", immediately=False)
    saver = ah.CheckpointSaverHook(every=ah.Every(steps=1))
    return session_of(saved_model(directory), saver), after_hold(hold, keep_stepping)


def long_step(hold: Hold, directory: str) -> tuple[ah.AsyncMonitoredSession, Loop]:
    """A step that never ends, and is cancelled after the grace period."""

    async def step() -> dict[str, int]:
        await hold.wait_entered()
        print_held()
        await asyncio.Event().wait()
        return {"loss": 0}

    return session_of(step), run_once("loss")


def computing(hold: Hold, directory: str) -> tuple[ah.AsyncMonitoredSession, Loop]:
    """A step that computes, and so stops the loop."""

    async def step() -> dict[str, int]:
        print_held()
        while not session.should_stop():
            pass
        return {"loss": 0}

    session = session_of(step)
    return session, after_hold(hold, run_once("loss"))


class HeldPause(ah.Backoff):
    """A pause of an hour."""

    def pause_secs(self, attempt: int) -> float:
        """Notify that it begins."""
        print_held()
        return 3600


def recovering(backoff: ah.Backoff, hold_in: str) -> Make:
    """Return a phase inside a recovery."""

    def make(hold: Hold, directory: str) -> tuple[ah.AsyncMonitoredSession, Loop]:
        failures = [ah.AbortedError("the run was lost")]

        async def step() -> dict[str, int]:
            if failures:
                raise failures.pop()
            return {"loss": 0}

        policy = ah.RecoveryPolicy(backoff=backoff)
        return session_of(step, HoldingHook(hold, hold_in, 2), recovery=policy), after_hold(
            hold, run_once("loss")
        )

    return make


async def fail(session: ah.AsyncMonitoredSession) -> None:
    raise OSError("out of paper")


def no_engine() -> dict[str, Any]:
    return {"global_step": ah.open_step_store("redis://127.0.0.1:1")}


def no_chief() -> dict[str, Any]:
    return {"source": ah.WorkerSessionCreator(model(), variables=ah.Variables())}


PHASES: dict[str, Phase] = {
    "begin": Phase(in_hook("begin", wait_for_feeds)),
    "waiting for the engine": Phase(waiting_for(no_engine, wait_for_feeds), notifies=False),
    "waiting for the chief": Phase(waiting_for(no_chief, wait_for_feeds), notifies=False),
    "restoring": Phase(restoring),
    "created": Phase(in_hook("after_create_session", wait_for_feeds)),
    "waiting for feeds": Phase(waiting_for(dict, wait_for_feeds), notifies=False),
    "stepping": Phase(waiting_for(dict, keep_stepping), notifies=False),
    "before a run": Phase(in_hook("before_run", run_once("train"))),
    "in a long step": Phase(long_step),
    "in a step that computes": Phase(computing),
    "after a run": Phase(in_hook("after_run", run_once("train"))),
    "saving": Phase(saving),
    "pause before a recovery": Phase(recovering(HeldPause(), "")),
    "recovering": Phase(recovering(ah.Backoff(0, 0), "after_create_session")),
    "stopping": Phase(in_hook("end", stop_itself), EARLIER),
    "closing": Phase(in_hook("close", stop_itself), EARLIER),
    "ended": Phase(ending(stop_itself), EARLIER, notifies=False, ends=True),
    "failed": Phase(ending(fail), FAILED, notifies=False, ends=True),
}
"""The session's life in order."""


# The server.


def make_app(phase: Phase, hold: Hold, directory: str, grace_secs: float) -> Starlette:
    """Make the application around the service of a session."""
    session, loop = phase.make(hold, directory)
    service = SessionService(session, loop, grace_secs=grace_secs)

    async def go(request: Request) -> JSONResponse:
        hold.enter()
        if phase.ends:
            assert service._runner is not None
            await service._runner.ended.wait()
        if not phase.notifies:
            print_held()
        return JSONResponse({})

    async def waiting(request: Request) -> JSONResponse:
        gc.collect()
        return JSONResponse([service._waiters, tracemalloc.get_traced_memory()[0]])

    routes = [Mount("/training", service), Route("/go", go), Route("/waiting", waiting)]
    return Starlette(routes=routes, lifespan=service.lifespan)


def serve(server: str, app: Starlette, listener: socket.socket, grace_secs: float) -> None:
    """Run a server until its end."""
    server_secs = math.ceil(SERVER_GRACES * grace_secs)
    if server == "uvicorn":
        options: dict[str, Any] = {"log_level": "error", "access_log": False, "backlog": BACKLOG}
        uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=server_secs, **options)).run(
            [listener]
        )
    else:
        config = hypercorn.Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.backlog = BACKLOG
        config.graceful_timeout = server_secs
        config.loglevel = "ERROR"
        asyncio.run(hypercorn.asyncio.serve(cast("Any", app), config))


def main() -> None:
    """Serve until a signal."""
    server, name, fd, secs = sys.argv[1:]
    grace_secs = float(secs)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        asyncio.run(save(directory))
        app = make_app(PHASES[name], Hold(), directory, grace_secs)
        serve(server, app, socket.socket(fileno=int(fd)), grace_secs)


if __name__ == "__main__":
    main()
