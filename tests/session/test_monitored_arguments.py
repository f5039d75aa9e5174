"""Invalid hooks, fetches, feeds and functions: each is a typed error that names the value and says what to give instead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import drop, refused
from tests.support.hooks import RequestingHook
from tests.support.sessions import counting_graph, do_nothing, double
from tests.support.waiting import ticks


class Silent(ah.SessionRunHook):
    """Overrides nothing."""


class Duck:
    """Has a hook's methods, and is not a hook."""

    async def before_run(self, run_context: object) -> None:
        return None

    def __repr__(self) -> str:
        return "<a duck>"


class Plain(ah.SessionRunHook):
    """Has a plain function where a coroutine is needed."""

    def before_run(self, run_context: ah.SessionRunContext) -> None:  # type: ignore[override]
        return None


class Yielding(ah.SessionRunHook):
    """Has an async generator where a coroutine is needed."""

    async def after_run(self, *args: Any) -> Any:
        yield


def one_hook_twice() -> list[Any]:
    hook = Silent()
    return [hook, Silent(), ah.configure(hook, order=1)]


# -- hooks


HOOKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "class": (lambda: [Silent], ("the class Silent", "give an object of it: Silent(...)")),
    "duck": (lambda: [Duck()], ("<a duck>", "not a SessionRunHook", "derive it from SessionRunHook", "BlockingHook")),
    "none": (lambda: [Silent(), None], ("None", "not a SessionRunHook")),
    "function": (lambda: [print], ("print", "not a SessionRunHook")),
    "plain": (lambda: [Plain()], ("Plain.before_run", "not a coroutine function", "async def", "BlockingHook")),
    "generator": (lambda: [Yielding()], ("Yielding.after_run", "not a coroutine function", "async def")),
    "twice": (one_hook_twice, ("Silent object", "twice", "make two objects")),
    "bare": (Silent, ("Silent object", "give a list of hooks")),
    "bare, configured": (lambda: ah.configure(Silent()), ("HookRegistration", "give a list of hooks")),
    "int": (lambda: 5, ("hooks is 5", "give a list of hooks")),
    "None": (lambda: None, ("hooks is None", "give a list of hooks")),
}


@pytest.mark.parametrize(("hooks", "says"), HOOKS.values(), ids=HOOKS)
def test_anything_but_a_hook_is_refused(hooks: Callable[[], Any], says: tuple[str, ...]) -> None:
    """A session refuses an object in `hooks` that is not a hook; the error is a TypeError and names it."""
    with refused(ah.errors.InvalidHookError, *says) as caught:
        ah.AsyncMonitoredSession(double, hooks())
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "before_run", "after_run", "end", "close"])
def test_a_plain_function_is_refused_in_every_phase(phase: str) -> None:
    """Whichever of the six methods is a plain function, the hook is refused by class and method."""
    cls = type("Half", (ah.SessionRunHook,), {phase: lambda self, *args: None})
    with refused(ah.errors.InvalidHookError, f"Half.{phase} is not a coroutine function", "async def"):
        ah.AsyncMonitoredSession(double, [cls()])


def test_only_objects_are_configured() -> None:
    """`configure` takes an object and says so if it gets the class."""
    with refused(ah.errors.InvalidHookError, "the class Silent", "give an object of it: Silent(...)"):
        ah.configure(Silent, order=1)


