"""The end of a session: which hooks are called at a clean end and at any other, and which error
reaches the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from aiohooks._core.cancel import shielded, shielded_task
from aiohooks._core.reports import logger
from aiohooks._core.scope import begin_run, current_run, current_scope
from aiohooks.errors import (
    add_note,
    flattened,
    is_clean_end,
    raise_unchanged,
    safe_repr,
    set_context,
)
from aiohooks.session._hooks import HookSet
from aiohooks.session._long_waits import LongWaitLog
from aiohooks.session._run_lock import RunLock
from aiohooks.session._state import SessionState, end_tasks
from aiohooks.session.creators import ChiefSessionCreator, SessionCreator
from aiohooks.session.status import CLOSING

_FLUSH_SECS = 5.0
"""How long to wait until other processes can know that this session has left."""


class Shutdown:
    """Ends one session, once: others that close it meanwhile wait until that is complete."""

    def __init__(
        self, state: SessionState, creator: SessionCreator, hooks: HookSet, run_lock: RunLock
    ) -> None:
        self._state = state
        self._creator = creator if isinstance(creator, ChiefSessionCreator) else None
        self._hooks = hooks
        self._run_lock = run_lock
        self._complete = asyncio.Event()
        self.callbacks: contextlib.ExitStack = contextlib.ExitStack()
        """What is called at the very end."""

    async def end(self, error: BaseException | None) -> bool:
        """End the session after `error`, or none, left its block; return whether the error is
        swallowed.
        """
        swallow = swallows(error)
        if error is None:
            self._state.record_end()
        elif swallow:
            why = f"the block was left by {safe_repr(error)}"
            self._state.record_end(why)
            logger.info("%s: %s, which is a clean end", self._state.label, why)
        outcome = await self._complete_after(self._end, None if swallow else error)
        if outcome is None:
            return swallow
        if outcome is error:
            return False
        self._state.name_session(outcome)
        raise_unchanged(outcome)

    async def end_opening(self, error: BaseException) -> None:
        """End a session that could not be opened."""
        if is_clean_end(error):
            self._state.record_end()
        outcome = await self._complete_after(self._close, error) or error
        self._state.name_session(outcome)
        raise_unchanged(outcome)

    async def wait(self, error: BaseException | None) -> bool:
        """Wait until another task has ended the session; return whether `error`, with which the
        block was left, is swallowed.
        """
        swallow = swallows(error)
        try:
            what = f"the wait for the end of {self._state.label}"
            await shielded(self._complete.wait(), grace_secs=self._state.grace_secs, what=what)
        except asyncio.CancelledError as cancelled:
            self._keep(None if swallow else error, cancelled)
            raise
        return swallow

    async def _complete_after(
        self,
        end: Callable[[BaseException | None], Awaitable[BaseException | None]],
        error: BaseException | None,
    ) -> BaseException | None:
        """Await `end(error)`: the session is closing meanwhile, and closed afterwards, whatever
        happens.
        """
        outer, before, own = current_run(), current_scope.get(), self._hooks.own.state()
        self._state.set_phase("closing")
        # A hook that closes the session would deadlock.
        scope = begin_run(self._state, None if outer is None else outer.publisher)
        try:
            return await end(error)
        finally:
            scope.active = False
            current_scope.set(before)
            self._hooks.own.copy_back(own)  # `close` is called in another task
            self._state.set_phase("closed")
            self._state.entered_by = None
            self._complete.set()

    async def _end(self, error: BaseException | None) -> BaseException | None:
        """Wait for the last run, call `end` of the hooks after a clean end, and close; return the
        error of the session.
        """
        state = self._state
        failures: list[BaseException] = []
        try:
            with self._log_long_wait():
                await self._run_lock.close(error is not None)
                error = self._background_failure(error)
                if error is None and state.session is not None and state.recovery_error is None:
                    await self._hooks.end(state.session, failures)
                    error = _single(failures, "end")
                elif error is None and state.recovery_error is None:
                    what = (
                        "its last recovery was cancelled, so that it has no raw session: `end` of"
                        " the hooks is not called"
                    )
                    logger.warning("%s: %s, and nothing is saved", state.label, what)
        except BaseException as raised:
            self._keep(error, raised)
            self._report(failures, after=raised)
            error = raised
        return await self._close(error)

    def _background_failure(self, primary: BaseException | None) -> BaseException | None:
        """Return the failure of a background task that has reached no caller yet; a primary error
        gets it as a note.
        """
        what = f"{self._state.label}: a background task failed"
        state = self._state
        # First those that end the session: one that it would have recovered from hides no other.
        unknown = [
            (failure, owner)
            for failure in sorted(state.failures(), key=state.recovers)
            for owner in state.owners
            if owner.failed_with(failure)
            and failure is not primary
            and not state.is_known(failure, owner)
        ]
        for failure, owner in unknown:
            is_first = failure is owner.errors[0]
            if not is_first and (primary is not None or state.recovers(failure)):
                continue  # it was logged when it happened
            state.mark_known(failure, owner)
            if primary is not None:
                add_note(primary, f"a background task had failed: {safe_repr(failure)}")
                logger.error("%s", what, exc_info=failure)
            elif self._state.recovers(failure):
                logger.warning(
                    "%s, from which the next run would have recovered", what, exc_info=failure
                )
            else:
                primary = failure
        return primary

    async def _close(self, primary: BaseException | None) -> BaseException | None:
        """End the tasks, close the session and the hooks, shielded and limited in time; return the
        error of the session.
        """
        errors: list[BaseException] = []
        with self.callbacks:
            while True:
                try:
                    closing = await shielded_task(
                        self._close_parts(primary, errors),
                        grace_secs=self._state.grace_secs,
                        what=f"the end of {self._state.label}",
                        on_cancel=self._cancel_tasks,
                    )
                    if (
                        not closing.cancelled()
                    ):  # else a third party has done that: the rest is closed all the same
                        closing.result()
                        break
                except asyncio.CancelledError as cancelled:
                    outcome = self._choose(primary, errors, cancelled)
                    errors.clear()
                    if outcome is cancelled:
                        raise
                    return outcome
        return self._choose(primary, errors)

    async def _close_parts(
        self, primary: BaseException | None, errors: list[BaseException]
    ) -> None:
        """Do what has not been done yet: after a cancellation in the middle this is called
        again.
        """
        state = self._state
        error = primary or state.recovery_error  # the block may have caught the latter
        failure = None if error is None else _why(error)
        publisher, state.publisher = state.publisher, None
        try:
            if publisher is not None:
                publisher.close(error)
        except BaseException as raised:
            errors.append(raised)
        if error is not None and self._creator is not None:
            self._creator.fail_waiters(error)
        for owner in state.owners:
            owner.close(failure)
        cancelled: asyncio.CancelledError | None = None

        async def complete(
            part: Awaitable[object], log: AbstractContextManager[None] | None = None
        ) -> None:
            nonlocal cancelled
            try:
                with log or contextlib.nullcontext():
                    await part
            except asyncio.CancelledError as raised:
                cancelled = raised
            except BaseException as raised:
                errors.append(raised)

        why = (
            failure
            or f"the session has ended, and its grace period of {self._state.grace_secs} s is over"
        )
        secs = self._state.grace_secs if error is None else 0
        await complete(
            end_tasks(state.owners, secs, self._state.grace_secs, why, f"{state.label}, closing")
        )
        background = self._background_failure(primary)
        if background is not None and background is not primary:
            errors.append(background)
        for owner in state.owners:
            owner.disown("the session has ended")
        session, state.session = state.session, None
        if session is not None:
            await complete(session.aclose(), self._log_long_wait("the raw session"))
        await complete(self._hooks.close(error or background, errors), self._log_long_wait())
        if self._creator is not None:
            await complete(
                self._creator.aclose(grace_secs=self._state.grace_secs),
                self._log_long_wait("its creator"),
            )
        if state.store is not None:
            await complete(state.store.flush(_FLUSH_SECS), self._log_long_wait("its step store"))
        if self._complete.is_set():  # it took longer than the grace period after a cancellation
            for late in errors:
                logger.error(
                    "%s: closing failed, after the session had ended", state.label, exc_info=late
                )
        if cancelled is not None:
            raise cancelled

    def _cancel_tasks(self) -> None:
        for owner in self._state.owners:
            owner.cancel_tasks("the session was cancelled while it was closed")

    def _log_long_wait(self, what: str | None = None) -> LongWaitLog:
        """Return what logs that closing waits for `what`, or if None, for the current calls of
        hooks.
        """

        def waits_for() -> dict[object, str]:
            if what is not None:
                return {what: what}
            status = None if self._state.get_status is None else self._state.get_status()
            calls: dict[object, str] = (
                {one.what: str(one) for one in status.doing if one.what != CLOSING}
                if status
                else {}
            )
            for hook in self._hooks.registered:
                if pending := self._hooks.background.pending(hook):
                    calls[hook] = f"{pending} background calls of {hook.name}"
            return calls

        return LongWaitLog(f"{self._state.label}, closing", waits_for)

    # -- which error is raised

    def _choose(
        self,
        primary: BaseException | None,
        errors: list[BaseException],
        cancelled: asyncio.CancelledError | None = None,
    ) -> BaseException | None:
        """Return the error that is raised in the end; note the others on it, and log them."""
        outcome = cancelled or primary
        if outcome is None or not _is_fatal(outcome):
            outcome = next((error for error in errors if _is_fatal(error)), outcome)
        if outcome is None:
            return _single(errors, "close")
        self._keep(primary, outcome)
        self._report([error for error in errors if error is not outcome], after=outcome)
        return outcome

    def _keep(self, error: BaseException | None, raised: BaseException) -> None:
        """Log an error instead of which another one is raised, and make it the context of that."""
        if error is None or error is raised:
            return
        if not isinstance(
            error, asyncio.CancelledError
        ):  # by which it is known again where this session is nested
            logger.error(
                "%s: %s, and then %s",
                self._state.label,
                _why(error),
                safe_repr(raised),
                exc_info=error,
            )
        if raised.__context__ is None:
            set_context(raised, error)
        elif raised.__context__ is not error and not isinstance(error, asyncio.CancelledError):
            add_note(raised, f"before that, {_why(error)}")

    def _report(self, errors: list[BaseException], after: BaseException) -> None:
        """Note errors on the one that is raised instead, and log them."""
        for error in errors:
            add_note(after, f"and then: {safe_repr(error)}")
            logger.error(
                "%s: closing failed after %s", self._state.label, safe_repr(after), exc_info=error
            )


def swallows(error: BaseException | None) -> bool:
    """Return whether a block that `error` has left ends without it."""
    return error is not None and is_clean_end(error)


def _why(error: BaseException) -> str:
    """Return the reason of the stop that follows an error."""
    return (
        "the session was cancelled"
        if isinstance(error, asyncio.CancelledError)
        else f"the session failed: {safe_repr(error)}"
    )


def _is_fatal(error: BaseException) -> bool:
    """Return whether an error ends the program."""
    return isinstance(error, (KeyboardInterrupt, SystemExit))


def _single(errors: list[BaseException], phase: str) -> BaseException | None:
    if len(errors) > 1:
        return BaseExceptionGroup(f"{len(errors)} failures in {phase}", flattened(errors))
    return errors[0] if errors else None
