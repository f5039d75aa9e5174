"""Feeds that a task of the session takes ahead of the runs that use them, or in a worker thread."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from aiohooks._aio.cancel import to_thread, wait_done
from aiohooks._aio.clock import wake
from aiohooks._aio.observers import observing
from aiohooks._aio.overlap import Wait
from aiohooks._diagnostics import Waiting
from aiohooks.checkpoint.stateful import Stateful, is_stateful
from aiohooks.errors import StopRequestedError, raise_unchanged

if TYPE_CHECKING:
    from aiohooks.session._state import SessionState
    from aiohooks.session.recovery import SessionSupervisor

_END: Any = object()


class _Taken(NamedTuple):
    """An element, and the state of the feeds behind it, if they have one."""

    element: Any
    state: Any


class FeedsAhead(Waiting):
    """Reads feeds in one task of the session, in order, up to `ahead` elements further than was asked for.

    The task begins with the first element. It ends with the feeds, in a drain before the next element, at a stop or with the
    session, and closes the iterator.
    Feeds that are `Stateful` are then set back to the last element that was used, so that their state counts no other. The
    elements of others stay, for another loop over the same steps.
    """

    def __init__(
        self, feeds: AsyncIterable[Any] | Iterable[Any], ahead: int, *, thread: bool, supervisor: SessionSupervisor
    ) -> None:
        self._feeds = feeds
        self._stateful = cast("Stateful", feeds) if is_stateful(feeds) else None
        self._ahead = ahead
        self._thread = thread
        self._supervisor = supervisor
        self._taken: deque[_Taken] = deque()
        self.used_state: Any = None
        """The state of the feeds behind the element that was asked for last."""
        self._last: _Taken | None = None
        """The element that was asked for last, and the state before it."""
        self._failure: Exception | None = None
        self._ended = False
        self._restoring = False
        self._taking = False
        """Whether a thread takes an element."""
        self._reader: asyncio.Task[None] | None = None
        self._asking = 0
        """How many wait for the next element."""
        self._waiters: list[asyncio.Future[None]] = []
        """Of the reader, which waits for room, and of those who wait for elements; each looks again after a change."""

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order."""
        return [one.element for one in self._taken]

    @property
    def own_reader(self) -> asyncio.Task[None] | None:
        """The task that reads, if it reads nothing ahead: no other activity than the wait for the next feed."""
        return None if self._ahead or self._thread else self._reader

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> asyncio.Task[Any] | None:
        return self._reader if method == "wait_ready" and self._reader is not None and not self._reader.done() else None

    @property
    def is_ready(self) -> bool:
        """Whether `take` has an answer: an element, a failure or the end."""
        return bool(self._taken) or self._failure is not None or self._ended

    async def wait_ready(self) -> None:
        """Wait until `take` has an answer, which another task may get first. No element is lost with this wait."""
        if self.is_ready:
            return
        self._asking += 1
        self._notify_change()
        try:
            while not self.is_ready:
                if self._reader is None and not self._restoring:
                    self.used_state = self._state()
                    if self not in self._supervisor.feeds:
                        self._supervisor.feeds.append(self)
                    self._reader = self._supervisor.root.start_soon(self._read, name="feeds")
                await self._wait_for_change()
        finally:
            self._asking -= 1

    def take(self) -> Any:
        """Return the next element.

        Raises:
            StopAsyncIteration: the feeds have ended.
            Exception: the failure of the feeds.
        """
        if not self._taken and self._failure is not None:
            error, self._failure = self._failure, None
            raise_unchanged(error)
        if not self._taken:
            if self in self._supervisor.feeds:
                self._supervisor.feeds.remove(self)  # not before: a recovery may restore feeds that have been read to the end
            raise StopAsyncIteration
        element, state = self._taken.popleft()
        self._last, self.used_state = _Taken(element, self.used_state), state
        self._notify_change()
        return element

    def put_back(self) -> None:
        """Make the element that was asked for last the next one again: the run that got it has changed nothing."""
        if self._last is None:
            return
        (element, before), self._last = self._last, None
        if self._reader is None and self._stateful is not None:
            self._stateful.load_state_dict(before)
        else:
            self._taken.appendleft(_Taken(element, self.used_state))
        self.used_state = before

    def knows_state_of(self, one: object) -> bool:
        """Return whether `one` are these feeds, and their own state may be ahead of `used_state`."""
        return one is self._feeds and self._reader is not None

    async def stop_reading(self) -> None:
        """Stop reading feeds whose state is about to be restored; they are read anew from there, after `continue_reading`."""
        if self._stateful is None:
            return
        self._restoring = True
        if self._reader is not None:
            self._reader.cancel()
            await wait_done([self._reader], self._supervisor.grace_secs)
            self._ended, self._failure = False, None

    def continue_reading(self, restored: Iterable[object]) -> None:
        """Read on for those who wait, from the state that these objects have been given."""
        self._restoring = False
        if any(one is self._feeds for one in restored):
            self._ended = False  # if not restored, it stays at the end: many feeds begin another pass when they are read there
        self._notify_change()

    # -- the task

    async def _read(self) -> None:
        used = False
        try:
            # A stop ends it, but no failure from which the session recovers.
            state = self._supervisor.state
            await state.whole.until(FeedWait(state, lambda: None), self._take_all())
            used = True
        except StopRequestedError:
            pass  # the loop that asks for elements gets it as well
        finally:
            self._reader = None
            if not used and self._stateful is not None:
                self._stateful.load_state_dict(self.used_state)
                self._taken.clear()

    async def _take_all(self) -> None:
        """Take the elements in one task: what a generator has around its `yield`, such as a time limit, belongs to a task."""
        iterator: Any = aiter(self._feeds) if isinstance(self._feeds, AsyncIterable) else iter(self._feeds)
        try:
            while await self._take_next(iterator):
                pass
        except Exception as error:
            if self._supervisor.state.whole.should_stop():
                raise
            self._failure = error
        finally:
            await self._close(iterator)
        self._ended = True
        self._notify_change()
        while self._taken:  # their states are known until they are used
            await self._wait_for_change()

    async def _take_next(self, iterator: Any) -> bool:
        """Take the next element when there is room for it; return whether there was one."""
        while len(self._taken) >= max(self._ahead, bool(self._asking)):
            await self._wait_for_change()
        if self._supervisor.state.drain_reason is not None:
            return False
        taken: list[_Taken] = []

        def take() -> None:
            self._taking = True
            try:
                taken.append(_Taken(next(iterator, _END), self._state()))
            finally:
                self._taking = False

        try:
            observers = self._supervisor.state.observers if self._ahead or self._thread else ()
            with observing(observers, "prefetch", "take a feed"):
                if isinstance(self._feeds, AsyncIterable):
                    taken.append(_Taken(await anext(iterator, _END), self._state()))
                elif self._thread:
                    await to_thread(take, grace_secs=self._supervisor.grace_secs)
                else:
                    take()
        finally:  # a thread ends with its element, also after a cancel
            self._taken.extend(one for one in taken if one.element is not _END)
            self._notify_change()
        return taken[0].element is not _END

    async def _close(self, iterator: Any) -> None:
        """Close what was made for this loop, and generators; a thread that has hung still uses its iterator."""
        is_generator = isinstance(self._feeds, Generator | AsyncGenerator)
        if self._taking or (iterator is self._feeds and not is_generator):
            return
        if hasattr(iterator, "aclose"):
            await iterator.aclose()
        elif hasattr(iterator, "close"):
            await to_thread(iterator.close, grace_secs=self._supervisor.grace_secs) if self._thread else iterator.close()

    def _state(self) -> Any:
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    async def _wait_for_change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _notify_change(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)


class FeedWait(Wait[Any]):
    """A wait for feeds: a failure from which the session recovers does not end it, but is passed to `on_recoverable`."""

    __slots__ = ("_on_recoverable", "_state")

    def __init__(self, state: SessionState, on_recoverable: Callable[[], None]) -> None:
        super().__init__("next feed")
        self._state = state
        self._on_recoverable = on_recoverable

    def end(self, cause: BaseException) -> None:
        if self._state.recovers(cause):
            self._on_recoverable()
        else:
            super().end(cause)
