"""A training in the simulated cluster: monitored sessions of a chief, a standby and workers, with
checkpoints on a shared disk.

The chief and the standby train the same model, one after the other: whoever leads restores the
newest checkpoint and continues. They are fed with numbers from 1, one each step, mostly by feeds
that checkpoints set back, in one loop or in two; steps and hooks fail in between. The workers wait
for each step, through a version gate; one of them ships items to the trainer, whose steps need them
in the end, when a trainer is killed just after a save. To the faults of `scenario` come a kill at
any operation of the disk, and a power cut, which leaves any state of the disk that a crash could
leave. Whoever fails is started again, as by a launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import functools
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import anyio.to_thread

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.checkpoint import KeepNewest, Saver
from aiohooks.errors import AiohooksError, PublisherFinishedError
from aiohooks.stores import Position, SharedStepStore
from tests.fuzz._harness import scratch
from tests.fuzz.checkpoints.operations import Crash, Recorder, materialise
from tests.fuzz.simulation.cluster import Cluster, Program
from tests.fuzz.simulation.scenario import Scenario
from tests.fuzz.simulation.virtual_time import Process, World
from tests.support.checkpoint_files import Call, Seam
from tests.support.hooks import PhaseHook

_SHIPPER = "worker 1"
"""The worker that ships items."""
_PROGRESS_SECS = 60.0
"""How long after the faults the next step may take."""


class _Killed(BaseException):
    """The process was killed in an operation of the disk."""


class ProcessFiles(Seam):
    """The operations of one process on the disk, until it is killed."""

    def __init__(self, recorder: Recorder, world: World) -> None:
        super().__init__()
        self.kill_in: int | None = None
        """At which operation from now on it is killed."""
        self._recorder, self._world = recorder, world
        self._dead = False

    def do(self, call: Call) -> Any:
        if self._dead:
            raise OSError(errno.EIO, "the process was killed")
        if self.kill_in == 0:
            if call.name == "write":
                fd, data = call.args
                part = data[: self._world.chance.randrange(len(data))]
                self._recorder.do(call._replace(args=(fd, part)))
            raise _Killed
        if self.kill_in is not None:
            self.kill_in -= 1
        return self._recorder.do(call)

    def end(self) -> None:
        """Close what the process has open, as the kernel does."""
        self._dead = True
        for fd in self.opened:
            self._recorder.do(Call(0, "close", os.close, (fd,), {}))
        self.opened.clear()


class _Count:
    """Counts: the steps of a model; or, as feeds, the numbers from 1, as far as a training gets."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.last += 1
            yield self.last

    def state_dict(self) -> dict[str, Any]:
        """Return the last number."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind a number."""
        self.last = state["last"]


