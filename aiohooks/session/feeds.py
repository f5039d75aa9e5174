"""Where the feeds of a loop come from, and what becomes of them over recoveries.

A source gives the next element, and takes back what a run has not used; `source_of` chooses it.

    PlainFeeds     an iterable, asked when a step begins
    QueueFeeds     a queue
    FeedsAhead     read by a task of the session: ahead of the runs, async, in a worker thread, or
                   with a state of their own
    SessionFeeds   those of all loops of a session: what is set back by a recovery, and what is lost
"""

from __future__ import annotations

import asyncio
import copy
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
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from weakref import WeakSet

from aiohooks._core.calls import Wait
from aiohooks._core.cancel import current_task, to_thread, wait_done
from aiohooks._core.coroutines import close_unawaited
from aiohooks._core.observers import observing
from aiohooks._core.reports import Waiting, logger
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
from aiohooks.session._state import Producer, Producers, SessionState, checked_producers

_END: Any = object()
_QueueShutDown: type[Exception] | tuple[()] = getattr(
    asyncio, "QueueShutDown", ()
)  # since Python 3.13
_HOW_TO_KEEP_FEEDS = (
    "give the loop feeds with a state_dict, and track them in the Scaffold; or, where nothing but"
    ' variables changes, use RecoveryPolicy(restore="memory")'
)

Feeds: TypeAlias = AsyncIterable[Any] | Iterable[Any] | asyncio.Queue[Any]
"""What the runs of a loop are fed with, one element each."""
WaitForFeed = Callable[..., Awaitable[None]]
"""Calls and awaits what gives the next element, until a stop, a failure, the end of its producers,
or a drain.
"""


