"""`aiohooks why URL|PID|RUN`: why processes wait, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from aiohooks._command_line.steps import describe_publisher, inspect_run, no_run
from aiohooks._diagnostics import process_state
from aiohooks._why.graph import WaitGraph
from aiohooks.errors import AiohooksError, InvalidArgumentError, printable
from aiohooks.session.why import unanswered, why_folder
from aiohooks.stores import RunReport
from aiohooks.stores._protocol import local_pid

_SECS = 1.5
"""How long a process may take to answer: all of them are asked at the same time."""
_TOKEN_VARIABLE = "AIOHOOKS_SERVICE_TOKEN"
_MOST_SHOWN, _MOST_BYTES = 10_000, 1 << 24
_HOW = "start it with AIOHOOKS_WHY=1, or run it with ah.run(main, why=True)"


def print_why(target: str, run: str | None, *, address: str | None, as_json: bool) -> int:
    """Ask processes why they wait, and print their answers as one graph; return the exit code: 1 if
    one has not answered.

    `target` is the id of a process, the URL of a service or of a step store, which has the `run`,
    or the name of a run.
    """
    if target.isdecimal():
        graph = _ask(int(target))
    elif target.startswith(("http://", "https://")):
        graph = _ask_service(target)
    elif "://" in target:
        try:
            name, report = asyncio.run(inspect_run(target, run, address, secs=_SECS))
        except TimeoutError:
            hint = "ask by the name of the run instead"
            raise AiohooksError(
                f"the engine of {target} has not answered in {_SECS} s; {hint}"
            ) from None
        if report is None:
            raise AiohooksError(no_run(name))
        graph = _ask_run(name, report)
    else:
        graph = _ask_run(target, None)
    print(
        graph.to_json()
        if as_json
        else "\n".join(printable(line, _MOST_SHOWN) for line in str(graph).splitlines())
    )
    return 1 if graph.notes else 0


def _ask_run(run: str, report: RunReport | None) -> WaitGraph:
    """Ask all processes of a run on this machine that can be asked; what the step store has says
    the rest.
    """
    published = () if report is None else report.publishers
    here = [pid for one in published if (pid := local_pid(one.process)) is not None]
    processes = dict.fromkeys((*_registered(run), *here))
    if not processes and report is None:
        raise AiohooksError(f"no process of a run {run!r} can be asked on this machine; {_HOW}")
    graphs = _ask_all([*processes])
    known = {node.id for graph in graphs for node in graph.nodes}
    remote = [one for one in published if local_pid(one.process) is None]
    unknown = [
        one for one in remote if not any(f"publisher {one.process}/" in node for node in known)
    ]
    notes = tuple(
        f"{describe_publisher(one)}; it is on another machine: ask there" for one in unknown
    )
    return WaitGraph.join([*graphs, WaitGraph((), (), notes)])


def _ask_all(ahead: list[int]) -> list[WaitGraph]:
    """Ask processes, and then those that can be asked and have what these wait for: they may take
    part in other runs.
    """
    asked: dict[int, WaitGraph] = {}
    while ahead:
        with ThreadPoolExecutor(len(ahead)) as threads:
            asked |= zip(ahead, threads.map(_ask, ahead), strict=True)
        nodes = (node for graph in asked.values() for node in graph.nodes if node.kind == "process")
        awaited = {
            local_pid(node.id.removeprefix("publisher ").rpartition("/")[0]) for node in nodes
        }
        others = [
            pid
            for pid in awaited
            if pid is not None and pid not in asked and process_state(pid) is None
        ]
        ahead = [pid for pid in others if (why_folder() / f"{pid}.sock").exists()]
    return [*asked.values()]


def _registered(run: str) -> Iterable[int]:
    """Yield the processes of this user that have registered for a run, without those that do not
    exist any more.
    """
    for path in sorted(why_folder().glob("*.sock")):
        pid = int(path.stem) if path.stem.isdecimal() else 0
        if not os.path.isdir(f"/proc/{pid}") and os.path.isdir("/proc/self"):  # it was killed
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            continue
        with contextlib.suppress(OSError, ValueError):
            if run in json.loads(path.with_suffix(".json").read_text())["runs"]:
                yield pid


def _ask(pid: int) -> WaitGraph:
    """Return the answer of one process, or why there is none."""
    if (state := process_state(pid)) is not None:
        return unanswered(pid, state)
    path, until = why_folder() / f"{pid}.sock", time.monotonic() + _SECS
    parts: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(_SECS)
            connection.connect(str(path))
            while part := connection.recv(1 << 16):
                parts.append(part)
                connection.settimeout(max(until - time.monotonic(), 0.001))
        except TimeoutError:
            busy = "it has too many tasks, or the machine is busy: ask again"
            stuck, kernel = (
                busy if parts else "it is in C code that does not let Python's other threads run",
                "",
            )
            with contextlib.suppress(OSError):
                where = Path(f"/proc/{pid}/wchan").read_text()
                kernel = "" if where in ("", "0") else f"; in the kernel: {where}"
            return unanswered(
                pid, f"has not answered in {_SECS} s: {process_state(pid) or stuck}{kernel}"
            )
        except (FileNotFoundError, ConnectionRefusedError):
            return unanswered(
                pid,
                f"cannot be asked: it has no socket in {path.parent}; {_HOW}, and ask as its user",
            )
        except OSError as error:
            return unanswered(pid, f"cannot be asked by {path}: {error}")
    try:
        return WaitGraph.from_json(b"".join(parts))
    except ValueError:  # nothing, or a part of it
        return unanswered(pid, "it has ended meanwhile")


def _ask_service(target: str) -> WaitGraph:
    url = _service_url(target)
    headers = (
        {"Authorization": f"Bearer {token}"} if (token := os.environ.get(_TOKEN_VARIABLE)) else {}
    )
    request = urllib.request.Request(f"{url.rstrip('/')}/why", headers=headers)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # a proxy would be another machine for the service
    try:
        with opener.open(request, timeout=_SECS) as reply:
            graph = WaitGraph.from_json(reply.read(_MOST_BYTES))
            graph.lines()  # raises if it is none
            return graph
    except urllib.error.HTTPError as error:
        hint = {
            401: f"set {_TOKEN_VARIABLE} to its token",
            404: "it answers that only with SessionService(controls=True)",
        }
        text = hint.get(error.code, printable(error.read(1_000).decode(errors="replace")))
        raise AiohooksError(f"the service answers {error.code}: {text}") from None
    except TimeoutError:
        advice = "its loop is blocked; ask its process by its id"
        raise AiohooksError(f"the service has not answered in {_SECS} s: {advice}") from None
    except urllib.error.URLError as error:
        raise AiohooksError(
            f"no service answers at {url}: {error.reason}; start it, or correct the URL"
        ) from None
    except (http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AiohooksError(f"this is not a service of a session: {error!r}") from None


def _service_url(target: str) -> str:
    """Return the URL of a service, without a user and a password, which messages must not show."""
    try:
        url = urlsplit(target)
    except ValueError as error:
        raise InvalidArgumentError(f"this is no http:// URL: {error}") from None
    if not url.hostname:
        raise InvalidArgumentError(
            "an http:// URL names no host; give that of a service: http://127.0.0.1:8000/training"
        )
    return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl()
