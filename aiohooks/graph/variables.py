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
    """The values of a `Variables`, and who initialises them: its state, for sessions and their
    creators.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.ready: bool = False
        self.failure: BaseException | None = None
        """Why the session gave up that should have initialised them."""
        self.workers: Waiters = Waiters()
        """Workers, which wait until they are ready, or until that failed."""
        self._initialising = False
        self._claims = Waiters()

    async def claim(self) -> bool:
        """Return whether the caller is to initialise the values; wait while another session does,
        in case it fails.
        """
        while self._initialising and not self.ready:
            await self._claims.wait()
        if self.ready:
            return False
        self._initialising = True
        return True

    def initialise(self, initial: Mapping[str, Any]) -> None:
        """Set the initial values of variables without one, all or none; `mark_ready` follows when
        everything is initialised.
        """
        missing = self.missing(initial)
        self.by_name.update(
            {
                name: initial[name]() if callable(initial[name]) else initial[name]
                for name in missing
            }
        )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that have no value."""
        return [name for name in names if name not in self.by_name]

    def mark_ready(self) -> None:
        """Wake the waiting workers."""
        self.ready, self.failure = True, None
        self._claims.wake()
        self.workers.wake()

    def discard(self) -> None:
        """Remove the values of an initialisation that failed."""
        self.by_name.clear()
        self._initialising = False
        self._claims.wake()

    def fail(self, error: BaseException) -> None:
        """End the waits of workers: the session that should have initialised the values gave up."""
        if self.ready or self._initialising:
            return
        if self.failure is None or not self.workers:  # those that are woken get the first
            self.failure = error
        self.workers.wake()

    def prepare(
        self, changes: Iterable[tuple[str, int, bool]], results: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the new values of a run; `changes` says which result changes which variable, and
        whether it is added.

        An addition that fails raises here, before anything is changed: there must be no await
        before these are set.
        """
        values: dict[str, Any] = {}
        for name, place, adds in changes:
            if not adds:
                values[name] = results[place]
                continue
            old, new = values.get(name, self.by_name[name]), results[place]
            try:
                values[name] = old + new
            except Exception as error:
                kinds = (
                    f"a value of type {type(new).__name__} was to be added to variable {name!r} of"
                    f" type {type(old).__name__}"
                )
                add_note(error, f"{kinds}; return from the operation what can be added")
                raise
        return values


class Variables:
    """The values of variables by name. A value is never changed in place: a commit replaces all
    changed values together.

    It starts empty. The first session created on it (a chief) initialises it; other sessions
    (workers) can wait until it is `ready`. Sessions that share one object train one model.
    """

    def __init__(self) -> None:
        self._values = Values()

    @property
    def ready(self) -> bool:
        """Whether the values have been initialised or restored."""
        return self._values.ready

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the values are initialised; return immediately if they are.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            SessionNotReadyError: they were not initialised in time.
            PublisherFailedError: the session that should have initialised them failed.
        """
        check_secs(timeout, "timeout", optional=True)
        values = self._values
        if not values.ready and values.failure is None:
            await wait_for_others(values.workers.wait(timeout))
        if values.failure is not None:
            failed = (
                f"the session that should have initialised the variables failed: {values.failure!r}"
            )
            raise PublisherFailedError(failed) from values.failure
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

    if not TYPE_CHECKING:  # with it type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            known = ", ".join(self._values.by_name) if "_values" in self.__dict__ else ""
            raise AttributeError(
                f"Variables has no attribute {name!r}; read the values with snapshot(), replace"
                f" some with assign({{name: value}}); known are: {known or 'none'}",
                name=name,
                obj=self,
            )

    def __repr__(self) -> str:
        return (
            f"<Variables {', '.join(self._values.by_name) or 'none'},"
            f" {'ready' if self.ready else 'not ready'}>"
        )


def values_of(variables: Variables) -> Values:
    """Return the state of a `Variables`."""
    return variables._values  # pyright: ignore[reportPrivateUsage] - of this module
