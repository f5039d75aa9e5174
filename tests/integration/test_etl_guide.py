"""The program of docs/guides/etl.md, with a source that has no new rows for a while."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from aiohooks.testing import ManualClock
from tests.support.pages import python_blocks
from tests.support.source import ROOT
from tests.support.waiting import ticks, until_true

SOURCE_SINK_AND_LOOP = python_blocks(ROOT / "docs/guides/etl.md")[:3]


async def test_sigterm_ends_the_pause_of_an_idle_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program ends without waiting for the source's pause or for `drain_secs`, whose clock does
    not advance.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in SOURCE_SINK_AND_LOOP:
        exec(block.text, names)
    empty_answers: list[int] = []

    async def fetch(position: int, size: int) -> list[dict[str, Any]]:
        if position == 0:
            return [{"id": 1, "total": 1.0}]
        empty_answers.append(position)
        return []

    with ManualClock():
        program = asyncio.create_task(names["etl"](fetch, 3600))
        await until_true(lambda: "step 1" in capsys.readouterr().out)
        await until_true(lambda: empty_answers)
        await ticks(20)
        os.kill(os.getpid(), signal.SIGTERM)
        await program
    assert empty_answers == [1]