class TrainingCluster(Cluster):
    """The processes, the directory of their checkpoints, and what they have seen of both."""

    def __init__(self, world: World, engine: str, directory: Path) -> None:
        self.directory = directory
        self.recorder = Recorder(directory)
        self.files: dict[Process, ProcessFiles] = {}
        self.durable = -1
        """The sequence of the last checkpoint that a save has returned."""
        self.steps_made = 0
        self.inbox: list[Position] | None = None
        """The items that the latest trainer has received, in its memory; None before the first."""
        self.is_quiet = False
        """Whether there are no more faults: each step uses an item."""
        self.on_save: Callable[[Process], None] = lambda process: None
        """Called when a save has returned."""
        super().__init__(world, engine)

    def program_of(self, name: str) -> Program:
        if name == _SHIPPER:
            return self._ship
        return self._train if name in ("chief", "standby") else self._work

    @property
    def needs_items(self) -> bool:
        """Whether a step waits for an item."""
        is_shipping = any(process.name.startswith(f"{_SHIPPER}#") for process in self.living)
        return self.is_quiet and is_shipping and not self.over

    @property
    def trainers(self) -> list[Process]:
        return [process for process in self.living if "worker" not in process.name]

    def start(self, name: str) -> Process:
        process = super().start(name)
        self.files[process] = ProcessFiles(self.recorder, self.world)
        return process

    def kill(self, process: Process) -> None:
        self.files.pop(process).end()
        super().kill(process)

    async def _live(self, process: Process, program: Program) -> None:
        """Run the program until it ends by itself; start it again when it fails, as a launcher
        does.
        """
        await sleep(self.world.chance.random() * 0.3)
        while True:
            try:
                async with self.make_store(process, on_lost="keep") as store:
                    await program(process, store)
                return
            except PublisherFinishedError as end:
                self.world.trace(process, "came after the end", content=end)
                if self.over:
                    return
            except AiohooksError as error:
                self.world.trace(process, "failed", type(error).__name__, content=error)
            except OSError as error:
                if process.alive:
                    raise
                self.world.trace(process, "failed", type(error).__name__, content=error)
            await sleep(1.0)

    # Programs.

    async def _train(self, process: Process, store: SharedStepStore) -> None:
        chance, model, numbers = self.world.chance, _Count(), _Count()
        inbox: list[Position] = []
        is_tracked = chance.random() < 0.7

        async def train(number: int) -> dict[str, int]:
            await sleep(chance.expovariate(1 / self.pace_secs))
            await self._use_item(inbox)
            self.fail_sometimes("before the step")
            model.last += 1
            if is_tracked and number != model.last:
                self.report(process, f"number {number} makes step {model.last}")
            if not is_tracked:
                numbers.last = model.last  # fed anew from there, when the program is started again
            self.fail_sometimes("in the step")
            return {"steps": model.last}

        async def fail_behind_save(*_: object) -> None:
            self.fail_sometimes("behind the save")

        async def use() -> None:
            async for _ in steps:
                if self.over:
                    break

        cluster = self

        class Files(Saver):
            _fs: ClassVar[Any] = self.files[process]

            async def restore(self, *args: Any, **options: Any) -> Any:
                # What a session has received is lost with it.
                inbox.clear()
                cluster.inbox = inbox
                return await super().restore(*args, **options)

        saver = Files(self.directory / "run", keep=KeepNewest(2))
        creator = ah.ChiefSessionCreator(
            train,
            scaffold=ah.Scaffold(tracked={"model": model, "numbers": numbers}),
            checkpoint_dir=saver,
            global_step=store,
        )
        watch = _Watch(self, process, model, numbers, is_tracked)
        hooks: list[Any] = [
            watch,
            ah.configure(PhaseHook("after_run", fail_behind_save), order=200),
            ah.CheckpointSaverHook(every=ah.Every(steps=3), listeners=[_Saves(self, process)]),
        ]
        try:
            policy = ah.RecoveryPolicy(on_lost_feeds="raise")
            async with ah.AsyncMonitoredSession(
                creator, hooks, recovery=policy, yield_secs=None, name=str(process)
            ) as session:
                feeds, prefetch = (
                    numbers if is_tracked else range(1, 10**9),
                    chance.choice((0, 0, 1, 3)),
                )
                steps = session.steps("steps", feeds=feeds, prefetch=prefetch)
                if chance.random() < 0.3:
                    session.start_soon(use)
                await use()
        finally:
            await saver.aclose()

    async def _use_item(self, inbox: list[Position]) -> None:
        """Use an item of a trainer; wait for it if need be, while no other trainer gets them."""
        while not inbox and self.needs_items and self.inbox is inbox:
            await sleep(0.1)
        if inbox:
            inbox.pop()

    async def _ship(self, process: Process, store: SharedStepStore) -> None:
        """Ship items to the latest trainer, dead or alive."""
        gate = ah.version_gate.VersionGate(store, max_lag=self.world.chance.randrange(3))
        while not self.over:
            async with gate.admit() as ticket:
                while self.inbox is None:
                    await sleep(0.1)
                self.inbox.append(ticket.position)

    async def _work(self, process: Process, store: SharedStepStore) -> None:
        graph, gate = (
            ah.Graph(),
            ah.version_gate.VersionGate(store, max_lag=self.world.chance.randrange(3)),
        )

        @graph.operation
        async def next_step() -> int:
            async with gate.admit() as ticket:
                seen = store.latest
                step = await store.wait_for(seen.step + self.world.chance.choice((1, 1, 3)))
                if (store.latest.epoch, step) <= seen:
                    self.report(process, f"waited for a step after {seen} and got {step}")
                is_new = (
                    store.latest.epoch == ticket.position.epoch
                    and store.latest.step - ticket.version <= gate.max_lag
                )
                if ticket.use() != is_new:
                    self.report(process, f"{ticket} was used at {store.latest}: {not is_new}")
            return step

        creator = ah.WorkerSessionCreator(graph, global_step=store, max_wait_secs=None)
        async with ah.AsyncMonitoredSession(creator, yield_secs=None, name=str(process)) as session:
            while not session.should_stop():
                step = await session.run("next_step")
                self.world.trace(process, "sees", step)
        if (left := gate.statistics()).open or left.waiting:
            self.report(process, f"left in the gate: {left}")

    def fail_sometimes(self, where: str) -> None:
        """Raise what the session recovers from."""
        if not self.over and self.world.chance.random() < 0.02:
            raise ah.UnavailableError(f"simulated {where}")

    # What they report.

    def report(self, process: Process, what: str) -> None:
        """Note something that must not happen, unless it happens to a process that was killed."""
        if process.alive:
            self.history.violations.append(f"{process} at {self.world.now:.3f}: {what}")

    def on_restored(self, process: Process, restored: Any, model: _Count, numbers: _Count) -> None:
        """A session has begun."""
        if restored is None:
            if self.durable >= 0:
                self.report(process, f"begins anew, though checkpoint {self.durable} was saved")
            return
        one = restored.checkpoint
        self.world.trace(process, "restored", one.sequence, one.step)
        if one.sequence < self.durable:
            self.report(
                process, f"restored checkpoint {one.sequence}, though {self.durable} was saved"
            )
        if not model.last == numbers.last == one.step:
            self.report(
                process,
                f"the checkpoint of step {one.step} has {model.last} steps, and number"
                f" {numbers.last}",
            )

    def on_saved(self, process: Process, sequence: int, step: int) -> None:
        """A save has returned."""
        if not process.alive:
            return
        self.world.trace(process, "saved", sequence, step)
        if sequence <= self.durable:
            self.report(process, f"saved checkpoint {sequence} after {self.durable}: two writers")
        self.durable = max(self.durable, sequence)
        self.on_save(process)

    def on_step(self, process: Process, step: int, model_steps: int) -> None:
        """A run of a trainer is complete."""
        if not process.alive:
            return
        self.world.trace(process, "made", step)
        self.steps_made += 1
        if step != model_steps:
            self.report(process, f"step {step} with a model of {model_steps} steps")


