"""CheckpointSaverListener: the order of its calls, and its requests to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiohooks as ah
from tests.support.saving_sessions import (
    Listener,
    array_graph,
    on_disk,
    saving,
    train,
    writes_done,
)
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

both_ways = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


@both_ways
async def test_the_order_of_the_calls(tmp_path: Path, background: bool) -> None:
    """The listeners are called in order: begin, around each save, end; `after_save` when the
    checkpoint is durable.
    """
    record: list[str] = []
    there: list[list[int]] = []

    class Looking(Listener):
        async def after_save(self, session: ah.Session, global_step: int) -> object:
            there.append(await on_disk(tmp_path))
            return await super().after_save(session, global_step)

    listeners = [Looking(record=record, name="a."), Listener(record=record, name="b.")]
    hook = saving(tmp_path, every=ah.Every(steps=2), listeners=listeners, background=background)
    await train(array_graph(), [hook], 3)
    saves = [
        f"{name}{phase}_save({step})"
        for step in (0, 2, 3)
        for phase in ("before", "after")
        for name in ("a.", "b.")
    ]
    assert record == ["a.begin", "b.begin", *saves, "a.end(3)", "b.end(3)"]
    assert there == [[0], [0, 2], [0, 2, 3]]


@both_ways
@pytest.mark.parametrize(("step", "runs"), [(0, 0), (2, 2)])
async def test_a_stop_request_is_honoured(
    tmp_path: Path, step: int, runs: int, background: bool
) -> None:
    """No run begins after the listener returned, at the first save as at any other."""
    listener = Listener({step: "enough"})
    hook = saving(tmp_path, listeners=[listener], background=background)
    async with ah.AsyncMonitoredSession(array_graph(), [hook]) as session:
        for number in range(10):
            await listener.wait_saved(number)
            if session.should_stop():
                break
            await session.run("train")
    assert (session.global_step.latest.step, session.stop_reason) == (runs, "enough")


async def test_a_stop_request_at_the_last_save_is_honoured(tmp_path: Path) -> None:
    """The session has the reason, and a request without a reason gets one."""
    session = await train(
        array_graph(), [saving(tmp_path, every=ah.Every(secs=1e6), listeners=[Listener({1: True})])]
    )
    assert session.stop_reason == "a listener requested it after saving step 1"


class Failing(ah.hooks.CheckpointSaverListener):
    """Fails before the save of step 2."""

    async def before_save(self, session: ah.Session, global_step: int) -> None:
        if global_step == 2:
            raise ValueError("not now")


@pytest.mark.parametrize(
    ("listener", "says", "steps", "last"),
    [
        (Failing(), "not now", [0, 1], 2),
        (Listener(fails={2: ValueError("not well")}), "not well", [0, 1, 2], 3),
    ],
)
async def test_an_error_of_a_listener_is_raised(
    tmp_path: Path,
    listener: ah.hooks.CheckpointSaverListener,
    says: str,
    steps: list[int],
    last: int,
) -> None:
    """Before a save in that run, which is not saved; after one in the next at the latest."""
    hook = saving(tmp_path, listeners=[listener])
    session = ah.AsyncMonitoredSession(array_graph(), [hook])

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(3):
            await session.run("train")
            await writes_done()

    with pytest.raises(ValueError, match=says):
        await run_block(session, body)
    assert (await on_disk(tmp_path), session.global_step.latest.step, hook.failed) == (
        steps,
        last,
        0,
    )


@both_ways
async def test_a_listener_whose_input_ends_is_no_clean_end(
    tmp_path: Path, background: bool
) -> None:
    """An error that would end a session cleanly is a failure where a listener raises it."""
    listener = Listener(fails={1: ah.OutOfRangeError("no more data to evaluate")})
    hook = saving(tmp_path, listeners=[listener], background=background)
    with pytest.raises(RuntimeError, match="after_save of a listener raised OutOfRange") as caught:
        await train(array_graph(), [hook], 3)
    assert isinstance(caught.value.__cause__, ah.OutOfRangeError)
