"""`aiohooks why URL|PID|RUN`: show why processes wait, and for which others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from aiohooks._command_line.steps import describe_publisher, inspect_run
from aiohooks._diagnostics import process_state
from aiohooks._why.graph import WaitGraph
from aiohooks.errors import AiohooksError, InvalidArgumentError, printable
from aiohooks.session.why import unanswered, why_folder
from aiohooks.stores import PublisherReport, RunReport
from aiohooks.stores._protocol import local_pid

_SECS = 1.5
"""How long a process may take to answer. All processes are asked at the same time."""
_MAX_LINE_LENGTH = 10_000
_MAX_REPLY_BYTES = 1 << 24
_TOKEN_VARIABLE = "AIOHOOKS_SERVICE_TOKEN"
_SERVICE_HINTS = {
    401: f"set {_TOKEN_VARIABLE} to its token",
    404: "it answers that only with SessionService(controls=True)",
}
"""The advice for a status code of a service."""
_HOW = "start it with AIOHOOKS_WHY=1, or run it with ah.run(main, why=True)"


def print_why(target: str, run: str | None, *, address: str | None, as_json: bool) -> int:
    """Ask processes why they wait, and print their answers as one graph.

    Args:
        target: the id of a process, the URL of a service or of a step store, or the name of a run.
        run: the name of the run in the step store.
        address: the address of the Ray cluster of the step store.
        as_json: whether to print the graph as JSON.

    Returns:
        The exit code: 0, or 1 if a process has not answered.
    """
    graph = _ask_target(target, run, address)
    if as_json:
        print(graph.to_json())
    else:
        print("\n".join(printable(line, _MAX_LINE_LENGTH) for line in str(graph).splitlines()))
    # The notes are about processes that have not answered.
    return 1 if graph.notes else 0


def _ask_target(target: str, run: str | None, address: str | None) -> WaitGraph:
    if target.isdecimal():
        return _ask(int(target))
    if target.startswith(("http://", "https://")):
        return _ask_service(target)
    if "://" not in target:
        return _ask_run(target, None)
    try:
        report = asyncio.run(inspect_run(target, run, address, secs=_SECS))
    except TimeoutError:
        raise AiohooksError(
            f"the engine of {target} has not answered in {_SECS} s; ask by the name of the run"
            " instead"
        ) from None
    return _ask_run(report.run, report)


def _ask_run(run: str, report: RunReport | None) -> WaitGraph:
    """Ask all processes of a run on this machine, and note the publishers on other machines.

    Processes register for their runs on this machine; `report` has the publishers on all machines.
    """
    pids = list(_registered_pids(run))
    remote: list[PublisherReport] = []
    if report is not None:
        for publisher in report.publishers:
            pid = local_pid(publisher.process)
            if pid is None:
                remote.append(publisher)
            elif pid not in pids:
                pids.append(pid)
    elif not pids:
        raise AiohooksError(f"no process of a run {run!r} can be asked on this machine; {_HOW}")
    graph = WaitGraph.join(_ask_all(pids))
    notes = [
        f"{describe_publisher(publisher)}; it is on another machine: ask there"
        for publisher in remote
        if not any(f"publisher {publisher.process}/" in node.id for node in graph.nodes)
    ]
    return dataclasses.replace(graph, notes=(*graph.notes, *notes))


def _ask_all(pids: list[int]) -> list[WaitGraph]:
    """Ask processes, and the processes for which they wait, which may be part of other runs."""
    answers: dict[int, WaitGraph] = {}
    while pids:
        with ThreadPoolExecutor(len(pids)) as threads:
            answers |= zip(pids, threads.map(_ask, pids), strict=True)
        awaited: set[int] = set()
        for graph in answers.values():
            awaited.update(_awaited_pids(graph))
        pids = [pid for pid in awaited.difference(answers) if _can_be_asked(pid)]
    return list(answers.values())


def _awaited_pids(graph: WaitGraph) -> Iterator[int]:
    """Yield the processes on this machine that a process waits for."""
    for node in graph.nodes:
        if node.kind == "process":
            process, _, _ = node.id.removeprefix("publisher ").rpartition("/")
            pid = local_pid(process)
            if pid is not None:
                yield pid


def _can_be_asked(pid: int) -> bool:
    return process_state(pid) is None and _socket_path(pid).exists()


def _socket_path(pid: int) -> Path:
    return why_folder() / f"{pid}.sock"


def _registered_pids(run: str) -> Iterator[int]:
    """Yield the processes of this user that have registered for a run."""
    has_proc = os.path.isdir("/proc/self")
    for path in sorted(why_folder().glob("*.sock")):
        registration = path.with_suffix(".json")
        if has_proc and not os.path.isdir(f"/proc/{path.stem}"):
            # The process was killed, and could not remove its files.
            path.unlink(missing_ok=True)
            registration.unlink(missing_ok=True)
            continue
        # There is no registration if the process takes part in no run, or just ends.
        with contextlib.suppress(OSError, ValueError):
            if run in json.loads(registration.read_text())["runs"]:
                yield int(path.stem)


def _ask(pid: int) -> WaitGraph:
    """Return the answer of a process, or a graph with the reason why there is none."""
    state = process_state(pid)
    if state is not None:
        return unanswered(pid, state)
    path = _socket_path(pid)
    answer = b""
    try:
        for part in _receive(path):
            answer += part
    except TimeoutError:
        # The answer begins with a space, before the graph is made.
        reason = "it has too many tasks, or the machine is busy: ask again"
        if not answer:
            reason = "it is in C code that does not let Python's other threads run"
        # The system may show more by now.
        reason = process_state(pid) or reason
        return unanswered(pid, f"has not answered in {_SECS} s: {reason}{_kernel_wait(pid)}")
    except (FileNotFoundError, ConnectionRefusedError):
        return unanswered(
            pid, f"cannot be asked: it has no socket in {path.parent}; {_HOW}, and ask as its user"
        )
    except OSError as error:
        return unanswered(pid, f"cannot be asked by {path}: {error}")
    try:
        return WaitGraph.from_json(answer)
    except ValueError:
        # It is empty or incomplete.
        return unanswered(pid, "it has ended meanwhile")


def _receive(path: Path) -> Iterator[bytes]:
    """Yield the parts of an answer; raise `TimeoutError` if it is incomplete after `_SECS`."""
    end = time.monotonic() + _SECS
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECS)
        connection.connect(str(path))
        while part := connection.recv(1 << 16):
            yield part
            # A timeout of 0 would make the socket non-blocking.
            connection.settimeout(max(end - time.monotonic(), 0.001))


def _kernel_wait(pid: int) -> str:
    """Return the function of the kernel in which a process waits, as the end of a message."""
    with contextlib.suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text()
        if function not in ("", "0"):
            return f"; in the kernel: {function}"
    return ""


def _ask_service(target: str) -> WaitGraph:
    url = _service_url(target)
    headers: dict[str, str] = {}
    if token := os.environ.get(_TOKEN_VARIABLE):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url.rstrip('/')}/why", headers=headers)
    # Use no proxy: to the service it would be another machine, and not this one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECS) as reply:
            graph = WaitGraph.from_json(reply.read(_MAX_REPLY_BYTES))
            # JSON of another service may have fields of other types, which raise here.
            graph.lines()
            return graph
    except urllib.error.HTTPError as error:
        reply_text = printable(error.read(1_000).decode(errors="replace"))
        hint = _SERVICE_HINTS.get(error.code, reply_text)
        raise AiohooksError(f"the service answers {error.code}: {hint}") from None
    except TimeoutError:
        raise AiohooksError(
            f"the service has not answered in {_SECS} s: its loop is blocked; ask its process by"
            " its id"
        ) from None
    except urllib.error.URLError as error:
        raise AiohooksError(
            f"no service answers at {url}: {error.reason}; start it, or correct the URL"
        ) from None
    except (http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AiohooksError(f"this is not a service of a session: {error!r}") from None


def _service_url(target: str) -> str:
    """Return the URL of a service without user and password, which messages must not show."""
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise InvalidArgumentError(f"this is no http:// URL: {error}") from None
    if not url.hostname:
        raise InvalidArgumentError(
            "an http:// URL names no host; give that of a service: http://127.0.0.1:8000/training"
        )
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()
