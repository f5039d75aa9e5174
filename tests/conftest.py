"""Run every async test on each event loop, and check that it leaks nothing.

What needs a package or a program that is missing is left out, and the run ends with what that was.

Options:
    --quick: a sample of the tests, on asyncio alone: see `sampled`.
    --of-the-day DATE: slow tests, and tests on uvloop, each on every third day, with two cases.
    --nothing-missing: what would be left out fails.
    --not-passed-in=FOLDER: not those tests that passed in the last run in this folder.
    --loop both|asyncio|uvloop: the loops to run async tests on. One test alone chooses by
        `@pytest.mark.asyncio(loop_factories=["asyncio"])`.
    --tasks plain|eager|python: what `create_task` of a loop makes: asyncio's tasks, eager ones
        (Python 3.12), or ones that are written in Python.
    --slow-disk SECS: each of the first calls of `fsync` in a test takes so much longer.
    --shuffle SEED: run the tests in a random order, and let calls in threads begin and end late, by
        a random time.

Markers:
    slow: takes seconds; `sample`: one of its kind, which --quick runs as well.
    may_leak: nothing is checked after this test, because it leaks on purpose.
    plain_tasks: left out where --tasks makes others.
    turns: sessions give the loop its turns as they do outside of tests.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from aiohooks.testing import ManualClock, no_leaks
from tests.support.needs import missing
from tests.support.waiting import HANG_SECS

SLOW_CALLS = 40  # with --slow-disk
LATE_SECS = (0, 0, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.01)  # with --shuffle
HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None
# These have an environment of their own, which fails without them: the session `frameworks` of CI.
collect_ignore_glob = [
    folder
    for folder, package in {
        "adapters/tensorflow": "tensorflow",
        "frameworks/families": "taskiq",
        "frameworks/services": "quart",
        "frameworks/assistants": "strands",
    }.items()
    if importlib.util.find_spec(package) is None
]
QUICK_CASES = 4  # with --quick
DAILY_CASES = 2  # with --of-the-day
DAYS = 3  # in which --of-the-day has run every test
PROJECT = (
    Path(__file__).parent / "project"
)  # tests of the repository: its pages, its style, its tools
LEFT_OUT = "left out: "
PASSED = "aiohooks/passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this file."""
    parser.addoption(
        "--loop",
        choices=("both", "asyncio", "uvloop"),
        default="both",
        help="event loops to run async tests on",
    )
    parser.addoption(
        "--tasks",
        choices=("plain", "eager", "python"),
        default="plain",
        help="what create_task makes",
    )
    parser.addoption("--quick", action="store_true", help="only a sample of the tests, on asyncio")
    parser.addoption(
        "--of-the-day",
        metavar="DATE",
        help="of slow tests, and on uvloop, those whose day it is",
    )
    parser.addoption(
        "--nothing-missing",
        action="store_true",
        help="fail where a package or a program is missing",
    )
    parser.addoption(
        "--not-passed-in",
        type=Path,
        metavar="FOLDER",
        help="leave out what passed in the last run there",
    )
    parser.addoption(
        "--slow-disk",
        type=float,
        default=0.0,
        metavar="SECS",
        help="by how much each fsync takes longer",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="a random order of tests, and of what threads do",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose what `--quick` implies."""
    if config.getoption("--quick"):
        config.option.loop = "asyncio"
        if config.option.durations is None:
            config.option.durations = 10
            config.option.durations_min = 1.0
    config.option.loadscopereorder = (
        False  # pytest-xdist would begin with the files that have the most tests
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of the repository with --quick."""
    return True if collection_path == PROJECT and config.getoption("--quick") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `--dist loadfile`, let one process run all files whose tests use a Ray cluster: it is
    the only one of the run.
    """
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def uses_ray(file: str) -> bool:
        return (
            re.search(
                "ray_cluster import .*cluster", (config.rootpath / file).read_text(encoding="utf-8")
            )
            is not None
        )

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "Ray" if uses_ray(file) else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the loops on which the tests run, so that a missing uvloop is seen, and what is run
    elsewhere.
    """
    loops = ", ".join(loop_factories(config.getoption("--loop"))) + (
        "" if HAS_UVLOOP else " (uvloop is not installed)"
    )
    return [
        f"event loops: {loops}",
        *(f"run by the session frameworks of CI: tests/{folder}" for folder in collect_ignore_glob),
    ]


def loop_factories(wanted: str) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the wanted loops by name; if uvloop is missing, "both" is asyncio alone."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    if wanted != "uvloop":
        found["asyncio"] = asyncio.new_event_loop
    if wanted == "uvloop" or (wanted == "both" and HAS_UVLOOP):
        import uvloop

        found["uvloop"] = uvloop.new_event_loop
    return found


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Make pytest-asyncio run each async test once on every loop; what the command line starts has
    a loop of its own.
    """
    found = loop_factories(config.getoption("--loop"))
    if (tasks := config.getoption("--tasks")) != "plain":
        found = {
            name: functools.partial(_loop_with_tasks, make, tasks) for name, make in found.items()
        }
    return dict(itertools.islice(found.items(), 1)) if "command_line" in item.path.parts else found


def _loop_with_tasks(
    make: Callable[[], asyncio.AbstractEventLoop], tasks: str
) -> asyncio.AbstractEventLoop:
    loop = make()
    names = vars(asyncio.tasks)
    python_task: Any = names["_PyTask"]
    # Since Python 3.14 such tasks are registered where `current_task` and `all_tasks` look only if
    # nothing is in C.
    names |= {
        f"_py_{name.removeprefix('_c_')}": names[name] for name in names if name.startswith("_c_")
    }
    factory = lambda loop, coro, **options: python_task(coro, loop=loop, **options)  # noqa: E731
    loop.set_task_factory(vars(asyncio)["eager_task_factory"] if tasks == "eager" else factory)
    return loop


@pytest.hookimpl(trylast=True)  # pytest itself brings tests that share a fixture together
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what waits for servers and processes: meanwhile CI checks other things. Or shuffle
    the tests, if so asked.

    Tests must not depend on each other. With xdist all workers have the same order, and must have
    the same names.

    Raises:
        pytest.UsageError: a name has an address, which differs between processes.
    """
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"give ids to the parameters of {unstable[0]}: an address differs between the workers"
            " of xdist"
        )
    passed = passed_in(config.getoption("--not-passed-in"))
    chosen = [
        item
        for item in items
        if is_chosen(item) and not {item.nodeid, without_loop(item.nodeid)} & passed
    ]
    if config.getoption("--quick"):
        sample = sampled(chosen)
        chosen = [item for item in chosen if item in sample]
    if (date := config.getoption("--of-the-day")) is not None:
        sample = cases_of_the_day(chosen, date)
        chosen = [item for item in chosen if item in sample]
    config.hook.pytest_deselected(items=[*{*items}.difference(chosen)])
    items[:] = chosen
    items.sort(key=lambda item: "integration" not in item.path.parts)
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Leave out a file that imports a package which is not installed."""
    report = yield
    leave_out(collector, report, report.call.excinfo)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave out a test that needs a package or a program which is not installed."""
    report = yield
    leave_out(item, report, call.excinfo)
    return report


