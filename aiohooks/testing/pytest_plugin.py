"""The pytest plugin: the check for leaks, and exploration, for the async tests of any project that
ask for them.

    @pytest.mark.aiohooks_no_leaks
    async def test_worker() -> None: ...

    @pytest.mark.aiohooks_explore(seeds=200)
    async def test_transfer() -> None: ...

pytest loads this module (entry point `pytest11`) in every project in whose environment the library
is installed. So each name that it adds to pytest begins with `aiohooks`, and until a test asks for
it, it wraps nothing and imports nothing more.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aiohooks.testing.leaks import no_leaks

NO_LEAKS = "aiohooks_no_leaks"
"""The marker, and the fixture."""
EXPLORE = "aiohooks_explore"
REPLAY = "--aiohooks-explore-replay"
_RUNNER = "aiohooks_runner"
_Body = Callable[..., Awaitable[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that repeats what an exploration has found."""
    text = (
        f"run the tests marked with `{EXPLORE}` under these disturbances alone, as the message of a"
        " failed one says"
    )
    parser.getgroup("aiohooks").addoption(REPLAY, metavar="DISTURBANCES", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line(
        "markers",
        f"{NO_LEAKS}: the async test fails if it leaves a task, a file, a thread, an unreported"
        " error or the like behind",
    )
    config.addinivalue_line(
        "markers",
        f"{EXPLORE}(**arguments): the body of the async test runs under many schedules, see"
        " aiohooks.testing.exploration",
    )


@pytest.fixture
def aiohooks_no_leaks() -> no_leaks:
    """The check for leaks that the async test runs in. Override it to check more: `return
    no_leaks(stores=[store])`.
    """
    from aiohooks.testing.leaks import no_leaks

    return no_leaks()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Add the fixture to marked tests, and register the runner if a test asks for it. All marks
    have been made by now.
    """
    asking = [item for item in session.items if _asks(item)]
    for item in asking:
        if isinstance(item, pytest.Function) and item.get_closest_marker(NO_LEAKS) is not None:
            _add_fixture(item)
    plugins = session.config.pluginmanager
    if asking and not plugins.has_plugin(_RUNNER):
        plugins.register(_make_runner(), _RUNNER)


def _asks(item: pytest.Item) -> bool:
    if NO_LEAKS in getattr(item, "fixturenames", ()):
        return True
    return any(marker.name in (NO_LEAKS, EXPLORE) for marker in item.iter_markers())


def _add_fixture(item: pytest.Function) -> None:
    if NO_LEAKS not in item.fixturenames:
        # A new list, because all tests of a parametrized function share the old one.
        item.fixturenames = [*item.fixturenames, NO_LEAKS]


def _make_runner() -> object:
    class Runner:
        # In a function, because pluggy rejects `wrapper=True` before 1.2, and this module must load
        # with it.
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
            with contextlib.ExitStack() as stack:
                marker = item.get_closest_marker(EXPLORE)
                if marker is not None:
                    stack.enter_context(
                        replaced_body(item, functools.partial(_explored, item, marker))
                    )
                fixtures: dict[str, Any] = getattr(item, "funcargs", {})
                if NO_LEAKS in fixtures:
                    stack.enter_context(inside(item, lambda: fixtures[NO_LEAKS]))
                return (yield)

    return Runner()


def _explored(item: pytest.Item, marker: pytest.Mark, test: _Body) -> _Body:
    async def explored(*args: Any, **keywords: Any) -> None:
        from aiohooks.errors import add_note
        from aiohooks.testing.exploration import ExplorationError, explore

        replay: str | None = item.config.getoption(REPLAY)
        try:
            await explore(
                functools.partial(test, *args, **keywords),
                *marker.args,
                replay=replay,
                **marker.kwargs,
            )
        except ExplorationError as error:
            add_note(error, f"again: pytest '{item.nodeid}' {REPLAY}='{error.replay}'")
            raise

    return explored


def inside(
    item: pytest.Item, make_context: Callable[[], AbstractAsyncContextManager[Any]]
) -> AbstractContextManager[None]:
    """Let the body of an async test run inside an asynchronous context manager. See
    `replaced_body`.
    """

    def in_context(test: _Body) -> _Body:
        async def checked(*args: Any, **keywords: Any) -> None:
            async with make_context():
                await test(*args, **keywords)

        return checked

    return replaced_body(item, in_context)


@contextlib.contextmanager
def replaced_body(item: pytest.Item, replacement: Callable[[_Body], _Body]) -> Generator[None]:
    """Let something else run in place of the body of an async test. A plain test is left as it is.

    It works with pytest-asyncio, with the plugin of anyio, and for the methods of
    `unittest.IsolatedAsyncioTestCase`.

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
    # Silence would look like a test that was checked.
    if not ran:
        raise RuntimeError(
            f"{item.nodeid} was not checked: what runs its coroutine function does not take it from"
            " the test item"
        )


def _place_of_test(item: pytest.Item) -> tuple[object, str]:
    """Return the object, and its attribute, from which the function of a test is taken when it is
    called.
    """
    from unittest import TestCase  # which pytest imports only for a project that uses it

    test = getattr(item, "obj", None)
    instance = getattr(item, "instance", None)
    if isinstance(instance, TestCase):
        return instance, item.name
    # Hypothesis keeps the coroutine function that it calls for each example.
    hypothesis = getattr(test, "hypothesis", None)
    return (item, "obj") if hypothesis is None else (hypothesis, "inner_test")
