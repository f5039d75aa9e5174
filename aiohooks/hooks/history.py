"""Keeping values in memory, and a picture of them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._validate import check_instance
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import Values, checked_path, checked_values, number
from aiohooks.hooks.every import Every, Sampling
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


class HistoryHook(SessionRunHook):
    """Keeps numbers by step in memory, on each crossing of `every`: `hook.steps`, and `hook.values["loss"]` beside it.

    It is part of checkpoints: a run that goes on from one has the whole history, and nothing twice. With `plot` it draws a
    picture of the run when the session is closed, however it ended.
    """

    def __init__(
        self,
        values: Values,
        *,
        every: Every = Every(steps=1),  # noqa: B008 - frozen
        max_length: int = 10_000,
        on_full: Literal["thin", "drop_oldest"] = "thin",
        plot: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        """Takes what to keep, and when.

        Args:
            values: a mapping from a tag to a fetch, or several nodes or names, which name themselves.
            every: when.
            max_length: how many steps are kept at most.
            on_full: what gives way then: `"thin"` leaves out every other step, so that what is left still spans the run;
                `"drop_oldest"` keeps the latest.
            plot: the picture's file, a PNG; needs matplotlib.
            name: what its state is called in checkpoints; needed where a session has several of these.

        Raises:
            InvalidArgumentError: nothing to keep, or one of the arguments cannot be meant.
            ImportError: matplotlib is not installed, and there is to be a picture.
        """
        check_instance(every, Every, "every")
        given: object = max_length
        if isinstance(given, bool) or not isinstance(given, int) or given < 2:
            raise InvalidArgumentError(f"max_length is {given!r}; give a whole number of steps, at least 2")
        if on_full not in ("thin", "drop_oldest"):
            raise InvalidArgumentError(f'on_full is {on_full!r}; give "thin" or "drop_oldest"')
        self.name: str = name or ""
        self._fetches = checked_values(values)
        self._args = SessionRunArgs(self._fetches)
        self._every = every
        self._max_length = max_length
        self._thins = on_full == "thin"
        self._plot: str | None = None
        if plot is not None:
            from aiohooks.hooks import _plot  # an extra: now, and not after hours of training

            self._plot = checked_path(plot, "plot")
            self._draw = _plot.draw
        self._sampling = Sampling(every, first=False)
        self.steps: list[int] = []
        """The steps that were kept, in order."""
        self.values: dict[str, list[int | float | None]] = {tag: [] for tag in self._fetches}
        """The numbers by tag, one for each of `steps`; None where a checkpoint had none of this tag."""

    async def begin(self) -> None:
        """Forgets an earlier session's."""
        self._sampling = Sampling(self._every, first=False)
        self.steps = []
        self.values = {tag: [] for tag in self._fetches}

    def state_dict(self) -> dict[str, Any]:
        """The whole history."""
        return {"steps": list(self.steps), "values": {tag: list(kept) for tag, kept in self.values.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a history; of tags that are not watched any more it takes nothing."""
        self.steps = [int(step) for step in state["steps"]]
        old: Mapping[str, Any] = state["values"]
        self.values = {tag: list(old.get(tag, [None] * len(self.steps))) for tag in self._fetches}

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Leaves out what lies behind the step at which the session starts: a recovery runs it once more."""
        step = session.global_step.latest.step
        if self._sampling.start(step):
            self._keep(slice(bisect_right(self.steps, step)))

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values if this run is to be kept."""
        return self._args if self._sampling.ask(run_context.global_step) else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Keeps them.

        Raises:
            InvalidArgumentError: a value is not one number.
        """
        if not self._sampling.take(run_context.global_step):
            return
        numbers = {tag: number(value, tag) for tag, value in run_values.results.items()}
        if len(self.steps) >= self._max_length:
            self._keep(slice(len(self.steps) % 2, None, 2) if self._thins else slice(1, None))
        self.steps.append(run_context.global_step)
        for tag, value in numbers.items():
            self.values[tag].append(value)

    def _keep(self, part: slice) -> None:
        self.steps = self.steps[part]
        self.values = {tag: kept[part] for tag, kept in self.values.items()}

    async def close(self, exc: BaseException | None) -> None:
        """Draws the picture, if there is to be one and anything to draw."""
        if self._plot is None or not self.steps:
            return
        series = {
            tag: [(step, float(value)) for step, value in zip(self.steps, kept, strict=True) if value is not None]
            for tag, kept in self.values.items()
        }
        split = {tag: ([step for step, _ in points], [value for _, value in points]) for tag, points in series.items()}
        await to_thread(self._draw, split, self._plot, grace_secs=DEFAULT_GRACE_SECS)

    def __repr__(self) -> str:
        return f"<HistoryHook of {', '.join(self._fetches)}: {len(self.steps)} steps>"
