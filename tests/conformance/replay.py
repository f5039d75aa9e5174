"""Replay one recorded scenario on the library, and compare."""

from __future__ import annotations

import asyncio
import difflib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohooks as ah
from tests.conformance.records import (
    Actions,
    Call,
    Mode,
    Record,
    actions,
    comparable,
    expected_trace,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

TICK_LIMIT = 5_000
"""Ticks of the loop that one scenario may take; the longest takes a few hundred. Nothing is bound
by time.
"""

POLICY = ah.RecoveryPolicy(
    max_attempts=100,
    backoff=ah.Backoff(initial_secs=0, max_secs=0, jitter=False),
)

ERRORS: dict[str, type[Exception]] = {
    "OutOfRangeError": ah.OutOfRangeError,
    "AbortedError": ah.AbortedError,
    "UnavailableError": ah.UnavailableError,
    "ValueError": ValueError,
    "StopIteration": StopIteration,
}


@dataclass
class Outcome:
    """The outcome of one replay; `faults` are broken promises that hold for every scenario."""

    trace: list[Call] = field(default_factory=list)
    runs: list[Any] = field(default_factory=list)
    raised: str | None = None
    raised_by: str | None = None
    faults: list[str] = field(default_factory=list)


class Replay:
    """What the hooks, the sessions and the body of one replay share."""

    def __init__(self, record: Record, mode: Mode) -> None:
        """Prepare the graph and hooks."""
        self.scenario = record["scenario"]
        self.mode = mode
        self.actions: Actions = actions(record, mode)
        self.suspending = mode in (Mode.SUSPENDING, Mode.FREE)
        self.outcome = Outcome()
        self.raised: list[BaseException] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.closed_sessions: Counter[int] = Counter()
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.run_errors: dict[int, str] = {}
        for n, error in self.scenario["run"]:
            self.run_errors.setdefault(n, error)
        self.graph = make_graph()
        self.steps = ah.MemoryStepStore()
        self.variables = ah.Variables()
        self.hooks = [
            ScriptedHook(self, plan["name"], plan["fetch"], plan["feed"])
            for plan in self.scenario["hooks"]
        ]

    def count(self, who: str, phase: str) -> int:
        """Return the number of this call: the round when suspending, else the caller's own
        count.
        """
        self.calls[who, phase] += 1
        if self.mode is Mode.SUSPENDING and who not in ("session", "body"):
            return self.calls[self.hooks[0].name, phase]
        return self.calls[who, phase]

    def error(self, name: str) -> BaseException:
        """Make an error, and keep it, so that the caller's error can be compared by identity."""
        error = ERRORS[name](f"scripted {name} {len(self.raised) + 1}")
        self.raised.append(error)
        return error

    async def pause(self) -> None:
        """Suspend for one tick if the mode says so."""
        if self.suspending:
            await asyncio.sleep(0)

    def session(self) -> ah.AsyncMonitoredSession | ah.session.AsyncSingularMonitoredSession:
        """Make the monitored session under test."""
        creator = ScriptedCreator(self)
        if self.scenario["session"] == "singular":
            return ah.session.AsyncSingularMonitoredSession(creator, self.hooks)
        return ah.AsyncMonitoredSession(creator, self.hooks, recovery=POLICY)

    async def run_scenario(self) -> None:
        """Run the scenario's program, and fill the outcome."""
        body = self.scenario["body"]
        outcome = self.outcome
        before = asyncio.all_tasks()
        entered = False
        try:
            async with self.session() as session:
                entered = True
                for i in range(body["steps"]):
                    if session.should_stop():
                        break
                    feed = {"x": i + 1, "w": 3} if body["feed_w"] else {"x": i + 1}
                    outcome.runs.append(await session.run(body["fetch"], feed_dict=feed))
                outcome.trace.append(["body", "done", 1])
                if body["raise"] is not None:
                    raise self.error(body["raise"])
        except BaseException as error:  # what reached the caller is the result, whatever it is
            outcome.raised = (
                "RuntimeError"
                if isinstance(error, ah.errors.FeedConflictError)
                else type(error).__name__
            )
            outcome.raised_by = "with" if entered else "enter"
            self.check_identity(error)
        if left := asyncio.all_tasks() - before:
            outcome.faults.append(f"left running: {', '.join(sorted(map(repr, left)))}")

    def check_identity(self, error: BaseException) -> None:
        """Check that one error reaches the caller as the same object, several as one flat group of
        them.
        """
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        if isinstance(error, BaseExceptionGroup) and len(parts) < 2:
            self.outcome.faults.append(f"a group of one: {error!r}")
        for part in parts:
            if not isinstance(part, ah.errors.FeedConflictError) and not any(
                part is known for known in self.raised
            ):
                self.outcome.faults.append(f"the caller got an error that was not raised: {part!r}")

    def check_ends(self) -> None:
        """Check that every session and begun hook was closed once, in reverse order, and `end` came
        at most once.
        """
        faults = self.outcome.faults
        for n in range(1, self.calls["session", "create"] + 1):
            if self.closed_sessions[n] != 1:
                faults.append(f"session {n} was closed {self.closed_sessions[n]} times")
        if self.closed != self.begun[::-1]:
            faults.append(f"begun {self.begun}, but closed {self.closed}")
        faults.extend(
            f"end of {hook.name} twice" for hook in self.hooks if self.calls[hook.name, "end"] > 1
        )
        if self.outcome.raised is not None and any(
            self.calls[hook.name, "end"] for hook in self.hooks
        ):
            faults.append(f"end was called although {self.outcome.raised} was raised")


class ScriptedHook(ah.SessionRunHook):
    """Records its calls and performs the scenario's actions."""

    def __init__(self, replay: Replay, name: str, fetch: Any, feed: dict[str, Any] | None) -> None:
        """Plays the part `name`."""
        self.replay = replay
        self.name = name
        self.fetch = fetch
        self.feed = feed
        self.coord: ah.Coordinator | None = None

    async def perform(
        self, phase: str, context: ah.SessionRunContext | None = None, results: Any = None
    ) -> None:
        """Records the call, suspends where the mode wants it, then acts; no coroutine can raise
        `StopIteration` itself.
        """
        replay = self.replay
        n = replay.count(self.name, phase)
        replay.outcome.trace.append(
            [self.name, phase, n] if results is None else [self.name, phase, n, results]
        )
        await replay.pause()
        for action in replay.actions.get((self.name, phase, n), ()):
            if action == "request_stop":
                assert context is not None
                context.request_stop()
            elif action == "coord_stop":
                assert self.coord is not None
                self.coord.request_stop()
            elif action == "StopIteration":
                error = StopAsyncIteration("scripted")
                replay.raised.append(error)
                raise error
            else:
                raise replay.error(action)

    async def begin(self) -> None:
        self.replay.begun.append(self.name)
        await self.perform("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.coord = coord
        await self.perform("after_create_session")

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        await self.perform("before_run", run_context)
        if self.fetch is None and self.feed is None:
            return None
        return ah.SessionRunArgs(self.fetch, self.feed)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await self.perform("after_run", run_context, run_values.results)

    async def end(self, session: ah.Session) -> None:
        await self.perform("end")

    async def close(self, exc: BaseException | None) -> None:
        """Count the call; it is not part of the trace."""
        self.replay.closed.append(self.name)
        await self.replay.pause()


class ScriptedCreator:
    """Makes recording sessions, all on one step store and one set of variables."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.graph = replay.graph

    async def create_session(self) -> ah.Session:
        replay = self.replay
        n = replay.count("session", "create")
        replay.outcome.trace.append(["session", "create", n])
        await replay.pause()
        options: dict[str, Any] = {"global_step": replay.steps, "variables": replay.variables}
        return ScriptedSession(replay, n, options)


class ScriptedSession(ah.Session):
    """A raw session that records its runs and counts its end."""

    def __init__(self, replay: Replay, n: int, options: dict[str, Any]) -> None:
        super().__init__(replay.graph, **options)
        self.replay = replay
        self.n = n

    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """Record the run; then raise what the scenario says of this one, counted over all sessions,
        or run.
        """
        replay = self.replay
        n = replay.count("session", "run")
        replay.outcome.trace.append(["session", "run", n])
        await replay.pause()
        if n in replay.run_errors:
            raise replay.error(replay.run_errors[n])
        return await super().run(*args, **kwargs)

    async def aclose(self) -> None:
        """Count the end; it is not part of the trace."""
        self.replay.closed_sessions[self.n] += 1
        await self.replay.pause()
        await super().aclose()


def make_graph() -> ah.Graph:
    """Make the graph of every scenario."""
    graph = ah.Graph()
    graph.placeholder("x", default=0)
    graph.placeholder("w", default=1)
    graph.placeholder("v", default=0)

    @graph.operation
    def y(x: float, w: float, v: float) -> float:
        return 2 * x * w + v

    @graph.operation
    def z(x: float) -> float:
        return x + 1

    return graph


async def within_ticks(coro: Coroutine[Any, Any, None]) -> str | None:
    """Runs the coroutine as a task; if it is not over after `TICK_LIMIT` ticks, says what hangs and
    cancels it.
    """
    loop = asyncio.get_running_loop()
    before = asyncio.all_tasks()
    task = loop.create_task(coro)
    over = loop.create_future()
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if task.done() or ticks > TICK_LIMIT:
            over.set_result(None)
        else:
            loop.call_soon(tick)

    tick()
    await over
    if task.done():
        task.result()
        return None
    left = asyncio.all_tasks() - before
    names = ", ".join(sorted(map(repr, left)))
    for task in left:
        task.cancel()
    for _ in range(100):
        if all(task.done() for task in left):
            break
        await asyncio.sleep(0)
    for task in left:
        if task.done() and not task.cancelled():
            task.exception()
    return f"hangs after {TICK_LIMIT} ticks: {names}"


async def replay_record(record: Record, mode: Mode) -> Outcome:
    """Replay one scenario in the running loop."""
    replay = Replay(record, mode)
    hanging = await within_ticks(replay.run_scenario())
    if hanging is None:
        replay.check_ends()
    else:
        replay.outcome.faults.append(hanging)
    return replay.outcome


def differences(record: Record, mode: Mode, outcome: Outcome) -> list[str]:
    """Describe where the outcome differs from the recorded one; empty if it agrees."""
    found = list(outcome.faults)
    if mode is Mode.FREE:
        return found
    expected = record["expected"]
    if (outcome.raised, outcome.raised_by) != (expected["raised"], expected["raised_by"]):
        found.append(
            f"raised: expected {expected['raised']} by {expected['raised_by']}, got"
            f" {outcome.raised} by {outcome.raised_by}"
        )
    if outcome.runs != expected["runs"]:
        found.append(f"runs: expected {expected['runs']}, got {outcome.runs}")
    wanted = expected_trace(record, mode)
    got = comparable(record, mode, outcome.trace)
    if got != wanted:
        found.append(f"trace:\n{trace_diff(wanted, got)}")
    return found


def trace_diff(wanted: list[Call], got: list[Call]) -> str:
    """Return a unified diff of two traces, a call a line."""

    def lines(trace: list[Call]) -> list[str]:
        return [" ".join(str(part) for part in call) for call in trace]

    return "\n".join(
        list(difflib.unified_diff(lines(wanted), lines(got), "expected", "got", lineterm="", n=3))
    )