class SessionFeeds:
    """The feeds of all loops of one session, over its recoveries."""

    def __init__(self, state: SessionState) -> None:
        self.state: SessionState = state
        self.sources: WeakSet[Source] = WeakSet()
        """All sources that are referred to."""
        self.kept: set[Source] = set()
        """Those that a loop has left with elements for another loop over the same feeds."""
        self.ahead: list[FeedsAhead] = []
        """The feeds that a task reads."""
        self.set_back: set[asyncio.Task[Any]] = set()
        """The tasks whose element a recovery has taken back, until their run has ended."""
        self.loops: WeakSet[object] = WeakSet()
        """The loops of steps that have begun and not ended; one that was left is not referred to
        any more.
        """
        self.lost_step: int = 0
        """The last step that used an element which does not come again."""
        self._reached = -1
        """The last step before a recovery, or -1."""

    def earlier(self, feeds: object) -> Source | None:
        """Return the source of another loop over feeds that continue where it has left them: they
        do not begin with each loop.
        """
        if isinstance(feeds, (asyncio.Queue, Iterator, AsyncIterator)) or is_stateful(feeds):
            return next(
                (one for one in self.sources if one.feeds is feeds and not one.is_used_up), None
            )
        return None

    def keep(self, source: Source) -> None:
        """Keep the elements of a loop that has ended, for another one over the same feeds."""
        self.kept = {one for one in (*self.kept, source) if one.unused}

    @property
    def unused(self) -> int:
        """The number of elements that were taken and not used."""
        return sum({id(one.left): len(one.left) for one in self.sources}.values())

    def are_tracked(self, one: FeedsAhead) -> bool:
        """Return whether a recovery that restores the session sets these feeds back."""
        tracked = getattr(
            self.state.session, "tracked", {}
        )  # a session of another class may have none
        return any(each is one.feeds for each in tracked.values())

    def tracked_loaders(self, feeds: object) -> list[str]:
        """Return the names of tracked objects that other feeds may take elements from."""
        tracked: Mapping[str, object] = getattr(self.state.session, "tracked", {})
        own = [feeds, *(source.feeds for source in self.sources)]
        return [
            name
            for name, value in tracked.items()
            if _is_loader(value) and not any(value is used for used in own)
        ]

    def state_of(self, one: Stateful) -> Any:
        """Return the state of a tracked object: of feeds that are taken ahead, the one behind what
        was used.
        """
        known = next((feeds for feeds in self.ahead if feeds.knows_state_of(one)), None)
        return one.state_dict() if known is None else known.used_state()

    def note_loss(self, session: object, step: int) -> None:
        """Note how far a session has come that is about to be replaced."""
        self._reached = max(self._reached, step)
        if was_fed(session) and not any(map(self.are_tracked, self.ahead)):
            self.lost_step = self._reached  # fed by hand, or by a hook

    async def stop_reading(self) -> None:
        """Stop reading those whose state is about to be restored; they are read on after
        `continue_reading`.
        """
        for feeds in tuple(self.ahead):
            await feeds.stop_reading()

    def continue_reading(self) -> None:
        """Read on for those who wait, from the state that the feeds have now."""
        for feeds in self.ahead:
            feeds.continue_reading()

    def recover_for_waits(self) -> None:
        """Let those recover, or fail, who wait for feeds, which nothing reads: a recovery was
        cancelled, or has given up.
        """
        for wait in tuple(self.state.stoppable):
            if isinstance(wait, FeedWait):
                wait.on_recoverable()

    def note_new_session(self, session: Session, on_lost_feeds: Literal["log", "raise"]) -> None:
        """Take back what is in use if the feeds were restored; say what was undone, and what a
        session in memory has kept.
        """
        restored, tracked = session.restored, [one for one in self.ahead if self.are_tracked(one)]
        if restored is not None:
            for feeds in tracked:
                feeds.note_restored()
        if self._reached < 0:
            return  # the first session
        if restored is None:
            fed: list[object] = [one.feeds for one in self.ahead]
            kept = [
                name
                for name, one in session.tracked.items()
                if all(one is not each for each in fed)
            ]
            if kept:
                text = (
                    f"continues with the tracked objects {', '.join(map(repr, kept))} as the failed"
                    " run has left them"
                )
                logger.warning("%s: %s", self.state.label, text)
            return
        step, reached, lost = restored.checkpoint.step, self._reached, self.lost_step
        self._reached, self.lost_step = step, min(lost, step)
        if step < reached:
            steps = f"{reached - step} step{'s' if reached - step > 1 else ''}"
            text = (
                f"went back from step {reached} to step {step}, that of {restored.checkpoint.path}:"
                f" {steps}"
            )
            self._say_what_is_undone(text, lost > step, bool(tracked), on_lost_feeds)

    def _say_what_is_undone(
        self, text: str, are_lost: bool, come_again: bool, on_lost_feeds: str
    ) -> None:
        if not are_lost:
            text += f" are undone{', and their feeds come again' if come_again else ''}"
            logger.warning("%s: %s", self.state.label, text)
            return
        text += f", and with them their feeds, are gone; {_HOW_TO_KEEP_FEEDS}"
        if on_lost_feeds == "raise":
            raise FeedsLostError(f"the recovery {text}") from self.state.recovering_from
        logger.warning("%s: %s", self.state.label, text)


def _is_loader(value: Any) -> bool:
    """Return whether a tracked object gives elements; a model may be iterable, and is called."""
    if callable(value) or hasattr(value, "__getitem__"):
        return False
    return isinstance(value, (AsyncIterable, Iterable))


