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
from aiohooks.session.creators import ChiefSessionCreator, RecoveryPolicy, Source, graph_of
from aiohooks.session.hook import HOOK_METHODS, SessionRunContext, SessionRunHook
from aiohooks.session.hook_set import LIFECYCLE
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.testing._checks import by_name, run_checks
from aiohooks.testing.clock import ManualClock
from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
from aiohooks.testing.leaks import describe_task, no_leaks

_RUNS = 3
_MOST_WAITS = 2_000
_NO_PAUSES = RecoveryPolicy(backoff=Backoff(initial_secs=0))
_SHARED_ANSWERS = ("none", "first", "chain", "together", "merge")
"""Ways in which a result of None changes nothing for the other hooks."""
_Method = Callable[..., Any]
_Calls = Coroutine[Any, Any, Any]
_Faults = Mapping[tuple[str, int], BaseException | Callable[[], Any]]
"""What another hook raises or calls, by method and number of the call."""
_NO_FAULTS: _Faults = {}


async def _step() -> dict[str, float]:
    await asyncio.sleep(0)
    return {"loss": 1.0}


class _SessionCase(NamedTuple):
    """A hook of sessions, with the arguments of its author.

    Checks that use only the fields and methods of both cases are for both.
    """

    make: Callable[[], Any]
    make_source: Callable[[], Source]
    fetches: Any
    feed_dict: Mapping[Any, Any] | None

    def methods(self, _: object) -> Iterable[str]:
        return HOOK_METHODS

    async def make_calls(
        self,
        hook: Any,
        faults: _Faults = _NO_FAULTS,
        *others: SessionRunHook,
        suspend: bool | None = True,
        runs: int = _RUNS,
    ) -> None:
        """Use the hook in a session, alone if `suspend` is None, or between others, which suspend
        or not.
        """
        hooks = [hook]
        if suspend is not None:
            before = RecordingHook("before", suspend=suspend)
            after = RecordingHook("after", suspend=suspend)
            hooks = [before, hook, FaultInjectionHook(faults), *others, after]
        made = AsyncMonitoredSession(self.make_source(), hooks, recovery=_NO_PAUSES)
        async with made as session:
            for _ in range(runs):
                if session.should_stop():  # the hook may stop it
                    break
                await session.run(self.fetches, self.feed_dict)


class _GroupCase(NamedTuple):
    """A hook of groups, with the arguments of its author."""

    make: Callable[[], Any]
    make_group: Callable[..., HookGroup[Any]]
    calls: Mapping[str, Any]

    def methods(self, hook: Any) -> dict[str, Point]:
        """Return the methods of the hook: those of `calls`, then the others of its class."""
        interface = interface_of(self.make_group([hook]))
        implemented = interface.implemented(registration_of(hook).hook)
        points = {point.name: point for point in implemented}
        for name in self.calls:
            if name not in points:
                raise InvalidArgumentError(
                    f"calls has {name!r}, which is no method of {hook!r};"
                    f" {did_you_mean(name, points)}"
                )
        given = {name: points[name] for name in self.calls}
        return given | points

    async def make_calls(
        self,
        hook: Any,
        faults: _Faults = _NO_FAULTS,
        *,
        suspend: bool | None = True,
    ) -> None:
        """Make all calls of the hook, alone if `suspend` is None, or between others, which suspend
        or not.
        """
        points = self.methods(hook)
        shared = [point for point in points.values() if point.how in _SHARED_ANSWERS]
        hooks = [hook]
        # Where a result of None would count, such as in "wrap", the hook is alone.
        if suspend is not None and shared:
            before = _other_hook(shared, faults, suspend)
            hooks = [before, hook, _other_hook(shared, _NO_FAULTS, suspend)]
        async with self.make_group(hooks) as group:
            for name, point in points.items():
                await self._call(getattr(group.hooks, name), point)

    async def _call(self, method: _Method, point: Point) -> None:
        arguments = self._arguments(point, inspect.signature(method))
        try:
            answer = method(*arguments.args, **arguments.kwargs)
            if inspect.isawaitable(answer):
                await answer
        except Exception as error:
            if point.name not in self.calls and arguments.args:
                add_note(
                    error,
                    f"{point.name} was called with None; for other arguments:"
                    f' calls={{"{point.name}": (...)}}',
                )
            raise

    def _arguments(self, point: Point, signature: inspect.Signature) -> inspect.BoundArguments:
        """Return the arguments of a call: of the author, or None for each that is needed."""
        arguments = self.calls.get(point.name)
        is_guessed = arguments is None
        if arguments is None:
            arguments = [
                None
                for parameter in signature.parameters.values()
                if parameter.default is parameter.empty
                and parameter.kind < parameter.VAR_POSITIONAL
            ]
        try:
            if is_guessed and point.calls_next:
                raise TypeError("one of them calls the next hook")
            if isinstance(arguments, Mapping):
                return signature.bind(**arguments)
            return signature.bind(*arguments)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{point.name}{signature} cannot be called with {arguments!r}: {error}; give a"
                " tuple of arguments, or a mapping of those that are given by name:"
                f' calls={{"{point.name}": (...)}}'
            ) from None


