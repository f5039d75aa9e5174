"""What a scenario runs with: a graph, hooks and a session creator whose every wait is watched, and
the checks.

The checks: `close` follows every `begin`, in reverse; phases do not overlap; the siblings of a
failed hook have ended; a cancelled child is reported; variables and step are committed together;
nothing leaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohooks as ah
from aiohooks.testing._schedule_run import ScheduleLoop
from tests.fuzz.explored.harness import NOT_CANCELLED, USER, Probe, current
from tests.support.hooks import EveryPhaseHook
from tests.support.sessions import NO_BACKOFF

Action = Callable[[int], Awaitable[Any]]
"""What a hook or an operation does besides pausing. Gets the number of calls so far, this one
included.
"""

Body = Callable[[Any], Awaitable[None]]
"""The coroutine function of a scenario. Gets its fixture."""

EVERY_STEP = ah.Every(steps=1)
_PAUSES = (0, 1, 1, 2)
# A cancel of a coroutine's own task must come out of the run that it was part of.
_REPORTED = frozenset(
    {
        "call",
        "after_create_session",
        "before_run",
        "after_run",
        "left",
        "right",
        "train",
        "save",
        "evaluate",
    }
)


@dataclass(frozen=True)
class SessionScenario:
    """A scenario with a session, and how it ends without a cancel."""

    name: str
    body: Body
    hooks: int = 3
    expect: type[BaseException] | tuple[type[BaseException], ...] | None = None
    creator: bool = False
    """Whether the fixture's own creator makes the sessions: it suspends, and records them.
    Otherwise the library's does.
    """
    vanishing: bool = False
    """Whether a child's cancel may go unreported: its hook is only logged, or its run fails for
    another reason anyway.
    """
    parallel: bool = False
    """Whether several tasks run steps."""
    fixture: type[Fixture] | None = None
    """A subclass of `Fixture`, if the scenario needs one."""

    def __call__(self, probe: Probe, seed: int) -> Fixture:
        return (self.fixture or Fixture)(self, probe, seed)


SCENARIOS: list[SessionScenario] = []


class Broken(Exception):
    """The failure that a scenario injects."""


class Worse(Exception):
    """A second one, told apart from the first."""


def scenario(name: str, **options: Any) -> Callable[[Body], Body]:
    """Add the function to the list of scenarios."""

    def add(body: Body) -> Body:
        SCENARIOS.append(SessionScenario(name, body, **options))
        return body

    return add


@dataclass
class Fixture:
    """What one run of a scenario uses, and what it has recorded."""

    scenario: SessionScenario
    probe: Probe
    seed: int
    store: ah.MemoryStepStore = field(default_factory=ah.MemoryStepStore)
    variables: ah.Variables = field(default_factory=ah.Variables)
    actions: dict[str, Action] = field(default_factory=dict)
    """By label: "h1.before_run", "train", "create"."""
    found_violations: list[str] = field(default_factory=list)
    sessions: list[ah.Session] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """Those of the scenario itself, which end with the operation."""
    runs: int = 0
    pause_secs: float = 0
    """How long some of the pauses are."""
    unclean: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.graph = _unused_graph()
        self.hooks: list[ah.SessionRunHook | ah.dispatch.HookRegistration] = [
            ScriptedHook(self, f"h{number}") for number in range(self.scenario.hooks)
        ]

    # -- for the scenario

    async def operation(self) -> None:
        _current_fixture.set(self)
        self.store = ah.MemoryStepStore()  # it keeps the clock that is current when it is made
        try:
            await self.scenario.body(self)
        finally:
            self.left = True
            for timer in self.timers:
                timer.cancel()
            if timers := timers_left():
                self.add_violation(f"leak: {timers} timers are left")

    def session(self, **options: Any) -> ah.AsyncMonitoredSession:
        """Make a monitored session with the hooks, store and variables of this fixture."""
        options.setdefault("recovery", NO_BACKOFF)
        options.setdefault("hooks", self.hooks)
        if self.scenario.creator:
            return ah.AsyncMonitoredSession(ScriptedSessionCreator(self), **options)
        return ah.AsyncMonitoredSession(
            self.graph, global_step=self.store, variables=self.variables, **options
        )

    @contextlib.asynccontextmanager
    async def open(
        self, made: ah.AsyncMonitoredSession | None = None, **options: Any
    ) -> AsyncIterator[ah.AsyncMonitoredSession]:
        """Enter the session, and record whether the block ended with an error."""
        async with made or self.session(**options) as session:
            try:
                yield session
            except BaseException as error:
                self.unclean = not _is_clean(error)
                raise

    async def run(
        self, session: ah.AsyncMonitoredSession, fetches: Any = "train", **options: Any
    ) -> Any:
        """Run once, and check that nothing of the run is active afterwards."""
        try:
            result = await session.run(fetches, **options)
        finally:
            if not self.scenario.parallel and (
                busy := [label for label in self.inside if _is_of_a_run(label)]
            ):
                self.add_violation(
                    f"siblings: {', '.join(busy)} still active after the run had ended"
                )
        self.runs += fetches == "train"
        return result

    async def train(
        self, made: ah.AsyncMonitoredSession | None = None, *, runs: int = 2, **options: Any
    ) -> None:
        """Open a session, and run it so many times."""
        async with self.open(made, **options) as session:
            for _ in range(runs):
                await self.run(session)

    async def pause(self, label: str, times: int | None = None) -> None:
        """Suspend as often as the seed says for this label, on a bare yield or on a future."""
        token = zlib.crc32(f"{self.seed}{label}".encode())
        for turn in range(_PAUSES[token % 4] if times is None else times):
            if (token >> 4) + turn & 1:
                await asyncio.sleep(self.pause_secs)
            else:
                await soon()

    async def perform(self, label: str, *args: Any) -> Any:
        """Pause, perform the label's action, pause: what every watched coroutine does."""
        if self.left:
            self.add_violation(f"leak: {label} began after the operation had ended")
        self.called[label] += 1
        self.inside[label] += 1
        token = _current_call.set(label)
        try:
            return await self.probe.watch(label, self.perform_action, label, self.called[label])
        finally:
            if (known := _current_call.get()) != label:
                self.add_violation(f"context: {label} has that of {known}")
            else:
                _current_call.reset(token)
            self.inside[label] -= 1
            if not self.inside[label]:
                del self.inside[label]
            if self.left:
                self.add_violation(f"leak: {label} ended after the operation")

    async def perform_action(self, label: str, call: int) -> Any:
        await self.pause(label)
        action = self.actions.get(label)
        if action is None:
            return None
        result = await action(call)
        await self.pause(f"{label} again")
        return result

    async def run_together(self, **fns: Callable[[], Awaitable[Any]]) -> None:
        """Run tasks of the user's own, as a careful user would: none is left, a cancel is passed
        on, the first error raised.

        Those whose name begins with "helper" are never cancelled by themselves: the others wait for
        them.
        """
        loop = asyncio.get_running_loop()
        labels = {
            (NOT_CANCELLED if name.startswith("helper") else " ") + name: fn
            for name, fn in fns.items()
        }
        tasks = [
            loop.create_task(self._runner(label, fn), name=USER + label)
            for label, fn in labels.items()
        ]
        cancel: asyncio.CancelledError | None = None
        while not all(task.done() for task in tasks):
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as again:
                cancel = cancel or again
            if cancel or any(
                task.done() and not task.cancelled() and task.exception() for task in tasks
            ):
                for task in tasks:
                    task.cancel()
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        if cancel:
            raise cancel
        if errors:
            raise errors[0]

    async def _runner(self, label: str, fn: Callable[[], Awaitable[Any]]) -> None:
        task = current()
        try:
            await self.probe.watch(label, fn)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if task.direct:
                self.add_violation(f"cancellation: a runner was cancelled and ended with {error!r}")
            raise
        finally:
            if task.library:
                self.add_violation(
                    "caller's task: the library has cancelled a runner, or taken a cancel back"
                )
        if task.direct:
            self.add_violation("cancellation: a runner was cancelled and ended normally")

    def add_violation(self, text: str) -> None:
        if text not in self.found_violations:
            self.found_violations.append(text)

    # -- checks

    @property
    def step(self) -> int:
        """The current global step."""
        return self.store.latest.step

    def check(self) -> None:
        """Check what must hold at every suspension."""
        weight, step = self.variables.snapshot().get("w", 0), self.store.latest.step
        if weight != step:
            self.add_violation(f"all or nothing: the variable is {weight} at step {step}")

    def note_start(self, hook: str, phase: str) -> None:
        """Record and check the start of a hook's method."""
        if phase == "begin":
            self.begun.append(hook)
        elif phase == "close":
            self.closed.append(hook)
            if self.inside and not self.scenario.parallel:
                self.add_violation(
                    f"begin/close: {hook}.close while {', '.join(self.inside)} still runs"
                )
        elif phase == "end" and self.unclean:
            self.add_violation(f"{hook}.end although the block ended with an error")
        elif phase == "after_run" and any(label.endswith("before_run") for label in self.inside):
            self.add_violation(f"order: {hook}.after_run while {', '.join(self.inside)} still runs")
        elif phase == "before_run" and any(label.endswith("after_run") for label in self.inside):
            self.add_violation(
                f"order: {hook}.before_run while {', '.join(self.inside)} still runs"
            )

    def violations(self) -> list[str]:
        self.check()
        found = list(self.found_violations)
        # In 3.11 a call begins a turn after it was started; a hook counts as begun from then, and a
        # cancel may come between.
        late = (
            self.closed[: -len(self.begun) or None]
            if sys.version_info < (3, 12) and self.probe.delivered
            else []
        )
        if self.closed != [*late[:1], *self.begun[::-1]]:
            found.append(f"begin/close: begun {self.begun}, closed {self.closed}")
        found += [
            f"begin/close: {label} was called {count} times"
            for label, count in self.called.items()
            if count > 1 and label.endswith((".begin", ".end", ".close"))
        ]
        if self.inside:
            found.append(f"leak: still inside {', '.join(self.inside)}")
        found += [
            f"begin/close: session {number} was not closed"
            for number, one in enumerate(self.sessions)
            if not one.closed
        ]
        statistics = self.store.statistics()
        if statistics.waiting or statistics.watching or statistics.publishers:
            found.append(f"leak: the store still has {statistics}")
        if self.graph.finalized:
            found.append("the graph is still finalized")
        if self.runs > self.step:
            found.append(f"{self.runs} runs returned, and the step is {self.step}")
        outcome = self.probe.outcome
        if not self.probe.delivered and not _as_expected(outcome, self.scenario.expect):
            found.append(f"without a cancel it ended with {outcome!r}")
        lost = [label for label in self.probe.children if _is_of_a_run(label)]
        if (
            lost
            and outcome is None
            and USER not in self.probe.children
            and not self.scenario.vanishing
        ):
            found.append(
                f"lost cancellation: {', '.join(lost)} was cancelled by others, and this was not"
                " reported"
            )
        return found


