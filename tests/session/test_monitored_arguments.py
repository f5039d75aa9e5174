"""Invalid hooks, fetches, feeds and functions: each is a typed error that names the value and says
what to give instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.dispatch import HookRegistration
from aiohooks.session.hook import HOOK_METHODS
from tests.support.checks import invalid, refused
from tests.support.hooks import RequestingHook
from tests.support.sessions import counting_graph, do_nothing, double, doubling


class Silent(ah.SessionRunHook):
    """Overrides nothing."""


class Duck:
    """Has a hook's methods, and is not a hook."""

    async def before_run(self, run_context: object) -> None:
        return None

    def __repr__(self) -> str:
        return "<a duck>"


class Yielding(ah.SessionRunHook):
    """Has an async generator where a coroutine is needed."""

    async def after_run(self, *args: Any) -> Any:
        yield


def hook_overriding(**attributes: Any) -> ah.SessionRunHook:
    made: ah.SessionRunHook = type("Silent", (ah.SessionRunHook,), attributes)()
    return made


# -- hooks

TWICE = Silent()
HOOKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "class": ([Silent], ("the class Silent", "give an object of it: Silent(...)")),
    "duck": (
        [Duck()],
        ("<a duck>", "not a SessionRunHook", "derive it from SessionRunHook", "BlockingHook"),
    ),
    "object": (
        [object()],
        ("which is not a SessionRunHook; derive it from SessionRunHook, make a hook",),
    ),
    "builtin": ([print], ("print", "not a SessionRunHook")),
    "function": (
        [hook_overriding],
        ("hook_overriding", "not a SessionRunHook", '@hook("after_run")'),
    ),
    "generator": ([Yielding()], ("Yielding.after_run is an async generator", "async def")),
    "twice": (
        [TWICE, Silent(), ah.configure(TWICE, order=1)],
        ("Silent object", "twice", "make two objects"),
    ),
    "configured twice": (
        [HookRegistration(ah.configure(Silent()))],
        ("which is not a SessionRunHook",),
    ),
    "bare": (Silent(), ("Silent object", "give a list of hooks")),
    "bare, configured": (ah.configure(Silent()), ("HookRegistration", "give a list of hooks")),
    "None": (None, ("hooks is None", "give a list of hooks")),
    **{
        phase: (
            [hook_overriding(**{phase: lambda *_: None})],
            (f"Silent.{phase} is a plain function", "async def", "BlockingHook"),
        )
        for phase in HOOK_METHODS
    },
}


@pytest.mark.parametrize(("hooks", "says"), HOOKS.values(), ids=HOOKS)
def test_anything_but_a_hook_is_refused(hooks: Any, says: tuple[str, ...]) -> None:
    """A session refuses an object in `hooks` that is not a hook; the error is a TypeError and names
    it.
    """
    with refused(ah.errors.InvalidHookError, *says) as caught:
        ah.AsyncMonitoredSession(double, hooks)
    assert isinstance(caught.value, TypeError)


ATTRIBUTES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"order": "first"}, ("order of Silent is 'first'", "give a whole number")),
    ({"timeout": 0}, ("timeout of Silent is 0", "give seconds, above 0")),
    ({"timeout": float("inf")}, ("timeout of Silent is inf", "None for no limit")),
    ({"on_error": "ignore"}, ("on_error of Silent is 'ignore'", '"raise" or "log"')),
    ({"max_pending": 0, "background": True}, ("max_pending of Silent is 0",)),
]


@pytest.mark.parametrize(("options", "says"), ATTRIBUTES)
def test_attributes_of_hooks_are_checked(options: dict[str, Any], says: tuple[str, ...]) -> None:
    """At `configure`, and of a class and a registration that was made by hand, when the session is
    made.
    """
    with invalid(*says) as caught:
        ah.configure(Silent(), **options)
    assert isinstance(caught.value, ValueError)
    hooks = [HookRegistration(Silent(), **options)]
    for given in (hooks, hooks if "max_pending" in options else [hook_overriding(**options)]):
        with invalid(*says):
            doubling(*given)


