"""What overlaps, where its caller is thrown away, and the errors that another one hides."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import types
import weakref
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._aio.gather import keep_errors
from aiohooks.testing import ManualClock
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


class Calls:
    async def on(self) -> None: ...


class Waiting:
    """Waits until it is cancelled or closed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def on(self) -> None:
        self.events.append("starts")
        try:
            await forever()
        except BaseException as error:
            self.events.append(type(error).__name__)
            raise


class Passing:
    async def on(self) -> None: ...


@types.coroutine
def started_and_closed(coro: Coroutine[Any, Any, Any], turns: int = 5) -> Generator[None, None, None]:
    """Start a coroutine in the running task, and throw it away some turns of the loop later."""
    coro.send(None)
    for _ in range(turns):
        yield
    coro.close()


async def test_what_overlaps_ends_with_a_caller_that_is_thrown_away(clock: ManualClock) -> None:
    """The hook in the caller's task is closed and the others are cancelled; no timer of a time limit is left."""
    hooks = [Waiting(), Waiting(), Waiting()]
    group = ah.HookGroup(Calls, [ah.configure(one, timeout=60) for one in hooks])
    await started_and_closed(group.hooks.on())
    assert clock.pending == 0
    await ticks()
    first, *others = (one.events for one in hooks)
    assert first == ["starts", "GeneratorExit"]
    assert others == [["starts", "CancelledError"]] * 2


def chained(*errors: BaseException) -> BaseException:
    """Make each error the context of the one before it; return the first."""
    for error, context in itertools.pairwise(errors):
        error.__context__ = context
    return errors[0]


def context_of(error: BaseException) -> list[BaseException]:
    """Return the chain of contexts, which must end."""
    found: list[BaseException] = []
    link = error.__context__
    while link is not None:
        found.append(link)
        assert len(found) < 100
        link = link.__context__
    return found


def test_hidden_errors_are_at_the_end_of_the_context(caplog: pytest.LogCaptureFixture) -> None:
    """One as it is, several as a group, behind what was there; each is logged."""
    raised, own, one, two, three = (ValueError(name) for name in ("raised", "own", "one", "two", "three"))
    chained(raised, own)
    keep_errors(raised, [one])
    assert context_of(raised) == [own, one]
    keep_errors(raised, [two, own, three])
    (*known, last) = context_of(raised)
    assert known == [own, one]
    assert isinstance(last, ExceptionGroup)
    assert last.exceptions == (two, three)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [one, two, own, three]


@pytest.mark.parametrize("links", [0, 1, 3])
def test_the_context_is_no_circle(links: int) -> None:
    """A hidden error that has what is raised in its own context, however deep, is cut there."""
    raised, hidden = ValueError("raised"), ValueError("hidden")
    between = [ValueError(f"{number}") for number in range(links)]
    chained(hidden, *between, raised)
    keep_errors(raised, [hidden])
    assert context_of(raised) == [hidden, *between]


def test_an_error_that_is_in_the_context_already_stays_there() -> None:
    """It is not put behind itself."""
    raised, hidden = ValueError("raised"), ValueError("hidden")
    chained(raised, hidden)
    keep_errors(raised, [hidden])
    keep_errors(raised, [])
    assert context_of(raised) == [hidden]


async def test_variables_come_back_where_the_callers_context_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hooks set is the caller's, and what they leave alone keeps what the caller has set meanwhile."""
    monkeypatch.setitem(vars(asyncio), "_nest_patched", True)
    variables = [contextvars.ContextVar(name, default=0) for name in "abc"]

    class Sets:
        def __init__(self, number: int) -> None:
            self.number = number

        async def on(self) -> None:
            await ticks(self.number + 1)
            variables[self.number].set(variables[self.number].get() + 1)

    await ah.compose(Calls, [Sets(0), Sets(1), Sets(2)]).on()
    assert [variable.get() for variable in variables] == [1, 1, 1]


async def test_a_cancel_that_a_hook_calls_on_its_own_task_does_not_outlast_the_call() -> None:
    """It comes out of the call, and not at whatever the caller awaits next: a task group repeats the caller's cancel so."""

    class CancelsItsTask:
        async def on(self) -> None:
            await ticks()
            assert task is not None
            task.cancel("again")

    class Waits:
        async def on(self) -> None:
            await ticks(2)

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(asyncio.CancelledError):
        await ah.compose(Calls, [CancelsItsTask(), Waits()]).on()
    assert task.uncancel() == 0


async def test_hooks_of_a_caller_that_is_driven_in_another_context() -> None:
    """What hooks set is set in the context in which the caller runs, and not in that of its task."""
    variable = contextvars.ContextVar("variable", default=0)

    class Sets:
        async def on(self) -> None:
            await ticks()
            variable.set(variable.get() + 1)

    @types.coroutine
    def driven_in(context: contextvars.Context, coro: Coroutine[Any, Any, Any]) -> Generator[Any, Any, None]:
        while True:
            try:
                waiting = context.run(coro.send, None)
            except StopIteration:
                return
            yield waiting

    context = contextvars.copy_context()
    await driven_in(context, ah.compose(Calls, [Sets(), Sets()]).on())
    assert variable.get() == 0
    assert context[variable] >= 1


async def test_what_overlaps_shares_the_callers_context() -> None:
    """What one hook sets is seen by another one that is still waiting."""
    variable = contextvars.ContextVar("variable", default=0)
    is_set = asyncio.Event()
    seen: list[int] = []

    class Sets:
        async def on(self) -> None:
            await ticks()
            variable.set(1)
            is_set.set()

    class Sees:
        async def on(self) -> None:
            await is_set.wait()
            seen.append(variable.get())

    await ah.compose(Calls, [Sees(), Sets(), Sees()]).on()
    assert seen == [1, 1]


class HeldError(Exception):
    """An error that can be referred to weakly."""


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_an_error_is_in_no_reference_cycle(number: int, suspend: bool) -> None:
    """When the caller has dealt with it, it goes with all that its traceback refers to, without a garbage collection."""

    class Fails:
        async def on(self) -> None:
            if suspend:
                await ticks()
            raise HeldError

    hooks: list[object] = [Waiting(), Waiting(), Waiting()] if suspend else [Passing(), Passing(), Passing()]
    hooks[number] = Fails()
    held: weakref.ref[HeldError] | None = None
    gc.disable()
    try:
        try:
            await ah.compose(Calls, hooks).on()
        except HeldError as error:
            held = weakref.ref(error)
        assert held is not None
        await ticks(2)  # the tasks of the others go
        assert held() is None
    finally:
        gc.enable()
