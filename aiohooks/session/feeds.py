"""The feeds of the loops of a session: where elements come from, and what becomes of each.

    IterableSource   an iterable, asked when a step begins
    QueueSource      a queue
    ReaderSource     read by a task of the session: async, prefetched, in a worker thread, or with
                     a state of their own
    SessionFeeds     the sources of all loops of a session, over its recoveries

An element that is taken is settled once: it is used if its run is committed, and else the next
element again. One whose feeds a recovery has restored is neither, as these give it again.
"""

from __future__ import annotations

import abc
import asyncio
import copy
import itertools
import operator
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast
from weakref import WeakSet

from aiohooks._core.activity import Awaited, active, awaited_tasks
from aiohooks._core.cancel import current_task, to_thread, wait_done
from aiohooks._core.coroutines import close_unawaited
from aiohooks._core.reports import logger
from aiohooks._core.validate import checked_int
from aiohooks._core.waiters import Waiters
from aiohooks.checkpoint.stateful import Stateful, is_stateful
from aiohooks.errors import (
    FeedsLostError,
    InvalidArgumentError,
    StopRequestedError,
    add_note,
    raise_unchanged,
    safe_repr,
)
from aiohooks.graph.session import Session, was_fed
from aiohooks.session.coordinator import Coordinator, LastingWait, Producer, Producers
from aiohooks.session.turns import Turns

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored

_END: Any = object()
# Since Python 3.13.
_QueueShutDown: type[Exception] | tuple[()] = getattr(asyncio, "QueueShutDown", ())
_HOW_TO_KEEP_FEEDS = (
    "give the loop feeds with a state_dict, and track them in the Scaffold; or, where nothing but"
    ' variables changes, use RecoveryPolicy(restore="memory")'
)

Feeds: TypeAlias = AsyncIterable[Any] | Iterable[Any] | asyncio.Queue[Any]
"""What the runs of a loop are fed with, one element each."""
WaitForFeed = Callable[..., Awaitable[None]]
"""Calls and awaits what gives the next element, until a stop, a failure, the end of its producers
or a drain.
"""


class FeedsWentBack(BaseException):
    """Ends a run whose feeds a recovery has restored: its element comes again, behind those that
    were used before it.
    """