_Case = _SessionCase | _GroupCase


def _other_hook(points: Iterable[Point], faults: _Faults, suspend: bool) -> Any:
    """Return a hook with these methods, which return None."""

    def method_of(point: Point) -> _Method:
        def call_plain(*_: object, **__: object) -> None:
            fault = faults.get((point.name, 1))
            if isinstance(fault, BaseException):
                raise fault
            if fault is not None:
                fault()

        async def call(*_: object, **__: object) -> None:
            if suspend:
                await asyncio.sleep(0)
            call_plain()

        return call if point.is_async else call_plain

    return type("Other", (), {point.name: method_of(point) for point in points})()


async def ends_cleanly(case: _Case) -> None:
    """All calls of the hook are made without an error, alone, and with other hooks that wait or do
    not.
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
    faults: _Faults = {
        ("before_run", 2): AbortedError("lost"),
        ("after_run", 2): AbortedError("lost"),
    }
    await case.make_calls(case.make(), faults)


async def leaves_errors_alone(case: _Case) -> None:
    """An error of another hook, in whatever method, reaches the caller as it is, and no other comes
    with it.
    """
    for phase in case.methods(case.make()):
        expected = OSError(f"of another hook, in {phase}")
        raised: BaseException | None = None
        try:
            await case.make_calls(case.make(), {(phase, 1): expected})
        except BaseException as error:
            raised = error
        # An error without a traceback was never raised: the method was not called.
        was_made = expected.__traceback__ is not None
        if raised is None and was_made:
            raise AssertionError(f"{expected!r} was raised by another hook and reached no caller")
        # Groups add a note for each error of another hook that came later.
        notes = [note for note in getattr(raised, "__notes__", ()) if note.startswith("and then")]
        if raised is not None and (raised is not expected or notes):
            raise AssertionError(
                f"{expected!r} was to be raised alone, and {raised!r} {' '.join(notes)} came out"
            ) from raised


async def passes_on_cancels(case: _Case) -> None:
    """A cancel at any point where the hook or its caller waits reaches the caller, and no task is
    left.
    """
    # Alone its calls may run in the task of the caller; beside others they have tasks.
    for suspend in (None, True):
        await _interrupt_each_wait(
            case,
            "cancelled",
            lambda task: task.cancel(),
            suspend=suspend,
            is_cancel=True,
        )


async def ends_at_a_time_limit(case: _GroupCase) -> None:
    """A time limit that ends at any point where the hook waits ends its call, and no task is
    left.
    """
    secs = registration_of(case.make()).timeout or 1.0
    limited = case._replace(make=lambda: configure(case.make(), timeout=secs))
    try:
        case.make_group([limited.make()])
    except InvalidHookError:
        return  # a hook with plain methods can have no time limit
    with ManualClock() as clock:
        # The time limit of a call begins at its first wait, so let it begin.
        later = asyncio.get_running_loop().call_soon
        await _interrupt_each_wait(
            limited, "cut off by its time limit", lambda _: later(clock.advance, secs)
        )


async def leaves_nothing_when_it_fails(case: _GroupCase) -> None:
    """An error at any point where the hook waits leaves no task."""

    def fail(_: object) -> None:
        raise OSError("of what the hook has awaited")

    await _interrupt_each_wait(case, "failed", fail)


async def _interrupt_each_wait(
    case: _Case,
    how: str,
    interrupt: Callable[[asyncio.Task[Any]], object],
    *,
    suspend: bool | None = True,
    is_cancel: bool = False,
) -> None:
    """Make the calls of a hook again and again: interrupt the first wait, then the second, until
    the calls end before.
    """
    for number in itertools.count(1):
        before = asyncio.all_tasks()
        hook = case.make()
        waits = _Waits(number)
        waits.watch(registration_of(hook).hook, case.methods(hook))
        calls = case.make_calls(hook, suspend=suspend)
        if is_cancel:
            calls = waits.counted(calls, "in what calls it")
        # A task of their own, so that a cancel reaches the calls and not this check.
        task = new_task(calls, "the calls of a check")
        waits.interrupt = functools.partial(interrupt, task)
        await asyncio.wait([task])
        if waits.count < number:
            task.result()
            return
        where = f"{how} at wait {number}, {waits.place}"
        error = None if task.cancelled() else task.exception()
        if is_cancel and not task.cancelled():
            raise AssertionError(f"{where}: the cancel did not reach the caller, but {error!r}")
        if waits.swallowed:
            raise AssertionError(
                f"{where}: it has swallowed the cancel, so its task continued; let `CancelledError`"
                " pass"
            )
        leaked = [describe_task(task) for task in asyncio.all_tasks() - before]
        if leaked:
            raise AssertionError(f"{where}: {'; '.join(leaked)}")


class _Waits:
    """Counts the points at which a hook or its caller waits, and interrupts one of the waits."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.interrupt: Callable[[], object]
        """Is called at the wait of this number, which raises the same error."""
        self.place = ""
        self.swallowed = False
        """Whether the method that waited there returned in spite of a cancel."""

    def watch(self, hook: Any, names: Iterable[str]) -> None:
        """Count the waits in the methods of the hook, which may run in tasks of their own."""
        for name in names:
            method = getattr(hook, name)
            is_overridden = LIFECYCLE.overrides(hook, name)
            if not is_overridden or not is_coroutine_function(method):
                continue
            counted = self._counted_method(method, f"in its {name}")
            try:
                object.__setattr__(hook, name, counted)  # also if the object is frozen
            except AttributeError:  # it has slots
                kind: type[Any] = hook.__class__
                metaclass: Any = type(kind)
                attributes = {"__slots__": (), name: staticmethod(counted)}
                subclass = metaclass(kind.__name__, (kind,), attributes)
                object.__setattr__(hook, "__class__", subclass)

    def _counted_method(self, method: _Method, place: str) -> _Method:
        @functools.wraps(method)
        async def call(*args: Any, **keywords: Any) -> Any:
            return await self.counted(method(*args, **keywords), place)

        return call

    async def counted(self, coro: _Calls, place: str) -> Any:
        """Await a coroutine, and count its waits."""
        return await self._resume(coro, place)

    @types.coroutine
    def _resume(self, coro: _Calls, place: str) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = coro.send(None) if error is None else coro.throw(error)
            except StopIteration as stop:
                if isinstance(error, asyncio.CancelledError) and place == self.place:
                    self.swallowed = True
                return stop.value
            error = None
            try:
                is_interrupted = self._count(place)
                yield awaited
                if is_interrupted:
                    # A wait of one turn would be over before the cancel comes.
                    for _ in range(20):
                        yield
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as thrown:
                error = thrown

    def _count(self, place: str) -> bool:
        """Count a wait, and return whether it is interrupted."""
        self.count += 1
        if self.count > _MOST_WAITS:
            raise AssertionError(f"it waits more than {_MOST_WAITS} times, so it may never end")
        if self.count != self.number:
            return False
        self.place = place
        self.interrupt()
        return True