def test_a_registration_is_configured_again() -> None:
    """Attributes that are not given again are kept; only objects are configured."""
    hook = Silent()
    again = ah.configure(ah.configure(hook, order=3, timeout=2.0), on_error="log")
    assert (again.hook, again.order, again.timeout, again.on_error) == (hook, 3, 2.0, "log")
    with refused(
        ah.errors.InvalidHookError, "the class Silent", "give an object of it: Silent(...)"
    ):
        ah.configure(Silent, order=1)


@pytest.mark.parametrize(
    "answer",
    [
        "loss",
        ("loss", None),
        ("loss", None, None),
        {"fetches": "loss"},
        0,
        ah.SessionRunArgs,
        np.zeros(2),
        np.zeros(0),
    ],
    ids=repr,
)
async def test_an_answer_of_before_run_of_another_type_is_refused(answer: Any) -> None:
    """`before_run` returns SessionRunArgs or None; for anything else the error names the hook and
    the value, before the run.
    """
    hook = RequestingHook("loss")
    says = (
        "RequestingHook.before_run",
        repr(answer),
        "return SessionRunArgs(fetches, feed_dict) or None",
    )
    async with doubling(Silent(), hook) as session:
        await session.run("loss")
        hook.request = answer
        with refused(ah.errors.InvalidHookError, *says):
            await session.run("loss")
        assert session.global_step.latest.step == 1


# -- fetches


@dataclass
class Pair:
    """A structure of fetches."""

    first: Any
    second: Any


FOREIGN = ah.Graph().placeholder("x")
FETCHES: list[tuple[Any, tuple[str, ...]]] = [
    (
        "los",
        (
            "'los' is not in the graph",
            "did you mean 'loss'?",
            "known are:",
            "global_step",
            "loss",
            "total",
            "train",
            "x",
        ),
    ),
    ("qqqq", ("'qqqq' is not in the graph", "known are: global_step, loss")),
    ({"a": ["loss", ("totl",)]}, ("'totl' is not in the graph", "did you mean 'total'?")),
    (Pair("loss", "lss"), ("is of type Pair; fetch and feed by name",)),
    (FOREIGN, ("<Placeholder 'x'>", "another graph", "the session's own graph")),
    (["loss", None], ("None cannot be fetched", "leave it out")),
    ({"loss"}, ("{'loss'} is of type set; fetch and feed by name",)),
]


@pytest.mark.parametrize(("fetches", "says"), FETCHES, ids=repr)
async def test_unknown_fetches_are_refused(fetches: Any, says: tuple[str, ...]) -> None:
    """A fetch that is not in the graph is a FetchError that lists its names and suggests one; a
    hook that fetches it is named.
    """
    graph = counting_graph()
    with refused(ah.errors.FetchError, *says) as caught:
        await ah.Session(graph).run(fetches)
    assert isinstance(caught.value, ValueError)
    async with ah.AsyncMonitoredSession(graph) as session:
        with refused(ah.errors.FetchError, *says):
            await session.run(fetches)
    async with ah.AsyncMonitoredSession(
        graph, [RequestingHook("loss"), RequestingHook(fetches)]
    ) as session:
        with refused(ah.errors.FetchError, *says) as caught:
            await session.run("train")
        assert caught.value.__notes__ == ["fetched by RequestingHook#2.before_run"]
        assert session.global_step.latest.step == 0


