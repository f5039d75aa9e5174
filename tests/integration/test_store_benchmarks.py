"""The benchmarks of the stores over processes work: a few rounds of each row, with real servers and
processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.benchmarks.measure import TINY, measure
from tests.benchmarks.report import load
from tests.benchmarks.rows import ROWS, SECTIONS, STORES
from tests.support.ray_cluster import cluster as cluster
from tests.support.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.may_leak,  # a server of its own, with a thread that reads what it prints
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]

# A cluster takes long to start: rows about Ray are measured on the one that all tests share.
WITHOUT_CLUSTER = [name for name in SECTIONS["stores"] if name not in STORES["ray"]]


@pytest.mark.parametrize("name", WITHOUT_CLUSTER)
async def test_each_row_can_be_measured(name: str) -> None:
    """Every row gives figures, or says what is not installed."""
    results = await measure(name, ROWS[name], TINY)
    assert results
    for result in results:
        assert result.missing or (result.figure is not None and result.figure > 0)


async def test_rows_about_ray_can_be_measured(cluster: str, tmp_path: Path) -> None:
    """The command, a process of its own, measures them and saves the figures."""
    file = tmp_path / "figures.json"
    rows = ["ray-wake", "ray-callers"]  # the others have more processes, and nothing else of Ray
    counts = ["--loop", "asyncio", "--rounds", "1", "--slice", "0"]
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks",
        "--rows",
        *rows,
        *counts,
        "--json",
        str(file),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, "AIOHOOKS_TEST_RAY": cluster}
    )
    assert await process.wait() in (0, 1)  # 1: a bar is missed, as it may be where nothing is quiet
    (report,) = load(file)
    assert {result.row for result in report.results} == set(rows)
    assert all(result.figure is not None and result.figure > 0 for result in report.results)
