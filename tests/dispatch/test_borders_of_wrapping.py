"""Borders of hooks that wrap and of chains, and what becomes of a hook beside its calls."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="empty-body, var-annotated"
# Annotations say how results are combined, and most classes here have none.

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import HookCancelledError, HookGroupClosedError, InvalidHookError
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.kinds import hook
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python


class Wraps:
    """Methods without a body, so that what the caller gives is wrapped."""

    @ah.point(ah.wrap(argument="call_next"))
    async def ask(self, prompt, call_next, **options): ...

    @ah.point(ah.wrap(argument="call_next"))
    async def send(self, call_next, *parts, flag=False): ...

    @ah.point(ah.wrap(argument="call_next"))
    async def get(self, request, call_next, *, timeout=3): ...

    @ah.point("wrap")
    async def run(self, prompt, call_next): ...


async def echo(*args, **keywords):
    return args, keywords


# -- arguments


async def test_positions_replace_no_keyword_of_the_caller() -> None:
    """What the method has no parameter for stays as it is."""

    async def ask(self, prompt, call_next, **options):
        return await call_next(prompt.strip())

    async def sees(self, prompt, call_next, **options):
        seen.append((prompt, options))
        return await call_next()

    seen: list[object] = []
    hooks = ah.compose(Wraps, [hook(ask=ask), hook(ask=sees)])
    assert await hooks.ask(" hi ", echo, trace=True) == (("hi",), {"trace": True})
    assert seen == [("hi", {"trace": True})]


async def test_what_a_hook_passes_takes_the_places_that_are_left() -> None:
    """Of positions, those that it does not pass by name; keyword-only ones if there are no others;
    and none of an argument that is left out before what calls the next hook.
    """

    class Tools:
        @ah.point(ah.wrap(argument="nxt"))
        async def two(self, a, b, nxt): ...

        @ah.point(ah.wrap(argument="nxt"))
        async def named(self, nxt, *, a): ...

        @ah.point(ah.wrap(argument="nxt"))
        async def left_out(self, a, b="B", nxt=None): ...

        @ah.point(ah.wrap(argument="nxt"))
        async def none(self, nxt): ...

        @ah.point(ah.wrap(argument="nxt"))
        async def own(self, a="A", nxt=None):
            return a

    async def two(self, a, b, nxt):
        return await nxt("first", b="second")

    async def named(self, nxt, *, a):
        return await nxt(f"{a}+")

    async def none(self, nxt):
        return await nxt("more")

    async def own(self, a="A", nxt=None):
        return await nxt("first", "second")

    class Sees:
        async def two(self, a, b, nxt):
            return a, b

        async def named(self, nxt, *, a):
            return a

        async def none(self, nxt):
            return await nxt()

    changes = hook(two=two, named=named, none=none, own=own)
    hooks = ah.compose(Tools, [changes, Sees()])
    assert await hooks.two("a", "b", echo) == ("first", "second")
    assert await hooks.named(echo, a="a") == "a+"
    assert await ah.compose(Tools, [changes]).none(echo) == (("more",), {})
    with pytest.raises(TypeError, match="none"):  # the next hook cannot take it
        await hooks.none(echo)
    assert await ah.compose(Tools, []).left_out(a="a", nxt=echo) == (("a",), {})
    with pytest.raises(TypeError, match="own"):
        await hooks.own()


async def test_a_chain_may_end_with_none() -> None:
    """None is then the result of the call: neither the argument nor the class's own result is."""

    class Chains:
        @ah.point("chain")
        async def empty(self, text: str | None) -> str | None: ...

        @ah.point("chain")
        async def own(self, text: str | None) -> str | None:
            return "own"

    async def ends(self, text):
        return ah.dispatch.end_chain(None)

    async def fails(self, text):
        raise AssertionError("the chain has ended")

    hooks = ah.compose(Chains, [hook(empty=ends, own=ends), hook(empty=fails, own=fails)])
    assert [await hooks.empty("x"), await hooks.own("x")] == [None, None]


async def test_a_keyword_that_the_class_does_not_take_is_an_error() -> None:
    """Also if the errors of all hooks are only logged."""

    class First:
        @ah.point("first")
        async def ask(self, a, /): ...

    async def ask(self, a):
        return a

    logged: Any = ah.compose(First, [ah.configure(hook(ask=ask), on_error="log")])
    with pytest.raises(TypeError, match="'bad'"):
        await logged.ask("x", bad=1)


# -- time limits and failures


async def test_a_plain_function_returns_no_coroutine() -> None:
    """It would never be awaited, and what is wrapped would not run."""

    def run(prompt, call_next):
        return call_next(prompt)

    group = ah.HookGroup(Wraps)
    group.on(Wraps.run)(run)
    with refused(InvalidHookError, "run is a plain function, and returned <coroutine"):
        await group.hooks.run("p", echo)


async def test_an_error_that_passes_through_a_wrapper_is_not_its_own() -> None:
    """It names the hook that raised it, and counts as a failure of that one alone."""

    class Events:
        async def on(self, text: str) -> None: ...

    async def around(self, text):
        yield

    async def fails(self, text):
        raise OSError(text)

    group = ah.HookGroup(Events, [hook(on=around), hook(on=fails)])
    with pytest.raises(OSError, match="away") as caught:
        await group.hooks.on("away")
    assert caught.value.__notes__ == ["raised by Observer#2.on"]
    assert [status.failures for status in group.status()] == [0, 1]


async def test_an_error_of_a_generator_itself_is_raised() -> None:
    """Also one of the type that Python makes of a `StopAsyncIteration`."""

    class Events:
        async def on(self, text: str) -> None: ...

    async def around(self, text):
        try:
            yield
        except OSError:
            raise RuntimeError("its own") from None

    async def fails(self, text):
        raise OSError(text)

    hooks = ah.compose(Events, [hook(on=around), hook(on=fails)])
    with pytest.raises(RuntimeError, match="its own"):
        await hooks.on("away")