@pytest.mark.parametrize("fetches", ["acuracy", {"a": ["loss", "acuracy"]}], ids=repr)
async def test_a_key_that_the_step_did_not_return_is_refused(fetches: Any) -> None:
    """The error names those it returned, whether a hook or the caller fetches it."""
    says = "'acuracy' is not in the result of step 'double'", "known are: batch, loss"
    asking = [Silent(), RequestingHook(fetches), RequestingHook(None, {"batch": 2})]
    for hooks, asked in ((asking, "loss"), ([RequestingHook("loss")], fetches)):
        async with doubling(*hooks) as session:
            with refused(ah.errors.FetchError, *says):
                await session.run(asked)
            assert session.global_step.latest.step == 0


@pytest.mark.parametrize("result", [None, 0.5, ["loss"]], ids=repr)
async def test_a_step_that_returns_no_mapping_has_no_keys(result: Any) -> None:
    """Fetching by name from a step that returned no mapping says what it returned, and how to fetch
    all of it.
    """

    async def step() -> Any:
        return result

    async with ah.AsyncMonitoredSession(step) as session:
        kind = type(result).__name__
        with refused(
            ah.errors.FetchError,
            "'loss' is fetched by name",
            f"returned {kind}",
            "return a dict, or fetch 'step'",
        ):
            await session.run("loss")
        assert await session.run("step") == result


# -- feeds

FEEDS: list[tuple[Any, tuple[str, ...]]] = [
    ({"los": 1}, ("'los' is not in the graph", "did you mean 'loss'?")),
    ({FOREIGN: 1}, ("<Placeholder 'x'>", "another graph")),
    ({3: 1}, ("3 is of type int; fetch and feed by name",)),
    ({("x", "total"): 5}, ("('x', 'total') is of type tuple; fetch and feed by name",)),
    ([("x", 1)], ("feed_dict is [('x', 1)]", "give a mapping")),
    (0, ("feed_dict is 0", "give a mapping")),
    (np.zeros(2), ("feed_dict is array([0., 0.])", "give a mapping")),
]


@pytest.mark.parametrize(("feed_dict", "says"), FEEDS, ids=repr)
async def test_bad_feeds_are_refused(feed_dict: Any, says: tuple[str, ...]) -> None:
    """A feed of an unknown name, or feeds that are no mapping, are a FetchError, from a caller or a
    hook alike.
    """
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


async def test_names_in_place_of_feeds_are_refused_also_after_feeds_of_these_names() -> None:
    """The plan of the feeds would fit the names."""
    async with doubling() as session:
        await session.run("loss", {"batch": 1})
        names: Any = ["batch"]
        with refused(ah.errors.FetchError, "feed_dict is ['batch']", "give a mapping"):
            await session.run("loss", names)


@pytest.mark.parametrize(
    "hooks", [[], [Silent()], [RequestingHook("loss")]], ids=["none", "silent", "fetching"]
)
async def test_a_misspelt_feed_of_a_step_function_is_refused(
    hooks: list[ah.SessionRunHook],
) -> None:
    """Only its parameters are fed, and keys of its result that are fetched; an error names what is
    known, and the hook.
    """
    says = (
        "'bach' is fed, and is neither a parameter of step 'double' nor fetched; did you mean"
        " 'batch'? known are: batch"
    )
    async with doubling(*hooks) as session:
        for _ in range(2):
            with refused(ah.errors.FetchError, says) as caught:
                await session.run("loss", {"bach": 1})
            assert getattr(caught.value, "__notes__", []) == []
        assert await session.run("loss", {"batch": 1}) == 2
        assert await session.run(["loss", "batch"], {"batch": 4, "loss": 5}) == [5, 4]
        assert session.global_step.latest.step == 1
    async with doubling(*hooks, RequestingHook(None, {"bach": 1})) as session:
        with refused(ah.errors.FetchError, says):
            await session.run("loss")


