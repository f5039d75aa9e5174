"""Logging values every so often."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_callable, check_instance
from aiohooks.errors import InvalidArgumentError, NanLossDuringTrainingError
from aiohooks.graph.graph import Node
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


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


_logger = logging.getLogger("aiohooks.hooks")


class NanHook(SessionRunHook):
    """Watches a value of every run, and ends the session when anything in it is not a number, or infinite.

    The value may be a number, an array, or a nested list of these.
    """

    def __init__(self, value: Any, *, fail_on_nan_loss: bool = True, check: Literal["nan", "non-finite"] = "non-finite") -> None:
        """Takes what to watch.

        Args:
            value: a node or name.
            fail_on_nan_loss: whether to raise; otherwise it warns and requests a stop.
            check: `"nan"` lets infinities pass.

        Raises:
            InvalidArgumentError: no value, or another `check`.
        """
        if value is None:
            raise InvalidArgumentError("value is None; give the node or name to watch")
        if check not in ("nan", "non-finite"):
            raise InvalidArgumentError(f'check is {check!r}; give "nan" or "non-finite"')
        self._value = value
        self._fail = fail_on_nan_loss
        self._nan_only = check == "nan"

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the value."""
        return SessionRunArgs(self._value)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Looks at it.

        Raises:
            NanLossDuringTrainingError: something in it is bad, and it is to fail.
        """
        is_good = _is_number if self._nan_only else math.isfinite
        bad = next((number for number in _numbers(run_values.results) if not is_good(number)), None)
        if bad is None:
            return
        message = f"model diverged with {self._value!r} = {bad} at step {run_context.global_step}"
        if self._fail:
            raise NanLossDuringTrainingError(message)
        _logger.warning("%s", message)
        run_context.request_stop(message)


def _is_number(value: float) -> bool:
    return not math.isnan(value)


def _numbers(value: Any) -> Iterable[float]:
    if hasattr(value, "tolist"):  # an array of any library, or one of its scalars
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        items = cast("Iterable[Any]", value)
        for item in items:
            yield from _numbers(item)
    elif isinstance(value, complex):
        yield value.real
        yield value.imag
    elif value is not None:
        yield float(value)


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
