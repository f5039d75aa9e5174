"""What hooks have in common that write records in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunHook
from aiohooks._shield import in_thread
from aiohooks.hooks._background import BackgroundWriter
from aiohooks.hooks._sampling import Sampling

if TYPE_CHECKING:
    from aiohooks._session import Session

GRACE_SECS = 120.0
"""How long the end of a session waits for the disk once it is cancelled."""


class WritingHook(SessionRunHook):
    """Asks for values in the runs that are due, raises what a write failed with, and lets all be written at the end.

    A subclass sets `_args` and `_sampling`; for a session it sets `_close_file`, makes `_writer`, and hands it the records.
    """

    _args: SessionRunArgs
    _sampling: Sampling
    _close_file: Callable[[], None] | None = None
    _writer: BackgroundWriter[Any] | None = None

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values if this run is to be written; raises what a write failed with."""
        if self._writer is not None:
            self._writer.check()
        return self._args if self._sampling.ask(run_context.global_step) else None

    async def end(self, session: Session) -> None:
        """Waits until all is in the file; raises what a write failed with."""
        if self._writer is not None:
            await self._writer.drain()

    async def close(self, exc: BaseException | None) -> None:
        """Writes what is left, and closes the file."""
        writer, self._writer = self._writer, None
        close_file, self._close_file = self._close_file, None
        try:
            if writer is not None:
                await writer.aclose(grace_secs=GRACE_SECS)
        finally:
            if close_file is not None:
                await in_thread(close_file, grace_secs=GRACE_SECS)