class _Watch(ah.SessionRunHook):
    """Reports what a trainer restores and makes."""

    def __init__(
        self,
        cluster: TrainingCluster,
        process: Process,
        model: _Count,
        numbers: _Count,
        is_tracked: bool,
    ) -> None:
        self._cluster, self._process, self._model, self._numbers = cluster, process, model, numbers
        self._is_tracked = is_tracked
        self._last = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        """Report what was restored."""
        self._cluster.on_restored(self._process, session.restored, self._model, self._numbers)
        if (
            session.restored is not None
            and session.restored.checkpoint.step < self._last
            and not self._is_tracked
        ):
            self._cluster.report(
                self._process,
                f"went back from step {self._last} without a word: its feeds are gone",
            )

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        """Report the step."""
        self._last = run_context.global_step
        self._cluster.on_step(self._process, run_context.global_step, self._model.last)
        self._cluster.fail_sometimes("before the save")


class _Saves(ah.hooks.CheckpointSaverListener):
    """Reports what is durable."""

    def __init__(self, cluster: TrainingCluster, process: Process) -> None:
        self._cluster, self._process = cluster, process

    async def after_save(self, session: ah.Session, global_step: int) -> None:
        """Report the checkpoint."""
        assert session.saver is not None
        newest = (await session.saver.checkpoints())[0]
        self._cluster.on_saved(self._process, newest.sequence, newest.step)


