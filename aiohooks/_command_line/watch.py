"""`aiohooks watch`: follow runs in step stores, services, and directories of checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from aiohooks._aio.cancel import to_thread, wait_done
from aiohooks._aio.clock import sleep
from aiohooks._command_line.steps import no_run, shared_store
from aiohooks.distributed.task import until_sigterm
from aiohooks.errors import AiohooksError, InvalidArgumentError, printable, safe_str
from aiohooks.hooks._observing import Progress, is_terminal
from aiohooks.stores import StepStore

if TYPE_CHECKING:
    from aiohooks.hooks._rich import ProgressRenderer

_FRAME_SECS = 0.2
"""The time between two looks at a step store: a watcher does not have each step of a run notified."""
_POLL_SECS = 1.0
"""How often a directory is read where the system cannot notify of changes in it."""
_CONNECT_SECS = 10.0
_MAX_EVENT_BYTES = 1 << 24
TOKEN_VARIABLE = "AIOHOOKS_SERVICE_TOKEN"
Follow = Callable[["_Row"], Coroutine[Any, Any, None]]


def watch(targets: Sequence[str], *, runs: Sequence[str], address: str | None) -> int:
    """Follow what the targets name until all of it has ended, or Ctrl-C.

    Args:
        targets: URLs of step stores or of services, and directories of checkpoints.
        runs: the names of the runs to follow in each step store; without one that in AIOHOOKS_RUN, or "default".
        address: the Ray cluster of `ray://` URLs.

    Returns:
        The exit code: 0, or 1 if one of them has failed or cannot be followed.

    Raises:
        InvalidArgumentError: a target is none of these; nothing was followed.
        SystemExit: SIGTERM was received (143).
    """
    try:
        return asyncio.run(until_sigterm(_watch_all(targets, runs, address), "watch"))
    except KeyboardInterrupt:
        return 0


async def _watch_all(targets: Sequence[str], runs: Sequence[str], address: str | None) -> int:
    sources = [source for target in targets for source in _sources(target, runs, address)]
    renderer = _renderer()
    rows = [_Row(label, renderer) for label, _ in sources]
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_follow(follow, row)) for row, (_, follow) in zip(rows, sources, strict=True)]
    try:
        await wait_done(tasks, None)
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await wait_done(tasks, None)
        for row in rows:
            row.leave()
        if renderer is not None:
            renderer.remove_ended()
    return int(any(row.failed for row in rows))


def _sources(target: str, runs: Sequence[str], address: str | None) -> Generator[tuple[str, Follow]]:
    """Yield what to follow for a target: a label, and what follows it."""
    if target.startswith(("http://", "https://")):
        url = service_url(target)
        yield url.geturl(), functools.partial(_follow_service, url)
    elif "://" in target:
        for run in runs or (None,):
            store = shared_store(target, run, address, on_lost="keep", join_grace_secs=0.0)
            yield store.run, functools.partial(_follow_store, store)
    elif os.path.isdir(target):
        yield target, functools.partial(_follow_directory, Path(target))
    else:
        raise InvalidArgumentError(
            f"{target!r} is no directory; give one of checkpoints, the URL of a step store, or the http:// URL of a service"
        )


async def _follow(follow: Follow, row: _Row) -> None:
    try:
        await follow(row)
    except (AiohooksError, OSError, TimeoutError, EOFError, ValueError) as error:
        cause = "" if error.__cause__ is None else f": {safe_str(error.__cause__)}"
        row.end(f"failed: {safe_str(error) or type(error).__name__}{cause}", failed=True)


# What is shown.


def _renderer() -> ProgressRenderer | None:
    """Return what shows rows live, on a terminal if rich is installed; otherwise each change is a line."""
    if is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            from aiohooks.hooks import _rich

            return _rich.renderer_of(sys.stdout)
    return None


class _Row:
    """What is followed, as one line."""

    def __init__(self, label: str, renderer: ProgressRenderer | None) -> None:
        self.failed = False
        self._progress = Progress(printable(label), None, 0, 0)
        self._is_live = renderer is not None
        self._since: float | None = None
        if renderer is not None:
            renderer.add(self._progress)

    def update(self, step: int, values: str) -> None:
        """Show a step and what else is known; nothing if that has not changed."""
        progress, now = self._progress, asyncio.get_running_loop().time()
        values = printable(values)
        if self._since is None or step < progress.step:
            self._since, progress.start_step = now, step
        elif (step, values) == (progress.step, progress.values):
            return
        progress.step, progress.secs, progress.values = step, now - self._since, values
        self._show()

    def end(self, how: str, *, failed: bool = False) -> None:
        """Show how it has ended."""
        self.failed = failed
        self._progress.ended, self._progress.values = printable(how), ""
        self._show()

    def leave(self) -> None:
        """End the row of something that continues."""
        if self._progress.ended is None:
            self._progress.ended = "no longer watched"

    def _show(self) -> None:
        if not self._is_live:
            print(self._progress.line(), flush=True)


# A run in a step store.


async def _follow_store(store: StepStore, row: _Row) -> None:
    try:
        if await store.inspect() is None:  # opening the store would make it
            raise AiohooksError(no_run(store.run))
        async for position in store.changes():
            names = ", ".join(store.statistics().publishers) or "no publisher"
            row.update(position.step, names if position.epoch == 1 else f"epoch {position.epoch}, {names}")
            await sleep(_FRAME_SECS)
        report = await store.inspect()
        left = None if report is None else report.last_exit
        row.end("ended" if left is None else f"ended: {left.name} finished")
    finally:
        await store.aclose()


# A service.


def service_url(target: str) -> SplitResult:
    """Return the URL of a service, without a user and a password."""
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise InvalidArgumentError(f"this is no http:// URL: {error}") from None
    if not url.hostname:
        raise InvalidArgumentError("an http:// URL names no host; give that of a service: http://127.0.0.1:8000/training")
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="")


async def _follow_service(url: SplitResult, row: _Row) -> None:
    async with asyncio.timeout(_CONNECT_SECS):
        tls = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        try:
            reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls, limit=_MAX_EVENT_BYTES)
        except OSError as error:
            hint = "start the service, or correct the URL"
            raise AiohooksError(f"no service answers at {url.hostname}:{port}; {hint}") from error
    try:
        writer.write(_request(url))
        async with asyncio.timeout(_CONNECT_SECS):
            body = await _read_head(reader)
        name = ""
        async with contextlib.aclosing(body):
            async for line in body:
                field, _, text = line.decode(errors="replace").rstrip("\r\n").partition(": ")
                if field == "event":
                    name = text
                elif field == "data" and _show_report(json.loads(text), row, ended=name == "end"):
                    return
        raise EOFError("the service has closed the connection")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _request(url: SplitResult) -> bytes:
    lines = [f"GET {url.path.rstrip('/')}/events HTTP/1.1", f"Host: {url.netloc}"]
    lines += ["Accept: text/event-stream", "Connection: close"]
    if token := os.environ.get(TOKEN_VARIABLE):
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join((*lines, "", "")).encode()


async def _read_head(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Read the head of a reply, and return the lines of its body; raise if it is not the stream of events."""
    status, headers = (await reader.readline()).split(), dict[str, str]()
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    lines = _chunked_lines(reader) if headers.get("transfer-encoding") == "chunked" else _lines(reader)
    if len(status) > 1 and status[1] == b"200" and headers.get("content-type", "").startswith("text/event-stream"):
        return lines
    async with contextlib.aclosing(lines):
        answer = b" ".join(status[1:]).decode(errors="replace")
        body = [line.decode(errors="replace").strip() async for line in lines]
    if status[1:2] == [b"401"]:
        raise AiohooksError(f"the service wants a token: set {TOKEN_VARIABLE} to it")
    raise AiohooksError(f"this is not a service of a session: it answers {answer} {' '.join(body)}")


