"""How the tests here run a session: one block, its body, and creators of sessions that are lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.sessions import counting_graph

MakeSession = Callable[..., ah.AsyncMonitoredSession]
Body = Callable[[ah.AsyncMonitoredSession], Awaitable[Any]]

both_kinds = pytest.mark.parametrize(
    "make", [ah.AsyncMonitoredSession, ah.session.AsyncSingularMonitoredSession]
)

ONE_RUN = ["begin", "after_create_session", "before_run", "after_run"]


async def run_block(session: ah.AsyncMonitoredSession, body: Body) -> None:
    """Enter the block, await `body(session)` in it, and leave it."""
    async with session:
        await body(session)


def train(times: int = 1) -> Body:
    """Make a body that runs "train" so many times."""

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(times):
            await session.run("train")

    return body


def lost() -> ah.AbortedError:
    """Return a recoverable loss; a new one each time, since notes are kept on it."""
    return ah.AbortedError("lost")


class DyingCreator:
    """Makes sessions that die with an AbortedError: after `lives[0]` runs the first one, and so on;
    then no more.

    `made` are the sessions so far; the one behind the last life is a ValueError of the creation.
    """

    def __init__(self, lives: Iterable[int], graph: ah.Graph | None = None) -> None:
        self.graph = counting_graph() if graph is None else graph
        self.made: list[ah.Session] = []
        self._lives = iter(lives)
        self._parts = {"global_step": ah.MemoryStepStore(), "variables": ah.Variables()}

    async def create_session(self) -> ah.Session:
        try:
            life = next(self._lives)
        except StopIteration:
            raise ValueError("no more sessions") from None
        session = _Dying(life, self.graph, **self._parts)
        self.made.append(session)
        return session


class _Dying(ah.Session):
    def __init__(self, life: int, graph: ah.Graph, **parts: Any) -> None:
        super().__init__(graph, **parts)
        self._life = life

    async def run(self, fetches: Any, feed_dict: Any = None, **options: Any) -> Any:
        if not self._life:
            raise ah.AbortedError("the session died")
        self._life -= 1
        return await super().run(fetches, feed_dict, **options)