class TrainingScenario(Scenario):
    """Faults of the cluster and of the disk; then training continues, and ends cleanly in all
    processes.
    """

    cluster: TrainingCluster

    def __init__(self, world: World, engine: str, directory: Path) -> None:
        super().__init__(world, TrainingCluster(world, engine, directory))
        self.kinds = (
            *self.kinds,
            self._kill_in_disk,
            self._kill_in_disk,
            self._kill_in_disk,
            self._power_cut,
            self._power_cut,
        )

    @property
    def operations(self) -> int:
        """How many steps were made."""
        return self.cluster.steps_made

    @contextlib.contextmanager
    def patched(self) -> Generator[None]:
        """Let threads do their work in the loop, a little later."""
        world = self.world

        async def run_sync(fn: Callable[..., Any], *args: Any, **options: object) -> Any:
            process, context = asyncio.get_running_loop(), contextvars.copy_context()
            assert isinstance(process, Process)
            done = process.create_future()

            def call() -> None:
                try:
                    result = context.run(fn, *args)
                except _Killed:
                    self._note("killed in the disk", process)
                    world.at(world.now, lambda: self._kill_one(process))
                except BaseException as error:
                    if not done.done():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(result)

            process.call_later(world.chance.expovariate(1 / 0.02), call)
            return await done

        with mock.patch.object(anyio.to_thread, "run_sync", run_sync):
            yield

    def _kill_in_disk(self) -> None:
        process = self.world.chance.choice(self.cluster.trainers or self.cluster.living)
        self._note("to be killed in the disk", process)
        self.cluster.files[process].kill_in = self.world.chance.randrange(60)

    def _power_cut(self) -> None:
        """All trainers are on one machine, with the disk."""
        cluster = self.cluster
        self._note("power cut")
        names = [process.name.partition("#")[0] for process in cluster.trainers]
        for process in cluster.trainers:
            cluster.kill(process)
        events = len(cluster.recorder.events)
        materialise(Crash(cluster.recorder).state(events, self.world.chance), cluster.directory)
        cluster.recorder = Recorder(cluster.directory)
        secs = self._secs()
        for name in names:
            self.world.after(secs, functools.partial(self._start_again, name))

    def _end(self) -> None:
        """A trainer makes further steps, also after one was killed just after a save; each worker
        sees them, and all end cleanly.
        """
        cluster, world = self.cluster, self.world
        for process in cluster.living:
            cluster.files[process].kill_in = None
        cluster.is_quiet = True
        self._make_steps()
        self._kill_after_save()
        self._make_steps()
        cluster.over = True
        if not world.run(
            world.now + self.most_secs, lambda: all(task.done() for task in cluster.tasks.values())
        ):
            self._report_stuck(cluster.tasks)
        self._report_failures()
        cluster.history.violations += [
            f"{process} left {task}"
            for process, main in cluster.tasks.items()
            if main.done()
            for task in asyncio.all_tasks(process)
        ]
        if cluster.durable < 0:
            cluster.history.violations.append("nothing was saved")

    def _make_steps(self) -> None:
        cluster, world = self.cluster, self.world
        if not cluster.trainers:
            cluster.start("chief")
        made = cluster.steps_made
        if not world.run(world.now + _PROGRESS_SECS, lambda: cluster.steps_made > made + 3):
            self._report_stuck(cluster.tasks, "training")

    def _kill_after_save(self) -> None:
        """Kill the trainer that makes the next save, just after it."""
        cluster, world = self.cluster, self.world
        killed: list[Process] = []

        def kill(process: Process) -> None:
            if process in cluster.living and not killed:
                killed.append(process)
                world.at(world.now, lambda: cluster.kill(process))

        cluster.on_save = kill
        world.run(
            world.now + _PROGRESS_SECS,
            lambda: bool(killed) and killed[0] not in cluster.living,
        )
        self._note("killed after a save", *killed)


@contextlib.contextmanager
def training(world: World, engine: str) -> Generator[TrainingScenario]:
    """Yield the scenario of a training, with a directory for its checkpoints."""
    with scratch() as directory:
        scenario = TrainingScenario(world, engine, directory)
        with scenario.patched():
            yield scenario