def test_a_hook_of_another_package_is_named_its_adapter() -> None:
    """Also one that a program derives from a class of that package."""
    base = type("SessionRunHook", (), {"__module__": "tensorflow.python.training.session_run_hook"})
    derived = type("MyHook", (base,), {})
    with refused(
        ah.errors.InvalidHookError, "which is not a SessionRunHook; give it to TensorFlowHooks of aiohooks.adapters.tensorflow"
    ):
        ah.AsyncMonitoredSession(double, [derived()])
    with refused(ah.errors.InvalidHookError, "which is not a SessionRunHook; derive it from SessionRunHook, or wrap"):
        ah.AsyncMonitoredSession(double, [object()])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("registration", "says"),
    [
        (ah.dispatch.HookRegistration(Silent(), "x"), "order of Silent is 'x'"),  # type: ignore[arg-type]
        (ah.dispatch.HookRegistration(Silent(), 0, -1), "timeout of Silent is -1"),
        (ah.dispatch.HookRegistration(Silent(), on_error="boo"), "on_error of Silent is 'boo'"),  # type: ignore[arg-type]
        (ah.dispatch.HookRegistration(Silent(), max_pending=0), "max_pending of Silent is 0"),
        (ah.dispatch.HookRegistration(ah.configure(Silent())), "which is not a SessionRunHook"),
    ],
    ids=["order", "timeout", "on_error", "max_pending", "twice"],
)
def test_a_registration_that_was_made_by_hand_is_checked(registration: Any, says: str) -> None:
    """A session checks a `HookRegistration` like the arguments of `configure`."""
    with pytest.raises((ah.errors.InvalidArgumentError, ah.errors.InvalidHookError), match=says):
        ah.AsyncMonitoredSession(double, [registration])


def test_a_registration_is_configured_again() -> None:
    """Attributes that are not given again are kept."""
    hook = Silent()
    again = ah.configure(ah.configure(hook, order=3, timeout=2.0), on_error="log")
    assert (again.hook, again.order, again.timeout, again.on_error) == (hook, 3, 2.0, "log")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"order": "first"}, ("order of Silent is 'first'", "give a whole number")),
        ({"order": 1.5}, ("order of Silent is 1.5", "give a whole number")),
        ({"order": True}, ("order of Silent is True", "give a whole number")),
        ({"timeout": 0}, ("timeout of Silent is 0", "give seconds, above 0")),
        ({"timeout": -1.0}, ("timeout of Silent is -1.0", "give seconds, above 0")),
        ({"timeout": float("inf")}, ("timeout of Silent is inf", "None for no limit")),
        ({"timeout": "1"}, ("timeout of Silent is '1'", "give seconds")),
        ({"timeout": True}, ("timeout of Silent is True", "give seconds")),
        ({"on_error": "ignore"}, ("on_error of Silent is 'ignore'", '"raise" or "log"')),
        ({"on_error": None}, ("on_error of Silent is None", '"raise" or "log"')),
    ],
)
def test_attributes_of_hooks_are_checked(options: dict[str, Any], says: tuple[str, ...]) -> None:
    """An invalid order, timeout or on_error is refused, at `configure` and, on a class, when the session is made."""
    with refused(ah.errors.InvalidArgumentError, *says) as caught:
        ah.configure(Silent(), **options)
    assert isinstance(caught.value, ValueError)
    with refused(ah.errors.InvalidArgumentError, *says):
        ah.AsyncMonitoredSession(double, [type("Silent", (Silent,), options)()])


@pytest.mark.parametrize(
    "answer",
    ["loss", ("loss", None), ("loss", None, None), {"fetches": "loss"}, 0, ah.SessionRunArgs, np.zeros(2), np.zeros(0)],
    ids=repr,
)
async def test_an_answer_of_before_run_of_another_type_is_refused(answer: Any) -> None:
    """`before_run` returns SessionRunArgs or None; for anything else the error names the hook and the value, before the run."""
    hook = RequestingHook("loss")
    async with ah.AsyncMonitoredSession(double, [Silent(), hook]) as session:
        await session.run("loss")
        hook.request = answer
        with refused(
            ah.errors.InvalidHookError,
            "RequestingHook.before_run",
            repr(answer),
            "return SessionRunArgs(fetches, feed_dict) or None",
        ):
            await session.run("loss")
        assert session.global_step.latest.step == 1


# -- fetches


@dataclass
class Pair:
    """A structure of fetches."""

    first: Any
    second: Any


def foreign() -> ah.Placeholder:
    return ah.Graph().placeholder("x")


