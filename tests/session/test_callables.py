"""Functions where coroutines are meant, coroutines where functions are meant, and other things that cannot be called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.sessions import counting_graph, double


async def nothing() -> None:
    """Does nothing."""


def make_coroutine() -> Coroutine[Any, Any, None]:
    return nothing()


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
    """`run_step_fn` takes an `async def` with one parameter; what else it is given is refused."""
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


@pytest.mark.parametrize("feeds", [5, object()], ids=["int", "object"])
async def test_feeds_can_be_iterated(feeds: Any) -> None:
    """`steps` refuses feeds that are nothing to iterate over."""
    async with ah.AsyncMonitoredSession(double) as session:
        with refused(ah.errors.InvalidArgumentError, f"feeds is {feeds!r}", "sync or async"):
            session.steps("loss", feeds=feeds)


@pytest.mark.parametrize("main", [5, lambda: 5], ids=["int", "plain"])
def test_run_takes_a_coroutine_function(main: Any) -> None:
    """`aiohooks.run` refuses what is no coroutine function, before there is a loop."""
    with refused(ah.errors.InvalidArgumentError, f"main is {main!r}", "function"):
        ah.run(main)


def test_run_takes_the_function_and_not_its_coroutine() -> None:
    """`run(main())` is told to be written `run(main)`; the coroutine is closed, not left un-awaited."""

    async def main() -> None: ...

    coro: Any = main()
    with refused(
        ah.errors.InvalidArgumentError, "main is <coroutine object", "give the function and its arguments, not the call"
    ):
        ah.run(coro)


def test_run_runs_the_function() -> None:
    """`run(main, *args)` returns what `main(*args)` returns."""

    async def main(first: int, second: int) -> int:
        await asyncio.sleep(0)
        return first + second

    assert ah.run(main, 1, 2) == 3


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
