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
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol
from weakref import ref

from aiohooks._core.coroutines import as_coroutine

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


def _resumed_by_hand(coro: Any, observations: list[Observation]) -> Generator[Any, Any, Any]:
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
