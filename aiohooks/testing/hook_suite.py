"""The conformance suite of hooks, for their authors: the life of a hook in real sessions, however these end."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import pickle
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from typing import Any, NamedTuple

from aiohooks._aio.backoff import Backoff
from aiohooks.checkpoint.stateful import is_stateful
from aiohooks.dispatch.hook import HookRegistration, registration_of
from aiohooks.errors import AbortedError
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.session._hooks import LIFECYCLE
from aiohooks.session.creators import ChiefSessionCreator, Source, graph_of
from aiohooks.session.hook import HOOK_METHODS, SessionRunHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.recovery import RecoveryPolicy
from aiohooks.testing._checks import run_checks
from aiohooks.testing.clock import ManualClock
from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
from aiohooks.testing.leaks import no_leaks

MakeHook = Callable[[], SessionRunHook | HookRegistration]
"""Return a new hook, which has been in no session."""

_RUNS = 3
_MOST_WAITS = 2_000
_NO_PAUSES = RecoveryPolicy(backoff=Backoff(initial_secs=0))


async def _step() -> dict[str, float]:
    await asyncio.sleep(0)
    return {"loss": 1.0}


class _Case(NamedTuple):
    """What the author of the hook gives."""

    make: MakeHook
    make_source: Callable[[], Source]
    fetches: Any
    feed_dict: Mapping[Any, Any] | None
    errors: tuple[BaseException, ...]

    def session(
        self, hook: SessionRunHook | HookRegistration, *beside: SessionRunHook, source: Source | None = None, suspend: bool = True
    ) -> AsyncMonitoredSession:
        """Return a session with the hook, one before it and others after it; with `suspend` they overlap."""
        hooks = [RecordingHook("before", suspend=suspend), hook, *beside, RecordingHook("after", suspend=suspend)]
        return AsyncMonitoredSession(self.make_source() if source is None else source, hooks, recovery=_NO_PAUSES)

    async def run(self, session: AsyncMonitoredSession) -> None:
        """Make the runs of a whole session; a hook may stop it earlier."""
        async with session:
            for _ in range(_RUNS):
                if session.should_stop():
                    break
                await session.run(self.fetches, self.feed_dict)


async def ends_cleanly(case: _Case) -> None:
    """A session with the hook makes its runs and ends without an error, whether other hooks wait or not."""
    for suspend in (False, True):
        await case.run(case.session(case.make(), suspend=suspend))


async def ends_without_a_run(case: _Case) -> None:
    """A session that is left before its first run ends without an error."""
    async with case.session(case.make()):
        pass


async def ends_at_a_stop(case: _Case) -> None:
    """A stop that is requested in the first run ends the session without an error."""
    stop = FaultInjectionHook({("after_run", 1): lambda: session.request_stop("for a check")})
    session = case.session(case.make(), stop)
    await case.run(session)


async def works_again(case: _Case) -> None:
    """The hook can be used in another session when its first one has ended."""
    hook = case.make()
    for _ in range(2):
        await case.run(case.session(hook))


async def recovers(case: _Case) -> None:
    """The session recovers from errors of other hooks, before and after a commit, and continues."""
    lost = {("before_run", 2): AbortedError("lost"), ("after_run", 2): AbortedError("lost")}
    await case.run(case.session(case.make(), FaultInjectionHook(lost)))


async def leaves_errors_alone(case: _Case) -> None:
    """An error of another hook, in whatever method, reaches the caller of the session as it is, and no other comes with it."""
    for phase in HOOK_METHODS:
        wanted = OSError(f"of another hook, in {phase}")
        fault = FaultInjectionHook({(phase, 1): wanted})
        try:
            await case.run(case.session(case.make(), fault))
        except BaseException as error:
            found = [note for note in getattr(error, "__notes__", ()) if note.startswith("and then")]
            if error is not wanted or found:
                raise AssertionError(f"{wanted!r} was to be raised alone, and {error!r} {' '.join(found)} came out") from error
        else:
            if fault.phases().count(phase):
                raise AssertionError(f"{wanted!r} was raised by another hook and reached no caller")


async def passes_on_cancels(case: _Case) -> None:
    """A cancel at any point where the session or the hook waits reaches the caller, and no task is left."""
    for suspend in (False, True):  # alone, and beside others
        at = 1
        while await _is_cancelled(case, at, suspend):
            at += 1


async def _is_cancelled(case: _Case, at: int, suspend: bool) -> bool:
    """Cancel a session at wait `at`; return False if it ended before."""
    hook, before = case.make(), asyncio.all_tasks()
    waits = _Waits(cancel_at=at)
    waits.count_in(registration_of(hook).hook)
    task = asyncio.create_task(waits.counted(case.run(case.session(hook, suspend=suspend))))
    waits.task = task
    await asyncio.wait([task])
    if waits.count < at:
        task.result()
        return False
    where = f"cancelled at wait {at} of its session, {waits.place}"
    if not task.cancelled():
        raise AssertionError(f"{where}: the cancel did not reach the caller, the session ended with {task.exception()!r}")
    if waits.swallowed:
        raise AssertionError(f"{where}: it has swallowed the cancel, so its task continued; let `CancelledError` pass")
    left = [one.get_name() for one in asyncio.all_tasks() - before]
    if left:
        raise AssertionError(f"{where}: it left the tasks {', '.join(left)}")
    return True


class _Waits:
    """Counts the points at which a session and its hook wait, and cancels the session at one of them."""

    def __init__(self, cancel_at: int) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.count = 0
        self.place = "in the session"
        self.swallowed = False
        """Whether the method that waited there has returned in spite of the cancel."""
        self._cancel_at = cancel_at
        self._waiting: set[asyncio.Task[Any] | None] = set()

    def count_in(self, hook: Any) -> None:
        """Count the waits in the methods of the hook, which may run in tasks of their own."""
        for name in HOOK_METHODS:
            method = getattr(hook, name)

            @functools.wraps(method)
            async def call(*args: Any, method: Any = method, name: str = name) -> Any:
                return await self.counted(method(*args), f"in its {name}")

            if LIFECYCLE.overrides(hook, name):
                setattr(hook, name, call)

    async def counted(self, coro: Coroutine[Any, Any, Any], place: str = "in the session") -> Any:
        """Await a coroutine, and count its waits."""
        return await _Counted(coro, self, place)

    def begin(self, place: str) -> bool:
        """Count a wait of the current task, and cancel the session if it is the one; return False if it is counted already."""
        current = asyncio.current_task()
        if current in self._waiting:
            return False
        self._waiting.add(current)
        self.count += 1
        if self.count > _MOST_WAITS:
            raise AssertionError(f"it waits more than {_MOST_WAITS} times in {_RUNS} runs, so it may never end")
        if self.count == self._cancel_at and self.task is not None:
            self.place = place
            self.task.cancel()
        return True

    def end(self) -> None:
        """The current task continues."""
        self._waiting.discard(asyncio.current_task())


class _Counted:
    """Awaits a coroutine, whose waits are counted."""

    def __init__(self, coro: Coroutine[Any, Any, Any], waits: _Waits, place: str) -> None:
        self._coro = coro
        self._waits = waits
        self._place = place

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = functools.partial(self._coro.send, None)
        cancelled: BaseException | None = None
        while True:
            try:
                waits_for = resume()
            except StopIteration as stop:
                if isinstance(cancelled, asyncio.CancelledError) and self._waits.place == self._place:
                    self._waits.swallowed = True
                return stop.value
            is_counted = self._waits.begin(self._place)
            cancelled = None
            try:
                resume = functools.partial(self._coro.send, (yield waits_for))
            except BaseException as error:
                cancelled, resume = error, functools.partial(self._coro.throw, error)
            finally:
                if is_counted:
                    self._waits.end()


async def restores_context_variables(case: _Case) -> None:
    """What the hook sets in context variables of its caller is as before when the session has ended."""
    for suspend in (False, True):
        before = contextvars.copy_context()
        await case.run(case.session(case.make(), suspend=suspend))
        for variable, value in contextvars.copy_context().items():
            if variable.name.startswith("aiohooks"):
                continue
            try:
                was = before.run(variable.get)  # or its default
            except LookupError:
                raise AssertionError(f"context variable {variable.name!r} was not set, and is {value!r} afterwards") from None
            if not _same(was, value):
                raise AssertionError(f"context variable {variable.name!r} was {was!r}, and is {value!r} afterwards; reset it")


async def has_a_repr(case: _Case) -> None:
    """`repr` of the hook is one line before, in and after a session, for log lines and errors."""
    given = case.make()
    hook = registration_of(given).hook

    def look(when: str) -> None:
        try:
            text = repr(hook)
        except Exception as error:
            raise AssertionError(f"repr() of the {type(hook).__name__} fails {when}: {error!r}") from error
        if "\n" in text:
            raise AssertionError(f"repr() of the {type(hook).__name__} has more than one line {when}: {text}")

    look("before its session")
    calls = {(name, 1): functools.partial(look, f"in {name}") for name in HOOK_METHODS}
    await case.run(case.session(given, FaultInjectionHook(calls)))
    look("after its session")


async def raises_errors_that_pickle(case: _Case) -> None:
    """Errors of the hook can be pickled and copied: a launcher, a process pool and a log queue do so."""
    for error in case.errors:
        try:
            copies: list[BaseException] = [pickle.loads(pickle.dumps(error)), copy.copy(error)]
        except Exception as failure:
            raise AssertionError(f"{error!r} cannot be pickled: {failure!r}; `args` must be what __init__ takes") from failure
        for again in copies:
            if type(again) is not type(error) or str(again) != str(error) or not _same(vars(again), vars(error)):
                raise AssertionError(f"{error!r} with {vars(error)} was pickled, and is {again!r} with {vars(again)}")


async def restores_its_state(case: _Case) -> None:
    """The state of a hook with a `state_dict` is written to a checkpoint; another object has it when its session begins."""
    if not is_stateful(registration_of(case.make()).hook):
        return
    with tempfile.TemporaryDirectory(prefix="aiohooks-check-") as folder, ManualClock():  # so that a time in it stays the same
        session, hook = _saving_session(case, folder)
        await case.run(session)
        saved = copy.deepcopy(hook.state_dict())
        session, hook = _saving_session(case, folder)
        async with session:
            now = hook.state_dict()
            if not _same(saved, now):
                raise AssertionError(
                    f"its state was {saved!r}, and is {now!r} in a session that was restored from its checkpoint"
                )


def _saving_session(case: _Case, folder: str) -> tuple[AsyncMonitoredSession, Any]:
    """Return a session that is restored from `folder` and saves there, and the hook."""
    given = case.make()
    creator = ChiefSessionCreator(graph_of(case.make_source()), checkpoint_dir=folder)
    return case.session(given, CheckpointSaverHook(folder), source=creator), registration_of(given).hook


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, also with arrays and NaN in them."""
    if isinstance(one, (dict, list, tuple)) and isinstance(other, (dict, list, tuple)):
        parts, others = _parts(one), _parts(other)
        return parts.keys() == others.keys() and all(_same(part, others[key]) for key, part in parts.items())
    equal: Any = (one == other) | ((one != one) & (other != other))
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _parts(container: Any) -> Mapping[Any, Any]:
    keys: Any = container if hasattr(container, "keys") else range(len(container))
    return {key: container[key] for key in keys}