@pytest.mark.parametrize(
    ("fetches", "says"),
    [
        (
            "los",
            ("'los' is not in the graph", "did you mean 'loss'?", "known are:", "global_step", "loss", "total", "train", "x"),
        ),
        ("qqqq", ("'qqqq' is not in the graph", "known are: global_step, loss")),
        ("", ("'' is not in the graph",)),
        ({"a": ["loss", ("totl",)]}, ("'totl' is not in the graph", "did you mean 'total'?")),
        (Pair("loss", "lss"), ("'lss' is not in the graph", "did you mean 'loss'?")),
        (foreign(), ("<Placeholder 'x'>", "another graph", "the session's own graph")),
        (None, ("None cannot be fetched", "leave it out")),
        (["loss", None], ("None cannot be fetched", "leave it out")),
        (3, ("3 is of type int; fetch and feed by name",)),
        (True, ("True is of type bool; fetch and feed by name",)),
        (b"loss", ("b'loss' is of type bytes; fetch and feed by name",)),
        ({"loss"}, ("{'loss'} is of type set; fetch and feed by name",)),
        (Pair, ("Pair", "is of type type; fetch and feed by name")),
        (len, ("len", "is of type builtin_function_or_method")),
    ],
    ids=repr,
)
async def test_unknown_fetches_are_refused(fetches: Any, says: tuple[str, ...]) -> None:
    """A fetch that is not in the graph is a FetchError that lists the graph's names, and suggests a similar one."""
    graph = counting_graph()
    session = ah.Session(graph)
    with refused(ah.errors.FetchError, *says) as caught:
        await session.run(fetches)
    assert isinstance(caught.value, ValueError)
    async with ah.AsyncMonitoredSession(graph) as monitored:
        with refused(ah.errors.FetchError, *says):
            await monitored.run(fetches)


@pytest.mark.parametrize(
    ("fetches", "says"), [("los", "did you mean 'loss'?"), (foreign(), "another graph"), (7, "7 is of type int")]
)
async def test_unknown_fetches_of_a_hook_are_refused(fetches: Any, says: str) -> None:
    """A hook's fetches are checked as the caller's are, and the error names the hook."""
    hooks = [RequestingHook("loss"), RequestingHook(fetches)]
    async with ah.AsyncMonitoredSession(counting_graph(), hooks) as session:
        with refused(ah.errors.FetchError, says) as caught:
            await session.run("train")
        assert caught.value.__notes__ == ["fetched by RequestingHook#2.before_run"]
        assert await ah.Session(session.graph).run("total") == 0


async def test_a_key_that_the_step_did_not_return_is_refused() -> None:
    """A name fetched from a step function must be a key of the mapping it returns; the error names those it returned."""
    async with ah.AsyncMonitoredSession(double) as session:
        with refused(
            ah.errors.FetchError, "'lost' is not in the result of step 'double'", "did you mean 'loss'?", "known are: batch, loss"
        ):
            await session.run("lost")


