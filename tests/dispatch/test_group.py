"""A group of hooks is called as if it were one hook of its class."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar, final

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.waiting import elapse, fail, forever, ticks

pytestmark = pytest.mark.every_python

T = TypeVar("T")


class AgentHooks:
    """A lifecycle as a user writes it."""

    async def on_tool_start(self, call: str) -> None: ...

    @ah.point("first")
    async def before_model(self, request: str) -> str | None:
        return None

    @ah.point("chain")
    async def rewrite(self, about: int, prompt: str) -> str:
        return prompt

    @ah.point("wrap")
    async def call_tool(self, call: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return await call_next(call)

    async def count(self) -> int:
        return 0

    def describe(self) -> None: ...


class Recording:
    """Does what a function says in `on_tool_start`."""

    def __init__(self, call: Callable[[str], Awaitable[None]]) -> None:
        self._call = call

    async def on_tool_start(self, call: str) -> None:
        await self._call(call)


class Answering:
    """Answers every question with its own text, after a while."""

    def __init__(self, answer: str | None, calls: list[str] | None = None) -> None:
        self.answer = answer
        self.calls = [] if calls is None else calls

    async def before_model(self, request: str) -> str | None:
        await asyncio.sleep(0)
        self.calls.append(f"{self.answer} of {request}")
        return self.answer

    async def rewrite(self, number: int, text: str) -> str | None:
        await asyncio.sleep(0)
        return None if self.answer is None else f"{text}{self.answer}{number}"

    async def call_tool(self, call: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return f"{self.answer}({await call_next(call + '!')})"


async def tool(call: str) -> str:
    return f"tool {call}"


# -- methods that return nothing


async def test_calls_overlap_and_the_first_failure_ends_the_others() -> None:
    """Hooks that wait overlap; when one fails, the others are cancelled and have ended, and the error is the same object."""
    error, events = ValueError("no"), list[str]()
    both = asyncio.Barrier(2)

    async def waits(call: str) -> None:
        await both.wait()
        try:
            await forever()
        finally:
            events.append("cancelled")

    async def fails(call: str) -> None:
        await both.wait()
        await ticks()
        raise error

    group = ah.HookGroup(AgentHooks, [Recording(waits), Recording(fails)])
    with pytest.raises(ValueError, match="no") as raised:
        await group.hooks.on_tool_start("x")
    assert raised.value is error
    assert events == ["cancelled"]
    assert error.__notes__ == ["raised by Recording#2.on_tool_start"]


async def test_variables_that_hooks_set_are_the_callers() -> None:
    """A context variable set by any hook is seen by whoever called them."""
    first: contextvars.ContextVar[str] = contextvars.ContextVar("first")
    second: contextvars.ContextVar[str] = contextvars.ContextVar("second")

    async def sets_first(call: str) -> None:
        await asyncio.sleep(0)
        first.set(call)

    async def sets_second(call: str) -> None:
        await asyncio.sleep(0)
        second.set(call)

    await ah.compose(AgentHooks, [Recording(sets_first), Recording(sets_second)]).on_tool_start("x")
    assert (first.get(), second.get()) == ("x", "x")


async def test_a_time_limit_and_a_hook_that_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that exceeds its time limit and is only logged does not keep the caller."""

    async def hangs(call: str) -> None:
        await elapse(100)

    hooks = ah.compose(AgentHooks, [ah.configure(Recording(hangs), timeout=2, on_error="log"), Recording(tool)])  # type: ignore[arg-type]
    with ManualClock() as clock:
        task = asyncio.create_task(hooks.on_tool_start("x"))
        await ticks()
        clock.advance(2)
        await task
    messages = [each.getMessage() for each in caplog.records]
    assert messages == ["Recording#1.on_tool_start failed; continuing, as its on_error says"]