def source_of(
    session: SessionFeeds,
    feeds: Feeds | None,
    producer: Producer | None,
    prefetch: int,
    thread: bool,
) -> PlainFeeds | QueueFeeds | FeedsAhead | None:
    """Return the source of a loop with these options of `AsyncMonitoredSession.steps`; None if it
    is not fed.
    """
    producers = checked_producers(producer)
    prefetch = checked_int(prefetch, "prefetch")
    what: Any = feeds
    is_iterable = isinstance(feeds, (AsyncIterable, Iterable)) and not isinstance(
        feeds, (Mapping, str, bytes)
    )
    if prefetch or thread:
        if not is_iterable or (thread and isinstance(feeds, AsyncIterable)):
            raise InvalidArgumentError(
                f"prefetch is {prefetch}, thread is {thread}, and feeds is {safe_repr(what)};"
                " prefetch is for feeds to iterate over, thread=True for those that block; a queue"
                " holds what its producer puts in ahead of the runs"
            )
    elif isinstance(feeds, asyncio.Queue):
        return QueueFeeds(session, feeds, session.earlier(feeds), producers)
    if producer is not None:
        # What a generator does besides waiting for its producer, with an element that it has
        # taken, must not be cut off.
        raise InvalidArgumentError(
            f"producer is {safe_repr(producer)}, and feeds is {safe_repr(what)}; it is for an"
            " asyncio.Queue: an async generator waits with `await session.until(queue.get(),"
            " producer=...)`"
        )
    if feeds is None:
        return None
    if not is_iterable:
        close_unawaited(what)
        raise InvalidArgumentError(
            f"feeds is {safe_repr(what)}; give something to iterate over, sync or async, that has"
            " an element for each step, or an asyncio.Queue"
        )
    earlier = session.earlier(what)
    has_ended = getattr(what, "gi_frame", what) is None or getattr(what, "ag_frame", what) is None
    if has_ended and not (earlier and earlier.unused):
        raise InvalidArgumentError(
            f"feeds is {what!r}, which has ended; a generator gives its elements once: make a"
            " new one"
        )
    if isinstance(earlier, FeedsAhead):
        earlier.set_options(prefetch, thread=thread)
        return earlier
    if not (isinstance(feeds, AsyncIterable) or prefetch or thread or is_stateful(what)):
        return PlainFeeds(session, what, earlier)
    loaders = [] if is_stateful(what) or not prefetch else session.tracked_loaders(what)
    if loaders:
        raise InvalidArgumentError(
            f"prefetch is {prefetch}, and feeds is {safe_repr(what)}, which has no state, while"
            f" {', '.join(map(repr, loaders))} is tracked and iterable: elements that the feeds"
            " have taken ahead of it would be skipped when the run is resumed; give the tracked"
            " object itself as feeds=, or leave prefetch= out"
        )
    if earlier and earlier.unused:
        raise InvalidArgumentError(
            f"feeds is {safe_repr(what)}, of which a loop without prefetch= and thread= has taken"
            f" {len(earlier.left)} that no step has used: use them first, in another loop without"
        )
    return FeedsAhead(session, what, prefetch, thread=thread)


class FeedsSetBack(BaseException):
    """Ends a run whose feeds a recovery has set back: its element comes again, behind those that
    were used before it.
    """


