"""The pytest plugin: the check for leaks, for the async tests of any project that ask for it.

    @pytest.mark.no_leaks
    async def test_worker() -> None: ...

pytest loads this module at its start (entry point `pytest11`), so it imports nothing of the library before a test asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiohooks.testing.leaks import no_leaks

_NAME = "no_leaks"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", f"{_NAME}: the async test fails if it leaves a task, a file, a thread, an unreported error or the like behind"
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
    if check is not None:
        from aiohooks.testing.leaks import no_leaks

        if isinstance(check, no_leaks):  # not a fixture of another kind that has this name
            with inside(item, lambda: check):
                return (yield)
    return (yield)


@contextlib.contextmanager
def inside(item: pytest.Item, make_context: Callable[[], AbstractAsyncContextManager[Any]]) -> Generator[None]:
    """Let the body of an async test run inside an asynchronous context manager; a plain test is left as it is.

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

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        nonlocal ran
        ran = True
        async with make_context():
            await test(*args, **kwargs)

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
