"""The server of `tests.fuzz.service_stop`: a service whose session is held in one phase of its life.

    python -m tests.fuzz._stopped_service SERVER PHASE LISTENER_FD

`GET /go` lets the session enter the phase, and "held" is printed once it is there; most phases end after a byte on the standard
input. Every phase has the reason that clients which wait for a step must get.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import hypercorn.asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService
from aiohooks.checkpoint import Saver
from tests.support.hooks import EveryPhaseHook

SERVERS = ("uvicorn", "hypercorn")
GRACE_SECS = 2.0
SERVER_SECS = 10
"""How long a server waits for its clients."""
LIMIT_SECS = SERVER_SECS + 2 * GRACE_SECS
"""How long the end of the process may take, from the signal on: see "Ending" in docs/guides/services.md."""
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


async def wait_for_feeds(session: ah.AsyncMonitoredSession) -> None:
    """Wait for a feed that does not come."""
    await session.until(asyncio.Event().wait())


@dataclass(frozen=True, slots=True)
class Held:
    """A session that is held in its phase.

    Attributes:
        session: the session.
        loop: its loop of steps.
        notifies: whether something in the session prints that it is in the phase; otherwise it is there from the beginning, or
            with `ends` once it has ended.
        ends: whether the loop ends the session before the signal.
    """

    session: ah.AsyncMonitoredSession
    loop: Loop = wait_for_feeds
    notifies: bool = True
    ends: bool = False


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
    creator = ah.ChiefSessionCreator(model(), checkpoint_dir=directory)
    async with ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook(every=ah.Every(steps=1))]) as session:
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


class HoldingDisk:
    """A file system that holds the session at a call, once the phase may be entered."""

    def __init__(self, hold: Hold, call: str, *, immediately: bool) -> None:
        self._hold = hold
        self._call = call
        self._immediately = immediately

    def __getattr__(self, name: str) -> Any:
        call: Any = getattr(os, name)
        if name != self._call or not (self._immediately or self._hold.entered):
            return call

        def held(*arguments: Any, **options: Any) -> Any:
            self._call = ""
            self._hold.hold()
            return call(*arguments, **options)

        return held


# -- the phases


def engine(hold: Hold, directory: str) -> Held:
    """The engine of the step store does not answer."""
    store = ah.open_step_store("redis://127.0.0.1:1")
    return Held(ah.AsyncMonitoredSession(model(), global_step=store), notifies=False)


def chief(hold: Hold, directory: str) -> Held:
    """A worker waits for its chief."""
    return Held(ah.AsyncMonitoredSession(ah.WorkerSessionCreator(model(), variables=ah.Variables())), notifies=False)


def restoring(hold: Hold, directory: str) -> Held:
    """A slow disk, when a checkpoint is restored."""
    Saver._fs = HoldingDisk(hold, "read", immediately=True)
    return Held(ah.AsyncMonitoredSession(ah.ChiefSessionCreator(model(), checkpoint_dir=directory)))


def in_hook(method: str) -> Callable[[Hold, str], Held]:
    """Return a phase inside a hook."""

    def make(hold: Hold, directory: str) -> Held:
        async def run_once(session: ah.AsyncMonitoredSession) -> None:
            await hold.wait_entered()
            await session.run("train")
            await wait_for_feeds(session)

        return Held(ah.AsyncMonitoredSession(model(), [HoldingHook(hold, method)]), run_once)

    return make


def in_hook_after_stop(method: str) -> Callable[[Hold, str], Held]:
    """Return a phase inside a hook of a session that was stopped before the signal."""

    def make(hold: Hold, directory: str) -> Held:
        return Held(ah.AsyncMonitoredSession(model(), [HoldingHook(hold, method)]), stopping_itself(hold))

    return make


def stopping_itself(hold: Hold) -> Loop:
    """Return a loop that stops the session and returns."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await hold.wait_entered()
        session.request_stop("enough")

    return loop


def idle(hold: Hold, directory: str) -> Held:
    """The loop waits for feeds."""
    return Held(ah.AsyncMonitoredSession(model()), notifies=False)


def stepping(hold: Hold, directory: str) -> Held:
    """One step after the other."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        async for _ in session.steps("train"):
            await asyncio.sleep(0)

    return Held(ah.AsyncMonitoredSession(model()), loop, notifies=False)


def long_step(hold: Hold, directory: str) -> Held:
    """A step that never ends, and is cancelled after the grace period."""

    async def step() -> dict[str, int]:
        await hold.wait_entered()
        print_held()
        await asyncio.Event().wait()
        return {"loss": 0}

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await session.run("loss")

    return Held(ah.AsyncMonitoredSession(step), loop)


def computing(hold: Hold, directory: str) -> Held:
    """A step that computes, and so stops the loop."""

    async def step() -> dict[str, int]:
        print_held()
        while not session.should_stop():
            pass
        return {"loss": 0}

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await hold.wait_entered()
        await session.run("loss")

    session = ah.AsyncMonitoredSession(step)
    return Held(session, loop)


def saving(hold: Hold, directory: str) -> Held:
    """A slow disk, when a checkpoint is written."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await hold.wait_entered()
        async for _ in session.steps("train"):
            await asyncio.sleep(0)

    Saver._fs = HoldingDisk(hold, "fsync", immediately=False)
    creator = ah.ChiefSessionCreator(model(), checkpoint_dir=directory)
    return Held(ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook(every=ah.Every(steps=1))]), loop)


