"""The conformance suite of hooks, for their authors: the life of a hook in real sessions or groups, however these end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import functools
import inspect
import pickle
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import new_task
from aiohooks._validate import is_coroutine_function
from aiohooks.checkpoint.stateful import is_stateful
from aiohooks.dispatch.group import HookGroup
from aiohooks.dispatch.hook import registration_of
from aiohooks.dispatch.lifecycle import How, Point
from aiohooks.errors import AbortedError, InvalidArgumentError, add_note, did_you_mean
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.session._hooks import LIFECYCLE
from aiohooks.session.creators import ChiefSessionCreator, Source, graph_of
from aiohooks.session.hook import HOOK_METHODS, SessionRunHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.session.recovery import RecoveryPolicy
from aiohooks.testing._checks import run_checks
from aiohooks.testing.clock import ManualClock
from aiohooks.testing.hooks import FaultInjectionHook, RecordingHook
from aiohooks.testing.leaks import describe_task, no_leaks

_RUNS = 3
_MOST_WAITS = 2_000
_NO_PAUSES = RecoveryPolicy(backoff=Backoff(initial_secs=0))


async def _step() -> dict[str, float]:
    await asyncio.sleep(0)
    return {"loss": 1.0}


_Faults = Mapping[str, Callable[[], object]]
"""What another hook calls in a method: in its first call in a session, or in the one of a group."""
_NO_FAULTS: _Faults = {}


class _SessionCase(NamedTuple):
    """What the author of the hook gives."""

    make: Callable[[], Any]
    errors: tuple[BaseException, ...]
    make_source: Callable[[], Source]
    fetches: Any
    feed_dict: Mapping[Any, Any] | None

    def methods(self, _: object) -> Iterable[str]:
        return HOOK_METHODS

    def session(
        self, hook: Any, *beside: SessionRunHook, source: Source | None = None, suspend: bool | None = True
    ) -> AsyncMonitoredSession:
        """Return a session with the hook, alone if `suspend` is None, or between others; with `suspend` they overlap."""
        hooks: list[Any] = [hook, *beside]
        if suspend is not None:
            hooks = [RecordingHook("before", suspend=suspend), *hooks, RecordingHook("after", suspend=suspend)]
        return AsyncMonitoredSession(self.make_source() if source is None else source, hooks, recovery=_NO_PAUSES)

    async def run(self, session: AsyncMonitoredSession) -> None:
        """Make the runs of a whole session; a hook may stop it earlier."""
        async with session:
            for _ in range(_RUNS):
                if session.should_stop():
                    break
                await session.run(self.fetches, self.feed_dict)

    async def make_calls(self, hook: Any, faults: _Faults = _NO_FAULTS, *, suspend: bool | None = True) -> None:
        """Make all calls of the hook, in a session as `session` makes it."""
        beside = [FaultInjectionHook({(phase, 1): fault for phase, fault in faults.items()})] if faults else []
        await self.run(self.session(hook, *beside, suspend=suspend))


class _GroupCase(NamedTuple):
    """The same for a hook of groups."""

    make: Callable[[], Any]
    errors: tuple[BaseException, ...]
    make_group: Callable[..., HookGroup[Any]]
    calls: Mapping[str, Any]

    def methods(self, hook: Any) -> dict[str, Point]:
        """Return the methods of the hook, in the order of `calls` and, for the others, of their class."""
        lifecycle = self.make_group([hook])._lifecycle  # pyright: ignore[reportPrivateUsage]
        points = {each.name: each for each in lifecycle.implemented(registration_of(hook).hook)}
        if unknown := sorted(self.calls.keys() - points):
            raise InvalidArgumentError(
                f"calls has {unknown[0]!r}, which is no method of {hook!r}; {did_you_mean(unknown[0], points)}"
            )
        return {name: points[name] for name in (*self.calls, *lifecycle.members) if name in points}

    async def make_calls(self, hook: Any, faults: _Faults = _NO_FAULTS, *, suspend: bool | None = True) -> None:
        """Make all calls of the hook, alone if `suspend` is None, or between others; with `suspend` they overlap."""
        points, hooks = self.methods(hook), [hook]
        beside = [each for each in points.values() if each.how in _OVERLAP] if suspend is not None else []
        if beside:
            hooks = [_hook_beside(beside, faults, suspend), hook, _hook_beside(beside, _NO_FAULTS, suspend)]
        async with self.make_group(hooks) as group:
            for name, each in points.items():
                method = getattr(group.hooks, name)
                arguments = self._arguments(each, inspect.signature(method))
                try:
                    answer = method(*arguments.args, **arguments.kwargs)
                    if inspect.isawaitable(answer):
                        await answer
                except Exception as error:
                    if name not in self.calls and arguments.args:
                        add_note(error, f'{name} was called with None; for other arguments: calls={{"{name}": (...)}}')
                    raise

    def _arguments(self, each: Point, signature: inspect.Signature) -> inspect.BoundArguments:
        """Return the arguments of a call: those that are given, or None for each that is needed."""
        needed = [one for one in signature.parameters.values() if one.default is one.empty]
        given = self.calls.get(each.name, [None for one in needed if one.kind < one.VAR_POSITIONAL])
        try:
            if each.name not in self.calls and (each.calls_next or each.how == "wrap"):
                raise TypeError("one of them calls the next hook")
            return signature.bind(**given) if isinstance(given, Mapping) else signature.bind(*given)
        except TypeError as error:
            raise InvalidArgumentError(
                f"{each.name}{signature} cannot be called with {given!r}: {error}; give a tuple of arguments, or a mapping of "
                f'those that are given by name: calls={{"{each.name}": (...)}}'
            ) from None


_Case = _SessionCase | _GroupCase
_OVERLAP = ("none", "first", "chain", "together", "merge")
"""Ways in which an answer of None changes nothing for the other hooks."""


def _hook_beside(points: Iterable[Point], faults: _Faults, suspend: bool | None) -> Any:
    def method_of(each: Point) -> Callable[..., Any]:
        def call_plain(*_: object, **__: object) -> None:
            if each.name in faults:
                faults[each.name]()

        async def call(*_: object, **__: object) -> None:
            if suspend:
                await asyncio.sleep(0)
            call_plain()

        return call if each.is_async else call_plain

    return type("Beside", (), {each.name: method_of(each) for each in points})()


async def ends_cleanly(case: _Case) -> None:
    """All calls of the hook are made without an error, alone, and beside other hooks that wait or do not."""
    for suspend in (None, False, True):
        await case.make_calls(case.make(), suspend=suspend)


async def ends_without_a_run(case: _SessionCase) -> None:
    """A session that is left before its first run ends without an error."""
    async with case.session(case.make()):
        pass


async def ends_at_a_stop(case: _SessionCase) -> None:
    """A stop that is requested in the first run ends the session without an error."""
    stop = FaultInjectionHook({("after_run", 1): lambda: session.request_stop("for a check")})
    session = case.session(case.make(), stop)
    await case.run(session)


async def works_again(case: _Case) -> None:
    """The hook can be used in another session or group when its first one has ended."""
    hook = case.make()
    for _ in range(2):
        await case.make_calls(hook)


async def recovers(case: _SessionCase) -> None:
    """The session recovers from errors of other hooks, before and after a commit, and continues."""
    lost = {("before_run", 2): AbortedError("lost"), ("after_run", 2): AbortedError("lost")}
    await case.run(case.session(case.make(), FaultInjectionHook(lost)))


async def leaves_errors_alone(case: _Case) -> None:
    """An error of another hook, in whatever method, reaches the caller as it is, and no other comes with it."""
    hook = case.make()
    for number, phase in enumerate(case.methods(hook)):
        wanted, raised = OSError(f"of another hook, in {phase}"), False

        def fail(error: BaseException = wanted) -> None:
            nonlocal raised
            raised = True
            raise error

        try:
            await case.make_calls(case.make() if number else hook, {phase: fail})
        except BaseException as error:
            found = [note for note in getattr(error, "__notes__", ()) if note.startswith("and then")]
            if error is not wanted or found:
                raise AssertionError(f"{wanted!r} was to be raised alone, and {error!r} {' '.join(found)} came out") from error
        else:
            if raised:
                raise AssertionError(f"{wanted!r} was raised by another hook and reached no caller")


async def passes_on_cancels(case: _Case) -> None:
    """A cancel at any point where the hook or its caller waits reaches the caller, and no task is left."""
    for suspend in (None, True):  # alone, and beside others
        await _cut_off_at_each_wait(case, "cancelled", suspend)


async def ends_at_a_time_limit(case: _GroupCase) -> None:
    """A time limit that ends at any point where the hook waits ends its call, and no task is left."""
    await _cut_off_at_each_wait(case._replace(make_group=functools.partial(case.make_group, timeout=1.0)), _BY_LIMIT)


async def leaves_nothing_when_it_fails(case: _GroupCase) -> None:
    """An error at any point where the hook waits leaves no task."""
    await _cut_off_at_each_wait(case, "failed")


async def _cut_off_at_each_wait(case: _Case, how: str, suspend: bool | None = True) -> None:
    at = 1
    while await _is_cut_off(case, at, how, suspend):
        at += 1


async def _is_cut_off(case: _Case, at: int, how: str, suspend: bool | None) -> bool:
    """Cut the calls of a hook off at wait `at`; return False if they ended before."""
    waits, clock, before = _Waits(at), ManualClock(), asyncio.all_tasks()
    with clock if how == _BY_LIMIT else contextlib.nullcontext():
        hook = case.make()
        registration = registration_of(hook)
        waits.count_in(registration.hook, case.methods(hook))
        calls = case.make_calls(hook, suspend=suspend)
        task = new_task(waits.counted(calls) if how == "cancelled" else calls, "the calls of a check")
        if how == "cancelled":
            waits.cut_off = task.cancel
        elif how == _BY_LIMIT:  # later: the time limit of a call begins at its first wait
            waits.cut_off = lambda: asyncio.get_running_loop().call_soon(clock.advance, registration.timeout or 1.0)
        else:
            waits.error = OSError("of what the hook has awaited")
        await asyncio.wait([task])
    if waits.count < at:
        task.result()
        return False
    where = f"{how} at wait {at}, {waits.place}"
    error = None if task.cancelled() else task.exception()
    if how == "cancelled" and not task.cancelled():
        raise AssertionError(f"{where}: the cancel did not reach the caller, but {error!r}")
    if waits.swallowed:
        raise AssertionError(f"{where}: it has swallowed the cancel, so its task continued; let `CancelledError` pass")
    left = [describe_task(one) for one in asyncio.all_tasks() - before]
    if left:
        raise AssertionError(f"{where}: {'; '.join(left)}")
    return True


_BY_LIMIT = "cut off by its time limit"
_BY_THE_CALLER = "in what calls it"
_MOST_TURNS = 20


class _Waits:
    """Counts the points at which a hook, or its caller, waits, and cuts it off at one of them."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self.cut_off: Callable[[], object] = lambda: None
        self.error: BaseException | None = None
        """What the wait raises there."""
        self.place = _BY_THE_CALLER
        self.swallowed = False
        """Whether the method that waited there has returned in spite of the cancel."""
        self._at = at
        self._waiting: set[asyncio.Task[Any] | None] = set()

    def count_in(self, hook: Any, names: Iterable[str]) -> None:
        """Count the waits in the methods of the hook, which may run in tasks of their own."""
        for name in names:
            method = getattr(hook, name)
            if not LIFECYCLE.overrides(hook, name) or not is_coroutine_function(method):
                continue

            @functools.wraps(method)
            async def call(*args: Any, method: Any = method, name: str = name, **keywords: Any) -> Any:
                return await self.counted(method(*args, **keywords), f"in its {name}")

            try:
                object.__setattr__(hook, name, call)  # also if the object is frozen
            except AttributeError:  # it has slots
                kind: type[Any] = hook.__class__
                made: Any = type(kind)
                object.__setattr__(hook, "__class__", made(kind.__name__, (kind,), {"__slots__": (), name: staticmethod(call)}))

    async def counted(self, coro: Coroutine[Any, Any, Any], place: str = _BY_THE_CALLER) -> Any:
        """Await a coroutine, and count its waits."""
        return await _Counted(coro, self, place)

    def begin(self, place: str) -> tuple[bool, bool]:
        """Count a wait of the current task; return whether it was not counted already, and whether it is to be cut off."""
        current = asyncio.current_task()
        if current in self._waiting:
            return False, False
        self._waiting.add(current)
        self.count += 1
        if self.count > _MOST_WAITS:
            raise AssertionError(f"it waits more than {_MOST_WAITS} times, so it may never end")
        if self.count == self._at:
            self.place = place
            self.cut_off()
        return True, self.count == self._at

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
            is_counted, is_cut_off = self._waits.begin(self._place)
            cancelled = None
            try:
                if is_cut_off and self._waits.error is not None:
                    raise self._waits.error
                resume = functools.partial(self._coro.send, (yield waits_for))
                if is_cut_off and self._place != _BY_THE_CALLER:
                    for _ in range(_MOST_TURNS):  # a wait of one turn would be over before the cancel comes
                        yield
            except BaseException as error:
                cancelled, resume = error, functools.partial(self._coro.throw, error)
            finally:
                if is_counted:
                    self._waits.end()


