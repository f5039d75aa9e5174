"""A signal to the process group of a training whose loader has worker processes, as a terminal or
a supervisor sends it: the workers get it, too.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.checkpoint_files import saved_step
from tests.support.needs import need
from tests.support.pages import python_blocks
from tests.support.processes import start
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks workers, and signals their group"),
]

[RECIPE] = [
    block.text
    for block in python_blocks(ROOT / "docs/guides/pytorch.md")
    if "worker_init_fn" in block.text
]
PROGRAM = f"""
import sys

import torch

import aiohooks as ah

images = torch.zeros(100_000, 4)
{RECIPE}

async def step(batch):
    return {{"loss": float(batch.sum())}}

@ah.hook("after_run")
def report(run_context, run_values):
    if run_context.global_step == 3:
        print("running", flush=True)

async def main():
    creator = ah.ChiefSessionCreator(step, checkpoint_dir=sys.argv[1])
    hooks = [report, ah.CheckpointSaverHook(every=ah.Every(steps=1_000_000))]
    async with ah.AsyncMonitoredSession(creator, hooks, handle_signals=True) as session:
        async for _ in session.steps("loss", feeds=loader, prefetch=2, thread=True):
            pass
    print(session.stop_reason, session.global_step.latest.step, flush=True)

ah.run(main)
"""


@pytest.mark.parametrize("_", range(3))
def test_the_last_save_is_made_when_the_workers_get_the_signal(_: int, tmp_path: Path) -> None:
    """With the recipe of the page, the session stops at the signal, saves the last step and ends
    the workers.
    """
    need("torch")
    process = start([sys.executable, "-c", PROGRAM, str(tmp_path)], start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        os.killpg(process.pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=HANG_SECS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    reason, _received, step = output.split()
    assert (reason, process.returncode) == ("SIGTERM", 128 + signal.SIGTERM), errors
    assert saved_step(tmp_path) == int(step) >= 3
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(process.pid, 0)
