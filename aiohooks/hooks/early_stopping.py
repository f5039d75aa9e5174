"""Stopping when a value no longer gets better."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_instance, check_mapping, check_secs
from aiohooks.errors import FetchError, InvalidArgumentError, did_you_mean
from aiohooks.graph.graph import Node
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")


class EarlyStoppingHook(SessionRunHook):
    """Requests a stop when what it watches has not become better for a while, is good enough, or has gone bad.

    What it watches is fetched with the runs that `every` names, or told to it by `report`, which is what an
    `EvaluatorHook` calls: `EvaluatorHook(evaluate, every=..., on_result=stopping.report)`. Each value it gets is one
    observation. Why it stopped is in `reason`, and is the session's `stop_reason` if nobody asked before.

    Its counts are kept over a restart. A run that it had stopped and that is resumed gets its patience anew, since
    somebody wants it to go on; with `stay_stopped` it ends before the first run instead.
    """

    def __init__(
        self,
        monitor: Any = None,
        *,
        mode: Literal["min", "max"] = "min",
        patience: int | None = None,
        patience_steps: int | None = None,
        patience_secs: float | None = None,
        min_delta: float = 0.0,
        min_delta_mode: Literal["abs", "rel"] = "abs",
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = True,
        start_from_step: int = 0,
        every: Every | None = Every(steps=1),  # noqa: B008 - frozen
        stay_stopped: bool = False,
        name: str | None = None,
    ) -> None:
        """Takes what to watch and when to stop; at least one patience or threshold.

        Args:
            monitor: what to watch: a fetch; or, in the mappings that `report` gets, the key. None where `report` gets
                numbers.
            mode: whether smaller values are better ("min") or larger ones ("max").
            patience: how many observations in a row may be no better than the best one; the last of them stops.
            patience_steps: the same in steps since the best one, looked at when there is an observation.
            patience_secs: the same in seconds since the best one.
            min_delta: by how much a value must be better than the best one to count as better.
            min_delta_mode: `"rel"` for a share of the best value: 0.01 for one percent.
            stopping_threshold: a value that is as good as this stops at once.
            divergence_threshold: a value that is worse than this stops at once.
            check_finite: whether a value that is not a number, or infinite, stops at once; otherwise the first is never
                better than anything.
            start_from_step: observations before this step are passed over.
            every: when to fetch; None not to fetch, but to rely on `report`.
            stay_stopped: whether a resumed run that this hook had stopped ends at once.
            name: what its state is called in checkpoints; needed where a session has several of these.

        Raises:
            InvalidArgumentError: a value that cannot be meant, or nothing that would ever stop.
        """
        _check_choice(mode, ("min", "max"), "mode")
        _check_choice(min_delta_mode, ("abs", "rel"), "min_delta_mode")
        _check_count(patience, 1, "patience", "observations, 1 or more, or leave it out")
        _check_count(patience_steps, 1, "patience_steps", "steps, 1 or more, or leave it out")
        check_secs(patience_secs, "patience_secs", optional=True, positive=True)
        _check_number(min_delta, "min_delta", least=0.0)
        _check_number(stopping_threshold, "stopping_threshold")
        _check_number(divergence_threshold, "divergence_threshold")
        _check_count(start_from_step, 0, "start_from_step", "steps, 0 or more")
        check_instance(every, Every, "every", optional=True)
        self._limits = (patience, patience_steps, patience_secs)
        if all(limit is None for limit in (*self._limits, stopping_threshold, divergence_threshold)):
            raise InvalidArgumentError(
                "it would stop for nothing; give patience=, stopping_threshold= or divergence_threshold= "
                "(for values that are not finite alone there is NanHook)"
            )
        self._monitor = monitor
        self._value_name = monitor.name if isinstance(monitor, Node) else "the value" if monitor is None else str(monitor)
        self._mode = mode
        self._sign = 1.0 if mode == "min" else -1.0  # times this, smaller is always better
        self._min_delta = min_delta
        self._relative = min_delta_mode == "rel"
        self._stopping = stopping_threshold
        self._divergence = divergence_threshold
        self._check_finite = check_finite
        self._start_from_step = start_from_step
        self._every = None if monitor is None else every
        self._stay_stopped = stay_stopped
        self.name: str = name or ""
        self.reason: str | None = None
        """Why it asked for a stop; None as long as it has not."""
        self.best: float | None = None
        """The best value so far."""
        self.best_step: int | None = None
        """The step of the best value."""
        self.waited: int = 0
        """How many observations there have been since the best one."""
        self._reset()

    def _reset(self) -> None:
        self.reason = self.best = self.best_step = None
        self.waited = 0
        # Where patience in steps and seconds counts from: the best observation, or the first one if none was good.
        self._since: tuple[int, float] | None = None
        self._clock: Clock = current_clock()
        self._coord: Coordinator | None = None
        self._timer: EveryTimer | None = None
        self._looked = 0, 0.0
        self._asked = False

    async def begin(self) -> None:
        """Starts anew for a new session."""
        self._reset()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts; a recovery may have taken it back."""
        step = session.global_step.latest.step
        if self._every is not None:
            if self._timer is None:
                self._timer = self._every.timer()
                self._look(step)
            self._looked = min(step, self._looked[0]), self._looked[1]
            self._timer.start(*self._looked)
        self._coord = coord
        if self.reason is not None:
            coord.request_stop(self.reason)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the value if it is time."""
        step = run_context.global_step
        due = self._timer is not None and self._timer.due(step, self._clock.now())
        self._asked = due and step >= self._start_from_step
        if due and not self._asked:
            self._look(step)
        return SessionRunArgs(self._monitor) if self._asked else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Looks at the value.

        Raises:
            InvalidArgumentError: it is not one number.
        """
        if self._asked:
            self._asked = False
            self._look(run_context.global_step)
            self._observe(run_context.global_step, run_values.results, run_context.request_stop)

    def _look(self, step: int) -> None:
        """Counts from here to the next observation."""
        assert self._timer is not None
        self._looked = step, self._clock.now()
        self._timer.start(*self._looked)

    def report(self, step: int, value: Any) -> bool:
        """Takes an observation from elsewhere, in the event loop of the session.

        Args:
            step: the step that the value belongs to.
            value: a number, or a mapping that has one under `monitor`.

        Returns:
            Whether it has asked for a stop, now or before.

        Raises:
            FetchError: the mapping has no such key.
            InvalidArgumentError: it is not one number, or a mapping and there is no `monitor`.
        """
        _check_count(step, 0, "step", "a step, 0 or more", optional=False)
        if isinstance(value, Mapping):
            values: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
            value = self._in_mapping(step, values)
        self._observe(step, value, lambda reason: None if self._coord is None else self._coord.request_stop(reason))
        return self.reason is not None

    def _in_mapping(self, step: int, values: Mapping[Any, Any]) -> Any:
        if self._monitor is None:
            raise InvalidArgumentError(f"got a mapping of {', '.join(map(str, values))} at step {step}; say which: monitor=...")
        if self._value_name not in values:
            raise FetchError(
                f"{self._value_name!r} is not in what was reported at step {step}; {did_you_mean(self._value_name, values)}"
            )
        return values[self._value_name]

    def _observe(self, step: int, value: Any, stop: Callable[[str], None]) -> None:
        number = _one_number(value, self._value_name, step)
        if step < self._start_from_step:
            return
        now = self._clock.now()
        if self._is_better(number):
            self.best, self.best_step, self.waited = number, step, 0
            self._since = step, now
        elif self._since is None:
            self.waited, self._since = 1, (step, now)
        else:
            self.waited += 1
        if self.reason is None:
            why = self._why(step, number, now)
            if why is not None:
                self.reason = f"early stopping at step {step}: {why}"
                _logger.info("%s", self.reason)
                stop(self.reason)

    def _is_better(self, number: float) -> bool:
        if math.isnan(number) or (self._check_finite and math.isinf(number)):
            return False
        if self.best is None:
            return True
        delta = self._min_delta * abs(self.best) if self._relative else self._min_delta
        return self._sign * number < self._sign * self.best - delta

    def _why(self, step: int, number: float, now: float) -> str | None:
        sign, name = self._sign, self._value_name
        if self._check_finite and not math.isfinite(number):
            return f"{name} = {number:g} is not finite"
        if self._stopping is not None and sign * number <= sign * self._stopping:
            return f"{name} = {number:g} is as good as the threshold, {self._stopping:g}"
        if self._divergence is not None and sign * number > sign * self._divergence:
            return f"{name} = {number:g} is worse than the divergence threshold, {self._divergence:g}"
        if self.waited == 0 or self._since is None:
            return None
        since_step, since_secs = self._since
        used = (self.waited, "observations"), (step - since_step, "steps"), (now - since_secs, "s")
        for (amount, unit), limit in zip(used, self._limits, strict=True):
            if limit is not None and amount >= limit:
                best = "there was no good one" if self.best is None else f"the best was {self.best:g} at step {self.best_step}"
                return (
                    f"{name} = {number:g}, no better for {amount:g} {unit if amount != 1 else unit.rstrip('s') or unit}; {best}"
                )
        return None

    # -- over a restart

    def state_dict(self) -> dict[str, Any]:
        """What it has counted so far."""
        since_step, since_secs = (None, None) if self._since is None else (self._since[0], self._clock.now() - self._since[1])
        return {
            "monitor": self._value_name,
            "mode": self._mode,
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "since_step": since_step,
            "since_secs": since_secs,
            "reason": self.reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from there; a state of another `monitor` or `mode` is passed over, with a warning.

        Raises:
            InvalidArgumentError: it is not the state of such a hook.
        """
        check_mapping(state, "state", optional=False)
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise InvalidArgumentError(f"the state of an EarlyStoppingHook has no {', '.join(sorted(missing))}; it has {state!r}")
        if (state["monitor"], state["mode"]) != (self._value_name, self._mode):
            _logger.warning(
                "early stopping counts anew: its state is of %r (%s), it now watches %r (%s)",
                state["monitor"],
                state["mode"],
                self._value_name,
                self._mode,
            )
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited, self.reason = state["waited"], state["reason"] or (self.reason if self._coord is not None else None)
        now = self._clock.now()
        self._since = None if state["since_step"] is None else (state["since_step"], now - state["since_secs"])
        if self.reason is not None and not self._stay_stopped and self._coord is None:
            # Resumed by somebody who wants it to go on. In a recovery, the session has been asked to stop already.
            _logger.info("resuming a run that had ended: %s; its patience starts anew", self.reason)
            self.reason, self.waited, self._since = None, 0, None

    def __repr__(self) -> str:
        state = "" if self.best is None else f", best={self.best:g} at step {self.best_step}"
        return f"EarlyStoppingHook({self._value_name!r}, mode={self._mode!r}{state})"


def _one_number(value: Any, name: str, step: int) -> float:
    one: Any = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    try:
        if isinstance(one, (str, bytes)):
            raise TypeError
        return float(one)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{name} is {value!r} at step {step}; early stopping needs one number") from None


def _check_choice(value: object, choices: tuple[str, str], what: str) -> None:
    if value not in choices:
        raise InvalidArgumentError(f'{what} is {value!r}; give "{choices[0]}" or "{choices[1]}"')


def _check_count(value: object, least: int, what: str, wanted: str, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{what} is {value!r}; give {wanted}")


def _check_number(value: object, what: str, *, least: float = -math.inf) -> None:
    if value is None and what != "min_delta":
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
        raise InvalidArgumentError(f"{what} is {value!r}; give a finite number{'' if least == -math.inf else ', 0 or more'}")
