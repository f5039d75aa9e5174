"""Stopping at a step, at a time, or when a value no longer improves.

observation   one value of early stopping, with its step
counts        the state of early stopping: the best value, and what has passed since it
extra         an evaluation that only the end of the session has caused: an uninterrupted run does
              not make it, so no checkpoint counts it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from aiohooks._core.clock import NO_TIMER, Clock, current_clock
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_finite,
)
from aiohooks.checkpoint.stateful import HostMemory, Stateful, is_stateful, snapshot
from aiohooks.errors import (
    FetchError,
    InvalidArgumentError,
    StopRequestedError,
    did_you_mean,
    safe_repr,
)
from aiohooks.graph.graph import Node
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import FetchingHook, logger, scalar
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.session.status import session_events


class StopAtStepHook(SessionRunHook):
    """Requests a stop when the global step is reached, before the first run if it is reached
    already.

    With `num_steps` the last step is that many after the step at which the session is first
    created. A recovery does not move it.
    """

    def __init__(
        self,
        *,
        num_steps: int | None = None,
        last_step: int | None = None,
    ) -> None:
        """Create the hook with exactly one of the two.

        Args:
            num_steps: how many steps to run.
            last_step: the global step after which to stop.

        Raises:
            InvalidArgumentError: neither or both are given, or one is not a whole number, 0 or
                more.
        """
        if num_steps is None and last_step is None:
            raise InvalidArgumentError("one of num_steps or last_step must be given")
        if num_steps is not None and last_step is not None:
            raise InvalidArgumentError(
                f"only one of num_steps ({num_steps}) or last_step ({last_step}) can be given"
            )
        self._num_steps: int | None = checked_int(num_steps, "num_steps", optional=True)
        self._given_last_step: int | None = checked_int(last_step, "last_step", optional=True)
        self.last_step: int | None = self._given_last_step
        """The step after which it stops. With `num_steps`, it is None until the session has been
        created.
        """

    async def begin(self) -> None:
        """Clear the last step of an earlier session."""
        self.last_step = self._given_last_step

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Compute the last step, and request a stop if it is reached already."""
        step = (await session.global_step.value()).step
        # After a recovery, the last step is set already.
        if self._num_steps is not None and self.last_step is None:
            self.last_step = step + self._num_steps
        self._stop_if_reached(step, coord.request_stop)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Request a stop if the run reached or passed the last step."""
        self._stop_if_reached(run_context.global_step, run_context.request_stop)

    def _stop_if_reached(self, step: int, request_stop: Callable[[str], None]) -> None:
        """Request a stop if `step` is the last step or a later one: another session that shares the
        step may have moved it beyond.
        """
        if self.last_step is not None and step >= self.last_step:
            request_stop(f"step {step} reached the last step, {self.last_step}")

    def __repr__(self) -> str:
        return f"StopAtStepHook(num_steps={self._num_steps}, last_step={self.last_step})"


class StopAtTimeHook(SessionRunHook):
    """Requests a stop after some time.

    No run begins after that point. A run that is active then finishes, but a wait inside it (for a
    step, for the next feed) ends immediately. Seconds are counted from `begin` by the current
    clock. A recovery does not restart them, and a run that is resumed has the whole time again.
    """

    def __init__(self, secs: float) -> None:
        """Create the hook.

        Args:
            secs: how long to run.

        Raises:
            InvalidArgumentError: not a number of seconds.
        """
        check_secs(secs, "secs")
        self._secs = secs
        self._reason = f"the time is up: {secs} s"
        self._timer = NO_TIMER

    async def begin(self) -> None:
        """Start counting."""
        self._clock: Clock = current_clock()
        self._ends_at = self._clock.now() + self._secs
        self._timer = NO_TIMER

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Start the timer. Request a stop before the first run if the time is up already."""
        if self._is_over():
            coord.request_stop(self._reason)
        # After a recovery, the timer has been started already.
        elif self._timer is NO_TIMER:
            self._timer = self._clock.call_later(
                self._ends_at - self._clock.now(),
                lambda: coord.request_stop(self._reason),
            )

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise `StopRequestedError`, a clean end, if the time is up. Usually the timer has stopped
        the session before, unless the event loop was too busy to call it.
        """
        if self._is_over():
            run_context.request_stop(self._reason)
            raise StopRequestedError(self._reason)
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Request a stop if the time was up during this run."""
        if self._is_over():
            run_context.request_stop(self._reason)

    async def close(self, exc: BaseException | None) -> None:
        """Cancel the timer."""
        self._timer.cancel()

    def _is_over(self) -> bool:
        """Return whether the time is up."""
        return self._clock.now() >= self._ends_at

    def __repr__(self) -> str:
        return f"StopAtTimeHook({self._secs})"


