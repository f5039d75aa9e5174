"""The values of a graph's variables: a session's own, or shared by the sessions of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohooks._aio.clock import wake, wake_after
from aiohooks._aio.opening import wait_for_others
from aiohooks._validate import check_mapping, check_secs
from aiohooks.errors import FetchError, PublisherFailedError, SessionNotReadyError, did_you_mean


class Variables:
    """The values of variables by name. A value is never changed in place: a commit replaces all changed values together.

    It starts empty. The first session created on it (a chief) initialises it; other sessions (workers) can wait until it is
    `ready`. Sessions that share one object train one model.
    """

    def __init__(self) -> None:
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
        """Wait until the values are initialised; return immediately if they are.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            SessionNotReadyError: they were not initialised in time.
            PublisherFailedError: the session that should have initialised them failed.
        """
        check_secs(timeout, "timeout", optional=True)
        if self._ready:
            return
        if self._failure is not None:
            raise self._failed_error()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        timer = None if timeout is None else wake_after(waiter, timeout)
        try:
            await wait_for_others(waiter)
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()
        if not self._ready:
            raise SessionNotReadyError(
                f"the variables were not initialised within {timeout} s; is a chief running that shares these Variables?"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the current values by name; a later commit does not change the result."""
        return self._values.copy()

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace several values together, between runs: `session.variables.assign({"rate": 0.1})`.

        A run that has read the old value of a variable that it replaces itself (`updates=`) is repeated with the new one.

        Raises:
            FetchError: a name is not a variable; nothing is changed then.
        """
        check_mapping(values, "values", optional=False)
        for name in values:
            if name not in self._values:
                raise FetchError(f"{name!r} is not a variable; {did_you_mean(name, self._values)}")
        self._values.update(values)

    async def claim(self) -> bool:
        """Internal: return whether the caller is to initialise the values; wait while another session does, in case it fails."""
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
        """Internal: set the initial values of variables without one, all or none.

        `mark_ready` follows when everything is initialised.
        """
        missing = self.missing(initial)
        self._values.update({name: initial[name]() if callable(initial[name]) else initial[name] for name in missing})

    def missing(self, names: Iterable[str]) -> list[str]:
        """Internal: return those of `names` that have no value."""
        return [name for name in names if name not in self._values]

    def mark_ready(self) -> None:
        """Internal: wake the waiting workers."""
        self._ready = True
        self._failure = None
        for waiter in (*self._claims, *self._waiters):
            wake(waiter)

    def discard(self) -> None:
        """Internal: remove the values of an initialisation that failed."""
        self._values.clear()
        self._initialising = False
        for waiter in self._claims:
            wake(waiter)

    def fail(self, error: BaseException) -> None:
        """Internal: end the waits of workers: the session that should have initialised the values gave up."""
        if self._ready or self._initialising:
            return
        self._failure = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._failed_error())

    def read(self, name: str) -> Any:
        """Internal: return one value."""
        return self._values[name]

    def prepare(self, changes: Iterable[tuple[str, int, bool]], results: Sequence[Any]) -> dict[str, Any]:
        """Internal: return the new values of a run; `changes` says which result changes which variable, and whether it is added.

        An addition that fails raises here, before anything is changed.
        """
        values: dict[str, Any] = {}
        for name, place, adds in changes:
            values[name] = values.get(name, self._values[name]) + results[place] if adds else results[place]
        return values

    def put(self, values: Mapping[str, Any]) -> None:
        """Internal: set the values that `prepare` returned; there must be no await between the two calls."""
        self._values.update(values)

    def _failed_error(self) -> PublisherFailedError:
        error = PublisherFailedError(f"the session that should have initialised the variables failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    if not TYPE_CHECKING:  # with it type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"Variables has no attribute {name!r}; read the values with snapshot(), replace some with "
                f"assign({{name: value}}); known are: {', '.join(self.__dict__.get('_values', ())) or 'none'}",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        state = "ready" if self._ready else "not ready"
        return f"<Variables {', '.join(self._values) or 'none'}, {state}>"
