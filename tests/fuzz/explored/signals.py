"""Programs with sessions that handle signals, each phase of which suspends: one signal or two at
any wait.

Checked are the stop with its reason, the calls of each hook, the last save, that the second signal
cancels and gets to the handler from before, and that this one is installed again. With which code a
process ends is checked by `tests.fuzz.signals`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.session.signals import Escalation, LoopSignals, StopOnSignal
from aiohooks.testing import choose, may_happen
from tests.fuzz._harness import Bug, Method, scratch
from tests.support.hooks import EveryPhaseHook
from tests.support.waiting import ticks

LAST_STEP = 4
OPEN = ("opening", "open", "closing")
SIGNALS = signal.SIGINT, signal.SIGTERM


class SuspendingHook(EveryPhaseHook):
    """Counts its calls, and suspends in each."""

    def __init__(self, fixture: Fixture, *, is_later: bool) -> None:
        self.calls: Counter[str] = Counter()
        self._fixture = fixture
        self._is_later = is_later
        self._suspensions = choose(1, 0, 2, 3, name="suspensions of a hook")

    async def in_phase(self, phase: str, *args: Any) -> None:
        if phase == "end" and self._fixture.cancelled and not self._is_later:
            if args[0] in self._fixture.late:
                self._fixture.problems.append("end was called after the second signal")
            self._fixture.late.append(
                args[0]
            )  # one call may have been started: before Python 3.12 it begins a turn later
        self.calls[phase] += 1
        await ticks(self._suspensions)


@dataclass(eq=False)
class Entry:
    """One session of a program, and how its block was left."""

    session: ah.AsyncMonitoredSession
    hooks: list[SuspendingHook]
    left: BaseException | str | None = None
    """The error that the block raised, or "cleanly", or "unopened" if a stop came before it was
    entered; None before.
    """
    is_later: bool = False
    """Whether it was entered after a signal and the end of all sessions that it has stopped: the
    next signal is its first.
    """

    def is_open(self) -> bool:
        return self.session.status().state in OPEN


Body = Callable[[ah.AsyncMonitoredSession], Awaitable[None]]


@dataclass
class Fixture:
    """What one run of a program runs with, and what is sent to it."""

    scratch: Path
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sent: list[signal.Signals] = field(default_factory=list)
    stopped: list[Entry] = field(default_factory=list)
    """Those that were open at the first signal, and not stopped otherwise."""
    drained: bool = False
    """Whether the first signal has only begun a drain."""
    cancelled: bool = False
    """Whether a signal that cancels has been delivered."""
    late: list[ah.Session] = field(default_factory=list)
    """The sessions of which a hook's `end` was called after that."""
    passed_on: list[int] = field(default_factory=list)
    """The signals that got to the handler from before."""

    async def run(
        self,
        source: Any,
        body: Body,
        *hooks: ah.SessionRunHook,
        count: int = 2,
        handle_signals: Any = True,
        **options: Any,
    ) -> Entry:
        """Run the body in a session with these hooks and some that suspend."""
        is_later = bool(self.sent) and not self._counts_signals()
        own = [SuspendingHook(self, is_later=is_later) for _ in range(count)]
        session = ah.AsyncMonitoredSession(
            source, [*own, *hooks], handle_signals=handle_signals, **options
        )
        entry = Entry(session, own, is_later=is_later)
        self.entries.append(entry)
        try:
            async with entry.session as session:
                await body(session)
            await asyncio.sleep(
                0
            )  # a signal that is handled as the last session ends cancels the running task
        except ah.StopRequestedError:
            entry.left = "unopened"  # it waited for another session
        except BaseException as error:
            entry.left = error
            raise
        else:
            entry.left = "cleanly"
        return entry

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether it could be."""
        is_unhandled = signal.getsignal(number) == self.handle
        if is_unhandled or len(self.sent) - self.drained > 1 or not self._counts_signals():
            return False
        if not self.sent:
            self.stopped = [
                one for one in self.entries if one.is_open() and one.session.stop_reason is None
            ]
        self.sent.append(number)
        if choose(False, True, name="by kill"):
            os.kill(os.getpid(), number)
        else:
            signal.raise_signal(number)
        if len(self.sent) == 1:
            self.drained = any(entry.session.drain_reason is not None for entry in self.stopped)
        if len(self.sent) - self.drained == 2:
            asyncio.get_running_loop().call_soon(
                self._note_cancel
            )  # right after the callback of the signal
        return True

    def _counts_signals(self) -> bool:
        """Return whether there is an open session that has counted all signals."""
        return any(entry.is_open() and not entry.is_later for entry in self.entries)

    def _note_cancel(self) -> None:
        self.cancelled = True

    def handle(self, number: int, frame: object) -> None:
        """Note a signal: the handler from before."""
        self.passed_on.append(number)

    # -- the checks

    def check(self, outcome: BaseException | None) -> list[str]:
        found, is_cancelled = [*self.problems], len(self.sent) - self.drained > 1
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        found += [
            f"the handler of {number.name} is {one!r}"
            for number, one in handlers.items()
            if one != self.handle
        ]
        if isinstance(outcome, asyncio.CancelledError) != is_cancelled or not (
            is_cancelled or outcome is None
        ):
            found.append(f"ended with {outcome!r}")
        if self.passed_on != (self.sent[-1:] if is_cancelled else []):
            found.append(f"of {self.sent} the handler from before got {self.passed_on}")
        for place, entry in enumerate(self.entries):
            found += [f"session {place} {one}" for one in self._check_entry(entry, is_cancelled)]
        return found

    def _check_entry(self, entry: Entry, is_cancelled: bool) -> Iterator[str]:
        session = entry.session
        for calls in [hook.calls for hook in entry.hooks]:
            begun, ended, closed = calls["begin"], calls["end"], calls["close"]
            is_complete = begun == closed == 1 and (
                ended <= 1 if is_cancelled else ended == (entry.left == "cleanly")
            )
            if not is_complete and not (
                is_cancelled and ended == 0 and (begun, closed) in ((0, 0), (0, 1))
            ):
                yield f"has a hook with {dict(calls)}"
        if not is_cancelled and entry.left not in ("cleanly", "unopened"):
            yield f"was left with {entry.left!r}"
        if session.status().state not in ("closed", "new"):
            yield f"is {session.status().state}"
        reasons = [(f"{one.name} received", one) for one in self.sent[: 1 + self.drained]]
        if entry in self.stopped and (session.stop_reason, session.stop_signal) not in reasons:
            yield f"stopped because: {session.stop_reason}, by {session.stop_signal!r}"


async def run(program: Callable[[Fixture], Awaitable[None]]) -> None:
    """Run a program that gets signals, and check all laws."""
    outcome: BaseException | None = None
    with ExitStack() as stack:
        fixture = Fixture(stack.enter_context(scratch()))
        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, fixture.handle))
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        for number in SIGNALS:
            stack.enter_context(may_happen(partial(fixture.send, number), number.name))
        try:
            await program(fixture)
        except GeneratorExit:  # it was thrown away
            raise
        except BaseException as error:
            outcome = error
        found = fixture.check(outcome)
        if (left := signal.set_wakeup_fd(wakeup)) != wakeup:
            found.append(f"the wakeup fd is {left}")
    outcome = None  # its traceback holds the frames that hold it
    for entry in fixture.entries:
        entry.left = None
    assert not found, "; ".join(found)


# -- the programs


def graph_of(step: Callable[..., Any] | None = None) -> ah.Graph:
    """Return a graph with a variable that counts the steps."""
    graph = ah.Graph()
    graph.variable("total", 0)

    @graph.train_op(adds_to="total")
    async def train() -> int:
        await ticks(2)
        if step is not None:
            await step()
        return 1

    return graph


async def until_stopped(session: ah.AsyncMonitoredSession) -> None:
    """Run steps until the stop."""
    async for _ in session.steps("train"):
        await ticks(1)


async def plain(fixture: Fixture) -> None:
    """Three hooks, four steps."""
    await fixture.run(graph_of(), until_stopped, ah.StopAtStepHook(last_step=LAST_STEP), count=3)


async def saving(fixture: Fixture) -> None:
    """Checkpoints at the start, at every second step and at the end."""
    hook = ah.CheckpointSaverHook(
        every=ah.Every(steps=2), background=choose(True, False, name="background")
    )
    creator = ah.ChiefSessionCreator(graph_of(), checkpoint_dir=fixture.scratch)
    entry = await fixture.run(creator, until_stopped, hook, ah.StopAtStepHook(last_step=LAST_STEP))
    if entry.left == "cleanly":
        saver = ah.checkpoint.Saver(fixture.scratch)
        restored = await saver.restore()
        await saver.aclose()
        step = entry.session.global_step.latest.step
        if restored is None or restored.checkpoint.step != step:
            fixture.problems.append(
                f"the last save is {restored!r}, and the session ended at step {step}"
            )


async def recovering(fixture: Fixture) -> None:
    """A step that fails twice, with a new session after each failure."""
    failures = [ah.AbortedError("gone"), ah.UnavailableError("away")]

    async def fail() -> None:
        if failures:
            raise failures.pop()

    recovery = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0.0005, jitter=False))
    await fixture.run(
        graph_of(fail), until_stopped, ah.StopAtStepHook(last_step=2), count=3, recovery=recovery
    )


async def waiting(fixture: Fixture) -> None:
    """A wait that only a stop ends: a signal's, or the program's own after a while."""

    async def body(session: ah.AsyncMonitoredSession) -> None:
        async def give_up() -> None:
            await ticks(30)
            session.request_stop("no signal came")

        session.start_soon(give_up)
        await until_stopped(session)

    waiter = ah.hooks.GlobalStepWaiterHook(wait_until_step=10**6)
    await fixture.run(graph_of(), body, waiter, count=1, global_step=ah.MemoryStepStore())


async def draining(fixture: Fixture) -> None:
    """Elements are taken ahead; the first signal lets them be used, and the second one is a
    stop.
    """
    taken, used = list[int](), list[int]()

    async def batches() -> AsyncIterator[int]:
        for batch in range(LAST_STEP):
            await ticks(choose(1, 0, 2, name="ticks of a batch"))
            taken.append(batch)
            yield batch

    async def step(batch: int) -> dict[str, int]:
        await ticks(1)
        return {"loss": batch}

    async def body(session: ah.AsyncMonitoredSession) -> None:
        steps = session.steps("loss", feeds=batches(), prefetch=2)
        async for batch in steps:
            used.append(batch)
        if taken != [*used, *steps.unused]:
            fixture.problems.append(f"{taken} were taken, {used} used, and {steps.unused} left")

    await fixture.run(step, body, handle_signals=ah.SignalPolicy(drain_secs=60))


async def together(fixture: Fixture) -> None:
    """A chief and two workers, as tasks of one group."""
    graph, steps, variables = graph_of(), ah.MemoryStepStore(), ah.Variables()

    async def work(number: int) -> None:
        kind = ah.WorkerSessionCreator if number else ah.ChiefSessionCreator
        source = kind(graph, global_step=steps, variables=variables)
        hooks = ah.hooks.GlobalStepWaiterHook(number), ah.StopAtStepHook(last_step=2 * LAST_STEP)
        await fixture.run(source, until_stopped, *hooks, name=f"worker {number}")

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(work(number))
    for entry in fixture.entries:
        if isinstance(entry.left, asyncio.CancelledError):
            raise entry.left


async def in_a_task(fixture: Fixture) -> None:
    """A session whose steps run in another task than its own, and that is closed by `aclose`."""

    async def body(session: ah.AsyncMonitoredSession) -> None:
        running = asyncio.create_task(until_stopped(session))
        try:
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
        await session.aclose()

    await fixture.run(graph_of(), body, ah.StopAtStepHook(last_step=2))


SCENARIOS = (
    plain,
    saving,
    recovering,
    waiting,
    draining,
    together,
    in_a_task,
)


# -- bugs that must be found in them


def _without_reason(advance: Method, session: StopOnSignal, *args: Any) -> None:
    session.escalation = Escalation.STOP
    session.requests.record_stop("stopped")


def _nothing(original: Method, *args: Any) -> None:
    """Do nothing instead."""


BUGS: dict[str, Bug] = {
    "signal_does_not_stop": Bug(StopOnSignal, "advance", _nothing, (plain, "stopped because: ")),
    "stop_without_its_reason": Bug(
        StopOnSignal, "advance", _without_reason, (waiting, "stopped because: stopped")
    ),
    "second_signal_is_ignored": Bug(
        LoopSignals, "_cancel_sessions", _nothing, (plain, "ended with None")
    ),
    "handlers_stay_installed": Bug(
        LoopSignals, "_restore", _nothing, (plain, "the handler of SIGINT is")
    ),
    "wakeup_stays_installed": Bug(
        asyncio.SelectorEventLoop,
        "remove_signal_handler",
        _nothing,
        (plain, "the wakeup fd is"),
    ),
}
"""Each with the program, and what must be found in it."""


async def run_with_bug(bug: Bug) -> None:
    """Run its program while the library has a bug."""
    program, _ = bug.found_by
    with bug.injected():
        await run(program)
