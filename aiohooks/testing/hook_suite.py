"""The conformance suite of hooks, for their authors: the life of a hook in real sessions or groups,
however these end.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import itertools
import pickle
import tempfile
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._core.cancel import new_task
from aiohooks._core.validate import is_coroutine_function
from aiohooks._core.waits import Backoff
from aiohooks.checkpoint.stateful import is_stateful
from aiohooks.dispatch.group import HookGroup, interface_of
from aiohooks.dispatch.hook import configure, registration_of
from aiohooks.dispatch.ways import How, Point
from aiohooks.errors import (
    AbortedError,
    InvalidArgumentError,
    InvalidHookError,
    add_note,
    did_you_mean,
)
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.hooks.functions import LambdaHook
from aiohooks.session.creators import ChiefSessionCreator, Source, graph_of
from aiohooks.session.hook import HOOK_METHODS, SessionRunContext, SessionRunHook
from aiohooks.session.hook_set import LIFECYCLE
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.recovery import RecoveryPolicy
from aiohooks.testing._checks import by_name, run_checks
from aiohooks.testing.clock import ManualClock
from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
from aiohooks.testing.leaks import describe_task, no_leaks

_RUNS = 3
_CANCELLED = "cancelled"
_NO_PAUSES = RecoveryPolicy(backoff=Backoff(initial_secs=0))
_OVERLAP = ("none", "first", "chain", "together", "merge")
"""Ways in which a result of None changes nothing for the other hooks."""
_Faults = Mapping[tuple[str, int], BaseException | Callable[[], Any]]
"""What another hook raises or calls, by method and number of the call in a session; in a group each
has one call.
"""
_NO_FAULTS: _Faults = {}


async def _step() -> dict[str, float]:
    await asyncio.sleep(0)
    return {"loss": 1.0}


class _SessionCase(NamedTuple):
    """A hook of sessions, and what its author gives; a check that needs only `methods` and
    `make_calls` is for both cases.
    """

    make: Callable[[], Any]
    errors: tuple[BaseException, ...]
    make_source: Callable[[], Source]
    fetches: Any
    feed_dict: Mapping[Any, Any] | None

    def methods(self, _: object) -> Iterable[str]:
        return HOOK_METHODS

    async def make_calls(
        self,
        hook: Any,
        faults: _Faults = _NO_FAULTS,
        *beside: SessionRunHook,
        suspend: bool | None = True,
        runs: int = _RUNS,
    ) -> None:
        """Use the hook in a session, alone if `suspend` is None, or between others, with which it
        is then concurrent.
        """
        before, after = (RecordingHook(name, suspend=bool(suspend)) for name in ("before", "after"))
        hooks = (
            [hook]
            if suspend is None
            else [before, hook, FaultInjectionHook(faults), *beside, after]
        )
        async with AsyncMonitoredSession(self.make_source(), hooks, recovery=_NO_PAUSES) as session:
            for _ in range(runs):
                if session.should_stop():  # a hook may do that
                    break
                await session.run(self.fetches, self.feed_dict)


class _GroupCase(NamedTuple):
    """A hook of groups."""

    make: Callable[[], Any]
    errors: tuple[BaseException, ...]
    make_group: Callable[..., HookGroup[Any]]
    calls: Mapping[str, Any]

    def methods(self, hook: Any) -> dict[str, Point]:
        """Return the methods of the hook, in the order of `calls` and, for the others, of their
        class.
        """
        interface = interface_of(self.make_group([hook]))
        points = {each.name: each for each in interface.implemented(registration_of(hook).hook)}
        if unknown := sorted(self.calls.keys() - points):
            raise InvalidArgumentError(
                f"calls has {unknown[0]!r}, which is no method of {hook!r};"
                f" {did_you_mean(unknown[0], points)}"
            )
        return {name: points[name] for name in (*self.calls, *interface.members) if name in points}

    async def make_calls(
        self, hook: Any, faults: _Faults = _NO_FAULTS, *, suspend: bool | None = True
    ) -> None:
        """Make all calls of the hook, alone if `suspend` is None, or between others, with which it
        is then concurrent.
        """
        points = self.methods(hook)
        beside = (
            [] if suspend is None else [each for each in points.values() if each.how in _OVERLAP]
        )
        before, after = (_hook_beside(beside, each, suspend) for each in (faults, _NO_FAULTS))
        async with self.make_group([before, hook, after] if beside else [hook]) as group:
            for name, each in points.items():
                method = getattr(group.hooks, name)
                arguments = self._arguments(each, inspect.signature(method))
                try:
                    answer = method(*arguments.args, **arguments.kwargs)
                    if inspect.isawaitable(answer):
                        await answer
                except Exception as error:
                    if name not in self.calls and arguments.args:
                        add_note(
                            error,
                            f'{name} was called with None; for other arguments: calls={{"{name}":'
                            " (...)}",
                        )
                    raise

    def _arguments(self, each: Point, signature: inspect.Signature) -> inspect.BoundArguments:
        """Return the arguments of a call: those that are given, or None for each that is needed."""
        needed = [one for one in signature.parameters.values() if one.default is one.empty]
        given = self.calls.get(each.name, [None for one in needed if one.kind < one.VAR_POSITIONAL])
        try:
            if each.name not in self.calls and each.calls_next:
                raise TypeError("one of them calls the next hook")
            return signature.bind(**given) if isinstance(given, Mapping) else signature.bind(*given)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{each.name}{signature} cannot be called with {given!r}: {error}; give a tuple of"
                " arguments, or a mapping of "
                f'those that are given by name: calls={{"{each.name}": (...)}}'
            ) from None


_Case = _SessionCase | _GroupCase


def _hook_beside(points: Iterable[Point], faults: _Faults, suspend: bool | None) -> Any:
    """Return a hook with these methods, which return None."""

    def method_of(each: Point) -> Callable[..., Any]:
        def call_plain(*_: object, **__: object) -> None:
            fault = faults.get((each.name, 1))
            if isinstance(fault, BaseException):
                raise fault
            if fault is not None:
                fault()

        async def call(*_: object, **__: object) -> None:
            if suspend:
                await asyncio.sleep(0)
            call_plain()

        return call if each.is_async else call_plain

    return type("Beside", (), {each.name: method_of(each) for each in points})()


async def ends_cleanly(case: _Case) -> None:
    """All calls of the hook are made without an error, alone, and beside other hooks that wait or
    do not.
    """
    for suspend in (None, False, True):
        await case.make_calls(case.make(), suspend=suspend)


async def ends_without_a_run(case: _SessionCase) -> None:
    """A session that is left before its first run ends without an error."""
    await case.make_calls(case.make(), runs=0)


async def ends_at_a_stop(case: _SessionCase) -> None:
    """A stop that is requested in the first run ends the session without an error."""

    def stop(run_context: SessionRunContext, _: object) -> None:
        run_context.request_stop("for a check")

    await case.make_calls(case.make(), _NO_FAULTS, LambdaHook(after_run=stop))


async def works_again(case: _Case) -> None:
    """The hook can be used in another session or group when its first one has ended."""
    hook = case.make()
    for _ in range(2):
        await case.make_calls(hook)


async def recovers(case: _SessionCase) -> None:
    """The session recovers from errors of other hooks, before and after a commit, and continues."""
    await case.make_calls(
        case.make(), {(phase, 2): AbortedError("lost") for phase in ("before_run", "after_run")}
    )


async def leaves_errors_alone(case: _Case) -> None:
    """An error of another hook, in whatever method, reaches the caller as it is, and no other comes
    with it.
    """
    for phase in case.methods(case.make()):
        wanted = OSError(f"of another hook, in {phase}")
        try:
            await case.make_calls(case.make(), {(phase, 1): wanted})
        except BaseException as error:
            found = [
                note for note in getattr(error, "__notes__", ()) if note.startswith("and then")
            ]
            if error is not wanted or found:
                raise AssertionError(
                    f"{wanted!r} was to be raised alone, and {error!r} {' '.join(found)} came out"
                ) from error
        else:
            if wanted.__traceback__ is not None:
                raise AssertionError(f"{wanted!r} was raised by another hook and reached no caller")


async def passes_on_cancels(case: _Case) -> None:
    """A cancel at any point where the hook or its caller waits reaches the caller, and no task is
    left.
    """
    for suspend in (None, True):  # alone, and beside others
        await _cut_off_at_each_wait(case, _CANCELLED, lambda task: task.cancel(), suspend)


async def ends_at_a_time_limit(case: _GroupCase) -> None:
    """A time limit that ends at any point where the hook waits ends its call, and no task is
    left.
    """
    secs = registration_of(case.make()).timeout or 1.0
    limited = case._replace(make=lambda: configure(case.make(), timeout=secs))
    try:
        case.make_group([limited.make()])
    except InvalidHookError:
        return  # it has plain methods, so that it can have no time limit
    with ManualClock() as clock:
        later = (
            asyncio.get_running_loop().call_soon
        )  # the time limit of a call begins at its first wait
        await _cut_off_at_each_wait(
            limited, "cut off by its time limit", lambda _: later(clock.advance, secs)
        )


async def leaves_nothing_when_it_fails(case: _GroupCase) -> None:
    """An error at any point where the hook waits leaves no task."""

    def fail(_: object) -> None:
        raise OSError("of what the hook has awaited")

    await _cut_off_at_each_wait(case, "failed", fail)


async def _cut_off_at_each_wait(
    case: _Case,
    how: str,
    cut_off: Callable[[asyncio.Task[Any]], object],
    suspend: bool | None = True,
) -> None:
    """Make the calls of a hook that are cut off at the first wait, at the second, and so on, until
    they end before.
    """
    for at in itertools.count(1):
        before, hook, waits = asyncio.all_tasks(), case.make(), _Waits(at)
        waits.count_in(registration_of(hook).hook, case.methods(hook))
        calls = case.make_calls(hook, suspend=suspend)
        task = new_task(
            waits.counted(calls, "in what calls it") if how == _CANCELLED else calls,
            "the calls of a check",
        )
        waits.cut_off = functools.partial(cut_off, task)
        await asyncio.wait([task])
        if waits.count < at:
            task.result()
            return
        where = f"{how} at wait {at}, {waits.place}"
        error = None if task.cancelled() else task.exception()
        if how == _CANCELLED and not task.cancelled():
            raise AssertionError(f"{where}: the cancel did not reach the caller, but {error!r}")
        if waits.swallowed:
            raise AssertionError(
                f"{where}: it has swallowed the cancel, so its task continued; let `CancelledError`"
                " pass"
            )
        if left := [describe_task(one) for one in asyncio.all_tasks() - before]:
            raise AssertionError(f"{where}: {'; '.join(left)}")


class _Waits:
    """Counts the points at which a hook, or its caller, waits, and cuts it off at one of them."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self.cut_off: Callable[[], object]
        """Is called at that wait, which raises what this raises."""
        self.place = ""
        self.swallowed = False
        """Whether the method that waited there has returned in spite of the cancel."""
        self.at = at

    def count_in(self, hook: Any, names: Iterable[str]) -> None:
        """Count the waits in the methods of the hook, which may run in tasks of their own."""
        for name in names:
            method = getattr(hook, name)
            if not LIFECYCLE.overrides(hook, name) or not is_coroutine_function(method):
                continue

            @functools.wraps(method)
            async def call(
                *args: Any, method: Any = method, name: str = name, **keywords: Any
            ) -> Any:
                return await self.counted(method(*args, **keywords), f"in its {name}")

            try:
                object.__setattr__(hook, name, call)  # also if the object is frozen
            except AttributeError:  # it has slots
                kind: type[Any] = hook.__class__
                made: Any = type(kind)
                object.__setattr__(
                    hook,
                    "__class__",
                    made(kind.__name__, (kind,), {"__slots__": (), name: staticmethod(call)}),
                )

    async def counted(self, coro: Coroutine[Any, Any, Any], place: str) -> Any:
        """Await a coroutine, count its waits, and cut it off at one of them."""
        return await self._resume(coro, place)

    @types.coroutine
    def _resume(self, coro: Coroutine[Any, Any, Any], place: str) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = coro.send(None) if error is None else coro.throw(error)
            except StopIteration as stop:
                is_cut_off = isinstance(error, asyncio.CancelledError) and place == self.place
                self.swallowed |= is_cut_off
                return stop.value
            error = None
            try:
                more_turns = self._count(place)
                yield awaited
                for _ in range(more_turns):
                    yield
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as thrown:
                error = thrown

    def _count(self, place: str) -> int:
        """Count a wait, and return how many turns of the loop it lasts longer."""
        self.count += 1
        if self.count > 2_000:
            raise AssertionError("it waits more than 2000 times, so it may never end")
        if self.count != self.at:
            return 0
        self.place = place
        self.cut_off()
        return 20  # a wait of one turn would be over before the cancel comes


