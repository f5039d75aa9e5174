"""The loop over runs: `async for values in session.steps(...)`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from aiohooks._errors import InvalidArgumentError, StopRequestedError
from aiohooks._graph import Graph


class Steps:
    """Runs the session once for each turn of the loop; made by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        run: Callable[..., Awaitable[Any]],
        until: Callable[[Awaitable[Any]], Awaitable[Any]],
        should_stop: Callable[[], bool],
        graph: Graph,
        fetches: Any,
        feeds: AsyncIterable[Any] | Iterable[Any] | None,
    ) -> None:
        """Opens the feeds."""
        self._run = run
        self._until = until
        self._should_stop = should_stop
        self._fetches = fetches
        operation = graph.step_operation
        self._parameter = operation.inputs[0] if operation is not None and len(operation.inputs) == 1 else None
        self._async_feeds: AsyncIterator[Any] | None = None
        self._feeds: Iterator[Any] | None = None
        if isinstance(feeds, AsyncIterable):
            self._async_feeds = aiter(feeds)
        elif isinstance(feeds, Iterable):
            self._feeds = iter(feeds)
        elif feeds is not None:
            raise InvalidArgumentError(f"feeds is {feeds!r}; give something to iterate over, sync or async")

    def __aiter__(self) -> Steps:
        return self

    async def __anext__(self) -> Any:
        if self._should_stop():
            raise StopAsyncIteration
        try:
            return await self._run(self._fetches, await self._feed())
        except StopRequestedError:
            raise StopAsyncIteration from None

    async def _feed(self) -> Any:
        if self._async_feeds is not None:
            feed = await self._until(anext(self._async_feeds))
        elif self._feeds is not None:
            try:
                feed = next(self._feeds)
            except StopIteration:
                raise StopAsyncIteration from None
        else:
            return None
        return feed if self._parameter is None else {self._parameter: feed}
