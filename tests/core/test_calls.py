"""Calls that are awaited together: who is cancelled, what is raised, what is left."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from aiohooks._core.calls import Calls, RunWaits, Wait, can_wait, limited, result_now
from aiohooks.errors import HookCancelledError, keep_errors
from aiohooks.testing import ManualClock
from tests.support.waiting import cancel_and_wait, fail, forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

Call = Callable[[], Awaitable[Any]]


class NumberedCalls(Calls):
    """Functions as calls."""

    def describe(self, number: int) -> str:
        return f"call {number}"

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        return HookCancelledError(f"call {number} was cancelled")


async def results_of(
    *functions: Call,
    secs: float | None = None,
    grace_secs: float | None = 9,
    waits: RunWaits | None = None,
) -> Any:
    calls = NumberedCalls([None] * len(functions), grace_secs, waits)
    for number, function in enumerate(functions):
        calls.start(number, function, (), f"call {number}", secs)
    await calls.wait()
    return calls.results


async def never() -> int:
    return 5


async def perhaps(waits: bool = False) -> int:
    return await asyncio.sleep(0, 6) if waits else 6


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (never, False),
        (functools.partial(never), False),
        (perhaps, True),
        (lambda: never(), True),
        (asyncio.sleep, True),
        (object(), True),
    ],
    ids=["without", "partial", "with", "plain", "of asyncio", "unknown"],
)
def test_what_may_wait(function: object, waits: bool) -> None:
    """Everything but a coroutine function whose code has no `await`."""
    assert can_wait(function) is waits


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit])
async def test_what_is_no_exception_is_raised_in_the_caller(error: type[BaseException]) -> None:
    """Not by the loop; the others are cancelled and waited for."""
    before = asyncio.all_tasks()
    with pytest.raises(error):
        await results_of(lambda: fail(error()), forever)
    assert asyncio.all_tasks() == before


async def test_an_error_after_the_success_of_a_call_is_raised_in_the_caller() -> None:
    """As one of the call itself; the others are cancelled and waited for."""

    class Followed(NumberedCalls):
        def succeeded(self, number: int) -> None:
            raise LookupError("no successor")

    before = asyncio.all_tasks()
    calls = Followed([None, None], None)
    calls.start(0, ticks, (), "call 0")
    calls.start(1, forever, (), "call 1")
    with pytest.raises(LookupError, match="no successor"):
        await calls.wait()
    assert asyncio.all_tasks() == before


async def test_a_call_that_ends_together_with_its_grace_period_is_not_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No warning names it, or nothing."""
    with pytest.raises(OSError, match="lost"):
        await results_of(forever, lambda: fail(OSError("lost")), grace_secs=0)
    assert caplog.messages == []