async def restores_context_variables(case: _Case) -> None:
    """What the hook sets in context variables of its caller is as before when its calls have
    ended.
    """
    for suspend in (False, True):
        before = contextvars.copy_context()
        await case.make_calls(case.make(), suspend=suspend)
        for variable, value in contextvars.copy_context().items():
            try:
                was = before.run(variable.get)  # or its default
            except LookupError:
                was = "not set"
            if not (variable.name.startswith("aiohooks") or _same(was, value)):
                raise AssertionError(
                    f"context variable {variable.name!r} was {was!r}, and is {value!r} afterwards;"
                    " reset it"
                )


async def has_a_repr(case: _Case) -> None:
    """`repr` of the hook is one line before, in and after its calls, for log lines and errors."""
    given = case.make()
    hook = registration_of(given).hook

    def look(when: str) -> None:
        try:
            text = repr(hook)
        except Exception as error:
            raise AssertionError(
                f"repr() of the {type(hook).__name__} fails {when}: {error!r}"
            ) from error
        if "\n" in text:
            raise AssertionError(
                f"repr() of the {type(hook).__name__} has more than one line {when}: {text}"
            )

    look("before its calls")
    await case.make_calls(
        given, {(name, 1): functools.partial(look, f"in {name}") for name in case.methods(given)}
    )
    look("after its calls")


