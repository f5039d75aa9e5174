"""The registry of activity: the waits of all tasks of this process, with names for reports.

A block that may wait enters it (`with active("save", "save of step 7"):`), and so does a group of
calls (`Calls`) when it begins to wait. Calls that do not wait never enter it. Status, `why`, the
watchdog and the warnings about long waits read it. Nothing else does, and nothing is decided by it.

    active      enters a block
    enter       enters an object for the rest of its life
    ENTRIES     where objects that leave by themselves enter, too
    entries     everything that is entered, outermost first
    Awaited     the description of something that is waited for

Observers are notified of the start and the end of activities that take time. An activity checks
whether there are any before it begins. The observers of a run are in its scope
(`RunScope.observers`), and the observers of other activities of a session in
`Coordinator.observers`.

    active          notifies the observers of a block
    observed_call   notifies the observers of a call that is awaited

The registry has weak references, and an entry holds names and functions that return names: no
value of a run lives longer because of it.

The run that code is part of is here as well. A hook that calls `run` of its own session gets an
error instead of a deadlock, and a wait for a step knows the publisher that it blocks.

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
        needs: whether it waits for "all" in `by`, for "any", or "perhaps" for some of them.
        ends: whether nothing inside the block needs to be reported.
        hook: the hook that was called.
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
        """The monitored session that it is part of."""
        ...

    def awaited(self) -> Awaited | None:
        """Return the description for reports, or None if its parts say more."""
        ...


class Parked(NamedTuple):
    """An entry of a `WaitTable`."""

    task: asyncio.Task[Any] | None
    describe: Callable[[], Awaited]
    owner: object = None

    def awaited(self) -> Awaited:
        return self.describe()


class WaitTable(Protocol):
    """Something that thousands of tasks wait for: it enters itself once, and not each wait."""

    def parked(self) -> list[Parked]:
        """Return an entry for each task that waits."""
        ...


ENTRIES: dict[int, ref[Entry | WaitTable]] = {}
"""All entries by their ids. An object that enters itself removes its id when it leaves: another one
with this id would get its place.
"""


def enter(entry: Entry | WaitTable) -> None:
    """Enter an object until it is removed, or for the rest of its life."""
    key = id(entry)
    ENTRIES[key] = ref(entry, lambda _: ENTRIES.pop(key, None))


def entries() -> list[Entry]:
    """Return all entries of this process, of wait tables first, then the others as entered.

    Entries whose object has died are removed.
    """
    parked: list[Parked] = []
    others: list[Entry] = []
    # A copy, as other threads and dying objects change the registry meanwhile. `copy` is atomic;
    # a list of the items is not, as the garbage collector may run for each of its tuples.
    for key, reference in ENTRIES.copy().items():
        entry: Any = reference()
        # The check of a protocol would take 20 times as long, for each of thousands of entries.
        if hasattr(entry, "parked"):
            parked += entry.parked()
        elif entry is not None:
            others.append(entry)
        elif ENTRIES.get(key) is reference:  # of a block that was never left
            ENTRIES.pop(key, None)
    return [*parked, *others]


# -- observers


class Observation(Protocol):
    """One activity, as one observer sees it. Its methods must not raise.

    An observation that has a method `resumed()`, too, is notified of each suspension of a call and
    of the end of each suspension, and not only of the first suspension.
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
        """Prepare the entry of a block.

        Args:
            kind: the kind of the activity.
            name: its name.
            describe: returns its description, for `why`. By default only its parts are described.
            owner: the monitored session that it is part of.
            observers: notified of the beginning and the end.
        """
        self.kind: Kind = kind
        self.name: str = name
        self.owner: object = owner
        self._describe = describe
        self._observers = observers

    def __enter__(self) -> None:
        # In Python 3.11 `current_task` takes longer to look up the loop itself.
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
    """Await `call(*args, **keywords)`, and notify `observers` of it."""
    observations = [observer.started(kind, what) for observer in observers]
    error: BaseException | None = None
    try:
        coro: Any = call(*args, **keywords)
        kind_of_coro: Any = type(coro)  # pyright: ignore[reportUnknownVariableType]
        if kind_of_coro is not types.CoroutineType:
            coro = as_coroutine(coro)
        return (yield from _resumed_by_hand(coro, observations))
    except BaseException as raised:
        error = raised
        raise
    finally:
        for observation in observations:
            observation.ended(error)
        # The traceback of the error refers to this frame.
        del error


def _resumed_by_hand(
    coro: Any,
    observations: list[Observation],
) -> Generator[Any, Any, Any]:
    """Await a coroutine step by step, and notify `observations` when it first suspends.

    Those with a method `resumed` are notified of each suspension, and of the end of each.
    """
    notified: list[Any] = observations
    error: BaseException | None = None
    while True:
        try:
            awaited = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            # The traceback of the error refers to this frame.
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
        # The others are notified of the first suspension alone.
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
    """A run in progress, stored in its context.

    It has the session, the publisher, and the enclosing run.
    """

    # Defaults that few runs change are attributes of the class, as each run makes an object.
    active: bool = True
    runner: int = 0
    """The id of the caller's task."""
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
        """Make the scope of a run of `session`, or of no session, nested in the run `outer`."""
        self.session = session
        self.publisher = publisher
        self.outer = outer

    def end_attempt(self, error: BaseException | None = None) -> None:
        """End an attempt: it accepts no more effects, and its observers are notified."""
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

    It is a class because `contextlib.contextmanager` sets the traceback of an error that the block
    raises, which fails if the error is frozen.
    """

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def current_run() -> RunScope | None:
    """Return the innermost active run that this code is part of."""
    scope = current_scope.get()
    while scope is not None and not scope.active:
        scope = scope.outer
    return scope


def leave_run() -> None:
    """Remove the current context from its run, for a task in the background."""
    current_scope.set(None)


def begin_run(session: RunOwner | None, publisher: object) -> RunScope:
    """Make the current context part of a new run.

    The scope stays in the context after the run, and is inactive then.
    """
    outer = current_scope.get()
    if outer is not None and not outer.active:
        outer = current_run()
    scope = RunScope(session, publisher, outer)
    current_scope.set(scope)
    return scope


# -- reports in the log

logger = logging.getLogger("aiohooks")


class WaitLog:
    """Reports when the oldest of several waits has lasted `secs`, but only every `pause_secs`.

    As a block, it is itself the only wait.
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
        self._since: dict[object, float] = {}  # by wait, the oldest first
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
        now = self._clock.now()
        oldest = next(iter(self._since.values()))
        secs_left = max(oldest + self._secs, self._reported_at + self._pause_secs) - now
        if secs_left <= 0:
            secs_left = self._pause_secs
            self._reported_at = now
            self._report(now - oldest)
        self._timer = self._clock.call_later(secs_left, self._check)


def wait_log(describe: Callable[[], str]) -> WaitLog:
    """Return a log of waits that may not end: after a second, and then once a minute.

    `describe` returns the text that names the oldest wait. It is called for each report.
    """

    def report(secs: float) -> None:
        logger.warning("a caller has waited %s for %s", secs_text(secs), describe())

    return WaitLog(1.0, report, pause_secs=60.0)
