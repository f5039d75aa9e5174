"""The step store on a real Ray cluster; tests that need no cluster are in
tests/stores/test_ray_actor.py.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from aiohooks import open_step_store
from aiohooks.testing import check_step_store, step_store_checks
from tests.support.ray_cluster import actor_of, environment, nothing_left
from tests.support.ray_cluster import cluster as cluster
from tests.support.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.may_leak,  # but see `nothing_left`
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]

# The others open many runs, each with an actor that takes seconds to start, and check nothing of
# Ray itself.
QUICK = [check for check in step_store_checks() if check not in ("forgets", "keeps_runs_apart")]


@pytest.mark.parametrize("check", QUICK)
async def test_contract(check: str, cluster: str) -> None:
    """Every check of a step store passes."""
    async with nothing_left():
        await check_step_store(lambda run: open_step_store("ray://contract", run=run), check)


async def test_two_runs_and_a_forgotten_one(cluster: str) -> None:
    """Runs of one cluster never meet; a forgotten run is gone, and so is its actor."""
    async with (
        nothing_left(),
        open_step_store("ray://aiohooks", run="one") as first,
        open_step_store("ray://aiohooks", run="two") as second,
    ):
        await first.advance(7)
        assert (await second.value()).step == 0
        for store in (first, second):
            await store.forget()
        assert actor_of("one") is None
        async with open_step_store("ray://aiohooks", run="one") as again:
            assert (await again.value()).step == 0
            await again.forget()


async def test_a_few_faults(cluster: str) -> None:
    """Each of the actor, and each of a process; `python -m tests.fuzz.store_faults --engine ray`
    makes more of them.
    """
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.store_faults",
        "--engine",
        "ray",
        "--count",
        "6",
        "--seed",
        "2",
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, **environment(), "AIOHOOKS_TEST_RAY": cluster},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert b"6 faults: 0 violations" in said
