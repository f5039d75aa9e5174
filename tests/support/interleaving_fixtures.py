"""What the stories about a step store have in common (see `tests.support.interleavings`)."""

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


class Story:
    """Actors around one store, and what must hold when they have come to rest.

    Between two actions of an actor there is a suspension, so that others can come between them.
    """

    store_type: type[MemoryStepStore] = MemoryStepStore

    def __init__(self, store_type: type[MemoryStepStore] | None = None) -> None:
        """Begins with a store at step 0."""
        self.clock = ManualClock()
        with self.clock:
            self.store = (store_type or self.store_type)()
        self.wanted: dict[str, int] = {}
        self.history: list[Position] = [self.store.latest]
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.publishers: dict[str, Publisher] = {}

    # What actors do.

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

    # What must hold.

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
                assert not self.hopeless(), f"{name} was not told"
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
                assert seen in {position.step for position in self.history}, f"{name} saw {seen}, which never was"
        counted = self.store.statistics().waiting
        assert counted == waiting, f"{counted} waiters are counted, {waiting} wait"
        assert bool(self.clock.pending) == bool(waiting), "a timer is left, or missing"

    def hopeless(self) -> bool:
        """Whether a wait that is still parked has been forgotten."""
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
            assert not publisher.parked, f"a wait of {publisher} is left"
        for name, task in tasks.items():
            if name in self.wanted and not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, TYPED), f"{name} ended with {error!r}"