class HeldPause(ah.Backoff):
    """A pause of an hour."""

    def pause_secs(self, attempt: int) -> float:
        """Notify that it begins."""
        print_held()
        return 3600


def recovering(backoff: ah.Backoff, hold_in: str) -> Callable[[Hold, str], Held]:
    """Return a phase inside a recovery."""

    def make(hold: Hold, directory: str) -> Held:
        failed = False

        async def step() -> dict[str, int]:
            nonlocal failed
            if not failed:
                failed = True
                raise ah.AbortedError("the run was lost")
            return {"loss": 0}

        async def loop(session: ah.AsyncMonitoredSession) -> None:
            await hold.wait_entered()
            await session.run("loss")
            await wait_for_feeds(session)

        recovery = ah.RecoveryPolicy(backoff=backoff)
        return Held(ah.AsyncMonitoredSession(step, [HoldingHook(hold, hold_in, 2)], recovery=recovery), loop)

    return make


def ended(hold: Hold, directory: str) -> Held:
    """The session has ended."""
    return Held(ah.AsyncMonitoredSession(model()), stopping_itself(hold), notifies=False, ends=True)


def failed(hold: Hold, directory: str) -> Held:
    """The session has failed."""

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await hold.wait_entered()
        raise OSError("out of paper")

    return Held(ah.AsyncMonitoredSession(model()), loop, notifies=False, ends=True)


PHASES: dict[str, tuple[Callable[[Hold, str], Held], str]] = {
    "begin": (in_hook("begin"), SIGTERM),
    "waiting for the engine": (engine, SIGTERM),
    "waiting for the chief": (chief, SIGTERM),
    "restoring": (restoring, SIGTERM),
    "created": (in_hook("after_create_session"), SIGTERM),
    "waiting for feeds": (idle, SIGTERM),
    "stepping": (stepping, SIGTERM),
    "before a run": (in_hook("before_run"), SIGTERM),
    "in a long step": (long_step, SIGTERM),
    "in a step that computes": (computing, SIGTERM),
    "after a run": (in_hook("after_run"), SIGTERM),
    "saving": (saving, SIGTERM),
    "pause before a recovery": (recovering(HeldPause(), ""), SIGTERM),
    "recovering": (recovering(ah.Backoff(0, 0), "after_create_session"), SIGTERM),
    "stopping": (in_hook_after_stop("end"), EARLIER),
    "closing": (in_hook_after_stop("close"), EARLIER),
    "ended": (ended, EARLIER),
    "failed": (failed, FAILED),
}
"""The session's life in order, and what clients get that wait for a step."""


def make_app(held: Held, hold: Hold) -> Starlette:
    """Make the application around the service of a session."""
    service = SessionService(held.session, held.loop, grace_secs=GRACE_SECS, max_streams=BACKLOG)

    async def go(request: Request) -> JSONResponse:
        hold.enter()
        if held.ends:
            assert service._runner is not None
            await service._runner.ended.wait()
        if not held.notifies:
            print_held()
        return JSONResponse({})

    async def waiting(request: Request) -> JSONResponse:
        return JSONResponse([service._waiters, service._streams])

    routes = [Mount("/training", service), Route("/go", go), Route("/waiting", waiting)]
    return Starlette(routes=routes, lifespan=service.lifespan)


def serve(server: str, app: Starlette, listener: socket.socket) -> None:
    """Run a server until its end."""
    if server == "uvicorn":
        options: dict[str, Any] = {"log_level": "error", "access_log": False, "backlog": BACKLOG}
        uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=SERVER_SECS, **options)).run([listener])
    else:
        config = hypercorn.Config()
        config.bind = [f"fd://{listener.detach()}"]
        config.backlog = BACKLOG
        config.graceful_timeout = SERVER_SECS
        config.loglevel = "ERROR"
        asyncio.run(hypercorn.asyncio.serve(cast("Any", app), config))


def main() -> None:
    """Serve until a signal."""
    server, phase, fd = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        asyncio.run(save(directory))
        hold = Hold()
        make_held, _ = PHASES[phase]
        serve(server, make_app(make_held(hold, directory), hold), socket.socket(fileno=int(fd)))


if __name__ == "__main__":
    main()
