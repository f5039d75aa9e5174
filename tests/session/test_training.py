"""`monitored_training_session`: which hooks a chief and a worker get, in which order, and what
depends on what.

Intended differences from TensorFlow (O62 and O63 in tests/tensorflow/ORIGINAL_TESTS.md): a saver is
turned off by None, none of the default hooks depends on another one, their order is always the
same, and the steps per second are logged without any directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.checks import invalid
from tests.support.sessions import counting_graph, make_runs

COUNTS = "StepCounterHook"
SUMMARIES = "SummarySaverHook"
SAVES = "CheckpointSaverHook"
DIRECTORY = "its directory"
LOSS = {"summaries": ["loss"]}
SETS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing given": ({}, ["C", COUNTS, "U"]),
    "checkpoint_dir": ({"checkpoint_dir": DIRECTORY}, ["C", COUNTS, SAVES, "U"]),
    "summaries too": ({"checkpoint_dir": DIRECTORY, **LOSS}, ["C", COUNTS, SUMMARIES, SAVES, "U"]),
    "summaries alone": ({"summary_dir": DIRECTORY, **LOSS}, ["C", COUNTS, SUMMARIES, "U"]),
    # TensorFlow turned checkpoints off with them, under a distribution strategy.
    "summaries off": (
        {"checkpoint_dir": DIRECTORY, **LOSS, "save_summaries": None},
        ["C", COUNTS, SAVES, "U"],
    ),
    "only restores": ({"checkpoint_dir": DIRECTORY, "save_checkpoint": None}, ["C", COUNTS, "U"]),
    "everything off": (
        {
            "checkpoint_dir": DIRECTORY,
            **dict.fromkeys(("save_checkpoint", "save_summaries", "log_step_count")),
        },
        ["C", "U"],
    ),
    "a worker": (
        {"is_chief": False, "variables": ah.Variables(), "checkpoint_dir": DIRECTORY, **LOSS},
        ["U"],
    ),
}


class C(RecordingHook):
    """The hook of the chief only."""


class U(RecordingHook):
    """The hook of every session."""


@pytest.mark.parametrize("name", SETS)
async def test_the_hooks_and_their_order(tmp_path: Path, name: str) -> None:
    """The chief's own come first, then the default ones in TensorFlow's order, then the hooks of
    every session.
    """
    arguments: dict[str, Any] = {
        key: tmp_path if value == DIRECTORY else value for key, value in SETS[name][0].items()
    }
    expected = SETS[name][1]
    session = ah.training.monitored_training_session(
        counting_graph(), hooks=[U()], chief_only_hooks=[C()], **arguments
    )
    assert repr(session) == f"<AsyncMonitoredSession new, <hooks: {', '.join(expected)}>>"


async def test_a_job_continues_where_it_ended(tmp_path: Path) -> None:
    """A chief saves at the end of the block, and the next one begins there, with its variables,
    step and summaries.
    """

    def chief() -> ah.AsyncMonitoredSession:
        return ah.training.monitored_training_session(
            counting_graph(),
            checkpoint_dir=tmp_path,
            summaries=["loss"],
            save_checkpoint=ah.Every(steps=2),
        )

    async with chief() as session:
        await make_runs(session, 3, "train")
    async with chief() as session:
        assert await session.run(("total", "global_step")) == (3, 3)
    steps = [
        checkpoint.step
        for checkpoint in await ah.checkpoint.Saver(tmp_path, read_only=True).checkpoints()
    ]
    assert steps == [3, 2, 0]
    assert (
        len([name for name in os.listdir(tmp_path) if name.startswith("events.out.tfevents")]) == 2
    )


async def test_a_function_as_the_step(tmp_path: Path) -> None:
    """A coroutine function is a source too; a creator is not, since this function makes one."""

    async def step() -> dict[str, float]:
        return {"loss": 0.5}

    async with ah.training.monitored_training_session(
        step, checkpoint_dir=tmp_path, summaries={"loss": "loss"}
    ) as session:
        assert await session.run("loss") == 0.5
    creator: Any = ah.ChiefSessionCreator(counting_graph())
    with invalid("cannot be run; give a Graph or an `async def`"):
        ah.training.monitored_training_session(creator)