class EarlyStoppingHook(FetchingHook):
    """Requests a stop when the monitored value has not improved for a while, is good enough, or is
    not finite.

    The value is fetched in the runs that `every` selects, or passed to `report`, as an
    `EvaluatorHook` does: `EvaluatorHook(evaluate, every=..., on_result=stopping.report)`. Each
    value is one observation. NaN or an infinity stops immediately. `reason` says why it stopped,
    and is the session's `stop_reason` if no stop was requested before.

    With `restore_best`, objects that change themselves, such as a torch module, have the state of
    the best observation after a clean end, however it came about. The checkpoint at the end has the
    state of the last step.

    Its counts survive a restart, and so do the states of the best observation: a run that is cut
    anywhere and resumed stops where an uninterrupted one does. A run that it had stopped stops
    again before its first step, unless `patience` or the threshold were changed. An evaluation at
    the end (`at_end`) is no part of the run: no checkpoint counts it.
    """

    # The state is more than a time, so hooks of this class need different names in a checkpoint.
    _numbered_state: ClassVar[bool] = False

    def __init__(
        self,
        monitor: Any = None,
        *,
        mode: Literal["min", "max"] = "min",
        patience: int | Every | None = None,
        min_delta: float = 0.0,
        stopping_threshold: float | None = None,
        every: Every | None = Every(steps=1),
        restore_best: Mapping[str, Stateful] | None = None,
        name: str | None = None,
    ) -> None:
        """Create the hook with a patience, a threshold, or both.

        Args:
            monitor: the value: a fetch, or the key in the mappings that `report` gets. None if
                `report` gets numbers.
            mode: whether smaller values are better ("min") or larger ones ("max").
            patience: how many observations in a row may be no better than the best one. The last of
                them stops. `Every(steps=n)` counts the steps from the best observation to a worse
                or equal one.
            min_delta: by how much a value must be better than the best one to count as better.
            stopping_threshold: stop immediately at a value that is as good as this.
            every: when to fetch, or None to use `report` alone.
            restore_best: objects with `state_dict()` and `load_state_dict(state)`, by name, that
                get the state of the best observation back when the session has ended cleanly.
            name: the name of its state in checkpoints, needed if a session has several of these
                hooks.

        Raises:
            InvalidArgumentError: an argument is invalid, or nothing would ever stop.
        """
        check_choice(mode, "mode", "min", "max")
        self._counts_steps = isinstance(patience, Every)
        self._patience = _checked_patience(patience)
        if not is_finite(min_delta) or min_delta < 0:
            raise InvalidArgumentError(
                f"min_delta is {safe_repr(min_delta)}; give a finite number, 0 or more"
            )
        if stopping_threshold is not None and not is_finite(stopping_threshold):
            raise InvalidArgumentError(
                f"stopping_threshold is {safe_repr(stopping_threshold)}; give a finite number"
            )
        check_instance(every, Every, "every", optional=True)
        if patience is None and stopping_threshold is None:
            raise InvalidArgumentError(
                "it would never stop; give patience= or stopping_threshold= (to check for values"
                " that are not finite alone, use NanHook)"
            )
        check_mapping(restore_best, "restore_best", optional=True)
        self._restore_best = dict(restore_best or {})
        for name_of_object, restored in self._restore_best.items():
            if not is_stateful(restored):
                raise InvalidArgumentError(
                    f"restore_best[{name_of_object!r}] is {safe_repr(restored)}; give an object"
                    " with state_dict() and load_state_dict(state)"
                )
        self._has_monitor = monitor is not None
        self._value_name = _name_of(monitor)
        self._mode = mode
        # Values are compared after a multiplication by this number. Then the smaller value is the
        # better one, in both modes.
        self._sign = -1.0 if mode == "max" else 1.0
        self._min_delta = min_delta
        self._threshold = stopping_threshold
        self.name: str = name or ""
        # Without a monitor there is nothing to fetch, so no run is due.
        super().__init__(monitor, every if self._has_monitor else None)

    def _reset(self) -> None:
        super()._reset()
        self.reason: str | None = None
        """Why it requested a stop, or None if it has not."""
        self.best: float | None = None
        """The best value so far."""
        self.best_step: int | None = None
        """The step of the best value."""
        self.waited: int = 0
        """The number of observations after the best one, none of which was better."""
        self.best_states: Mapping[str, Any] = {}
        """The states of the objects of `restore_best` at the best observation, by name."""
        # The step from which a patience in steps counts: the step of the best observation. While no
        # value was finite, there is no best one, and it is the step of the first observation.
        self._since_step: int | None = None
        # The step and the value of the last observation, or None before the first.
        self._last: tuple[int, float] | None = None
        self._coord: Coordinator | None = None
        # The counts before an extra evaluation, for the checkpoint at the end. None before such an
        # evaluation.
        self._counts_of_run: dict[str, Any] | None = None

    async def begin(self) -> None:
        """Reset the counts of an earlier session."""
        await super().begin()
        session_events().evaluated.subscribe(self._note_evaluation)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts, or to which a recovery moved it back."""
        await super().after_create_session(session, coord)
        self._coord = coord
        # The restored counts have a cause to stop, found before there was a coordinator.
        if self.reason is not None:
            coord.request_stop(self.reason)

    def _note_evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        is_extra: bool,
    ) -> None:
        """Keep the counts before an extra evaluation. The event `evaluated` comes before the call
        of `report` with the result.
        """
        if is_extra and self._counts_of_run is None:
            self._counts_of_run = self._counts()

    async def close(self, exc: BaseException | None) -> None:
        """After a clean end, give the objects of `restore_best` the states of the best
        observation.
        """
        if exc is None and self.best_step is not None:
            for name, state in self.best_states.items():
                self._restore_best[name].load_state_dict(state)

    def report(
        self,
        step: int,
        value: Any,
        states: Mapping[str, Any] | None = None,
    ) -> bool:
        """Observe a value from elsewhere. Call it in the session's event loop.

        Args:
            step: the step of the value.
            value: a number, or a mapping with one under `monitor`.
            states: the states with which the value was computed, by the names of `restore_best`, if
                that was an evaluation of a copy, by default the current ones, which are copied.

        Returns:
            Whether it has requested a stop, now or before.

        Raises:
            FetchError: the mapping has no such key.
            InvalidArgumentError: not a single number, or a mapping and there is no `monitor`.
        """
        step = checked_int(step, "step", expected="a step, 0 or more")
        if isinstance(value, Mapping):
            value = self._monitored(step, value)  # pyright: ignore[reportUnknownArgumentType]
        check_mapping(states, "states", optional=True)
        if states is not None:
            self._check_names(states, "states")
        self._observe(step, value, states)
        return self.reason is not None

    def _monitored(
        self,
        step: int,
        values: Mapping[Any, Any],
    ) -> Any:
        """Return the monitored value in the mapping that was reported."""
        if not self._has_monitor:
            raise InvalidArgumentError(
                f"got a mapping of {', '.join(map(str, values))} at step {step}; say which:"
                " monitor=..."
            )
        name = self._value_name
        if name not in values:
            raise FetchError(
                f"{name!r} is not in the mapping reported at step {step};"
                f" {did_you_mean(name, values)}"
            )
        return values[name]

    def _observe(
        self,
        step: int,
        result: Any,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare a value with the best one. Keep the states of a better one, or count the wait.
        Then request a stop if there is a cause.

        Args:
            step: the step of the value.
            result: the result of the fetch, or what was reported: one value.
            states: the states that belong to the value, by default the current ones.
        """
        value = scalar(result)
        if value is None:
            raise InvalidArgumentError(
                f"{self._value_name} is {result!r} at step {step}; early stopping needs one number"
            )
        number = float(value)
        if self._is_better(number):
            self.best = number
            self.best_step = step
            self.waited = 0
            self.best_states = states or self._current_states()
        else:
            self.waited += 1
        if self.waited == 0 or self._since_step is None:
            self._since_step = step
        self._last = (step, number)
        self._stop_if_due(step, number)

    def _stop_if_due(
        self,
        step: int,
        number: float,
    ) -> None:
        """Request a stop if the last observation is a cause, unless a stop was requested before.
        Before there is a coordinator, keep only the reason.
        """
        cause = self._stop_cause(step, number)
        if cause is not None and self.reason is None:
            self.reason = f"early stopping at step {step}: {self._value_name} = {number:g}{cause}"
            logger.info("%s", self.reason)
            if self._coord is not None:
                self._coord.request_stop(self.reason)

    def _is_better(self, number: float) -> bool:
        """Return whether a value is better than the best one by more than `min_delta`."""
        if not math.isfinite(number):
            return False
        if self.best is None:
            return True
        return self._sign * number < self._sign * self.best - self._min_delta

    def _current_states(self) -> Mapping[str, Any]:
        """Return copies of the states of the objects of `restore_best`."""
        states = {name: stateful.state_dict() for name, stateful in self._restore_best.items()}
        # The copy needs memory of its own, because it is kept until a better value comes.
        copied: Mapping[str, Any] = snapshot(states, HostMemory())
        return copied

    def _stop_cause(self, step: int, number: float) -> str | None:
        """Return why this observation stops the run, or None if it does not.

        The text continues a sentence that begins with the value.
        """
        if not math.isfinite(number):
            return " is not finite"
        if self._threshold is not None and self._sign * number <= self._sign * self._threshold:
            return f" is as good as the threshold, {self._threshold:g}"
        # The value is better than all before, or there is no patience.
        if self._patience is None or self.waited == 0 or self._since_step is None:
            return None
        amount = self.waited
        unit = "observation"
        if self._counts_steps:
            amount = step - self._since_step
            unit = "step"
        if amount < self._patience:
            return None
        if amount != 1:
            unit += "s"
        return (
            f", no better for {amount} {unit}; the best was {self.best:g} at step {self.best_step}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the run, to which an extra evaluation does not belong."""
        if self._counts_of_run is not None:
            return self._counts_of_run
        return self._counts()

    def _counts(self) -> dict[str, Any]:
        """Return the present counts."""
        counts: dict[str, Any] = {
            "monitor": self._value_name,
            "mode": self._mode,
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "since_step": self._since_step,
            "last": self._last,
            "timer": super().state_dict(),
        }
        if self._restore_best:
            counts["best_states"] = dict(self.best_states)
        return counts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with these counts. The state of another `monitor` or `mode` is ignored with a
        warning.
        """
        check_mapping(state, "state", optional=False)
        if (state["monitor"], state["mode"]) != (self._value_name, self._mode):
            logger.warning(
                "early stopping starts its counts again: the saved state is of %r (%s), it now"
                " monitors %r (%s)",
                state["monitor"],
                state["mode"],
                self._value_name,
                self._mode,
            )
            return
        self.best = state["best"]
        self.best_step = state["best_step"]
        if self._restore_best:
            # Without `restore_best`, the checkpoint has no states. There are none before the first
            # observation either, and so no names to check.
            self.best_states = state.get("best_states", {})
            if self.best_states:
                self._check_names(self.best_states, "the checkpoint")
        self.waited = state["waited"]
        self._since_step = state["since_step"]
        super().load_state_dict(state["timer"])
        self._last = state["last"]
        if self._last is not None:
            # The reason is not part of the state. With another patience or threshold than before,
            # the last observation may be no cause any more, and the run continues.
            self._stop_if_due(*self._last)

    def _check_names(
        self,
        states: Mapping[str, Any],
        source: str,
    ) -> None:
        """Raise `InvalidArgumentError` unless the states have the names of `restore_best`.
        `source` says in the message where the states come from.
        """
        if states.keys() != self._restore_best.keys():
            raise InvalidArgumentError(
                f"{source} has the best states of {list(states)}, and restore_best has"
                f" {list(self._restore_best)}; use the same names"
            )

    def __repr__(self) -> str:
        state = ""
        if self.best is not None:
            state = f", best={self.best:g} at step {self.best_step}"
        return f"EarlyStoppingHook({self._value_name!r}, mode={self._mode!r}{state})"


def _name_of(monitor: Any) -> str:
    """Return the name of the monitored value in messages and in the state."""
    if monitor is None:
        return "the value"
    if isinstance(monitor, Node):
        return monitor.name
    return str(monitor)


def _checked_patience(patience: Any) -> int | None:
    """Return a patience as a number: of steps if it is an `Every`, otherwise of observations.
    None means that no patience was given.
    """
    if isinstance(patience, Every):
        if patience.steps is None or patience.secs or patience.at:
            raise InvalidArgumentError(
                f"patience is {patience}; give an Every of steps alone: it counts from the best"
                " value"
            )
        return patience.steps
    checked: int | None = checked_int(
        patience,
        "patience",
        1,
        expected="observations, 1 or more, an Every of steps, or leave it out",
        optional=True,
    )
    return checked
