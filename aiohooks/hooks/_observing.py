"""What hooks have in common that write records in a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks.errors import InvalidArgumentError
from aiohooks.graph.graph import Node
from aiohooks.hooks.every import Sampling
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook

if TYPE_CHECKING:
    from aiohooks.graph.session import Session


Values = Mapping[str, Any] | Iterable[Any]
"""A mapping from a tag to a fetch, or several nodes or names, which name themselves."""


def checked_values(values: object, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The fetches by tag.

    Raises:
        InvalidArgumentError: not a mapping and not a list, a tag that is no text, or nothing at all.
    """
    if isinstance(values, str):
        raise InvalidArgumentError(f"values is the str {values!r}; give a mapping or a list: [{values!r}]")
    if values is None:
        fetches: dict[str, Any] = {}
    elif isinstance(values, Mapping):
        fetches = dict(values)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(values, Iterable):
        items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
        fetches = {item.name if isinstance(item, Node) else item: item for item in items}
    else:
        raise InvalidArgumentError(f"values is {values!r}; give a mapping from a tag to what to fetch, or a list")
    for tag in cast("Iterable[object]", fetches):
        if not isinstance(tag, str) or not tag:
            raise InvalidArgumentError(f"values has the tag {tag!r}; give a mapping from a non-empty str to what to fetch")
    if not fetches and not may_be_empty:
        raise InvalidArgumentError("values is empty; give a mapping from a tag to what to fetch")
    return fetches


def number(value: Any, tag: str) -> int | float:
    """A value as a plain number: of Python, or of one element of any library's array.

    Raises:
        InvalidArgumentError: it is not one number.
    """
    if not isinstance(value, (bool, int, float)):
        found = _item(value)
        if not isinstance(found, (bool, int, float)):
            raise InvalidArgumentError(f"{tag!r} is {_shown(value)}; give one number, a mean or a norm of it for example")
        return found
    return value


def plain(value: Any, tag: str) -> Any:
    """A value made of None, bool, int, float, str, lists and dicts with str keys alone; arrays become lists.

    Raises:
        InvalidArgumentError: something in it is none of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bool, int, float, str)):  # of a subclass, whose own repr would be written: an enumeration's
        return str.__str__(value) if isinstance(value, str) else float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {str(key): plain(item, f"{tag}.{key}") for key, item in mapping.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, tag) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        if type(listed) is not type(value):
            return plain(listed, tag)
    found = _item(value)
    if found is None:
        raise InvalidArgumentError(f"{tag!r} is {_shown(value)}; give numbers, texts, or lists or mappings of these")
    return found


def checked_path(path: object, what: str) -> str:
    """A path as a str.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(path, (str, os.PathLike)):
        text: object = os.fspath(path)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(text, str) and text:
            return text
    raise InvalidArgumentError(f"{what} is {path!r}; give a path")


def _item(value: Any) -> int | float | None:
    """The one number that it is, or None."""
    try:
        if callable(getattr(value, "item", None)):
            found = value.item()
        elif isinstance(value, (str, bytes, complex)):
            return None
        else:
            found = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch raises RuntimeError
        return None
    return found if isinstance(found, (bool, int, float)) else None


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and shape != ():
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_logger = logging.getLogger("aiohooks.hooks")
T = TypeVar("T")

OnWriteError = Literal["raise", "log"]
"""What becomes of a failed write: `"raise"` raises it in the next run at the latest, `"log"` says so once and goes on."""


def check_writing(max_queue: object, on_write_error: object) -> None:
    """Refuses a queue without room and another policy than the two.

    Raises:
        InvalidArgumentError: one of them.
    """
    if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 1:
        raise InvalidArgumentError(f"max_queue is {max_queue!r}; give a whole number of records, at least 1")
    if on_write_error not in ("raise", "log"):
        raise InvalidArgumentError(f'on_write_error is {on_write_error!r}; give "raise" or "log"')