@pytest.mark.parametrize("fetches", ["acuracy", {"a": ["loss", "acuracy"]}], ids=repr)
async def test_a_hook_that_fetches_an_unknown_key_is_named(fetches: Any) -> None:
    """If the step did not return what a hook wants, the error names the hook; the caller's own mistake names none."""
    hooks = [RequestingHook("loss"), RequestingHook(fetches), Silent(), RequestingHook(None, {"batch": 2})]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        with refused(ah.errors.FetchError, "'acuracy' is not in the result of step 'double'") as caught:
            await session.run("loss")
        assert caught.value.__notes__[-1] == "fetched by RequestingHook#2.before_run"
        assert session.global_step.latest.step == 0
    async with ah.AsyncMonitoredSession(double, [RequestingHook("loss")]) as session:
        with refused(ah.errors.FetchError, "'acuracy' is not in the result of step 'double'") as caught:
            await session.run("acuracy")
        assert not any("RequestingHook" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("result", [None, 0.5, ["loss"]], ids=repr)
async def test_a_step_that_returns_no_mapping_has_no_keys(result: Any) -> None:
    """Fetching by name from a step that returned no mapping says what it returned, and how to fetch all of it."""

    async def step() -> Any:
        return result

    async with ah.AsyncMonitoredSession(step) as session:
        kind = type(result).__name__
        with refused(ah.errors.FetchError, "'loss' is fetched by name", f"returned {kind}", "return a dict, or fetch 'step'"):
            await session.run("loss")
        assert await session.run("step") == result


# -- feeds


@pytest.mark.parametrize(
    ("feed_dict", "says"),
    [
        ({"y": 1}, ("'y' is not in the graph", "known are:")),
        ({"los": 1}, ("'los' is not in the graph", "did you mean 'loss'?")),
        ({foreign(): 1}, ("<Placeholder 'x'>", "another graph")),
        ({3: 1}, ("3 is of type int; fetch and feed by name",)),
        ({None: 1}, ("None is of type NoneType; fetch and feed by name",)),
        ({("x", "total"): 5}, ("('x', 'total')", "needs a tuple of 2 values", "5")),
        ({("x", "total"): (5,)}, ("('x', 'total')", "needs a tuple of 2 values", "(5,)")),
        ([("x", 1)], ("feed_dict is [('x', 1)]", "give a mapping")),
        (5, ("feed_dict is 5", "give a mapping")),
        (0, ("feed_dict is 0", "give a mapping")),
        (np.zeros(2), ("feed_dict is array([0., 0.])", "give a mapping")),
        ("x", ("feed_dict is 'x'", "give a mapping")),
    ],
    ids=repr,
)
async def test_bad_feeds_are_refused(feed_dict: Any, says: tuple[str, ...]) -> None:
    """A feed of an unknown name, or feeds that are no mapping, are a FetchError, from a caller or a hook alike."""
    graph = counting_graph()
    with refused(ah.errors.FetchError, *says) as caught:
        await ah.Session(graph).run("train", feed_dict)
    assert isinstance(caught.value, ValueError)
    async with ah.AsyncMonitoredSession(graph) as session:
        with refused(ah.errors.FetchError, *says):
            await session.run("train", feed_dict)
    async with ah.AsyncMonitoredSession(graph, [RequestingHook(None, feed_dict)]) as session:
        with refused(ah.errors.FetchError, *says) as caught:
            await session.run("train")
        assert caught.value.__notes__ == ["fed by RequestingHook.before_run"]


@pytest.mark.parametrize("hooks", [[], [Silent()], [RequestingHook("loss")]], ids=["none", "silent", "fetching"])
async def test_a_misspelt_feed_of_a_step_function_is_refused(hooks: list[ah.SessionRunHook]) -> None:
    """Only its parameters are fed, and keys of its result that are fetched; an error names what is known, and the hook."""
    says = "'bach' is fed, and is neither a parameter of step 'double' nor fetched; did you mean 'batch'? known are: batch"
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        for _ in range(2):
            with refused(ah.errors.FetchError, says) as caught:
                await session.run("loss", {"bach": 1})
            assert getattr(caught.value, "__notes__", []) == []
        assert await session.run("loss", {"batch": 1}) == 2
        assert await session.run(["loss", "batch"], {"batch": 4, "loss": 5}) == [5, 4]
        assert session.global_step.latest.step == 1
    async with ah.AsyncMonitoredSession(double, [*hooks, RequestingHook(None, {"bach": 1})]) as session:
        with refused(ah.errors.FetchError, says) as caught:
            await session.run("loss")
        assert "fed by RequestingHook" in caught.value.__notes__[-1]


async def test_a_node_fed_by_name_and_by_object_is_refused() -> None:
    """One feed_dict that names a node twice, by name and by object, contradicts itself; also nested in tuples."""
    graph = counting_graph()
    x = graph.nodes["x"]
    session = ah.Session(graph)
    for feed_dict in ({"x": 1, x: 2}, {("x", "total"): (1, 2), x: 3}):
        with refused(ah.errors.FetchError, "'x' is fed twice in one feed_dict", "leave one out"):
            await session.run("train", feed_dict)


async def test_a_node_is_no_value() -> None:
    """Feeding a node to a node is refused whichever way the feed is written, also when the run was planned before."""
    graph = counting_graph()
    session = ah.Session(graph)
    await session.run("train", {"x": 1})
    for key in ("x", graph.nodes["x"]):
        with refused(ah.errors.FetchError, "'x' is fed with <Variable 'total'>", "feed a value"):
            await session.run("train", {key: graph.nodes["total"]})


@pytest.mark.parametrize("options", [5, "trace", ["trace"]], ids=repr)
async def test_options_are_a_mapping(options: Any) -> None:
    """Options that are no mapping are refused, from the caller or a hook."""
    async with ah.AsyncMonitoredSession(double, [Silent()]) as session:
        with refused(ah.errors.InvalidArgumentError, f"options is {options!r}", "give a mapping"):
            await session.run("loss", None, options)
    async with ah.AsyncMonitoredSession(double, [RequestingHook(None, None, options)]) as session:
        with refused(ah.errors.InvalidArgumentError, f"options of RequestingHook.before_run is {options!r}", "give a mapping"):
            await session.run("loss")


def graph_with_inputs() -> ah.Graph:
    graph = ah.Graph()
    for name in ("x", "y", "z"):
        graph.placeholder(name, default=0)
    graph.operation(name="sum")(lambda x, y, z: x + y + z)
    return graph


@pytest.mark.parametrize("by", [("name", "name"), ("name", "object"), ("object", "name"), ("object", "object")])
async def test_two_hooks_that_feed_one_node_conflict(by: tuple[str, str]) -> None:
    """Two hooks that feed the same node, by name or by object, are both named in a FeedConflictError."""
    graph = graph_with_inputs()
    keys: dict[str, Any] = {"name": "x", "object": graph.nodes["x"]}
    async with ah.AsyncMonitoredSession(graph, [RequestingHook(None, {keys[one]: 1}) for one in by]) as session:
        with refused(
            ah.errors.FeedConflictError,
            "'x' by RequestingHook#1.before_run and RequestingHook#2.before_run",
            "remove one of them",
        ) as caught:
            await session.run("sum")
        assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("by_object", [False, True], ids=["name", "object"])
async def test_a_hook_and_the_caller_conflict(by_object: bool) -> None:
    """A hook and the caller that feed the same node are a conflict too, even if the values agree."""
    graph = graph_with_inputs()
    key = graph.nodes["y"] if by_object else "y"
    async with ah.AsyncMonitoredSession(graph, [RequestingHook(None, {"y": 1})]) as session:
        with refused(ah.errors.FeedConflictError, "'y' by RequestingHook.before_run and the caller", "remove one of them"):
            await session.run("sum", {key: 1})
        assert await session.run("sum", {"x": 5}) == 6


async def test_all_conflicts_are_listed_after_all_hooks_were_asked() -> None:
    """Conflicts are checked when every hook has returned its request, and all of them are in one message."""
    hooks = [RequestingHook(None, {"x": 1, "y": 1}), RequestingHook(None, {"y": 2}), RequestingHook(None, {"z": 3, "y": 3})]
    async with ah.AsyncMonitoredSession(graph_with_inputs(), hooks) as session:
        with refused(
            ah.errors.FeedConflictError,
            "'x' by RequestingHook#1.before_run and the caller",
            "'y' by RequestingHook#1.before_run and RequestingHook#2.before_run and RequestingHook#3.before_run",
            "'z' by RequestingHook#3.before_run and the caller",
        ):
            await session.run("sum", {"x": 9, "z": 9})
        assert not any(hook.values for hook in hooks)


# -- functions and coroutines


def make_coroutine() -> Coroutine[Any, Any, None]:
    return do_nothing()


CALLED: dict[str, tuple[Callable[[], Any], str]] = {
    "coroutine": (make_coroutine, "give the function and its arguments, not the call"),
    "int": (lambda: 5, "5; give a function"),
    "none": (lambda: None, "None; give a function"),
    "plain": (lambda: repr, "`async def`"),
}


@pytest.mark.parametrize(("make", "says"), CALLED.values(), ids=CALLED)
async def test_tasks_are_started_from_coroutine_functions(make: Callable[[], Any], says: str) -> None:
    """`start_soon` takes an `async def` and its arguments; a coroutine object, or what cannot be called, is refused."""
    given = make()
    async with ah.AsyncMonitoredSession(double) as session:
        with refused(ah.errors.InvalidArgumentError, says):
            session.start_soon(given, *(["argument"] if given is repr else []))


@pytest.mark.parametrize(("make", "says"), CALLED.values(), ids=CALLED)
async def test_step_functions_are_coroutine_functions(make: Callable[[], Any], says: str) -> None:
    """`run_step_fn` takes an `async def` with one parameter and refuses everything else."""
    async with ah.AsyncMonitoredSession(double) as session:
        with refused(ah.errors.InvalidArgumentError, "step function", says):
            await session.run_step_fn(make())


async def test_step_functions_take_the_context() -> None:
    """A step function with none, two or keyword-only parameters is refused with how to write it."""

    async def none() -> None: ...
    async def two(first: Any, second: Any) -> None: ...
    async def keyword(*, context: Any) -> None: ...

    async with ah.AsyncMonitoredSession(double) as session:
        for fn in (none, two, keyword):
            with refused(ah.errors.InvalidArgumentError, "step function", "async def step_fn(step_context)"):
                await session.run_step_fn(fn)  # type: ignore[arg-type]


async def test_what_a_creator_makes_is_checked() -> None:
    """A SessionCreator that does not make a Session, or one of another graph, is named."""

    class Creator:
        graph = counting_graph()
        made: Any = None

        async def create_session(self) -> Any:
            return self.made

        def __repr__(self) -> str:
            return "<my creator>"

    creator = Creator()
    for creator.made, says in ((5, "created 5"), (ah.Session(counting_graph()), "graph")):
        with refused(ah.errors.InvalidArgumentError, "<my creator>", says):
            async with ah.AsyncMonitoredSession(creator):
                raise AssertionError("the block must not run")


async def test_a_hook_is_used_in_one_open_session() -> None:
    """A hook of an open session is refused in another one, which can be entered when the first has ended."""
    hook = Silent()
    second = ah.AsyncMonitoredSession(double, [hook])
    async with ah.AsyncMonitoredSession(double, [hook], name="first") as first:
        with refused(ah.errors.InvalidHookError, "Silent object", "is used in session 'first', which is open", "another object"):
            await second.__aenter__()
        assert await first.run("loss") == 2
    async with second:
        assert await second.run("loss") == 2


async def test_a_hook_of_a_session_that_failed_to_open_is_free() -> None:
    """A session that could not be opened, and one that was never closed and is gone, hold their hooks no longer."""
    hook = Silent()

    class Failing(ah.SessionRunHook):
        async def begin(self) -> None:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await ah.AsyncMonitoredSession(double, [hook, Failing()]).__aenter__()
    abandoned = [ah.AsyncMonitoredSession(double, [hook])]
    await abandoned[0].__aenter__()
    await ticks(2)
    with warnings.catch_warnings(action="ignore"):  # a recorded warning would keep the session
        drop(abandoned)
    async with ah.AsyncMonitoredSession(double, [hook]) as session:
        assert await session.run("loss") == 2


async def test_a_forked_child_uses_the_hooks_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions that are open in a process hold no hooks of its forked children."""
    hook = Silent()
    async with ah.AsyncMonitoredSession(double, [hook]):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        async with ah.AsyncMonitoredSession(double, [hook]) as session:
            assert await session.run("loss") == 2
