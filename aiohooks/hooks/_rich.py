"""A progress bar on a terminal, by rich: the one module that imports it."""

from __future__ import annotations

import sys
from typing import IO

from aiohooks.errors import missing_extra

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text
except ImportError as error:
    raise missing_extra("ProgressHook", "rich") from error


class _RateColumn(ProgressColumn):
    """Steps per second, which rich measures over the last half minute."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g} steps/s", style="progress.data.speed")


class ProgressBar:
    """A bar with description, step, rate, remaining time and values.

    On a terminal, a thread of rich draws it.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        file: IO[str] | None,
        step: int,
    ) -> None:
        console = Console(file=file, stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            console=console,
            auto_refresh=console.is_terminal,
            # rich prints the output of the program above the bar, on the console. If the program's
            # output goes to a file, it must stay there.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._task = self._progress.add_task(description, total=total, completed=step, values="")

    def start(self) -> None:
        """Draw the bar from now on. What the program prints appears above the bar."""
        self._progress.start()

    def update(self, step: int, values: str) -> None:
        """Change the step and the values."""
        self._progress.update(self._task, completed=step, values=values)

    def stop(self) -> None:
        """Draw the last state, and restore the terminal."""
        self._progress.stop()


def _is_terminal(file: IO[str] | None) -> bool:
    """Return whether a file is an open terminal."""
    try:
        return file is not None and file.isatty()
    except (AttributeError, ValueError):
        # An object in place of `sys.stdout` may have no `isatty`, and a closed file raises.
        return False
