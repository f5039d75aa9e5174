"""Plays of the cancel sweep: sessions that save and restore, in real directories; whatever is cut off, what is there is whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint._format import LOCK, parse
from tests.fuzz.playbook import Broken, Play, fails, finish, scenario
from tests.fuzz.stage import QUICK, Stage

_WHERE = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where fsync costs nothing, if there is such a place."""
PATIENCE_SECS = 30.0
"""A thread may have to wait for a busy machine."""
EVERY_STEP = ah.Every(steps=1)


class StageSaver(ah.Saver):
    """A saver whose writes are watched, so that they are cancelled by themselves too."""

    def __init__(self, stage: CheckpointStage, **options: Any) -> None:
        super().__init__(stage.path, **options)
        self.stage = stage

    async def save(self, state: Any, step: int, *, metrics: Any = None) -> ah.checkpoint.Checkpoint:
        self.stage.begun_saves.append(step)
        saved: ah.checkpoint.Checkpoint = await self.stage.probe.watched("save", super().save(state, step, metrics=metrics))
        self.stage.durable = len(self.stage.begun_saves)
        return saved


@dataclass
class CheckpointStage(Stage):
    """One performance with a directory."""

    begun_saves: list[int] = field(default_factory=list)
    """The steps that were to be saved, in order."""
    durable: int = 0
    """How many of them there were when the last one was said to be there."""
    highest: int = 0
    path: Path = Path()

    async def operation(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="sweep-", dir=_WHERE))
        try:
            await super().operation()
        finally:
            self._check_files()
            shutil.rmtree(self.path)

    def session(self, *hooks: Any, saver: ah.Saver | None = None, **options: Any) -> ah.AsyncMonitoredSession:
        """A session that is restored from the directory, and saves there."""
        source = ah.ChiefSessionCreator(
            self.graph, checkpoint_dir=saver or self.path, global_step=self.store, variables=self.variables
        )
        return ah.AsyncMonitoredSession(source, [*self.hooks, *hooks], recovery=QUICK, **options)

    def anew(self) -> None:
        """Another process: it knows no step and no values."""
        self.store, self.variables, self.runs = ah.MemoryStepStore(), ah.Variables(), 0

    def look(self) -> None:
        super().look()
        self.highest = max(self.highest, self.step)

    def _check_files(self) -> None:
        """Nothing is half done, nobody holds the directory, and the newest checkpoint is that of a committed step."""
        self.look()
        strange = [name for name in os.listdir(self.path) if name != LOCK and parse(name) is None]
        if strange:
            self.problem(f"I9: {', '.join(strange)} left in the directory")
        directory = CheckpointDirectory(self.path, keep=ah.checkpoint.KeepNewest(99), min_free_bytes=0, read_only=False)
        try:
            for one in directory.verify():
                if one.reason is not None:
                    self.problem(f"{one.path.name} is damaged: {one.reason}")
            restored = directory.restore(None)
        except ah.errors.CheckpointError as error:
            self.problem(f"I9: {error}")
            return
        finally:
            directory.close()
        if restored is None:
            if self.durable:
                self.problem("a checkpoint was said to be durable, and there is none")
            return
        step, weight = restored.checkpoint.step, restored.state["variables"]["w"]
        if weight != step:
            self.problem(f"the newest checkpoint, of step {step}, has the variable of step {weight}")
        if step > self.highest:
            self.problem(f"the newest checkpoint is of step {step}, which was never committed")
        if self.begun_saves and step not in self.begun_saves[max(0, self.durable - 1) :]:
            self.problem(f"the newest checkpoint is of step {step}, and {self.begun_saves} were saved, {self.durable} for sure")


def with_files(name: str, **options: Any) -> Callable[[Play], Play]:
    """Adds a play with a directory of checkpoints."""
    return scenario(name, **{"stage": CheckpointStage, "hooks": 1, "hang_secs": PATIENCE_SECS, **options})


