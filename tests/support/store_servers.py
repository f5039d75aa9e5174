"""Servers for the tests of step stores: each on a free port of the loopback, with its own data
folder.

    with running("valkey", tmp_path) as server:      # or "redis"
        server.url
        server.kill()          # kill -9
        server.start()         # on the same port, with its data
        server.lose_data()     # between the two: without it
        server.pause(); server.resume()

`start` blocks until the server says that it is ready: call it in a thread if the event loop has
other things to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.needs import program
from tests.support.waiting import HANG_SECS

PROGRAMS = {"valkey": "valkey-server", "redis": "redis-server"}


def free_port() -> int:
    """Return an unused port of the loopback, below those that the system gives to clients and to
    servers that want any.

    Otherwise another test could be given the port before the server listens there, or while it is
    killed.
    """
    while True:
        port = _chance.randrange(15_000, 32_768)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: an old connection is no obstacle
            one.bind(("127.0.0.1", port))
            return port


_chance = (
    random.SystemRandom()
)  # no seed: the processes of a test run must not choose the same ports


class Server:
    """A server, which keeps its port and its folder when it is killed and started again."""

    def __init__(
        self, kind: str, directory: Path, options: Sequence[str] = (), *, keeps: bool = True
    ) -> None:
        """Prepare a server; `start` starts it.

        Args:
            kind: "valkey" or "redis".
            directory: where to create its folder.
            options: added to its command; "{port}" in them becomes its port.
            keeps: whether it keeps its data on the disk.

        Raises:
            MissingError: the program is not installed.
        """
        self.kind = kind
        self.port = free_port()
        self.data = directory / f"{kind}-{self.port}"
        # Without "always" a write may wait for the one before while the disk is slow, and is not
        # kept though it was answered.
        stores = (
            ["--appendonly", "yes", "--appendfsync", "always"] if keeps else ["--appendonly", "no"]
        )
        self._command = [program(PROGRAMS[kind]), "--bind", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--dir", str(self.data), "--save", "", *stores]
        self._command += [option.replace("{port}", str(self.port)) for option in options]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.lines: list[str] = []
        """The lines that it has printed."""

    @property
    def url(self) -> str:
        """The URL for `open_step_store`."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        assert self._process is None, "it runs already"
        self.data.mkdir(parents=True, exist_ok=True)
        self.lines = []
        process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        ready = threading.Event()
        self._process = process
        # Read until the end: a server whose output is not read would block when the pipe is full.
        self._reader = threading.Thread(target=self._read, args=(process, ready), daemon=True)
        self._reader.start()
        if not ready.wait(HANG_SECS) or not self._is_ready():
            self.kill()
            raise RuntimeError(f"{self._command} did not start: {''.join(self.lines[-20:])}")

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.lines.append(line)
                if self._is_ready():
                    ready.set()
        ready.set()  # it has ended

    def _is_ready(self) -> bool:
        return any("Ready to accept connections" in line for line in self.lines)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        process, reader = self._process, self._reader
        if process is None:
            return
        self._process = self._reader = None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(HANG_SECS)
        if reader is not None:
            reader.join(HANG_SECS)

    def pause(self) -> None:
        """Stop it by SIGSTOP: its connections stay, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def lose_data(self) -> None:
        """Delete its data while it does not run."""
        assert self._process is None, "it runs"
        shutil.rmtree(self.data, ignore_errors=True)


@contextlib.contextmanager
def running(
    kind: str, directory: Path, options: Sequence[str] = (), *, keeps: bool = True
) -> Iterator[Server]:
    """Run a server for the block."""
    server = Server(kind, directory, options, keeps=keeps)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def restart_without_data(server: Server) -> None:
    """Kill a server, delete its data, and start it again."""
    await asyncio.to_thread(server.kill)
    server.lose_data()
    await asyncio.to_thread(server.start)


async def first_stream() -> None:
    """For a fixture: open a stream, after which uvloop keeps a spare descriptor for as long as it
    lives.
    """
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    listener.close()
    await listener.wait_closed()
