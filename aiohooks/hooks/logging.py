"""Logging values every so often."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._checks import check_callable, check_instance
from aiohooks._clock import Clock, current_clock
from aiohooks._errors import InvalidArgumentError
from aiohooks._every import Every, EveryTimer
from aiohooks._graph import Node
from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks._coordinator import Coordinator
    from aiohooks._session import Session

Formatter = Callable[[dict[str, Any]], str]


class LoggingHook(SessionRunHook):
    """Logs values: at the first run, then on each crossing of `every`, and with `at_end` once more at a clean end.

    The line is "step 100: loss = 0.25, accuracy = 0.9 (1.234 sec)", the time being that since the line before. Values are
    fetched only for the runs that are logged.
    """

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[Any],
        *,
        every: Every | None = None,
        at_end: bool = False,
        formatter: Formatter | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Takes what to log and when.

        Args:
            values: a mapping from the name in the line to a fetch, or several nodes or names, which name themselves.
            every: when; may be left out with `at_end`.
            at_end: whether to log at the end too.
            formatter: makes the whole line out of a dict of the values.
            logger: where to, at level info; by default the logger "aiohooks.hooks".

        Raises:
            InvalidArgumentError: nothing to log, never to log it, or a str where several names are meant.
        """
        if isinstance(values, str):
            raise InvalidArgumentError(f"values is the str {values!r}; give a mapping or a list: [{values!r}]")
        if not isinstance(values, Iterable):
            raise InvalidArgumentError(f"values is {values!r}; give a mapping from a name to what to log, or a list")
        check_instance(every, Every, "every", optional=True)
        check_callable(formatter, "formatter", optional=True)
        self._fetches: dict[str, Any]
        if isinstance(values, Mapping):
            mapping: Mapping[Any, Any] = values  # pyright: ignore[reportUnknownVariableType]
            self._fetches = {str(tag): fetch for tag, fetch in mapping.items()}
        else:
            items: Iterable[Any] = values
            self._fetches = {fetch.name if isinstance(fetch, Node) else str(fetch): fetch for fetch in items}
        if not self._fetches:
            raise InvalidArgumentError("values is empty; give a mapping from a name to what to log")
        if every is None and not at_end:
            raise InvalidArgumentError("it would never log; give every=Every(...), at_end=True, or both")
        self._every = every
        self._at_end = at_end
        self._formatter = formatter
        self._logger = logger or logging.getLogger("aiohooks.hooks")
        self._clock: Clock = current_clock()
        self._timer: EveryTimer | None = None
        self._first = True
        self._asked = False
        self._since: float | None = None

    async def begin(self) -> None:
        """Starts anew for a new session."""
        self._clock = current_clock()
        self._timer = None if self._every is None else self._every.timer()
        self._first = self._every is not None
        self._asked = False
        self._since = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts; a recovery does not start it anew."""
        if self._timer is not None and self._first:
            self._timer.start(session.global_step.latest.step, self._clock.now())

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values if this run is to be logged."""
        timer = self._timer
        self._asked = timer is not None and (self._first or timer.due(run_context.global_step, self._clock.now()))
        return SessionRunArgs(self._fetches) if self._asked else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs them."""
        if self._asked and self._timer is not None:
            self._first = False
            self._timer.mark(run_context.global_step, self._clock.now())
            self._log(run_context.global_step, run_values.results)

    async def end(self, session: Session) -> None:
        """Logs them once more, if asked to."""
        if self._at_end:
            self._log(session.global_step.latest.step, await session.run(self._fetches))

    def _log(self, step: int, values: dict[str, Any]) -> None:
        now = self._clock.now()
        since, self._since = self._since, now
        if self._formatter is not None:
            self._logger.info("%s", self._formatter(values))
            return
        line = f"step {step}: " + ", ".join(f"{tag} = {_text(value)}" for tag, value in values.items())
        self._logger.info("%s", line if since is None else f"{line} ({now - since:.3f} sec)")


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