async def raises_errors_that_pickle(case: _Case) -> None:
    """Errors of the hook can be pickled and copied: a launcher, a process pool and a log queue do
    so.
    """
    for error in case.errors:
        try:
            copies: list[BaseException] = [pickle.loads(pickle.dumps(error)), copy.copy(error)]
        except Exception as failure:
            raise AssertionError(
                f"{error!r} cannot be pickled: {failure!r}; `args` must be what __init__ takes"
            ) from failure
        for again in copies:
            if (
                type(again) is not type(error)
                or str(again) != str(error)
                or not _same(vars(again), vars(error))
            ):
                raise AssertionError(
                    f"{error!r} with {vars(error)} was pickled, and is {again!r} with {vars(again)}"
                )


async def restores_its_state(case: _SessionCase) -> None:
    """The state of a hook with a `state_dict` is written to a checkpoint; another object has it
    when its session begins.
    """
    if not is_stateful(registration_of(case.make()).hook):
        return
    with (
        tempfile.TemporaryDirectory(prefix="aiohooks-check-") as folder,
        ManualClock(),
    ):  # so that a time in it stays the same
        saving = case._replace(
            make_source=lambda: ChiefSessionCreator(
                graph_of(case.make_source()), checkpoint_dir=folder
            )
        )
        hook = case.make()
        await saving.make_calls(hook, _NO_FAULTS, CheckpointSaverHook(folder))
        saved, other = copy.deepcopy(registration_of(hook).hook.state_dict()), case.make()

        def look() -> None:
            now = registration_of(other).hook.state_dict()
            if not _same(saved, now):
                raise AssertionError(
                    f"its state was {saved!r}, and is {now!r} in a session restored from its"
                    " checkpoint"
                )

        await saving.make_calls(other, {("after_create_session", 1): look}, runs=0)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, also with arrays and NaN in them."""
    if all(isinstance(part, dict) for part in (one, other)):
        return one.keys() == other.keys() and all(
            _same(part, other[key]) for key, part in one.items()
        )
    if all(isinstance(part, (list, tuple)) for part in (one, other)):
        return len(one) == len(other) and all(map(_same, one, other))
    equal: Any = (one == other) | ((one != one) & (other != other))
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


_Check = Callable[[Any], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = by_name(
    *(
        ends_cleanly,
        ends_without_a_run,
        ends_at_a_stop,
        works_again,
        recovers,
        leaves_errors_alone,
        passes_on_cancels,
    ),
    *(restores_context_variables, has_a_repr, raises_errors_that_pickle, restores_its_state),
)
_GROUP_CHECKS: dict[str, _Check] = by_name(
    *(
        ends_cleanly,
        works_again,
        leaves_errors_alone,
        passes_on_cancels,
        ends_at_a_time_limit,
        leaves_nothing_when_it_fails,
    ),
    *(restores_context_variables, has_a_repr, raises_errors_that_pickle),
)


async def check_hook(
    make: Callable[[], object],
    check: str | None = None,
    *,
    make_source: Callable[[], Source] = lambda: _step,
    fetches: Any = (),
    feed_dict: Mapping[Any, Any] | None = None,
    kind: Callable[..., Any] | None = None,
    calls: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    results: Mapping[str, How] | How | None = None,
    init: Mapping[str, Any] | None = None,
    errors: Iterable[BaseException] = (),
    limit_secs: float = 60.0,
) -> None:
    """Run the conformance suite on a hook, or one of its checks, in real sessions or groups; each
    must leak nothing.

    Sessions of three runs end cleanly, at a stop, by errors of other hooks in each method, after
    recoveries, and by a cancel at each point where something waits. With `kind` it is a hook of
    that class: groups of it call each method that the hook implements, alone and beside others; the
    hook is cancelled, fails, and is cut off by a time limit at each of its waits.

    Example: `await check_hook(Audit, kind=AgentHooks, calls={"on_tool_start": (call,)})`.

    Args:
        make: returns a new hook, or a registration of one; called for each session or group.
        check: a name from `hook_checks`; if left out, all are run.
        make_source: returns a step or a graph, for each session; by default a step whose result is
            `{"loss": 1.0}`.
        fetches: what each run fetches besides what the hook asks for.
        feed_dict: what each run is fed.
        kind: the class, for a hook of groups.
        calls: the arguments of its methods, by the name of the method: a tuple, or a mapping of
            those that are given by name. The methods are called in this order; those left out are
            called with None for each argument they need.
        results: as for `HookGroup`.
        init: as for `HookGroup`.
        errors: examples of the errors that the hook raises, to be pickled and copied.
        limit_secs: how long one check may take.

    Raises:
        InvalidArgumentError: there is no check of that name; `calls` lacks arguments without which
            a method cannot be called, or names a method that the hook does not implement.
        AssertionError: a check failed; the message or a note names it.
        BaseException: an error of the hook, with a note that names the check.
    """
    case: _Case = _SessionCase(make, tuple(errors), make_source, fetches, feed_dict)
    if kind is not None:
        make_group = functools.partial(HookGroup[Any], kind, results=results, init=init)
        case = _GroupCase(make, tuple(errors), make_group, calls or {})

    async def run(check: _Check) -> None:
        async with no_leaks():
            await check(case)

    await run_checks(_CHECKS if kind is None else _GROUP_CHECKS, check, run, limit_secs)


def hook_checks(*, kind: Callable[..., Any] | None = None) -> list[str]:
    """Return the names of the checks of `check_hook`, for a parametrised test; with `kind` those of
    hooks of groups.
    """
    return list(_CHECKS if kind is None else _GROUP_CHECKS)