async def restores_context_variables(case: _Case) -> None:
    """What the hook sets in context variables of its caller is as before when its calls have ended."""
    for suspend in (False, True):
        before = contextvars.copy_context()
        await case.make_calls(case.make(), suspend=suspend)
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
    """`repr` of the hook is one line before, in and after its calls, for log lines and errors."""
    given = case.make()
    hook = registration_of(given).hook

    def look(when: str) -> None:
        try:
            text = repr(hook)
        except Exception as error:
            raise AssertionError(f"repr() of the {type(hook).__name__} fails {when}: {error!r}") from error
        if "\n" in text:
            raise AssertionError(f"repr() of the {type(hook).__name__} has more than one line {when}: {text}")

    look("before its calls")
    await case.make_calls(given, {name: functools.partial(look, f"in {name}") for name in case.methods(given)})
    look("after its calls")


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


async def restores_its_state(case: _SessionCase) -> None:
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


def _saving_session(case: _SessionCase, folder: str) -> tuple[AsyncMonitoredSession, Any]:
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


_Check = Callable[[Any], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = {
    check.__name__: check
    for check in (
        *(ends_cleanly, ends_without_a_run, ends_at_a_stop, works_again, recovers, leaves_errors_alone, passes_on_cancels),
        *(restores_context_variables, has_a_repr, raises_errors_that_pickle, restores_its_state),
    )
}
_GROUP_CHECKS: dict[str, _Check] = {
    check.__name__: check
    for check in (
        *(ends_cleanly, works_again, leaves_errors_alone, passes_on_cancels, ends_at_a_time_limit, leaves_nothing_when_it_fails),
        *(restores_context_variables, has_a_repr, raises_errors_that_pickle),
    )
}


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
    methods: Iterable[str] = (),
    errors: Iterable[BaseException] = (),
    limit_secs: float = 60.0,
) -> None:
    """Run the conformance suite on a hook, or one of its checks, in real sessions or groups; each must leak nothing.

    Sessions of three runs end cleanly, at a stop, by errors of other hooks in each method, after recoveries, and by a cancel at
    each point where something waits. With `kind` it is a hook of that class: groups of it call each method that the hook
    implements, alone and beside others; the hook is cancelled, fails, and is cut off by a time limit at each of its waits.

    Example: `await check_hook(Audit, kind=AgentHooks, calls={"on_tool_start": (call,)})`.

    Args:
        make: returns a new hook, or a registration of one; called for each session or group.
        check: a name from `hook_checks`; if left out, all are run.
        make_source: returns what the sessions run, a step or a graph; called for each session. By default a step whose result is
            `{"loss": 1.0}`.
        fetches: what each run fetches besides what the hook asks for.
        feed_dict: what each run is fed.
        kind: the class, for a hook of groups.
        calls: the arguments of its methods, by the name of the method: a tuple, or a mapping of those that are given by name.
            The methods are called in this order; those left out are called with None for each argument they need.
        results: as for `HookGroup`, as `init` and `methods`.
        init: see there.
        methods: see there.
        errors: examples of the errors that the hook raises, to be pickled and copied.
        limit_secs: how long one check may take.

    Raises:
        InvalidArgumentError: there is no check of that name; `calls` lacks arguments without which a method cannot be called, or
            names a method that the hook does not implement.
        AssertionError: a check failed; the message or a note names it.
        BaseException: an error of the hook, with a note that names the check.
    """
    case: _Case = _SessionCase(make, tuple(errors), make_source, fetches, feed_dict)
    if kind is not None:
        make_group = functools.partial(HookGroup[Any], kind, results=results, init=init, methods=methods)
        case = _GroupCase(make, tuple(errors), make_group, calls or {})

    async def run(check: _Check) -> None:
        async with no_leaks():
            await check(case)

    await run_checks(_CHECKS if kind is None else _GROUP_CHECKS, check, run, limit_secs)


def hook_checks(*, kind: Callable[..., Any] | None = None) -> list[str]:
    """Return the names of the checks of `check_hook`, for a parametrised test; with `kind` those of hooks of groups."""
    return list(_CHECKS if kind is None else _GROUP_CHECKS)
