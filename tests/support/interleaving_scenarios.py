"""Small scenarios of a step store, to be run in every order (see `tests.support.interleavings`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from aiohooks._aio.run_scope import begin_run
from aiohooks.errors import (
    AiohooksError,
    PublisherFailedError,
    PublisherFinishedError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores import MemoryStepStore, Position, Publisher
from aiohooks.testing.clock import ManualClock

Actor = Callable[[], Coroutine[Any, Any, Any]]

TYPED = (PublisherFailedError, PublisherFinishedError, StepResetError, StepTimeoutError, StoreClosedError)


class StoreScenario:
    """Actors around one store, and what must hold when none of them can run any more.

    An actor suspends between two actions, so that others can run there.
    """

    store_type: type[MemoryStepStore] = MemoryStepStore

    def __init__(self, store_type: type[MemoryStepStore] | None = None) -> None:
        self.clock = ManualClock()
        with self.clock:
            self.store = (store_type or self.store_type)()
        self.wanted: dict[str, int] = {}
        self.history: list[Position] = [self.store.latest]
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.publishers: dict[str, Publisher] = {}

    # The actions of actors.

    def waiter(
        self,
        name: str,
        step: int,
        *,
        on_reset: Literal["keep", "raise"] = "keep",
        timeout: float | None = None,
        publisher: str | None = None,
    ) -> Actor:
        async def act() -> int:
            self.tasks[name] = asyncio.current_task()  # type: ignore[assignment]
            self.wanted[name] = step
            if publisher is not None:
                begin_run(None, self.publishers[publisher])
            return await self.store.wait_for(step, timeout=timeout, on_reset=on_reset)

        return act

    def doing(self, *actions: Callable[[], Coroutine[Any, Any, Any] | None]) -> Actor:
        async def act() -> None:
            for number, action in enumerate(actions):
                if number:
                    await asyncio.sleep(0)
                try:
                    answer = action()
                    if answer is not None:
                        await answer
                except StoreClosedError:
                    return
                self.history.append(self.store.latest)

        return act

    def advance(self, by: int = 1) -> Callable[[], Coroutine[Any, Any, int]]:
        return lambda: self.store.advance(by)

    def reset(self, step: int) -> Callable[[], Coroutine[Any, Any, Position]]:
        return lambda: self.store.reset(step)

    def cancel(self, name: str) -> Callable[[], None]:
        return lambda: (name in self.tasks and self.tasks[name].cancel(), None)[1]

    def leave(self, name: str, error: Exception | None = None) -> Callable[[], None]:
        return lambda: self.publishers[name].close(error)

    def register(self, *names: str) -> None:
        for name in names:
            self.publishers[name] = self.store.publisher(name)

    # The conditions.

    def actors(self) -> Mapping[str, Actor]:
        raise NotImplementedError

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        step = self.store.latest.step
        waiting = 0
        for name, task in tasks.items():
            if name not in self.wanted:
                assert task.done(), f"{name} hangs"
                assert task.exception() is None, f"{name} failed with {task.exception()!r}"
                continue
            if not task.done():
                waiting += 1
                assert self.wanted[name] > step, f"lost wake-up: {name} wants {self.wanted[name]}, the step is {step}"
                assert not self.unreachable(), f"{name} waits for an unreachable step"
                continue
            if task.cancelled():
                assert name in self.may_cancel(), f"{name} is cancelled"
            elif (error := task.exception()) is not None:
                assert isinstance(error, TYPED), f"{name} ended with {error!r}"
                assert type(error) in self.may_raise(), f"{name} ended with {error!r}"
                assert isinstance(error, AiohooksError)
            else:
                seen = task.result()
                assert seen >= self.wanted[name], f"false release: {name} wants {self.wanted[name]}, saw {seen}"
                assert seen in {position.step for position in self.history}, f"{name} saw {seen}, which the step never was"
        counted = self.store.statistics().waiting
        assert counted == waiting, f"{counted} waiters are counted, {waiting} wait"
        assert bool(self.clock.pending) == bool(waiting), "a timer is left, or missing"

    def unreachable(self) -> bool:
        """Return whether a parked wait should have failed: a publisher has left, and all others wait."""
        names = set(self.store.statistics().publishers)
        registered = [publisher for name, publisher in self.publishers.items() if name in names]
        return len(registered) < len(self.publishers) and all(publisher.waiting for publisher in registered)

    def may_cancel(self) -> set[str]:
        return set()

    def may_raise(self) -> set[type[BaseException]]:
        return set()

    async def finish(self) -> None:
        await self.store.aclose()

    def finished(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        statistics = self.store.statistics()
        assert (statistics.waiting, statistics.watching, statistics.thresholds) == (0, 0, 0), f"left: {statistics}"
        assert self.clock.pending == 0, "a timer is left"
        for publisher in self.publishers.values():
            assert not publisher._waits.parked, f"a wait of {publisher} is left"
        for name, task in tasks.items():
            if name in self.wanted and not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, TYPED), f"{name} ended with {error!r}"


class TwoWaitersTwoWriters(StoreScenario):
    """Two thresholds, two concurrent writers that pass them."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 1),
            "b": self.waiter("b", 3),
            "first": self.doing(self.advance(), self.advance()),
            "second": self.doing(self.advance(), self.advance()),
        }