_Check = Callable[[_Case], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = {
    check.__name__: check
    for check in (
        *(ends_cleanly, ends_without_a_run, ends_at_a_stop, works_again, recovers, leaves_errors_alone, passes_on_cancels),
        *(restores_context_variables, has_a_repr, raises_errors_that_pickle, restores_its_state),
    )
}


async def check_hook(
    make: MakeHook,
    check: str | None = None,
    *,
    make_source: Callable[[], Source] = lambda: _step,
    fetches: Any = (),
    feed_dict: Mapping[Any, Any] | None = None,
    errors: Iterable[BaseException] = (),
    limit_secs: float = 60.0,
) -> None:
    """Run the conformance suite on a hook, or one of its checks: real sessions of three runs, each of which must leak nothing.

    The sessions end cleanly, at a stop, by errors of other hooks in each method, after recoveries, and by a cancel at each point
    where something waits.

    Args:
        make: returns a new hook, or a registration of one; called for each session.
        check: a name from `hook_checks`; if left out, all are run.
        make_source: returns what the sessions run, a step or a graph; called for each session. By default a step whose result is
            `{"loss": 1.0}`.
        fetches: what each run fetches besides what the hook asks for.
        feed_dict: what each run is fed.
        errors: examples of the errors that the hook raises, to be pickled and copied.
        limit_secs: how long one check may take.

    Raises:
        AssertionError: a check failed; the message or a note names it.
        BaseException: an error of the hook, with a note that names the check.
    """
    case = _Case(make, make_source, fetches, feed_dict, tuple(errors))

    async def run(check: _Check) -> None:
        async with no_leaks():
            await check(case)

    await run_checks(_CHECKS, check, run, limit_secs)


def hook_checks() -> list[str]:
    """Return the names of the checks of `check_hook`, for a parametrised test."""
    return list(_CHECKS)
