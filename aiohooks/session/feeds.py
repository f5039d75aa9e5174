"""The feeds of the loops of a session: where elements come from, and the use of each.

    SessionFeeds     the sources of all loops of a session, over its recoveries
    FeedSource       the elements of all loops over the same feeds
    QueueSource      takes elements from a queue
    IterableSource   reads elements from an iterable, when a step begins; or in a task, if the
                     iterable may wait or block, or is prefetched
    Element          one element, from its read to the end of its run

A source reads an element from its feeds, a loop takes the element for a run, and the run uses it
when it is committed. The place of an element is its number in the order of the reads. An element
that was taken and not used goes back to its place, and waits for the next loop over the same feeds.

Feeds with `state_dict` have a state, which counts the elements that they have given. They are
tracked if the `Scaffold` has them, so that checkpoints contain this state, and recoveries restore
it: then the feeds give the elements after the checkpoint again.
"""

from __future__ import annotations

import asyncio
import copy
import enum
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
from typing import TYPE_CHECKING, Any, TypeAlias
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

# Python has the error since 3.13. Before that, the empty tuple catches nothing.
_QueueShutDown: type[Exception] | tuple[()] = getattr(asyncio, "QueueShutDown", ())
_HOW_TO_KEEP_FEEDS = "give the loop feeds with a state_dict, and track them in the Scaffold"

Feeds: TypeAlias = AsyncIterable[Any] | Iterable[Any] | asyncio.Queue[Any]
"""The feeds of the runs of a loop, one element for each."""


class FeedsWentBack(BaseException):
    """Ends a run whose element is used later, after the elements that come before it: a recovery of
    another task has restored the feeds, or an earlier element has gone back to its place.
    """


class Use(enum.Enum):
    """How far an element has come, from its read to the end of its run."""

    BEING_READ = enum.auto()
    UNUSED = enum.auto()
    """It was read, or has gone back to its place after a run that failed. An element that no state
    counts stays so during its run.
    """
    TAKEN = enum.auto()
    """A run has it, and a state of the feeds or of a tracked object counts it."""
    USED = enum.auto()
    """A recovery during its run has restored a checkpoint that contains the step of the run."""
    READ_AGAIN = enum.auto()
    """A recovery during its run has restored the feeds, which give it again as another object."""


