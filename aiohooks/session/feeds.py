"""The feeds of the loops of a session: where elements come from, and the use of each.

    SessionFeeds     the sources of all loops of a session, over its recoveries
    FeedSource       the elements of all loops over the same feeds
    QueueSource      takes them from a queue
    IterableSource   reads them when a step begins; or in a task, if they may wait or block, or are
                     prefetched
    Element          one element, from its read to the end of its run

The elements of a source are counted in the order of their reads: this is the place of each. One
that was taken and not used waits in its place for the next loop over the same feeds.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

from aiohooks._core.activity import Awaited, active, awaited_tasks, logger
from aiohooks._core.calls import RunWaits, close_unawaited
from aiohooks._core.validate import checked_int
from aiohooks._core.waits import Waiters, current_task, to_thread, wait_done
from aiohooks.checkpoint.stateful import Stateful, is_stateful
from aiohooks.errors import (
    FeedsLostError,
    InvalidArgumentError,
    StopRequestedError,
    is_clean_end,
    raise_unchanged,
    safe_repr,
)
from aiohooks.graph.session import Session, was_fed
from aiohooks.session.coordinator import Coordinator, Producer, Producers

if TYPE_CHECKING:
    from aiohooks.checkpoint import Restored

# Since Python 3.13.
_QueueShutDown: type[Exception] | tuple[()] = getattr(asyncio, "QueueShutDown", ())
_HOW_TO_KEEP_FEEDS = "give the loop feeds with a state_dict, and track them in the Scaffold"

Feeds: TypeAlias = AsyncIterable[Any] | Iterable[Any] | asyncio.Queue[Any]
"""The feeds of the runs of a loop, one element for each."""


class FeedsWentBack(BaseException):
    """Ends a run whose feeds a recovery has restored: its element comes again, behind the elements
    that were used before it.
    """


class Element:
    """An element of feeds, or the error that they have raised instead of one."""

    use: Literal["being read", "unused", "taken", "used", "comes again"] = "being read"
    """It "comes again" from feeds that a recovery has restored."""
    value: Any = None
    error: Exception | None = None

    before: Any = None
    """The state of the feeds before the read, if they have a state."""

    def __init__(self, source: FeedSource) -> None:
        """Make the element of the next read."""
        self.source: FeedSource = source
        self.place: int = source.reads + 1
        source.reads = self.place
        if source.stateful is not None:
            self.before = copy.deepcopy(source.stateful.state_dict())


class SessionFeeds:
    """The sources of all loops of one session, over its recoveries."""

    def __init__(self, coordinator: Coordinator, waits: RunWaits) -> None:
        self.coordinator: Coordinator = coordinator
        self._waits = waits
        self.session: Session | None = None
        """The raw session, unless it is being replaced."""
        self.tracked: Mapping[str, object] = {}
        """The tracked objects of the latest raw session."""
        self.loops: WeakSet[object] = WeakSet()
        """The loops of steps that have begun and not ended. A loop that was left is not referred to
        any more.
        """
        self.sources: WeakSet[FeedSource] = WeakSet()
        self.in_use: dict[int, Element] = {}
        """The elements of tasks, by the ids of these, of feeds whose reads a state counts, until
        their runs have ended.
        """
        self._kept: set[FeedSource] = set()
        """The sources with elements that loops have left, and the sources of tracked feeds."""
        self._fed: set[int] = set()
        """The ids of the tracked objects that were given as feeds."""
        self.lost_step: int = 0
        """The last step that used an element which does not come again after a recovery."""
        self._reached = -1
        """The last step that was made before a recovery; -1 before the first one."""

    # -- the sources

    def source_for(
        self, feeds: Feeds | None, producer: Producer | None, prefetch: int, *, thread: bool
    ) -> FeedSource | None:
        """Return the source of a loop with these options of `AsyncMonitoredSession.steps`, None if
        it is not fed.
        """
        prefetch = checked_int(prefetch, "prefetch")
        _check_options(feeds, producer, prefetch, thread=thread)
        if feeds is None:
            return None
        source = self._earlier(feeds)
        if isinstance(feeds, asyncio.Queue):
            return source or QueueSource(self, feeds)
        if not isinstance(source, IterableSource):
            source = IterableSource(self, feeds)
        source.counting = self._counting_objects(feeds)
        if prefetch and source.counting:
            raise InvalidArgumentError(
                f"prefetch is {prefetch}, and {safe_repr(feeds)} may read a tracked object, whose"
                " state would count elements that no step has used; give the object itself as"
                " feeds=, and change its elements in the step, or leave out prefetch"
            )
        source.set_options(prefetch, thread=thread)
        self.keep_sources()
        return source

    def _earlier(self, feeds: object) -> FeedSource | None:
        """Return the source of another loop over feeds that continue where it has left them: they
        do not begin with each loop.
        """
        if isinstance(feeds, (asyncio.Queue, Iterator, AsyncIterator)) or is_stateful(feeds):
            for source in self.sources:
                if source.feeds is feeds and not source.is_used_up:
                    return source
        return None

    def _counting_objects(self, feeds: object) -> list[object]:
        """Return the tracked objects that the feeds may read, as a generator around a loader does:
        their states count the elements that the feeds have read.

        An object that was given as feeds itself counts the elements that steps have used.
        """
        if self.is_tracked(feeds):
            self._fed.add(id(feeds))
            return []
        if isinstance(feeds, Collection):  # which has its elements already
            return []
        return [
            value
            for value in self.tracked.values()
            if id(value) not in self._fed and _may_give_elements(value)
        ]

    def keep_sources(self) -> None:
        """Keep the sources that may be needed after their loops have ended."""
        self._kept = {
            source for source in self.sources if source.elements or self._gives_again(source)
        }

    def end_loop(self, loop: object) -> None:
        """Note that a loop has ended. The last one to end in a drain stops the session."""
        self.loops.discard(loop)
        requests = self.coordinator.requests
        if requests.drain_reason is not None and not self.loops:
            requests.request_stop(requests.drain_reason)

    @property
    def unused(self) -> int:
        """The number of elements that were taken and not used."""
        return sum(len(source.unused) for source in self.sources)

    def is_tracked(self, feeds: object) -> bool:
        """Return whether a recovery that restores the session restores these feeds."""
        return any(feeds is value for value in self.tracked.values())

    def state_of(self, stateful: Stateful) -> Any:
        """Return the state of a tracked object: of feeds, the state before the first element that
        no committed run has used.
        """
        source = self._earlier(stateful)
        unused = [] if source is None else self._unused_elements(source)
        if unused:
            return min(unused, key=_place_of).before
        for source in self.sources:
            if any(value is stateful for value in source.counting):
                self._warn_if_unused(source)
        return stateful.state_dict()

    def _warn_if_unused(self, source: FeedSource) -> None:
        """Warn if feeds have elements that no step has used, and a state may count these."""
        if self._unused_elements(source):
            logger.warning(
                "%s: the feeds %s may read a tracked object, whose state counts an element that no"
                " step has used, and skips it; give the object itself as feeds=",
                self.coordinator.requests.label,
                safe_repr(source.feeds),
            )

    def _unused_elements(self, source: FeedSource) -> list[Element]:
        """Return the elements of a source that no committed run has used."""
        elements = [*self.taken_of(source), *source.elements]
        return [element for element in elements if not self._is_of_commit(element)]

    def taken_of(self, source: FeedSource) -> list[Element]:
        """Return the elements of a source that runs have taken and not yet used, if a state counts
        them.
        """
        return [
            element
            for element in self.in_use.values()
            if element.source is source and element.use == "taken"
        ]

    def _is_of_commit(self, element: Element) -> bool:
        """Return whether the run in progress uses this element, and is committed: for a checkpoint
        that is written at the end of that run, the element is used.
        """
        scope = self._waits.scope
        if scope is None or not (scope.active and scope.committed):
            return False
        return element is self.in_use.get(scope.runner)

    # -- the element of a run

    def uses_tracked_feeds(self, task: int) -> bool:
        """Return whether the run of the task with this id has an element of tracked feeds."""
        element = self.in_use.get(task)
        return element is not None and self.is_tracked(element.source.feeds)

    def raise_if_element_went_back(self) -> None:
        """Raise `FeedsWentBack` if a recovery by another task has restored the feeds of the run."""
        element = self.in_use.get(id(current_task()))
        if element is not None and element.use == "comes again":
            raise FeedsWentBack

    def keep_element_of_run(self) -> None:
        """Count the element of the run as used: the restored checkpoint has its step."""
        element = self.in_use.get(id(current_task()))
        if element is not None:
            element.use = "used"

    # -- recoveries

    def note_loss(self, session: Session, step: int) -> None:
        """Note how far a session has come that is about to be replaced."""
        self._reached = max(self._reached, step)
        if was_fed(session) and not any(map(self._gives_again, self.sources)):
            # Its runs were also fed without a loop: by hand, or by a hook.
            self.lost_step = self._reached
        self.session = None

    def _gives_again(self, source: FeedSource) -> bool:
        """Return whether a recovery makes the source give its elements again."""
        return self.is_tracked(source.feeds) and not source.is_used_up

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored. They are read on after
        `continue_reading`.
        """
        for source in list(self.sources):
            await source.stop_reading()

    def continue_reading(self) -> None:
        """Continue to read for waiting loops, from the current state of the feeds."""
        for source in self.sources:
            source.changes.wake()

    def note_new_session(self, session: Session, recovering_from: BaseException | None) -> None:
        """Take back the elements in use if the feeds were restored, and report the steps that are
        undone.
        """
        self.session = session
        self.tracked = session.tracked
        if session.restored is None:
            return
        for source in self.sources:
            if self.is_tracked(source.feeds):
                source.note_restored()
        if self._reached >= 0:  # it is not the first session
            self._report_undone_steps(session.restored, recovering_from)

    def _report_undone_steps(
        self, restored: Restored, recovering_from: BaseException | None
    ) -> None:
        """Log how many steps a recovery has undone, by the checkpoint that it has restored.

        Raises:
            FeedsLostError: their feeds are lost, and the policy says so. Its cause is the error
                that the session recovers from.
        """
        step = restored.checkpoint.step
        undone = self._reached - step
        are_lost = self.lost_step > step
        steps = f"{undone} steps are undone" if undone > 1 else "1 step is undone"
        text = (
            f"went back from step {self._reached} to step {step}, that of"
            f" {restored.checkpoint.path}: {steps}"
        )
        self._reached = step
        self.lost_step = min(self.lost_step, step)
        if undone <= 0:
            return
        if are_lost:
            text += f", and the feeds are gone; {_HOW_TO_KEEP_FEEDS}"
            if self.coordinator.owner.policy.on_lost_feeds == "raise":
                raise FeedsLostError(f"the recovery {text}") from recovering_from
        elif any(map(self._gives_again, self.sources)):
            text += ", and the feeds come again"
        logger.warning("%s: %s", self.coordinator.requests.label, text)