async def restores_context_variables(case: _Case) -> None:
    """Context variables that the hook sets in its caller are as before when its calls have
    ended.
    """
    for suspend in (False, True):
        before = contextvars.copy_context()
        await case.make_calls(case.make(), suspend=suspend)
        for variable, value in contextvars.copy_context().items():
            try:
                old_value = before.run(variable.get)  # or its default
            except LookupError:
                old_value = "not set"
            is_own = variable.name.startswith("aiohooks")
            if value is not old_value and not is_own:
                raise AssertionError(
                    f"context variable {variable.name!r} was {old_value!r}, and is {value!r}"
                    " afterwards; reset it"
                )


async def restores_its_state(case: _SessionCase) -> None:
    """The state of a hook with a `state_dict` is written to a checkpoint. Another object has it
    when its session begins.
    """
    if not is_stateful(registration_of(case.make()).hook):
        return
    # A time in the state stays the same on this clock.
    with tempfile.TemporaryDirectory(prefix="aiohooks-check-") as folder, ManualClock():

        def make_source() -> ChiefSessionCreator:
            return ChiefSessionCreator(graph_of(case.make_source()), checkpoint_dir=folder)

        saving = case._replace(make_source=make_source)
        hook = case.make()
        await saving.make_calls(hook, _NO_FAULTS, CheckpointSaverHook(folder))
        saved = copy.deepcopy(registration_of(hook).hook.state_dict())
        other = case.make()

        def look() -> None:
            state = registration_of(other).hook.state_dict()
            if not _same(saved, state):
                raise AssertionError(
                    f"its state was {saved!r}, and is {state!r} in a session restored from its"
                    " checkpoint"
                )

        await saving.make_calls(other, {("after_create_session", 1): look}, runs=0)