async def test_hooks_of_a_lower_order_complete_a_call_first() -> None:
    """As in a session, an order is complete before the next one starts; `in_order` gives each its own."""
    events: list[str] = []

    def hook(name: str) -> Recording:
        async def call(_: str) -> None:
            events.append(f"{name} starts")
            await asyncio.sleep(0)
            events.append(f"{name} ends")

        return Recording(call)

    await ah.compose(AgentHooks, ah.in_order([hook("a"), ah.configure(hook("b"), timeout=5), hook("c")])).on_tool_start("x")
    assert events == [f"{name} {what}" for name in "abc" for what in ("starts", "ends")]


def test_in_order_keeps_the_other_attributes() -> None:
    """`in_order` changes the order alone, and begins where the caller says."""
    a, b = Answering("a"), Answering("b")
    registrations = ah.in_order([ah.configure(a, timeout=5, order=99), b], first=-3)
    assert [(one.hook, one.order, one.timeout) for one in registrations] == [(a, -3, 5), (b, -2, None)]


# -- methods that return something


async def test_the_first_answer_wins() -> None:
    """`first`: hooks are called in turn up to the first answer that is not None; without one, the class itself answers."""
    calls: list[str] = []
    hooks = ah.compose(AgentHooks, [Answering(None, calls), Answering("a", calls), Answering("b", calls)])
    assert await hooks.before_model("x") == "a"
    assert calls == ["None of x", "a of x"]
    assert await ah.compose(AgentHooks, []).before_model("x") is None


async def test_a_chain_passes_the_last_argument_on() -> None:
    """`chain`: each answer takes the place of the last argument; None leaves it as it is; the last one is the result."""
    hooks = ah.compose(AgentHooks, [Answering("a"), Answering(None), Answering("b")])
    assert await hooks.rewrite(1, "x") == "xa1b1"
    assert await hooks.rewrite(about=1, prompt="x") == "xa1b1"
    assert await ah.compose(AgentHooks, [Answering(None)]).rewrite(1, "x") == "x"


async def test_wrapping_hooks_nest() -> None:
    """`wrap`: the first hook is the outermost, and the last one calls what the caller has given."""
    hooks = ah.compose(AgentHooks, [Answering("a"), Answering("b")])
    assert await hooks.call_tool("x", tool) == "a(b(tool x!!))"
    assert await hooks.call_tool(call="x", call_next=tool) == "a(b(tool x!!))"
    assert await ah.compose(AgentHooks, []).call_tool("x", tool) == "tool x"


async def test_errors_in_wrapping_hooks() -> None:
    """An error passes through the hooks around it with one note; a hook that is only logged lets the call go through."""

    class Failing:
        def __init__(self, *, before: bool) -> None:
            self.before = before

        async def call_tool(self, call: str, call_next: Callable[[str], Awaitable[str]]) -> str:
            answer = "" if self.before else await call_next(call)
            raise ValueError(f"after {answer!r}")

    with pytest.raises(ValueError, match="after ''") as raised:
        await ah.compose(AgentHooks, [Answering("a"), Failing(before=True)]).call_tool("x", tool)
    assert raised.value.__notes__ == ["raised by Failing.call_tool"]
    for before in (True, False):
        logged = ah.configure(Failing(before=before), on_error="log")
        assert await ah.compose(AgentHooks, [logged, Answering("a")]).call_tool("x", tool) == "a(tool x!)"


