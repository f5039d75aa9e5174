"""Small stories about a step store, to be run in every order (see `tests.support.interleavings`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores import Position
from tests.support.interleaving_fixtures import Actor, Story


class TwoWaitersTwoWriters(Story):
    """Two thresholds, two writers that pass them together."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 1),
            "b": self.waiter("b", 3),
            "first": self.doing(self.advance(), self.advance()),
            "second": self.doing(self.advance(), self.advance()),
        }


class ThreeWaitersOneWriter(Story):
    """Three waiters, two of them at one threshold, one that is never reached."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 2),
            "never": self.waiter("never", 9),
            "writer": self.doing(self.advance(), self.advance(), self.advance(2)),
        }


class CancelAndWake(Story):
    """A waiter cancelled around the moment it is woken, beside one at the same threshold."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 2),
            "writer": self.doing(self.advance(), self.advance()),
            "canceller": self.doing(self.cancel("a")),
        }

    def may_cancel(self) -> set[str]:
        return {"a"}


class TwoCancels(Story):
    """Both waiters may be cancelled: the lower one, which is reached, and the higher one, which is not."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "low": self.waiter("low", 1),
            "high": self.waiter("high", 2),
            "writer": self.doing(self.advance()),
            "one": self.doing(self.cancel("low")),
            "other": self.doing(self.cancel("high")),
        }

    def may_cancel(self) -> set[str]:
        return {"low", "high"}


class ResetKeeps(Story):
    """The step goes back while somebody waits, and comes again."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 3),
            "writer": self.doing(self.advance(), self.advance(), self.advance()),
            "restorer": self.doing(self.reset(0)),
        }


class ResetRaises(ResetKeeps):
    """The step goes back; one waits on, the other one is told."""

    def actors(self) -> Mapping[str, Actor]:
        return {**super().actors(), "b": self.waiter("b", 3, on_reset="raise")}

    def may_raise(self) -> set[type[BaseException]]:
        return {StepResetError}


class ResetAbove(Story):
    """A reset that jumps past a threshold wakes, also who asked to be told of resets."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 4, on_reset="raise"),
            "b": self.waiter("b", 4),
            "writer": self.doing(self.advance(), self.advance()),
            "restorer": self.doing(self.reset(5)),
        }

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert tasks["a"].done()
        assert tasks["b"].done()


class CloseWhileWaiting(Story):
    """The store is closed around a wake-up."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 1),
            "b": self.waiter("b", 2),
            "writer": self.doing(self.advance(), self.advance()),
            "closer": self.doing(lambda: self.store.aclose()),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {StoreClosedError}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert tasks["a"].done()
        assert tasks["b"].done()


class FailWhileWaiting(Story):
    """Somebody says that publishing has failed, around a wake-up that moves the step on."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 1),
            "b": self.waiter("b", 2),
            "writer": self.doing(self.advance()),
            "herald": self.doing(lambda: self.store.fail(ValueError("broken"))),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {PublisherFailedError}


class TimeoutAndWake(Story):
    """A wait runs out of time around the moment it is answered; another one has more time."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2, timeout=1),
            "b": self.waiter("b", 2, timeout=5),
            "writer": self.doing(self.advance(), self.advance()),
            "time": self.doing(lambda: self.clock.advance(1), lambda: self.clock.advance(1)),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {StepTimeoutError}


class PublisherFinishes(Story):
    """The only publisher advances and leaves: the near step is seen or was missed, the far one never comes."""

    error: Exception | None = None
    told: type[BaseException] = PublisherFinishedError

    def actors(self) -> Mapping[str, Actor]:
        self.register("chief")
        return {
            "near": self.waiter("near", 2),
            "far": self.waiter("far", 9),
            "chief": self.doing(self.advance(), self.advance(), self.leave("chief", self.error)),
            "canceller": self.doing(self.cancel("far")),
        }

    def may_cancel(self) -> set[str]:
        return {"far"}

    def may_raise(self) -> set[type[BaseException]]:
        return {self.told}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert tasks["near"].result() == 2
        assert tasks["far"].done()


class PublisherFails(PublisherFinishes):
    """The only publisher advances and fails."""

    error = ValueError("broken")
    told = PublisherFailedError


class EveryoneLeftWaits(Story):
    """One publisher leaves, the other one waits for it: whichever comes first, nobody is left hanging."""

    def actors(self) -> Mapping[str, Actor]:
        self.register("chief", "worker")
        return {
            "worker": self.waiter("worker", 3, publisher="worker"),
            "onlooker": self.waiter("onlooker", 2),
            "chief": self.doing(self.advance(), self.advance(), self.leave("chief")),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {PublisherFinishedError}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert tasks["onlooker"].result() == 2
        assert isinstance(tasks["worker"].exception(), PublisherFinishedError)


class WaitingPublisherIsWoken(Story):
    """A worker's wait is answered as the chief leaves; it goes on to reach what another one waits for."""

    def actors(self) -> Mapping[str, Actor]:
        self.register("chief", "worker")
        own = self.waiter("worker", 1, publisher="worker")

        async def work() -> int:
            seen: int = await own()
            await self.store.advance()
            self.history.append(self.store.latest)
            self.publishers["worker"].close()
            return seen

        return {
            "worker": work,
            "onlooker": self.waiter("onlooker", 2),
            "chief": self.doing(self.advance(), self.leave("chief")),
            "canceller": self.doing(self.cancel("worker")),
        }

    def may_cancel(self) -> set[str]:
        return {"worker"}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        if not tasks["worker"].cancelled():
            assert tasks["onlooker"].result() == 2


class ChangesAreConflated(Story):
    """Who iterates over changes sees rising positions and ends at the newest, however the writers come in between."""

    def actors(self) -> Mapping[str, Actor]:
        self.seen: list[Position] = []

        async def look() -> None:
            async for position in self.store.changes():
                self.seen.append(position)
                if position.step == 4:
                    return

        return {
            "reader": look,
            "first": self.doing(self.advance(), self.advance()),
            "second": self.doing(self.advance(), self.advance()),
        }

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert self.seen == sorted(set(self.seen)), f"seen: {self.seen}"
        assert self.seen[-1] == Position(1, 4)


class Crowd(Story):
    """Three waiters, three writers, a reset and a cancel: too many orders to try all of them in a test."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2, on_reset="raise"),
            "b": self.waiter("b", 4),
            "c": self.waiter("c", 4, timeout=1),
            "first": self.doing(self.advance(), self.advance()),
            "second": self.doing(self.advance(), self.reset(1), self.advance(3)),
            "third": self.doing(lambda: self.clock.advance(1), self.cancel("b")),
        }

    def may_cancel(self) -> set[str]:
        return {"b"}

    def may_raise(self) -> set[type[BaseException]]:
        return {StepResetError, StepTimeoutError}


SMALL = (
    TwoWaitersTwoWriters, ThreeWaitersOneWriter, CancelAndWake, TwoCancels, ResetKeeps, ResetRaises, ResetAbove,
    CloseWhileWaiting, FailWhileWaiting, TimeoutAndWake, PublisherFinishes, PublisherFails, EveryoneLeftWaits,
    WaitingPublisherIsWoken, ChangesAreConflated,
)  # fmt: skip

SCENARIOS: dict[str, type[Story]] = {story.__name__: story for story in (*SMALL, Crowd)}
