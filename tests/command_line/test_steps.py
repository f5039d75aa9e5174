"""`python -m aiohooks steps`: what it shows of real runs, and that it leaves them alone."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from aiohooks.__main__ import main
from aiohooks.stores import open_step_store
from tests.support.commands import run_command
from tests.support.redis_servers import execute
from tests.support.store_servers import first_stream, running
from tests.support.waiting import parked_wait

pytestmark = [pytest.mark.slow]


@pytest.mark.sample
async def test_a_run_is_shown(tmp_path: Path) -> None:
    """Step, epoch, chief, publishers, waiting processes, and how the last one left: as text, and as
    JSON.
    """
    url = f"local://{tmp_path}"
    async with open_step_store(url, run="digits") as store:
        async with store.lead():
            trainer, failing = store.publisher("trainer"), store.publisher("loader")
            await store.mark_initialised()
            await store.advance(41)
            failing.close(ValueError("bad \x1b[31m data"))
            await store.flush()
            wait = await parked_wait(store, 50)
            done = await run_command("steps", url, "--run", "digits")
            assert (done.returncode, done.stderr) == (0, "")
            lines = done.stdout.splitlines()
            assert lines[0] == "run digits: step 41 of epoch 1"
            assert [line.split()[0] for line in lines[1:]] == [
                "chief",
                "publisher",
                "waiting",
                "last",
            ]
            assert lines[1].endswith("term 1, initialised")
            assert lines[2].split()[1] == "trainer,"
            assert lines[3].endswith("1 process: for step 50")
            assert lines[4].endswith(r"loader failed at step 41: ValueError: bad \x1b[31m data")
            done = await run_command("steps", url, "--run", "digits", "--json")
            report = json.loads(done.stdout)
            assert (report["step"], report["epoch"], report["term"], report["waiting"]) == (
                41,
                1,
                1,
                [50],
            )
            assert report["chief"] == report["publishers"][0]["process"]
            assert report["last_exit"]["error"] == "ValueError: bad \x1b[31m data"
            wait.cancel()
            await asyncio.gather(wait, return_exceptions=True)
            trainer.close()
        await store.flush()
        lines = (await run_command("steps", url, "--run", "digits")).stdout.splitlines()
        assert lines[1].endswith("none; the last one had term 1")
        assert lines[2].split()[1] == "none"
        assert lines[3].endswith("no process")
        assert lines[4].endswith("trainer finished at step 41")


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, with exit code 1, and nothing is made."""
    assert main(["steps", f"local://{tmp_path}/steps", "--run", "digits"]) == 1
    assert "there is no run 'digits'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
async def _stream() -> None:
    await first_stream()


@pytest.mark.usefixtures("_stream")
async def test_a_server(tmp_path: Path) -> None:
    """A run on a server is shown with the leases of its publishers; no key and no connection is
    left of the look.
    """
    with running("valkey", tmp_path, keeps=False) as server:
        async with open_step_store(server.url, run="digits") as store:
            store.publisher("trainer")
            await store.advance(3)
            await store.flush()
            before = len((await execute(server, "CLIENT", "LIST")).splitlines())
            done = await run_command("steps", server.url, "--run", "digits")
            assert (done.returncode, done.stderr) == (0, "")
            assert "run digits: step 3 of epoch 1" in done.stdout
            assert re.search(r"lease of 10 s, renewed \d+ times", done.stdout)
            assert "the engine does not know the waiters" in done.stdout
            done = await run_command("steps", server.url, "--run", "other")
            assert (done.returncode, done.stdout) == (1, "")
            assert len((await execute(server, "CLIENT", "LIST")).splitlines()) == before
            await store.forget()
        assert not await execute(server, "KEYS", "aiohooks:*")
