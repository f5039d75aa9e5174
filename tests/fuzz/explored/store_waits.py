"""Small programs around a step store that run in every order: no wake-up is lost, no waiter woken
too early, nothing left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from aiohooks._core.scope import begin_run
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores import MemoryStepStore, Position, Publisher
from aiohooks.testing import ManualClock

Actor = Callable[[], Awaitable[Any]]


class Race:
    """Actors around one store, and what must hold when none of them can run any more.

    An actor suspends between two actions, so that others can run there.
    """

    def __init__(self, store_type: type[MemoryStepStore] = MemoryStepStore) -> None:
        self.clock = ManualClock()
        with self.clock:
            self.store = store_type()
        self.wanted: dict[str, int] = {}
        self.history: list[Position] = [self.store.latest]
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.publishers: dict[str, Publisher] = {}

    # The actions of actors.

    def waiter(
        self, name: str, step: int, *, publisher: str | None = None, **options: Any
    ) -> Actor:
        async def act() -> int:
            self.wanted[name] = step
            if publisher is not None:
                begin_run(None, self.publishers[publisher])
            return await self.store.wait_for(step, **options)

        return act

    def doing(self, *actions: Callable[[], Any]) -> Actor:
        async def act() -> None:
            for number, action in enumerate(actions):
                if number:
                    await asyncio.sleep(0)
                try:
                    answer = action()
                    if asyncio.iscoroutine(answer):
                        await answer
                except StoreClosedError:
                    return
                self.history.append(self.store.latest)

        return act

    def advance(self, by: int = 1) -> Callable[[], Any]:
        return lambda: self.store.advance(by)

    def cancel(self, name: str) -> Callable[[], Any]:
        return lambda: (
            name in self.wanted and self.tasks[name].cancel()
        )  # one that has not begun is not cancelled

    def register(self, *names: str) -> None:
        for name in names:
            self.publishers[name] = self.store.publisher(name)

    # Running it, and the conditions.

    async def run(
        self, actors: Mapping[str, Actor], may_cancel: str, may_raise: tuple[type[Exception], ...]
    ) -> None:
        with self.clock:
            for name, actor in actors.items():
                self.tasks[name] = asyncio.ensure_future(actor())
        await asyncio.sleep(1)  # of virtual time, which passes only when none of them can run
        self.check_at_rest(may_cancel, may_raise)

    async def end(self) -> None:
        await self.store.aclose()
        await asyncio.wait(self.tasks.values())
        for name, task in self.tasks.items():
            error = None if task.cancelled() else task.exception()
            assert error is None or name in self.wanted, f"{name} ended with {error!r}"
        statistics = self.store.statistics()
        assert (statistics.waiting, statistics.watching) == (0, 0), f"left: {statistics}"
        assert self.clock.pending == 0, "a timer is left"
        for publisher in self.publishers.values():
            assert not publisher.parked, f"a wait of {publisher} is left"

    def check_at_rest(self, may_cancel: str, may_raise: tuple[type[Exception], ...]) -> None:
        step, waiting = self.store.latest.step, 0
        for name, task in self.tasks.items():
            wanted = self.wanted.get(name)
            if wanted is None:
                assert task.done(), f"{name} hangs"
                assert task.exception() is None, f"{name} failed with {task.exception()!r}"
            elif not task.done():
                waiting += 1
                assert wanted > step, f"lost wake-up: {name} wants {wanted}, the step is {step}"
                assert not self.is_unreachable(), f"{name} waits for an unreachable step"
            elif task.cancelled():
                assert name in may_cancel.split(), f"{name} is cancelled"
            elif (error := task.exception()) is not None:
                assert type(error) in may_raise, f"{name} ended with {error!r}"
            else:
                seen = task.result()
                assert seen >= wanted, f"false release: {name} wants {wanted}, saw {seen}"
                assert seen in {position.step for position in self.history}, (
                    f"{name} saw {seen}, which the step never was"
                )
        counted = self.store.statistics().waiting
        assert counted == waiting, f"{counted} waiters are counted, {waiting} wait"
        assert waiting or not self.clock.pending, "a timer is left"

    def is_unreachable(self) -> bool:
        """Return whether a parked wait should have failed: a publisher has left, and all others
        wait.
        """
        names = set(self.store.statistics().publishers)
        registered = [publisher for name, publisher in self.publishers.items() if name in names]
        return len(registered) < len(self.publishers) and all(
            publisher.waiting for publisher in registered
        )


Check = Callable[[Mapping[str, asyncio.Task[Any]]], bool]


class Scenario(NamedTuple):
    """The actors of a race, and what may become of them."""

    actors: Callable[[Race], Mapping[str, Actor]]
    may_cancel: str = ""
    may_raise: tuple[type[Exception], ...] = ()
    check: Check = lambda _: True
    """What else must hold when none of them can run any more."""


async def run(scenario: Scenario, store_type: type[MemoryStepStore] = MemoryStepStore) -> None:
    """Run a scenario once: a program to be explored."""
    race = Race(store_type)
    try:
        await race.run(scenario.actors(race), scenario.may_cancel, scenario.may_raise)
        assert scenario.check(race.tasks), f"ended so: {race.tasks}"
    except AssertionError:
        for task in race.tasks.values():
            task.cancel()
        raise
    await race.end()


def done(*names: str) -> Check:
    return lambda tasks: all(tasks[name].done() for name in names)


def two_writers(race: Race) -> dict[str, Actor]:
    return {"first": race.doing(*2 * [race.advance()]), "second": race.doing(*2 * [race.advance()])}


def resets(race: Race, step: int, *advances: int, **waiters: Actor) -> dict[str, Actor]:
    writer = race.doing(*map(race.advance, advances))
    return {**waiters, "writer": writer, "restorer": race.doing(lambda: race.store.reset(step))}


def publisher_leaves(race: Race, error: Exception | None) -> dict[str, Actor]:
    """The near step is reached or was missed, the far one is never reached."""
    race.register("chief")
    leave = partial(race.publishers["chief"].close, error)
    return {
        "near": race.waiter("near", 2),
        "far": race.waiter("far", 9),
        "chief": race.doing(race.advance(), race.advance(), leave),
        "canceller": race.doing(race.cancel("far")),
    }


def everyone_left_waits(race: Race) -> dict[str, Actor]:
    race.register("chief", "worker")
    return {
        "worker": race.waiter("worker", 3, publisher="worker"),
        "onlooker": race.waiter("onlooker", 2),
        "chief": race.doing(race.advance(), race.advance(), race.publishers["chief"].close),
    }


def waiting_publisher_is_woken(race: Race) -> dict[str, Actor]:
    """A worker's wait is answered as the chief leaves; it continues and reaches the step that
    another one waits for.
    """
    race.register("chief", "worker")
    wait = race.waiter("worker", 1, publisher="worker")

    async def work() -> int:
        seen: int = await wait()
        await race.store.advance()
        race.history.append(race.store.latest)
        race.publishers["worker"].close()
        return seen

    return {
        "worker": work,
        "onlooker": race.waiter("onlooker", 2),
        "chief": race.doing(race.advance(), race.publishers["chief"].close),
        "canceller": race.doing(race.cancel("worker")),
    }


def changes_are_conflated(race: Race) -> dict[str, Actor]:
    """An iteration over changes sees rising positions and ends at the newest."""

    async def read() -> None:
        seen: list[Position] = []
        async for position in race.store.changes():
            seen.append(position)
            if position.step == 4:
                break
        assert seen == sorted(set(seen)), f"seen: {seen}"
        assert seen[-1] == Position(1, 4)

    return {"reader": read, **two_writers(race)}


SMALL: dict[str, Scenario] = {
    "two waiters, two writers": Scenario(
        lambda race: {"a": race.waiter("a", 1), "b": race.waiter("b", 3), **two_writers(race)}
    ),
    "three waiters, one of them never woken": Scenario(
        lambda race: {
            **{
                name: race.waiter(name, step) for name, step in {"a": 2, "b": 2, "never": 9}.items()
            },
            "writer": race.doing(race.advance(), race.advance(), race.advance(2)),
        }
    ),
    "cancelled around its wake-up": Scenario(
        lambda race: {
            **{name: race.waiter(name, 2) for name in "ab"},
            "writer": race.doing(race.advance(), race.advance()),
            "canceller": race.doing(race.cancel("a")),
        },
        may_cancel="a",
    ),
    "two cancels": Scenario(
        lambda race: {
            "low": race.waiter("low", 1),
            "high": race.waiter("high", 2),
            "writer": race.doing(race.advance()),
            "one": race.doing(race.cancel("low")),
            "other": race.doing(race.cancel("high")),
        },
        may_cancel="low high",
    ),
    "a reset that waiters outlast": Scenario(
        lambda race: resets(race, 0, 1, 1, 1, a=race.waiter("a", 2), b=race.waiter("b", 3))
    ),
    "a reset that one waiter gets": Scenario(
        lambda race: resets(
            race, 0, 1, 1, 1, a=race.waiter("a", 2), b=race.waiter("b", 3, on_reset="raise")
        ),
        may_raise=(StepResetError,),
    ),
    "a reset past the threshold": Scenario(
        lambda race: resets(
            race, 5, 1, 1, a=race.waiter("a", 4, on_reset="raise"), b=race.waiter("b", 4)
        ),
        check=done("a", "b"),
    ),
    "closed around a wake-up": Scenario(
        lambda race: {
            "a": race.waiter("a", 1),
            "b": race.waiter("b", 2),
            "writer": race.doing(race.advance(), race.advance()),
            "closer": race.doing(race.store.aclose),
        },
        may_raise=(StoreClosedError,),
        check=done("a", "b"),
    ),
    "failed around a wake-up": Scenario(
        lambda race: {
            "a": race.waiter("a", 1),
            "b": race.waiter("b", 2),
            "writer": race.doing(race.advance()),
            "herald": race.doing(
                lambda: race.store.publisher("herald").close(ValueError("broken"))
            ),
        },
        may_raise=(PublisherFailedError,),
    ),
    "a timeout around the wake-up": Scenario(
        lambda race: {
            "a": race.waiter("a", 2, timeout=1),
            "b": race.waiter("b", 2, timeout=5),
            "writer": race.doing(race.advance(), race.advance()),
            "time": race.doing(*2 * [partial(race.clock.advance, 1)]),
        },
        may_raise=(StepTimeoutError,),
    ),
    "the publisher finishes": Scenario(
        lambda race: publisher_leaves(race, None),
        may_cancel="far",
        may_raise=(PublisherFinishedError,),
        check=lambda tasks: tasks["near"].result() == 2 and tasks["far"].done(),
    ),
    "the publisher fails": Scenario(
        lambda race: publisher_leaves(race, ValueError("broken")),
        may_cancel="far",
        may_raise=(PublisherFailedError,),
        check=lambda tasks: tasks["near"].result() == 2 and tasks["far"].done(),
    ),
    "everyone left waits": Scenario(
        everyone_left_waits,
        may_raise=(PublisherFinishedError,),
        check=lambda tasks: (
            tasks["onlooker"].result() == 2
            and isinstance(tasks["worker"].exception(), PublisherFinishedError)
        ),
    ),
    "a waiting publisher is woken": Scenario(
        waiting_publisher_is_woken,
        may_cancel="worker",
        check=lambda tasks: tasks["worker"].cancelled() or tasks["onlooker"].result() == 2,
    ),
    "changes are conflated": Scenario(changes_are_conflated),
}
CROWD = Scenario(
    lambda race: {
        "a": race.waiter("a", 2, on_reset="raise"),
        "b": race.waiter("b", 4),
        "c": race.waiter("c", 4, timeout=1),
        "first": race.doing(race.advance(), race.advance()),
        "second": race.doing(race.advance(), lambda: race.store.reset(1), race.advance(3)),
        "third": race.doing(partial(race.clock.advance, 1), race.cancel("b")),
    },
    may_cancel="b",
    may_raise=(StepResetError, StepTimeoutError),
)
"""Three waiters, three writers, a reset and a cancel: too many orders to try all of them in a
test.
"""
