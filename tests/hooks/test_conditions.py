"""Built-in hooks that seldom wait are asked whether they have to, and cost no task while they have
not.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core import waits
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.testing import ManualClock
from tests.support.record_files import without_time
from tests.support.sessions import counting

pytestmark = pytest.mark.every_python

TENTH = ah.Every(steps=10)


async def evaluate(_: object) -> int:
    return 0


async def notify(*_: object) -> None:
    await asyncio.sleep(0)


def seldom_waiting(folder: Path, made_of: Any = lambda cls: cls) -> list[ah.SessionRunHook]:
    """Return one of each kind, which waits in its first run or at every tenth step."""
    return [
        made_of(ah.CheckpointSaverHook)(folder, every=TENTH, background=False, save_on_begin=False),
        made_of(EvaluatorHook)(evaluate, every=TENTH),
        made_of(ah.hooks.JSONLinesHook)(folder / "losses.jsonl", ["loss"]),
        made_of(ah.hooks.GlobalStepWaiterHook)(0),
        ah.hook("after_run", every=TENTH)(notify),
        made_of(ah.LoggingHook)(["loss"], every=TENTH),
        made_of(ah.StopAtStepHook)(last_step=25),
    ]


async def test_no_task_is_made_between_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in which no hook has to wait makes no task."""
    made: list[str] = []

    class CountedTask(asyncio.Task[Any]):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            made.append(str(keywords.get("name")))
            super().__init__(*args, **keywords)

    steps_with_tasks: list[int] = []
    async with counting(*seldom_waiting(tmp_path)) as session:
        await session.run("train")
        monkeypatch.setattr(asyncio, "Task", CountedTask)
        monkeypatch.setattr(waits, "make_task", CountedTask)
        asyncio.get_running_loop().set_task_factory(
            lambda loop, coro, **options: CountedTask(coro, loop=loop, **options)
        )
        try:
            while not session.should_stop():
                made.clear()
                await session.run("train")
                if made:
                    steps_with_tasks.append(session.global_step.latest.step)
        finally:
            asyncio.get_running_loop().set_task_factory(None)
            monkeypatch.undo()
    assert steps_with_tasks == [10, 20]


def called_always(cls: Any) -> Any:
    """Return the class with methods that override those with a condition."""

    class Called(cls):  # type: ignore[misc, unused-ignore]
        async def before_run(self, *args: Any) -> Any:
            return await super().before_run(*args)

        async def after_run(self, *args: Any) -> None:
            await super().after_run(*args)

    return Called


async def test_a_condition_changes_nothing_else(tmp_path: Path) -> None:
    """A hook that is called in every run, as another class overrides its methods, does the same as
    one that is asked.
    """

    async def outcome(name: str, made_of: Any) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        hooks: Any = seldom_waiting(folder, made_of)
        with ManualClock():
            async with counting(*hooks) as session:
                while not session.should_stop():
                    await session.run("train")
                    assert hooks[1].pending == ()
        saver, evaluator, _, waiter, *_ = hooks
        records = without_time(folder / "losses.jsonl")
        attributes = saver.saved, evaluator.results, waiter.started_at
        return attributes, records

    asked = await outcome("asked", lambda cls: cls)
    called = await outcome("called", called_always)
    assert asked == called
    assert asked[0] == (3, {10: 0, 20: 0, 25: 0}, 0)
    assert len(asked[1]) == 25
