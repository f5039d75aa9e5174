"""What a scenario is played on: a graph, hooks and a session creator whose every wait is watched, and what must hold.

The checks are those of `reference/reliability.md`, by their names there: the bracket of `begin` and `close` (I1), the order of
phases (I2), siblings of a failed hook (I5), nobody vanishes (I12), no leaks (I9), one commit for variables and step.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.fuzz.driver import HANG_SECS, SPARED, USER, Probe

if TYPE_CHECKING:
    import random

Act = Callable[[int], Awaitable[Any]]
"""What a hook or an operation does besides pausing; gets how many times it was called, this call included."""

QUICK = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
"""Recovers without pauses."""

_PAUSES = (0, 1, 1, 2)
# A cancel of a coroutine's own task must come out of the run that it was part of.
_REPORTED = frozenset({"after_create_session", "before_run", "after_run", "left", "right", "train", "save", "evaluate"})


@dataclass(frozen=True)
class StageScenario:
    """A play, and how it ends when nobody cancels it."""

    name: str
    play: Callable[[Any], Awaitable[None]]
    """Gets the stage, of the kind that `stage` says."""
    hooks: int = 3
    expect: type[BaseException] | tuple[type[BaseException], ...] | None = None
    creator: bool = False
    """Whether sessions come from a creator of the stage, which suspends and keeps the books; else from the library's."""
    vanishing: bool = False
    """Whether what a cancelled child brings may get lost: its hook is only logged, or its run fails for another reason anyway."""
    parallel: bool = False
    """Whether several tasks run steps."""
    manual: bool = False
    """Whether time is moved by hand, by `stage.clock`."""
    stage: type[Stage] | None = None
    """The kind of stage, if it is more than `Stage`."""
    hang_secs: float = HANG_SECS
    """After how long it counts as hanging; threads may have to wait for a busy machine."""

    def __call__(self, probe: Probe, rng: random.Random) -> Stage:
        return (self.stage or Stage)(self, probe, rng.getrandbits(32))


