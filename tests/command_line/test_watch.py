"""`python -m aiohooks watch`: real runs, services and directories, followed until they end or a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks._command_line import watch
from aiohooks.stores import StepStore, open_step_store
from aiohooks.stores.local import _notify
from aiohooks.testing import ManualClock
from tests.support import processes
from tests.support.commands import ENVIRONMENT, command, run_command, start_command
from tests.support.services import FeedQueue, make_service, under_uvicorn
from tests.support.sessions import counting_graph, make_runs
from tests.support.store_servers import first_stream
from tests.support.waiting import HANG_SECS, parked

pytestmark = [pytest.mark.slow]


class Watching:
    """A started `watch`, whose lines are read one by one while the test's loop runs."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = start_command("watch", *arguments)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).rstrip("\n")

    async def line_with(self, text: str) -> str:
        """Return the next line that has the text."""
        while text not in (line := await self.line()):
            assert line or self.process.poll() is None, self.process.communicate()
        return line

    async def ended(self) -> int:
        """Wait for the end, and return the exit code; there must be no traceback."""
        _, err = await asyncio.to_thread(self.process.communicate, timeout=HANG_SECS)
        assert "Traceback" not in err
        return self.process.returncode


@contextlib.contextmanager
def watching(*arguments: str | Path) -> Iterator[Watching]:
    one = Watching(*arguments)
    with one.process:
        try:
            yield one
        finally:
            one.process.kill()


@contextlib.asynccontextmanager
async def two_runs(tmp_path: Path) -> AsyncIterator[tuple[StepStore, StepStore]]:
    """Two runs in one directory, each with a publisher `trainer`."""
    url = f"local://{tmp_path}/steps"
    async with open_step_store(url, run="a") as a, open_step_store(url, run="b") as b:
        yield a, b


async def test_several_runs_are_followed_to_their_ends(tmp_path: Path) -> None:
    """Each change is a line; a run ends with its last publisher, and the command with the last run."""
    async with two_runs(tmp_path) as (a, b):
        first, second = a.publisher("trainer"), b.publisher("trainer")
        await a.advance(3)
        await b.flush()
        with watching(f"local://{tmp_path}/steps", "--run", "a", "--run", "b") as watch:
            await watch.line_with("b: step 0")
            await a.advance(4)
            assert (await watch.line_with("a: step 7")).endswith("trainer")
            second.close()
            assert await watch.line_with("b: step 0, ended") == "b: step 0, ended: trainer finished"
            await a.reset(2)
            assert "epoch 2" in await watch.line_with("a: step 2")
            first.close()
            assert (await watch.line_with("a: step 2, ended")) == "a: step 2, ended: trainer finished"
            assert await watch.ended() == 0


async def test_a_run_that_fails(tmp_path: Path) -> None:
    """Its error is shown, and the exit code is 1."""
    async with two_runs(tmp_path) as (a, _):
        trainer = a.publisher("trainer")
        await a.flush()
        with watching(f"local://{tmp_path}/steps", "--run", "a") as watch:
            await watch.line_with("a: step 0")
            trainer.close(ValueError("bad \x1b[31m data"))
            assert r"bad \x1b[31m data" in await watch.line_with("failed: trainer failed at step 0")
            assert await watch.ended() == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
