"""The registry of activity: the waits of all tasks of this process, with names for reports.

A block that may wait enters it (`with active("save", "save of step 7"):`), and so does a group of
calls (`Calls`) when it begins to wait. Calls that do not wait never enter it. Status, `why`, the
watchdog and the warnings about long waits read it; nothing else does, and nothing is decided by it.

    active      enters a block
    enter       enters an object for the rest of its life
    ENTRIES     where objects that leave by themselves enter, too
    entries     everything that is entered, outermost first
    Awaited     the description of something that is waited for

The registry has weak references, and an entry holds names and functions that return names: no
value of a run lives longer because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol
from weakref import ref

from aiohooks._core.observers import Kind, Observer

Needs = Literal["all", "any", "perhaps"]


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
        """Return the description for reports; None if its parts say more."""
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
    """Return all entries of this process: first those of wait tables, then the others as entered.

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
