"""Logging values and the rate of steps, and checking values for NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

from aiohooks._core.clock import Clock, current_clock
from aiohooks._core.validate import check_callable, check_instance
from aiohooks.errors import InvalidArgumentError, NanLossDuringTrainingError, safe_repr
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import (
    FetchingHook,
    Values,
    checked_values,
    logger,
    scalar,
    text_of,
)
from aiohooks.hooks.every import Every, EveryTimer, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

_MAX_WARNINGS = 5
Formatter = Callable[[dict[str, Any]], str]


class StepCounterHook(ScheduledHook):
    """Measures how fast the global step advances, and logs "global_step/sec: 12.3" on each crossing
    of `every`.

    Warns, at most five times a session, when runs do not advance the step.
    """

    def __init__(self, every: Every = Every(steps=100)) -> None:
        """Create the hook. `every` is when to measure.

        Raises:
            InvalidArgumentError: `every` is not an Every.
        """
        check_instance(every, Every, "every")
        self._every = every
        self._reset()

    def _reset(self) -> None:
        self._timer: EveryTimer = self._every.timer()
        # The global step that the last run has left, or None before the first run.
        self._last_step: int | None = None
        # How many warnings this session has logged.
        self._warnings = 0
        self.steps_per_sec: float | None = None
        """The latest rate, or None before the first, and if no time passed."""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step and time at which the session starts. A recovery does not change
        them, so the time that it takes is part of the rate.
        """
        if self._timer.last_step is None:
            self._timer.start(session.global_step.latest.step)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Measure the rate if it is due."""
        step = run_context.global_step
        if step == self._last_step and self._warnings < _MAX_WARNINGS:
            self._warnings += 1
            logger.warning(
                "the global step (%d) has not been increased by this run; is the train operation"
                " among the fetches?",
                step,
            )
        self._last_step = step
        if not self._timer.due(step):
            return
        secs, steps = self._timer.mark(step)
        # A clock that a test sets by hand may stand still.
        if secs > 0:
            self.steps_per_sec = steps / secs
            logger.info("global_step/sec: %.6g (at step %d)", self.steps_per_sec, step)


class NanHook(SessionRunHook):
    """Checks a value of every run, and ends the session if anything in it is NaN or infinite.

    The value may be a number, an array, or a nested list of these.
    """

    def __init__(
        self,
        value: Any,
        *,
        fail_on_nan_loss: bool = True,
    ) -> None:
        """Create the hook.

        Args:
            value: a node or name.
            fail_on_nan_loss: raise an error. Otherwise log a warning and request a stop.

        Raises:
            InvalidArgumentError: `value` is None.
        """
        if value is None:
            raise InvalidArgumentError("value is None; give the node or name to watch")
        self._value = value
        self._fail = fail_on_nan_loss

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the value."""
        return SessionRunArgs(self._value)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Check that the numbers are finite. If one is not, raise an error or request a stop.

        Raises:
            NanLossDuringTrainingError: a number is not finite, and the hook is to fail.
            InvalidArgumentError: a value is not a number, such as None or a text.
        """
        try:
            numbers = list(_numbers(run_values.results))
        except TypeError as error:
            raise InvalidArgumentError(
                f"{self._value!r} {error} at step {run_context.global_step}, and NanHook checks"
                " numbers; give what returns one"
            ) from None
        invalid = [number for number in numbers if not math.isfinite(number)]
        if not invalid:
            return
        step = run_context.global_step
        message = f"model diverged with {self._value!r} = {invalid[0]} at step {step}"
        if self._fail:
            raise NanLossDuringTrainingError(message)
        logger.warning("%s", message)
        run_context.request_stop(message)


def _numbers(value: Any) -> Iterable[float]:
    """Yield all numbers in a value.

    Raise `TypeError` at something else. Its text completes a sentence that begins with the value.
    """
    # Arrays of any library have `tolist`, and so have their scalars. It returns nested lists, or
    # the number of a scalar.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for item in cast("Iterable[Any]", value):
            yield from _numbers(item)
    elif isinstance(value, complex):
        yield value.real
        yield value.imag
    else:
        number = scalar(value)
        if number is None:
            raise TypeError(f"is {safe_repr(value)}")
        yield number


class LoggingHook(FetchingHook):
    """Logs values: at the first run, then on each crossing of `every`, and with `at_end` once more
    at a clean end.

    The line is "step 100: loss = 0.25, accuracy = 0.9 (1.234 sec)", with the time since the
    previous line. Values are fetched only for the runs that are logged.
    """

    _first: ClassVar[bool] = True

    def __init__(
        self,
        values: Values,
        *,
        every: Every | None = None,
        at_end: bool = False,
        formatter: Formatter | None = None,
    ) -> None:
        """Create the hook.

        Args:
            values: a mapping from the name in the line to a fetch, or several nodes or names.
            every: when to log; may be left out with `at_end`.
            at_end: log at the end too.
            formatter: returns the whole line for a dict of the values.

        Raises:
            InvalidArgumentError: nothing to log, it would never log, or `values` is a str instead
                of a list.
        """
        check_instance(every, Every, "every", optional=True)
        check_callable(formatter, "formatter", optional=True)
        self._fetches = checked_values(values)
        if every is None and not at_end:
            raise InvalidArgumentError(
                "it would never log; give every=Every(...), at_end=True, or both"
            )
        self._at_end = at_end
        self._formatter = formatter
        super().__init__(self._fetches, every)

    def _reset(self) -> None:
        super()._reset()
        self._clock: Clock = current_clock()
        # The clock's time of the previous line, or None before the first.
        self._logged_at: float | None = None

    async def end(self, session: Session) -> None:
        """Log the values once more, with `at_end`."""
        if self._at_end:
            self._observe(session.global_step.latest.step, await session.run(self._fetches))

    def _observe(
        self,
        step: int,
        result: dict[str, Any],
    ) -> None:
        """Log the values, which `result` has by tag."""
        now = self._clock.now()
        previous = self._logged_at
        self._logged_at = now
        if self._formatter is not None:
            logger.info("%s", self._formatter(result))
            return
        line = f"step {step}: {text_of(result)}"
        if previous is not None:
            line += f" ({now - previous:.3f} sec)"
        logger.info("%s", line)
