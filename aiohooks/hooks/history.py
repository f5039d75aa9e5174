"""Keeping values in memory, and plotting them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from aiohooks._aio.cancel import to_thread
from aiohooks._validate import check_choice, check_instance, checked_int, checked_number, checked_path
from aiohooks.graph.session import Session
from aiohooks.hooks._fetching import FetchingHook
from aiohooks.hooks._observing import Sampling, Values, checked_values
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator


class HistoryHook(FetchingHook):
    """Keeps numbers by step in memory, on each crossing of `every`: `hook.steps`, and `hook.values["loss"]` beside it.

    It is saved in checkpoints: a resumed run has the whole history, without duplicates. With `plot` it draws a picture of
    the run when the session is closed, however it ended.
    """

    _numbered_state: ClassVar[bool] = False  # its state is what it keeps
    _timer: Sampling

    def __init__(
        self,
        values: Values,
        *,
        every: Every = Every(steps=1),
        max_length: int = 10_000,
        on_full: Literal["thin", "drop_oldest"] = "thin",
        plot: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        """Create the hook.

        Args:
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the tags.
            every: when to keep the values.
            max_length: the maximum number of steps to keep.
            on_full: `"thin"` drops every other step, and keeps each second one from then on: what is kept spans the run evenly;
                `"drop_oldest"` keeps the latest ones. The newest step is kept in any case.
            plot: the file of the picture, `.png` or `.svg`; needs matplotlib.
            name: the name of its state in checkpoints; needed if a session has several of these hooks.

        Raises:
            InvalidArgumentError: nothing to keep, or an argument is invalid.
            ImportError: `plot` is given, and matplotlib is not installed.
        """
        check_instance(every, Every, "every")
        max_length = checked_int(max_length, "max_length", 2, expected="a whole number of steps, at least 2")
        check_choice(on_full, "on_full", "thin", "drop_oldest")
        self.name: str = name or ""
        self._max_length = max_length
        self._thins = on_full == "thin"
        self._plot: str | None = None
        if plot is not None:
            from aiohooks.hooks import _plot  # imported here to fail now, and not after hours of training

            self._plot = checked_path(plot, "plot")
            self._draw = _plot.draw
        self._tags = checked_values(values)
        super().__init__(self._tags, every)

    def _reset(self) -> None:
        super()._reset()
        self.steps: list[int] = []
        """The kept steps, in order."""
        self.values: dict[str, list[int | float | None]] = {tag: [] for tag in self._tags}
        """The numbers by tag, one for each of `steps`; None where a checkpoint did not have the tag."""
        self._seen = 0  # observations, of which each `_stride`-th is kept
        self._stride = 1

    def state_dict(self) -> dict[str, Any]:
        """Return the whole history."""
        values = {tag: list(kept) for tag, kept in self.values.items()}
        return {**super().state_dict(), "steps": list(self.steps), "values": values, "seen": [self._seen, self._stride]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a history; ignore tags that are not kept any more."""
        super().load_state_dict(state)
        self.steps = [int(step) for step in state["steps"]]
        self._seen, self._stride = state["seen"]
        old: Mapping[str, Any] = state["values"]
        self.values = {tag: list(old.get(tag, [None] * len(self.steps))) for tag in self._tags}

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Drop what follows the step at which the session starts: it is run again after a recovery."""
        step = session.global_step.latest.step
        if self._timer.start(step):
            kept = bisect_right(self.steps, step)
            if kept < len(self.steps):
                self._keep(slice(kept))
                self._seen = (kept - 1) * self._stride + 1 if kept else 0

    def _observe(self, step: int, values: Any) -> None:
        numbers = {tag: checked_number(value, tag) for tag, value in values.items()}
        if (self._seen - 1) % self._stride:  # the latest is kept until the next one comes
            self._keep(slice(-1))
        if len(self.steps) >= self._max_length:
            self._stride *= 2 if self._thins else 1
            self._keep(slice(None, None, 2) if self._thins else slice(1, None))
        self._seen += 1
        self.steps.append(step)
        for tag, value in numbers.items():
            self.values[tag].append(value)

    def _keep(self, part: slice) -> None:
        self.steps = self.steps[part]
        self.values = {tag: kept[part] for tag, kept in self.values.items()}

    async def close(self, exc: BaseException | None) -> None:
        """Draw the picture, if requested and the history is not empty."""
        if self._plot is None or not self.steps:
            return
        series: dict[str, tuple[list[int], list[float]]] = {tag: ([], []) for tag in self.values}
        for tag, (steps, numbers) in series.items():
            for step, value in zip(self.steps, self.values[tag], strict=True):
                if value is not None:
                    steps.append(step)
                    numbers.append(float(value))
        await to_thread(self._draw, series, self._plot)

    def __repr__(self) -> str:
        return f"<HistoryHook of {', '.join(self._tags)}: {len(self.steps)} steps>"
