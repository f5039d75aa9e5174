"""Recovery, as far as it is a decision: the policy, the history, the root cause. Nothing here
waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from aiohooks._core.reports import logger
from aiohooks._core.validate import check_choice, check_instance, checked_int
from aiohooks._core.waits import Backoff
from aiohooks.errors import (
    AbortedError,
    FeedsLostError,
    InvalidArgumentError,
    UnavailableError,
    add_note,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.stores._protocol import Position


def check_error_types(types: Any, name: str, base: type[BaseException]) -> None:
    """Raise unless `types`, an argument, is a tuple of subclasses of `base`."""
    kinds = cast("tuple[object, ...]", types if isinstance(types, tuple) else (None,))
    if not all(isinstance(kind, type) and issubclass(kind, base) for kind in kinds):
        raise InvalidArgumentError(
            f"{name} is {types!r}; give a tuple of exception classes, subclasses of {base.__name__}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Which errors a session recovers from, and when it gives up.

    A run that had been committed, because `after_run` of a hook failed or a background task did
    meanwhile, is repeated and counts as another step, as in TensorFlow. In a loop whose feeds are
    tracked `run` returns its values instead, as each of their elements counts once; unless the new
    session was restored from before the commit. `run_step_fn` repeats its function in any case.

    Args:
        on: types of errors after which the session is replaced and the run repeated.
        max_attempts: recoveries in a row without a completed run between them.
        backoff: the pauses before them.
        no_progress_limit: how often the same step may fail, also with earlier steps completed
            between.
        on_lost_feeds: what to do when going back has undone steps with feeds that do not come
            again: those that are not tracked in the `Scaffold`, or have no state. "log", the
            default: a warning says how many steps are gone. "raise": `FeedsLostError` ends the
            session.
    """

    on: tuple[type[BaseException], ...] = (AbortedError, UnavailableError)
    max_attempts: int = dataclasses.field(default=10, kw_only=True)
    backoff: Backoff = dataclasses.field(default=Backoff(), kw_only=True)
    no_progress_limit: int = dataclasses.field(default=3, kw_only=True)
    on_lost_feeds: Literal["log", "raise"] = dataclasses.field(default="log", kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_attempts", "no_progress_limit"):
            number = checked_int(getattr(self, name), name, expected="a whole number, 0 for never")
            object.__setattr__(self, name, number)
        check_instance(self.backoff, Backoff, "backoff")
        check_choice(self.on_lost_feeds, "on_lost_feeds", "log", "raise")
        check_error_types(self.on, "on", Exception)

    def recovers(self, error: BaseException) -> bool:
        """Return whether a session recovers from `error`.

        A group is recovered from if each member is recoverable or a clean end, and at least one is
        recoverable.
        """
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            members = group.exceptions
            if not any(map(self.recovers, members)):
                return False
            return all(self.recovers(member) or is_clean_end(member) for member in members)
        return isinstance(error, self.on) and not isinstance(error, FeedsLostError)


NEVER = RecoveryPolicy((), max_attempts=0)
"""The policy of a session that never recovers."""


class RecoveryHistory:
    """The failures since the last progress, and whether to give up."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._in_a_row: list[str] = []
        self._failed_steps: list[int] = []
        """The steps whose runs failed, since the first of them, or a later one, was completed."""

    def failed(self, description: str, step: int | None) -> str | None:
        """Record a failure of the run of `step` (None: of a creation); return why to give up, or
        None to continue.
        """
        where = "creating a session" if step is None else f"the run of step {step}"
        self._in_a_row.append(f"{where}: {description}")
        if step is not None:
            failed = self._failed_steps
            if failed and step > failed[0]:
                failed.clear()
            failed.append(step)
            if len(failed) > (limit := self._policy.no_progress_limit):
                return f"step {failed[0]} failed {len(failed)} times (no_progress_limit={limit})"
        if len(self._in_a_row) > self._policy.max_attempts:
            return f"{self._policy.max_attempts} attempts are used up"
        return None

    def completed(self, step: int) -> None:
        """Record a completed run of `step`."""
        if self._in_a_row:
            self._in_a_row.clear()
        if self._failed_steps and step >= self._failed_steps[0]:
            self._failed_steps.clear()

    def pause_secs(self) -> float:
        """Return the pause before the next attempt."""
        return self._policy.backoff.pause_secs(len(self._in_a_row))

    @property
    def failures(self) -> list[str]:
        """The last failures since a run was completed, oldest first."""
        return self._in_a_row[-20:]

    def notes(self, why: str) -> list[str]:
        """Return the history, for the error that is raised."""
        return [
            f"recovery gave up: {why}; what failed, oldest first:",
            *(f"  {line}" for line in self.failures),
        ]


def root_cause(
    error: BaseException,
    failures: Sequence[BaseException],
    is_recoverable: Callable[[BaseException], bool],
    label: str,
) -> BaseException:
    """Choose the error to act on: one of the failures of background tasks may be behind the one
    that came out of a run.

    The first failure of a task wins, unless neither is recoverable: then the error of the run is
    the answer to the failure. The other one becomes a note, or a line of the log.
    """
    if failures[0] is error or is_clean_end(error):
        return error
    chosen = failures[0]
    hidden = error
    note = f"the run failed with it: {safe_repr(hidden)}"
    if not is_recoverable(chosen) and not is_recoverable(error):
        chosen = error
        hidden = failures[0]
        note = f"a background task had failed before: {safe_repr(hidden)}"
    if not add_note(chosen, note):
        logger.error("%s: %s", label, note, exc_info=hidden)
    return chosen


def has_commit(session: Session | None, committed: Position) -> bool:
    """Return whether a new session continues behind a commit of an earlier one."""
    if session is None:
        return False
    if session.restored is not None:
        return session.restored.checkpoint.step >= committed.step
    latest = session.global_step.latest
    return latest.epoch == committed.epoch and latest.step >= committed.step
