"""The values of a graph's variables, which a session owns or shares with others in its process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._core.validate import check_mapping, check_secs
from aiohooks._core.waits import Waiters, wait_for_others
from aiohooks.errors import (
    FetchError,
    PublisherFailedError,
    SessionNotReadyError,
    add_note,
    did_you_mean,
)


class Change(NamedTuple):
    """The change of a variable by the result of an operation.

    Attributes:
        name: the name of the variable.
        slot: the place of the result among the values of a run.
        is_added: whether the result is added to the variable. Otherwise it replaces the value.
    """

    name: str
    slot: int
    is_added: bool


class Values:
    """The state of a `Variables`, for sessions and their creators.

    Attributes:
        by_name: the values of the variables.
        ready: whether the values, and the rest of the session that claimed them, are initialized.
        failure: the error with which the session that should have initialized the values gave up.
        waiting_workers: wakes the workers that wait until the values are ready or their
            initialization has failed.
        version: how often values were replaced.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.version: int = 0
        self.ready: bool = False
        self.failure: BaseException | None = None
        self.waiting_workers: Waiters = Waiters()
        # Whether a session initializes the values, or has initialized them.
        self._is_claimed = False
        # Wakes the sessions that initialize the values if the session that claimed them fails.
        self._waiting_chiefs = Waiters()

    async def claim(self) -> bool:
        """Return whether the caller must initialize the values.

        If another session is initializing them, wait until it has succeeded or failed.
        """
        while self._is_claimed:
            if self.ready:
                return False
            await self._waiting_chiefs.wait()
        self._is_claimed = True
        return True

    def initialize(self, initial: Mapping[str, Any]) -> None:
        """Set the initial values of all variables that have no value.

        If a function that returns an initial value raises, set none. Call `mark_ready` when the
        rest of the session is initialized, too.
        """
        values: dict[str, Any] = {}
        for name in self.missing(initial):
            value = initial[name]
            if callable(value):
                value = value()
            values[name] = value
        self.replace(values)

    def replace(self, values: Mapping[str, Any]) -> None:
        """Replace several values together."""
        if values:
            self.by_name.update(values)
            self.version += 1

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names that have no value."""
        return [name for name in names if name not in self.by_name]

    def mark_ready(self) -> None:
        """Mark the values as ready, and wake the sessions that wait for this."""
        self.ready = True
        self.failure = None
        self._waiting_chiefs.wake()
        self.waiting_workers.wake()

    def discard(self) -> None:
        """Remove the values of a failed initialization, so that another session can claim them."""
        self.by_name.clear()
        self._is_claimed = False
        self._waiting_chiefs.wake()

    def fail(self, error: BaseException) -> None:
        """Make the waits of workers raise, because the session to initialize the values failed."""
        # The session that has claimed the values still initializes them, or has done so.
        if self._is_claimed:
            return
        # Workers that were woken may not have run yet. They must get the first error, even if a
        # second session fails before they run.
        if self.failure is None or not self.waiting_workers:
            self.failure = error
        self.waiting_workers.wake()

    def prepare(self, changes: Iterable[Change], results: Sequence[Any]) -> dict[str, Any]:
        """Return the new values of the variables that a run changes. Set nothing yet.

        If a result cannot be added to a variable, raise the error of the addition with a note.
        """
        new_values: dict[str, Any] = {}
        for name, slot, is_added in changes:
            value = results[slot]
            if is_added:
                # Several operations of the run may add to one variable.
                old_value = new_values.get(name, self.by_name[name])
                try:
                    value = old_value + value
                except Exception as error:
                    add_note(
                        error,
                        f"the operation returned a value of type {type(value).__name__}, which"
                        f" cannot be added to variable {name!r} of type {type(old_value).__name__}."
                        " Return a value that can be added",
                    )
                    raise
            new_values[name] = value
        return new_values


class Variables:
    """The values of variables by name.

    A value is never changed in place: a commit replaces all changed values together. A new object
    has no values. The first session that is created on it (a chief) initializes them. Other
    sessions (workers) can wait until the object is `ready`. Sessions that share one object train
    one model.
    """

    def __init__(self) -> None:
        self._values = Values()

    @property
    def ready(self) -> bool:
        """Whether the values have been initialized or restored."""
        return self._values.ready

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the values are initialized. Return immediately if they are.

        Args:
            timeout: seconds to wait, or None for no limit.

        Raises:
            SessionNotReadyError: the values were not initialized in time.
            PublisherFailedError: the session that should have initialized the values failed.
        """
        check_secs(timeout, "timeout", optional=True)
        values = self._values
        if not values.ready and values.failure is None:
            # The wait also returns at the timeout, so both conditions are tested again below.
            await wait_for_others(values.waiting_workers.wait(timeout))
        if values.failure is not None:
            raise PublisherFailedError(
                f"the session that should have initialized the variables failed: {values.failure!r}"
            ) from values.failure
        if not values.ready:
            raise SessionNotReadyError(
                f"the variables were not initialized within {timeout} s; is a chief running that"
                " shares these Variables?"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the current values by name. Later commits do not change the returned dict."""
        return self._values.by_name.copy()

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace several values together, as in `session.variables.assign({"rate": 0.1})`.

        Call this method between runs. If a run in progress has read a value and is going to replace
        it (`updates=`), its operations are called again with the new value.

        Raises:
            FetchError: a name is not a variable. In this case, no value is changed.
        """
        check_mapping(values, "values", optional=False)
        by_name = self._values.by_name
        for name in values:
            if name not in by_name:
                raise FetchError(f"{name!r} is not a variable; {did_you_mean(name, by_name)}")
        self._values.replace(values)

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return f"<Variables {', '.join(self._values.by_name) or 'none'}, {state}>"


def values_of(variables: Variables) -> Values:
    """Return the state of a `Variables`."""
    return variables._values  # pyright: ignore[reportPrivateUsage] - of this module