async def test_a_call_that_is_cancelled_together_with_its_caller_has_not_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So does `asyncio.run`, which cancels all tasks at its end."""
    before = asyncio.all_tasks()
    caller = await parked(results_of(forever, forever))
    await ticks(2)
    for call in asyncio.all_tasks() - before - {caller}:
        call.cancel()
    assert await cancel_and_wait(caller)
    assert caplog.messages == []


class CountingTask(asyncio.Task[None]):
    """Counts the cancels that it gets."""

    cancels = 0

    def cancel(self, msg: Any | None = None) -> bool:
        self.cancels += 1
        return super().cancel(msg)


async def test_a_scope_of_anyio_is_left_once() -> None:
    """It repeats its cancel at every turn, but not while the cleanup of a call is waited for; it
    catches what comes out.
    """
    scope = anyio.CancelScope()
    cleans = asyncio.Event()
    gate = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            cleans.set()
            await gate.wait()

    async def caller() -> None:
        with scope:
            await results_of(cleans_up, forever)

    task = CountingTask(caller())
    await ticks()
    scope.cancel()
    await cleans.wait()
    await ticks(20)
    assert task.cancels == 1
    gate.set()
    await task
    assert scope.cancelled_caught


async def test_a_time_limit_and_the_grace_period() -> None:
    """A call that exceeds its limit is cancelled; one that ignores this is left running, and ends
    by itself.
    """
    gate = asyncio.Event()
    ended = list[str]()

    async def ignores() -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        ended.append("late")

    with ManualClock() as clock:
        task = asyncio.create_task(results_of(ignores, secs=5, grace_secs=2))
        for secs in (5, 2):
            await until_true(lambda: clock.pending)
            clock.advance(secs)
        with pytest.raises(TimeoutError, match=r"call 0 took too long"):
            await task
        assert not ended
        gate.set()
        await until_true(lambda: ended)
        task = asyncio.create_task(limited(forever(), 3, "the wait"))
        await until_true(lambda: clock.pending)
        clock.advance(3)
        with pytest.raises(TimeoutError, match="the wait took longer than 3 s"):
            await task
    assert await limited(perhaps(True), None, "the wait") == 6


async def test_the_grace_period_ends_with_calls_that_nothing_waits_for() -> None:
    """Calls that are ended, and are done before anything waits for them, leave no timer."""
    with ManualClock() as clock:
        calls = NumberedCalls([None], 9)
        calls.start(0, forever, (), None)
        await ticks()
        calls.end(ValueError("outside"))
        await until_true(lambda: calls.pending == 0)
        with pytest.raises(ValueError, match="outside"):
            await calls.wait()
        assert clock.pending == 0


async def test_the_time_of_a_call_begins_with_it() -> None:
    """A loop that is busy before the task of a call has begun takes nothing of its time."""
    with ManualClock() as clock:
        began: list[float] = []

        async def call() -> None:
            began.append(clock.now())
            await ticks()

        calls = NumberedCalls([None], 9)
        calls.start(0, call, (), None, 1.0)
        clock.advance(2)
        with (
            contextlib.suppress(TimeoutError) if began else contextlib.nullcontext()
        ):  # eager tasks have begun before
            await calls.wait()
        assert began


async def test_a_run_is_ended_from_outside() -> None:
    """In what it awaits, or in what it awaits next; a result that is there counts, and a given task
    continues.
    """
    waits = RunWaits()
    error = ValueError("outside")
    task = await parked(results_of(forever, forever, waits=waits), 5)
    waits.end(error)
    with pytest.raises(ValueError, match="outside") as raised:
        await task
    assert raised.value is error
    with pytest.raises(ValueError, match="outside"):
        await results_of(functools.partial(perhaps, True), forever, waits=waits)
    waits.cause = None
    assert await results_of(functools.partial(perhaps, True), waits=waits) == [6]
    given = asyncio.create_task(forever())
    wait = Wait[None]("a task")
    asyncio.get_running_loop().call_soon(wait.end, error)
    with pytest.raises(ValueError, match="outside"):
        await wait.result_of(given)
    assert not given.done()
    await cancel_and_wait(given)


async def test_a_call_that_ends_its_own_wait_is_cancelled_at_its_first_pause() -> None:
    """Also before its task is known: since Python 3.12 the call begins when it is started."""
    wait = Wait[None]("a call")

    async def ends_itself() -> None:
        wait.end(ValueError("enough"))
        await forever()

    with pytest.raises(ValueError, match="enough"):
        await wait.result_of(ends_itself())


async def test_a_result_now_is_that_of_a_call_that_does_not_wait() -> None:
    """One that waits is a fault of the library, which is not silent."""
    waiting = ticks(1)
    with pytest.raises(AssertionError, match="has waited"):
        result_now(waiting)
    waiting.close()


def test_what_is_hidden_is_kept() -> None:
    """Errors that another one hides are at the end of its context, with their own, and without a
    circle.
    """
    raised = ValueError("raised")
    hidden = [KeyError("one"), OSError("two")]
    own = LookupError("own")
    hidden[0].__context__ = own
    keep_errors(raised, [*hidden])
    assert isinstance(raised.__context__, BaseExceptionGroup)
    assert [*raised.__context__.exceptions] == hidden
    assert hidden[0].__context__ is own
    cancelled = asyncio.CancelledError()
    cleanup = OSError("cleanup")
    own.__context__ = cancelled
    cleanup.__context__ = own
    keep_errors(cancelled, [cleanup])
    assert (cancelled.__context__, cleanup.__context__, own.__context__) == (cleanup, own, None)
