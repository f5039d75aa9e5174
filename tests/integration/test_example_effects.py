"""examples/effects.py, killed and started again: what each receiver has in the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import aiohooks as ah
from tests.support.needs import need
from tests.support.services import under_uvicorn
from tests.support.source import ROOT
from tests.support.store_servers import running

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])  # the examples have loops of their own

EXAMPLE = "examples/effects.py"
STEPS = 14


async def train(receiver: str, folder: Path, url: str = "") -> None:
    """Run the example until its end; it is killed when it has made some of the steps."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-W",
        "error",
        EXAMPLE,
        receiver,
        str(folder),
        url,
        "--steps",
        str(STEPS),
        "--pause",
        "0.005",
    ]
    for last in (4, 7, 12, None):
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        while (
            last is not None
            and (line := await process.stdout.readline())
            and int(line.split()[1]) < last
        ):
            pass
        if last is not None:
            process.kill()
        _, errors = await process.communicate()
        assert last is not None or process.returncode == 0, errors
        assert b"Traceback" not in errors or b"500 Error" in errors, errors
    there = await ah.checkpoint.Saver(folder / "checkpoints", read_only=True).checkpoints()
    assert (there[0].step, there[0].interim) == (STEPS, STEPS % 5 != 0)


@pytest.mark.slow
@pytest.mark.sample
async def test_a_database_has_each_step_once(tmp_path: Path) -> None:
    """The table has the keys, so that a repeated delivery changes nothing."""
    await train("database", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "steps.db")) as connection:
        rows = connection.execute("SELECT key, step, batch FROM steps ORDER BY step").fetchall()
    assert rows == [(f"example/{step}/step/1", step, step) for step in range(1, STEPS + 1)]


@contextlib.asynccontextmanager
async def service(keys: Counter[str]) -> AsyncIterator[str]:
    """Serve an address that counts idempotency keys; every third request fails, half of these after
    it was counted.
    """
    requests = 0

    async def answer(request: Request) -> Response:
        nonlocal requests
        requests += 1
        if requests % 6:
            keys[request.headers["idempotency-key"]] += 1
        return Response(status_code=500 if requests % 3 == 0 else 200)

    async with under_uvicorn(Starlette(routes=[Route("/", answer, methods=["POST"])])) as url:
        yield url


@pytest.mark.slow
async def test_a_webhook_gets_each_step_under_one_key(tmp_path: Path) -> None:
    """In spite of requests that fail; those of undone steps have the keys of the kept ones."""
    need("httpx")
    keys = Counter[str]()
    async with service(keys) as url:
        await train("webhook", tmp_path, url)
    assert {*keys} == {f"example/{step}/step/1" for step in range(1, STEPS + 1)}


@pytest.mark.slow
async def test_published_weights_are_in_a_checkpoint(tmp_path: Path) -> None:
    """A worker that waits for a version finds it in a durable checkpoint, or a later one, also
    while the trainer is killed.
    """
    url = f"local://{tmp_path / 'versions'}"
    seen: list[tuple[int, list[int]]] = []
    async with ah.open_step_store(url, run="versions") as versions:

        async def work() -> None:
            version = 0
            while version < STEPS:
                version = await versions.wait_for(version + 1)
                there = await ah.checkpoint.Saver(
                    tmp_path / "checkpoints", read_only=True
                ).checkpoints()
                seen.append((version, [checkpoint.step for checkpoint in there]))

        working = asyncio.ensure_future(work())
        await train("weights", tmp_path, url)
        await working
    assert all(max(steps) >= version for version, steps in seen), seen


@pytest.mark.slow
async def test_entries_of_a_redis_stream_are_acknowledged_when_they_are_saved(
    tmp_path: Path,
) -> None:
    """Each entry makes one step, in order, and none that was used is pending in the end."""
    need("redis")
    from redis.asyncio import Redis

    with running("valkey", tmp_path) as server:
        async with Redis.from_url(server.url, decode_responses=True) as client:
            names = [
                str(await client.xadd("batches", {"number": number})) for number in range(3 * STEPS)
            ]
            await train("redis", tmp_path, server.url)
            pending = await client.xpending_range("batches", "trainers", "-", "+", 100)
    assert {entry["message_id"] for entry in pending}.isdisjoint(names[:STEPS])
    restored = await ah.checkpoint.Saver(tmp_path / "checkpoints", read_only=True).restore()
    assert restored is not None
    milliseconds, number = map(int, names[STEPS - 1].split("-"))
    assert restored.state["tracked"]["batches"]["position"] == milliseconds * 1_000_000 + number
