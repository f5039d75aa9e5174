"""Every async test runs on each event loop, and leaves nothing behind on it.

Options:
    --loop both|asyncio|uvloop: the loops to run async tests on. One test alone chooses by
    `@pytest.mark.asyncio(loop_factories=["asyncio"])`.

Markers:
    leaves_residue: nothing is checked after this test, because it leaves something behind on purpose.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest
from pytest_asyncio import is_async_test

from aiohooks.testing.residue import no_residue

# A guard against hanging for ever, not a measurement; faulthandler has shown by then where the test is (pyproject.toml).
HANG_SECS = 120
HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--loop`."""
    parser.addoption("--loop", choices=("both", "asyncio", "uvloop"), default="both", help="event loops to run async tests on")


def pytest_report_header(config: pytest.Config) -> str:
    """Says on which loops the tests run, so that a missing uvloop is seen."""
    return f"event loops: {', '.join(loop_factories(config.getoption('--loop')))}" + (
        "" if HAS_UVLOOP else " (uvloop is not installed)"
    )


def loop_factories(wanted: str) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The wanted loops by name; where uvloop is missing, "both" is asyncio alone."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if wanted != "uvloop":
        found["asyncio"] = asyncio.new_event_loop
    if wanted == "uvloop" or (wanted == "both" and HAS_UVLOOP):
        import uvloop

        found["uvloop"] = uvloop.new_event_loop
    return found


def pytest_asyncio_loop_factories(config: pytest.Config) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tells pytest-asyncio to run each async test once on every loop."""
    return loop_factories(config.getoption("--loop"))


def pytest_collection_finish() -> None:
    """Puts everything imported so far out of the collector's sight: a collection after each test takes no time then."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Runs the body of an async test inside `no_residue`; what its fixtures opened is theirs to close."""
    if not is_async_test(item) or item.get_closest_marker("leaves_residue"):
        return (yield)
    # Hypothesis keeps the coroutine function that it calls for each example; so does pytest-asyncio find it.
    hypothesis = getattr(item.obj, "hypothesis", None)
    holder, name = (item, "obj") if hypothesis is None else (hypothesis, "inner_test")
    test: Callable[..., Coroutine[Any, Any, None]] = getattr(holder, name)

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(HANG_SECS), no_residue():
            await test(*args, **kwargs)

    setattr(holder, name, checked)
    try:
        return (yield)
    finally:
        setattr(holder, name, test)
