"""SIGTERM to a service in every phase of its session's life, while many clients wait.

    python -m tests.fuzz.service_stop --clients 2000 --server uvicorn

In each phase (`--phases` chooses some) the clients wait for a step. Then the server gets SIGTERM.
Every client must get a complete reply with the reason while the session is still in its phase, and
the server must have ended within its limits. Printed are the times from the signal to the last
reply, and to the end of the process. With `--memory` the server traces what Python allocates
(tracemalloc), and what each client costs is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz._stopped_service import BACKLOG, FAILED, LIMIT_GRACES, PHASES, SERVERS
from tests.support import processes
from tests.support.waiting import HANG_SECS

STEP = 10**9
"""A step that is not reached."""
GRACE_SECS = 2.0
"""The session's grace period; what limits the end of a service is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """How one service stopped.

    Attributes:
        reply_secs: from the signal to the last reply.
        end_secs: from the signal to the end of the process.
        client_bytes: what a client costs, its connection and request included; 0 if that was not
            measured.
        violations: what was wrong.
    """

    reply_secs: float
    end_secs: float
    client_bytes: float
    violations: list[str]


class Clients:
    """The clients of one service."""

    def __init__(self, port: int, waiters: int) -> None:
        self._port = port
        self._unanswered = waiters
        self.answered: asyncio.Event = asyncio.Event()
        """Set once all clients have got a reply, or an error."""
        self.waiting = [asyncio.ensure_future(self._wait_for_step()) for _ in range(waiters)]

    async def _wait_for_step(self) -> bytes:
        """Return all that the server sends until it closes the connection."""
        try:
            reader, writer = await send(self._port, f"/training/steps/{STEP}")
            reply = await reader.readuntil(b"}")
        finally:
            self._unanswered -= 1
            if self._unanswered == 0:
                self.answered.set()
        with contextlib.closing(writer):
            return reply + await reader.read()

    async def violations(self, reason: str) -> list[str]:
        """Return what is wrong with the replies, once the server has closed all connections."""
        replies = await asyncio.gather(*self.waiting, return_exceptions=True)
        return [
            f"a wait for a step: {reply!r}" for reply in replies if not has_reason(reply, reason)
        ]


async def send(
    port: int, path: str, header: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    return reader, writer


async def ask(port: int, path: str) -> Any:
    """Return the JSON of a reply."""
    reader, writer = await send(port, path, "Connection: close\r\n")
    with contextlib.closing(writer):
        return json.loads((await reader.read()).partition(b"\r\n\r\n")[2])


def has_reason(reply: bytes | BaseException, reason: str) -> bool:
    """Return whether a client that waits for a step has got the reason."""
    if isinstance(reply, BaseException) or not reply:
        return False
    head, _, body = reply.partition(b"\r\n\r\n")
    return (
        int(head.split()[1]) == (503 if reason == FAILED else 410)
        and json.loads(body)["message"] == reason
    )


async def stop_service(
    server: str, phase: str, count: int, grace_secs: float, *, memory: bool = False
) -> Stop:
    """Start a service, bring it into a phase while its clients wait, and stop it; with `memory`,
    measure what they cost.
    """
    limit_secs = LIMIT_GRACES * grace_secs
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz._stopped_service",
            server,
            phase,
            str(listener.fileno()),
            str(grace_secs),
        ]
        env = {**os.environ, **({"PYTHONTRACEMALLOC": "1"} if memory else {})}
        process = processes.start(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env
        )
        port: int = listener.getsockname()[1]
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_SECS):
            for _ in range(50 if memory else 1):  # for what is allocated once
                before = await ask(port, "/waiting")
            clients = Clients(port, count)
            while (now := await ask(port, "/waiting"))[0] != count:
                pass
            await ask(port, "/go")
            assert await asyncio.to_thread(process.stdout.readline) == "held\n"
            sent = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await clients.answered.wait()
            answered = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # nothing is held
                process.stdin.write("x")
                process.stdin.flush()
            violations = await clients.violations(PHASES[phase].reason)
            await asyncio.to_thread(process.wait)
            ended = time.monotonic()
    except TimeoutError as error:
        process.kill()
        error.add_note(f"{phase}; its log: {process.communicate()[1][-2000:]}")
        raise
    finally:
        process.kill()
    _, errors = process.communicate()
    status = (
        -signal.SIGTERM if server == "uvicorn" else 0
    )  # uvicorn raises the signal again at its end
    if process.returncode != status:
        violations.append(f"the process ended with {process.returncode}")
    if ended - sent > limit_secs:
        violations.append(
            f"it ended {ended - sent:.1f} s after the signal, and the limit is {limit_secs:g} s"
        )
    if violations or "never retrieved" in errors or "Exception ignored" in errors:
        violations.append(f"its log: {errors[-2000:]!r}")
    return Stop(answered - sent, ended - sent, (now[1] - before[1]) / count, violations)


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Let this process, and those that it starts, open as many files as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.service_stop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--clients", type=int, default=2000, help="in each phase (default %(default)s)"
    )
    parser.add_argument("--server", choices=SERVERS, default="uvicorn", help="default %(default)s")
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=PHASES,
        default=list(PHASES),
        metavar="PHASE",
        help="default: all",
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the memory of a client, which takes longer"
    )
    options = parser.parse_args(arguments)
    print(
        f"Python {platform.python_version()}, {options.server}, {options.clients} clients; limit"
        f" {LIMIT_GRACES * GRACE_SECS:g} s"
    )
    print(f"{'phase':28}{'last reply':>12}{'end':>10}{'violations':>12}")
    failed = 0
    for phase in options.phases:
        with many_files():
            stop = asyncio.run(
                stop_service(
                    options.server, phase, options.clients, GRACE_SECS, memory=options.memory
                )
            )
        print(
            f"{phase:28}{stop.reply_secs:10.2f} s{stop.end_secs:8.2f} s{len(stop.violations):12}",
            flush=True,
        )
        if options.memory:
            print(f"    {stop.client_bytes / 1024:.1f} KiB for each client")
        for violation in stop.violations[:5]:
            print(f"    {violation}")
        failed += len(stop.violations)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
