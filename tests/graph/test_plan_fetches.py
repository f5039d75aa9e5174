"""Fetches: values come back in the shape of the request; requests of hooks are merged and split."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import aiohooks as ah
from aiohooks.graph.session import RunRequest
from tests.support.checks import refused
from tests.support.hooks import PhaseHook, RequestingHook
from tests.support.sessions import counting_graph, run_session

pytestmark = pytest.mark.every_python


class Point(NamedTuple):
    """A named tuple of fetches."""

    x: Any
    y: Any


class Names(tuple[Any, ...]):
    """A tuple of another class."""


@dataclass
class Open:
    """A dataclass of fetches, with a field that is not an argument."""

    x: Any
    y: Any
    made: Any = field(default="total", init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    """One that cannot be changed."""

    x: Any


class Attribute:
    """As attrs describes a field."""

    def __init__(self, name: str) -> None:
        self.name = name


class Attrs:
    """A class as attrs makes them."""

    __attrs_attrs__ = (Attribute("x"), Attribute("y"))

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attrs) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None  # type: ignore[assignment]


OLD_POINT = namedtuple("OLD_POINT", ["x", "y"])
TOTAL_7 = Open("train", 0)
TOTAL_7.x, TOTAL_7.y, TOTAL_7.made = 7, 70, 0


@pytest.mark.parametrize(
    ("fetches", "values"),
    [
        ("x", 7),
        (["x", "loss"], [7, 70]),
        (("x",), (7,)),
        ({"a": "x", 3: ["loss"]}, {"a": 7, 3: [70]}),
        (Point("x", ["loss"]), Point(7, [70])),
        (OLD_POINT("x", "loss"), OLD_POINT(7, 70)),
        (Names(("x", "loss")), Names((7, 70))),
        (OrderedDict(b="x", a="loss"), OrderedDict(b=7, a=70)),
        (defaultdict(int, a="x"), defaultdict(int, a=7)),  # type: ignore[arg-type]
        (MappingProxyType({"a": "x"}), MappingProxyType({"a": 7})),
        (Open("x", "loss"), TOTAL_7),
        (Frozen(["x"]), Frozen([7])),
        (Attrs("x", Point("loss", "x")), Attrs(70 // 10, Point(70, 7))),
        ([], []),
        ((), ()),
        ({}, {}),
        ([[], ({},)], [[], ({},)]),
        (["x", "x", {"again": "x"}], [7, 7, {"again": 7}]),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_values_come_back_in_the_shape_of_the_fetches(fetches: Any, values: Any) -> None:
    """Lists, tuples of all kinds, mappings, dataclasses and attrs classes, nested at will, keep
    type, order and keys.

    So they do for a caller with hooks beside it, and for a hook, whatever the others ask for.
    """
    graph = counting_graph()
    raw = await ah.Session(graph).run(fetches, {"x": 7})
    hook, other = RequestingHook(fetches), RequestingHook(["loss", "total"])
    async with ah.AsyncMonitoredSession(graph, [other, hook]) as session:
        result = await session.run(fetches, {"x": 7})
        (seen,) = hook.values
    for got in (raw, result, seen.results):
        assert got == values
        assert type(got) is type(values)
    assert other.values[0].results == [70, 0]


async def test_a_defaultdict_keeps_its_factory_and_a_mapping_its_order() -> None:
    """What a mapping has besides its items is kept; the caller's own structures are left as they
    were.
    """
    session = ah.Session(counting_graph())
    result = await session.run(defaultdict[str, Any](list, {"b": "x", "a": "loss"}))
    assert result["new"] == []
    assert list(result) == ["b", "a", "new"]
    fetches = {"open": Open("x", "loss"), "list": ["x"]}
    await session.run(fetches)
    assert fetches == {"open": Open("x", "loss"), "list": ["x"]}


async def test_names_and_nodes_are_the_same_leaf() -> None:
    """Each node is computed once a run, whichever hooks fetch it, by whatever key, however
    often.
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
    async with ah.AsyncMonitoredSession(graph, [PhaseHook("before_run", ask)]) as session:
        assert [await session.run(f"c{number}") for number in range(1100)] == list(range(1100))
        assert 1 < sum(isinstance(one, RunRequest) for one in gc.get_objects()) <= 1024


async def test_none_and_empty_containers_fetch_nothing() -> None:
    """A hook that fetches nothing gets None; one that fetches an empty container gets it empty."""
    silent, none, empty, feeding = (
        RequestingHook(),
        RequestingHook(None),
        RequestingHook([]),
        RequestingHook(None, {"x": 2}),
    )
    silent.request = None
    async with ah.AsyncMonitoredSession(
        counting_graph(), [silent, none, empty, feeding]
    ) as session:
        assert await session.run("loss") == 20
    assert [hook.values[0].results for hook in (silent, none, empty, feeding)] == [
        None,
        None,
        [],
        None,
    ]


class Two(tuple[Any, ...]):
    """A tuple that is made of two arguments and so cannot be made of its items."""

    def __new__(cls, first: Any, second: Any) -> Two:
        return super().__new__(cls, (first, second))


