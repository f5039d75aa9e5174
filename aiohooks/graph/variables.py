"""The values of a graph's variables: a session's own, or shared by the sessions of a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohooks._aio.clock import Waiters
from aiohooks._aio.waits import wait_for_others
from aiohooks._validate import check_mapping, check_secs
from aiohooks.errors import (
    FetchError,
    PublisherFailedError,
    SessionNotReadyError,
    add_note,
    did_you_mean,
)


class Values:
    """The state of a `Variables`, for sessions and their creators."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.ready: bool = False
        """Whether everything of a session that needs them is initialized."""
        self.failure: BaseException | None = None
        """The error of the session that should have initialized the values and gave up."""
        self.waiting_workers: Waiters = Waiters()
        """Workers that wait until the values are ready, or until their initialization fails."""
        self._is_claimed = False
        """Whether a session initializes the values, or has initialized them."""
        self._waiting_chiefs = Waiters()
        """Sessions that wait to initialize the values, if the session that does so fails."""

    async def claim(self) -> bool:
        """Return whether the caller must initialize the values.

        While another session initializes them, wait: it may fail.
        """
        while self._is_claimed:
            if self.ready:
                return False
            await self._waiting_chiefs.wait()
        self._is_claimed = True
        return True

    def initialize(self, initial: Mapping[str, Any]) -> None:
        """Set the initial values of variables that have no value: all of them, or none.

        `mark_ready` follows when everything else of the session is initialized.
        """
        values: dict[str, Any] = {}
        for name in self.missing(initial):
            value = initial[name]
            values[name] = value() if callable(value) else value
        self.by_name.update(values)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names of variables that have no value."""
        return [name for name in names if name not in self.by_name]

    def mark_ready(self) -> None:
        """Wake the waiting workers."""
        self.ready = True
        self.failure = None
        self._waiting_chiefs.wake()
        self.waiting_workers.wake()

    def discard(self) -> None:
        """Remove the values of an initialization that failed; another session may claim them."""
        self.by_name.clear()
        self._is_claimed = False
        self._waiting_chiefs.wake()

    def fail(self, error: BaseException) -> None:
        """End the waits of workers: the session that should have initialized the values gave up."""
        if self._is_claimed:
            return
        # Workers that are still waiting get the first error, also if a second session fails before
        # they run.
        if self.failure is None or not self.waiting_workers:
            self.failure = error
        self.waiting_workers.wake()

    def prepare(
        self, changes: Iterable[tuple[str, int, bool]], results: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the new values of a run.

        Each change has the name of a variable, the place of its result, and whether that is added.
        An addition that fails raises here, before anything is changed.
        """
        values: dict[str, Any] = {}
        for name, place, adds in changes:
            value = results[place]
            if adds:
                old = values.get(name, self.by_name[name])
                try:
                    value = old + value
                except Exception as error:
                    add_note(
                        error,
                        f"a value of type {type(value).__name__} was to be added to variable"
                        f" {name!r} of type {type(old).__name__}; return from the operation what"
                        " can be added",
                    )
                    raise
            values[name] = value
        return values


class Variables:
    """The values of variables by name.

    A value is never changed in place: a commit replaces all changed values together. A new object
    has no values. The first session created on it (a chief) initializes them; other sessions
    (workers) can wait until it is `ready`. Sessions that share one object train one model.
    """

    def __init__(self) -> None:
        self._values = Values()

    @property
    def ready(self) -> bool:
        """Whether the values have been initialized or restored."""
        return self._values.ready

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the values are initialized; return immediately if they are.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            SessionNotReadyError: the values were not initialized in time.
            PublisherFailedError: the session that should have initialized the values failed.
        """
        check_secs(timeout, "timeout", optional=True)
        values = self._values
        if not values.ready and values.failure is None:
            # Returns at the timeout as well: the checks below tell the cases apart.
            await wait_for_others(values.waiting_workers.wait(timeout))
        if values.failure is not None:
            raise PublisherFailedError(
                f"the session that should have initialised the variables failed: {values.failure!r}"
            ) from values.failure
        if not values.ready:
            raise SessionNotReadyError(
                f"the variables were not initialised within {timeout} s; is a chief running that"
                " shares these Variables?"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the current values by name; a later commit does not change the result."""
        return self._values.by_name.copy()

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace several values together, between runs: `session.variables.assign({"rate": 0.1})`.

        A run that has read the old value of a variable that it replaces itself (`updates=`) is
        repeated with the new one.

        Raises:
            FetchError: a name is not a variable; nothing is changed then.
        """
        check_mapping(values, "values", optional=False)
        for name in self._values.missing(values):
            raise FetchError(
                f"{name!r} is not a variable; {did_you_mean(name, self._values.by_name)}"
            )
        self._values.by_name.update(values)

    # Type checkers would accept any attribute of a class that has this method.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # `copy` looks up attributes before it has set `_values`.
            values = self.__dict__.get("_values", Values())
            raise AttributeError(
                f"Variables has no attribute {name!r}; read the values with snapshot(), replace"
                " some with assign({name: value}); known are:"
                f" {', '.join(values.by_name) or 'none'}",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return f"<Variables {', '.join(self._values.by_name) or 'none'}, {state}>"


def values_of(variables: Variables) -> Values:
    """Return the state of a `Variables`."""
    return variables._values  # pyright: ignore[reportPrivateUsage] - of this module
