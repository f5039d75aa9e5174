"""A simulation: a cluster at work, random faults, then quiet, and the end of the run; what its
history must satisfy.

Faults: lost, delayed and cut connections, partitions in one or both directions, a server that
stops, is away, or comes back with all its data, without the last of it, or without any; processes
that are killed and started again, or stopped for longer than their leases, and clocks that jump.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from aiohooks.stores import SharedStepStore
from tests.fuzz.simulation.checks import check
from tests.fuzz.simulation.cluster import ENGINES, UNREACHABLE, Cluster, deterministic
from tests.fuzz.simulation.history import Tenure
from tests.fuzz.simulation.virtual_time import Livelock, Process, World

MakeScenario = Callable[[World, str], AbstractContextManager["Scenario"]]
"""Makes a scenario of an engine in a world."""
_WORK_SECS = 8.0


@dataclass
class Result:
    """What came of a seed."""

    seed: int
    engine: str
    violations: list[str]
    digest: str
    events: int
    virtual_secs: float
    operations: int
    faults: list[str]
    lines: list[str] | None


@contextlib.contextmanager
def stores(world: World, engine: str) -> Generator[Scenario]:
    """Yield the scenario of processes that call their stores."""
    yield Scenario(world, Cluster(world, engine))


def simulate(
    seed: int, engine: str = "", scenario: MakeScenario = stores, *, tracing: bool = False
) -> Result:
    """Run the simulation of a seed."""
    world = World(seed, tracing=tracing)
    engine = engine or world.chance.choice(sorted(ENGINES))
    collecting = gc.isenabled()
    gc.disable()  # a collection ends forgotten coroutines wherever it happens to run
    try:
        with deterministic(seed), scenario(world, engine) as one:
            violations = one.run()
    finally:
        if collecting:
            gc.enable()
    return Result(
        seed,
        engine,
        violations,
        world.digest,
        world.events,
        world.now,
        one.operations,
        one.faults,
        world.lines,
    )


class Scenario:
    """One run: the cluster at work, its faults, and its end."""

    most_secs = 60.0
    """How long anything may take after the faults have ended."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world = world
        self.cluster = cluster
        self.faults: list[str] = []
        self.kinds: tuple[Callable[[], None], ...] = (
            self._cut,
            self._answers_lost,
            self._answers_lost,
            self._answer_and_data_lost,
            self._partition,
            self._partition,
            self._slow_network,
            self._server_pause,
            self._server_outage,
            self._server_outage,
            self._server_without_data,
            self._server_without_data,
            self._server_with_old_data,
            self._keys_deleted,
            self._kill,
            self._kill,
            self._pause,
            self._clock_jump,
        )
        self._quiet_at = _WORK_SECS

    @property
    def operations(self) -> int:
        """How much was done."""
        return len(self.cluster.history.calls)

    def run(self) -> list[str]:
        cluster, history, chance = self.cluster, self.cluster.history, self.world.chance
        for _ in range(chance.choice((0, 2, 3, 4, 5))):
            self.world.at(chance.uniform(0.5, _WORK_SECS), self._inject)
        try:
            self.world.run(_WORK_SECS)
            self.world.run(self._quiet_at)
            self._note("quiet")
            self.world.run(self.world.now + cluster.lease_secs + cluster.heartbeat_secs + 4.0)
            history.settled = self.world.now
            self.world.run(self.world.now + 1.0)
            self._end()
        except Livelock as error:
            history.violations.append(f"livelock: {error}")
        found = [*history.violations, *check(cluster)]
        for process in self.world.processes:
            found += [f"{process}: {error}" for error in process.errors]
            if process.alive:
                process.kill()
        return found

    # Faults.

    def _inject(self) -> None:
        self.world.chance.choice(self.kinds)()

    def _note(self, *words: object) -> None:
        self.world.trace("fault:", *words)
        self.faults.append(f"{self.world.now:.3f} {' '.join(map(str, words))}")

    def _secs(self) -> float:
        """Return how long a fault lasts: shorter or longer than a lease."""
        secs = (
            self.world.chance.choice((0.05, 0.3, 1.0, 2.5))
            * self.cluster.lease_secs
            * self.world.chance.uniform(0.5, 1.5)
        )
        self._quiet_at = max(self._quiet_at, self.world.now + secs)
        return secs

    def _victim(self) -> Process:
        """Return a process; more often the chief than another one."""
        living = self.cluster.living
        chiefs = [each for each in living if "worker" not in each.name]
        return self.world.chance.choice(
            chiefs if chiefs and self.world.chance.random() < 0.4 else living
        )

    def _fell_ill(self, process: Process, secs: float) -> None:
        self.cluster.history.ill.append((process, self.world.now, self.world.now + secs))

    def _cut(self) -> None:
        process = self._victim()
        self._note("cut", process)
        self.cluster.network.cut(process)

    def _answers_lost(self) -> None:
        process = self._victim()
        self._note("answers lost", process)
        # Right after an outage, several attempts to connect that fail one after the other last as
        # long as a lease.
        self.cluster.network.lose_answers(
            process, self.world.chance.randrange(1, 4), lambda: self._fell_ill(process, 0.0)
        )

    def _answer_and_data_lost(self) -> None:
        """What an answer that was lost says is seen by others, and then lost by the server."""
        process, secs = self._victim(), self._secs()
        self._note("answer lost, and then the data", process)
        self._fell_ill(process, secs)

        def lose_data() -> None:
            self.cluster.network.block(process, secs)
            self.world.after(self.world.chance.uniform(0.01, 0.5), self._keys_deleted)

        self.cluster.network.lose_answers(process, 1, lose_data)

    def _partition(self) -> None:
        secs, way = (
            self._secs(),
            self.world.chance.choice(("both", "both", "to server", "to process")),
        )
        for process in {
            self._victim(): None,
            **({self._victim(): None} if self.world.chance.random() < 0.5 else {}),
        }:
            self._note("partition", process, way, f"{secs:.3f}")
            self.cluster.network.block(
                process, secs, to_server=way != "to process", to_process=way != "to server"
            )
            self._fell_ill(process, secs)

    def _slow_network(self) -> None:
        process, secs = self._victim(), self._secs()
        self._note("slow", process, f"{secs:.3f}")
        self.cluster.network.slow_down(process, secs, 100.0)
        self._fell_ill(process, secs)

    def _server_pause(self) -> None:
        secs = self._secs()
        self._note("server stopped", f"{secs:.3f}")
        self.cluster.network.pause_server(secs)

    def _server_outage(self) -> None:
        self._stop_server("server away", self._secs(), 0.0)

    def _server_with_old_data(self) -> None:
        lost_secs = self.world.chance.choice((0.05, 0.5, 3.0))
        self._lose(f"server away, without its last {lost_secs} s", lost_secs)

    def _server_without_data(self) -> None:
        self._lose("server away, without its data", 1e9)

    def _keys_deleted(self) -> None:
        self._note("data deleted")
        self.cluster.history.losses.append(self.world.now)
        self.cluster.server.lose_data()

    def _lose(self, what: str, lost_secs: float) -> None:
        self.cluster.history.losses.append(self.world.now)
        self._stop_server(what, self._secs() * self.world.chance.choice((0.0, 1.0)), lost_secs)

    def _stop_server(self, what: str, secs: float, lost_secs: float) -> None:
        self._note(what, f"{secs:.3f}")
        self.cluster.network.stop_server()
        self.world.after(secs, lambda: self._restart(lost_secs))

    def _restart(self, lost_secs: float) -> None:
        if not self.cluster.network.is_up:
            if lost_secs or self.cluster.engine == "ray":
                self.cluster.history.losses.append(self.world.now)
            self._note("server back")
            self.cluster.server.restart(lost_secs)

    def _kill(self) -> None:
        process = self._victim()
        self._note("kill", process)
        self._kill_one(process)

    def _kill_one(self, process: Process) -> None:
        name = process.name.partition("#")[0]
        self.cluster.kill(process)
        if self.world.chance.random() < 0.8:
            self.world.after(self._secs(), lambda: self._start_again(name))

    def _start_again(self, name: str) -> None:
        if not self.cluster.over:
            self.cluster.start(name)

    def _pause(self) -> None:
        process, secs = self._victim(), self._secs()
        self._note("pause", process, f"{secs:.3f}")
        process.pause(secs)
        self._fell_ill(process, secs)

    def _clock_jump(self) -> None:
        process, secs = self._victim(), self._secs()
        self._note("clock jump", process, f"{secs:.3f}")
        process.jump(secs)
        self._fell_ill(process, 0.0)

    # The end of the run.

    def _end(self) -> None:
        """All reads agree, two that want the lead get it in turn, and all waits end as the last
        publisher leaves, not earlier.
        """
        cluster, chance = self.cluster, self.world.chance
        cluster.finish()
        if not self.world.run(
            self.world.now + self.most_secs, lambda: len(cluster.at_rest) == len(cluster.tasks)
        ):
            self._report_stuck(
                {
                    process: task
                    for process, task in cluster.tasks.items()
                    if process not in cluster.at_rest
                }
            )
            return
        self.world.run(self.world.now + 2.0)  # what was cancelled may still arrive
        stores = {process: store for process, (store, _) in cluster.at_rest.items()}
        self._do(
            "value", {process: cluster.value(process, store) for process, store in stores.items()}
        )
        cluster.history.final_steps += [
            call.step or 0 for call in cluster.history.calls[-len(stores) :]
        ]
        two = chance.sample(list(stores), min(2, len(stores)))
        self._do("lead", {process: cluster.lead_once(process, stores[process]) for process in two})
        if len(stores) > 1:
            self._leave_last(stores)
        for process, (_, end) in cluster.at_rest.items():
            process.deliver(end.set_result, None)
        if not self.world.run(
            self.world.now + self.most_secs,
            lambda: all(task.done() for task in cluster.tasks.values()),
        ):
            self._report_stuck(cluster.tasks)
        self._report_failures()

    def _report_failures(self) -> None:
        for process, task in self.cluster.tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.cluster.history.violations.append(f"{process} failed: {_text_of(task)}")

    def _leave_last(self, stores: dict[Process, SharedStepStore]) -> None:
        cluster, history, world = self.cluster, self.cluster.history, self.world
        last, *others = world.chance.sample(list(stores), len(stores))
        how = world.chance.choice(("finished", "failed", "killed"))
        leave = last.create_future()

        def is_there() -> bool:
            return bool(history.publishers) and history.publishers[-1].name == "last"

        self._do("publish", {last: self._publish_last(last, stores[last], leave)}, done=is_there)
        world.trace("last", last, how)
        waits = {
            process: process.start(cluster.wait(process, stores[process], UNREACHABLE))
            for process in others
        }
        reached = {
            process: cluster.wait(process, stores[process], stores[last].latest.step + 1)
            for process in others
        }
        reached[last] = cluster.advance_again(last, stores[last], 1)
        self._do("wait", reached)
        before = len(history.wait_ends)
        world.run(world.now + 1.0)  # so that all have seen that it is there
        late_fault = world.chance.choice(
            (None, None, self._keys_deleted, self._server_without_data, self._server_outage)
        )
        if late_fault is not None:
            late_fault()
            if how == "killed" and world.chance.random() < 0.5:
                cluster.kill(last)
            world.run(max(world.now, self._quiet_at) + cluster.heartbeat_secs)
        world.run(world.now + 1.5 * cluster.lease_secs)
        if last in cluster.living:
            ends = history.wait_ends[before:]
            history.violations += [f"a wait was ended while its trainer lived: {e}" for e in ends]
        if last not in cluster.living:
            pass  # killed beside the fault
        elif how == "killed":
            cluster.kill(last)
        else:
            last.deliver(leave.set_result, ValueError("simulated") if how == "failed" else None)
        if not world.run(
            world.now + self.most_secs, lambda: all(task.done() for task in waits.values())
        ):
            self._report_stuck(
                {process: task for process, task in waits.items() if not task.done()}
            )
        expected = "finished" if how == "finished" else "failed"
        history.violations += [
            f"the last trainer has {how}: {end}"
            for end in history.wait_ends[before:]
            if end.kind != expected
        ]

    async def _publish_last(
        self, process: Process, store: SharedStepStore, leave: asyncio.Future[BaseException | None]
    ) -> None:
        publisher = store.publisher("last")
        await store.flush()
        self.cluster.history.publishers.append(Tenure("last", process, self.world.now))
        publisher.close(await leave)
        self.cluster.history.publishers[-1].ended = self.world.now

    def _do(
        self,
        what: str,
        programs: dict[Process, Coroutine[Any, Any, None]],
        done: Callable[[], bool] | None = None,
    ) -> None:
        tasks = {process: process.start(program) for process, program in programs.items()}
        if not self.world.run(
            self.world.now + self.most_secs,
            done or (lambda: all(task.done() for task in tasks.values())),
        ):
            self._report_stuck(
                {process: task for process, task in tasks.items() if not task.done()}, what
            )
        for process, task in tasks.items():
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.cluster.history.violations.append(f"{process}, {what}: {_text_of(task)}")

    def _report_stuck(self, tasks: dict[Process, asyncio.Task[None]], what: str = "ending") -> None:
        self.cluster.history.violations += [
            f"stuck in {what}: {process}" for process, task in tasks.items() if not task.done()
        ]


def _text_of(task: asyncio.Task[None]) -> str:
    return "".join(traceback.format_exception(task.exception()))
