"""The registry of activity: the waits of all tasks of this process, with names for reports.

A block that may wait enters it (`with active("save", "save of step 7"):`), and so does a group of
calls (`Calls`) when it begins to wait. Calls that do not wait never enter it. Status, `why`, the
watchdog and the warnings about long waits read it. Nothing else does, and nothing is decided by it.

    ENTRIES     the registry: weak references to the entries, by their ids
    active      an entry for a block
    enter       enters an object for the rest of its life
    entries     returns all entries, of each task the outermost first
    Awaited     the description of something that is waited for
    Parked      an entry of a table, such as a store, that has one for each task that waits for it

Observers are notified of the start and the end of activities that take time. Before an activity
begins, its code checks whether there are observers. The observers of a run are in its scope
(`RunScope.observers`), and the observers of other activities of a session in
`Coordinator.observers`. An observation is one activity, as one observer sees it.

    active          notifies the observers of a block
    observed_call   notifies the observers of a call that is awaited

The registry has weak references, and an entry holds only names and functions that return names, so
that no value of a run lives longer because of it.

The run that code is part of is here as well, in a context variable. With it, a hook that calls
`run` of its own session gets an error instead of a deadlock, and reports about a wait for a step
can name the publisher whose run it blocks.

    begin_run       makes the current context part of a new run
    current_run     returns the innermost active run of the current context
    leave_run       removes the current context from its run
    RunScope        a run in progress
    assigned        a block in which a context variable has a value

Reports in the log:

    logger          the logger of the library
    WaitLog         reports of waits that take long
    wait_log        a log of the waits inside of the library that take long
"""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar
from weakref import ref

from aiohooks._core.clock import NO_TIMER, current_clock, secs_text

T = TypeVar("T")

Needs = Literal["all", "any", "perhaps"]
Kind = Literal["hook", "operation", "background", "feed", "prefetch", "save", "wait", "recovery"]
"""The kind of an activity.

It is a hook's method, an operation, a hook's background call, the wait for the next feed, the
prefetching of a feed, the write of a checkpoint, a wait that a stop ends, or a recovery.
"""


class Awaited(NamedTuple):
    """Something that is waited for, for reports.

    Attributes:
        kind: "step", "lock", "session" and so on. "calls" stands for the tasks and calls in `by`.
        name: the name of the thing.
        detail: its state.
        by: returns the tasks, futures, threads, calls and other awaited things that the thing
            itself waits for.
        key: the identity of the thing: an object, or a text that is the same in all reports. For a
            call that runs in a task of its own, the task.
        secs: how long the thing has been awaited, or has lasted.
        needs: whether the thing waits for "all" in `by`, for "any", or "perhaps" for some of them.
        ends: whether this describes the whole wait, so that a report needs no entry of a block
            inside.
        hook: the hook that was called, for a call of a hook.
    """

    kind: str
    name: str
    detail: str = ""
    by: Callable[[], Iterable[Any]] = tuple
    key: object = None
    secs: float | None = None
    needs: Needs = "all"
    ends: bool = True
    hook: Any = None


def awaited_tasks(*tasks: asyncio.Future[Any]) -> Awaited:
    """Return the description of a wait for tasks."""
    return Awaited("calls", "", by=lambda: tasks)


