"""Fetches: values come back in the shape of the request; requests of hooks are merged and split."""

from __future__ import annotations

import gc
from collections import OrderedDict, namedtuple
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import aiohooks as ah
from aiohooks.session.hook import _build_parts
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import counting_graph, run_session

pytestmark = pytest.mark.every_python


class Point(NamedTuple):
    """A named tuple of fetches."""

    x: Any
    y: Any


OLD_POINT = namedtuple("OLD_POINT", ["x", "y"])


@pytest.mark.parametrize(
    ("fetches", "values"),
    [
        ("x", 7),
        (["x", "loss"], [7, 70]),
        (("x",), (7,)),
        ({"a": "x", 3: ["loss"]}, {"a": 7, 3: [70]}),
        (Point("x", ["loss"]), Point(7, [70])),
        (OLD_POINT("x", "loss"), OLD_POINT(7, 70)),
        (OrderedDict(b="x", a="loss"), {"b": 7, "a": 70}),
        (MappingProxyType({"a": "x"}), {"a": 7}),
        ([], []),
        ((), ()),
        ({}, {}),
        ([[], ({},)], [[], ({},)]),
        (["x", "x", {"again": "x"}], [7, 7, {"again": 7}]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_values_come_back_in_the_shape_of_the_fetches(fetches: Any, values: Any) -> None:
    """Lists, tuples and named tuples, nested at will, keep type and order; a mapping of fetches
    gives a dict with its keys.

    This holds for a raw run, for a caller whose session has hooks, and for a hook, whatever other
    hooks fetch.
    """
    graph = counting_graph()
    raw = await ah.Session(graph).run(fetches, {"x": 7})
    hook = RequestingHook(fetches)
    other = RequestingHook(["loss", "total"])
    async with ah.AsyncMonitoredSession(graph, [other, hook]) as session:
        result = await session.run(fetches, {"x": 7})
        (seen,) = hook.values
    for got in (raw, result, seen.results):
        assert got == values
        assert type(got) is type(values)
    assert other.values[0].results == [70, 0]


async def test_a_mapping_keeps_its_order_and_the_caller_its_fetches() -> None:
    """The dict of values has the order of the fetches, which are left as they were."""
    session = ah.Session(counting_graph())
    fetches = {"b": "x", "a": ["loss"]}
    assert list(await session.run(fetches)) == ["b", "a"]
    assert fetches == {"b": "x", "a": ["loss"]}


async def test_names_and_nodes_are_the_same_leaf() -> None:
    """Each node is computed once in a run, however many hooks fetch it, by name or by node, and
    however often.
    """
    calls: list[int] = []
    graph = ah.Graph()

    @graph.train_op
    async def count() -> int:
        calls.append(1)
        return len(calls)

    hooks = [RequestingHook("count"), RequestingHook({"a": count, "b": ["count", count]})]
    async with ah.AsyncMonitoredSession(graph, hooks) as session:
        for number in (1, 2):
            assert await session.run(["count", count]) == [number, number]
        assert [values.results for values in hooks[0].values] == [1, 2]
        assert [values.results for values in hooks[1].values] == [
            {"a": 1, "b": [1, 1]},
            {"a": 2, "b": [2, 2]},
        ]
        assert session.global_step.latest.step == 2


async def test_what_runs_have_fetched_is_remembered_up_to_a_limit() -> None:
    """A program whose fetches differ each time does not grow with them."""

    async def ask(run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("c0")

    graph = ah.Graph()
    for number in range(1100):
        graph.placeholder(f"c{number}", default=number)
    # A hook that fetches nothing takes part in the merges that are counted below.
    hooks = [PhaseHook("before_run", ask), RequestingHook(None)]
    async with ah.AsyncMonitoredSession(graph, hooks) as session:
        assert [await session.run(f"c{number}") for number in range(1100)] == list(range(1100))
        merges = [
            held
            for held in gc.get_objects()
            if isinstance(held, partial) and held.func is _build_parts
        ]
        assert 1 < len(merges) <= 1024


# -- feeds


async def test_feeds_of_hooks_and_the_caller_are_joined() -> None:
    """Hooks and the caller may feed different nodes; every operation sees all of them."""
    graph = ah.Graph()
    for name in ("a", "b", "c"):
        graph.placeholder(name)
    graph.operation(name="all")(lambda a, b, c: (a, b, c))
    hooks = [RequestingHook("all", {"a": 1}), RequestingHook(None, {graph.nodes["b"]: 2})]
    async with ah.AsyncMonitoredSession(graph, hooks) as session:
        feed_dict = {"c": 3}
        assert await session.run("all", feed_dict) == (1, 2, 3)
        assert feed_dict == {"c": 3}
    assert hooks[0].values[0].results == (1, 2, 3)


# -- options


async def test_options_are_merged_into_a_new_mapping() -> None:
    """The larger number, either flag, sequences one after the other, else the later one; the given
    mappings stay.
    """
    caller = {"level": 1, "trace": False, "watch": ["a"], "name": "caller"}
    asked = {"level": 3, "trace": True, "watch": ("b",), "name": "hook"}
    hook = RequestingHook(None, None, asked)
    silent = RequestingHook()
    await run_session(
        ah.AsyncMonitoredSession(counting_graph(), [hook, silent]), 2, "loss", None, caller
    )
    merged = {"level": 3, "trace": True, "watch": ["a", "b"], "name": "hook"}
    for values in (*hook.values, *silent.values):
        assert values.options == merged
    assert hook.values[0].run_metadata is silent.values[0].run_metadata is not None
    assert hook.values[0].run_metadata is not hook.values[1].run_metadata
    assert (caller["watch"], asked["watch"]) == (["a"], ("b",))


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        (True, False, True),
        (False, False, False),
        (True, 5, 5),
        (5, False, 5),
        (3, 2.5, 3),
        (9, "x", "x"),
        ("x", 9, 9),
        ([1], (2,), [1, 2]),
        ((1,), [2], [1, 2]),
        ([1], "x", "x"),
        ("x", [1], [1]),
        ([1], 2, 2),
        (None, 1, 1),
        ({"a": 1}, {}, {}),
    ],
)
async def test_how_two_values_of_an_option_are_merged(old: Any, new: Any, merged: Any) -> None:
    """Values of different kinds are not merged: the later one stays."""
    hook = RequestingHook(None, None, {"option": new})
    await run_session(
        ah.AsyncMonitoredSession(counting_graph(), [hook]), 1, "loss", None, {"option": old}
    )
    (found,) = (values.options["option"] for values in hook.values if values.options is not None)
    assert found == merged
    assert type(found) is type(merged)


async def test_options_of_a_run_in_which_no_hook_asks_for_anything() -> None:
    """Hooks get the caller's options and the metadata all the same; both are None for a run without
    options.
    """
    got: list[ah.SessionRunValues] = []

    async def keep(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        got.append(run_values)

    hooks = [ah.configure(PhaseHook("after_run", keep), order=order) for order in (0, 1)]
    async with ah.AsyncMonitoredSession(counting_graph(), hooks) as session:
        await session.run("loss", None, {"level": 1})
        await session.run("loss")
    assert (
        got
        == [ah.SessionRunValues(None, {"level": 1}, {})] * 2
        + [ah.SessionRunValues(None, None, None)] * 2
    )


async def test_hooks_see_the_callers_request() -> None:
    """`original_args` are the caller's own fetches, feeds and options, the same for all hooks."""
    seen: list[ah.SessionRunArgs] = []

    class Looks(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
            seen.append(run_context.original_args)
            return ah.SessionRunArgs("total", {"x": 1})

        async def after_run(
            self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
        ) -> None:
            seen.append(run_context.original_args)

    fetches = ["loss"]
    options = {"level": 1}
    await run_session(
        ah.AsyncMonitoredSession(counting_graph(), [Looks()]), 1, fetches, None, options
    )
    assert seen == [ah.SessionRunArgs(["loss"], None, {"level": 1})] * 2
    assert seen[0].fetches is fetches
