"""Feeding each run from a function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohooks._checks import check_callable
from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunHook

Feeds = Mapping[Any, Any] | None


class FeedFnHook(SessionRunHook):
    """Feeds what `feed_fn()` returns, called anew for each attempt of each run; None or an empty mapping feeds nothing."""

    def __init__(self, feed_fn: Callable[[], Feeds | Awaitable[Feeds]]) -> None:
        """Takes a function without arguments, plain or async.

        Raises:
            InvalidArgumentError: it cannot be called.
        """
        check_callable(feed_fn, "feed_fn")
        self._feed_fn = feed_fn

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks the function."""
        feeds = self._feed_fn()
        if inspect.isawaitable(feeds):
            feeds = await feeds
        return SessionRunArgs(None, feeds)
