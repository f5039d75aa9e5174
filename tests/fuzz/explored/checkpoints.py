"""Scenarios with checkpoints: sessions save and restore in real directories, and every checkpoint
found there is complete.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint._format import LOCK, parse_name
from tests.fuzz._harness import scratch
from tests.fuzz.explored.fixture import (
    EVERY_STEP,
    Body,
    Broken,
    Fixture,
    await_to_the_end,
    fails,
    scenario,
)
from tests.support.sessions import NO_BACKOFF


class WatchedSaver(ah.checkpoint.Saver):
    """A saver whose writes are watched, so that they are cancelled by themselves too."""

    def __init__(self, fixture: CheckpointFixture, **options: Any) -> None:
        super().__init__(fixture.path, **options)
        self.fixture = fixture

    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        self.fixture.begun_saves.append(step)
        save = functools.partial(super().save, state, step, metrics=metrics)
        saved: ah.checkpoint.Checkpoint = await self.fixture.probe.watch("save", save)
        self.fixture.durable = len(self.fixture.begun_saves)
        return saved


@dataclass
class CheckpointFixture(Fixture):
    """A fixture with a directory."""

    begun_saves: list[int] = field(default_factory=list)
    """The steps whose save has begun, in order."""
    durable: int = 0
    """How many had begun when the last save returned."""
    highest: int = 0
    path: Path = Path()

    async def operation(self) -> None:
        with scratch() as self.path:
            try:
                await super().operation()
            finally:
                self._check_files()

    def session(
        self, *hooks: Any, saver: ah.checkpoint.Saver | None = None, **options: Any
    ) -> ah.AsyncMonitoredSession:
        """Make a session that is restored from the directory, and saves there."""
        source = ah.ChiefSessionCreator(
            self.graph,
            checkpoint_dir=saver or self.path,
            global_step=self.store,
            variables=self.variables,
        )
        return ah.AsyncMonitoredSession(
            source, [*self.hooks, *hooks], recovery=NO_BACKOFF, **options
        )

    def restart(self) -> None:
        """Start over as another process, which knows no step and no values."""
        self.store, self.variables, self.runs = ah.MemoryStepStore(), ah.Variables(), 0

    def check(self) -> None:
        super().check()
        self.highest = max(self.highest, self.step)

    def _check_files(self) -> None:
        """Check that nothing is half written, the directory is not locked, and the newest
        checkpoint is of a committed step.
        """
        self.check()
        strange = [
            name for name in os.listdir(self.path) if name != LOCK and parse_name(name) is None
        ]
        if strange:
            self.add_violation(f"leak: {', '.join(strange)} left in the directory")
        directory = CheckpointDirectory(self.path, keep=ah.checkpoint.KeepNewest(99))
        try:
            for path, damage in directory.verify():
                if damage is not None:
                    self.add_violation(f"{path.name} is damaged: {damage}")
            restored = directory.restore(None)
        except ah.errors.CheckpointError as error:
            self.add_violation(f"leak: {error}")
            return
        finally:
            directory.close()
        if restored is None:
            if self.durable:
                self.add_violation("a save returned, and there is no checkpoint")
            return
        step, weight = restored.checkpoint.step, restored.state["variables"]["w"]
        if weight != step:
            self.add_violation(
                f"the newest checkpoint, of step {step}, has the variable of step {weight}"
            )
        if step > self.highest:
            self.add_violation(
                f"the newest checkpoint is of step {step}, which was never committed"
            )
        if self.begun_saves and step not in self.begun_saves[max(0, self.durable - 1) :]:
            self.add_violation(
                f"the newest checkpoint is of step {step}; saves of {self.begun_saves} began,"
                f" {self.durable} returned"
            )


def checkpoint_scenario(name: str, **options: Any) -> Callable[[Body], Body]:
    """Add a scenario with a directory of checkpoints."""
    return scenario(name, **{"fixture": CheckpointFixture, "hooks": 1, **options})


@checkpoint_scenario("checkpoints in the background")
async def background(fixture: CheckpointFixture) -> None:
    await fixture.train(fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP)))


@checkpoint_scenario("each step waits for its checkpoint")
async def foreground(fixture: CheckpointFixture) -> None:
    await fixture.train(fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP, background=False)))


@checkpoint_scenario("checkpoints whose writes are cancelled")
async def watched_writes(fixture: CheckpointFixture) -> None:
    saver = WatchedSaver(fixture, keep=ah.checkpoint.KeepNewest(1))
    background = bool(fixture.seed % 2)
    try:
        await fixture.train(
            fixture.session(
                ah.CheckpointSaverHook(every=EVERY_STEP, background=background), saver=saver
            )
        )
    finally:
        await await_to_the_end(saver.aclose)


@checkpoint_scenario("a checkpoint after an error", expect=Broken)
async def saved_on_error(fixture: CheckpointFixture) -> None:
    fixture.actions["right"] = fails(Broken, at=2)
    hook = ah.CheckpointSaverHook(
        every=ah.Every(steps=100), save_on_begin=False, save_on_error=True
    )
    await fixture.train(fixture.session(hook))


@checkpoint_scenario("continues from a checkpoint", hooks=0)
async def resumed(fixture: CheckpointFixture) -> None:
    await fixture.train(
        fixture.session(ah.CheckpointSaverHook(every=ah.Every(steps=100), save_on_begin=False))
    )
    fixture.restart()
    async with fixture.open(fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP))) as session:
        if fixture.step != 2:
            fixture.add_violation(f"it ended at step 2 and continues from step {fixture.step}")
        await fixture.run(session)


@checkpoint_scenario("recovers from a checkpoint", vanishing=True)
async def recovered(fixture: CheckpointFixture) -> None:
    fixture.actions["train"] = fails(ah.AbortedError, at=2)
    async with fixture.open(fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP))) as session:
        for _ in range(2):
            await session.run("train")  # a recovery may lead to an earlier step


@checkpoint_scenario("a listener of the saves")
async def listener(fixture: CheckpointFixture) -> None:
    class Slow(ah.hooks.CheckpointSaverListener):
        async def begin(self) -> None:
            await fixture.pause("listener.begin", 1)

        async def before_save(self, *_: object) -> None:
            await fixture.pause("listener.before", 1)

        async def after_save(self, session: ah.Session, global_step: int) -> object:
            await fixture.probe.watch("listener.after_save", fixture.pause, "listener.after", 1)
            return global_step >= 2

        async def end(self, session: ah.Session, global_step: int) -> None:
            await fixture.pause("listener.end", 1)

    async with fixture.open(
        fixture.session(ah.CheckpointSaverHook(every=EVERY_STEP, listeners=[Slow()]))
    ) as session:
        while not session.should_stop():
            await fixture.run(session)