def _same(first: Any, second: Any) -> bool:
    """Return whether two states are equal, also with arrays and NaN in them."""
    states = (first, second)
    if all(isinstance(state, dict) for state in states):
        return first.keys() == second.keys() and all(
            _same(first[key], second[key]) for key in first
        )
    # A checkpoint may restore a tuple as a list.
    if all(isinstance(state, (list, tuple)) for state in states):
        return len(first) == len(second) and all(map(_same, first, second))
    both_nan: Any = (first != first) & (second != second)
    equal: Any = (first == second) | both_nan
    if hasattr(equal, "all"):
        equal = equal.all()
    return bool(equal)


_Check = Callable[[Any], _Calls]
_CHECKS: dict[str, _Check] = by_name(
    ends_cleanly,
    ends_without_a_run,
    ends_at_a_stop,
    works_again,
    recovers,
    leaves_errors_alone,
    passes_on_cancels,
    restores_context_variables,
    restores_its_state,
)
_GROUP_CHECKS: dict[str, _Check] = by_name(
    ends_cleanly,
    works_again,
    leaves_errors_alone,
    passes_on_cancels,
    ends_at_a_time_limit,
    leaves_nothing_when_it_fails,
    restores_context_variables,
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
) -> None:
    """Run the conformance suite on a hook, or one of its checks, in real sessions or groups. Each
    must leak nothing.

    Sessions of three runs end cleanly, at a stop, by errors of other hooks in each method, after
    recoveries, and by a cancel at each point where something waits. With `kind` it is a hook of
    that class: groups of it call each method that the hook implements, alone and with others. The
    hook is cancelled, fails, and is cut off by a time limit at each of its waits.

    Example: `await check_hook(Audit, kind=AgentHooks, calls={"on_tool_start": (call,)})`.

    Args:
        make: returns a new hook, or a registration of one, called for each session or group.
        check: a name from `hook_checks`. If left out, all are run.
        make_source: returns a step or a graph, for each session, by default a step whose result is
            `{"loss": 1.0}`.
        fetches: the fetches of each run, in addition to the hook's own.
        feed_dict: the feeds of each run.
        kind: the class, for a hook of groups.
        calls: the arguments of its methods, by the name of the method: a tuple, or a mapping of
            those that are given by name. The methods are called in this order. Those left out are
            called with None for each argument they need.
        results: as for `HookGroup`.
        init: as for `HookGroup`.

    Raises:
        InvalidArgumentError: there is no check of that name; `calls` lacks arguments without which
            a method cannot be called, or names a method that the hook does not implement.
        AssertionError: a check failed. The message or a note names it.
        BaseException: an error of the hook, with a note that names the check.
    """
    case: _Case = _SessionCase(make, make_source, fetches, feed_dict)
    if kind is not None:
        make_group = functools.partial(HookGroup[Any], kind, results=results, init=init)
        case = _GroupCase(make, make_group, calls or {})

    async def run(check: _Check) -> None:
        async with no_leaks():
            await check(case)

    checks = _CHECKS if kind is None else _GROUP_CHECKS
    await run_checks(checks, check, run)


def hook_checks(*, kind: Callable[..., Any] | None = None) -> list[str]:
    """Return the names of the checks of `check_hook`, for a parametrized test. With `kind`, the
    checks are for hooks of groups.
    """
    return list(_CHECKS if kind is None else _GROUP_CHECKS)
