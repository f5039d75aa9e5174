"""The borders of a group: what enters and leaves, which loop calls it, what is in no registry."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.errors import InvalidHookError, WrongLoopError
from aiohooks.testing import ManualClock
from tests.support.checks import invalid, refused
from tests.support.waiting import parked, pass_time, ticks

pytestmark = pytest.mark.every_python


class Events:
    async def on(self, text: str) -> None: ...

    async def off(self, text: str) -> None: ...

    @ah.point("first")
    async def ask(self, text: str) -> str | None: ...

    @ah.point("wrap")
    async def around(self, text: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return await call_next(text)

    def plain(self) -> None: ...


class Notes:
    """Notes its calls; `gate` delays them."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.calls: list[str] = []
        self.gate = gate

    async def on(self, text: str) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.calls.append(text)

    async def off(self, text: str) -> None:
        self.calls.append(f"off {text}")

    def plain(self) -> None:
        self.calls.append("plain")


class Resource(Notes):
    """A hook that is entered and left."""

    async def __aenter__(self) -> None:
        self.calls.append("enter")

    async def __aexit__(self, *_: object) -> None:
        self.calls.append("leave")


# -- adding and removing


async def test_one_function_twice_is_two_registrations() -> None:
    """Each is called, has a result of its own, and is removed for itself, the earliest first."""
    calls: list[str] = []

    async def log(text: str) -> list[str]:
        calls.append(text)
        return [f"{text}{len(calls)}"]

    composed = ah.compose_functions([log, log], results="merge")
    assert await composed("x") == ["x1", "x2"]
    composed.remove(log)
    assert await composed("x") == ["x3"]

    group = ah.HookGroup(Events)
    for method in (Events.on, Events.on, Events.off):
        group.on(method)(log)
    calls.clear()
    group.remove(log)
    await group.hooks.on("on")
    await group.hooks.off("off")
    assert calls == ["on", "off"]
    group.remove(log)
    group.remove(log)
    with invalid("log", "is not a hook of"):
        group.remove(log)


async def test_functions_may_have_a_parameter_named_self() -> None:
    """It is a parameter as any other, given by position or by name, also of a generator."""
    calls: list[str] = []

    async def wrap(self: str, text: str) -> AsyncIterator[None]:
        calls.append(f"{self} {text}")
        yield

    async def log(self: str, text: str) -> None:
        calls.append(f"{self} {text}")

    for functions in ([wrap, log], [log, wrap]):
        composed: Any = ah.compose_functions(functions)
        await composed("a", "b")
        await composed(self="c", text="d")
    assert calls == ["a b", "a b", "c d", "c d"] * 2


async def test_a_registration_is_removed_as_its_hook_is() -> None:
    """By the registration or by the hook, whatever was added; also of a function."""
    hook = Notes()
    registration = ah.configure(hook, order=1)
    group = ah.HookGroup(Events)
    for added in (hook, registration):
        for removed in (hook, registration, ah.configure(hook, order=3)):
            group.add(added)
            with refused(InvalidHookError, "twice"):
                group.add(removed)
            group.remove(removed)
    composed = ah.compose_functions([hook.on])
    composed.remove(ah.configure(hook.on, order=1))
    await composed("x")
    await group.hooks.on("x")
    assert hook.calls == []


async def test_a_function_that_is_called_once() -> None:
    """It takes part in one call, also if others begin before that has ended."""
    gate = asyncio.Event()
    calls = list[str]()

    async def first(text: str) -> None:
        calls.append(f"first {text}")
        await gate.wait()

    async def every(text: str) -> None:
        calls.append(text)

    group = ah.HookGroup(Events)
    group.on(Events.on, once=True)(first)
    group.on(Events.on)(every)
    call = await parked(group.hooks.on("a"))
    await group.hooks.on("b")
    with invalid("first", "is not a hook of"):
        group.remove(first)
    gate.set()
    await call
    assert sorted(calls) == ["a", "b", "first a"]

    composed = ah.compose_functions([ah.configure(every, once=True)])
    await composed("c")
    await composed("d")
    assert calls[-1] == "c"
    with refused(InvalidHookError, "once=True, which is for functions"):
        group.add(ah.configure(Notes(), once=True))


