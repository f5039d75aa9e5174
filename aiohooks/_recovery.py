"""When a session recovers, how often, and how long it pauses before it does."""

from __future__ import annotations

import dataclasses
import random
from typing import cast

from aiohooks._checks import check_instance, check_secs
from aiohooks._errors import AbortedError, InvalidArgumentError, UnavailableError, is_clean_end


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `initial_secs` up to `max_secs`; with `jitter` each is a random part of that.

    A pause of 0 is valid.
    """

    initial_secs: float = 0.1
    max_secs: float = 30.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name in ("initial_secs", "max_secs"):
            check_secs(getattr(self, name), name)

    def pause_secs(self, attempt: int) -> float:
        """The pause before the `attempt`-th try, counted from 1."""
        # The exponent is bounded, or a long series of attempts would overflow the float.
        longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, 1000))
        return random.uniform(0, longest) if self.jitter else longest


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors are recovered from, and when to give up.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries in a row without a completed run between them.
        backoff: the pauses before them.
        no_progress_limit: how often the same step may fail, also with earlier steps completed between.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    no_progress_limit: int = dataclasses.field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_attempts", "no_progress_limit"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgumentError(f"{name} is {value!r}; give a whole number, 0 for never")
        check_instance(self.backoff, Backoff, "backoff")
        on: object = self.on
        if not isinstance(on, tuple) or not all(isinstance(one, type) and issubclass(one, Exception) for one in on):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(f"on is {on!r}; give a tuple of exception classes (cancellation is never recovered)")

    def recovers(self, error: BaseException) -> bool:
        """Whether a session recovers from `error`; from a group if each is recoverable or a clean end, and one recoverable."""
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            return all(self.recovers(one) or is_clean_end(one) for one in group.exceptions) and any(
                self.recovers(one) for one in group.exceptions
            )
        return isinstance(error, self.on)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""


class RecoveryHistory:
    """What has failed since the last progress, and whether that is enough."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        """Starts empty."""
        self._policy = policy
        self.total: int = 0
        """Recoveries so far."""
        self._in_a_row: list[str] = []
        self._failed_step: int | None = None
        self._failures_of_step = 0

    def failed(self, error: BaseException, step: int | None) -> str | None:
        """Takes up a failure of the run of `step` (None: of a creation); returns why to give up, or None to go on."""
        where = "creating a session" if step is None else f"the run of step {step}"
        self._in_a_row.append(f"{where}: {error!r}")
        if step is not None:
            if self._failed_step is not None and step <= self._failed_step:
                self._failures_of_step += 1
            else:
                self._failed_step, self._failures_of_step = step, 1
            if self._failures_of_step > self._policy.no_progress_limit:
                limit = self._policy.no_progress_limit
                return f"step {self._failed_step} failed {self._failures_of_step} times (no_progress_limit={limit})"
        if len(self._in_a_row) > self._policy.max_attempts:
            return f"{self._policy.max_attempts} attempts are used up"
        self.total += 1
        return None

    def completed(self, step: int) -> None:
        """Takes up a completed run of `step`."""
        if self._in_a_row:
            self._in_a_row.clear()
        if self._failed_step is not None and step >= self._failed_step:
            self._failed_step = None

    def pause_secs(self) -> float:
        """The pause before the next attempt."""
        return self._policy.backoff.pause_secs(len(self._in_a_row))

    def notes(self, why: str) -> list[str]:
        """The history, for the error that is raised."""
        return [f"recovery gave up: {why}; what failed, oldest first:", *(f"  {line}" for line in self._in_a_row[-20:])]