async def train(stage: CheckpointStage, session: ah.AsyncMonitoredSession, runs: int = 2) -> None:
    async with stage.open(session):
        for _ in range(runs):
            await stage.run(session)


@with_files("checkpoints in the background")
async def background(stage: CheckpointStage) -> None:
    await train(stage, stage.session(ah.CheckpointSaverHook(every=EVERY_STEP)))


@with_files("each step waits for its checkpoint")
async def foreground(stage: CheckpointStage) -> None:
    await train(stage, stage.session(ah.CheckpointSaverHook(every=EVERY_STEP, background=False)))


@with_files("checkpoints whose writes are cancelled")
async def watched_writes(stage: CheckpointStage) -> None:
    saver = StageSaver(stage, keep=ah.checkpoint.KeepNewest(1))
    background = bool(stage.seed % 2)
    try:
        await train(stage, stage.session(ah.CheckpointSaverHook(every=EVERY_STEP, background=background), saver=saver))
    finally:
        await finish(saver.aclose)


@with_files("a checkpoint when it ends badly", expect=Broken)
async def saved_on_error(stage: CheckpointStage) -> None:
    stage.acts["right"] = fails(Broken, at=2)
    hook = ah.CheckpointSaverHook(every=ah.Every(steps=100), save_on_begin=False, save_on_error=True)
    await train(stage, stage.session(hook))


@with_files("checkpoints that are skipped while one is written", hooks=0)
async def skipped(stage: CheckpointStage) -> None:
    hook = ah.CheckpointSaverHook(every=EVERY_STEP, on_busy="skip", save_on_begin=False)
    await train(stage, stage.session(hook), 4)


@with_files("goes on from a checkpoint", hooks=0)
async def resumed(stage: CheckpointStage) -> None:
    await train(stage, stage.session(ah.CheckpointSaverHook(every=ah.Every(steps=100), save_on_begin=False)))
    stage.anew()
    async with stage.open(stage.session(ah.CheckpointSaverHook(every=EVERY_STEP))) as session:
        if stage.step != 2:
            stage.problem(f"it ended at step 2 and goes on from step {stage.step}")
        await stage.run(session)


@with_files("recovers from a checkpoint", vanishing=True)
async def recovered(stage: CheckpointStage) -> None:
    stage.acts["train"] = fails(ah.AbortedError, at=2)
    async with stage.open(stage.session(ah.CheckpointSaverHook(every=EVERY_STEP))) as session:
        for _ in range(2):
            await session.run("train")  # a recovery may lead to an earlier step


@with_files("a listener of the saves")
async def listener(stage: CheckpointStage) -> None:
    class Slow(ah.CheckpointSaverListener):
        async def begin(self) -> None:
            await stage.pause("listener.begin", 1)

        async def before_save(self, session: ah.Session, global_step: int) -> None:
            await stage.pause("listener.before", 1)

        async def after_save(self, session: ah.Session, global_step: int) -> object:
            await stage.probe.watch("listener.after_save", stage.pause, "listener.after", 1)
            return global_step >= 2

        async def end(self, session: ah.Session, global_step: int) -> None:
            await stage.pause("listener.end", 1)

    async with stage.open(stage.session(ah.CheckpointSaverHook(every=EVERY_STEP, listeners=[Slow()]))) as session:
        while not session.should_stop():
            await stage.run(session)


@with_files("a saver alone, several tasks", hooks=0)
async def saver_alone(stage: CheckpointStage) -> None:
    async def save(step: int) -> None:
        await saver.save({"variables": {"w": step}}, step)
        stage.durable += 1

    async def close() -> None:
        await asyncio.gather(saver.aclose(), saver.aclose())

    stage.highest = 3
    saver = ah.Saver(stage.path, keep=ah.checkpoint.KeepNewest(1))
    try:
        await save(1)
        await stage.together(one=lambda: save(2), two=lambda: save(3), reader=saver.restore, looker=saver.checkpoints)
    finally:
        await finish(close)