async def test_a_call_that_does_not_reach_a_function_does_not_remove_it() -> None:
    """As another hook has ended the call before, or the arguments are wrong."""
    calls: list[str] = []

    class Ends:
        @ah.point("first")
        async def first(self, text: str) -> str | None: ...

        @ah.point("wrap")
        async def wrap(self, text: str, call_next: Any) -> Any: ...

        async def on(self, text: str) -> None: ...

    class Before:
        ends = True

        async def first(self, text: str) -> str | None:
            return "first" if self.ends else None

        async def wrap(self, text: str, call_next: Any) -> str:
            return "wrap" if self.ends else await call_next(text)

        async def on(self, text: str) -> None:
            if self.ends:
                raise OSError("down")

    async def once(text: str, call_next: Any = None) -> str:
        calls.append(text)
        return "once"

    async def use() -> list[str | None]:
        answers = [await group.hooks.first("first"), await group.hooks.wrap("wrap", None)]
        await group.hooks.on("on")
        return answers

    before = Before()
    group = ah.HookGroup(Ends, [ah.configure(before, order=-1)])
    for method in (Ends.first, Ends.wrap, Ends.on):
        group.on(method, once, once=True)
    with pytest.raises(OSError, match="down"):
        await use()
    wrong_call: Any = group.hooks.on
    for arguments in ((), ("a", "b")):
        with pytest.raises(TypeError, match=r"Ends\.on\(\): "):
            await wrong_call(*arguments)
    assert calls == []
    before.ends = False
    assert await use() == ["once", "once"]
    assert calls == ["first", "wrap", "on"]
    assert repr(group) == "<HookGroup Ends: Before>"


@pytest.mark.parametrize("background", [False, True])
async def test_concurrent_calls_call_a_function_once(background: bool) -> None:
    """Of calls that are decided together, the first calls it."""
    calls: list[str] = []

    async def once(text: str) -> None:
        await asyncio.sleep(0)
        calls.append(text)

    async with ah.HookGroup(Events) as group:
        group.on(Events.on, once, once=True, background=background)
        await asyncio.gather(*(group.hooks.on(text) for text in "abc"))
    assert calls == ["a"]


@pytest.mark.parametrize("waits", [True, False])
async def test_wrong_arguments_are_no_failure_of_a_hook(waits: bool) -> None:
    """They are an error of the caller, also with `on_error="log"`."""

    class Quick:
        async def on(self, text: str) -> None: ...

    hook = Notes() if waits else Quick()
    group = ah.HookGroup(Events, [ah.configure(hook, on_error="log", disable_after=1)])
    await group.hooks.on("a")
    wrong_call: Any = group.hooks.on
    for arguments in ((), ("a", "b")):
        with pytest.raises(TypeError, match=r"Events\.on\(\): "):
            await wrong_call(*arguments)
    assert group.status()[0].failures == 0


def test_a_hook_has_the_name_that_it_is_given() -> None:
    """In the status and in messages; hooks of one name are numbered."""
    hooks = [
        ah.configure(Notes(), name="audit"),
        ah.configure(Notes(), name="audit"),
        ah.configure(Notes(), name="metrics"),
        Notes(),
    ]
    group = ah.HookGroup(Events, hooks)
    assert [status.name for status in group.status()] == ["audit", "audit#2", "metrics", "Notes"]
    with invalid("name of Notes is 5"):
        ah.configure(Notes(), name=5)  # type: ignore[arg-type]
    with invalid("name of Notes is ''", "give a text, or leave it out"):
        ah.configure(Notes(), name="")


# -- leaving


