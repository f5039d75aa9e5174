"""Hooks with plain methods, called in a worker thread."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._validate import check_secs
from aiohooks.errors import InvalidHookError
from aiohooks.session.hook import HOOK_METHODS, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


class BlockingHook(SessionRunHook):
    """Calls the plain methods of any object as a hook, each in a worker thread, so that they may block.

    The object may have any of the six methods. From the thread, coroutines of the session are called with
    `anyio.from_thread.run`; `request_stop` may be called directly. A cancellation waits for the thread, at most the grace
    period: nothing can stop it.
    """

    def __init__(self, obj: Any, *, grace_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Takes the object.

        Raises:
            InvalidHookError: it has none of the methods, or one of them is a coroutine function.
        """
        check_secs(grace_secs, "grace_secs")
        if isinstance(obj, type):
            raise InvalidHookError(f"BlockingHook got the class {obj.__name__}; give an object of it: {obj.__name__}(...)")
        self._obj = obj
        self._grace_secs = grace_secs
        self._methods = {name: getattr(obj, name) for name in HOOK_METHODS if callable(getattr(obj, name, None))}
        if not self._methods:
            raise InvalidHookError(f"{obj!r} has none of the methods of a hook: {', '.join(HOOK_METHODS)}")
        for name, method in self._methods.items():
            if inspect.iscoroutinefunction(method):
                raise InvalidHookError(f"{type(obj).__name__}.{name} is a coroutine function; register the hook as it is")
        for option in ("order", "timeout", "on_error"):
            if hasattr(obj, option):
                setattr(self, option, getattr(obj, option))

    async def begin(self) -> None:
        """Calls `begin()` in a thread."""
        await self._call("begin")

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Calls `after_create_session(session, coord)` in a thread."""
        await self._call("after_create_session", session, coord)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Calls `before_run(run_context)` in a thread."""
        answer: SessionRunArgs | None = await self._call("before_run", run_context)
        return answer

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Calls `after_run(run_context, run_values)` in a thread."""
        await self._call("after_run", run_context, run_values)

    async def end(self, session: Session) -> None:
        """Calls `end(session)` in a thread."""
        await self._call("end", session)

    async def close(self, exc: BaseException | None) -> None:
        """Calls `close(exc)` in a thread."""
        await self._call("close", exc)

    async def _call(self, name: str, *args: Any) -> Any:
        method = self._methods.get(name)
        return None if method is None else await to_thread(method, *args, grace_secs=self._grace_secs)

    def __repr__(self) -> str:
        return f"BlockingHook({self._obj!r})"