_current_fixture: contextvars.ContextVar[Fixture] = contextvars.ContextVar("current_fixture")
_current_call: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "current_call", default=None
)
_shared_graph: ah.Graph | None = None


def graph_of_a_step() -> ah.Graph:
    """Make a graph of two operations side by side and one that trains; `push` only advances."""
    graph = ah.Graph()
    graph.placeholder("x", default=1)
    graph.variable("w", 0)

    @graph.operation
    async def left(x: int) -> int:
        await _current_fixture.get().perform("left")
        return x

    @graph.operation
    async def right(x: int) -> int:
        await _current_fixture.get().perform("right")
        return x

    @graph.train_op(adds_to="w")
    async def push(x: int) -> int:
        return x

    @graph.train_op(adds_to="w")
    async def train(left: int, right: int) -> int:
        await _current_fixture.get().perform("train")
        return 1

    return graph


def _unused_graph() -> ah.Graph:
    """Reuse one graph if possible: making it takes a tenth of a point's time."""
    global _shared_graph
    if _shared_graph is None or _shared_graph.finalized:
        _shared_graph = graph_of_a_step()
    return _shared_graph


class ScriptedHook(EveryPhaseHook):
    """A hook that overrides everything and performs the fixture's actions."""

    def __init__(self, fixture: Fixture, name: str, fetches: Any = "left") -> None:
        self.fixture = fixture
        self.name = name
        self.fetches = fetches

    async def in_phase(self, phase: str, *args: Any) -> Any:
        if phase == "after_create_session" and args[0] not in self.fixture.sessions:
            self.fixture.sessions.append(args[0])
        self.fixture.note_start(self.name, phase)
        await self.fixture.perform(f"{self.name}.{phase}")
        return (
            ah.SessionRunArgs(self.fetches)
            if phase == "before_run" and self.fetches is not None
            else None
        )