class Entry(Protocol):
    """Something that a task waits for, or does."""

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task that waits."""
        ...

    @property
    def owner(self) -> object:
        """The monitored session that the entry is part of."""
        ...

    def awaited(self) -> Awaited | None:
        """Return the description for reports, or None if the entries inside say more."""
        ...


class Parked(NamedTuple):
    """The entry of one task that waits for a `WaitTable`."""

    task: asyncio.Task[Any] | None
    describe: Callable[[], Awaited]
    owner: object = None

    def awaited(self) -> Awaited:
        return self.describe()


class WaitTable(Protocol):
    """Something that thousands of tasks wait for, such as a store.

    It enters itself once, as an entry for each wait would cost too much.
    """

    def parked(self) -> list[Parked]:
        """Return an entry for each task that waits."""
        ...


ENTRIES: dict[int, ref[Entry | WaitTable]] = {}
"""All entries by their ids (`id(entry)`). An object that enters itself has to remove its id when it
leaves: a later object may have the same id.
"""


def enter(entry: Entry | WaitTable) -> None:
    """Enter an object until it is removed, or for the rest of its life."""
    key = id(entry)
    ENTRIES[key] = ref(entry, lambda _: ENTRIES.pop(key, None))


def entries() -> list[Entry]:
    """Return all entries of this process.

    Those of wait tables are first, and then the others in the order in which they were entered.
    Entries whose object was freed are removed from the registry.
    """
    parked: list[Parked] = []
    others: list[Entry] = []
    # A copy, as other threads and dying objects change the registry meanwhile. `copy` is atomic;
    # a list of the items is not, as the garbage collector may run for each of its tuples.
    for key, reference in ENTRIES.copy().items():
        entry: Any = reference()
        # `isinstance(entry, WaitTable)` would take 20 times as long, and there may be thousands of
        # entries.
        if hasattr(entry, "parked"):
            parked += entry.parked()
        elif entry is not None:
            others.append(entry)
        # The object was freed in a block that was never left. Its id may have a new entry by now,
        # which has to stay.
        elif ENTRIES.get(key) is reference:
            ENTRIES.pop(key, None)
    return [*parked, *others]


# -- observers


class Observation(Protocol):
    """One activity, as one observer sees it. Its methods must not raise.

    If an observation also has a method `resumed()`, it is notified of each suspension of a call and
    of the end of each suspension. Otherwise, it is notified of the first suspension only.
    """

    def suspended(self) -> None:
        """Note that a hook's method or an operation suspends for the first time."""

    def ended(self, error: BaseException | None) -> object:
        """Note the end of the activity, and its error."""


class Observer(Protocol):
    """Notified of activities. Its methods must not raise."""

    def started(self, kind: Kind, what: str) -> Observation:
        """Note the start of an activity."""
        ...


class RunObserver(Observer, Protocol):
    """Notified of the activities in one attempt of a run."""

    def attempt_ended(self, error: BaseException | None) -> None:
        """Note the end of the attempt. Called once, in the caller's context."""


