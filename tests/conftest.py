"""Run every async test on each event loop, and check that it leaks nothing.

Options:
    --loop both|asyncio|uvloop: the loops to run async tests on. One test alone chooses by
    `@pytest.mark.asyncio(loop_factories=["asyncio"])`.
    --slow-disk SECS: each of the first calls of `fsync` in a test takes so much longer.
    --shuffle SEED: run the tests in a random order.

Markers:
    may_leak: nothing is checked after this test, because it leaks on purpose.
    turns: sessions give the loop its turns as they do outside of tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator

import pytest

from aiohooks.testing import ManualClock, no_leaks, pytest_plugin
from tests.support.waiting import HANG_SECS

SLOW_CALLS = 40  # with --slow-disk
HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None
# The extra `test` has torch for the first supported Python only (pyproject.toml); there it must not be missing.
collect_ignore_glob = ["*torch*"] if sys.version_info >= (3, 12) and importlib.util.find_spec("torch") is None else []
# These have an environment of their own, which fails without them: .ci/frameworks.
collect_ignore_glob += [
    folder
    for folder, package in {"adapters/tensorflow": "tensorflow", "adapters/callbacks": "keras"}.items()
    if importlib.util.find_spec(package) is None
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this file."""
    parser.addoption("--loop", choices=("both", "asyncio", "uvloop"), default="both", help="event loops to run async tests on")
    parser.addoption("--slow-disk", type=float, default=0.0, metavar="SECS", help="by how much each fsync takes longer")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Load the library's own plugin, as pytest does where the library is installed."""
    if not config.pluginmanager.has_plugin("aiohooks"):
        config.pluginmanager.register(pytest_plugin, "aiohooks")
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have the most tests


def pytest_report_header(config: pytest.Config) -> str:
    """Name the loops on which the tests run, so that a missing uvloop is seen."""
    return f"event loops: {', '.join(loop_factories(config.getoption('--loop')))}" + (
        "" if HAS_UVLOOP else " (uvloop is not installed)"
    )


def loop_factories(wanted: str) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the wanted loops by name; if uvloop is missing, "both" is asyncio alone."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if wanted != "uvloop":
        found["asyncio"] = asyncio.new_event_loop
    if wanted == "uvloop" or (wanted == "both" and HAS_UVLOOP):
        import uvloop

        found["uvloop"] = uvloop.new_event_loop
    return found


def pytest_asyncio_loop_factories(config: pytest.Config) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Make pytest-asyncio run each async test once on every loop."""
    return loop_factories(config.getoption("--loop"))


@pytest.hookimpl(trylast=True)  # pytest itself brings tests that share a fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what waits for servers and processes: meanwhile CI checks other things. Or shuffle the tests, if so asked.

    Tests must not depend on each other. With xdist all workers have the same order, and must have the same names.

    Raises:
        pytest.UsageError: a name has an address, which differs between processes.
    """
    if unstable := [item.nodeid for item in items if " object at 0x" in item.nodeid]:
        raise pytest.UsageError(f"give ids to the parameters of {unstable[0]}: an address differs between the workers of xdist")
    items.sort(key=lambda item: "integration" not in item.path.parts)
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """Make a clock current that the test moves."""
    with ManualClock() as clock:
        yield clock


@pytest.fixture(autouse=True)
def _no_turns_by_the_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions give the loop no turn when a machine is busy, except in tests of these turns: others would see more ticks."""
    if request.node.get_closest_marker("turns") is None:
        monkeypatch.setattr("aiohooks.session.monitored.monotonic_now", lambda: lambda: 0.0)


@pytest.fixture(autouse=True)
def _slow_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first calls of `fsync` slow, if so asked: tests must not depend on the speed of the disk."""
    slow_disk_secs, calls = request.config.getoption("--slow-disk"), itertools.count()
    if not slow_disk_secs:
        return

    def slow(sync: Callable[[int], None], fd: int) -> None:
        if next(calls) < SLOW_CALLS:
            time.sleep(slow_disk_secs)
        sync(fd)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, functools.partial(slow, getattr(os, name)))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Freeze existing objects, so that the garbage collection of `no_leaks` after each test is quick."""
    gc.collect()
    gc.freeze()


@contextlib.asynccontextmanager
async def with_time_limit(item: pytest.Item) -> AsyncIterator[None]:
    """Cancel a test that hangs, after printing its tasks: a stack of the thread shows only the loop."""
    loop = asyncio.get_running_loop()
    capture = item.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None

    def print_tasks() -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{item.nodeid} hangs:", file=sys.stderr)
            for task in asyncio.all_tasks(loop):
                task.print_stack(file=sys.stderr)

    timer = loop.call_later(HANG_SECS, print_tasks)
    try:
        async with asyncio.timeout(HANG_SECS + 1):
            yield
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def checked(item: pytest.Item) -> AsyncIterator[None]:
    """Limit the time of a test, and check that it leaks nothing."""
    async with with_time_limit(item), no_leaks():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run the body of an async test inside `no_leaks`; fixtures close what they opened."""
    if item.get_closest_marker("may_leak"):
        return (yield)
    with pytest_plugin.inside(item, functools.partial(checked, item)):
        return (yield)
