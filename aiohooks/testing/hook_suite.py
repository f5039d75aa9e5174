"""Hooks for tests, and the conformance suite of session hooks, for their authors.

RecordingHook        records its calls
FaultInjectionHook   fails at chosen calls
check_hook           tries a hook in real sessions, with all their ends
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from aiohooks._core.validate import check_callable
from aiohooks._core.waits import Backoff
from aiohooks.checkpoint.saver import is_same
from aiohooks.checkpoint.stateful import is_stateful
from aiohooks.dispatch.hook import registration_of
from aiohooks.errors import AbortedError, InvalidArgumentError
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.hooks.functions import hook
from aiohooks.session.creators import ChiefSessionCreator, RecoveryPolicy, Source, graph_of
from aiohooks.session.hook import (
    HOOK_METHODS,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.testing._checks import by_name, run_checks
from aiohooks.testing.clock import ManualClock
from aiohooks.testing.exploration import explore
from aiohooks.testing.leaks import no_leaks


class RecordingHook(SessionRunHook):
    """Appends each call to `record` as `(name, phase)`. Hooks that share one list record the order
    among them.

    Attributes:
        name: the hook's name in the record.
        record: the calls.
        results: the results of the fetches, one item for each run.
        closed_with: the arguments of `close`: one item, since it is called once.
    """

    def __init__(
        self,
        name: str = "hook",
        *,
        record: list[tuple[str, str]] | None = None,
        fetches: Any = None,
        feed_dict: Mapping[Any, Any] | None = None,
        suspend: bool = False,
    ) -> None:
        """Make a hook that asks for `fetches` and `feed_dict`. With `suspend` every method suspends
        once.
        """
        self.name = name
        self.record: list[tuple[str, str]] = [] if record is None else record
        self.results: list[Any] = []
        self.closed_with: list[BaseException | None] = []
        self._args: SessionRunArgs | None = None
        if fetches is not None or feed_dict is not None:
            self._args = SessionRunArgs(fetches, feed_dict)
        self._suspend = suspend

    async def _record_call(self, phase: str) -> None:
        """Record a call of the method `phase`, and suspend if the hook was made with `suspend`."""
        self.record.append((self.name, phase))
        if self._suspend:
            await asyncio.sleep(0)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Record the call, and ask for the hook's fetches and feeds."""
        await self._record_call("before_run")
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Record the call and the results."""
        self.results.append(run_values.results)
        await self._record_call("after_run")

    async def close(self, exc: BaseException | None) -> None:
        """Record the call and its argument."""
        self.closed_with.append(exc)
        await self._record_call("close")

    def phases(self) -> list[str]:
        """Return the phases of this hook's own calls, in order."""
        return [phase for name, phase in self.record if name == self.name]

    def __repr__(self) -> str:
        return f"RecordingHook({self.name!r})"


