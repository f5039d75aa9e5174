"""The end of a session: which hooks are called at a clean end and at any other, and which error reaches the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohooks._aio.cancel import cancel_count, current_task, shielded
from aiohooks.errors import add_note, flattened, is_clean_end
from aiohooks.session._hooks import HookSet
from aiohooks.session.creators import ChiefSessionCreator
from aiohooks.session.recovery import SessionSupervisor
from aiohooks.stores.publishers import Publisher

_logger = logging.getLogger("aiohooks")
_FLUSH_SECS = 5.0
"""How long to wait until other processes can know that this session has left."""


class Shutdown:
    """Ends one session, once."""

    def __init__(self, supervisor: SessionSupervisor, hooks: HookSet, grace_secs: float) -> None:
        self._supervisor = supervisor
        self._hooks = hooks
        self._grace_secs = grace_secs
        self._callbacks: list[Callable[[], None]] = []
        self.publisher: Publisher | None = None
        """The session's registration as a publisher of steps, which is closed with the session."""

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the very end; the last one added comes first."""
        self._callbacks.append(callback)

    def swallows(self, error: BaseException | None) -> bool:
        return error is not None and is_clean_end(error)

    async def end(self, error: BaseException | None) -> bool:
        """End the session after `error`, or none, left its block; return whether the error is swallowed.

        Raises:
            BaseException: the error of a background task, or of `end` or `close` of a hook, unless `error` is reported already.
        """
        swallow = self.swallows(error)
        primary = self._background_failure(None if swallow else error)
        session = self._supervisor.session
        if primary is None and session is not None and self._supervisor.recovery_error is None:
            try:
                primary = _single(await self._hooks.end(session), "end")
            except BaseException as raised:
                primary = raised
        late = await self.close(primary)
        if primary is None:
            primary = late
        if primary is None:
            return swallow
        if primary is error:
            return False
        raise primary

    def _background_failure(self, primary: BaseException | None) -> BaseException | None:
        """Return the failure of a background task that has reached no caller yet; a primary error gets it as a note."""
        for coord in (self._supervisor.coord, self._supervisor.root):
            if coord.raised or not coord.errors or coord.errors[0] is primary:
                continue
            coord.raised = True
            failure = coord.errors[0]
            if primary is not None:
                add_note(primary, f"a background task had failed: {failure!r}")
                _logger.error("a background task failed", exc_info=failure)
            elif self._supervisor.recovers(failure):
                _logger.warning("a background task failed, from which the next run would have recovered", exc_info=failure)
            else:
                primary = failure
        return primary

    async def close(self, primary: BaseException | None) -> BaseException | None:
        """End background tasks, close the session and the hooks: shielded from cancellation, limited in time.

        Returns:
            The error of the closing, if `primary` is None; otherwise that is only logged.

        Raises:
            CancelledError: the caller was cancelled meanwhile; everything is closed all the same.
        """
        errors: list[BaseException] = []
        base = cancel_count(current_task())
        try:
            while True:
                try:
                    await shielded(
                        self._close(primary, errors),
                        grace_secs=self._grace_secs,
                        what="the end of a monitored session",
                        on_cancel=self._cancel_tasks,
                    )
                    break
                except asyncio.CancelledError as cancelled:
                    if current_task().cancelling() <= base:
                        continue  # a third party cancelled the closing, not the caller: the rest of it is done all the same
                    if cancelled.__context__ is None:
                        cancelled.__context__ = primary
                    raise
        finally:
            while self._callbacks:
                self._callbacks.pop()()
        if primary is not None:
            for error in errors:
                add_note(primary, f"and then: {error!r}")
                _logger.error("closing failed after %r", primary, exc_info=error)
            return None
        return _single(errors, "close")

    def _cancel_tasks(self) -> None:
        for coord in (self._supervisor.coord, self._supervisor.root):
            coord.cancel_tasks()

    async def _close(self, primary: BaseException | None, errors: list[BaseException]) -> None:
        """Do what has not been done yet: after a cancellation in the middle this is called again."""
        supervisor = self._supervisor
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close(primary)
        if primary is not None and isinstance(supervisor.creator, ChiefSessionCreator):
            supervisor.creator.fail_waiters(primary)
        supervisor.root.close()
        supervisor.coord.close()
        cancelled: asyncio.CancelledError | None = None
        try:
            for coord in (supervisor.coord, supervisor.root):
                await coord.shut_down(self._grace_secs if primary is None else 0, self._grace_secs)
        except asyncio.CancelledError as error:
            cancelled = error
        failure = self._background_failure(primary)
        if failure is not None and failure is not primary:
            errors.append(failure)
        session, supervisor.session = supervisor.session, None
        if session is not None:
            try:
                await session.aclose()
            except Exception as error:
                errors.append(error)
            except asyncio.CancelledError as error:
                cancelled = error
        errors.extend(await self._hooks.close(primary or failure))
        if isinstance(supervisor.creator, ChiefSessionCreator):
            try:
                await supervisor.creator.aclose()
            except Exception as error:
                errors.append(error)
        if supervisor.store is not None:
            await supervisor.store.flush(_FLUSH_SECS)
        if cancelled is not None:
            raise cancelled


def _single(errors: list[BaseException], phase: str) -> BaseException | None:
    if len(errors) > 1:
        return BaseExceptionGroup(f"{len(errors)} failures in {phase}", flattened(errors))
    return errors[0] if errors else None