async def _lines(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while line := await reader.readline():
        yield line


async def _chunked_lines(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    rest = b""
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _show_report(report: Any, row: _Row, *, ended: bool) -> bool:
    try:
        state, failure = str(report["state"]), report["failure"]
        reasons = [reason for name in ("pause_reason", "stop_reason") if (reason := report[name]) is not None]
        row.update(int(report["step"] or 0), ", ".join((state, *map(str, reasons))))
    except (LookupError, TypeError) as error:
        raise AiohooksError(f"this is not a service of a session: its events have {error!r}") from None
    if ended:
        failed = state == "failed"
        row.end(f"failed: {failure}" if failed else state, failed=failed)
    return ended


# A directory of checkpoints.


async def _follow_directory(path: Path, row: _Row) -> None:
    from aiohooks.checkpoint.saver import CheckpointDirectory

    directory = CheckpointDirectory(path, read_only=True)
    with _changes_of(path) as wait_changed:
        while True:
            found, exists = await to_thread(lambda: (directory.checkpoints(), path.is_dir()))
            if not exists:
                row.end("the directory was removed")
                return
            newest = max(found, key=lambda each: each.sequence, default=None)
            if newest is None:
                row.update(0, "no checkpoint")
            else:
                metrics = "".join(f", {name} = {value:.4g}" for name, value in newest.metrics.items())
                row.update(newest.step, f"{newest.path.name} of {len(found)} checkpoints{metrics}")
            await wait_changed()


@contextlib.contextmanager
def _changes_of(path: Path) -> Generator[Callable[[], Coroutine[Any, Any, None]]]:
    """Yield a function that waits until a checkpoint appears or disappears: by inotify; without that, for a second."""
    from aiohooks.stores.local._notify import DELETE_SELF, MOVE_SELF, MOVED_FROM, MOVED_TO, Inotify

    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    try:
        inotify = Inotify()
    except OSError:
        yield functools.partial(sleep, _POLL_SECS)
        return

    def on_events() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(inotify.fd, 1 << 16)
        changed.set()

    async def wait_changed() -> None:
        await changed.wait()
        changed.clear()

    try:
        inotify.add(path, MOVED_TO | MOVED_FROM | DELETE_SELF | MOVE_SELF)
        loop.add_reader(inotify.fd, on_events)
        try:
            yield wait_changed
        finally:
            loop.remove_reader(inotify.fd)
    finally:
        inotify.close()