class active:
    """A block that may wait, as an entry of the registry: `with active(kind, name): ...`."""

    __slots__ = (
        "__weakref__",
        "_began",
        "_describe",
        "_observations",
        "_observers",
        "kind",
        "name",
        "owner",
        "task",
    )

    def __init__(
        self,
        kind: Kind,
        name: str,
        describe: Callable[[], Awaited | None] | None = None,
        owner: object = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Prepare the block of an activity.

        Args:
            kind: the kind of the activity.
            name: the name of the activity.
            describe: returns what the activity waits for, for the reports of `why`. By default,
                these show only the activities inside of this one.
            owner: the monitored session that the activity is part of.
            observers: notified of the start and the end of the activity.
        """
        self.kind: Kind = kind
        self.name: str = name
        self.owner: object = owner
        self._describe = describe
        self._observers = observers

    def __enter__(self) -> None:
        # In Python 3.11, `current_task` is slower if it has to look up the loop itself.
        self.task: asyncio.Task[Any] | None = asyncio.current_task(asyncio.get_running_loop())
        self._began: float = monotonic()
        ENTRIES[id(self)] = ref(self)
        self._observations = [
            observer.started(self.kind, self.name) for observer in self._observers
        ]

    def __exit__(
        self,
        _: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        del ENTRIES[id(self)]
        for observation in self._observations:
            observation.ended(error)

    def awaited(self) -> Awaited | None:
        if self._describe is None:
            return None
        awaited = self._describe()
        if awaited is None or awaited.secs is not None:
            return awaited
        # By default, the thing has been awaited since the block was entered.
        return awaited._replace(secs=monotonic() - self._began)


@types.coroutine
def observed_call(
    call: Callable[..., Awaitable[Any]],
    kind: Kind,
    what: str,
    observers: Sequence[Observer],
    /,
    *args: Any,
    **keywords: Any,
) -> Generator[Any, Any, Any]:
    """Await `call(*args, **keywords)`, and notify `observers` of its start, suspension and end.

    Args:
        call: the function that is called.
        kind: the kind of the activity.
        what: the name of the activity.
        observers: the observers.
        args: the arguments of the call.
        keywords: the keyword arguments of the call.
    """
    observations = [observer.started(kind, what) for observer in observers]
    error: BaseException | None = None
    try:
        coro: Any = call(*args, **keywords)
        kind_of_coro: Any = type(coro)  # pyright: ignore[reportUnknownVariableType]
        # Only a coroutine has `send` and `throw`, with which it is resumed step by step.
        if kind_of_coro is not types.CoroutineType:
            coro = as_coroutine(coro)
        return (yield from _resumed_by_hand(coro, observations))
    except BaseException as raised:
        error = raised
        raise
    finally:
        for observation in observations:
            observation.ended(error)
        # The traceback of the error refers to this frame, which must not refer to the error.
        del error


def _resumed_by_hand(
    coro: Any,
    observations: list[Observation],
) -> Generator[Any, Any, Any]:
    """Await a coroutine step by step, and notify `observations` when it first suspends.

    Observations with a method `resumed` are notified of each suspension, and of the end of each.
    """
    notified: list[Any] = observations
    # The error, such as a cancel, with which the awaiting task has resumed the coroutine.
    error: BaseException | None = None
    while True:
        try:
            awaited = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            # The traceback of the error refers to this frame, which must not refer to the error.
            error = None
        for observation in notified:
            observation.suspended()
        try:
            yield awaited
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as thrown:
            error = thrown
        # Observations without `resumed` are notified of the first suspension only.
        notified = [observation for observation in notified if hasattr(observation, "resumed")]
        for observation in notified:
            observation.resumed()


async def as_coroutine(awaitable: Awaitable[T]) -> T:
    """Await an awaitable, for code that needs a coroutine."""
    return await awaitable


# -- the run of the current code


class RunOwner(Protocol):
    """A session, as the code of its runs sees it.

    Attributes:
        grace_secs: how long a cancelled run waits for calls that do not end immediately.
    """

    grace_secs: float

    def until(self, awaitable: Awaitable[T], /) -> Awaitable[T]:
        """Return a wait for an awaitable, which a stop of the session ends."""
        ...


class RunScope:
    """A run, which is stored in the context of its code (`current_scope`).

    Its attempts are the first one, and one after each recovery.
    """

    # Each run makes an object. Defaults that few runs change are attributes of the class, which
    # cost no assignment.
    active: bool = True
    """Whether the run has not ended."""
    runner: int = 0
    """The `id()` of the task that has called `run`."""
    committed: bool = False
    """Whether an attempt of the run has been committed."""
    result: Any = None
    """The result of an attempt that failed after its commit."""
    observers: tuple[RunObserver, ...] = ()
    """The observers of the current attempt. A hook adds its own in `before_run`."""
    attempt: Any = None
    """The run context of the current attempt (`SessionRunContext`), if the session has hooks."""

    def __init__(
        self,
        session: RunOwner | None,
        publisher: object,
        outer: RunScope | None,
    ) -> None:
        """Make the scope of a run.

        Args:
            session: the session of the run, or None for a run of no session.
            publisher: the publisher whose steps the run publishes, for reports.
            outer: the run that has started this run, or None.
        """
        self.session = session
        self.publisher = publisher
        self.outer = outer

    def end_attempt(self, error: BaseException | None = None) -> None:
        """End an attempt: it accepts no more effects, and its observers are notified.

        Args:
            error: the error of the attempt, or None if it has succeeded.
        """
        if self.attempt is not None:
            self.attempt.accepts_effects = False
            self.attempt = None
        observers = self.observers
        self.observers = ()
        for observer in observers:
            observer.attempt_ended(error)


current_scope: ContextVar[RunScope | None] = ContextVar("aiohooks_run", default=None)
"""The run of the current context.

The run may have ended: a task keeps the context in which it was started.
"""


class assigned(Generic[T]):
    """A block in which a context variable has a value: `with assigned(variable, value): ...`.

    This is a class, as `contextlib.contextmanager` would set the traceback of an error that the
    block raises, which fails for an error that is a frozen dataclass.
    """

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def current_run() -> RunScope | None:
    """Return the innermost active run that this code is part of, or None.

    A run that has ended stays in the contexts of tasks that it has started.
    """
    scope = current_scope.get()
    while scope is not None and not scope.active:
        scope = scope.outer
    return scope


def leave_run() -> None:
    """Remove the current context from its run, for a task in the background."""
    current_scope.set(None)


def begin_run(session: RunOwner | None, publisher: object) -> RunScope:
    """Make the current context part of a new run.

    Tasks that the run starts keep its scope in their contexts, where it is inactive after the run.
    """
    outer = current_scope.get()
    # Hot path: usually the run in the context is active, or there is none. If it has ended,
    # `current_run` finds the nearest run around it that is active.
    if outer is not None and not outer.active:
        outer = current_run()
    scope = RunScope(session, publisher, outer)
    current_scope.set(scope)
    return scope


# -- reports in the log

logger = logging.getLogger("aiohooks")


class WaitLog:
    """Reports when the oldest of several waits has lasted `secs`, but only every `pause_secs`.

    `begin` and `end` note each wait. If there is only one wait, use the log as its block: `with
    WaitLog(...): ...`.
    """

    def __init__(
        self,
        secs: float,
        report: Callable[[float], object],
        pause_secs: float | None = None,
    ) -> None:
        """Start with no waits.

        Args:
            secs: after how many seconds a wait is reported.
            report: gets the seconds that the oldest wait has lasted.
            pause_secs: the pause between reports, of the same or other waits; by default `secs`.
        """
        self._secs = secs
        self._report = report
        self._pause_secs = secs if pause_secs is None else pause_secs
        self._clock = current_clock()
        # When each wait began, the oldest first.
        self._since: dict[object, float] = {}
        self._reported_at = -math.inf
        self._timer = NO_TIMER

    def begin(self, wait: object) -> None:
        """Note that a wait begins."""
        if not self._since:
            self._timer = self._clock.call_later(self._secs, self._check)
        self._since[wait] = self._clock.now()

    def end(self, wait: object) -> None:
        """Note that a wait has ended. A wait that has not begun is ignored."""
        self._since.pop(wait, None)
        if not self._since:
            self._timer.cancel()

    # `contextlib.contextmanager` would set the traceback of an error that the block raises, which
    # fails for a frozen dataclass.
    def __enter__(self) -> None:
        self.begin(self)

    def __exit__(self, *_: object) -> None:
        self.end(self)

    def _check(self) -> None:
        """Report the oldest wait if that is due, and check again when the next report is due.

        There is at least one wait: without waits, there is no timer for this check.
        """
        now = self._clock.now()
        oldest = next(iter(self._since.values()))  # in the order of their beginnings
        # The oldest wait may have begun after this timer was set.
        secs_left = max(oldest + self._secs, self._reported_at + self._pause_secs) - now
        if secs_left <= 0:
            secs_left = self._pause_secs
            self._reported_at = now
            self._report(now - oldest)
        self._timer = self._clock.call_later(secs_left, self._check)


def wait_log(describe: Callable[[], str]) -> WaitLog:
    """Return a log that warns of waits inside of the library: after a second, then once a minute.

    Args:
        describe: returns the text that names the awaited thing. It is called for each report.
    """

    def report(secs: float) -> None:
        logger.warning("a caller has waited %s for %s", secs_text(secs), describe())

    return WaitLog(1.0, report, pause_secs=60.0)
