"""A mirror in S3: s3fs against a server over HTTP, with faults of the link, and a writer that is killed."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from aiohooks import Backoff
from aiohooks.checkpoint import KeepNewest, Mirror, Saver
from tests.support.source import ROOT
from tests.support.store_proxy import FAULTS, Proxy
from tests.support.waiting import HANG_SECS, until_true

# The client's threads and pooled connections live as long as the process.
pytestmark = [pytest.mark.slow, pytest.mark.may_leak, pytest.mark.asyncio(loop_factories=["asyncio"])]

STATE_BYTES = 24 << 20  # several parts
STALL_SECS = 6  # the black hole takes a few times as long; on a busy machine some uploads are tried again
QUICKLY = Backoff(0.05, 0.2)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """Run an S3 server; the value is its port."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


@pytest.fixture
async def proxy(server: int) -> AsyncIterator[Proxy]:
    """Run a proxy to the server, whose link can be cut."""
    async with Proxy.to(server) as proxy:
        yield proxy


def options(port: int, timeout_secs: float = HANG_SECS) -> dict[str, Any]:
    return {
        "key": "key",
        "secret": "secret",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": timeout_secs, "read_timeout": timeout_secs},
    }


def bucket(server: int, name: str) -> Any:
    """Make a bucket, and return a file system that reaches the server directly."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **options(server))
    fs.mkdir(name)
    return fs


def found_in(fs: Any, path: str) -> list[str]:
    """Return the names of all objects below a path."""
    fs.invalidate_cache()
    return sorted(each.removeprefix(f"{path}/") for each in fs.find(path))


def state_of(step: int) -> dict[str, Any]:
    return {"weights": np.full(STATE_BYTES // 8, float(step))}


async def test_checkpoints_go_there_and_come_back(server: int, tmp_path: Path) -> None:
    """Several parts each, old ones removed; a Saver of another directory continues from the newest."""
    fs = await asyncio.to_thread(bucket, server, "plain")
    mirror = Mirror("s3://plain/a/run", storage_options=options(server))
    async with Saver(tmp_path / "a", mirror=mirror, keep=KeepNewest(2)) as saver:
        assert await saver.restore() is None
        for step in (1, 2, 3):
            await saver.save(state_of(step), step)
            assert await saver.flush_mirror(HANG_SECS)
    found = await asyncio.to_thread(found_in, fs, "plain/a/run")
    assert found == [
        f"step-00000000000{step}.00000{step}/{file}"
        for step in (2, 3)
        for file in ("arrays.safetensors", "manifest.json", "state.msgpack")
    ]
    async with Saver(tmp_path / "b", mirror=mirror) as saver:
        restored = await saver.restore()
        assert restored is not None
        assert restored.checkpoint.step == 3
        assert np.array_equal(restored.state["weights"], state_of(3)["weights"])


async def test_a_missing_bucket_is_not_made(server: int, tmp_path: Path) -> None:
    """The reason is in the status, and the run continues."""
    async with asyncio.timeout(HANG_SECS):
        mirror = Mirror("s3://no-such-bucket/run", storage_options=options(server), backoff=QUICKLY)
        async with Saver(tmp_path, mirror=mirror) as saver:
            await saver.restore()
            await saver.save(state_of(1), 1)
            await until_true(lambda: saver.mirror_status is not None and saver.mirror_status.failures > 1)
            assert saver.mirror_status is not None
            assert "bucket does not exist" in str(saver.mirror_status)
            await saver.aclose(grace_secs=0)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_link_that_fails_in_an_upload(server: int, proxy: Proxy, tmp_path: Path, fault: str) -> None:
    """It is not taken for a checkpoint; when the link is back the newest is copied, and restored elsewhere."""
    async with asyncio.timeout(HANG_SECS):
        name = fault.replace(" ", "-")
        fs = await asyncio.to_thread(bucket, server, name)
        mirror = Mirror(
            f"s3://{name}/run", storage_options=options(proxy.port, STALL_SECS), backoff=QUICKLY, timeout_secs=STALL_SECS
        )
        async with Saver(tmp_path / "a", mirror=mirror) as saver:
            assert await saver.restore() is None
            await saver.save(state_of(1), 1)
            assert await saver.flush_mirror(HANG_SECS)
            objects = await asyncio.to_thread(found_in, fs, f"{name}/run")
            await saver.save(state_of(2), 2)
            await until_true(lambda: proxy.connections > 0)
            proxy.fail(fault)
            if fault != "cut in an answer":  # after which s3fs itself tries again
                await until_true(lambda: saver.mirror_status is not None and saver.mirror_status.failures)
                assert not [each for each in await asyncio.to_thread(found_in, fs, f"{name}/run") if "002/manifest" in each]
                assert set(objects) <= set(await asyncio.to_thread(found_in, fs, f"{name}/run"))
            await saver.save(state_of(3), 3)
            proxy.heal()
            assert await saver.flush_mirror(HANG_SECS)
            assert saver.mirror_status is not None
            assert saver.mirror_status.latest_step == 3
        async with Saver(tmp_path / "b", mirror=Mirror(mirror.url, storage_options=options(server))) as saver:
            restored = await saver.restore()
            assert restored is not None
            assert restored.checkpoint.step == 3


WRITER = """
    import asyncio, sys
    from pathlib import Path
    from aiohooks.checkpoint import KeepNewest, Mirror, Saver
    from tests.integration.test_mirror_s3 import options, state_of

    async def main():
        mirror = Mirror(sys.argv[2], storage_options=options(int(sys.argv[3])))
        async with Saver(sys.argv[1], mirror=mirror, keep=KeepNewest(1)) as saver:
            await saver.restore()
            for step in range(1, 1000):
                await saver.save(state_of(step), step)
                print(step, flush=True)
                await saver.flush_mirror()

    asyncio.run(main())
"""


def has_received(proxy: Proxy, pieces: int) -> bool:
    """Return whether so many pieces of requests have been sent to the server."""
    return proxy.pieces >= pieces


async def test_a_killed_writer_leaves_no_half_checkpoint(server: int, proxy: Proxy, tmp_path: Path) -> None:
    """SIGKILL at random moments of uploads and removals: what another machine restores is complete, and never goes back."""
    async with asyncio.timeout(HANG_SECS):
        await asyncio.to_thread(bucket, server, "killed")
        random.seed(13)
        latest = 0
        for number in range(3):
            command = [
                sys.executable,
                "-c",
                textwrap.dedent(WRITER),
                str(tmp_path / str(number)),
                "s3://killed/run",
                str(proxy.port),
            ]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            writer = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, env=environment)
            assert writer.stdout is not None
            for _ in range(2):
                assert await writer.stdout.readline()
            last = proxy.pieces + random.randint(0, 300)
            await until_true(functools.partial(has_received, proxy, last))
            writer.send_signal(signal.SIGKILL)
            await writer.wait()
            mirror = Mirror("s3://killed/run", storage_options=options(server))
            async with Saver(tmp_path / f"restored {number}", mirror=mirror) as saver:
                restored = await saver.restore()
            assert restored is not None
            assert np.array_equal(restored.state["weights"], state_of(restored.checkpoint.step)["weights"])
            assert restored.checkpoint.sequence >= latest
            latest = restored.checkpoint.sequence