class BackgroundWriter(Generic[T]):
    """Hands records to `write(records)` in a thread of its own, in order, as many at a time as are there.

    `put` waits while `max_queue` records are under way. A failed write loses its records, which are counted.
    """

    def __init__(self, write: Callable[[list[T]], None], *, what: str, max_queue: int, on_write_error: OnWriteError) -> None:
        """Starts nothing yet: the thread comes with the first record. `what` is for messages."""
        self.lost = 0
        """How many records could not be written."""
        self._write = write
        self._what = what
        self._max = max_queue
        self._raises = on_write_error == "raise"
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[T] = deque()
        self._in_hand: list[T] = []
        self._stopping = False
        self._waiting: list[asyncio.Future[None]] = []

    def check(self) -> None:
        """Raises the failure of an earlier write, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def pending(self) -> list[T]:
        """What is not written yet, oldest first."""
        with self._changed:
            return [*self._in_hand, *self._queue]

    async def put(self, record: T) -> None:
        """Gives it a record; waits while there is no room."""
        self.check()
        while self._under_way() >= self._max:
            await self._progress()
            self.check()
        with self._changed:
            self._queue.append(record)
            self._changed.notify_all()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._work, name=f"writer of {self._what}", daemon=True)
            self._thread.start()

    async def drain(self) -> None:
        """Waits until all is written; raises the failure of a write."""
        while self._under_way():
            await self._progress()
        self.check()

    async def aclose(self, *, grace_secs: float) -> None:
        """Lets the thread write what it has and end; a failure that nobody heard of is raised."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            await to_thread(thread.join, grace_secs=grace_secs)
        if self.lost and not self._raises:
            _logger.warning("%s: %d records were lost to failed writes", self._what, self.lost)
        self.check()

    def _under_way(self) -> int:
        with self._changed:
            return len(self._in_hand) + len(self._queue)

    async def _progress(self) -> None:
        """Waits until the thread has written something more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if not self._in_hand and not self._queue:
                return
            self._waiting.append(waiter)
        await waiter

    # -- in the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if not self._queue:
                    return
                self._in_hand = list(self._queue)
                self._queue.clear()
            try:
                self._write(self._in_hand)
            except Exception as error:
                self._failed(error)
            with self._changed:
                self._in_hand = []
                waiting, self._waiting = self._waiting, []
            if waiting and self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(_wake, waiting)
                except RuntimeError:  # the loop was closed with the session still open: nobody waits any more
                    return

    def _failed(self, error: Exception) -> None:
        first = self.lost == 0
        self.lost += len(self._in_hand)
        if self._raises:
            error.add_note(f"raised by the writer of {self._what}")
            self._failure = self._failure or error
        elif first:
            _logger.error("%s cannot be written; going on without these records", self._what, exc_info=error)


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for waiter in waiting:
        if not waiter.done():
            waiter.set_result(None)


"""How long the end of a session waits for the disk once it is cancelled."""


class WritingHook(SessionRunHook):
    """Asks for values in the runs that are due, raises what a write failed with, and lets all be written at the end.

    A subclass sets `_args` and `_sampling`; for a session it sets `_close_file`, makes `_writer`, and hands it the records.
    """

    _args: SessionRunArgs
    _sampling: Sampling
    _close_file: Callable[[], None] | None = None
    _writer: BackgroundWriter[Any] | None = None

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values if this run is to be written; raises what a write failed with."""
        if self._writer is not None:
            self._writer.check()
        return self._args if self._sampling.ask(run_context.global_step) else None

    async def end(self, session: Session) -> None:
        """Waits until all is in the file; raises what a write failed with."""
        if self._writer is not None:
            await self._writer.drain()

    async def close(self, exc: BaseException | None) -> None:
        """Writes what is left, and closes the file."""
        writer, self._writer = self._writer, None
        close_file, self._close_file = self._close_file, None
        try:
            if writer is not None:
                await writer.aclose(grace_secs=DEFAULT_GRACE_SECS)
        finally:
            if close_file is not None:
                await to_thread(close_file, grace_secs=DEFAULT_GRACE_SECS)