async def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C is how watching ends: exit code 0. Nothing of the watcher is left in the run."""
    async with two_runs(tmp_path) as (a, _):
        a.publisher("trainer")
        await a.flush()
        with watching(f"local://{tmp_path}/steps", "--run", "a") as watch:
            await watch.line_with("a: step 0")
            watch.process.send_signal(number)
            assert await watch.ended() == code
        assert os.listdir(tmp_path / "steps" / "a" / "alive") == ["0"]
        found = await a.inspect()
        assert found is not None
        assert [each.name for each in found.publishers] == ["trainer"]
        assert found.last_exit is None


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    """It is named, with exit code 1, and not made."""
    done = command("watch", f"local://{tmp_path}/steps", "--run", "digits")
    assert (done.returncode, done.stderr) == (1, "")
    assert "failed: there is no run 'digits'" in done.stdout
    assert os.listdir(tmp_path) == []


async def test_a_directory_of_checkpoints(tmp_path: Path) -> None:
    """A checkpoint is shown when it is there, without polling; the command ends when the directory is removed."""
    directory = tmp_path / "model"
    directory.mkdir()
    with watching(directory) as watch:
        await watch.line_with("no checkpoint")
        creator = ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=directory)
        async with ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook()]) as session:
            await watch.line_with("step 0, step-000000000000.000001 of 1 checkpoints")
            await make_runs(session, 3, "train")
        await watch.line_with("step-000000000003.000002 of 2 checkpoints")
        await asyncio.to_thread(shutil.rmtree, directory)
        await watch.line_with("the directory was removed")
        assert await watch.ended() == 0


async def test_a_directory_without_inotify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    """Where the system cannot notify, the directory is read once a second, and no timer is left."""

    def refuse() -> None:
        raise OSError("there is no inotify")

    monkeypatch.setattr(_notify, "Inotify", refuse)
    with watch._changes_of(tmp_path) as wait_changed:
        for _ in range(2):
            waiting = await parked(wait_changed(), 3)
            assert not waiting.done()
            clock.advance(1)
            await waiting
    assert clock.pending == 0


@pytest.fixture
async def _stream() -> None:
    await first_stream()


@pytest.mark.usefixtures("_stream")
@pytest.mark.parametrize(
    ("last", "how", "code"), [("end", "finished", 0), ("fail", "failed: ValueError: bad data", 1)], ids=["ends", "fails"]
)
async def test_a_service(last: str, how: str, code: int) -> None:
    """Its events are followed until its session has ended; a failed one gives exit code 1."""
    feeds = FeedQueue()
    async with under_uvicorn(make_service(feeds, refresh_secs=0.001)) as url:
        with watching(f"{url}/") as watch:
            await watch.line_with("step 0, running")
            feeds.put(0.5)
            await watch.line_with("step 1")
            feeds.end() if last == "end" else feeds.fail(ValueError("bad data"))
            assert how in await watch.line_with(how)
            assert await watch.ended() == code


@pytest.mark.usefixtures("_stream")
async def test_a_service_that_wants_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken from the environment; without it the refusal says so."""
    feeds, token = FeedQueue(), secrets.token_urlsafe(32)
    async with under_uvicorn(make_service(feeds, token=token)) as url:
        done = await run_command("watch", url)
        assert done.returncode == 1
        assert "failed: the service wants a token: set AIOHOOKS_SERVICE_TOKEN to it" in done.stdout
        monkeypatch.setitem(ENVIRONMENT, "AIOHOOKS_SERVICE_TOKEN", token)
        with watching(url) as watch:
            await watch.line_with("step 0, running")
            feeds.end()
            assert await watch.ended() == 0


EVENTS = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
NO_SERVICES = {
    b"HTTP/1.0 404 Not Found\r\ncontent-type: text/plain\r\n\r\nno such page\n": "it answers 404 Not Found no such page",
    EVENTS + b"event: news\ndata: {}\n\n": "its events have KeyError",
    EVENTS + b"data: [1]\n\n": "its events have TypeError",
    EVENTS + b"data: {\n\n": "failed: Expecting property name",
    EVENTS + b"event: progress\n\n": "failed: the service has closed the connection",
    b"": "it answers",
}


@pytest.mark.usefixtures("_stream")
async def test_what_is_no_service() -> None:
    """An address where nothing listens, and one where something else answers, are said; a password in a URL is not shown."""
    answers = list(NO_SERVICES)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[int(request.split(b"/")[1])])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with watching(*(f"http://user:secret@127.0.0.1:{port}/{number}" for number in range(len(answers)))) as watch:
        lines = [await watch.line() for _ in answers]
        assert await watch.ended() == 1
    server.close()
    await server.wait_closed()
    assert "secret" not in "".join(lines)
    for number, text in enumerate(NO_SERVICES.values()):
        (line,) = (line for line in lines if line.startswith(f"http://127.0.0.1:{port}/{number}:"))
        assert text in line
    with watching(f"http://127.0.0.1:{port}") as watch:
        await watch.line_with(f"failed: no service answers at 127.0.0.1:{port}; start the service, or correct the URL")
        assert await watch.ended() == 1


async def test_a_terminal(tmp_path: Path) -> None:
    """In a terminal the rows are live; Ctrl-C ends with exit code 0 and the last state."""
    async with two_runs(tmp_path) as (a, _):
        a.publisher("trainer")
        await a.flush()
        terminal, side = os.openpty()
        try:
            with processes.start(
                [sys.executable, "-m", "aiohooks", "watch", f"local://{tmp_path}/steps", "--run", "a"],
                env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "80"},
                stdout=side,
            ) as process:
                os.close(side)
                shown = await _read_until(terminal, b"trainer")
                await a.advance(42)
                shown += await _read_until(terminal, b"42")
                process.send_signal(signal.SIGINT)
                shown += await _read_until(terminal, b"no longer watched")
                assert await asyncio.to_thread(process.wait, HANG_SECS) == 0
                assert process.stderr is not None
                assert process.stderr.read() == ""
        finally:
            os.close(terminal)
        assert b"\x1b[" in shown


async def _read_until(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        shown += await asyncio.to_thread(os.read, terminal, 4096)
    return shown
