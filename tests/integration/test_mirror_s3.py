"""A mirror in S3: s3fs against a server over HTTP, with faults of the store and of the link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

from aiohooks import Backoff
from aiohooks.checkpoint import Mirror, Saver
from aiohooks.errors import CheckpointError
from tests.support.faulty_files import status_of
from tests.support.waiting import HANG_SECS, until_true

# The client's threads and pooled connections live as long as the process.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.may_leak,
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]

QUICKLY = Backoff(0.05, 0.2)


class Service:
    """An S3 server that fails by `fault`: it gets the method, and returns one of
    `FAULTS_OF_ANSWERS`.
    """

    def __init__(self) -> None:
        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self.fault: Callable[[str], str | None] = lambda method: None
        self.server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=MotoRequestHandler
        )
        self.port: int = self.server.server_port

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        fault = self.fault(environ["REQUEST_METHOD"])
        if fault in ("500", "403", "400"):
            return self._refused(fault, start_response)
        if fault == "a changed request" and environ.get("CONTENT_LENGTH"):
            data = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            data[len(data) // 2] ^= 1
            environ["wsgi.input"] = BytesIO(data)
        started: list[Any] = []
        body = b"".join(self._app(environ, lambda *args: started.append(args)))
        if fault == "done and 500":
            return self._refused("500", start_response)
        if body and fault == "a changed answer":
            body = body[:-1] + bytes([body[-1] ^ 1])
        start_response(*started[0][:2])
        return [body[: len(body) // 2] if fault == "half an answer" else body]

    def _refused(self, status: str, start_response: Any) -> list[bytes]:
        code = {"500": "InternalError", "403": "AccessDenied", "400": "ExpiredToken"}[status]
        start_response(f"{status} {code}", [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()]


FAULTS_OF_ANSWERS = (
    "500",
    "403",
    "400",
    "done and 500",
    "a changed request",
    "a changed answer",
    "half an answer",
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Run an S3 server."""
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        thread.join()


def options(port: int) -> dict[str, Any]:
    return {
        "key": "key",
        "secret": "secret",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {
            "retries": {"max_attempts": 0},
            "connect_timeout": HANG_SECS,
            "read_timeout": HANG_SECS,
        },
    }


def bucket(service: Service, name: str) -> Any:
    """Make a bucket, and return a file system that reaches the server directly."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **options(service.port))
    fs.mkdir(name)
    return fs


async def test_a_missing_bucket_is_an_error_and_not_made(service: Service, tmp_path: Path) -> None:
    """It is not an empty mirror: a restore fails; what is saved is pending, with the reason in the
    status.
    """
    async with asyncio.timeout(HANG_SECS):
        mirror = Mirror(
            "s3://no-such-bucket/run", storage_options=options(service.port), backoff=QUICKLY
        )
        async with Saver(tmp_path, mirror=mirror) as saver:
            with pytest.raises(
                CheckpointError,
                match="the bucket no-such-bucket does not exist; make it, or correct the URL",
            ):
                await saver.restore()
            await saver.save({"step": 1}, 1)
            await until_true(lambda: status_of(saver).failures > 1)
            assert "bucket no-such-bucket does not exist" in str(status_of(saver))
            await saver.aclose(grace_secs=0)


async def test_random_faults_of_the_store(service: Service, tmp_path: Path) -> None:
    """Refused, done without an answer, changed, cut: a restore is never wrong, and has the newest
    in the end.
    """
    await asyncio.to_thread(bucket, service, "faulty")
    chosen = random.Random(5)
    count = step = 0

    def fault(method: str) -> str | None:
        nonlocal count
        if chosen.random() > 0.4:
            return None
        count += 1
        return chosen.choice(FAULTS_OF_ANSWERS)

    mirror = Mirror("s3://faulty/run", storage_options=options(service.port), backoff=QUICKLY)

    async def restored(path: Path) -> int:
        async with Saver(path, mirror=mirror) as saver:
            found = await saver.restore()
        assert found is None or found.state == {"step": found.checkpoint.step}
        return 0 if found is None else found.checkpoint.step

    try:
        for life in itertools.count():
            service.fault = fault
            with contextlib.suppress(CheckpointError):
                assert await restored(tmp_path / f"faulty {life}") == step
            service.fault = lambda method: None
            async with Saver(tmp_path / f"life {life}", mirror=mirror) as saver:
                await saver.restore()
                service.fault = fault
                for _ in range(6):
                    step += 1
                    await saver.save({"step": step}, step)
                    await saver.flush_mirror(0.05)  # some uploads are replaced, and some are not
                service.fault = lambda method: None
                assert await saver.flush_mirror(HANG_SECS)
            assert await restored(tmp_path / f"healed {life}") == step
            if count >= 100:
                break
    finally:
        service.fault = lambda method: None