class Element:
    """An element of feeds, or the error that they have raised instead of one."""

    use: Use = Use.BEING_READ
    value: Any = None
    error: Exception | None = None

    before: Any = None
    """The state of the feeds before the read, if they have a state."""

    def __init__(self, source: FeedSource) -> None:
        """Make an element before it is read: with its place, and with the current state of the
        feeds.
        """
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
        """The waits of the run in progress, which have the scope of its attempt."""
        self.session: Session | None = None
        """The raw session, or None while it is being replaced."""
        self.tracked: Mapping[str, object] = {}
        """The tracked objects of the latest raw session."""
        self.loops: WeakSet[object] = WeakSet()
        """The loops of steps that have begun and not ended. No reference keeps a loop that was left
        by `break`, so it disappears from here.
        """
        self.sources: WeakSet[FeedSource] = WeakSet()
        self.in_use: dict[int, Element] = {}
        """The element that each task has taken for its run, by the id of the task, until the run
        has ended. Only elements that a state counts are here.
        """
        self._kept: set[FeedSource] = set()
        """The sources that must outlive their loops, as `sources` does not keep them: those with
        elements that loops have left, and those of tracked feeds.
        """
        self._fed: set[int] = set()
        """The ids of the tracked objects that were given to a loop as its feeds. They stay valid,
        as the `Scaffold` keeps the objects.
        """
        self.lost_step: int = 0
        """The last step that used an element which does not come again after a recovery."""
        self._reached_step = -1
        """The last step that was made before a recovery, or -1 before the first recovery."""

    # -- the sources

    def source_for(
        self,
        feeds: Feeds | None,
        producer: Producer | None,
        prefetch: int,
        *,
        thread: bool,
    ) -> FeedSource | None:
        """Check the options of `AsyncMonitoredSession.steps`, and return the source of its loop.

        Another loop over the same feeds shares its source. None is for a loop without feeds.
        """
        prefetch = checked_int(prefetch, "prefetch")
        _check_options(feeds, producer, prefetch, thread=thread)
        if feeds is None:
            return None
        source = self._earlier_source(feeds)
        if isinstance(feeds, asyncio.Queue):
            return source or QueueSource(self, feeds)
        if not isinstance(source, IterableSource):
            source = IterableSource(self, feeds)
        if self.is_tracked(feeds):
            self._fed.add(id(feeds))
        source.counting = self._objects_behind(feeds)
        if prefetch and source.counting:
            raise InvalidArgumentError(
                f"prefetch is {prefetch}, and {safe_repr(feeds)} may read a tracked object, whose"
                " state would count elements that no step has used; give the object itself as"
                " feeds=, and change its elements in the step, or leave out prefetch"
            )
        source.set_options(prefetch, thread=thread)
        self.keep_sources()
        return source

    def _earlier_source(self, feeds: object) -> FeedSource | None:
        """Return the source that another loop over the same feeds has made, or None.

        There is one only for feeds that continue where that loop has left them. Other feeds, such
        as a list, begin again with each loop.
        """
        if isinstance(feeds, (asyncio.Queue, Iterator, AsyncIterator)) or is_stateful(feeds):
            for source in self.sources:
                if source.feeds is feeds and not source.is_used_up:
                    return source
        return None

    def _objects_behind(self, feeds: object) -> list[object]:
        """Return the tracked objects from which the feeds may read their elements: for example, the
        loader that a generator iterates over.

        The state of such an object counts all elements that the feeds have read, also those that no
        step has used, so that a checkpoint would skip them.
        """
        # The state of tracked feeds themselves is right: `state_of` knows which of their elements
        # were used. A collection contains its elements, so it reads no other object.
        if self.is_tracked(feeds) or isinstance(feeds, Collection):
            return []
        return [
            value
            for value in self.tracked.values()
            if id(value) not in self._fed and _may_give_elements(value)
        ]

    def keep_sources(self) -> None:
        """Keep the sources that may be needed after their loops have ended, and no others."""
        self._kept = {
            source for source in self.sources if source.elements or self._gives_again(source)
        }

    def end_loop(self, loop: object) -> None:
        """Note that a loop has ended. In a drain, the end of the last loop stops the session."""
        self.loops.discard(loop)
        requests = self.coordinator.requests
        if requests.drain_reason is not None and not self.loops:
            requests.request_stop(requests.drain_reason)

    @property
    def unused(self) -> int:
        """The number of elements that were read and not used."""
        return sum(len(source.unused) for source in self.sources)

    def is_tracked(self, feeds: object) -> bool:
        """Return whether a recovery that restores the session restores these feeds."""
        return any(feeds is value for value in self.tracked.values())

    def state_of(self, stateful: Stateful) -> Any:
        """Return the state of a tracked object for a checkpoint.

        If the object was given as feeds, this is its state before the first element that no
        committed run has used, so that restored feeds give this element again.
        """
        own_source = self._earlier_source(stateful)
        unused = [] if own_source is None else self._unused_elements(own_source)
        if unused:
            return min(unused, key=_place_of).before
        for source in self.sources:
            if any(value is stateful for value in source.counting):
                self._warn_if_unused(source)
        return stateful.state_dict()

    def _warn_if_unused(self, source: FeedSource) -> None:
        """Warn if feeds have read elements that no step has used. The state of the tracked object
        from which they may have read them counts these elements as used.
        """
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
        return [element for element in elements if not self._is_used_by_committed_run(element)]

    def taken_of(self, source: FeedSource) -> list[Element]:
        """Return the elements of a source that runs have taken and not yet used.

        There are none if no state counts the elements: these are not in `in_use`.
        """
        return [
            element
            for element in self.in_use.values()
            if element.source is source and element.use is Use.TAKEN
        ]

    def _is_used_by_committed_run(self, element: Element) -> bool:
        """Return whether this is the element of the run in progress, and that run is committed.

        A checkpoint that a hook saves at the end of that run must count the element as used.
        """
        run = self._waits.scope
        if run is None or not run.active or not run.committed:
            return False
        # Elements in use are found by the task that makes the run.
        return element is self.in_use.get(run.runner)

    # -- the element of a run

    def uses_tracked_feeds(self, task: int) -> bool:
        """Return whether the run of the task with this id has an element of tracked feeds."""
        element = self.in_use.get(task)
        return element is not None and self.is_tracked(element.source.feeds)

    def raise_if_element_went_back(self) -> None:
        """Raise `FeedsWentBack` if the current task must not make its run with the element that it
        has taken.

        Either a recovery by another task has restored the feeds. Or the run of another task has
        failed, and its element, which comes before this one, has gone back to its place. If this
        element were used first, a checkpoint could not say that only the earlier one is unused.
        """
        element = self.in_use.get(id(current_task()))
        if element is None:
            return
        earlier = element.source.first_unused()
        if element.use is Use.READ_AGAIN or (earlier and earlier.place < element.place):
            raise FeedsWentBack

    def keep_element_of_run(self) -> None:
        """Count the element of the current task's run as used, because the restored checkpoint
        contains the step of that run.
        """
        element = self.in_use.get(id(current_task()))
        if element is not None:
            element.use = Use.USED

    # -- recoveries

    def note_loss(self, session: Session, step: int) -> None:
        """Note that a raw session, which has reached `step`, is about to be replaced."""
        self._reached_step = max(self._reached_step, step)
        if was_fed(session) and not any(map(self._gives_again, self.sources)):
            # Its runs were fed by hand or by a hook, whose feeds do not come again.
            self.lost_step = self._reached_step
        self.session = None

    def _gives_again(self, source: FeedSource) -> bool:
        """Return whether a recovery makes the source give its elements again."""
        return self.is_tracked(source.feeds) and not source.is_used_up

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored, until `continue_reading`."""
        for source in list(self.sources):
            await source.stop_reading()

    def continue_reading(self) -> None:
        """Continue to read for the loops that wait, from the current state of the feeds."""
        for source in self.sources:
            source.changes.wake()

    def note_new_session(self, session: Session, recovering_from: BaseException | None) -> None:
        """Note a new raw session.

        If its state was restored from a checkpoint, the tracked feeds were, too: their elements in
        use come again. After a recovery, the undone steps are reported.

        Raises:
            FeedsLostError: the feeds of undone steps are lost, and the policy says so.
        """
        self.session = session
        self.tracked = session.tracked
        if session.restored is None:
            return
        for source in self.sources:
            if self.is_tracked(source.feeds):
                source.begin_again()
        is_recovery = self._reached_step >= 0
        if is_recovery:
            self._report_undone_steps(session.restored, recovering_from)

    def _report_undone_steps(
        self, restored: Restored, recovering_from: BaseException | None
    ) -> None:
        """Log how many steps a recovery has undone, by the checkpoint that it has restored.

        Raises:
            FeedsLostError: their feeds are lost, and the policy says so. Its cause is the error
                from which the session recovers.
        """
        step = restored.checkpoint.step
        undone = self._reached_step - step
        feeds_are_lost = self.lost_step > step
        steps = f"{undone} steps are undone" if undone > 1 else "1 step is undone"
        text = (
            f"went back from step {self._reached_step} to step {step}, that of"
            f" {restored.checkpoint.path}: {steps}"
        )
        self._reached_step = step
        self.lost_step = min(self.lost_step, step)
        if undone <= 0:
            return
        if feeds_are_lost:
            text += f", and the feeds are gone; {_HOW_TO_KEEP_FEEDS}"
            if self.coordinator.owner.policy.on_lost_feeds == "raise":
                raise FeedsLostError(f"the recovery {text}") from recovering_from
        elif any(map(self._gives_again, self.sources)):
            text += ", and the feeds come again"
        logger.warning("%s: %s", self.coordinator.requests.label, text)


def _place_of(element: Element) -> int:
    return element.place


def _may_give_elements(tracked: Any) -> bool:
    """Return whether a tracked object may be a loader, from which feeds read elements.

    An iterable that can be called or indexed is more likely a model, such as a torch module.
    """
    if isinstance(tracked, (AsyncIterator, Iterator)):
        return True
    is_model = callable(tracked) or hasattr(tracked, "__getitem__")
    return isinstance(tracked, (AsyncIterable, Iterable)) and not is_model


def _check_options(feeds: object, producer: object, prefetch: int, *, thread: bool) -> None:
    """Raise `InvalidArgumentError` for invalid feeds, or options that do not fit them."""
    shown = safe_repr(feeds)
    is_queue = issubclass(type(feeds), asyncio.Queue)
    # A mapping or a text can be iterated over, but is the element of one step.
    is_element = issubclass(type(feeds), (Mapping, str, bytes))
    is_iterable = issubclass(type(feeds), (AsyncIterable, Iterable)) and not is_element
    if not (is_iterable or is_queue or feeds is None):
        close_unawaited(feeds)
        raise InvalidArgumentError(
            f"feeds is {shown}; give something to iterate over, sync or async, that has"
            " an element for each step, or an asyncio.Queue"
        )
    # When its producers have ended, the session ends the wait for an element of a queue. In a
    # generator, this could interrupt its work on an element.
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
    """The elements of all loops over the same feeds. The subclasses read them.

    For an element, the session calls `take`, and `wait` if there is none yet, then makes the run,
    and calls `settle`.
    """

    stateful: Stateful | None = None
    """The feeds, if they have a state, which counts their elements. Otherwise None."""
    counting: Sequence[object] = ()
    """Tracked objects behind the feeds, whose states count the elements too (`_objects_behind`)."""
    ends_at_drain: bool = False
    """Whether a drain ends the wait for an element. It does if this loses no element."""

    def __init__(self, session: SessionFeeds, feeds: object) -> None:
        self.feeds: Any = feeds
        self.elements: list[Element] = []
        """The elements that no loop has taken, and the element that is being read, in the order of
        their places.
        """
        self.has_ended: bool = False
        """Whether the feeds give no more elements."""
        self.changes: Waiters = Waiters()
        """Waits for a change of the other attributes: a task that reads waits here for room, and
        loops wait for elements. Each of them checks the attributes again after a change.
        """
        self.reads: int = 0
        """The number of reads begun, which is the place of the latest element."""
        self._last_used = 0
        """Only for feeds with a state: the last place whose element was used."""
        self._session = session
        self._coordinator = session.coordinator
        session.sources.add(self)

    @property
    def unused(self) -> list[Any]:
        """The values of the elements that were read and not used, in order."""
        elements = [element for element in self.elements if element.use is Use.UNUSED]
        return [element.value for element in elements if element.error is None]

    @property
    def is_used_up(self) -> bool:
        """Whether all elements were used, so that another loop over the same feeds begins anew."""
        return self.has_ended and not self.elements and not self._session.taken_of(self)

    def take(self, producers: Producers | None) -> Element | None:
        """Return the next element, or None if the caller must `wait` for it.

        If a state counts the element, it is TAKEN by the run of the current task until `settle`.

        Raises:
            StopAsyncIteration: the feeds have ended.
            Exception: the error that the feeds have raised instead of the element.
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
            element.use = Use.TAKEN
            self._session.in_use[id(current_task())] = element
        return element

    def first_unused(self) -> Element | None:
        """Return the first element that no loop has taken, or None."""
        for element in self.elements:
            if element.use is Use.UNUSED:
                return element
        return None

    def _read_now(self, producers: Producers | None) -> Element | None:
        """Read the next element, and return it, or None if that needs a wait.

        Raises:
            StopAsyncIteration: the feeds have ended.
        """
        raise NotImplementedError

    async def wait(self) -> None:
        """Wait until `take` may have a result. No element is lost if this wait is cancelled."""
        raise NotImplementedError

    def settle(self, element: Element, *, is_used: bool) -> None:
        """End the use of an element that `take` has returned to the current task.

        Args:
            element: the element.
            is_used: whether its run is committed, so that the element counts as used. Otherwise it
                goes back to its place, for another loop.
        """
        session = self._session
        # An element that no state counts has stayed UNUSED, and is not in `in_use`.
        if element.use is not Use.UNUSED:
            del session.in_use[id(current_task())]
            if element.use is Use.READ_AGAIN:
                # The restored feeds give it again as another object.
                return
        if not is_used:
            element.use = Use.UNUSED
            self.elements = sorted([*self.elements, element], key=_place_of)
            self._set_back()
            return
        if self.stateful is not None:
            self._last_used = max(self._last_used, element.place)
            if session.is_tracked(self.feeds):
                return
        # These feeds are not restored by a recovery, so they never give the element again.
        if session.session is not None:
            session.lost_step = session.session.committed_step

    def _set_back(self) -> None:
        """Set feeds with a state back, so that they give the elements again that were read last and
        that no loop has taken.
        """

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored. Reading begins again there."""

    def begin_again(self) -> None:
        """Begin to read again, after a recovery has restored the state of these feeds: they give
        every element again that the restored checkpoint does not count as used.
        """
        for element in self._session.taken_of(self):
            element.use = Use.READ_AGAIN
        # Those are the elements of runs, and these the elements that no run has taken yet.
        self.elements.clear()
        # Feeds that are not restored stay ended: to read many kinds of feeds at their end begins
        # another pass over their elements.
        self.has_ended = False

    @property
    def is_draining(self) -> bool:
        """Whether the session drains, so that no other element is read."""
        return self._coordinator.requests.drain_reason is not None

    def log_after_stop(self, error: Exception) -> None:
        """Raise an error of the feeds, or only log it if a stop was requested before.

        The cause of a stop often makes the feeds fail as well, such as a signal to all processes of
        a group. The feeds then count as ended. A clean-end error is not logged either: the stop may
        have raised it in a wait of the feeds.
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
    """Takes elements from a queue, and calls `task_done` for each element that was used."""

    ends_at_drain = True
    _due: int | None = None
    """In a drain, how many more elements to take from the queue before it ends. None means that no
    drain has begun.
    """

    def _read_now(self, producers: Producers | None) -> Element | None:
        if self.is_draining:
            self._end_producers(producers)
        if self.has_ended:
            raise StopAsyncIteration
        if self.feeds.empty():
            return None
        return self._element_of(self.feeds.get_nowait())

    def _element_of(self, value: Any) -> Element:
        """Make the element of a value that was taken out of the queue, and count it in a drain."""
        if self._due is not None:
            self._due -= 1
        element = Element(self)
        element.value = value
        element.use = Use.UNUSED
        return element

    def _end_producers(self, producers: Producers | None) -> None:
        """Called in a drain before each read: cancel the producers when the elements that they wait
        to put are taken.

        Without named producers, it is not known which task to cancel. Then the queue ends when
        these elements are taken, although tasks may put more.
        """
        if self._due is None:
            self._due = self._count_due(producers)
        # An empty queue has no task that waits to put an element.
        if self._due > 0 and not self.feeds.empty():
            return
        self._coordinator.end_producers(producers or ())
        if producers is None and not self.feeds.empty():
            self.has_ended = True

    def _count_due(self, producers: Producers | None) -> int:
        """Return an upper bound of the elements to take in a drain that begins now: one for each
        task that may wait in a `put`.
        """
        if producers:
            # The elements in the queue need no count: when these producers are cancelled, the queue
            # is read until it is empty.
            return len(producers)
        # Any task may be a producer. Too high a bound does no harm, as an empty queue ends the
        # drain.
        queued: int = self.feeds.qsize()
        return queued + len(asyncio.all_tasks())

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
    """Iterates over feeds: in `take`, or in a task of the session, if the feeds may wait or block,
    or are prefetched.

    The task starts when a loop waits for an element. It ends with the feeds, in a drain before the
    next element, at a stop, or with the session, and closes the iterator. Feeds that are `Stateful`
    are then set back to the last element that was used, so that their state counts no other
    elements. For feeds without a state, the unused elements stay here, for another loop over them.
    """

    def __init__(self, session: SessionFeeds, feeds: AsyncIterable[Any] | Iterable[Any]) -> None:
        super().__init__(session, feeds)
        if is_stateful(feeds):
            self.stateful: Stateful | None = self.feeds
        self._is_async = isinstance(feeds, AsyncIterable)
        self._iterator: Any = None
        """The iterator of the feeds. None before the first read, and after the feeds were set back
        or their iterator was closed: the next read then makes another one.
        """
        self._reader: asyncio.Task[None] | None = None
        """The task that reads the feeds, if there is one."""
        self._asking = 0
        """How many loops wait for the next element."""

    def set_options(self, ahead: int, *, thread: bool) -> None:
        """Set how the feeds are read from now on. The latest loop over the feeds decides.

        Args:
            ahead: how many elements to read that no loop has asked for yet (`prefetch`).
            thread: whether a thread reads them.
        """
        self._ahead = ahead
        self._thread = thread
        self._needs_task = self._is_async or ahead > 0 or thread
        self.changes.wake()

    @property
    def _can_begin(self) -> bool:
        """Whether reading may begin: nothing reads the feeds, and no recovery may restore them."""
        if self._reader is not None:
            return False
        return self.stateful is None or self._session.session is not None

    def _read_now(self, producers: Producers | None) -> Element | None:
        if self.has_ended:
            raise StopAsyncIteration
        if self._needs_task or self._reader is not None:
            # A task reads the elements. `wait` starts it.
            return None
        if self.stateful is not None and not self._can_begin:
            # A recovery may restore the feeds. `wait` waits for it.
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
        if element.use is Use.BEING_READ:
            # `_read_sync` has found the end of the feeds.
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
                        # `take` can read it.
                        return
                    self._reader = self._coordinator.start_soon(self._read, name="feeds")
                with active("wait", "next feed", self._awaited_reader):
                    await self.changes.wait()
        finally:
            self._asking -= 1

    def _awaited_reader(self) -> Awaited | None:
        """Return the task that reads, for reports of the wait for it."""
        return None if self._reader is None else awaited_tasks(self._reader)

    def _set_back(self) -> None:
        """Set feeds with a state back, so that they give the last elements again, which no loop has
        taken. Forget these elements.

        This does nothing while a task reads the feeds. An element stays if a loop has taken a later
        one: the feeds would give the later one again, too.
        """
        if self.stateful is None or self._reader is not None:
            return
        taken_places = [element.place for element in self._session.taken_of(self)]
        last_place = max([self._last_used, *taken_places])
        first_forgotten = None
        while self.elements and self.elements[-1].place > last_place:
            first_forgotten = self.elements.pop()
        if first_forgotten is not None:
            self.has_ended = False
            self._iterator = None
            self.stateful.load_state_dict(first_forgotten.before)

    async def stop_reading(self) -> None:
        if self.stateful is None:
            return
        reader = self._reader
        if reader is not None:
            reader.cancel()
            await wait_done([reader], self._coordinator.owner.grace_secs)
            if reader.done():
                # `_read` does this, but not if it was cancelled before it began.
                self._reader = None
        self._iterator = None

    # -- the task

    async def _read(self) -> None:
        """Read the feeds until their end, a stop, a drain or an error. Then set them back."""
        try:
            # As a lasting wait: no failure from which the session recovers ends the reading.
            await self._coordinator.wait_until_ended("next feed", self._read_all(), is_lasting=True)
        except StopRequestedError:
            # The loop that waits for an element gets this error as well, and ends by it.
            pass
        finally:
            self._reader = None
            last = self.elements[-1] if self.elements else None
            # After a stop no loop takes the last element, so its error would be lost.
            if last is not None and last.error is not None and self._coordinator.should_stop():
                self.elements.pop()
                self.log_after_stop(last.error)
            self._set_back()

    async def _read_all(self) -> None:
        """Read all elements, and close the iterator, in the current task.

        It has to be a single task: a block around the `yield` of a generator, such as a time limit,
        belongs to the task that has entered it.
        """
        task = current_task()
        try:
            while await self._read_next() and not task.cancelling():
                pass
        finally:
            await self._close_iterator()
        if task.cancelling():
            # The feeds have swallowed the cancellation by which this task ends, for example because
            # their cleanup has raised another error.
            return
        self.has_ended: bool = True
        self.changes.wake()
        # The task continues until loops have taken all elements: if a stop comes before that, the
        # end of `_read` sets the feeds back, or logs the error of the last element.
        while self.first_unused() is not None:
            await self.changes.wait()

    async def _read_next(self) -> bool:
        """Wait until there is room for an element, and read it.

        Returns:
            Whether to continue. This is False at the end of the feeds, after their error, and in a
            drain.
        """
        while not self._has_room:
            await self.changes.wait()
        if self.is_draining:
            return False
        element = Element(self)
        self.elements.append(element)
        # Without prefetching, a loop waits for this read, and its wait is observed.
        observers = self._coordinator.observers if self._ahead or self._thread else ()
        try:
            with active("prefetch", "take a feed", observers=observers):
                if self._is_async:
                    await self._read_async(element)
                else:
                    await self._call(self._read_sync, element)
        finally:
            self.changes.wake()
        if element.use is Use.BEING_READ:
            # The feeds have ended, and given no value to the element.
            self.elements.remove(element)
            return False
        return element.error is None

    @property
    def _has_room(self) -> bool:
        """Whether to read another element: fewer are unused than are to be prefetched, or there is
        none and a loop waits for it.
        """
        wanted = max(self._ahead, 1) if self._asking else self._ahead
        return len(self.unused) < wanted

    def _read_sync(self, element: Element) -> None:
        """Read the value of an element, or the error of the feeds, into it.

        At the end of the feeds, the element stays BEING_READ. In a thread this runs to its end,
        even if the task that has started the thread is cancelled.
        """
        try:
            if self._iterator is None:
                self._iterator = iter(self.feeds)
            element.value = next(self._iterator)
        except StopIteration:
            return
        except Exception as error:
            element.error = error
        element.use = Use.UNUSED

    async def _read_async(self, element: Element) -> None:
        """Read the value of an element, or the error of the feeds, into it, like `_read_sync`. At
        the end of the feeds, the element stays BEING_READ.
        """
        try:
            if self._iterator is None:
                self._iterator = aiter(self.feeds)
            element.value = await anext(self._iterator)
        except StopAsyncIteration:
            return
        except Exception as error:
            element.error = error
        element.use = Use.UNUSED

    async def _close_iterator(self) -> None:
        """Forget the iterator, and close it if it is a generator.

        An error of the closing is only logged, unless it is to end the program: it would replace
        the cancellation that ends this task.
        """
        iterator: Any = self._iterator
        self._iterator = None
        failure: BaseException | None = None
        try:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()
            elif isinstance(iterator, GeneratorType) and not iterator.gi_running:
                await self._call(iterator.close)
        except Exception as error:
            failure = error
        except BaseExceptionGroup as group:
            # A task group around a `yield` puts the GeneratorExit that closes the generator into a
            # group. The rest of the group is the failure.
            _, failure = group.split(GeneratorExit)
            if failure is not None and not isinstance(failure, Exception):
                raise failure from None
        if failure is not None and not is_clean_end(failure):
            logger.error(
                "%s: closing the feeds %s failed",
                self._coordinator.requests.label,
                safe_repr(self.feeds),
                exc_info=failure,
            )

    async def _call(self, fn: Callable[..., object], *args: object) -> None:
        """Call a function, in a thread if the loop over the feeds asks for one."""
        if self._thread:
            await to_thread(
                fn,
                *args,
                grace_secs=self._coordinator.owner.grace_secs,
                what=f"the thread that reads the feeds {safe_repr(self.feeds)}",
            )
        else:
            fn(*args)