def _place_of(element: Element) -> int:
    return element.place


def _may_give_elements(tracked: Any) -> bool:
    """Return whether a tracked object may be a loader, not a model, which one can call, or whose
    parts have an index.
    """
    if isinstance(tracked, (AsyncIterator, Iterator)):
        return True
    is_model = callable(tracked) or hasattr(tracked, "__getitem__")
    return isinstance(tracked, (AsyncIterable, Iterable)) and not is_model


def _check_options(feeds: object, producer: object, prefetch: int, *, thread: bool) -> None:
    """Raise `InvalidArgumentError` for feeds, or options, that make no sense."""
    shown = safe_repr(feeds)
    is_queue = issubclass(type(feeds), asyncio.Queue)
    # A mapping is one element.
    is_element = issubclass(type(feeds), (Mapping, str, bytes))
    is_iterable = issubclass(type(feeds), (AsyncIterable, Iterable)) and not is_element
    if not (is_iterable or is_queue or feeds is None):
        close_unawaited(feeds)
        raise InvalidArgumentError(
            f"feeds is {shown}; give something to iterate over, sync or async, that has"
            " an element for each step, or an asyncio.Queue"
        )
    # The end of a generator's wait from here could interrupt its work on an element.
    if producer is not None and not is_queue:
        raise InvalidArgumentError(
            f"feeds is {shown}, and a producer is for an asyncio.Queue; leave it out, or let an"
            " async generator wait with `await session.until(queue.get(), producer=...)`"
        )
    if (prefetch or thread) and not is_iterable:
        raise InvalidArgumentError(
            f"feeds is {shown}, and prefetch and thread are for feeds to iterate over; leave them"
            " out"
        )


