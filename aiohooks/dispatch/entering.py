"""Entering the hooks of a group that are async context managers, and exiting them."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

from aiohooks._core.calls import OwnContext
from aiohooks._core.cancel import new_task, shielded, wait_done
from aiohooks._core.reports import logger
from aiohooks.dispatch.calls import Method, OrderGroup, RegisteredHook, call_groups
from aiohooks.dispatch.composite import Composite
from aiohooks.dispatch.hook import HookRegistration, OnError
from aiohooks.errors import hook_cancelled_error, keep_errors


class EnteredHooks:
    """The hooks of a group that have been entered.

    They are entered and exited in one context, but not in one task.
    """

    def __init__(self, composite: Composite) -> None:
        self._composite = composite
        self._context = OwnContext()
        self._before_exits: Context | None = None  # the context after the last hook was entered
        self._entered: list[RegisteredHook] = []
        self._exits: dict[asyncio.Task[None], RegisteredHook] = {}  # of hooks that were removed
        self._failures: list[BaseException] = []

    async def enter(self, registered: RegisteredHook) -> None:
        """Enter a hook, within its time limit."""

        async def enter_and_note() -> None:
            await registered.hook.__aenter__()
            # Now: a cancel at the next await must not make the group forget to exit the hook.
            self._entered.append(registered)

        # An error of entering is raised in any case.
        await self._call(registered, "__aenter__", enter_and_note, "raise")
        # What exits leave set after this is set for the caller at the end of the block.
        self._before_exits = self._context.state()

    def remove(self, registered: RegisteredHook) -> None:
        """Exit a hook that is being removed, when the calls that have begun by now have ended.

        Raises:
            WrongLoopError: this is not called in the group's event loop.
        """
        if registered not in self._entered or self._composite.state != "entered":
            return
        self._composite.check_loop()
        # One hook after another, in order of removal: all exits run in one context.
        earlier: list[asyncio.Future[None]] = [*self._composite.active, *self._exits]
        name = f"exit of {registered.name}, which was removed"
        self._exits[new_task(self._exit_removed(registered, earlier), name)] = registered

    async def exit_all(self, error: BaseException | None) -> list[BaseException]:
        """Wait for active calls and background calls, exit the hooks, and return the failures.

        Args:
            error: the error of the block.
        """
        try:
            await shielded(
                self._exit_all(error),
                grace_secs=self._composite.grace_secs,
                what=f"the end of {self._composite!r}",
            )
        except asyncio.CancelledError as cancelled:
            keep_errors(cancelled, self._failures)
            raise
        finally:
            # Hooks are exited in another task, and what they leave set is set for the caller.
            self._context.copy_back(self._before_exits)
        return self._failures

    async def _exit_all(self, error: BaseException | None) -> None:
        grace_secs = self._composite.grace_secs
        active = self._composite.active
        if not await wait_done(active, grace_secs):
            logger.warning(
                "%r is left, but %s of its calls still run after %s s",
                self._composite,
                len(active),
                grace_secs,
            )
        self._failures += await self._composite.background.end(grace_secs)
        for task, registered in self._exits.items():
            if registered in self._entered:
                task.cancel()  # the calls that it waits for have not ended in time
        await wait_done(self._exits, None)
        while self._entered:
            await self._exit(self._entered.pop(), error)

    async def _exit_removed(
        self,
        registered: RegisteredHook,
        earlier: list[asyncio.Future[None]],
    ) -> None:
        """Exit a removed hook, when earlier calls and exits have ended."""
        await wait_done(earlier, None)
        await self._composite.background.drain([registered])
        self._entered.remove(registered)
        await self._exit(registered, None)

    async def _exit(self, registered: RegisteredHook, error: BaseException | None) -> None:
        """Call `__aexit__` of a hook, which cannot swallow the error of the block.

        Raise nothing: a failure, also a cancel, is added to the failures, as the other hooks have
        to be exited all the same.
        """
        details: tuple[Any, ...] = (None, None, None)
        if error is not None:
            details = (type(error), error, error.__traceback__)
        try:
            await self._call(
                registered,
                "__aexit__",
                registered.hook.__aexit__,
                registered.registration.on_error,
                details,
                max(self._composite.grace_secs, 1e-9),
            )
        except asyncio.CancelledError as cancelled:
            # The end itself was cancelled, after the grace period or by other code.
            failure = hook_cancelled_error(f"{registered.name}.__aexit__", cancelled)
            self._failures.append(failure)
        except Exception as failure:
            self._failures.append(failure)

    async def _call(
        self,
        registered: RegisteredHook,
        method: str,
        function: Method,
        on_error: OnError,
        args: tuple[Any, ...] = (),
        secs: float | None = None,
    ) -> None:
        """Call a method of a hook, also of a disabled one, in the context of all these calls."""

        def bind(_registered: RegisteredHook, _method: str) -> Method:
            return function

        given: HookRegistration = registered.registration
        registration = given._replace(on_error=on_error, disable_after=None)
        group = OrderGroup(
            method,
            [RegisteredHook(registered.name, registration)],
            self._composite.grace_secs,
            secs,
            bind,
        )
        await call_groups((group,), args, own=self._context)