class Keywords(Mapping[str, Any]):
    """A mapping that cannot be made of a mapping."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.mark.parametrize(
    "fetches",
    [Two("train", "total"), Keywords(a="train"), ["train", {"a": Two("x", "x")}]],
    ids=["tuple", "mapping", "nested"],
)
@pytest.mark.parametrize("by", ["raw session", "caller", "caller, beside a hook", "hook"])
async def test_a_result_that_cannot_be_made_changes_nothing(fetches: Any, by: str) -> None:
    """The values are put into the shape of the fetches before the run commits; the error names
    their class, and the hook.
    """
    graph, steps, variables = counting_graph(), ah.MemoryStepStore(), ah.Variables()
    says = (
        "the fetches have a ",
        ", and none can be made of their values: TypeError(",
        "fetch a tuple, list or dict",
    )
    if by == "raw session":
        with refused(ah.errors.FetchError, *says):
            await ah.Session(graph, global_step=steps, variables=variables).run(fetches)
    else:
        hooks = (
            []
            if by == "caller"
            else [RequestingHook("loss"), RequestingHook(fetches if by == "hook" else ["loss"])]
        )
        async with ah.AsyncMonitoredSession(
            graph, hooks, global_step=steps, variables=variables
        ) as session:
            with refused(ah.errors.FetchError, *says):
                await session.run("train" if by == "hook" else fetches)
    assert (variables.snapshot(), steps.latest.step) == ({"total": 0}, 0)


async def test_a_hook_may_fetch_a_train_operation() -> None:
    """A hook's fetches are part of the run: a train operation that only a hook fetches is run once
    a run.
    """
    async with ah.AsyncMonitoredSession(
        counting_graph(), [RequestingHook("train"), RequestingHook(["train"])]
    ) as session:
        assert await session.run([]) == []
        assert await session.run("total") == 1
        assert session.global_step.latest.step == 2


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


async def test_a_tuple_of_nodes_is_fed_together() -> None:
    """A feed's key may be a tuple, nested, whose values have the same shape; lists of values are
    fine.
    """
    graph = ah.Graph()
    for name in ("a", "b", "c"):
        graph.placeholder(name)
    graph.operation(name="all")(lambda a, b, c: (a, b, c))
    feed: dict[Any, Any] = {(("a", graph.nodes["b"]), "c"): ([1, 2], 3)}
    assert await ah.Session(graph).run("all", feed) == (1, 2, 3)
    async with ah.AsyncMonitoredSession(graph, [RequestingHook(None, feed)]) as session:
        assert await session.run("all") == (1, 2, 3)


async def test_a_step_function_is_fed_by_its_parameters() -> None:
    """A step's parameters are placeholders, those with a default need no feed, and `global_step` is
    the session's.
    """

    async def step(batch: int, scale: int = 10, *, global_step: int) -> dict[str, int]:
        return {"loss": batch * scale, "at": global_step}

    async with ah.AsyncMonitoredSession(step) as session:
        assert await session.run(["loss", "at"], {"batch": 1}) == [10, 0]
        assert await session.run(["loss", "at"], {"batch": 1, "scale": 2}) == [2, 1]
        assert await session.run({"all": "step"}, {"batch": 3}) == {"all": {"loss": 30, "at": 2}}
        assert await session.run("loss", {"loss": 5}) == 5
        assert session.global_step.latest.step == 3


# -- options


async def test_options_are_merged_into_a_new_mapping() -> None:
    """The larger number, either flag, sequences one after the other, else the later one; the given
    mappings stay.
    """
    caller = {"level": 1, "trace": False, "watch": ["a"], "name": "caller"}
    asked = {"level": 3, "trace": True, "watch": ("b",), "name": "hook"}
    hook, silent = RequestingHook(None, None, asked), RequestingHook()
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

    fetches, options = ["loss"], {"level": 1}
    await run_session(
        ah.AsyncMonitoredSession(counting_graph(), [Looks()]), 1, fetches, None, options
    )
    assert seen == [ah.SessionRunArgs(["loss"], None, {"level": 1})] * 2
    assert seen[0].fetches is fetches


@pytest.mark.parametrize("fetches", [5, object(), b"x", {"x"}, ["x", 5], {"k": None}])
async def test_what_is_no_fetch_is_refused(fetches: Any) -> None:
    """Only nodes, names and containers of them can be fetched."""
    with pytest.raises(ah.errors.FetchError):
        await ah.Session(counting_graph()).run(fetches)


@pytest.mark.parametrize("key", ["x", ("total", "x")])
async def test_a_node_is_fed_once(key: Any) -> None:
    """By name or by node, also inside a tuple."""
    graph = counting_graph()
    feeds = {key: 1 if key == "x" else (1, 2), graph.node("x"): 2}
    with refused(ah.errors.FetchError, "'x' is fed twice in one feed_dict", "leave one out"):
        await ah.Session(graph).run("train", feeds)