class ScriptedSessionCreator:
    """A session creator that suspends on the way, and records its sessions."""

    def __init__(self, fixture: Fixture) -> None:
        self.fixture = fixture
        self.graph = fixture.graph

    async def create_session(self) -> ah.Session:
        await self.fixture.perform("create")
        session = ah.Session(
            self.graph, global_step=self.fixture.store, variables=self.fixture.variables
        )
        self.fixture.sessions.append(session)
        return session


async def soon() -> None:
    """Suspend on a future that is set in the next tick."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(lambda: future.done() or future.set_result(None))
    await future


def _is_of_a_run(label: str) -> bool:
    return label.rpartition(".")[2] in _REPORTED


def _is_clean(error: BaseException) -> bool:
    return isinstance(
        error, (ah.OutOfRangeError, ah.StopRequestedError, StopAsyncIteration, StopIteration)
    )


def _as_expected(
    outcome: BaseException | None,
    expected: type[BaseException] | tuple[type[BaseException], ...] | None,
) -> bool:
    if expected is None:
        return outcome is None
    return type(outcome) in (expected if isinstance(expected, tuple) else (expected,))


def fails(error: type[BaseException], *, at: int = 1, until: int | None = None) -> Action:
    """Make an action that raises at its `at`-th call, or at all calls from `at` to `until`."""

    async def action(call: int) -> None:
        if at <= call <= (at if until is None else until):
            raise error(f"call {call}")

    return action


async def two_steps(fixture: Fixture) -> None:
    """Run twice."""
    await fixture.train()


def two_steps_with(**actions: Action) -> Body:
    """Make the body of a scenario that runs twice with these actions; "h1_begin" is that of hook 1
    in `begin`.
    """

    async def body(fixture: Fixture) -> None:
        fixture.actions.update(
            {re.sub("^(h[0-9])_", r"\1.", label): action for label, action in actions.items()}
        )
        await two_steps(fixture)

    return body


def timers_left() -> int:
    """Return how many timers the loop has."""
    loop: Any = asyncio._get_running_loop()
    if not isinstance(loop, ScheduleLoop):  # the program was thrown away
        return 0
    return sum(not one.cancelled() for one in vars(loop)["_scheduled"])


async def advance_slowly(fixture: Fixture, steps: int) -> None:
    """Commit variables and step as another worker's session does."""
    session = ah.Session(fixture.graph, global_step=fixture.store, variables=fixture.variables)
    for _ in range(steps):
        await soon()
        await session.run("push")
    await session.aclose()


async def await_to_the_end(fn: Callable[[], Awaitable[Any]]) -> None:
    """Await `fn()` to its end even if the caller is cancelled, as a careful user's `finally`
    does.
    """
    task = asyncio.ensure_future(fn())
    cancel: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancel = error
    if cancel is not None:
        raise cancel
    task.result()