def leave_out(
    node: pytest.Item | pytest.Collector,
    report: pytest.CollectReport | pytest.TestReport,
    raised: pytest.ExceptionInfo[BaseException] | None,
) -> None:
    """Turn a failure into a skip if something is missing, unless nothing may be."""
    if not report.failed or raised is None or node.config.getoption("--nothing-missing"):
        return
    what = missing(raised.value)
    if what is not None:
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"Skipped: {LEFT_OUT}{what}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how it is run."""
    left_out: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.getreports("skipped"):
        kind = "test files" if isinstance(report, pytest.CollectReport) else "tests"
        what = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if LEFT_OUT in what:
            left_out[f"{what.partition(LEFT_OUT)[2]}, {kind}"] += 1
    lines = [f"{what}: {count}" for what, count in sorted(left_out.items())]
    if terminalreporter.config.getoption("--quick"):
        lines.append(
            f"--quick: all but {QUICK_CASES} cases of each test, most slow tests, tests/project and"
            " uvloop"
        )
    if (date := terminalreporter.config.getoption("--of-the-day")) is not None:
        lines.append(
            f"--of-the-day {date}: of slow tests, and on uvloop, two of three, and all but"
            f" {DAILY_CASES} cases"
        )
    if (folder := terminalreporter.config.getoption("--not-passed-in")) is not None:
        lines.append(f"--not-passed-in: {len(passed_in(folder)):,} tests had passed before")
    if lines:
        terminalreporter.section("left out")
        terminalreporter.write_line(
            "\n".join([*lines, "CONTRIBUTING.md says how all of it is run"])
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the names of the tests that passed, for `--not-passed-in`."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if (
        reporter is not None
        and hasattr(session.config, "cache")
        and session.config.getoption("--not-passed-in") is None
    ):
        session.config.cache.set(
            PASSED, [report.nodeid for report in reporter.getreports("passed")]
        )


def passed_in(folder: Path | None) -> frozenset[str]:
    """Return the names of the tests that passed in the last run in a folder, if there was one."""
    file = folder / ".pytest_cache" / "v" / PASSED if folder is not None else None
    return frozenset(
        json.loads(file.read_text(encoding="utf-8")) if file is not None and file.exists() else ()
    )


