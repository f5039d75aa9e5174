"""Events of a session, by which its hooks meet without knowing one another."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, ParamSpec

from aiohooks._core.cancel import current_task
from aiohooks._core.reports import logger

if TYPE_CHECKING:
    from pathlib import Path

P = ParamSpec("P")


class Event(Generic[P]):
    """Something that happens in a session, and the callbacks that are notified of it."""

    def __init__(self, name: str) -> None:
        """Start without callbacks; `name` is for messages."""
        self._name = name
        self._callbacks: list[Callable[P, object]] = []

    def subscribe(self, callback: Callable[P, object]) -> None:
        """Call a plain function or a coroutine function at each event.

        Callbacks are called in the order of their subscriptions. An error of one is logged, and
        reaches neither the others nor the session.
        """
        self._callbacks.append(callback)

    async def emit(self, *args: P.args, **keywords: P.kwargs) -> None:
        """Call the callbacks, and await them one after another."""
        for callback in self._callbacks:
            try:
                answer = callback(*args, **keywords)
                if inspect.isawaitable(answer):
                    await answer
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                is_cancellation = isinstance(error, asyncio.CancelledError)
                if is_cancellation and current_task().cancelling():
                    raise
                logger.error("%r failed, a callback of %r", callback, self._name, exc_info=error)

    def __repr__(self) -> str:
        return f"<Event {self._name}: {len(self._callbacks)} callbacks>"


class SessionEvents:
    """The events of one session: `session_events()` in `begin` of a hook, later `coord.events`.

    Recoveries do not change them, so a hook subscribes once, in `begin`. All callbacks are called
    in the event loop of the session. A path is that of the checkpoint's directory.

        async def begin(self):
            aiohooks.session.session_events().saved.subscribe(self.upload)

        async def upload(self, step, path): ...
    """

    def __init__(self) -> None:
        self.saving: Event[[int, Path]] = Event("saving")
        """`(step, checkpoint_dir)`: a hook takes the session's state when the callbacks have
        returned.
        """
        self.saved: Event[[int, Path]] = Event("saved")
        """`(step, path)`: the checkpoint of a step is durable. Training may have continued."""
        self.restored: Event[[int, Path]] = Event("restored")
        """`(step, path)`: a raw session has the state of a checkpoint, its hooks too. Called before
        `after_create_session`, at a resumed run and at each recovery.
        """
        self.evaluated: Event[[int, dict[str, float], bool]] = Event("evaluated")
        """`(step, metrics, is_extra)`: the numbers that an evaluation returned. An extra evaluation
        is one at the end that was not due: an uninterrupted run does not make it.
        """
        self.checkpoint_dirs: list[Path | None] = []
        """The directories in which hooks save this session; None is that of its creator. A hook
        that saves adds one in `begin`.
        """
        self.save_requests: int = 0
        """How often `request_save` was called."""

    def request_save(self) -> None:
        """Ask the hooks that save this session to do so after the current run, or at the end."""
        self.save_requests += 1


opening_events: ContextVar[SessionEvents | None] = ContextVar("aiohooks_events", default=None)
"""The events of the session whose hooks begin."""


def session_events() -> SessionEvents:
    """Return the events of the session that calls `begin` of this hook.

    Elsewhere, such as in a test that calls `begin` itself, return new events.
    """
    return opening_events.get() or SessionEvents()