@dataclass
class Stage:
    """One performance."""

    scenario: StageScenario
    probe: Probe
    seed: int
    store: ah.MemoryStepStore = field(default_factory=ah.MemoryStepStore)
    variables: ah.Variables = field(default_factory=ah.Variables)
    acts: dict[str, Act] = field(default_factory=dict)
    """By label: "h1.before_run", "train", "create"."""
    problems: list[str] = field(default_factory=list)
    sessions: list[ah.Session] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    unclean: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.graph = _graph_that_is_free()
        self.hooks: list[ah.SessionRunHook | ah.dispatch.HookRegistration] = [
            StageHook(self, f"h{number}") for number in range(self.scenario.hooks)
        ]

    # -- what a play uses

    async def operation(self) -> None:
        _on_stage.set(self)
        self.clock = ManualClock()
        try:
            with self.clock if self.scenario.manual else contextlib.nullcontext():
                self.store = ah.MemoryStepStore()  # it keeps the clock of the moment it is made
                await self.scenario.play(self)
        finally:
            self.left = True

    def session(self, **options: Any) -> ah.AsyncMonitoredSession:
        """A monitored session on this stage."""
        options.setdefault("recovery", QUICK)
        options.setdefault("hooks", self.hooks)
        if self.scenario.creator:
            return ah.AsyncMonitoredSession(StageCreator(self), **options)
        return ah.AsyncMonitoredSession(self.graph, global_step=self.store, variables=self.variables, **options)

    @contextlib.asynccontextmanager
    async def open(self, made: ah.AsyncMonitoredSession | None = None, **options: Any) -> AsyncIterator[ah.AsyncMonitoredSession]:
        """`async with session`, and notes how the block was left."""
        async with made or self.session(**options) as session:
            try:
                yield session
            except BaseException as error:
                self.unclean = not _is_clean(error)
                raise

    async def run(self, session: ah.AsyncMonitoredSession, fetches: Any = "train", **options: Any) -> Any:
        """One run; when it is over, nothing of it goes on."""
        try:
            result = await session.run(fetches, **options)
        finally:
            if not self.scenario.parallel and (busy := [label for label in self.inside if self._in_run(label)]):
                self.problem(f"I5: {', '.join(busy)} went on after its run had ended")
        self.runs += fetches == "train"
        return result

    async def pause(self, label: str, times: int | None = None) -> None:
        """Suspends as often as the seed says for this label, now on a bare yield, now on a future."""
        token = zlib.crc32(f"{self.seed}{label}".encode())
        for turn in range(_PAUSES[token % 4] if times is None else times):
            if (token >> 4) + turn & 1:
                await asyncio.sleep(0)
            else:
                await soon()

    async def perform(self, label: str, *args: Any) -> Any:
        """What every watched coroutine does: pause, act, pause."""
        if self.left:
            self.problem(f"I9: {label} began after the operation had ended")
        self.called[label] += 1
        self.inside[label] += 1
        try:
            return await self.probe.watched(label, self._perform(label, self.called[label]))
        finally:
            self.inside[label] -= 1
            if not self.inside[label]:
                del self.inside[label]
            if self.left:
                self.problem(f"I9: {label} ended after the operation")

    async def _perform(self, label: str, call: int) -> Any:
        await self.pause(label)
        act = self.acts.get(label)
        if act is None:
            return None
        result = await act(call)
        await self.pause(f"{label} again")
        return result

    async def together(self, **fns: Callable[[], Awaitable[Any]]) -> None:
        """Runs tasks of the user's own, as a careful user would: none is left, a cancel is passed on, the first error raised.

        Those whose name begins with "helper" are never cancelled by themselves: the others wait for them.
        """
        loop = asyncio.get_running_loop()
        labels = {(SPARED if name.startswith("helper") else " ") + name: fn for name, fn in fns.items()}
        tasks = [loop.create_task(self._runner(label, fn), name=USER + label) for label, fn in labels.items()]
        cancel: asyncio.CancelledError | None = None
        while not all(task.done() for task in tasks):
            try:
                # An anyio scope repeats its cancel at every tick, for as long as a thread takes.
                with anyio.CancelScope(shield=cancel is not None):
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as again:
                cancel = cancel or again
            if cancel or any(task.done() and not task.cancelled() and task.exception() for task in tasks):
                for task in tasks:
                    task.cancel()
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        if cancel:
            raise cancel
        if errors:
            raise errors[0]

    async def _runner(self, label: str, fn: Callable[[], Awaitable[Any]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self.probe.watch(label, fn)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self.probe.direct.get(task):
                self.problem(f"I7: a runner was cancelled and ended with {error!r}")
            raise
        if self.probe.direct.get(task):
            self.problem("I7: a runner was cancelled and ended normally")

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    # -- what must hold

    @property
    def step(self) -> int:
        """The global step as it stands."""
        return self.store.latest.step

    def look(self) -> None:
        """Called at every suspension."""
        weight, step = self.variables.snapshot().get("w", 0), self.store.latest.step
        if weight != step:
            self.problem(f"all or nothing: the variable is {weight} at step {step}")

    def note_start(self, hook: str, phase: str) -> None:
        """Called at the beginning of each hook's method."""
        if phase == "begin":
            self.begun.append(hook)
        elif phase == "close":
            self.closed.append(hook)
            if self.inside and not self.scenario.parallel:
                self.problem(f"I1: {hook}.close while {', '.join(self.inside)} still runs")
        elif phase == "end" and self.unclean:
            self.problem(f"{hook}.end although the block ended with an error")
        elif phase == "after_run" and any(label.endswith("before_run") for label in self.inside):
            self.problem(f"I2: {hook}.after_run while {', '.join(self.inside)} still runs")
        elif phase == "before_run" and any(label.endswith("after_run") for label in self.inside):
            self.problem(f"I2: {hook}.before_run while {', '.join(self.inside)} still runs")

    def status(self) -> list[str]:
        self.look()
        found = list(self.problems)
        if self.closed != self.begun[::-1]:
            found.append(f"I1: begun {self.begun}, closed {self.closed}")
        found += [f"I1: {label} was called {count} times" for label, count in self.called.items() if count > 1 and _once(label)]
        if self.inside:
            found.append(f"I9: still inside {', '.join(self.inside)}")
        found += [f"I1: session {number} was not closed" for number, one in enumerate(self.sessions) if not one.closed]
        statistics = self.store.statistics()
        if statistics.waiting or statistics.watching or statistics.publishers:
            found.append(f"I9: the store still has {statistics}")
        if self.graph.finalized:
            found.append("the graph is still finalized")
        if self.runs > self.step:
            found.append(f"{self.runs} runs returned, and the step is {self.step}")
        outcome = self.probe.outcome
        if not self.probe.shots and not _as_expected(outcome, self.scenario.expect):
            found.append(f"without a cancel it ended with {outcome!r}")
        lost = [label for label in self.probe.children if label.rpartition(".")[2] in _REPORTED]
        if lost and outcome is None and not self.scenario.vanishing:
            found.append(f"I12: {', '.join(lost)} was cancelled by others, and nobody was told")
        return found

    def _in_run(self, label: str) -> bool:
        return label.rpartition(".")[2] in _REPORTED


_on_stage: contextvars.ContextVar[Stage] = contextvars.ContextVar("on_stage")
_usual_graph: ah.Graph | None = None


def graph_of_a_step() -> ah.Graph:
    """Two operations side by side and one that trains; `push` is for those who only want to get on."""
    graph = ah.Graph()
    graph.placeholder("x", default=1)
    graph.variable("w", 0)

    @graph.operation
    async def left(x: int) -> int:
        await _on_stage.get().perform("left")
        return x

    @graph.operation
    async def right(x: int) -> int:
        await _on_stage.get().perform("right")
        return x

    @graph.train_op(adds_to="w")
    async def push(x: int) -> int:
        return x

    @graph.train_op(adds_to="w")
    async def train(left: int, right: int) -> int:
        await _on_stage.get().perform("train")
        return 1

    return graph


def _graph_that_is_free() -> ah.Graph:
    """Usually the same one again, since making it takes a tenth of a point's time."""
    global _usual_graph
    if _usual_graph is None or _usual_graph.finalized:
        _usual_graph = graph_of_a_step()
    return _usual_graph


class StageHook(ah.SessionRunHook):
    """A hook that overrides everything and does what the stage says."""

    def __init__(self, stage: Stage, name: str, fetches: Any = "left") -> None:
        self.stage = stage
        self.name = name
        self.fetches = fetches

    async def _call(self, phase: str) -> Any:
        self.stage.note_start(self.name, phase)
        return await self.stage.perform(f"{self.name}.{phase}")

    async def begin(self) -> None:
        await self._call("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        if session not in self.stage.sessions:
            self.stage.sessions.append(session)
        await self._call("after_create_session")

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        await self._call("before_run")
        return None if self.fetches is None else ah.SessionRunArgs(self.fetches)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self._call("after_run")

    async def end(self, session: ah.Session) -> None:
        await self._call("end")

    async def close(self, exc: BaseException | None) -> None:
        await self._call("close")


class StageCreator:
    """A session creator that suspends on the way, and remembers its sessions."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.graph = stage.graph

    async def create_session(self) -> ah.Session:
        await self.stage.perform("create")
        session = ah.Session(self.graph, global_step=self.stage.store, variables=self.stage.variables)
        self.stage.sessions.append(session)
        return session


async def soon() -> None:
    """Suspends on a future that is there in the next tick."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_set, future)
    await future


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _once(label: str) -> bool:
    return label.endswith((".begin", ".end", ".close"))


def _is_clean(error: BaseException) -> bool:
    return isinstance(error, (ah.OutOfRangeError, ah.StopRequestedError, StopAsyncIteration, StopIteration))


def _as_expected(outcome: BaseException | None, expected: type[BaseException] | tuple[type[BaseException], ...] | None) -> bool:
    if expected is None:
        return outcome is None
    return type(outcome) in (expected if isinstance(expected, tuple) else (expected,))
