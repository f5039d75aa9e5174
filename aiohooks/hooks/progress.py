"""Showing how far a run has come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_instance, check_secs
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import Values, checked_values
from aiohooks.hooks.every import Every, Sampling
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")
_GRACE_SECS = 10.0


@dataclass(slots=True)
class Progress:
    """What a display shows; the event loop writes it, a display's thread may read it."""

    description: str
    total: int | None
    step: int
    start_step: int
    secs: float = 0.0
    values: str = ""
    ended: str | None = None

    @property
    def rate(self) -> float | None:
        """Steps per second since the start or the point of resumption; None before the first step."""
        steps = self.step - self.start_step
        return steps / self.secs if steps > 0 and self.secs > 0 else None

    def position(self) -> str:
        """Where it is: `500/1000`, or `500` without a total."""
        return f"{self.step}" if self.total is None else f"{self.step}/{self.total}"

    def speed(self) -> str:
        """How fast it is and how long it takes yet, or what it ended with."""
        parts = [] if self.rate is None else [f"{self.rate:.3g} steps/s"]
        if self.ended is not None:
            parts.append(self.ended)
        elif self.rate is not None and self.total is not None and self.total > self.step:
            parts.append(f"{duration((self.total - self.step) / self.rate)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """All of it."""
        percent = f" ({100 * self.step // self.total}%)" if self.total else ""
        parts = [f"step {self.position()}{percent}", self.speed(), self.values]
        return f"{self.description}: " + ", ".join(part for part in parts if part)


class _Display(Protocol):
    """Where progress is shown; every method may block, and is called in a thread."""

    def join(self, progress: Progress) -> None: ...
    def leave(self, progress: Progress) -> None: ...


class ProgressHook(SessionRunHook):
    """Shows step, rate, the time that is left, and chosen values: a moving bar on a terminal, plain lines elsewhere.

    The rate counts from the step at which the session starts, so that a resumed run does not look fast. Off a terminal
    nothing but whole lines of text is written. The terminal is written to by a thread of its own; it is left clean however
    the session ends. Trouble with the display is logged and never ends a run.
    """

    def __init__(
        self,
        values: Values | None = None,
        *,
        total: int | None = None,
        every: Every = Every(secs=10),  # noqa: B008 - frozen
        description: str = "run",
        display: Literal["auto", "rich", "plain"] = "auto",
        file: IO[str] | None = None,
        refresh_secs: float = 0.1,
    ) -> None:
        """Takes what to show, and where.

        Args:
            values: a mapping from a tag to a fetch, or several nodes or names, to show too.
            total: the global step at which the run is done; without it there is no bar and no time left.
            every: when a line is written off a terminal; one more comes at the end.
            description: what the run is called.
            display: `"rich"` for the bar, `"plain"` for lines, `"auto"` for the bar on a terminal if rich is installed.
            file: where to; by default `sys.stderr` as it is in `begin`.
            refresh_secs: how often the bar is drawn, and its values fetched.

        Raises:
            InvalidArgumentError: one of the arguments cannot be meant.
            ImportError: `display="rich"`, and rich is not installed.
        """
        check_instance(every, Every, "every")
        check_instance(description, str, "description")
        check_secs(refresh_secs, "refresh_secs", positive=True)
        given: object = total
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise InvalidArgumentError(f"total is {given!r}; give a step, at least 1, or leave it out")
        if display not in ("auto", "rich", "plain"):
            raise InvalidArgumentError(f'display is {display!r}; give "auto", "rich" or "plain"')
        if display == "rich":
            _rich_display()
        self._fetches = checked_values(values, may_be_empty=True)
        self._args = SessionRunArgs(self._fetches) if self._fetches else None
        self._total = total
        self._every = every
        self._description = description
        self._kind = display
        self._given_file = file
        self._refresh_secs = refresh_secs
        self._clock: Clock = current_clock()
        self._file: IO[str] = sys.stderr
        self._display: _Display | None = None
        self._sampling = Sampling(every, first=False)
        self._since = 0.0
        self._broken = False
        self.progress: Progress | None = None
        """What is shown; None before the session is created."""

    async def begin(self) -> None:
        """Chooses the display."""
        self._clock = current_clock()
        self._file = self._given_file or sys.stderr
        self._broken = False
        self.progress = None
        self._display = None
        every = self._every
        if self._kind == "rich" or (self._kind == "auto" and _is_terminal(self._file)):
            try:
                self._display = _rich_display()(self._file)
                every = Every(secs=self._refresh_secs)
            except ImportError as error:
                _logger.info("progress is shown as plain lines: %s", error)
        self._sampling = Sampling(every, first=self._display is not None)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts, and anew where a recovery took it back."""
        step = session.global_step.latest.step
        if not self._sampling.start(step):
            return
        self._since = self._clock.now()
        if self.progress is None:
            self.progress = Progress(self._description, self._total, step, step)
            if self._display is not None:
                await self._show(self._display.join, self.progress)
        else:
            self.progress.step = self.progress.start_step = step
            self.progress.secs = 0.0

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values if they are to be shown."""
        return self._args if self._sampling.ask(run_context.global_step) else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Notes the step; writes a line if it is time."""
        progress = self.progress
        if progress is None:
            return
        progress.step = run_context.global_step
        progress.secs = self._clock.now() - self._since
        if self._sampling.take(progress.step):
            if run_values.results is not None:
                progress.values = ", ".join(f"{tag} = {_text(value)}" for tag, value in run_values.results.items())
            if self._display is None:
                await self._show(self._write_line, progress.line())

    async def end(self, session: Session) -> None:
        """Notes that it was a clean end."""
        if self.progress is not None:
            self.progress.ended = f"done in {duration(self._clock.now() - self._since)}"

    async def close(self, exc: BaseException | None) -> None:
        """Shows the last state, and leaves the terminal as it was."""
        progress = self.progress
        if progress is None:
            return
        if exc is not None or progress.ended is None:
            cancelled = isinstance(exc, (asyncio.CancelledError, KeyboardInterrupt))
            progress.ended = "cancelled" if cancelled else f"failed: {type(exc).__name__}" if exc is not None else "closed"
        if self._display is not None:
            display, self._display = self._display, None
            await self._show(display.leave, progress)
        else:
            await self._show(self._write_line, progress.line())

    async def _show(self, write: Callable[[Any], None], what: Any) -> None:
        if self._broken:
            return
        try:
            await to_thread(write, what, grace_secs=_GRACE_SECS)
        except (OSError, ValueError) as error:  # the other end has gone, or the file was closed
            self._broken = True
            _logger.warning("progress cannot be shown any more: %r", error)

    def _write_line(self, line: str) -> None:
        self._file.write(line.replace("\n", " ").replace("\x1b", "?") + "\n")
        self._file.flush()

    def __repr__(self) -> str:
        where = "not started" if self.progress is None else self.progress.position()
        return f"<ProgressHook {self._description}: {where}>"


def duration(secs: float) -> str:
    """Seconds as hours, minutes and seconds: `0:01:30`; from a day on with days, `2d 3:00:00`."""
    minutes, seconds = divmod(round(max(0.0, secs)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{seconds:02d}"


def _rich_display() -> Callable[[IO[str]], _Display]:
    from aiohooks.hooks import _rich  # an extra

    return _rich.board_of


def _is_terminal(file: IO[str]) -> bool:
    try:
        return file.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # no real file, or a closed one
        return False


def _text(value: Any) -> str:
    if hasattr(value, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # an array: as it prints itself
            value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