async def test_a_feed_that_contradicts_itself_is_refused() -> None:
    """One feed_dict that names a node twice; and a node as the value of one, also if
    the run was planned before.
    """
    graph = counting_graph()
    x = graph.nodes["x"]
    total = graph.nodes["total"]
    session = ah.Session(graph)
    await session.run("train", {"x": 1})
    with refused(ah.errors.FetchError, "'x' is fed twice in one feed_dict", "leave one out"):
        await session.run("train", {"x": 1, x: 2})
    for key in ("x", x):
        with refused(ah.errors.FetchError, "'x' is fed with <Variable 'total'>", "feed a value"):
            await session.run("train", {key: total})


@pytest.mark.parametrize("options", [5, "trace", ["trace"]], ids=repr)
async def test_options_are_a_mapping(options: Any) -> None:
    """Options that are no mapping are refused, from the caller or a hook."""
    for hook, what, own in (
        (Silent(), "options", options),
        (RequestingHook(None, None, options), "options of RequestingHook", None),
    ):
        async with doubling(hook) as session:
            with invalid(what, f"is {options!r}", "give a Mapping"):
                await session.run("loss", None, own)


async def test_all_conflicts_are_listed_after_all_hooks_were_asked() -> None:
    """Conflicts are checked when every hook has returned its request, and all of them are in one
    message, whether they name a node or give it.
    """
    graph = ah.Graph()
    for name in ("x", "y", "z"):
        graph.placeholder(name, default=0)
    graph.operation(name="sum")(lambda x, y, z: x + y + z)
    hooks = [
        RequestingHook(None, feeds)
        for feeds in ({"x": 1, "y": 1}, {"y": 2}, {graph.nodes["z"]: 3, "y": 3})
    ]
    first, second, third = (f"RequestingHook{number}.before_run" for number in ("", "#2", "#3"))
    says = (
        f"'x' by {first} and the caller",
        f"'y' by {first} and {second} and {third}",
        f"'z' by {third} and the caller",
    )
    async with ah.AsyncMonitoredSession(graph, hooks) as session:
        with refused(ah.errors.FeedConflictError, *says, "remove one of them") as caught:
            await session.run("sum", {graph.nodes["x"]: 9, "z": 9})
        assert isinstance(caught.value, RuntimeError)
        assert not any(hook.values for hook in hooks)


# -- functions and coroutines

CALLED: dict[str, tuple[Callable[[], Any], str]] = {
    "coroutine": (do_nothing, "give the function and its arguments, not the call"),
    "int": (lambda: 5, "5; give a function"),
    "none": (lambda: None, "None; give a function"),
}


@pytest.mark.parametrize(("make", "says"), CALLED.values(), ids=CALLED)
async def test_background_tasks_are_started_by_functions(
    make: Callable[[], Any], says: str
) -> None:
    """`start_soon` takes an `async def` and its arguments; a coroutine object, or what cannot be
    called, is refused.
    """
    async with doubling() as session:
        with invalid(says):
            session.start_soon(make())


REASONS: list[Callable[[ah.AsyncMonitoredSession, Any], object]] = [
    lambda session, wrong: session.request_stop(wrong),
    lambda session, wrong: session.request_drain(wrong),
    lambda session, wrong: session.pause(wrong),
]


@pytest.mark.parametrize("ask", REASONS, ids=["stop", "drain", "pause"])
def test_a_reason_is_a_text(ask: Callable[[Any, Any], object]) -> None:
    """Anything else is refused, and nothing is requested."""
    session = doubling()
    with invalid("reason is 3", "str"):
        ask(session, 3)
    assert (session.stop_reason, session.drain_reason, session.pause_reason) == (None, None, None)


# -- a hook of another session


async def test_a_hook_is_used_in_one_open_session() -> None:
    """A hook of an open session is refused in another one, which can be entered when the first has
    ended.
    """
    hook = Silent()
    second = doubling(hook)
    async with doubling(hook, name="first") as first:
        with refused(
            ah.errors.InvalidHookError,
            "Silent object",
            "is used in session 'first', which is open",
            "another object",
        ):
            await second.__aenter__()
        assert await first.run("loss") == 2
    async with second:
        assert await second.run("loss") == 2