class FeedSource:
    """The elements of all loops over the same feeds."""

    stateful: Stateful | None = None
    """The feeds, if they have a state, which counts their elements."""
    counting: Sequence[object] = ()
    """Other tracked objects, whose states may count the elements."""
    ends_at_drain: bool = False
    """Whether a drain ends the wait for an element, as none is lost then."""

    def __init__(self, session: SessionFeeds, feeds: object) -> None:
        self.feeds: Any = feeds
        self.elements: list[Element] = []
        """The elements that wait for a loop, and the element that is being read, by their places.
        """
        self.has_ended: bool = False
        """Whether the feeds give no more elements."""
        self.changes: Waiters = Waiters()
        """Of a task that reads, which waits for room, and of loops that wait for elements. Each
        looks again after a change.
        """
        self.reads: int = 0
        self._last_used = 0
        """The last place whose element was used, of feeds with a state."""
        self._session = session
        self._coordinator = session.coordinator
        session.sources.add(self)

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order."""
        elements = [element for element in self.elements if element.use == "unused"]
        return [element.value for element in elements if element.error is None]

    @property
    def is_used_up(self) -> bool:
        """Whether another loop over the same feeds begins anew."""
        return self.has_ended and not self.elements and not self._session.taken_of(self)

    def take(self, producers: Producers | None) -> Element | None:
        """Return the next element, or None if it must be waited for. Raise `StopAsyncIteration` at
        the end, or the error of the feeds.
        """
        element = self.first_unused() if self.elements else None
        if element is not None:
            self.elements.remove(element)
            self.changes.wake()
        else:
            element = self._read_now(producers)
            if element is None:
                return None
        if element.error is not None:
            self.log_after_stop(element.error)
            raise StopAsyncIteration
        if self.stateful is not None or self.counting:
            element.use = "taken"
            self._session.in_use[id(current_task())] = element
        return element

    def first_unused(self) -> Element | None:
        """Return the first element that waits for a loop."""
        for element in self.elements:
            if element.use == "unused":
                return element
        return None

    def _read_now(self, producers: Producers | None) -> Element | None:
        """Read the next element, if that needs no wait, as `take` does."""
        raise NotImplementedError

    async def wait(self) -> None:
        """Wait until `take` may have a result. No element is lost if this wait is cancelled."""
        raise NotImplementedError

    def settle(self, element: Element, *, is_used: bool) -> None:
        """Count a taken element as used, because its run is committed, or leave it in its place for
        another loop.
        """
        session = self._session
        # `take` has left the use of other elements: no state counts them.
        if element.use != "unused":
            del session.in_use[id(current_task())]
            if element.use == "comes again":
                return
        if not is_used:
            element.use = "unused"
            self.elements = sorted([*self.elements, element], key=_place_of)
            self._set_back()
            return
        if self.stateful is not None:
            self._last_used = max(self._last_used, element.place)
            if session.is_tracked(self.feeds):
                return
        if session.session is not None:
            session.lost_step = session.session.committed_step

    def _set_back(self) -> None:
        """Let feeds with a state give the last elements again, which no loop has taken."""

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored. They are read anew from there."""

    def note_restored(self) -> None:
        """Note that a recovery has restored these feeds: they give their elements again."""
        for element in self._session.taken_of(self):
            element.use = "comes again"
        # Feeds that were not restored stay at their end: many begin another pass when they are
        # read there.
        self.has_ended = False
        self.elements.clear()

    @property
    def is_draining(self) -> bool:
        """Whether no other element is taken, as the session drains."""
        return self._coordinator.requests.drain_reason is not None

    def log_after_stop(self, error: Exception) -> None:
        """Log an error of the feeds if a stop was requested before, and otherwise raise it. A clean
        end, such as that of a wait which the stop has ended, is not logged.

        The cause of a stop has often ended the feeds as well, such as a signal to all processes of
        a group. The feeds are at their end then.
        """
        if not self._coordinator.should_stop():
            raise_unchanged(error)
        if is_clean_end(error):
            return
        logger.error(
            "%s: the feeds %s failed while the session stops; it ends normally: %s",
            self._coordinator.requests.label,
            safe_repr(self.feeds),
            safe_repr(error),
            exc_info=error,
        )


