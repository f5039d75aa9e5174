"""Showing the progress of a run as a bar on a terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, ClassVar

from aiohooks._core.validate import check_instance, checked_int
from aiohooks._core.waits import to_thread
from aiohooks.errors import printable
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import FetchingHook, Values, checked_values, logger, text_of
from aiohooks.hooks.every import Every
from aiohooks.session.coordinator import Coordinator

if TYPE_CHECKING:
    from aiohooks.hooks._rich import ProgressBar

_UPDATE_SECS = 0.1


class ProgressHook(FetchingHook):
    """Shows the step, the rate, the remaining time and values as a progress bar of rich.

    The rate is that of this session. If the output is not a terminal, only the last state is
    written, at the end.
    """

    _first: ClassVar[bool] = True

    def __init__(
        self,
        values: Values | None = None,
        *,
        total: int | None = None,
        description: str = "run",
        file: IO[str] | None = None,
    ) -> None:
        """Create the hook.

        Args:
            values: a mapping from a tag to a fetch, or several nodes or names, to show as well.
            total: the global step at which the run is complete.
            description: the name of the run.
            file: the output, by default `sys.stderr`.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: rich is not installed.
        """
        # rich is an extra. The import is here, so that only programs with this hook need it.
        from aiohooks.hooks import _rich

        check_instance(description, str, "description")
        total = checked_int(total, "total", 1, optional=True)
        self._new_bar = functools.partial(_rich.ProgressBar, description, total, file)
        super().__init__(checked_values(values, may_be_empty=True), Every(secs=_UPDATE_SECS))

    def _reset(self) -> None:
        super()._reset()
        self._session: Session
        self._bar: ProgressBar | None = None
        # The text of the latest values.
        self._values = ""

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Show the bar at the step at which the session starts, or to which a recovery moved it."""
        await super().after_create_session(session, coord)
        self._session = session
        if self._bar is None:
            self._bar = self._new_bar(session.global_step.latest.step)
            await _draw(self._bar.start)

    def _observe(self, step: int, result: Any) -> None:
        """Show the step and the values, which `result` has by tag."""
        self._values = printable(text_of(result))
        if self._bar is not None:
            self._bar.update(step, self._values)

    async def close(self, exc: BaseException | None) -> None:
        """Show the last state, and restore the terminal."""
        if self._bar is not None:
            self._bar.update(self._session.global_step.latest.step, self._values)
            await _draw(self._bar.stop)
            self._bar = None


async def _draw(draw: Callable[[], None]) -> None:
    """Start or stop the bar in a thread: writing to a terminal that the user has paused blocks."""
    try:
        await to_thread(draw, grace_secs=10.0)
    except (OSError, ValueError) as error:
        # The terminal or the file was closed. The session continues without the bar.
        logger.warning("progress cannot be shown: %r", error)
