"""Counting steps per second."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohooks._checks import check_callable, check_instance
from aiohooks._clock import Clock, current_clock
from aiohooks._every import Every, EveryTimer
from aiohooks._hook import SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks._coordinator import Coordinator
    from aiohooks._session import Session

_MOST_WARNINGS = 5


class StepCounterHook(SessionRunHook):
    """Measures how fast the global step advances, and logs "global_step/sec: 12.3" on each crossing of `every`.

    Warns, at most five times a session, when runs do not advance the step.
    """

    def __init__(
        self,
        every: Every = Every(steps=100),  # noqa: B008 - frozen
        *,
        on_rate: Callable[[int, float], None] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Takes when to measure.

        Args:
            every: when.
            on_rate: called with the step and the steps per second, each time besides the log.
            logger: where to, at level info; by default the logger "aiohooks.hooks".

        Raises:
            InvalidArgumentError: `every` is not an Every.
        """
        check_instance(every, Every, "every")
        check_callable(on_rate, "on_rate", optional=True)
        self._every = every
        self._on_rate = on_rate
        self._logger = logger or logging.getLogger("aiohooks.hooks")
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = every.timer()
        self._started = False
        self._last_step: int | None = None
        self._warnings = 0
        self.steps_per_sec: float | None = None
        """The rate that was measured last; None before the first, and if no time passed."""

    async def begin(self) -> None:
        """Starts anew for a new session."""
        self._clock = current_clock()
        self._timer = self._every.timer()
        self._started = False
        self._last_step = None
        self._warnings = 0
        self.steps_per_sec = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step and time at which the session starts."""
        if not self._started:
            self._started = True
            self._timer.start(session.global_step.latest.step, self._clock.now())

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Measures when it is time."""
        step = run_context.global_step
        if step == self._last_step and self._warnings < _MOST_WARNINGS:
            self._warnings += 1
            self._logger.warning(
                "the global step (%d) has not been increased by this run; is the train operation among the fetches?",
                step,
            )
        self._last_step = step
        now = self._clock.now()
        if not self._timer.due(step, now):
            return
        secs, steps = self._timer.mark(step, now)
        if secs > 0:
            rate = self.steps_per_sec = steps / secs
            self._logger.info("global_step/sec: %.6g (at step %d)", rate, step)
            if self._on_rate is not None:
                self._on_rate(step, rate)
