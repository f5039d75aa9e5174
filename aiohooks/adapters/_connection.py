"""A request that goes on for as long as its client stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

from aiohooks._interrupt import Interrupt, running_task
from aiohooks._shield import wait_done

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class WhileConnected:
    """A block that ends when the client leaves: `async with WhileConnected(receive) as client: ...`, then `client.left`.

    A cancel from outside passes as it is.
    """

    __slots__ = ("_interrupt", "_listener", "_over", "_receive", "left")

    def __init__(self, receive: Receive) -> None:
        """Takes the request's `receive`; nobody else may read from it meanwhile."""
        self._receive = receive
        self._over = False
        self.left = False
        """Whether the block ended because the client had left."""

    async def __aenter__(self) -> Self:
        self._interrupt = Interrupt(running_task())
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def _listen(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass  # a body that nobody asked for
        except OSError:
            pass  # a server may say it in this way, too
        if not self._over:
            self._interrupt.fire("the client has left")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._over = True
        outer = self._interrupt.settle()
        self.left = self._interrupt.fired and not outer and isinstance(error, asyncio.CancelledError)
        self._listener.cancel()
        await wait_done([self._listener], None)
        if not self._listener.cancelled() and (failed := self._listener.exception()) is not None and error is None:
            raise failed
        return self.left
