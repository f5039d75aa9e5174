"""The end of a session: clean or not, what is called then, and what reaches the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohooks._aio.cancel import cancel_count, current_task, shielded
from aiohooks.errors import is_clean_end
from aiohooks.session._hooks import HookSet
from aiohooks.session.creators import ChiefSessionCreator
from aiohooks.session.recovery import Recoverable
from aiohooks.stores.publishers import Publisher

_logger = logging.getLogger("aiohooks")
_TELL_SECS = 5.0
"""How long to wait until other processes can know that this session has left."""


class Ending:
    """Ends one session once."""

    def __init__(self, life: Recoverable, hooks: HookSet, grace_secs: float) -> None:
        """Keeps what is to be ended."""
        self._life = life
        self._hooks = hooks
        self._grace_secs = grace_secs
        self._callbacks: list[Callable[[], None]] = []
        self.publisher: Publisher | None = None
        """The session's registration as one who advances the step; it leaves when the session ends."""

    def callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at the very end, the last one first."""
        self._callbacks.append(callback)

    def swallows(self, error: BaseException | None) -> bool:
        """Whether the block swallows `error`."""
        return error is not None and is_clean_end(error)

    async def end(self, error: BaseException | None) -> bool:
        """Ends the session after `error` left its block, or none; returns whether the error is swallowed.

        Raises:
            BaseException: what a background task, `end` or `close` of a hook raised, unless `error` is reported already.
        """
        swallow = self.swallows(error)
        primary = self._background_failure(None if swallow else error)
        session = self._life.session
        if primary is None and session is not None and self._life.given_up is None:
            try:
                primary = _one_of(await self._hooks.end(session), "end")
            except BaseException as raised:
                primary = raised
        late = await self.shut_down(primary)
        if primary is None:
            primary = late
        if primary is None:
            return swallow
        if primary is error:
            return False
        raise primary

    def _background_failure(self, primary: BaseException | None) -> BaseException | None:
        """The failure of a background task that nobody has seen yet, unless there is a primary error: that one says it."""
        for coord in (self._life.coord, self._life.root):
            if coord.raised or not coord.errors or coord.errors[0] is primary:
                continue
            coord.raised = True
            failure = coord.errors[0]
            if primary is not None:
                primary.add_note(f"a background task had failed: {failure!r}")
                _logger.error("a background task failed", exc_info=failure)
            elif self._life.recovers(failure):
                _logger.warning("a background task failed, from which the next run would have recovered", exc_info=failure)
            else:
                primary = failure
        return primary

    async def shut_down(self, primary: BaseException | None) -> BaseException | None:
        """Ends background tasks, closes the session and the hooks: shielded from cancellation, limited in time.

        Returns:
            What went wrong in it, if `primary` is None; otherwise that is only logged.

        Raises:
            CancelledError: the caller was cancelled meanwhile; everything is closed all the same.
        """
        errors: list[BaseException] = []
        base = cancel_count(current_task())
        try:
            while True:
                try:
                    await shielded(
                        self._shut_down(primary, errors),
                        grace_secs=self._grace_secs,
                        what="the end of a monitored session",
                        on_cancel=self._cancel_tasks,
                    )
                    break
                except asyncio.CancelledError as cancelled:
                    if current_task().cancelling() <= base:
                        continue  # somebody cancelled the closing and not the caller: what is left of it is done all the same
                    if cancelled.__context__ is None:
                        cancelled.__context__ = primary
                    raise
        finally:
            while self._callbacks:
                self._callbacks.pop()()
        if primary is not None:
            for error in errors:
                primary.add_note(f"and then: {error!r}")
                _logger.error("closing failed after %r", primary, exc_info=error)
            return None
        return _one_of(errors, "close")

    def _cancel_tasks(self) -> None:
        for coord in (self._life.coord, self._life.root):
            coord.cancel_tasks()

    async def _shut_down(self, primary: BaseException | None, errors: list[BaseException]) -> None:
        """Does what is not done yet; a cancellation in the middle leaves the steps behind to be done."""
        life = self._life
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close(primary)
        if primary is not None and isinstance(life.creator, ChiefSessionCreator):
            life.creator.gave_up(primary)
        life.root.retire()
        life.coord.retire()
        cancelled: asyncio.CancelledError | None = None
        try:
            for coord in (life.coord, life.root):
                await coord.wind_down(self._grace_secs if primary is None else 0, self._grace_secs)
        except asyncio.CancelledError as error:
            cancelled = error
        failure = self._background_failure(primary)
        if failure is not None and failure is not primary:
            errors.append(failure)
        session, life.session = life.session, None
        if session is not None:
            try:
                await session.aclose()
            except Exception as error:
                errors.append(error)
            except asyncio.CancelledError as error:
                cancelled = error
        errors.extend(await self._hooks.close(primary or failure))
        if isinstance(life.creator, ChiefSessionCreator):
            try:
                await life.creator.aclose()
            except Exception as error:
                errors.append(error)
        if life.store is not None:
            await life.store.flush(_TELL_SECS)
        if cancelled is not None:
            raise cancelled


def _one_of(errors: list[BaseException], phase: str) -> BaseException | None:
    if len(errors) > 1:
        return BaseExceptionGroup(f"{len(errors)} failures in {phase}", errors)
    return errors[0] if errors else None
