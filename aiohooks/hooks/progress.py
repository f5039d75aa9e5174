"""Showing the progress of a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Literal

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_choice, check_instance, checked_int
from aiohooks.dispatch.calls import only_if
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import Progress, Sampling, Values, checked_values, duration, is_terminal, logger
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.hooks._rich import ProgressRenderer

_GRACE_SECS = 10.0
_REFRESH_SECS = 0.1
"""How often the bar is updated, and its values fetched."""


class ProgressHook(SessionRunHook):
    """Shows step, rate, remaining time, and chosen values: a progress bar on a terminal, plain lines elsewhere.

    The rate counts from the step at which the session starts, so a resumed run does not look fast. If the output is not a
    terminal, only whole lines of text are written. A terminal is written to in a thread, and is left clean however the
    session ends. Errors of the output are logged and never end a run.
    """

    def __init__(
        self,
        values: Values | None = None,
        *,
        total: int | None = None,
        every: Every = Every(secs=10),
        description: str = "run",
        display: Literal["auto", "rich", "plain"] = "auto",
        file: IO[str] | None = None,
    ) -> None:
        """Create the hook.

        Args:
            values: a mapping from a tag to a fetch, or several nodes or names, to show as well.
            total: the global step at which the run is complete; without it there is no bar and no remaining time.
            every: when to write a line if the output is not a terminal; one more is written at the end.
            description: the name of the run.
            display: `"rich"` for the bar, `"plain"` for lines, `"auto"` for the bar on a terminal if rich is installed.
            file: where to write; by default `sys.stderr` as it is in `begin`.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: `display="rich"`, and rich is not installed.
        """
        check_instance(every, Every, "every")
        check_instance(description, str, "description")
        total = checked_int(total, "total", 1, expected="a step, at least 1, or leave it out", optional=True)
        check_choice(display, "display", "auto", "rich", "plain")
        if display == "rich":
            from aiohooks.hooks import _rich as _rich  # imported here to fail now if rich is missing
        self._fetches = checked_values(values, may_be_empty=True)
        self._args = SessionRunArgs(self._fetches) if self._fetches else None
        self._total = total
        self._every = every
        self._description = description
        self._display = display
        self._given_file = file
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._file: IO[str] = self._given_file or sys.stderr
        self._renderer: ProgressRenderer | None = None
        self._sampling = Sampling(self._every, first=False)
        self._since = 0.0
        self._broken = False
        self.progress: Progress | None = None
        """The state that is shown; None before the session is created."""

    async def begin(self) -> None:
        """Choose between the bar and plain lines."""
        self._reset()
        if self._display == "rich" or (self._display == "auto" and is_terminal(self._file) and os.environ.get("TERM") != "dumb"):
            try:
                from aiohooks.hooks import _rich
            except ImportError as error:
                logger.info("progress is shown as plain lines: %s", error)
            else:
                self._renderer = _rich.renderer_of(self._file)
                self._sampling = Sampling(Every(secs=_REFRESH_SECS), first=True)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts, or to which a recovery moved it back."""
        step = session.global_step.latest.step
        if not self._sampling.start(step):
            return
        self._since = self._clock.now()
        if self.progress is None:
            self.progress = Progress(self._description, self._total, step, step)
            if self._renderer is not None:
                await self._write(self._renderer.add, self.progress)
        else:
            self.progress.step = self.progress.start_step = step
            self.progress.secs = 0.0

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the values if they are to be shown."""
        return self._args if self._sampling.should_fetch(run_context.global_step) else None

    @only_if("_has_to_write")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Update the progress; write a line if it is due."""
        if self._has_to_write(run_context, run_values) and self.progress is not None:
            self._update(run_context, run_values)
            await self._write(self._write_line, self.progress.line())

    def _has_to_write(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Return whether a line is due; if not, update the progress."""
        if self._renderer is None and self._sampling.is_due(run_context.global_step):
            return True
        self._update(run_context, run_values)
        return False

    def _update(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        progress = self.progress
        if progress is None:
            return
        progress.step = run_context.global_step
        progress.secs = self._clock.now() - self._since
        if self._sampling.mark_if_due(progress.step) and run_values.results is not None:
            progress.values = ", ".join(f"{tag} = {_text(value)}" for tag, value in run_values.results.items())

    async def end(self, session: Session) -> None:
        """Record the clean end."""
        if self.progress is not None:
            self.progress.ended = f"done in {duration(self._clock.now() - self._since)}"

    async def close(self, exc: BaseException | None) -> None:
        """Show the last state, and restore the terminal."""
        progress = self.progress
        if progress is None:
            return
        if exc is not None or progress.ended is None:
            cancelled = isinstance(exc, (asyncio.CancelledError, KeyboardInterrupt))
            progress.ended = "cancelled" if cancelled else f"failed: {type(exc).__name__}" if exc is not None else "closed"
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            await self._write(renderer.remove_ended)
        else:
            await self._write(self._write_line, progress.line())

    async def _write(self, write: Callable[..., None], *args: Any) -> None:
        if self._broken:
            return
        try:
            await to_thread(write, *args, grace_secs=_GRACE_SECS)
        except (OSError, ValueError) as error:  # the other end or the file was closed
            self._broken = True
            logger.warning("progress cannot be shown any more: %r", error)

    def _write_line(self, line: str) -> None:
        self._file.write(line.replace("\n", " ").replace("\x1b", "?") + "\n")
        self._file.flush()

    def __repr__(self) -> str:
        where = "not started" if self.progress is None else self.progress.position()
        return f"<ProgressHook {self._description}: {where}>"


def _text(value: Any) -> str:
    if hasattr(value, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # an array is shown by its str
            value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