class QueueSource(FeedSource):
    """A queue; counts in it the elements that were used."""

    ends_at_drain = True
    _due: int | None = None
    """In a drain, how many more elements are taken before the queue ends. None before a drain."""

    def _read_now(self, producers: Producers | None) -> Element | None:
        if self.is_draining:
            self._end_producers(producers)
        if self.has_ended:
            raise StopAsyncIteration
        if self.feeds.empty():
            return None
        return self._element_of(self.feeds.get_nowait())

    def _element_of(self, value: Any) -> Element:
        """Return the element with a value that was taken out of the queue."""
        if self._due is not None:
            self._due -= 1
        element = Element(self)
        element.value = value
        element.use = "unused"
        return element

    def _end_producers(self, producers: Producers | None) -> None:
        """In a drain, end the producers once the elements are taken that they had put already, or
        that they wait to put.

        When the drain begins, each task waits in at most one `put`. Without `producers`, any task
        may be one, and none can be ended: the queue ends then, although others may put more.
        """
        due = self._due
        if due is None:
            due = len(producers or asyncio.all_tasks())
            # Named producers are ended, so what they leave in the queue is taken afterwards.
            if not producers:
                due += self.feeds.qsize()
            self._due = due
        if due > 0 and not self.feeds.empty():
            return
        self._coordinator.end_producers(producers or ())
        if producers is None and not self.feeds.empty():
            self.has_ended = True

    async def wait(self) -> None:
        try:
            value = await self.feeds.get()
        except _QueueShutDown:
            self.has_ended: bool = True
        else:
            self.elements.append(self._element_of(value))

    def settle(self, element: Element, *, is_used: bool) -> None:
        super().settle(element, is_used=is_used)
        if is_used:
            self.feeds.task_done()