class Source:
    """What each source has: the elements that were taken and not used, and a note of those that
    made steps.
    """

    def __init__(self, session: SessionFeeds, feeds: object, earlier: Source | None = None) -> None:
        self.feeds: Any = feeds
        self._session = session
        self._state = session.state
        self.left: deque[Any] = deque() if earlier is None else earlier.left
        """The elements that were taken and not used, in order; all loops over the same feeds have
        the same.
        """
        session.sources.add(self)

    @property
    def is_used_up(self) -> bool:
        """Whether another loop over the same feeds begins anew."""
        return False

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order."""
        return [*self.left]

    def _is_draining(self, feeds: object) -> bool:
        if self._state.drain_reason is None:
            return False
        logger.info(
            "%s: draining: no other element is taken of %s", self._state.label, safe_repr(feeds)
        )
        return True

    def log_after_stop(self, error: Exception) -> None:
        """Log an error of the feeds, if a stop was requested before: they end then. Else raise it.

        What has stopped the session has often stopped the feeds, too, such as a signal to all
        processes of a group.
        """
        if not self._state.whole.should_stop():
            raise_unchanged(error)
        logger.error(
            "%s: the feeds %s failed after the stop, which ends the session as usual: %s",
            self._state.label,
            safe_repr(self.feeds),
            safe_repr(error),
            exc_info=error,
        )

    def loop_ended(self) -> None:
        """Called when a loop over the feeds has ended."""

    def put_back(self, element: Any) -> None:
        """Make an element the next one again: the run that got it has changed nothing."""
        self.left.appendleft(element)

    def use(self, element: Any) -> None:
        """Count an element as used: its run is complete."""
        session = self._state.session
        if session is not None:
            self._session.lost_step = session.committed_step


class PlainFeeds(Source):
    """An iterable, which is asked for an element when a step begins, and in a drain no more."""

    def __init__(self, session: SessionFeeds, feeds: Iterable[Any], earlier: Source | None) -> None:
        super().__init__(session, feeds, earlier)
        self._iterator = iter(feeds)

    def take(self) -> Any:
        if self.left:
            return self.left.popleft()
        if self._is_draining(self._iterator):
            raise StopAsyncIteration
        try:
            if not self._state.observers:
                return next(self._iterator)
            with observing(self._state.observers, "feed", "next feed"):
                return next(self._iterator)
        except StopIteration:
            raise StopAsyncIteration from None
        except Exception as error:
            self.log_after_stop(error)
            raise StopAsyncIteration from None


class QueueFeeds(Source):
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

    async def wait_ready(self, wait_for: WaitForFeed) -> None:
        """Wait until there is an element, which stays here if this is cancelled."""
        state = self._state
        while not (self.left or self._ended):
            if not self.feeds.empty():
                self.left.append(self.feeds.get_nowait())
                return
            # Without its producers, a queue ends in a drain when it is empty.
            producers = self._producers
            ends_at_drain = producers is None and state.drain_reason is None
            if producers is None and not ends_at_drain:
                producers = ()
            try:
                await wait_for(self._get, producers, drain=ends_at_drain)
            except StopRequestedError:
                if state.whole.should_stop() or not ends_at_drain:
                    raise

    async def _get(self) -> None:
        try:
            self.left.append(await self.feeds.get())
        except _QueueShutDown:
            self._ended = True

    def take(self) -> Any:
        if not self.left:
            raise StopAsyncIteration
        return self.left.popleft()

    def use(self, element: Any) -> None:
        super().use(element)
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


class FeedsAhead(Source, Waiting):
    """Reads feeds in one task of the session, in order, up to `ahead` elements further than was
    asked for.

    The task begins with the first element. It ends with the feeds, in a drain before the next
    element, at a stop or with the session, and closes the iterator. Feeds that are `Stateful` are
    then set back to the last element that was used, so that their state counts no other. The
    elements of others stay, for another loop over the same steps. Whoever restores a checkpoint
    restores these feeds, too: what was taken before then is not used, as it comes again.
    """

    def __init__(
        self,
        session: SessionFeeds,
        feeds: AsyncIterable[Any] | Iterable[Any],
        ahead: int,
        *,
        thread: bool,
    ) -> None:
        super().__init__(session, feeds)
        self.feeds: AsyncIterable[Any] | Iterable[Any]
        self._stateful = cast("Stateful", feeds) if is_stateful(feeds) else None
        self._ahead = ahead
        self._thread = thread
        self.left: deque[_Taken]
        self._read_state: Any = None
        """The state of the feeds behind the element that was read last."""
        self._number = 0
        """The place of the element that is read next."""
        self.in_use: dict[asyncio.Task[Any], _Taken] = {}
        """The elements that runs of these tasks use, or are about to."""
        self._failure: Exception | None = None
        self._ended = False
        self._restoring = False
        self._taking = False
        """Whether a thread takes an element."""
        self._reader: asyncio.Task[None] | None = None
        self._asking = 0
        """How many wait for the next element."""
        self._changes = Waiters()
        """Of the reader, which waits for room, and of those who wait for elements; each looks again
        after a change.
        """

    def set_options(self, ahead: int, *, thread: bool) -> None:
        """Read on as another loop over the same feeds asks for."""
        self._ahead, self._thread = ahead, thread
        self._changes.wake()

    @property
    def is_used_up(self) -> bool:
        return self._ended and not self.left and not self.in_use

    @property
    def unused(self) -> list[Any]:
        return [one.element for one in self.left]

    @property
    def own_reader(self) -> asyncio.Task[None] | None:
        """The task that reads, if it reads nothing ahead: no other activity than the wait for the
        next feed.
        """
        return None if self._ahead or self._thread else self._reader

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> asyncio.Task[Any] | None:
        return (
            self._reader
            if method == "_wait_ready" and self._reader is not None and not self._reader.done()
            else None
        )

    @property
    def is_ready(self) -> bool:
        """Whether `take` has a result: an element, a failure or the end."""
        return bool(self.left) or self._failure is not None or self._ended

    async def wait_ready(self, wait_for: WaitForFeed) -> None:
        """Wait until `take` has a result. No element is lost with this wait."""
        while not self.is_ready:  # another task may be faster
            await wait_for(self._wait_ready)

    async def _wait_ready(self) -> None:
        self._asking += 1
        self._changes.wake()
        try:
            while not self.is_ready:
                if self._reader is None and not self._restoring:
                    self._read_state = self._feeds_state()
                    if self not in self._session.ahead:
                        self._session.ahead.append(self)
                    self._reader = self._state.whole.start_soon(self._read, (), "feeds")
                await self._changes.wait()
        finally:
            self._asking -= 1

    def take(self) -> Any:
        """Return the next element, for a run of the current task."""
        if not self.left and self._failure is not None:
            error, self._failure = self._failure, None
            self.log_after_stop(error)
        if not self.left:
            if not self.in_use and self in self._session.ahead:
                self._session.ahead.remove(
                    self
                )  # not before: a recovery may restore feeds that have been read to the end
            raise StopAsyncIteration
        taken = self.in_use[current_task()] = self.left.popleft()
        self._changes.wake()
        return taken.element

    def loop_ended(self) -> None:
        error = self._failure
        # Without a stop, another loop over the same feeds gets it.
        if error is not None and self._state.whole.should_stop():
            self._failure = None
            self.log_after_stop(error)

    def put_back(self, element: Any) -> None:
        taken = self.in_use.pop(current_task(), None)
        if taken is None:
            return  # these feeds were restored meanwhile
        if self._reader is not None or self._stateful is None:
            self.left.insert(sum(one.number < taken.number for one in self.left), taken)
        elif taken.number < self._number:  # else another loop has put an earlier one back
            self._stateful.load_state_dict(taken.before)
            self._number, self._ended, self._failure = (
                taken.number,
                False,
                None,
            )  # what is behind the element comes again

    def use(self, element: Any) -> None:
        self.in_use.pop(current_task(), None)
        if not self._session.are_tracked(self):
            super().use(element)

    def knows_state_of(self, one: object) -> bool:
        """Return whether `one` are these feeds, and their own state may be ahead of what was
        used.
        """
        return one is self.feeds and (self._reader is not None or bool(self.in_use))

    def used_state(self) -> Any:
        """Return the state of the feeds behind what committed runs have used."""
        scope = self._state.waits.scope
        committed = self._state.runner if scope is not None and scope.committed else None
        for task, taken in self.in_use.items():
            if task is not committed:
                return taken.before
        return self._feeds_state() if self._reader is None else self._asked_state

    @property
    def _asked_state(self) -> Any:
        """The state of the feeds behind the element that was asked for last."""
        return self.left[0].before if self.left else self._read_state

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored; they are read anew from there,
        after `continue_reading`.
        """
        if self._stateful is None:
            return
        self._restoring = True
        if (reader := self._reader) is not None:
            reader.cancel()
            await wait_done([reader], self._state.grace_secs)
            if reader.done():
                self._reader = None  # also if it was cancelled before it began
            self._ended, self._failure = False, None

    def note_restored(self) -> None:
        """Note that the feeds were given the state of a checkpoint: what is in use comes again."""
        # if not restored, it stays at the end: many feeds begin another pass when they are read
        # there
        self._ended = False
        self._session.set_back.update(self.in_use)
        self.in_use.clear()

    def continue_reading(self) -> None:
        """Read on for those who wait, from the state that the feeds have now."""
        self._restoring = False
        self._changes.wake()

    # -- the task

    async def _read(self) -> None:
        used = False
        try:
            # A stop ends it, but no failure from which the session recovers.
            await self._state.whole.until(FeedWait(self._state, lambda: None), self._take_all())
            used = True
        except StopRequestedError:
            pass  # the loop that asks for elements gets it as well
        finally:
            self._reader = None
            self.loop_ended()
            if not used and self._stateful is not None:
                self._stateful.load_state_dict(self._asked_state)
                self._number = self.left[0].number if self.left else self._number
                self.left.clear()

    async def _take_all(self) -> None:
        """Take the elements in one task: what a generator has around its `yield`, such as a time
        limit, belongs to a task.
        """
        iterator: Any = (
            aiter(self.feeds) if isinstance(self.feeds, AsyncIterable) else iter(self.feeds)
        )
        try:
            try:
                while await self._take_next(iterator):
                    pass
            finally:
                await self._close(iterator)
        except Exception as error:
            self._failure = error
        self._ended = True
        self._changes.wake()
        while self.left:  # their states are known until they are used
            await self._changes.wait()

    async def _take_next(self, iterator: Any) -> bool:
        """Take the next element when there is room for it; return whether there was one."""
        while len(self.left) >= max(self._ahead, bool(self._asking)):
            await self._changes.wait()
        if self._is_draining(self.feeds):
            return False
        taken: list[tuple[Any, Any]] = []

        def note(element: Any) -> None:
            taken.append((element, self._feeds_state()))

        def take() -> None:
            self._taking = True
            try:
                note(next(iterator, _END))
            except Exception as error:
                self._failure = error  # the wait for a thread may have been cancelled
                raise
            finally:
                self._taking = False

        try:
            observers = self._state.observers if self._ahead or self._thread else ()
            with observing(observers, "prefetch", "take a feed"):
                if isinstance(self.feeds, AsyncIterable):
                    note(await anext(iterator, _END))
                elif self._thread:
                    await to_thread(take, grace_secs=self._state.grace_secs)
                else:
                    take()
        finally:  # a thread ends with its element, also after a cancel
            for element, behind in taken:
                if element is not _END:
                    self.left.append(_Taken(element, self._read_state, self._number))
                    self._read_state, self._number = behind, self._number + 1
            self._changes.wake()
        return taken[0][0] is not _END

    async def _close(self, iterator: Any) -> None:
        """Close what was made for this loop, and generators; a thread that has hung still uses its
        iterator.
        """
        is_generator = isinstance(self.feeds, Generator | AsyncGenerator)
        if self._taking or (iterator is self.feeds and not is_generator):
            return
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
        elif hasattr(iterator, "close"):
            (
                await to_thread(iterator.close, grace_secs=self._state.grace_secs)
                if self._thread
                else iterator.close()
            )

    def _feeds_state(self) -> Any:
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())


class FeedWait(Wait[Any]):
    """A wait for feeds: a failure from which the session recovers does not end it, but is passed to
    `on_recoverable`.
    """

    __slots__ = ("_state", "on_recoverable")

    def __init__(self, state: SessionState, on_recoverable: Callable[[], None]) -> None:
        super().__init__("next feed")
        self._state = state
        self.on_recoverable: Callable[[], None] = on_recoverable

    def end(self, cause: BaseException) -> None:
        if self._state.recovers(cause):
            self.on_recoverable()
        else:
            super().end(cause)