class ThreeWaitersOneWriter(StoreScenario):
    """Three waiters, two of them at one threshold, one that is never reached."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 2),
            "never": self.waiter("never", 9),
            "writer": self.doing(self.advance(), self.advance(), self.advance(2)),
        }


class CancelAndWake(StoreScenario):
    """A waiter is cancelled around its wake-up, beside another one at the same threshold."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 2),
            "writer": self.doing(self.advance(), self.advance()),
            "canceller": self.doing(self.cancel("a")),
        }

    def may_cancel(self) -> set[str]:
        return {"a"}


class TwoCancels(StoreScenario):
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


class ResetKeeps(StoreScenario):
    """The step is reset below a waiter's threshold, and reaches it again."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2),
            "b": self.waiter("b", 3),
            "writer": self.doing(self.advance(), self.advance(), self.advance()),
            "restorer": self.doing(self.reset(0)),
        }


class ResetRaises(ResetKeeps):
    """The step is reset; one waiter keeps waiting, the other one gets the error."""

    def actors(self) -> Mapping[str, Actor]:
        return {**super().actors(), "b": self.waiter("b", 3, on_reset="raise")}

    def may_raise(self) -> set[type[BaseException]]:
        return {StepResetError}


class ResetAbove(StoreScenario):
    """A reset that passes a threshold wakes its waiters, also with `on_reset="raise"`."""

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


class CloseWhileWaiting(StoreScenario):
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


class FailWhileWaiting(StoreScenario):
    """`fail` is called around a wake-up that advances the step."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 1),
            "b": self.waiter("b", 2),
            "writer": self.doing(self.advance()),
            "herald": self.doing(lambda: self.store.fail(ValueError("broken"))),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {PublisherFailedError}


class TimeoutAndWake(StoreScenario):
    """A wait times out around its wake-up; another one has more time."""

    def actors(self) -> Mapping[str, Actor]:
        return {
            "a": self.waiter("a", 2, timeout=1),
            "b": self.waiter("b", 2, timeout=5),
            "writer": self.doing(self.advance(), self.advance()),
            "time": self.doing(lambda: self.clock.advance(1), lambda: self.clock.advance(1)),
        }

    def may_raise(self) -> set[type[BaseException]]:
        return {StepTimeoutError}


class PublisherFinishes(StoreScenario):
    """The only publisher advances and leaves: the near step is reached or was missed, the far one is never reached."""

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


class EveryoneLeftWaits(StoreScenario):
    """One publisher leaves, the other one waits for it: in any order, no waiter is left."""

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


class WaitingPublisherIsWoken(StoreScenario):
    """A worker's wait is answered as the chief leaves; it continues and reaches the step that another one waits for."""

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


class ChangesAreConflated(StoreScenario):
    """An iteration over changes sees rising positions and ends at the newest, in any order of the writers."""

    def actors(self) -> Mapping[str, Actor]:
        self.seen: list[Position] = []

        async def read() -> None:
            async for position in self.store.changes():
                self.seen.append(position)
                if position.step == 4:
                    return

        return {
            "reader": read,
            "first": self.doing(self.advance(), self.advance()),
            "second": self.doing(self.advance(), self.advance()),
        }

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        super().at_rest(tasks)
        assert self.seen == sorted(set(self.seen)), f"seen: {self.seen}"
        assert self.seen[-1] == Position(1, 4)


class Crowd(StoreScenario):
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

SCENARIOS: dict[str, type[StoreScenario]] = {scenario.__name__: scenario for scenario in (*SMALL, Crowd)}