class IterableSource(FeedSource):
    """Iterates over feeds: in `take`, or in a task of the session, if they may wait or are
    prefetched.

    The task begins with the first element. It ends with the feeds, in a drain before the next
    element, at a stop or with the session, and closes the iterator. Feeds that are `Stateful` are
    then set back to the last element that was used, so that their state counts no other. The
    elements of others stay, for another loop over the same feeds.
    """

    def __init__(self, session: SessionFeeds, feeds: AsyncIterable[Any] | Iterable[Any]) -> None:
        super().__init__(session, feeds)
        if is_stateful(feeds):
            self.stateful: Stateful | None = self.feeds
        self._is_async = isinstance(feeds, AsyncIterable)
        self._iterator: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._asking = 0
        """How many loops wait for the next element."""

    def set_options(self, ahead: int, *, thread: bool) -> None:
        """Read on as the latest loop over the feeds asks for: `ahead` elements more than all loops
        have asked for, and in a thread or not.
        """
        self._ahead = ahead
        self._thread = thread
        self._needs_task = self._is_async or ahead > 0 or thread
        self.changes.wake()

    @property
    def _can_begin(self) -> bool:
        """Whether nothing reads the feeds, and no recovery is about to restore them."""
        if self._reader is not None:
            return False
        return self.stateful is None or self._session.session is not None

    def _read_now(self, producers: Producers | None) -> Element | None:
        if self.has_ended:
            raise StopAsyncIteration
        if self._needs_task or self._reader is not None:
            return None
        if self.stateful is not None and not self._can_begin:
            return None
        coordinator = self._coordinator
        if self.is_draining:
            raise StopAsyncIteration
        element = Element(self)
        if coordinator.observers:
            with active("feed", "next feed", observers=coordinator.observers):
                self._read_sync(element)
        else:
            self._read_sync(element)
        if element.use == "being read":
            self.has_ended = True
            raise StopAsyncIteration
        return element

    async def wait(self) -> None:
        self._asking += 1
        self.changes.wake()
        try:
            while not self.has_ended and self.first_unused() is None:
                if self._can_begin:
                    if not self._needs_task:
                        return
                    self._reader = self._coordinator.start_soon(self._read, name="feeds")
                with active("wait", "next feed", self._awaited_reader):
                    await self.changes.wait()
        finally:
            self._asking -= 1

    def _awaited_reader(self) -> Awaited | None:
        return None if self._reader is None else awaited_tasks(self._reader)

    def _set_back(self) -> None:
        """Set feeds with a state, which are not read now, back before the elements that no loop
        has taken.

        An element stays if a loop has taken a later one, which the feeds would give again.
        """
        if self.stateful is None or self._reader is not None:
            return
        taken = [element.place for element in self._session.taken_of(self)]
        last_place = max([self._last_used, *taken])
        first = None
        while self.elements and self.elements[-1].place > last_place:
            first = self.elements.pop()
        if first is not None:
            self.has_ended = False
            self._iterator = None
            self.stateful.load_state_dict(first.before)

    async def stop_reading(self) -> None:
        if self.stateful is None:
            return
        reader = self._reader
        if reader is not None:
            reader.cancel()
            await wait_done([reader], self._coordinator.owner.grace_secs)
            if reader.done():
                self._reader = None  # also if it was cancelled before it began
        self._iterator = None

    # -- the task

    async def _read(self) -> None:
        try:
            # A stop ends it, but no failure from which the session recovers.
            await self._coordinator.wait_until_ended("next feed", self._read_all(), lasts=True)
        except StopRequestedError:
            pass  # the loop that asks for elements gets it as well
        finally:
            self._reader = None
            last = self.elements[-1] if self.elements else None
            if last is not None and last.error is not None and self._coordinator.should_stop():
                self.elements.pop()
                self.log_after_stop(last.error)
            self._set_back()

    async def _read_all(self) -> None:
        """Read the elements in one task: what a generator has around its `yield`, such as a time
        limit, belongs to a task.
        """
        try:
            while await self._read_next():
                pass
        finally:
            await self._close_iterator()
        self.has_ended: bool = True
        self.changes.wake()
        # A stop sets the feeds back to these elements, or logs their error.
        while self.first_unused() is not None:
            await self.changes.wait()

    async def _read_next(self) -> bool:
        """Read the next element when there is room for it. Return whether there was one."""
        while len(self.unused) >= max(self._ahead, bool(self._asking)):
            await self.changes.wait()
        if self.is_draining:
            return False
        element = Element(self)
        self.elements.append(element)
        observers = self._coordinator.observers if self._ahead or self._thread else ()
        try:
            with active("prefetch", "take a feed", observers=observers):
                if self._is_async:
                    await self._read_async(element)
                else:
                    await self._call(self._read_sync, element)
        finally:
            self.changes.wake()
        if element.use == "being read":
            self.elements.remove(element)
            return False
        return element.error is None

    def _read_sync(self, element: Element) -> None:
        """Read an element. It stays as it is at the end of the feeds. A thread ends with the
        element or its error, also after a cancel.
        """
        try:
            if self._iterator is None:
                self._iterator = iter(self.feeds)
            element.value = next(self._iterator)
        except StopIteration:
            return
        except Exception as error:
            element.error = error
        element.use = "unused"

    async def _read_async(self, element: Element) -> None:
        try:
            if self._iterator is None:
                self._iterator = aiter(self.feeds)
            element.value = await anext(self._iterator)
        except StopAsyncIteration:
            return
        except Exception as error:
            element.error = error
        element.use = "unused"

    async def _close_iterator(self) -> None:
        """Close the iterator, if it is a generator."""
        iterator: Any = self._iterator
        self._iterator = None
        try:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()
            elif isinstance(iterator, GeneratorType) and not iterator.gi_running:
                await self._call(iterator.close)
        except Exception as error:
            # Raised here, it would replace the cancellation that ends the task.
            if not is_clean_end(error):
                logger.exception(
                    "%s: closing the feeds %s failed",
                    self._coordinator.requests.label,
                    safe_repr(self.feeds),
                )

    async def _call(self, fn: Callable[..., object], *args: object) -> None:
        """Call a function that may block."""
        if self._thread:
            await to_thread(fn, *args, grace_secs=self._coordinator.owner.grace_secs)
        else:
            fn(*args)
