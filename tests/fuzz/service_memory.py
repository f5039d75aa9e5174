"""What a client that waits for a step costs a service in memory.

    python -m tests.fuzz.service_memory --waiters 500

A service under uvicorn in a process of its own; its clients are in this one. The memory is what Python has allocated there
(tracemalloc) and what the process occupies (RSS), with all of them waiting and with none; beside it the same for clients of a
handler that awaits an event and nothing else. Then one advance answers them all.
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
    """The service: a session that makes its one step when it is told to."""
    may = asyncio.Event()
    parked: list[None] = []

    async def step() -> None:
        pass

    async def loop(session: ah.AsyncMonitoredSession) -> None:
        await session.until(may.wait())
        await session.global_step.raise_to(STEP)

    async def memory(request: Request) -> JSONResponse:
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: ASYNC230 - not of a disk
            pages = int(file.read().split()[1])
        traced_bytes = tracemalloc.get_traced_memory()[0]
        return JSONResponse([pages * os.sysconf("SC_PAGE_SIZE"), traced_bytes])

    async def bare(request: Request) -> JSONResponse:
        parked.append(None)
        await may.wait()
        return JSONResponse({})

    async def how_many(request: Request) -> JSONResponse:
        return JSONResponse(len(parked) or store.statistics().waiting)

    async def advance(request: Request) -> JSONResponse:
        may.set()
        return JSONResponse({})

    if traced:
        tracemalloc.start()
    store = ah.MemoryStepStore()
    session = ah.AsyncMonitoredSession(step, global_step=store)
    service = SessionService(session, loop)
    routes = [
        Mount("/training", service),
        *(Route(f"/{one.__name__}", one) for one in (memory, bare, how_many, advance)),
    ]
    app = Starlette(routes=routes, lifespan=service.lifespan)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).serve([listener])


async def ask(port: int, path: str) -> Any:
    """The JSON that is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def measure(port: int, count: int, path: str) -> tuple[float, float]:
    """RSS and traced bytes of one of so many that wait."""
    for _ in range(50):  # what is made once
        await ask(port, "/training/steps/0")
    before = await ask(port, "/memory")
    waiting = [asyncio.create_task(ask(port, path)) for _ in range(count)]
    while await ask(port, "/how_many") < count:
        pass
    during = await ask(port, "/memory")
    await ask(port, "/advance")
    answers = await asyncio.gather(*waiting)
    assert all(one in ({}, {"step": STEP, "wanted": STEP, "epoch": 1}) for one in answers), answers
    rss, traced = [(now - then) / count for now, then in zip(during, before, strict=True)]
    return rss, traced


def run(count: int, path: str, *, traced: bool) -> tuple[float, float]:
    """One service with so many clients that wait for the answer of a path."""
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
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.service_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