class SessionFeeds:
    """The sources of all loops of one session, over its recoveries."""

    def __init__(self, coordinator: Coordinator, turns: Turns) -> None:
        self.coordinator: Coordinator = coordinator
        self.turns: Turns = turns
        self.session: Session | None = None
        """The raw session, unless it is being replaced."""
        self.tracked: Mapping[str, object] = {}
        """The tracked objects of the latest raw session."""
        self.loops: WeakSet[object] = WeakSet()
        """The loops of steps that have begun and not ended; one that was left is not referred to
        any more.
        """
        self.readers: list[ReaderSource] = []
        """The sources that a task reads."""
        self.sources: WeakSet[Source] = WeakSet()
        self._kept: set[Source] = set()
        """The sources with elements that loops have left for another loop over the same feeds."""
        self.went_back: set[asyncio.Task[Any]] = set()
        """The tasks whose element a recovery has taken back, until their run has ended."""
        self.lost_step: int = 0
        """The last step that used an element which does not come again."""
        self._reached = -1
        """The last step before a recovery, or -1."""

    # -- the sources

    def source_for(
        self, feeds: Feeds | None, producer: Producer | None, prefetch: int, *, thread: bool
    ) -> Source | None:
        """Return the source of a loop with these options of `AsyncMonitoredSession.steps`; None if
        it is not fed.
        """
        producers = self.coordinator.checked_producers(producer)
        prefetch = checked_int(prefetch, "prefetch")
        _check_options(feeds, producer, prefetch, thread=thread)
        if feeds is None:
            return None
        earlier = self._earlier(feeds)
        if isinstance(feeds, asyncio.Queue):
            return QueueSource(self, feeds, earlier, producers)
        if _has_ended(feeds) and not (earlier and earlier.has_rest):
            raise InvalidArgumentError(
                f"feeds is {feeds!r}, which has ended; a generator gives its elements once: make a"
                " new one"
            )
        if isinstance(earlier, ReaderSource):
            earlier.set_options(prefetch, thread=thread)
            return earlier
        if isinstance(feeds, Iterable) and not (prefetch or thread or is_stateful(feeds)):
            return IterableSource(self, feeds, earlier)
        if prefetch and not _is_among(feeds, self.tracked.values()):
            self._check_prefetched(feeds, prefetch)
        if earlier and earlier.unused:
            raise InvalidArgumentError(
                f"feeds is {safe_repr(feeds)}, of which a loop without prefetch= and thread= has"
                f" taken {len(earlier.left)} that no step has used: use them first, in another loop"
                " without"
            )
        return ReaderSource(self, feeds, prefetch, thread=thread)

    def _earlier(self, feeds: object) -> Source | None:
        """Return the source of another loop over feeds that continue where it has left them: they
        do not begin with each loop.
        """
        if isinstance(feeds, (asyncio.Queue, Iterator, AsyncIterator)) or is_stateful(feeds):
            for source in self.sources:
                if source.feeds is feeds and not source.is_used_up:
                    return source
        return None

    def _check_prefetched(self, feeds: object, prefetch: int) -> None:
        """Raise if feeds that are not tracked may take elements from a tracked object."""
        own = [feeds, *(source.feeds for source in self.sources)]
        loaders = [
            name
            for name, value in self.tracked.items()
            if _is_loader(value) and not _is_among(value, own)
        ]
        if loaders:
            raise InvalidArgumentError(
                f"prefetch is {prefetch}, and feeds is {safe_repr(feeds)}, which is not tracked,"
                f" while {', '.join(map(repr, loaders))} is tracked and iterable: elements that the"
                " feeds have taken ahead of it would be skipped when the run is resumed; give the"
                " tracked object itself as feeds=, or leave prefetch= out"
            )

    def keep(self, source: Source) -> None:
        """Keep the elements of a loop that has ended, for another one over the same feeds."""
        self._kept = {kept for kept in (*self._kept, source) if kept.has_rest}

    @property
    def unused(self) -> int:
        """The number of elements that were taken and not used."""
        return sum({id(source.left): len(source.left) for source in self.sources}.values())

    def is_tracked(self, source: Source) -> bool:
        """Return whether a recovery that restores the session restores these feeds."""
        return _is_among(source.feeds, self.tracked.values())

    def state_of(self, stateful: Stateful) -> Any:
        """Return the state of a tracked object: of feeds that are prefetched, the one behind what
        was used.
        """
        for reader in self.readers:
            if _is_among(stateful, (reader.feeds,)):
                return reader.used_state()
        self._warn_if_skipped(stateful)
        return stateful.state_dict()

    def _warn_if_skipped(self, stateful: object) -> None:
        """Warn if the state of a tracked object may count elements that no step has used."""
        sources = [*self.sources]
        if not _is_loader(stateful) or _is_among(stateful, [source.feeds for source in sources]):
            return
        others = [source for source in sources if not is_stateful(source.feeds)]
        unused = sum(len(source.left) + source.is_reading for source in others)
        if unused:
            logger.warning(
                "%s: no step has used %d of the elements that were taken; if they come from %s,"
                " whose state counts them, a resumed run skips them: give it itself as feeds=",
                self.coordinator.requests.label,
                unused,
                safe_repr(stateful),
            )

    # -- the element of a run

    def uses_tracked_feeds(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether the run of a task has an element of tracked feeds."""
        return any(task in reader.in_use and self.is_tracked(reader) for reader in self.readers)

    def raise_if_element_went_back(self) -> None:
        """Raise `FeedsWentBack` if a recovery by another task has restored the feeds of the run."""
        if current_task() in self.went_back:
            raise FeedsWentBack

    def keep_element_of_run(self) -> None:
        """Count the element of the run as used: the restored checkpoint has its step."""
        self.went_back.discard(current_task())

    # -- recoveries

    def note_loss(self, session: object, step: int) -> None:
        """Note how far a session has come that is about to be replaced."""
        self._reached = max(self._reached, step)
        if was_fed(session) and not any(map(self.is_tracked, self.readers)):
            self.lost_step = self._reached  # fed by hand, or by a hook
        self.session = None

    async def stop_reading(self) -> None:
        """Stop reading those whose state is about to be restored; they are read on after
        `continue_reading`.
        """
        for reader in tuple(self.readers):
            await reader.stop_reading()

    def continue_reading(self) -> None:
        """Read on for those who wait, from the state that the feeds have now."""
        for reader in self.readers:
            reader.continue_reading()

    def end_waits_without_session(self) -> None:
        """Let the waits for feeds, which nothing reads, recover or fail: a recovery was cancelled,
        or has given up.
        """
        waits = self.coordinator.requests.waits
        if any(isinstance(wait, LastingWait) for wait in waits):
            self.coordinator.owner.start_recovery()

    def note_new_session(
        self,
        session: Session,
        on_lost_feeds: Literal["log", "raise"],
        recovering_from: BaseException | None,
    ) -> None:
        """Take back what is in use if the feeds were restored, and report what has become of the
        steps.
        """
        self.session = session
        self.tracked = session.tracked
        restored = session.restored
        tracked = [reader for reader in self.readers if self.is_tracked(reader)]
        if restored is not None:
            for reader in tracked:
                self.went_back.update(reader.go_back())
        if self._reached < 0:
            return  # the first session
        if restored is None:
            self._report_kept_objects(session)
        else:
            self._report_undone_steps(
                restored,
                bool(tracked),
                on_lost_feeds,
                recovering_from,
            )

    def _report_undone_steps(
        self,
        restored: Restored,
        are_tracked: bool,
        on_lost_feeds: Literal["log", "raise"],
        recovering_from: BaseException | None,
    ) -> None:
        """Log how many steps a recovery has undone, or raise if their feeds are lost.

        Args:
            restored: what the new session was restored from.
            are_tracked: whether feeds were restored, too.
            on_lost_feeds: whether to raise if the feeds of these steps are lost.
            recovering_from: the error that the session recovers from.

        Raises:
            FeedsLostError: the feeds are lost.
        """
        step = restored.checkpoint.step
        undone = self._reached - step
        are_lost = self.lost_step > step
        text = (
            f"went back from step {self._reached} to step {step}, that of"
            f" {restored.checkpoint.path}: {undone} step{'s' if undone > 1 else ''}"
        )
        self._reached = step
        self.lost_step = min(self.lost_step, step)
        if undone <= 0:
            return
        if are_lost:
            text += f", and with them their feeds, are gone; {_HOW_TO_KEEP_FEEDS}"
            if on_lost_feeds == "raise":
                raise FeedsLostError(f"the recovery {text}") from recovering_from
        elif are_tracked:
            text += " are undone, and their feeds come again"
        else:
            text += " are undone"
        logger.warning("%s: %s", self.coordinator.requests.label, text)

    def _report_kept_objects(self, session: Session) -> None:
        fed = [reader.feeds for reader in self.readers]
        kept = [repr(name) for name, value in session.tracked.items() if not _is_among(value, fed)]
        if kept:
            logger.warning(
                "%s: continues with the tracked objects %s as the failed run has left them",
                self.coordinator.requests.label,
                ", ".join(kept),
            )


def _is_among(value: object, objects: Iterable[object]) -> bool:
    return any(value is other for other in objects)


def _is_loader(value: Any) -> bool:
    """Return whether a tracked object gives elements; a model may be iterable, and has parts."""
    if isinstance(value, (AsyncIterator, Iterator)):
        return True
    return not hasattr(value, "__getitem__") and isinstance(value, (AsyncIterable, Iterable))


def _is_iterable(feeds: object) -> bool:
    """Return whether feeds give several elements: a mapping is one element."""
    if isinstance(feeds, (Mapping, str, bytes)):
        return False
    return isinstance(feeds, (AsyncIterable, Iterable))


def _has_ended(feeds: Any) -> bool:
    """Return whether the feeds are a generator that has ended."""
    return getattr(feeds, "gi_frame", feeds) is None or getattr(feeds, "ag_frame", feeds) is None


def _check_options(
    feeds: Feeds | None, producer: Producer | None, prefetch: int, *, thread: bool
) -> None:
    """Raise `InvalidArgumentError` for feeds, or options, that make no sense."""
    is_queue = isinstance(feeds, asyncio.Queue)
    is_async = isinstance(feeds, AsyncIterable)
    is_iterable = _is_iterable(feeds)
    if (prefetch or thread) and (not is_iterable or (thread and is_async)):
        raise InvalidArgumentError(
            f"prefetch is {prefetch}, thread is {thread}, and feeds is {safe_repr(feeds)};"
            " prefetch is for feeds to iterate over, thread=True for those that block; a queue"
            " holds what its producer puts in ahead of the runs"
        )
    if producer is not None and not is_queue:
        # What a generator does besides waiting for its producer, with an element that it has
        # taken, must not be cut off.
        raise InvalidArgumentError(
            f"producer is {safe_repr(producer)}, and feeds is {safe_repr(feeds)}; it is for an"
            " asyncio.Queue: an async generator waits with `await session.until(queue.get(),"
            " producer=...)`"
        )
    if not (is_iterable or is_queue or feeds is None):
        close_unawaited(feeds)
        raise InvalidArgumentError(
            f"feeds is {safe_repr(feeds)}; give something to iterate over, sync or async, that has"
            " an element for each step, or an asyncio.Queue"
        )


class Source(abc.ABC):
    """Where the elements of a loop come from."""

    waits: bool = True
    """Whether `wait_ready` is to be called before `take`."""
    is_reading: bool = False
    """Whether the feeds were asked for an element that is not among `left` yet."""

    def __init__(self, session: SessionFeeds, feeds: object, earlier: Source | None = None) -> None:
        self.feeds: Any = feeds
        self._session = session
        self._coordinator = session.coordinator
        self._requests = session.coordinator.requests
        self.left: deque[Any] = deque() if earlier is None else earlier.left
        """The elements that were taken and not used, in order; all loops over the same feeds have
        the same.
        """
        session.sources.add(self)

    async def wait_ready(self, wait_for: WaitForFeed) -> None:
        """Wait until `take` has a result. No element is lost if this wait is cancelled."""
        raise NotImplementedError

    @abc.abstractmethod
    def take(self) -> Any:
        """Return the next element; raise `StopAsyncIteration` at the end, or the error of the
        feeds.
        """

    def settle(self, element: Any, *, committed: bool) -> None:
        """Record whether an element is used, because its run is committed, or left."""
        if not committed:
            self.left.appendleft(element)
            return
        session = self._session.session
        if session is not None:
            self._session.lost_step = session.committed_step

    @property
    def is_used_up(self) -> bool:
        """Whether another loop over the same feeds begins anew."""
        return False

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order."""
        return [*self.left]

    @property
    def has_rest(self) -> bool:
        """Whether another loop over the same feeds gets something that this source has kept."""
        return bool(self.left)

    def _is_draining(self, feeds: object) -> bool:
        if self._requests.drain_reason is None:
            return False
        logger.info(
            "%s: draining: no other element is taken of %s", self._requests.label, safe_repr(feeds)
        )
        return True

    def log_after_stop(self, error: Exception) -> None:
        """Log an error of the feeds, if a stop was requested before: they end then. Else raise it.

        What has stopped the session has often stopped the feeds, too, such as a signal to all
        processes of a group.
        """
        if not self._coordinator.should_stop():
            raise_unchanged(error)
        logger.error(
            "%s: the feeds %s failed, and the session, which stops, ends as usual: %s",
            self._requests.label,
            safe_repr(self.feeds),
            safe_repr(error),
            exc_info=error,
        )


class IterableSource(Source):
    """An iterable, which is asked for an element when a step begins, and in a drain no more."""

    waits = False

    def __init__(self, session: SessionFeeds, feeds: Iterable[Any], earlier: Source | None) -> None:
        super().__init__(session, feeds, earlier)
        self._iterator = iter(feeds)

    def take(self) -> Any:
        if self.left:
            return self.left.popleft()
        if self._is_draining(self._iterator):
            raise StopAsyncIteration
        try:
            if not self._coordinator.observers:
                return next(self._iterator)
            with active("feed", "next feed", observers=self._coordinator.observers):
                return next(self._iterator)
        except StopIteration:
            raise StopAsyncIteration from None
        except Exception as error:
            self.log_after_stop(error)
            raise StopAsyncIteration from None


class QueueSource(Source):
    """A queue; counts in it the elements that were used."""

    def __init__(
        self,
        session: SessionFeeds,
        queue: asyncio.Queue[Any],
        earlier: Source | None,
        producers: Producers | None,
    ) -> None:
        super().__init__(session, queue, earlier)
        self._producers = producers
        self._ended = False
        self._due: int | None = None
        """In a drain, how many elements may have been put, or waited for room, when it began."""

    @property
    def is_ready(self) -> bool:
        return bool(self.left) or self._ended

    async def wait_ready(self, wait_for: WaitForFeed) -> None:
        requests = self._requests
        while not self.is_ready:
            is_draining = requests.drain_reason is not None
            if is_draining:
                self._end_producers()
            if self._ended:
                return
            if not self.feeds.empty():
                self.left.append(self.feeds.get_nowait())
                return
            producers = self._producers
            if is_draining and producers is None:
                producers = ()  # whoever they are, the queue ends when it is empty
            try:
                await wait_for(self._get, producers, drain=not is_draining)
            except StopRequestedError:
                if is_draining or requests.stopped or requests.drain_reason is None:
                    raise

    def _end_producers(self) -> None:
        """In a drain, end the producers when they have put what they waited to put.

        Producers that are not named cannot be ended: no more is taken than tasks may have waited to
        put.
        """
        due = self._due
        if due is None:
            waiting = self._producers or asyncio.all_tasks()
            due = len(waiting) + (0 if self._producers else self.feeds.qsize())
            self._due = due
        if due > 0 and not self.feeds.empty():
            return
        self._coordinator.end_producers(self._producers or (), self.feeds)
        if self._producers is None and not self.feeds.empty():
            self._ended = self._is_draining(self.feeds)

    async def _get(self) -> None:
        try:
            self.left.append(await self.feeds.get())
        except _QueueShutDown:
            self._ended = True

    def take(self) -> Any:
        if not self.left:
            raise StopAsyncIteration
        if self._due is not None:
            self._due -= 1
        return self.left.popleft()

    def settle(self, element: Any, *, committed: bool) -> None:
        super().settle(element, committed=committed)
        if not committed:
            return
        try:
            self.feeds.task_done()
        except ValueError as error:
            add_note(
                error,
                "the session calls task_done of its queue of feeds when a step is complete; leave"
                " it out elsewhere",
            )
            raise


class _Taken(NamedTuple):
    """An element, the state of the feeds before it, if they have any, and its place in their
    order.
    """

    element: Any
    before: Any
    number: int


_place = operator.attrgetter("number")


class ReaderSource(Source):
    """Reads feeds in one task of the session, in order, up to `ahead` elements further than was
    asked for.

    The task begins with the first element. It ends with the feeds, in a drain before the next
    element, at a stop or with the session, and closes the iterator. Feeds that are `Stateful` are
    then set back to the last element that was used, so that their state counts no other. The
    elements of others stay, for another loop over the same steps. Whoever restores a checkpoint
    restores these feeds, too: what was taken before then is not used, as it comes again.
    """

    feeds: AsyncIterable[Any] | Iterable[Any]
    left: deque[_Taken]

    def __init__(
        self,
        session: SessionFeeds,
        feeds: AsyncIterable[Any] | Iterable[Any],
        ahead: int,
        *,
        thread: bool,
    ) -> None:
        super().__init__(session, feeds)
        self._stateful = cast("Stateful", feeds) if is_stateful(feeds) else None
        self._ahead = ahead
        self._thread = thread
        self._read_state: Any = None
        """The state of the feeds behind the element that was read last."""
        self._number = 0
        """The place of the element that is read next."""
        self.in_use: dict[asyncio.Task[Any], _Taken] = {}
        """The elements that runs of these tasks use, or are about to."""
        self._failure: Exception | None = None
        """The error of the feeds, until a loop gets it."""
        self._ended = False
        self._restoring = False
        self._thread_reads = False
        self._reader: asyncio.Task[None] | None = None
        self._asking = 0
        """How many wait for the next element."""
        self._changes = Waiters()
        """Of the reader, which waits for room, and of those who wait for elements; each looks again
        after a change.
        """

    def set_options(self, ahead: int, *, thread: bool) -> None:
        """Read on as another loop over the same feeds asks for."""
        self._ahead = ahead
        self._thread = thread
        self._changes.wake()

    @property
    def is_used_up(self) -> bool:
        return self._ended and not self.has_rest and not self.in_use

    @property
    def has_rest(self) -> bool:
        return bool(self.left) or self._failure is not None

    @property
    def unused(self) -> list[Any]:
        return [taken.element for taken in self.left]

    @property
    def own_reader(self) -> asyncio.Task[None] | None:
        """The task that reads, if it reads nothing ahead: no other activity than the wait for the
        next feed.
        """
        return None if self._ahead or self._thread else self._reader

    def _awaited_reader(self) -> Awaited | None:
        return None if self._reader is None else awaited_tasks(self._reader)

    @property
    def is_ready(self) -> bool:
        return self.has_rest or self._ended

    async def wait_ready(self, wait_for: WaitForFeed) -> None:
        while not self.is_ready:  # another task may be faster
            await wait_for(self._wait_ready)

    async def _wait_ready(self) -> None:
        self._asking += 1
        self._changes.wake()
        try:
            while not self.is_ready:
                if self._reader is None and not self._restoring:
                    self._read_state = self._feeds_state()
                    if self not in self._session.readers:
                        self._session.readers.append(self)
                    self._reader = self._coordinator.start_soon(self._read, name="feeds")
                with active("wait", "next feed", self._awaited_reader):
                    await self._changes.wait()
        finally:
            self._asking -= 1

    def take(self) -> Any:
        if not self.left:
            self._changes.wake()
            if self._failure is not None:
                error = self._failure
                self._failure = None
                self.log_after_stop(error)
            # Not before: a recovery may restore feeds that have been read to the end.
            if not self.in_use and self in self._session.readers:
                self._session.readers.remove(self)
            raise StopAsyncIteration
        taken = self.left.popleft()
        self.in_use[current_task()] = taken
        self._changes.wake()
        return taken.element

    def settle(self, element: Any, *, committed: bool) -> None:
        taken = self.in_use.pop(current_task(), None)
        if committed:
            if not self._session.is_tracked(self):
                super().settle(element, committed=True)
            return
        if taken is None:
            return
        self.left.insert(sum(other.number < taken.number for other in self.left), taken)
        if self._reader is None and self._stateful is not None:
            self._set_back(self._stateful)

    def _set_back(self, feeds: Stateful) -> None:
        """Set feeds that are not read now back before the elements that are left.

        An element stays if a loop has taken a later one, which the feeds would give again.
        """
        first = None
        while self.left and self.left[-1].number == self._number - 1:
            first = self.left.pop()
            self._number = first.number
        if first is not None:
            feeds.load_state_dict(first.before)
            self._read_again()

    def _read_again(self) -> None:
        """Read what is behind the state that the feeds have now."""
        self._ended = False
        self._failure = None

    def used_state(self) -> Any:
        """Return the state of the feeds behind what committed runs have used."""
        turns = self._session.turns
        scope = turns.waits.scope
        committed = turns.runner if scope is not None and scope.committed else None
        unused = [taken for task, taken in self.in_use.items() if task is not committed]
        unused.extend(itertools.islice(self.left, 1))
        if unused:
            return min(unused, key=_place).before
        return self._feeds_state() if self._reader is None else self._read_state

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored; they are read anew from there,
        after `continue_reading`.
        """
        if self._stateful is None:
            return
        self._restoring = True
        reader = self._reader
        if reader is None:
            return
        reader.cancel()
        await wait_done([reader], self._coordinator.owner.grace_secs)
        if reader.done():
            self._reader = None  # also if it was cancelled before it began
        self._read_again()

    def go_back(self) -> list[asyncio.Task[Any]]:
        """Note that the feeds were restored; return the tasks whose elements come again."""
        # Feeds that were not restored stay at their end: many begin another pass when they are
        # read there.
        self._ended = False
        self.left.clear()
        tasks = [*self.in_use]
        self.in_use.clear()
        return tasks

    def continue_reading(self) -> None:
        """Read on for those who wait, from the state that the feeds have now."""
        self._restoring = False
        self._changes.wake()

    # -- the task

    async def _read(self) -> None:
        used = False
        try:
            # A stop ends it, but no failure from which the session recovers.
            await self._coordinator.wait_until_ended("next feed", self._read_all(), lasts=True)
            used = True
        except StopRequestedError:
            pass  # the loop that asks for elements gets it as well
        finally:
            self._reader = None
            error = self._failure
            if error is not None and self._coordinator.should_stop():
                self._failure = None
                self.log_after_stop(error)
            if not used and self._stateful is not None:
                # A read that was cut off may have moved the feeds, too.
                self._stateful.load_state_dict(self._read_state)
                self._set_back(self._stateful)

    async def _read_all(self) -> None:
        """Read the elements in one task: what a generator has around its `yield`, such as a time
        limit, belongs to a task.
        """
        try:
            if isinstance(self.feeds, AsyncIterable):
                iterator: Any = aiter(self.feeds)
            else:
                iterator = iter(self.feeds)
            try:
                while await self._read_next(iterator):
                    pass
            finally:
                await self._close(iterator)
        except Exception as error:
            self._note_failure(error)
        self._ended = True
        self._changes.wake()
        # The states of the elements are known until they are used, and an error until it is raised.
        while self.has_rest:
            await self._changes.wait()

    def _note_failure(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        else:
            add_note(self._failure, f"then {safe_repr(error)}")

    async def _read_next(self, iterator: Any) -> bool:
        """Read the next element when there is room for it; return whether there was one."""
        while len(self.left) >= max(self._ahead, bool(self._asking)):
            await self._changes.wait()
        if self._is_draining(self.feeds):
            return False
        read: list[tuple[Any, Any]] = []
        failures: list[Exception] = []

        def read_sync() -> None:
            self._thread_reads = self._thread
            try:
                read.append((next(iterator, _END), self._feeds_state()))
            except Exception as error:
                failures.append(error)
            finally:
                self._thread_reads = False

        self.is_reading: bool = True
        try:
            observers = self._coordinator.observers if self._ahead or self._thread else ()
            with active("prefetch", "take a feed", observers=observers):
                if isinstance(self.feeds, AsyncIterable):
                    read.append((await anext(iterator, _END), self._feeds_state()))
                elif self._thread:
                    await to_thread(read_sync, grace_secs=self._coordinator.owner.grace_secs)
                else:
                    read_sync()
        finally:  # a thread ends with its element or its error, also after a cancel
            self.is_reading = False
            for element, behind in read:
                if element is not _END:
                    self.left.append(_Taken(element, self._read_state, self._number))
                    self._read_state = behind
                    self._number += 1
            for error in failures:
                self._note_failure(error)
            self._changes.wake()
        return bool(read) and read[0][0] is not _END

    async def _close(self, iterator: Any) -> None:
        """Close what was made for this loop, and generators; a thread that has hung still uses its
        iterator.
        """
        is_generator = isinstance(self.feeds, Generator | AsyncGenerator)
        if self._thread_reads or (iterator is self.feeds and not is_generator):
            return
        try:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()
            elif hasattr(iterator, "close"):
                if self._thread:
                    await to_thread(iterator.close, grace_secs=self._coordinator.owner.grace_secs)
                else:
                    iterator.close()
        except Exception as error:
            # It must not replace the cancellation with which a stop ends the reader.
            self._note_failure(error)

    def _feeds_state(self) -> Any:
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