async def test_removed_hooks_are_exited_in_order_of_removal() -> None:
    """Each waits for the one before, as all exits share a context."""
    exited = []

    class Resource:
        def __init__(self, name):
            self.name = name

        async def on(self, text): ...

        async def __aenter__(self): ...

        async def __aexit__(self, *_):
            if self.name == "first":
                await ticks(5)
            exited.append(self.name)

    class Events:
        async def on(self, text: str) -> None: ...

    first = Resource("first")
    second = Resource("second")
    async with ah.HookGroup(Events, [first, second]) as group:
        group.remove(first)
        group.remove(second)
    assert exited == ["first", "second"]


async def test_a_hook_that_was_not_entered_is_not_exited() -> None:
    """Its removal starts no task, also inside the block of the group."""

    class Events:
        async def on(self, text: str) -> None: ...

    async def ignores(self, text): ...

    plain = hook(on=ignores)
    async with ah.HookGroup(Events, [plain]) as group:
        group.remove(plain)
        assert len(asyncio.all_tasks()) == 1


# -- what a hook may be, and the block of its group


class Events:
    async def on(self, name) -> None: ...


@pytest.mark.parametrize("name", ["__aenter__", "__aexit__"])
async def test_a_hook_with_half_of_a_context_manager_is_none(name: str) -> None:
    """It has to have both methods to be entered."""
    called = []

    async def note(self, name) -> None:
        called.append(name)

    async def half(self, *details) -> None:
        raise AssertionError("it is no context manager")

    async with ah.HookGroup(Events, [hook(**{"on": note, name: half})]) as group:
        await group.hooks.on("x")
    assert called == ["x"]


@pytest.mark.parametrize("on_error", ["raise", "log"])
async def test_a_call_that_outlives_its_group_queues_nothing(
    clock: ManualClock, on_error: Any
) -> None:
    """It is the caller's, and gets an error: no task would wait for the queued call.

    The hook has not failed: the call counts as dropped.
    """

    async def waits(self, name):
        await gate.wait()

    async def logs(self, name):
        logged.append(name)

    gate = asyncio.Event()
    logged: list[str] = []
    later = ah.configure(hook(on=logs), background=True, order=1, on_error=on_error)
    group = ah.HookGroup(Events, [hook(on=waits), later], grace_secs=5)
    await group.__aenter__()
    call = await parked(group.hooks.on("x"), 5)
    leaving = await parked(group.__aexit__(None, None, None), 5)
    clock.advance(5)
    await leaving
    gate.set()
    with pytest.raises(HookGroupClosedError, match="Observer#2 are not queued any more"):
        await call
    await ticks()
    assert logged == []
    _, status = group.status()
    assert (status.dropped, status.failures, status.last_error) == (1, 0, None)


async def test_a_call_that_cancels_its_own_task_at_its_end_has_failed() -> None:
    """Also beside a call whose error is only logged."""

    async def fails(self, name):
        await asyncio.sleep(0)
        raise OSError

    async def cancels(self, name):
        await ticks(3)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    logged = ah.configure(hook(on=fails), on_error="log")
    with pytest.raises(HookCancelledError, match=r"Observer#2\.on was cancelled"):
        await ah.compose(Events, [logged, hook(on=cancels)]).on("x")


async def test_a_call_that_cannot_wait_and_raises_a_cancel_has_failed() -> None:
    """Beside one that waits, which is ended."""

    async def cancels(self, name):
        raise asyncio.CancelledError

    async def waits(self, name):
        await asyncio.get_running_loop().create_future()

    with pytest.raises(HookCancelledError, match=r"Observer#2\.on was cancelled"):
        await ah.compose(Events, [hook(on=waits), hook(on=cancels)]).on("x")


# -- what is wrapped, generators, and the hooks of a group


class Handlers:
    async def on_event(self, event) -> None: ...

    @ah.point(ah.wrap(argument="call_next"))
    async def handle(self, event, call_next, data=None, *, depth=0): ...


class Waits:
    async def on_event(self, event):
        await asyncio.sleep(0)


async def final(event, data=None, *, depth=0):
    return event, data, depth


def test_a_class_without_new_objects_is_refused() -> None:
    """Its object could not stand for the hooks, which were never called."""

    class Only:
        made = None

        def __new__(cls):
            Only.made = Only.made or super().__new__(cls)
            return Only.made

        async def on_event(self, event) -> None: ...

    Only()
    with pytest.raises(InvalidHookError, match="its __new__ returns"):
        ah.compose(Only, [Waits()])


async def test_a_generator_that_fits_in_a_group_is_refused_by_a_session() -> None:
    """A session awaits its hooks, also of a class that a group has seen."""

    class Around(ah.SessionRunHook):
        async def before_run(self, run_context):
            yield

    around = Around()
    ah.HookGroup(ah.SessionRunHook, [around])
    with pytest.raises(InvalidHookError, match="is an async generator, but"):
        ah.AsyncMonitoredSession(final, [around])


async def test_what_a_removed_hook_resets_is_reset_for_the_caller() -> None:
    """The block sees what its exit has set, though that runs in a task."""
    variable = contextvars.ContextVar("variable", default="default")

    class Sets(Waits):
        async def __aenter__(self):
            self.token = variable.set("set")

        async def __aexit__(self, *_):
            variable.reset(self.token)

    hook = Sets()
    async with ah.HookGroup(Handlers, [hook]) as group:
        assert variable.get() == "set"
        group.remove(hook)
        await ticks()
    assert variable.get() == "default"
