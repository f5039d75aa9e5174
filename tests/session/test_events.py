"""The events of a session, by which its hooks meet."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.session import Event, SessionEvents, session_events
from tests.support.sessions import use_up
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

EVERY_TWO = ah.Every(steps=2)


async def step(global_step: int) -> dict[str, float]:
    """Count the step."""
    return {"loss": 1 / (1 + global_step)}


class Listens(ah.SessionRunHook):
    """Keeps all events of its session."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    async def begin(self) -> None:
        """Subscribe to the events."""
        events = session_events()
        for name in ("saving", "saved", "restored", "evaluated"):
            event: Event[Any] = getattr(events, name)
            event.subscribe(self._noting(name))

    def _noting(self, name: str) -> Any:
        async def note(*values: Any) -> None:
            await ticks()
            self.seen.append((name, *values))

        return note


async def score(evaluation: ah.hooks.Evaluation) -> dict[str, Any]:
    """Return a number and a text."""
    return {"score": evaluation.step, "name": "x"}


async def train(folder: Path, *hooks: Any, steps: int, **options: Any) -> None:
    """Train up to a step, with checkpoints in a folder."""
    creator = ah.ChiefSessionCreator(step, checkpoint_dir=folder)
    hooks = (*hooks, ah.StopAtStepHook(last_step=steps))
    async with ah.AsyncMonitoredSession(creator, hooks, **options) as session:
        await use_up(session.steps("loss"))


async def test_hooks_are_notified_of_saves_restores_and_evaluations(tmp_path: Path) -> None:
    """A hook is notified of all events of its session, wherever it is in the list."""
    listens = Listens()
    saving = ah.CheckpointSaverHook(every=EVERY_TWO, save_on_begin=False, background=False)
    evaluating = ah.hooks.EvaluatorHook(score, every=EVERY_TWO)
    await train(tmp_path, saving, evaluating, listens, steps=3)
    seen = [event[:2] for event in listens.seen]
    assert seen == [
        ("evaluated", 2),
        ("saving", 2),
        ("saved", 2),
        ("evaluated", 3),
        ("saving", 3),
        ("saved", 3),
    ]
    assert listens.seen[0] == ("evaluated", 2, {"score": 2.0}, False)
    assert listens.seen[3] == ("evaluated", 3, {"score": 3.0}, True)
    assert listens.seen[4] == ("saving", 3, tmp_path)
    assert listens.seen[5][2].parent == tmp_path

    listens.seen.clear()
    await train(tmp_path, listens, steps=3)
    assert listens.seen == [("restored", 3, listens.seen[0][2])]


class Odd(BaseException):
    """An error that is no `Exception`, as some packages raise."""


@pytest.mark.parametrize(
    "error",
    [KeyError("mine"), StopAsyncIteration(), ah.OutOfRangeError("end"), Odd("odd")],
    ids=repr,
)
async def test_an_error_of_a_callback_is_its_own(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of a callback, of any type, is logged; neither the save nor the session fails."""

    class Fails(ah.SessionRunHook):
        async def begin(self) -> None:
            session_events().saved.subscribe(self.upload)

        def upload(self, step: int, path: Path) -> None:
            raise error

    listens = Listens()
    saving = ah.CheckpointSaverHook(every=EVERY_TWO)
    await train(tmp_path, Fails(), listens, saving, steps=4)
    assert [event[1] for event in listens.seen if event[0] == "saved"] == [0, 2, 4]
    assert saving.failed == 0
    assert caplog.text.count("Fails.upload") >= 3


async def test_a_cancellation_by_others_ends_the_callbacks() -> None:
    """A callback that is cancelled from inside is logged; a cancel of the caller is raised."""
    events = SessionEvents()
    waiting = asyncio.get_running_loop().create_future()

    async def cancelled(step: int, path: Path) -> None:
        await waiting

    events.saved.subscribe(cancelled)
    waiting.cancel()
    await events.saved.emit(1, Path())
    waiting = asyncio.get_running_loop().create_future()
    emitting = asyncio.create_task(events.saved.emit(1, Path()))
    await ticks()
    emitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await emitting


async def test_a_save_is_made_on_request(tmp_path: Path) -> None:
    """A hook asks for a save, which follows its run; at the end, one that is still due is made."""

    @ah.hook("after_run")
    async def ask(context: ah.SessionRunContext, values: object) -> None:
        if context.global_step in (2, 5):
            assert context.coord is not None
            context.coord.events.request_save()

    listens = Listens()
    saving = ah.CheckpointSaverHook(every=ah.Every(steps=100), save_on_begin=False)
    await train(tmp_path, ask, saving, listens, steps=7)
    assert [event[1] for event in listens.seen if event[0] == "saved"] == [2, 5, 7]


@pytest.mark.parametrize("order", range(6))
async def test_the_order_of_hooks_does_not_change_what_is_saved(order: int, tmp_path: Path) -> None:
    """Each order of saver, evaluator, early stopping and effects saves the same states."""
    delivered: list[int] = []

    async def deliver(effect: ah.hooks.Effect) -> None:
        delivered.append(effect.step)

    async def recording(global_step: int) -> dict[str, float]:
        ah.effect("publish", global_step + 1)
        return {"loss": 1.0}

    stopping = ah.hooks.EarlyStoppingHook("score", mode="max", patience=9, every=None)
    hooks = [
        ah.CheckpointSaverHook(every=EVERY_TWO, background=False),
        ah.hooks.EvaluatorHook(score, every=EVERY_TWO, on_result=stopping.report),
        stopping,
        ah.hooks.EffectsHook({"publish": deliver}, run="r"),
    ]
    orders = [*itertools.permutations(hooks)]
    random.Random(7).shuffle(orders)
    creator = ah.ChiefSessionCreator(recording, checkpoint_dir=tmp_path)
    async with ah.AsyncMonitoredSession(creator, orders[order]) as session:
        for _ in range(5):
            await session.run("loss")
    async with ah.checkpoint.Saver(tmp_path, read_only=True) as saver:
        restored = await saver.restore()
    assert restored is not None
    states = restored.state["hooks"]
    assert delivered == [1, 2, 3, 4, 5]
    assert states["EffectsHook"]["pending"] == []
    # The evaluation at the end, of step 5, is no part of the run.
    assert states["EarlyStoppingHook"]["best_step"] == 4
    assert states["EvaluatorHook"]["evaluated_step"] == 5
    assert restored.checkpoint.metrics == {"score": 5.0}


async def test_events_outside_of_a_session() -> None:
    """A test may call `begin` itself: the events are those of no session."""
    hook = Listens()
    await hook.begin()
    assert hook.seen == []
    assert repr(SessionEvents().saved) == "<Event saved: 0 callbacks>"
