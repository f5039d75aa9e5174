"""Progress on a terminal, by rich: the one module that imports it."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import IO, Any

from aiohooks.errors import missing_extra
from aiohooks.hooks._observing import Progress, is_terminal, logger

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise missing_extra("ProgressHook on a terminal", "rich") from error

_FRAME_SECS = 0.1
_STOP_SECS = 2.0
_MAX_ENDED = 5
_renderers: list[ProgressRenderer] = []
_lock = threading.Lock()  # guards the list above, and which renderers have a thread


class ProgressRenderer:
    """Renders all progress that is shown on one terminal, in a thread.

    A terminal may block writes indefinitely (Ctrl-S), and `Live.start` and `Live.stop` write too: so only this thread uses
    it. Output of others appears above the progress. The cursor stays visible, so that it is so after a kill.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file: IO[str] = file
        self._shown: tuple[Progress, ...] = ()  # replaced, never changed: the thread reads it without a lock
        self._spinners: dict[int, Spinner] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, progress: Progress) -> None:
        """Show this progress from now on."""
        with _lock:
            dropped = [one for one in self._shown if one.ended is not None][:-_MAX_ENDED]
            self._shown = (*(one for one in self._shown if one not in dropped), progress)
            if self._thread is None:
                _renderers.append(self)
                self._stop.clear()
                self._thread = threading.Thread(target=self._render, name="progress", daemon=True)
                self._thread.start()
                atexit.register(self._stop_rendering)

    def remove_ended(self) -> None:
        """Render the last state and stop, if all progress has ended."""
        with _lock:
            if all(one.ended is not None for one in self._shown):
                self._stop_rendering()

    def _stop_rendering(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self._stop_rendering)
            _renderers.remove(self)
            self._stop.set()
            thread.join(_STOP_SECS)

    def _render(self) -> None:
        console = Console(file=self.file, force_terminal=True)
        live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._rows,
            # The console writes to the terminal, so a stream that was redirected to a file must not go through it.
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )
        error_stream = sys.stderr
        moved: list[logging.StreamHandler[Any]] = []
        try:
            live.start()
            try:
                console.show_cursor(True)
                moved += _redirect_handlers(error_stream)
                while not self._stop.wait(_FRAME_SECS):
                    live.refresh()
                live.refresh()
            finally:
                for handler in moved:
                    handler.setStream(error_stream)
                live.stop()
        except (OSError, ValueError) as error:  # the terminal was closed
            logger.warning("progress cannot be shown any more: %r", error)

    def _rows(self) -> Group:
        rows: list[Any] = []
        for progress in self._shown:
            row = Table.grid(padding=(0, 1))
            row.add_row(
                Text(progress.description, style="bold"),
                self._bar(progress),
                Text(progress.position()),
                Text(progress.speed(), style="red" if (progress.ended or "").startswith("failed") else "cyan"),
            )
            rows.append(row)
            if progress.values:
                rows.append(Text(f"  {progress.values}", style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*rows)

    def _bar(self, progress: Progress) -> ProgressBar | Spinner | Text:
        if progress.total is not None:
            return ProgressBar(total=progress.total, completed=min(progress.step, progress.total), width=30)
        if progress.ended is not None:
            return Text("·")
        return self._spinners.setdefault(id(progress), Spinner("dots"))


def renderer_of(file: IO[str]) -> ProgressRenderer:
    """Return the active renderer of this terminal, or a new one."""
    with _lock:
        return next((renderer for renderer in _renderers if renderer.file is file), None) or ProgressRenderer(file)


def _redirect_handlers(error_stream: IO[str]) -> list[logging.StreamHandler[Any]]:
    """Redirect the root logger's handlers of the original stderr to the current one; return them."""
    moved: list[logging.StreamHandler[Any]] = []
    if sys.stderr is not error_stream:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                one: logging.StreamHandler[Any] = handler  # pyright: ignore[reportUnknownVariableType]
                if one.stream is error_stream:
                    one.setStream(sys.stderr)
                    moved.append(one)
    return moved
