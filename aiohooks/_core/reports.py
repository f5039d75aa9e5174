"""The logger of the library, and how its waits describe themselves in reports."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

logger = logging.getLogger("aiohooks")
Needs = Literal["all", "any", "perhaps"]


class Awaited(NamedTuple):
    """A thing that is awaited, with its name.

    Attributes:
        kind: "step", "lock", "session" and so on. "calls" stands for the calls in `by`, and its
            `key` is the session of these calls.
        name: the name of the thing.
        detail: its state.
        by: returns what the thing itself waits for: tasks, futures, threads, calls and other
            awaited things.
        key: the identity of the node: the thing, or a text that is the same in all reports. For a
            call that runs in a task of its own, the task.
        secs: how long the thing has been awaited, or has lasted.
        needs: whether it waits for "all" in `by`, for "any", or "perhaps" for some of them.
        ends: whether the chain of awaits ends here. If not, the thing waits for the rest of it.
        not_found: the text for a search in `by` that finds nothing.
    """

    kind: str
    name: str
    detail: str = ""
    by: Callable[[], Iterable[Any]] = tuple
    key: object = None
    secs: float | None = None
    needs: Needs = "all"
    ends: bool = True
    not_found: str | None = None


class Waiting(abc.ABC):
    """An object whose coroutine methods wait for named things, or for tasks without `await`."""

    __slots__ = ()

    @abc.abstractmethod
    def awaited_by(
        self,
        method: str,
        arguments: Mapping[str, Any],
    ) -> Awaited | asyncio.Task[Any] | None:
        """Return what a call of a coroutine method waits for; None if that is not known.

        A task is one that is not done.
        """
