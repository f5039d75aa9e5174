"""The memory store against a simple model: any sequence of calls leads both to the same state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
)

from aiohooks._core.activity import begin_run
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores import MemoryStepStore, Position, Publisher
from aiohooks.testing.clock import ManualClock
from tests.support.waiting import ticks

STEPS = st.integers(0, 12)
TIMEOUTS = st.sampled_from([None, None, 0, 5, 20])


@dataclass
class Wait:
    """A wait that the model expects to be parked, or how it must have ended."""

    step: int
    raise_on_reset: bool
    deadline: float | None
    publisher: Publisher | None
    task: asyncio.Task[int]
    end: int | type[BaseException] | None = None


@dataclass
class Model:
    """The expected state of the store."""

    position: Position = field(default_factory=lambda: Position(1, 0))
    closed: bool = False
    last_exit: type[Exception] | None = None
    publishers: list[Publisher] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def parked(self) -> list[Wait]:
        return [wait for wait in self.waits if wait.end is None]

    def end_all(self, kind: type[Exception]) -> None:
        for wait in self.parked():
            wait.end = kind

    def move(self, position: Position) -> None:
        reset = position.epoch > self.position.epoch
        self.position = position
        for wait in self.parked():
            if wait.step <= position.step:
                wait.end = position.step
            elif reset and wait.raise_on_reset:
                wait.end = StepResetError

    def unreachable(self) -> type[Exception] | None:
        """Return the error of a wait, if no publisher is left that could reach its step."""
        waiting = {id(wait.publisher) for wait in self.parked()}
        return (
            self.last_exit
            if all(id(publisher) in waiting for publisher in self.publishers)
            else None
        )

    def begin(self, wait: Wait, now: float) -> None:
        self.waits.append(wait)
        if self.closed:
            wait.end = StoreClosedError
        elif wait.step <= self.position.step:
            wait.end = self.position.step
        elif wait.publisher is None and (kind := self.unreachable_without(wait)) is not None:
            wait.end = kind
        elif wait.deadline is not None and wait.deadline <= now:
            wait.end = StepTimeoutError
        elif (kind := self.unreachable()) is not None:
            self.end_all(kind)

    def unreachable_without(self, wait: Wait) -> type[Exception] | None:
        self.waits.remove(wait)
        kind = self.unreachable()
        self.waits.append(wait)
        return kind

    def leave(self, publisher: Publisher, kind: type[Exception]) -> None:
        self.publishers.remove(publisher)
        for wait in self.parked():
            if wait.publisher is publisher:
                wait.publisher = None
        self.last_exit = kind
        if (end := self.unreachable()) is not None:
            self.end_all(end)


class StoreAgainstModel(RuleBasedStateMachine):
    """Each rule calls both, lets the loop run until it is idle, and compares."""

    waits = Bundle("waits")
    publishers = Bundle("publishers")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        with self.clock:
            self.store = MemoryStepStore()
        self.model = Model()
        self.changes = self.store.changes()
        self.change: asyncio.Task[Position | None] | None = None
        self.seen: Position | None = None

    def do(self, call: Any) -> Any:
        async def settled() -> Any:
            answer = call()
            if asyncio.iscoroutine(answer):
                answer = await answer
            await ticks(4)
            return answer

        return self.loop.run_until_complete(settled())

    def teardown(self) -> None:
        self.do(self.store.aclose)
        self.model.closed = True
        self.model.end_all(StoreClosedError)
        self.everything_agrees()
        if self.change is not None:
            assert self.change.done()
            self.change.exception()
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()

    # Rules.

    @rule(by=st.integers(1, 4))
    @precondition(lambda self: not self.model.closed)
    def advance(self, by: int) -> None:
        epoch, step = self.model.position
        self.model.move(Position(epoch, step + by))
        assert self.do(lambda: self.store.advance(by)) == step + by

    @rule(step=STEPS)
    @precondition(lambda self: not self.model.closed)
    def raise_to(self, step: int) -> None:
        epoch, old = self.model.position
        if step > old:
            self.model.move(Position(epoch, step))
        assert self.do(lambda: self.store.raise_to(step)) == max(step, old)

    @rule(step=STEPS)
    @precondition(lambda self: not self.model.closed)
    def reset(self, step: int) -> None:
        self.model.move(Position(self.model.position.epoch + 1, step))
        assert self.do(lambda: self.store.reset(step)) == self.model.position

    def wait(
        self, step: int, timeout: float | None, raise_on_reset: bool, publisher: Publisher | None
    ) -> Wait:
        on_reset: Literal["keep", "raise"] = "raise" if raise_on_reset else "keep"

        async def waiting() -> int:
            begin_run(None, publisher)
            return await self.store.wait_for(step, timeout=timeout, on_reset=on_reset)

        deadline = None if timeout is None else self.clock.now() + timeout
        owner = publisher if publisher in self.model.publishers else None
        task = self.loop.create_task(waiting())
        wait = Wait(step, raise_on_reset, deadline, owner, task)
        self.model.begin(wait, self.clock.now())
        self.do(lambda: None)
        return wait

    @rule(target=waits, step=STEPS, timeout=TIMEOUTS, raise_on_reset=st.booleans())
    def wait_without_publisher(
        self, step: int, timeout: float | None, raise_on_reset: bool
    ) -> Wait:
        return self.wait(step, timeout, raise_on_reset, None)

    @rule(
        target=waits,
        step=STEPS,
        timeout=TIMEOUTS,
        raise_on_reset=st.booleans(),
        publisher=publishers,
    )
    def wait_as_publisher(
        self, step: int, timeout: float | None, raise_on_reset: bool, publisher: Publisher
    ) -> Wait:
        return self.wait(step, timeout, raise_on_reset, publisher)

    @rule(wait=waits)
    def cancel(self, wait: Wait) -> None:
        if wait.end is None:
            wait.end = asyncio.CancelledError
            wait.task.cancel()
        self.do(lambda: None)

    @rule(secs=st.sampled_from([1, 5, 70]))
    def time_passes(self, secs: float) -> None:
        self.do(lambda: self.clock.advance(secs))
        for wait in self.model.parked():
            if wait.deadline is not None and wait.deadline <= self.clock.now():
                wait.end = StepTimeoutError

    @rule(target=publishers, name=st.sampled_from(["chief", "worker"]))
    def register(self, name: str) -> Any:
        if self.model.closed:
            return multiple()
        publisher = self.do(lambda: self.store.publisher(name))
        self.model.publishers.append(publisher)
        return publisher

    @rule(
        publisher=publishers, error=st.sampled_from([None, StopIteration(), ValueError("broken")])
    )
    def leave(self, publisher: Publisher, error: Exception | None) -> None:
        if publisher in self.model.publishers:
            failed = isinstance(error, ValueError)
            self.model.leave(publisher, PublisherFailedError if failed else PublisherFinishedError)
        self.do(lambda: publisher.close(error))

    @rule()
    def look_for_a_change(self) -> None:
        """The newest position if it is another than the last one seen."""
        if self.change is None:
            self.change = self.loop.create_task(anext(self.changes, None))
            self.do(lambda: None)
        if self.change.done():
            if self.change.exception() is None and (position := self.change.result()) is not None:
                assert position != self.seen
                assert position <= self.model.position
                self.seen = position
            self.change = None

    @rule()
    @precondition(lambda self: len(self.model.waits) > 12)
    def close(self) -> None:
        self.model.closed = True
        self.model.end_all(StoreClosedError)
        self.do(self.store.aclose)

    # What must agree.

    @invariant()
    def everything_agrees(self) -> None:
        store, model = self.store, self.model
        for wait in model.waits:
            if wait.end is None:
                assert not wait.task.done(), "a false release"
                continue
            assert wait.task.done(), "a lost wake-up"
            if isinstance(wait.end, int):
                assert wait.task.result() == wait.end
            elif wait.end is asyncio.CancelledError:
                assert wait.task.cancelled()
            else:
                assert type(wait.task.exception()) is wait.end
        parked = model.parked()
        statistics = store.statistics()
        assert store.latest == model.position
        assert statistics.waiting == len(parked)
        assert statistics.wanted == min((wait.step for wait in parked), default=None)
        assert statistics.publishers == tuple(publisher.name for publisher in model.publishers)
        for publisher in model.publishers:
            assert publisher.waiting == sum(wait.publisher is publisher for wait in parked)
        # One timer for each timeout.
        assert self.clock.pending == sum(wait.deadline is not None for wait in parked)
        if self.change is not None and not self.change.done():
            assert self.seen == model.position


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