def without_loop(name: str) -> str:
    """Return the name of a test on asyncio where that is the only loop."""
    return name.replace("[asyncio-", "[").removesuffix("[asyncio]")


def is_chosen(item: pytest.Item) -> bool:
    """Return whether the options choose a test: its loop, if that is a parameter of its own, and
    how slow it is.
    """
    own_loop = (
        item.callspec.params.get("loop")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else None
    )
    if isinstance(own_loop, str) and own_loop not in loop_factories(
        item.config.getoption("--loop")
    ):
        return False
    return not item.get_closest_marker("plain_tasks") or item.config.getoption("--tasks") == "plain"


def sampled(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the sample of --quick: a few cases of each fast test, and one of each slow test that
    is marked `sample`.

    They are chosen at random, the same in each run.
    """
    tests = collections.defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.get_closest_marker("slow") or item.get_closest_marker("sample"):
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen = set[pytest.Item]()
    for name, cases in tests.items():
        count = 1 if cases[0].get_closest_marker("slow") else QUICK_CASES
        chosen.update(random.Random(name).sample(cases, min(count, len(cases))))
    return chosen


def cases_of_the_day(items: Iterable[pytest.Item], date: str) -> set[pytest.Item]:
    """Return all fast tests on asyncio; each of the others on every third day, with a few cases."""
    tests = collections.defaultdict[str, list[pytest.Item]](list)
    chosen = set[pytest.Item]()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if item.get_closest_marker("slow") or case.startswith("uvloop"):
            tests[name].append(item)
        else:
            chosen.add(item)
    day = datetime.date.fromisoformat(date).toordinal()
    for name, cases in tests.items():
        if (zlib.crc32(name.encode()) + day) % DAYS == 0:
            choice = random.Random(f"{name} {date}")
            chosen.update(choice.sample(cases, min(DAILY_CASES, len(cases))))
    return chosen


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """Make a clock current that the test moves."""
    with ManualClock() as clock:
        yield clock


@pytest.fixture(autouse=True)
def _no_turns_by_the_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions give the loop no turn when a machine is busy, except in tests of these turns:
    others would see more ticks.
    """
    if request.node.get_closest_marker("turns") is None:
        monkeypatch.setattr("aiohooks.session.lifecycle.monotonic_now", lambda: lambda: 0.0)


@pytest.fixture(autouse=True)
def _slow_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first calls of `fsync` slow, if so asked: tests must not depend on the speed of the
    disk.
    """
    slow_disk_secs, calls = request.config.getoption("--slow-disk"), itertools.count()
    if not slow_disk_secs:
        return

    def slow(sync: Callable[[int], None], fd: int) -> None:
        if next(calls) < SLOW_CALLS:
            time.sleep(slow_disk_secs)
        sync(fd)

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, functools.partial(slow, getattr(os, name)))


@pytest.fixture(autouse=True)
def _late_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls in threads begin and end at other moments, if so asked: tests must not count turns
    of the loop meanwhile.
    """
    if (seed := request.config.getoption("--shuffle")) is None:
        return
    run_sync, chosen = anyio.to_thread.run_sync, random.Random(f"{seed} {request.node.nodeid}")

    def late(call: Callable[..., object], *args: object) -> object:
        time.sleep(chosen.choice(LATE_SECS))
        try:
            return call(*args)
        finally:
            time.sleep(chosen.choice(LATE_SECS))

    monkeypatch.setattr(
        anyio.to_thread, "run_sync", lambda *args, **options: run_sync(late, *args, **options)
    )


@pytest.fixture(autouse=True)
def _quick_collections() -> None:
    """Freeze what imports have made, so that the garbage collections of `no_leaks` and of `explore`
    are quick.
    """
    freeze(len(sys.modules))


@functools.cache
def freeze(imported: int) -> None:
    """Freeze all objects, once for each number of imported modules."""
    gc.collect()
    gc.freeze()


@contextlib.asynccontextmanager
async def with_time_limit(item: pytest.Item) -> AsyncIterator[None]:
    """Cancel a test that hangs, after printing its tasks: a stack of the thread shows only the
    loop.
    """
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
    # Hypothesis keeps the coroutine function that it calls for each example.
    holder: Any = getattr(getattr(item, "obj", None), "hypothesis", item)
    name = "obj" if holder is item else "inner_test"
    test = getattr(holder, name, None)
    if item.get_closest_marker("may_leak") or not inspect.iscoroutinefunction(test):
        return (yield)

    @functools.wraps(test)
    async def inside(*args: Any, **keywords: Any) -> None:
        async with checked(item):
            await test(*args, **keywords)

    setattr(holder, name, inside)
    try:
        return (yield)
    finally:
        setattr(holder, name, test)
