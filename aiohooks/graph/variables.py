"""The values of a graph's variables: a session's own, or shared by the sessions of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiohooks._aio.clock import current_clock
from aiohooks._validate import check_mapping, check_secs
from aiohooks.errors import (
    FetchError,
    PublisherFailedError,
    SessionNotReadyError,
    did_you_mean,
)


class Variables:
    """Values by name. A value is never changed in place: a commit puts new ones, all at once.

    It starts empty. The first session that is created on it (a chief) initialises it; others (workers) can wait until it
    is `ready`. Sessions that share one train one model.
    """

    def __init__(self) -> None:
        """Makes an empty one, not ready."""
        self._values: dict[str, Any] = {}
        self._ready = False
        self._initialising = False
        self._claims: dict[asyncio.Future[None], None] = {}
        self._failure: BaseException | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    @property
    def ready(self) -> bool:
        """Whether the values have been initialised or restored."""
        return self._ready

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the values are there; returns at once if they are.

        Args:
            timeout: seconds to wait, None for ever.

        Raises:
            SessionNotReadyError: they were not there in time.
            PublisherFailedError: the session that should have initialised them failed.
        """
        check_secs(timeout, "timeout", optional=True)
        if self._ready:
            return
        if self._failure is not None:
            raise self._failed()
        if timeout == 0:
            raise self._late(timeout)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        timer = None
        if timeout is not None:
            late = self._late(timeout)
            timer = current_clock().call_later(timeout, lambda: None if waiter.done() else waiter.set_exception(late))
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()

    def snapshot(self) -> dict[str, Any]:
        """The values of one moment, by name; a later commit does not change it."""
        return self._values.copy()

    def assign(self, values: Mapping[str, Any]) -> None:
        """Puts several values at once, as a restore does.

        Raises:
            FetchError: a name that is not a variable here; nothing is changed then.
        """
        check_mapping(values, "values", optional=False)
        for name in values:
            if name not in self._values:
                raise FetchError(f"{name!r} is not a variable; {did_you_mean(name, self._values)}")
        self._values.update(values)

    # -- for sessions

    async def claim(self) -> bool:
        """Internal: whether the one who asks is to initialise the values; waits while another one does, in case that fails."""
        while self._initialising and not self._ready:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._claims[waiter] = None
            try:
                await waiter
            finally:
                self._claims.pop(waiter, None)
        if self._ready:
            return False
        self._initialising = True
        return True

    def initialise(self, initial: Mapping[str, Any]) -> None:
        """Internal: puts the first values of variables that have none yet; `mark_ready` follows when all else is initialised."""
        for name, value in initial.items():
            if name not in self._values:
                self._values[name] = value() if callable(value) else value

    def missing(self, names: Iterable[str]) -> list[str]:
        """Internal: those of `names` that have no value."""
        return [name for name in names if name not in self._values]

    def mark_ready(self) -> None:
        """Internal: lets the waiting workers go on."""
        self._ready = True
        self._initialising = False
        self._failure = None
        _wake(self._claims)
        _wake(self._waiters)

    def discard(self) -> None:
        """Internal: forgets values of an initialisation that failed halfway."""
        self._values.clear()
        self._initialising = False
        _wake(self._claims)

    def fail(self, error: BaseException) -> None:
        """Internal: tells waiting workers that the session which should have initialised the values gave up."""
        if self._ready or self._initialising:
            return
        self._failure = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._failed())

    def read(self, name: str) -> Any:
        """Internal: one value."""
        return self._values[name]

    def prepare(self, updates: Iterable[tuple[str, Any]], additions: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Internal: the values that a run's results make; an addition that fails raises here, before anything is changed."""
        values = dict(updates)
        for name, amount in additions:
            values[name] = values.get(name, self._values[name]) + amount
        return values

    def put(self, values: Mapping[str, Any]) -> None:
        """Internal: puts what `prepare` gave; nothing may be awaited between the two."""
        self._values.update(values)

    def _late(self, timeout: float) -> SessionNotReadyError:
        return SessionNotReadyError(
            f"the variables were not initialised within {timeout} s; is a chief running that shares these Variables?"
        )

    def _failed(self) -> PublisherFailedError:
        error = PublisherFailedError(f"the session that should have initialised the variables failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def __repr__(self) -> str:
        state = "ready" if self._ready else "not ready"
        return f"<Variables {', '.join(self._values) or 'none'}, {state}>"


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
