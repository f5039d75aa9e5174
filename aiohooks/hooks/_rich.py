"""Progress on a terminal, by rich: the one module that imports it."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

from aiohooks.hooks._extras import missing_extra

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise missing_extra("ProgressHook on a terminal", "rich") from error

if TYPE_CHECKING:
    from aiohooks.hooks.progress import Progress

_logger = logging.getLogger("aiohooks.hooks")
_FRAME_SECS = 0.1
_LAST_SECS = 2.0
_MOST_ENDED = 5
_boards: list[Board] = []
_boards_lock = threading.Lock()


class Board:
    """All progress that is shown on one terminal at a time, painted by a thread.

    A terminal may stop for as long as it likes (Ctrl-S does that): only this thread waits for it then. What others print is
    put above. The cursor stays visible, so that a process that is killed leaves it so.
    """

    def __init__(self, file: IO[str]) -> None:
        """Paints nothing yet."""
        self.file: IO[str] = file
        self._shown: list[Progress] = []
        self._spinners: dict[int, Spinner] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, progress: Progress) -> None:
        """Shows it from now on."""
        with _boards_lock:
            with self._lock:
                ended = [one for one in self._shown if one.ended is not None]
                for old in ended[: max(0, len(ended) - _MOST_ENDED)]:
                    self._shown.remove(old)
                self._shown.append(progress)
            if self._thread is None:
                _boards.append(self)
                self._stop.clear()
                self._thread = threading.Thread(target=self._paint, name="progress", daemon=True)
                self._thread.start()
                atexit.register(self._finish)

    def leave(self, progress: Progress) -> None:
        """Paints it once more; with the last one the painting ends, else it stays until then."""
        with _boards_lock:
            if any(one.ended is None for one in self._shown):
                return
            self._finish()

    def _finish(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        atexit.unregister(self._finish)
        if self in _boards:
            _boards.remove(self)
        self._stop.set()
        thread.join(_LAST_SECS)

    # -- in the thread

    def _paint(self) -> None:
        console = Console(file=self.file, force_terminal=True)
        live = Live(
            console=console,
            auto_refresh=False,
            get_renderable=self._picture,
            # Only what goes to a terminal anyway may go through the console: not what was redirected to a file.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        error_stream = sys.stderr
        moved: list[logging.StreamHandler[Any]] = []
        try:
            live.start()
            try:
                console.show_cursor(True)
                moved += _move_handlers(error_stream)
                while not self._stop.wait(_FRAME_SECS):
                    live.refresh()
                live.refresh()
            finally:
                for handler in moved:
                    handler.setStream(error_stream)
                live.stop()
        except (OSError, ValueError) as error:  # the terminal has gone
            _logger.warning("progress cannot be shown any more: %r", error)

    def _picture(self) -> Group:
        with self._lock:
            shown = list(self._shown)
        rows: list[Any] = []
        for progress in shown:
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


def board_of(file: IO[str]) -> Board:
    """The board of this terminal: the one that is shown there already, or a new one."""
    with _boards_lock:
        return next((board for board in _boards if board.file is file), None) or Board(file)


def _move_handlers(stream: IO[str]) -> list[logging.StreamHandler[Any]]:
    """Makes the root logger's handlers of `stderr` write above the bar, and returns them."""
    if sys.stderr is stream:
        return []
    moved: list[logging.StreamHandler[Any]] = []
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            one: logging.StreamHandler[Any] = handler  # pyright: ignore[reportUnknownVariableType]
            if one.stream is stream:
                one.setStream(sys.stderr)
                moved.append(one)
    return moved


def _is_terminal(file: IO[str] | None) -> bool:
    try:
        return file is not None and file.isatty()
    except (AttributeError, ValueError):
        return False
