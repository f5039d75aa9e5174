"""One connection to a Redis server, on which requests are answered in their order."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from aiohooks._errors import StoreUnavailableError
from aiohooks._shield import wait_done
from aiohooks.stores._redis_errors import explained, is_reply

_Outcome = tuple[Any, BaseException | None]


def packed(command: Sequence[str | int]) -> bytes:
    """A request as it is sent. The client's own way takes four times as long, and there is one for each step."""
    parts = [b"*%d\r\n" % len(command)]
    for one in command:
        data = str(one).encode(errors="backslashreplace")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Connection(Protocol):
    """What is used of a connection of the client's."""

    async def connect(self) -> Any:
        """Connects and authenticates."""
        ...

    async def send_packed_command(self, command: bytes) -> Any:
        """Writes one request."""
        ...

    async def read_response(self) -> Any:
        """Reads one answer; raises one that is an error."""
        ...

    async def disconnect(self, nowait: bool = False) -> Any:
        """Closes the connection."""
        ...


class Link:
    """A connection, and a task that reads its answers: a caller that is cancelled leaves the others undisturbed.

    Deadlines are the event loop's own time, whatever the clock of a test: this is about the network.
    """

    def __init__(
        self,
        connection: Connection,
        address: str,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[Any]],
        dropped: Callable[[BaseException], None],
    ) -> None:
        """Does not connect yet; `dropped` is told why the connection is lost."""
        self._connection = connection
        self._address = address
        self._spawn = spawn
        self._dropped = dropped
        self._asked: deque[asyncio.Future[_Outcome]] = deque()
        self._reader: asyncio.Task[Any] | None = None
        self._lost: BaseException | None = None

    async def open(self, within: float) -> None:
        """Connects and authenticates, within so many seconds.

        Raises:
            StoreUnavailableError: it is not there, or says no.
        """
        try:
            async with asyncio.timeout(within):
                await self._connection.connect()
        except TimeoutError as error:
            self._lost = TimeoutError(f"no answer within {within:g} s")
            raise explained(self._lost, self._address, connecting=True) from error
        except Exception as error:
            self._lost = error
            raise explained(error, self._address, connecting=True) from error
        if self._lost is not None:  # dropped meanwhile
            await self._disconnect()
            raise self._error()
        self._reader = self._spawn(self._read(), f"reading from {self._address}")

    async def ask(self, *command: str | int, within: float) -> Any:
        """Sends a command and waits for its answer.

        Raises:
            StoreUnavailableError: the connection is lost, or there was no answer within so many seconds and now it is.
            Exception: the answer was an error; it is the client's.
        """
        if self._lost is not None or self._reader is None:
            raise self._error()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Outcome] = loop.create_future()
        late = loop.call_later(within, self._expire, within)
        # Nothing suspends between this and the writing, so that the answers come in the order of what waits for them.
        self._asked.append(answer)
        try:
            await self._connection.send_packed_command(packed(command))
            reply, error = await answer
        except Exception as error:
            self.drop(error)
            raise self._error() from error
        finally:
            late.cancel()
        if error is None:
            return reply
        if is_reply(error):
            raise error
        raise self._error()

    def drop(self, error: BaseException) -> None:
        """Ends the connection at once, because of `error`; harmless when it has ended."""
        if self._lost is not None:
            return
        self._lost = error
        for answer in self._asked:
            if not answer.done():
                answer.set_result((None, error))
        self._asked.clear()
        # A TLS connection would try to say goodbye, for half a minute where nobody listens any more.
        transport = getattr(getattr(self._connection, "_writer", None), "transport", None)
        if transport is not None:
            transport.abort()
        if self._reader is not None:
            self._reader.cancel()
        self._dropped(error)

    async def aclose(self) -> None:
        """Ends the connection and waits until nothing is left of it here."""
        self.drop(ConnectionAbortedError("closed on this side"))
        if self._reader is not None:
            await wait_done([self._reader], None)
        await self._disconnect()

    def _error(self) -> StoreUnavailableError:
        return explained(self._lost or ConnectionError("not connected"), self._address)

    def _expire(self, within: float) -> None:
        self.drop(TimeoutError(f"no answer within {within:g} s"))

    async def _read(self) -> None:
        try:
            while True:
                reply, error = None, None
                try:
                    reply = await self._connection.read_response()
                except Exception as raised:
                    if not is_reply(raised):
                        self.drop(raised)
                        return
                    error = raised
                if self._asked:
                    answer = self._asked.popleft()
                    if not answer.done():
                        answer.set_result((reply, error))
        finally:
            self.drop(ConnectionAbortedError("closed on this side"))
            await self._disconnect()

    async def _disconnect(self) -> None:
        with contextlib.suppress(Exception):  # it is broken already
            await self._connection.disconnect(nowait=True)