async def test_leaving_waits_no_longer_than_the_grace_period(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the hooks are closed, with a warning; the call itself is the caller's."""
    gate = asyncio.Event()
    hook = Resource(gate)
    group = ah.HookGroup(Events, [hook], grace_secs=5)
    await group.__aenter__()
    call = await parked(group.hooks.on("x"))
    leaving = await parked(group.__aexit__(None, None, None), 5)
    clock.advance(4)
    await ticks()
    assert not leaving.done()
    clock.advance(1)
    await leaving
    assert hook.calls == ["enter", "leave"]
    assert "1 of its calls still run after 5 s" in caplog.text
    gate.set()
    await call
    assert hook.calls == ["enter", "leave", "x"]


async def test_a_removed_hook_is_left_when_its_last_call_has_ended() -> None:
    """Calls that begin later do not delay it; the group leaves it no second time."""
    gate = asyncio.Event()
    later = asyncio.Event()
    removed = Resource(gate)
    other = Resource(later)
    async with ah.HookGroup(Events, [removed, other]) as group:
        call = await parked(group.hooks.on("x"))
        group.remove(removed)
        after = await parked(group.hooks.on("y"))
        await ticks()
        assert removed.calls == ["enter"]
        gate.set()
        await ticks()
        assert removed.calls == ["enter", "x"], "the call has another hook"
        later.set()
        await call
        await after
        await ticks(20)
        assert removed.calls == ["enter", "x", "leave"]
        assert "leave" not in other.calls
    assert removed.calls.count("leave") == other.calls.count("leave") == 1


async def test_a_plain_context_manager_is_refused() -> None:
    """When the group is entered, which would not enter it; elsewhere it is a hook like others."""

    class File(Notes):
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    await ah.compose(Events, [File()]).on("x")
    with refused(InvalidHookError, "File", "plain context manager", "__aenter__"):
        await ah.HookGroup(Events, [File()]).__aenter__()
    async with ah.HookGroup(Events) as group:
        with refused(InvalidHookError, "plain context manager"):
            group.add(File())


# -- event loops


def in_new_loop(call: Callable[[], Awaitable[object]]) -> object:
    async def main() -> object:
        return await call()

    return asyncio.run(main())


@pytest.mark.parametrize("background", [False, True])
async def test_a_call_from_another_loop_is_refused(background: bool) -> None:
    """By coroutine or plain methods, of hooks that wait, or not, or are queued; and the group works
    as before.
    """
    hook = Notes()
    waits = ah.configure(Notes(asyncio.Event()), on_error="log")
    waits.hook.gate.set()
    async with ah.HookGroup(Events, [ah.configure(hook, background=background), waits]) as group:
        await group.hooks.on("a")
        for call in (
            lambda: in_new_loop(lambda: group.hooks.on("b")),
            lambda: in_new_loop(lambda: group.hooks.off("b")),
            lambda: group.hooks.plain(),
        ):
            with refused(WrongLoopError, "HookGroup Events", "call_soon_threadsafe"):
                await asyncio.to_thread(call)
        await group.hooks.on("c")
    assert hook.calls == waits.hook.calls == ["a", "c"]


def test_without_a_block_the_next_loop_may_use_a_group() -> None:
    """When the loop of its first call is closed; plain methods need no loop."""
    hook = Notes()
    hooks = ah.compose(Events, [hook])
    for _ in range(2):
        asyncio.run(hooks.off("x"))
        hooks.plain()
    assert hook.calls == ["off x", "plain"] * 2


def test_a_loop_of_another_library_is_refused() -> None:
    """By name, where a hook may wait: no loop of asyncio is running there."""

    class Waits:
        async def on(self, text: str) -> None:
            await asyncio.sleep(0)

    call = ah.compose(Events, [Waits()]).on("x")
    with refused(WrongLoopError, "no asyncio event loop is running", "trio"):
        call.send(None)


# -- kinds of methods and hooks


def traced(function: Callable[..., Any]) -> Any:
    """A decorator that puts a plain function in the place of the function."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


async def test_a_member_that_is_no_function_is_refused_by_name() -> None:
    """If a hook implements it, which would never be called; an object that is called is a method of
    a hook.
    """

    class Odd:
        on = functools.partialmethod(Notes.off)

        async def other(self, text: str) -> None: ...

    class Called:
        async def __call__(self, text: str) -> None:
            calls.append(text)

    class Hook:
        other = Called()

    class Unable(Hook):
        async def on(self, text: str) -> None: ...

    calls: list[str] = []
    await ah.compose(Odd, [Hook()]).other("x")
    assert calls == ["x"]
    with refused(InvalidHookError, "Unable.on cannot be called", "Odd.on is a partialmethod"):
        ah.compose(Odd, [Unable()])


async def test_a_call_beside_other_methods_is_a_method() -> None:
    """The class's own one, which no hook implements, still calls the other methods."""

    class App:
        async def __call__(self, text: str) -> None:
            await self.on(text)

        async def on(self, text: str) -> None: ...

    class Logs:
        async def on(self, text: str) -> None:
            calls.append(text)

    class Answers:
        async def __call__(self, text: str) -> None:
            calls.append(f"called with {text}")

    calls: list[str] = []
    await ah.compose(App, [Logs()])("x")
    await ah.compose(App, [Logs(), Answers()])("y")
    assert calls == ["x", "called with y"]


def test_a_plain_wrapper_of_a_coroutine_function_is_refused() -> None:
    """When it is added, as a method or as a function, with the words for each."""

    class Hook:
        @traced
        async def on(self, text: str) -> None: ...

    @traced
    async def log(text: str) -> None: ...

    says = "is a plain function around a coroutine function", "async def"
    with refused(InvalidHookError, "Hook.on", *says):
        ah.compose(Events, [Hook()])
    with refused(InvalidHookError, "log", *says):
        ah.compose_functions([log])
    with refused(InvalidHookError, "log", *says):
        ah.HookGroup(Events).on(Events.on)(log)


# -- generators


class FrozenError(Exception):
    """One that takes no attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@pytest.mark.parametrize(
    "error", [FrozenError(), StopAsyncIteration(), KeyError("x"), asyncio.CancelledError()]
)
async def test_an_exception_passes_through_a_generator_as_it_is(error: BaseException) -> None:
    """The same object, whatever it is; a cancel from within is named, as without a generator."""
    seen: list[BaseException] = []

    class Around:
        async def on(self, text: str) -> AsyncGenerator[None]:
            try:
                yield
            except BaseException as raised:
                seen.append(raised)
                raise

    class Fails:
        async def on(self, text: str) -> None:
            await asyncio.sleep(0)
            raise error

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - each error
        await ah.compose(Events, [Around(), Around(), Fails()]).on("x")
    if isinstance(error, asyncio.CancelledError):
        assert isinstance(caught.value, ah.errors.HookCancelledError)
    else:
        assert caught.value is error
        assert seen == [error, error]


async def test_a_generator_without_a_yield_wraps_nothing() -> None:
    """The others are called; a second `yield` is an error that names the hook."""

    class Disabled:
        enabled = False

        async def on(self, text: str) -> AsyncGenerator[None]:
            if self.enabled:
                yield
                yield

    hook = Notes()
    around = Disabled()
    composite = ah.compose(Events, [around, hook])
    await composite.on("x")
    assert hook.calls == ["x"]
    around.enabled = True
    with refused(InvalidHookError, "Disabled.on has yielded twice"):
        await composite.on("y")


async def test_each_exit_has_the_grace_period_after_a_cancel() -> None:
    """A cancel of the task that leaves the block does not let the exits share one."""
    exited: list[int] = []

    class Slow(Notes):
        def __init__(self, number: int) -> None:
            self.number = number

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *details: object) -> None:
            await sleep(2)
            exited.append(self.number)

    async def use() -> None:
        async with ah.HookGroup(Events, [Slow(number) for number in range(4)], grace_secs=3):
            pass

    with ManualClock() as clock:
        leaving = await parked(use(), 20)
        leaving.cancel()
        await pass_time(clock, 8)
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert exited == [3, 2, 1, 0]


def test_a_group_cannot_be_part_of_itself() -> None:
    """Neither as its own hook nor as a hook of its hooks: a call would never end."""
    outer = ah.HookGroup(Events)
    middle = ah.HookGroup(Events, [outer.hooks])
    inner = ah.HookGroup(Events, [Notes(), middle.hooks])
    for group in (outer, middle, inner):
        with refused(InvalidHookError, "a call would never end"):
            outer.add(group.hooks)
        with refused(InvalidHookError, "a call would never end"):
            outer.on(Events.on, group.hooks.on)


def test_a_function_cannot_be_part_of_itself() -> None:
    """A function that `compose_functions` has returned, and one around it."""

    async def log(text: str) -> None: ...

    inner = ah.compose_functions([log])
    outer = ah.compose_functions([inner])
    for function in (inner, outer):
        with refused(InvalidHookError, "a call would never end"):
            inner.add(function)


async def test_groups_in_groups_may_be_nested_deep() -> None:
    """Deeper than functions can call each other: neither making nor calling them recurses."""

    class Nested:
        async def on(self, text: str) -> None: ...

    notes = Notes()
    hook: Any = notes
    for _ in range(900):
        hook = ah.HookGroup(Nested, [hook]).hooks
    await hook.on("x")
    assert notes.calls == ["x"]
