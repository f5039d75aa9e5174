"""TensorFlow's own tests of its checkpoint hook (18-40 in the table), and six recorded scenarios.

Two differences run through all of them. A save at the beginning is one at step 0, whatever kind of
session it is, and the boundaries behind it are multiples of the period; TensorFlow's timer triggers
at the first run instead where it was not triggered when the session was created. And by default a
checkpoint is written in the background: `after_save` comes when it is durable, while training may
have continued. Where TensorFlow's order is to be seen, `background` is off here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.saving_sessions import Listener, on_disk
from tests.support.sessions import counting_graph

pytestmark = pytest.mark.every_python


def saver(
    path: Path | None, every: ah.Every, *listeners: ah.hooks.CheckpointSaverListener, **options: Any
) -> ah.CheckpointSaverHook:
    """Make a hook that writes as TensorFlow's does: the step waits for it."""
    return ah.CheckpointSaverHook(
        path, every=every, listeners=listeners, background=False, **options
    )


# -- the periods


@pytest.mark.parametrize(
    ("every", "run", "steps", "last"),
    [
        (
            ah.Every(secs=2),
            "train",
            [0, 2, 4],
            5,
        ),  # one second a run; TensorFlow saves 1, 3 and 6 of its own, uneven clock
        (ah.Every(steps=2), "train", [0, 2, 4], 5),  # TensorFlow's bare session has 1, 3, 5
        (ah.Every(steps=10), "leap", [0, 10, 20], 25),  # five steps a run; TensorFlow: 5, 15, 25
    ],
    ids=["secs", "steps", "leaps"],
)
async def test_saves_periodically(
    tmp_path: Path, every: ah.Every, run: str, steps: list[int], last: int
) -> None:
    """At multiples of the period, and the last step at the end; the listeners get each."""
    graph, listener = counting_graph(), Listener()
    graph.train_op(steps=5, name="leap")(lambda: None)
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(graph, [saver(tmp_path, every, listener)]) as session:
            for _ in range(5):
                clock.advance(1)
                await session.run(run)
            assert await on_disk(tmp_path) == steps
    assert await on_disk(tmp_path) == listener.saved == [*steps, last]
