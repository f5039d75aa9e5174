"""Measure the memory that a client waiting for a step costs a service.

    python -m tests.fuzz.service_memory --waiters 500

The service runs under uvicorn in another process, its clients in this one. The memory is measured as allocated by Python
(tracemalloc) and as resident (RSS), with all clients waiting and with none, and for comparison with clients of a handler that
only awaits an event. Then one advance answers all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService

STEP = 1000


async def serve(listener: socket.socket, traced: bool) -> None:
    """Serve a session that makes its only step after a request to `/advance`."""
    released = asyncio.Event()
    parked: list[None] = []

    async def step() -> None:
        pass

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await session.until(released.wait())
        await session.global_step.raise_to(STEP)

    async def memory(request: Request) -> JSONResponse:
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: ASYNC230 - not a file on a disk
            pages = int(file.read().split()[1])
        traced_bytes = tracemalloc.get_traced_memory()[0]
        return JSONResponse([pages * os.sysconf("SC_PAGE_SIZE"), traced_bytes])

    async def bare(request: Request) -> JSONResponse:
        parked.append(None)
        await released.wait()
        return JSONResponse({})

    async def waiters(request: Request) -> JSONResponse:
        return JSONResponse(len(parked) or store.statistics().waiting)

    async def advance(request: Request) -> JSONResponse:
        released.set()
        return JSONResponse({})

    if traced:
        tracemalloc.start()
    store = ah.MemoryStepStore()
    session = ah.AsyncMonitoredSession(step, global_step=store)
    service = SessionService(session, loop)
    routes = [Mount("/training", service), *(Route(f"/{one.__name__}", one) for one in (memory, bare, waiters, advance))]
    app = Starlette(routes=routes, lifespan=service.lifespan)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve([listener])


async def ask(port: int, path: str) -> Any:
    """Send a request and return the JSON of the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def measure(port: int, count: int, path: str) -> tuple[float, float]:
    """Return the RSS and the traced bytes of one of `count` waiters."""
    for _ in range(50):  # for what is allocated once
        await ask(port, "/training/steps/0")
    before = await ask(port, "/memory")
    waiting = [asyncio.create_task(ask(port, path)) for _ in range(count)]
    while await ask(port, "/waiters") < count:
        pass
    during = await ask(port, "/memory")
    await ask(port, "/advance")
    answers = await asyncio.gather(*waiting)
    assert all(one in ({}, {"step": STEP, "wanted": STEP, "epoch": 1}) for one in answers), answers
    rss, traced = [(now - then) / count for now, then in zip(during, before, strict=True)]
    return rss, traced


def run(count: int, path: str, *, traced: bool) -> tuple[float, float]:
    """Start a service and measure it with `count` clients that wait for a path."""
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        port: int = listener.getsockname()[1]
        command = [sys.executable, "-m", "tests.fuzz.service_memory", "--serve", str(listener.fileno()), str(int(traced))]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        return asyncio.run(measure(port, count, path))
    finally:
        process.terminate()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.service_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiters", type=int, default=500)
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        fd, traced = options.serve
        ah.run(serve, socket.socket(fileno=fd), bool(traced))
        return 0
    for what, path in (("GET steps/N", f"/training/steps/{STEP}"), ("a bare wait for an asyncio.Event", "/bare")):
        rss, _ = run(options.waiters, path, traced=False)
        _, traced_bytes = run(options.waiters, path, traced=True)
        print(
            f"{options.waiters} waiters in {what}, all answered by one advance: {traced_bytes / 1024:.1f} KiB of Python objects "
            f"each, {rss / 1024:.1f} KiB of the process, connection and request included"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
