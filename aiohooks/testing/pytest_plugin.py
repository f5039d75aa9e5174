"""The pytest plugin: the check for leaks, and exploration, for the async tests of any project that ask for them.

    @pytest.mark.no_leaks
    async def test_worker() -> None: ...

    @pytest.mark.explore(seeds=200)
    async def test_transfer() -> None: ...

pytest loads this module at its start (entry point `pytest11`), so it imports nothing of the library before a test asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiohooks.testing.leaks import no_leaks

_NAME = "no_leaks"
_Body = Callable[..., Awaitable[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that repeats what an exploration has found."""
    text = "run the tests marked with `explore` under these disturbances alone, as the message of a failed one says"
    parser.getgroup("aiohooks").addoption("--explore-replay", metavar="DISTURBANCES", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers", f"{_NAME}: the async test fails if it leaves a task, a file, a thread, an unreported error or the like behind"
    )
    config.addinivalue_line(
        "markers", "explore(**arguments): the body of the async test runs under many schedules, see aiohooks.testing.exploration"
    )


@pytest.fixture(name=_NAME)
def no_leaks_of_test() -> no_leaks:
    """The check for leaks that the async test runs in; override it to check more: `return no_leaks(stores=[store])`."""
    from aiohooks.testing.leaks import no_leaks

    return no_leaks()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let the marker ask for the fixture."""
    if isinstance(item, pytest.Function) and item.get_closest_marker(_NAME) and _NAME not in item.fixturenames:
        item.fixturenames.append(_NAME)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of an async test that asks for it in the check; its fixtures close what they opened."""
    check = getattr(item, "funcargs", {}).get(_NAME)
    with contextlib.ExitStack() as stack:
        if (marker := item.get_closest_marker("explore")) is not None:
            stack.enter_context(replaced_body(item, functools.partial(_explored, item, marker)))
        if check is not None:
            from aiohooks.testing.leaks import no_leaks

            if isinstance(check, no_leaks):  # not a fixture of another kind that has this name
                stack.enter_context(inside(item, lambda: check))
        return (yield)


def _explored(item: pytest.Item, marker: pytest.Mark, test: _Body) -> _Body:
    async def explored(*args: Any, **keywords: Any) -> None:
        from aiohooks.errors import add_note
        from aiohooks.testing.exploration import ExplorationError, explore

        replay: str | None = item.config.getoption("--explore-replay")
        try:
            await explore(functools.partial(test, *args, **keywords), *marker.args, replay=replay, **marker.kwargs)
        except ExplorationError as error:
            add_note(error, f"again: pytest '{item.nodeid}' --explore-replay='{error.replay}'")
            raise

    return explored


def inside(item: pytest.Item, make_context: Callable[[], AbstractAsyncContextManager[Any]]) -> AbstractContextManager[None]:
    """Let the body of an async test run inside an asynchronous context manager; see `replaced_body`."""

    def in_context(test: _Body) -> _Body:
        async def checked(*args: Any, **keywords: Any) -> None:
            async with make_context():
                await test(*args, **keywords)

        return checked

    return replaced_body(item, in_context)


@contextlib.contextmanager
def replaced_body(item: pytest.Item, replacement: Callable[[_Body], _Body]) -> Generator[None]:
    """Let something else run in place of the body of an async test; a plain test is left as it is.

    It works with pytest-asyncio, with the plugin of anyio, and for the methods of `unittest.IsolatedAsyncioTestCase`.

    Raises:
        RuntimeError: the test passed, and its body did not run there.
    """
    holder, name = _place_of_test(item)
    test = getattr(holder, name, None)
    if not inspect.iscoroutinefunction(test):
        yield
        return
    ran = False

    body = replacement(test)

    @functools.wraps(test)
    async def checked(*args: Any, **keywords: Any) -> None:
        nonlocal ran
        ran = True
        await body(*args, **keywords)

    setattr(holder, name, checked)
    try:
        yield
    finally:
        setattr(holder, name, test)
    if not ran:
        raise RuntimeError(f"{item.nodeid} was not checked: what runs its coroutine function does not take it from the test item")


def _place_of_test(item: pytest.Item) -> tuple[object, str]:
    """Return the object, and its attribute, from which the function of a test is taken when it is called."""
    test, instance = getattr(item, "obj", None), getattr(item, "instance", None)
    if isinstance(instance, unittest.TestCase):
        return instance, item.name
    # Hypothesis keeps the coroutine function that it calls for each example.
    hypothesis = getattr(test, "hypothesis", None)
    return (item, "obj") if hypothesis is None else (hypothesis, "inner_test")