async def test_several_answers_need_a_way_to_become_one() -> None:
    """A method that returns something takes one hook; several are refused, unless `results` says how; `call` gives all."""

    class Counting:
        def __init__(self, number: int) -> None:
            self.number = number

        async def count(self) -> int:
            await asyncio.sleep(0)
            return self.number

    assert await ah.compose(AgentHooks, [Counting(1)]).count() == 1
    with refused(ah.errors.InvalidHookError, "Counting#1.count and Counting#2.count", 'results={"count": "first"}', "@point"):
        ah.compose(AgentHooks, [Counting(1), Counting(2)])
    group = ah.HookGroup(AgentHooks, [Counting(1), Counting(2)], results={"count": "first"})
    assert await group.hooks.count() == 1
    assert await group.call(AgentHooks.count) == [1, 2]
    ordered = [ah.configure(Counting(number), order=number // 3) for number in range(9)]
    group = ah.HookGroup(AgentHooks, ordered, results={"count": "first"})
    assert await group.call(AgentHooks.count) == list(range(9))
    assert await ah.HookGroup(AgentHooks).call(AgentHooks.count) == []


async def test_answers_where_nothing_says_whether_there_are_any() -> None:
    """A method without a return annotation notifies; an answer of one of several hooks is an error that names `results`."""

    class Untyped:
        async def on(self):  # type: ignore[no-untyped-def]
            ...

    class Says:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        async def on(self) -> Any:
            return self.answer

    assert await ah.compose(Untyped, [Says(None), Says(None)]).on() is None  # type: ignore[no-untyped-call]
    assert await ah.compose(Untyped, [Says(5)]).on() == 5  # type: ignore[no-untyped-call]
    with refused(ah.errors.InvalidHookError, "several hooks implement on", "[None, 5]", 'results={"on": "first"}'):
        await ah.compose(Untyped, [Says(None), Says(5)]).on()  # type: ignore[no-untyped-call]


async def test_generators_wrap_the_calls_of_the_others() -> None:
    """A hook's async generator runs up to its `yield` before the other hooks and after them behind it; errors come out of it."""
    events: list[str] = []

    class Around:
        async def on_tool_start(self, call: str) -> AsyncGenerator[None]:
            events.append("before")
            try:
                yield
            except ValueError:
                events.append("failed")
                raise
            events.append("after")

    async def records(call: str) -> None:
        events.append(call)

    await ah.compose(AgentHooks, [Recording(records), Around()]).on_tool_start("x")
    with pytest.raises(ValueError, match="no"):
        await ah.compose(AgentHooks, [Around(), Recording(lambda _: fail(ValueError("no")))]).on_tool_start("x")
    assert events == ["before", "x", "after", "before", "failed"]


def test_an_error_of_a_plain_method_names_its_hook() -> None:
    """As that of a coroutine does."""

    class Broken(AgentHooks):
        def describe(self) -> None:
            raise OSError("no text")

    with pytest.raises(OSError, match="no text") as raised:
        ah.compose(AgentHooks, [Broken()]).describe()
    assert raised.value.__notes__ == ["raised by Broken.describe"]


def test_a_final_class_has_no_group() -> None:
    """No object could stand for several hooks of it."""

    @final
    class Last:
        async def on(self) -> None: ...

    with refused(ah.errors.InvalidHookError, "Last is final"):
        ah.compose(Last, [])


def test_plain_methods_are_called_in_order() -> None:
    """A method that is no coroutine calls the hooks one after the other."""
    events: list[int] = []

    class Describing:
        def __init__(self, number: int) -> None:
            self.number = number

        def describe(self) -> None:
            events.append(self.number)

    ah.compose(AgentHooks, [Describing(1), Describing(2)]).describe()
    assert events == [1, 2]


# -- the object


async def test_the_object_is_one_of_its_class() -> None:
    """It is an instance, overrides what hooks implement and nothing else, and its methods are coroutine functions."""
    hooks = ah.compose(AgentHooks, [Answering("a")])
    assert isinstance(hooks, AgentHooks)
    assert type(hooks).__name__ == "AgentHooks"
    assert inspect.iscoroutinefunction(hooks.before_model)
    assert type(hooks).on_tool_start is AgentHooks.on_tool_start
    assert type(hooks).before_model is not AgentHooks.before_model
    assert inspect.signature(hooks.before_model) == inspect.signature(AgentHooks().before_model)


def test_the_class_may_want_arguments_or_be_abstract() -> None:
    """The object is made without an `__init__` that wants arguments; abstract classes, protocols and generic ones will do."""

    class Wants(ABC, Generic[T]):
        def __init__(self, needed: T) -> None:
            raise AssertionError("not called")

        @abstractmethod
        async def on(self) -> None: ...

        @abstractmethod
        async def other(self) -> None: ...

    class Contract(Protocol):
        async def on(self) -> None: ...

    class Made:
        def __init__(self) -> None:
            self.ready = True

        async def on(self) -> None: ...

    assert isinstance(ah.compose(Wants, []), Wants)
    assert isinstance(ah.compose(Wants[int], []), Wants)
    ah.compose(Contract, [])
    assert ah.compose(Made, []).ready


async def test_groups_nest() -> None:
    """The object of one group is a hook of another."""
    inner = ah.compose(AgentHooks, [Answering("a"), Answering("b")])
    assert await ah.compose(AgentHooks, [inner, Answering("c")]).rewrite(1, "x") == "xa1b1c1"


async def test_a_group_is_used_again_while_it_is_used() -> None:
    """A hook may call its own group, and several tasks the same method: no call sees another's arguments or answers."""
    group: ah.HookGroup[AgentHooks]
    seen: list[str] = []

    class Nesting:
        async def on_tool_start(self, call: str) -> None:
            await asyncio.sleep(0)
            if len(call) < 3:
                await group.hooks.on_tool_start(call + "+")
            seen.append(call)

    group = ah.HookGroup(AgentHooks, [ah.configure(Nesting(), timeout=9), ah.configure(Nesting(), timeout=9)])
    await asyncio.gather(*(group.hooks.on_tool_start(name) for name in "ab"))
    times = {1: 2, 2: 4, 3: 8}  # by the length of the text: each hook calls both again
    assert sorted(seen) == sorted(f"{name}{'+' * depth}" for name in "ab" for depth in range(3) for _ in range(times[depth + 1]))


# -- hooks that come and go


async def test_hooks_are_added_and_removed() -> None:
    """A change takes part in the next call; the active one keeps its hooks."""
    events: list[str] = []
    gate = asyncio.Event()

    def hook(name: str) -> Recording:
        async def call(_: str) -> None:
            events.append(name)
            await gate.wait()

        return Recording(call)

    a, b = hook("a"), hook("b")
    group = ah.HookGroup(AgentHooks, [a])
    task = asyncio.create_task(group.hooks.on_tool_start("x"))
    await ticks()
    group.add(b)
    group.remove(a)
    gate.set()
    await task
    await group.hooks.on_tool_start("x")
    assert events == ["a", "b"]
    with refused(ah.errors.InvalidArgumentError, "is not a hook of <HookGroup AgentHooks: Recording#2>"):
        group.remove(a)
    group.remove(b)
    assert type(group.hooks).on_tool_start is AgentHooks.on_tool_start


async def test_functions_are_hooks() -> None:
    """`on` takes a coroutine function or a plain one, also as a decorator, and returns it; `remove` takes it out again."""
    events: list[str] = []
    group = ah.HookGroup(AgentHooks)

    @group.on(AgentHooks.on_tool_start)
    async def first(call: str) -> None:
        await asyncio.sleep(0)
        events.append(f"first {call}")

    @group.on(AgentHooks.on_tool_start, timeout=5)
    def second(call: str) -> None:
        events.append(f"second {call}")

    await group.hooks.on_tool_start("x")
    group.remove(second)
    await group.hooks.on_tool_start("y")
    assert events == ["second x", "first x", "first y"]
    assert repr(group) == "<HookGroup AgentHooks: first>"
    with refused(ah.errors.InvalidArgumentError, "on_tool_begin is not a method of AgentHooks"):
        group.on(on_tool_begin, first)
    with refused(ah.errors.InvalidArgumentError, "'on_tool_start' is given for a method", "AgentHooks.before_model"):
        group.on("on_tool_start", first)  # type: ignore[call-overload]
    with refused(ah.errors.InvalidHookError, "without_arguments.on_tool_start()", "cannot take the call", "too many"):
        group.on(AgentHooks.on_tool_start, without_arguments)


async def on_tool_begin(call: str) -> None: ...


def without_arguments() -> None: ...


# -- what is refused


class OneEdit:
    async def on_tool_stat(self, call: str) -> None: ...


class TooFew:
    async def on_tool_start(self) -> None: ...


class TooMany:
    async def on_tool_start(self, call: str, more: str) -> None: ...


class Plain:
    def on_tool_start(self, call: str) -> None: ...


class Coroutine:
    async def describe(self) -> None: ...


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ([OneEdit()], ("OneEdit.on_tool_stat is not a method of AgentHooks", "did you mean 'on_tool_start'?")),
        ([TooFew()], ("TooFew.on_tool_start()", "cannot take the call AgentHooks.on_tool_start(self, call): too many")),
        ([TooMany()], ("TooMany.on_tool_start(call", "missing a required argument: 'more'")),
        ([Plain()], ("Plain.on_tool_start is not a coroutine function", "async def")),
        ([Coroutine()], ("Coroutine.describe is a coroutine function", "AgentHooks.describe is a plain one; write it as `def`")),
        ([object()], ("<object object", "has none of the methods of AgentHooks: before_model")),
        ([Answering], ("the class Answering", "give an object of it")),
        ([ah.HookGroup(AgentHooks)], ("<HookGroup AgentHooks: no hooks> is a group", "give its `hooks`")),
        (
            [ah.configure(Recording(tool), background=True)],  # type: ignore[arg-type]
            ("has to be entered, as Recording has background=True", "use HookGroup"),
        ),
        (Answering("a"), ("hooks is <", "Answering object", "give a list of hooks")),
        (ah.configure(Answering("a")), ("hooks is HookRegistration(", "give a list of hooks")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_hooks_that_do_not_fit_are_refused(hooks: Any, says: tuple[str, ...]) -> None:
    """The error is raised when the group is made, and names the hook and what is wrong."""
    with refused(ah.errors.InvalidHookError, *says):
        ah.compose(AgentHooks, hooks)


def test_a_hook_twice_is_refused() -> None:
    """One object cannot be two hooks of a group."""
    hook = Answering("a")
    with refused(ah.errors.InvalidHookError, "twice", "make two objects"):
        ah.compose(AgentHooks, [hook, ah.configure(hook, order=1)])


def test_classes_that_cannot_be_a_lifecycle_are_refused() -> None:
    """So are one without public methods, something else than a class, and unknown names in `results`."""
    with refused(ah.errors.InvalidHookError, "object has no public methods"):
        ah.compose(object, [])
    with refused(ah.errors.InvalidHookError, "5 is not a class"):
        ah.compose(5, [])  # type: ignore[arg-type]
    with refused(ah.errors.InvalidArgumentError, "results has 'befor_model'", "did you mean 'before_model'"):
        ah.compose(AgentHooks, [], results={"befor_model": "first"})
    with refused(ah.errors.InvalidArgumentError, "results['count'] is 'last'", '"wrap"'):
        ah.compose(AgentHooks, [], results={"count": "last"})  # type: ignore[dict-item]
    with refused(ah.errors.InvalidArgumentError, "results is 'last'", '"wrap"'):
        ah.compose(AgentHooks, [], results="last")  # type: ignore[arg-type]
    with refused(ah.errors.InvalidArgumentError, "results is {'count'}", "give a mapping"):
        ah.compose(AgentHooks, [], results={"count"})  # type: ignore[arg-type]
    with refused(ah.errors.InvalidArgumentError, "the argument of @point is 'last'"):
        ah.point("last")  # type: ignore[arg-type]


def test_a_grace_period_is_a_number_of_seconds() -> None:
    """Other values are refused when the group is made, not when it ends."""
    with refused(ah.errors.InvalidArgumentError, "grace_secs is -1"):
        ah.HookGroup(AgentHooks, grace_secs=-1)


async def test_methods_that_have_no_list_of_answers_are_refused() -> None:
    """`call` takes coroutine methods whose hooks are independent of each other."""
    group = ah.HookGroup(AgentHooks, [Answering("a")])
    with refused(ah.errors.InvalidArgumentError, "call_tool has no list of answers", "group.hooks.call_tool"):
        await group.call(AgentHooks.call_tool, "x", tool)


# -- observers


async def test_failures_of_an_observer_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is logged with its traceback, the 10th and the 100th without; the status has the number."""
    hook = Recording(lambda _: fail(ValueError("no")))
    group = ah.HookGroup(AgentHooks, [ah.configure(hook, on_error="log")])
    for _ in range(120):
        await group.hooks.on_tool_start("x")
    assert [(record.exc_info is not None, record.getMessage()[:45]) for record in caplog.records] == [
        (True, "Recording.on_tool_start failed; continuing, a"),
        (False, "Recording.on_tool_start failed for the 10th t"),
        (False, "Recording.on_tool_start failed for the 100th "),
    ]
    assert group.status() == [ah.dispatch.HookStatus("Recording", failures=120, pending=0, disabled=False)]


async def test_an_observer_that_always_fails_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    """After `disable_after` failures in a row a hook is not called any more; one success in between starts the count anew."""
    outcomes = [True, False, True, True, True]
    calls: list[bool] = []

    async def call(_: str) -> None:
        calls.append(outcomes[len(calls)])
        if calls[-1]:
            await fail(ValueError("no"))

    group = ah.HookGroup(AgentHooks, [ah.configure(Recording(call), on_error="log", disable_after=3)])
    for _ in range(9):
        await group.hooks.on_tool_start("x")
    assert calls == outcomes
    assert "failed 3 times in a row and is not called any more" in caplog.records[-1].getMessage()
    assert group.status()[0].disabled
    with refused(ah.errors.InvalidHookError, "disable_after of Recording is 3", 'on_error="log"'):
        ah.configure(Recording(call), disable_after=3)


# -- entering and leaving


class Resource:
    """A hook that is opened and closed."""

    def __init__(self, name: str, events: list[str], fails: str = "") -> None:
        self.name, self.events, self.fails = name, events, fails

    async def _do(self, what: str) -> None:
        self.events.append(f"{what} {self.name}")
        await asyncio.sleep(0)
        if self.fails == what:
            raise OSError(f"{what} {self.name}")

    async def __aenter__(self) -> None:
        await self._do("enter")

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        await self._do("leave")
        return True

    async def on_tool_start(self, call: str) -> None: ...

    def describe(self) -> None: ...


async def test_hooks_are_entered_in_order_and_left_in_reverse() -> None:
    """Context managers among the hooks are entered with the group; none of them swallows the error of the block."""
    events: list[str] = []
    group = ah.HookGroup(AgentHooks, [Resource("a", events), Resource("b", events)])
    with refused(ah.errors.HookGroupClosedError, "has to be entered, as Resource#1 is an async context manager"):
        await group.hooks.on_tool_start("x")
    with refused(ah.errors.HookGroupClosedError, "has to be entered"):
        group.hooks.describe()
    with pytest.raises(ValueError, match="of the block"):  # noqa: PT012 - the block is what raises
        async with group:
            await group.hooks.on_tool_start("x")
            raise ValueError("of the block")
    assert events == ["enter a", "enter b", "leave b", "leave a"]
    for use in (group.__aenter__, lambda: group.hooks.on_tool_start("x"), lambda: group.call(AgentHooks.on_tool_start, "x")):
        with refused(ah.errors.HookGroupClosedError, "make a new one"):
            await use()
    with refused(ah.errors.HookGroupClosedError, "make a new one"):
        group.hooks.describe()


async def test_a_hook_that_cannot_be_entered() -> None:
    """Those before it are left, those after it are never entered, whatever its `on_error`."""
    events: list[str] = []
    hooks = [Resource("a", events), ah.configure(Resource("b", events, "enter"), on_error="log"), Resource("c", events)]
    with pytest.raises(OSError, match="enter b") as raised:
        async with ah.HookGroup(AgentHooks, hooks):
            raise AssertionError("not reached")
    assert events == ["enter a", "enter b", "leave a"]
    assert raised.value.__notes__ == ["raised by Resource#2.__aenter__"]


@pytest.mark.parametrize("block_fails", [False, True])
async def test_hooks_that_cannot_be_left(block_fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The others are left all the same; their errors are raised, or noted at the error of the block."""
    events: list[str] = []
    hooks = [Resource("a", events, "leave"), Resource("b", events), Resource("c", events, "leave")]
    with pytest.raises(ValueError if block_fails else ExceptionGroup) as raised:  # noqa: PT012 - the block raises
        async with ah.HookGroup(AgentHooks, hooks):
            if block_fails:
                raise ValueError("of the block")
    assert events[3:] == ["leave c", "leave b", "leave a"]
    hidden = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert hidden == (["leave c", "leave a"] if block_fails else [])
    if block_fails:
        assert raised.value.__notes__ == ["and then: OSError('leave c')", "and then: OSError('leave a')"]
    else:
        assert [str(one) for one in raised.value.exceptions] == ["leave c", "leave a"]  # type: ignore[attr-defined]


async def test_a_hook_whose_leaving_a_third_party_cancels() -> None:
    """It is reported like a failure, and the others are left all the same."""
    events: list[str] = []

    class Cancelled(Resource):
        async def __aexit__(self, *_: object) -> bool:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return await super().__aexit__(None, None, None)

    with refused(ah.errors.HookCancelledError, "Cancelled.__aexit__ was cancelled, and not by its caller"):
        async with ah.HookGroup(AgentHooks, [Resource("a", events), Cancelled("b", events)]):
            pass
    assert events[2:] == ["leave b", "leave a"]


async def test_a_failed_end_leaves_no_reference_cycle() -> None:
    """What the failed hook referred to is freed with its error, without the garbage collector."""

    class Big:
        pass

    class Broken:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *_: object) -> None:
            big = Big()
            held.add(big)
            raise OSError("no")

        async def on_tool_start(self, call: str) -> None: ...

    held: weakref.WeakSet[Big] = weakref.WeakSet()

    async def fail() -> None:
        async with ah.HookGroup(AgentHooks, [Broken()]):
            pass

    gc.collect()
    gc.disable()
    try:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        assert isinstance(task.exception(), OSError)
        assert held
        del task
        await asyncio.sleep(0)
        assert not held
    finally:
        gc.enable()


async def test_a_cancel_while_the_group_is_left() -> None:
    """Every hook is left before the cancel comes out, and an error is in its context."""
    events: list[str] = []

    async def main() -> None:
        async with ah.HookGroup(AgentHooks, [Resource("a", events, "leave"), Resource("b", events)]):
            pass

    task = asyncio.create_task(main())
    while "leave b" not in events:  # noqa: ASYNC110 - no event is set when it is left
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert events[-1] == "leave a"
    assert isinstance(raised.value.__context__, OSError)


async def test_contexts_cannot_be_added_to_an_open_group() -> None:
    """Other hooks can; one that has to be entered is refused, and the group stays as it was."""
    async with ah.HookGroup(AgentHooks) as group:
        group.add(Answering("a"))
        with refused(ah.errors.InvalidHookError, "is a context manager; add it before the group is entered"):
            group.add(Resource("a", []))
        assert await group.hooks.before_model("x") == "a"
    with refused(ah.errors.HookGroupClosedError, "has been left"):
        group.add(Answering("b"))


async def test_a_hook_is_left_if_its_entering_has_left_a_cancel_behind() -> None:
    """A hook that is entered and then finds the caller cancelled is left: what it has opened is closed."""
    events: list[str] = []

    class Cancelling(Resource):
        async def __aenter__(self) -> None:
            await super().__aenter__()
            task.cancel("outside")

    async def main() -> None:
        async with ah.HookGroup(AgentHooks, [Cancelling("a", events), Resource("b", events)]):
            await forever()

    task = asyncio.create_task(main())
    with pytest.raises(asyncio.CancelledError, match="outside"):
        await task
    assert events[0] == "enter a"
    assert events[-1] == "leave a"


async def test_a_cancel_while_a_failed_group_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """A hook cannot be entered, and the caller is cancelled while the others are left: the error is logged and its context."""
    events: list[str] = []

    async def main() -> None:
        async with ah.HookGroup(AgentHooks, [Resource("a", events), Resource("b", events, "enter")]):
            pass

    task = asyncio.create_task(main())
    while "leave a" not in events:  # noqa: ASYNC110 - no event is set when it is left
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value.__context__, OSError)
    assert "a hook failed, but CancelledError is raised instead" in caplog.text