def _recording_method(phase: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the method `phase` of a `RecordingHook`, which only records its calls."""

    async def method(self: RecordingHook, *_: object) -> None:
        await self._record_call(phase)  # pyright: ignore[reportPrivateUsage]

    method.__name__ = phase
    method.__qualname__ = f"RecordingHook.{phase}"
    method.__doc__ = "Record the call."
    return method


# A hook overrides a method by having it in its class, so each method needs a function of its own.
for _phase in HOOK_METHODS:
    if _phase not in vars(RecordingHook):
        setattr(RecordingHook, _phase, _recording_method(_phase))


Faults = Mapping[tuple[str, int], BaseException | Callable[[], Any]]
"""Errors to raise, or functions to call, by the method of a hook and the number of the call."""


class FaultInjectionHook(RecordingHook):
    """Raises an error, or calls a plain or async function without arguments, at the n-th call of a
    method.

    Example: `FaultInjectionHook({("before_run", 2): AbortedError("lost")})` loses the second run
    once.
    """

    def __init__(
        self,
        faults: Faults,
        name: str = "fault",
        **options: Any,
    ) -> None:
        """Take `faults` by method and number of the call, counted from 1. `options` as for
        `RecordingHook`.

        Raises:
            InvalidArgumentError: a method does not exist, or a number is below 1.
        """
        super().__init__(name, **options)
        for phase, number in faults:
            if phase not in HOOK_METHODS or number < 1:
                raise InvalidArgumentError(
                    f"({phase!r}, {number!r}) is no call; give a method ({', '.join(HOOK_METHODS)})"
                    " and a number from 1 on"
                )
        self._faults = dict(faults)
        self._counts: dict[str, int] = dict.fromkeys(HOOK_METHODS, 0)

    async def _record_call(self, phase: str) -> None:
        """Record the call, and inject the fault of this call, if any."""
        await super()._record_call(phase)
        self._counts[phase] += 1
        fault = self._faults.get((phase, self._counts[phase]))
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            result = fault()
            if asyncio.iscoroutine(result):
                await result


_NO_FAULTS: Faults = {}


async def _step() -> dict[str, float]:
    """The step of sessions for which the author of a hook gives no other."""
    await asyncio.sleep(0)
    return {"loss": 1.0}


class _Case(NamedTuple):
    """The arguments of `check_hook`, which a check uses in sessions."""

    make: Callable[[], Any]
    make_source: Callable[[], Source]
    fetches: Any

    async def use(
        self,
        hook: Any,
        faults: Faults = _NO_FAULTS,
        *others: SessionRunHook,
        suspend: bool = True,
        runs: int = 3,
    ) -> None:
        """Use the hook in a session with other hooks before and after it.

        Args:
            hook: the hook.
            faults: the faults of a `FaultInjectionHook` after it.
            others: further hooks after it.
            suspend: whether the methods of the recording hooks, the first and the last, suspend.
            runs: the number of runs, unless a stop is requested earlier.
        """
        before = RecordingHook("before", suspend=suspend)
        after = RecordingHook("after", suspend=suspend)
        hooks = [before, hook, FaultInjectionHook(faults), *others, after]
        recovery = RecoveryPolicy(backoff=Backoff(initial_secs=0))
        async with AsyncMonitoredSession(self.make_source(), hooks, recovery=recovery) as session:
            for _ in range(runs):
                # The hook itself may request a stop.
                if session.should_stop():
                    break
                await session.run(self.fetches)


async def ends_cleanly(case: _Case) -> None:
    """All calls of the hook are made without an error, beside other hooks that wait or do not."""
    for suspend in (False, True):
        await case.use(case.make(), suspend=suspend)


async def ends_without_a_run(case: _Case) -> None:
    """A session that is left before its first run ends without an error."""
    await case.use(case.make(), runs=0)


async def ends_at_a_stop(case: _Case) -> None:
    """A stop that is requested in the first run ends the session without an error."""

    @hook("after_run")
    def stop(run_context: SessionRunContext, _: object) -> None:
        run_context.request_stop("for a check")

    await case.use(case.make(), _NO_FAULTS, stop)


async def works_again(case: _Case) -> None:
    """The hook can be used in another session when its first one has ended."""
    hook = case.make()
    for _ in range(2):
        await case.use(hook)


async def recovers(case: _Case) -> None:
    """The session recovers from errors of other hooks, before and after a commit, and continues."""
    faults: Faults = {
        ("before_run", 2): AbortedError("lost"),
        ("after_run", 2): AbortedError("lost"),
    }
    await case.use(case.make(), faults)


async def leaves_errors_alone(case: _Case) -> None:
    """An error of another hook, in whatever method, reaches the caller as it is, and no other comes
    with it.
    """
    for phase in HOOK_METHODS:
        expected = OSError(f"of another hook, in {phase}")
        try:
            await case.use(case.make(), {(phase, 1): expected})
        except BaseException as error:
            # Sessions add a note for each error of another hook that came later.
            notes = " ".join(getattr(error, "__notes__", ()))
            if error is not expected or "and then" in notes:
                raise AssertionError(
                    f"{expected!r} was to be raised alone, and {error!r} {notes} came out"
                ) from error


async def passes_on_cancels(case: _Case) -> None:
    """A cancel at any point where a task of the session waits reaches the caller, and no task is
    left.
    """

    async def program() -> None:
        await case.use(case.make(), runs=2)

    # With `exhaust=1`, it tries a cancel at each wait. It raises an error for a cancel that does
    # not reach the caller, and for a task that is left.
    await explore(program, disturb=["cancel"], exhaust=1)


async def restores_its_state(case: _Case) -> None:
    """The state of a hook with a `state_dict` is written to a checkpoint. Another object has it
    when its session begins.
    """
    if not is_stateful(registration_of(case.make()).hook):
        return
    # The hook may keep a time in its state. The time stays the same on a `ManualClock`.
    with tempfile.TemporaryDirectory(prefix="aiohooks-check-") as folder, ManualClock():

        def make_source() -> ChiefSessionCreator:
            return ChiefSessionCreator(graph_of(case.make_source()), checkpoint_dir=folder)

        saving = case._replace(make_source=make_source)
        hook = case.make()
        await saving.use(hook, _NO_FAULTS, CheckpointSaverHook(folder))
        saved = copy.deepcopy(registration_of(hook).hook.state_dict())
        other = case.make()

        def compare_states() -> None:
            state = registration_of(other).hook.state_dict()
            if not is_same(saved, state):
                raise AssertionError(
                    f"its state was {saved!r}, and is {state!r} in a session restored from its"
                    " checkpoint"
                )

        await saving.use(other, {("after_create_session", 1): compare_states}, runs=0)


_Check = Callable[[_Case], Awaitable[None]]
_CHECKS: dict[str, _Check] = by_name(
    ends_cleanly,
    ends_without_a_run,
    ends_at_a_stop,
    works_again,
    recovers,
    leaves_errors_alone,
    passes_on_cancels,
    restores_its_state,
)


async def check_hook(
    make: Callable[[], object],
    check: str | None = None,
    *,
    make_source: Callable[[], Source] = lambda: _step,
    fetches: Any = (),
) -> None:
    """Run the conformance suite on a session hook, or one of its checks. A hook must not leak
    anything.

    Sessions of a few runs end cleanly, at a stop, by errors of other hooks in each method, after
    recoveries, and by a cancel at each point where something waits, in an exploration. To test a
    hook of another class, `explore` a program that calls its group.

    Example: `await check_hook(lambda: Patience(runs=9))`.

    Args:
        make: returns a new hook, or a registration of one; called for each session.
        check: a name from `hook_checks`, by default all.
        make_source: returns a step or a graph, for each session; by default a step whose result is
            `{"loss": 1.0}`. Give the placeholders of a graph defaults.
        fetches: the fetches of each run, in addition to the hook's own.

    Raises:
        InvalidArgumentError: there is no check of that name.
        AssertionError: a check failed. The message or a note names it.
        BaseException: an error of the hook, with a note that names the check.
    """
    check_callable(make, "make")
    case = _Case(make, make_source, fetches)

    async def run(check: _Check) -> None:
        async with no_leaks():
            await check(case)

    await run_checks(_CHECKS, check, run)


def hook_checks() -> list[str]:
    """Return the names of the checks of `check_hook`, for a parametrized test."""
    return list(_CHECKS)
