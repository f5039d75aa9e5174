"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import entry_points

import pytest

from tests.support.source import ROOT

pytest_plugins = ["pytester"]

MODULE = "aiohooks.testing.pytest_plugin"

HEADER = """
    import asyncio, unittest
    import pytest
    from aiohooks import MemoryStepStore
    from aiohooks.testing import no_leaks

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    async def leak():
        leak.task = asyncio.ensure_future(asyncio.Event().wait())
        await asyncio.sleep(0)
"""


OPTIONS = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")


def loading() -> list[str]:
    """Return the options that load the plugin where pytest does not find its entry point."""
    is_installed = any(
        entry_point.value == MODULE for entry_point in entry_points(group="pytest11")
    )
    return [] if is_installed else ["-p", MODULE]


def run(pytester: pytest.Pytester, code: str, *options: str) -> pytest.RunResult:
    """Run pytest on a file with these tests; the plugin is loaded as by its entry point, also where
    that is not installed.
    """
    pytester.makepyfile(textwrap.dedent(HEADER) + textwrap.dedent(code))
    return pytester.runpytest(*loading(), "--strict-markers", *OPTIONS, *options)


LEAKING = """
    @pytest.mark.aiohooks_no_leaks
    {mark}
    async def test_leaks():
        await leak()

    @pytest.mark.aiohooks_no_leaks
    {mark}
    async def test_is_clean():
        await asyncio.sleep(0)

    {mark}
    async def test_does_not_ask():
        await leak()
"""


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_a_marked_test_must_not_leak(pytester: pytest.Pytester, mark: str) -> None:
    """Under pytest-asyncio and anyio's plugin the test that leaks fails, with the leak; one that
    does not ask is left alone.
    """
    result = run(pytester, LEAKING.format(mark=mark))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: leaks:*",
            (
                "*- task 'Task-*' still runs, started at leak"
                " (*test_a_marked_test_must_not_leak.py:11), waits at Event.wait (*"
            ),
        ]
    )


def test_the_fixture_does_the_same(pytester: pytest.Pytester) -> None:
    """A test that has the fixture runs in the check, and gets it."""
    result = run(
        pytester,
        """
        @pytest.mark.asyncio
        async def test_leaks(aiohooks_no_leaks):
            await leak()

        @pytest.mark.asyncio
        async def test_is_clean(aiohooks_no_leaks):
            assert isinstance(aiohooks_no_leaks, no_leaks) and aiohooks_no_leaks.leaks == ()
        """,
    )
    result.assert_outcomes(passed=1, failed=1)


def test_a_whole_project_may_ask(pytester: pytest.Pytester) -> None:
    """`usefixtures` of the configuration checks each async test; plain tests and other fixtures are
    as they were.
    """
    pytester.makeini("[pytest]\nasyncio_mode = auto\nusefixtures = aiohooks_no_leaks\n")
    result = run(
        pytester,
        """
        async def test_leaks():
            await leak()

        def test_plain():
            pass

        @pytest.mark.skip
        async def test_skipped():
            pass
        """,
    )
    result.assert_outcomes(passed=1, failed=1, skipped=1)


def test_the_fixture_can_be_overridden(pytester: pytest.Pytester) -> None:
    """A project's own fixture of that name says what is checked, also for the marker: here the
    waiters of a store.
    """
    result = run(
        pytester,
        """
        @pytest.fixture
        def store():
            return MemoryStepStore()

        @pytest.fixture
        def aiohooks_no_leaks(store):
            return no_leaks(stores=[store])

        @pytest.mark.aiohooks_no_leaks
        @pytest.mark.asyncio
        async def test_leaks(store):
            changes = store.changes()
            await anext(changes)
            waiting = anext(changes).__await__()
            next(waiting)
            test_leaks.kept = changes, waiting
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*waiter(s) parked in <MemoryStepStore*"])


def test_an_overriding_fixture_returns_a_check(pytester: pytest.Pytester) -> None:
    """Where it returns none, the test fails: it would not be checked."""
    result = run(
        pytester,
        """
        @pytest.fixture
        def aiohooks_no_leaks():
            no_leaks()

        @pytest.mark.aiohooks_no_leaks
        @pytest.mark.asyncio
        async def test_leaks():
            await leak()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*TypeError: 'NoneType' object does not support the asynchronous context manager"
            " protocol*"
        ]
    )


def test_one_set_of_parameters_may_ask(pytester: pytest.Pytester) -> None:
    """A mark of one set of parameters is for that alone, although all of them are one function."""
    result = run(
        pytester,
        """
        marked = pytest.param(2, marks=pytest.mark.aiohooks_no_leaks)

        @pytest.mark.parametrize("number", [1, marked, 3])
        @pytest.mark.asyncio
        async def test_leaks(number):
            await leak()
        """,
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["FAILED *::test_leaks[[]2[]]*"])


def test_a_project_may_mark_its_tests(pytester: pytest.Pytester) -> None:
    """A mark that a `conftest.py` adds to a collected test is as good as one in its file."""
    pytester.makeconftest("""
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker("aiohooks_no_leaks")
        """)
    result = run(
        pytester,
        """
        @pytest.mark.asyncio
        async def test_leaks():
            await leak()
        """,
    )
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_each_example_of_hypothesis_is_checked(pytester: pytest.Pytester, mark: str) -> None:
    """The example that leaks is found; the ones before and behind it are checked by themselves."""
    result = run(
        pytester,
        f"""
        from hypothesis import given, settings, strategies

        @pytest.mark.aiohooks_no_leaks
        {mark}
        @settings(max_examples=20, database=None, deadline=None)
        @given(number=strategies.integers(0, 3))
        async def test_leaks(number):
            if number == 2:
                await leak()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: leaks:*", "*number=2*"])


def test_methods_of_an_async_test_case_are_checked(pytester: pytest.Pytester) -> None:
    """Methods of `unittest.IsolatedAsyncioTestCase` too, where `unittest` itself runs the
    coroutine.
    """
    result = run(
        pytester,
        """
        @pytest.mark.aiohooks_no_leaks
        class TestWorker(unittest.IsolatedAsyncioTestCase):
            async def test_leaks(self):
                await leak()

            async def test_is_clean(self):
                await asyncio.sleep(0)

            def test_plain(self):
                pass
        """,
    )
    result.assert_outcomes(passed=2, failed=1)


def test_a_test_that_could_not_be_checked_fails(pytester: pytest.Pytester) -> None:
    """Another plugin may run a coroutine function that it has kept: a check that did not happen is
    not passed over.
    """
    pytester.makeconftest("""
        import asyncio

        def pytest_collection_modifyitems(items):
            for item in items:
                item.kept = item.obj

        def pytest_pyfunc_call(pyfuncitem):
            asyncio.run(pyfuncitem.kept())
            return True
        """)
    result = run(
        pytester,
        """
        @pytest.mark.aiohooks_no_leaks
        async def test_leaks():
            await leak()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: *::test_leaks was not checked*"])


def test_the_error_of_a_test_is_reported_as_it_is(pytester: pytest.Pytester) -> None:
    """A test that fails fails with its own error; the leaks are a note."""
    result = run(
        pytester,
        """
        @pytest.mark.aiohooks_no_leaks
        @pytest.mark.asyncio
        async def test_fails():
            await leak()
            raise KeyError("own")
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*KeyError: 'own'*", "*leaks:*"])


def test_the_entry_point_names_the_plugin() -> None:
    """The plugin is found by pytest in an environment in which the library is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"aiohooks": MODULE}


def test_the_plugin_loads_next_to_nothing() -> None:
    """Loaded at each start of pytest, for every project, it imports of the library only itself, and
    not asyncio or anyio.
    """
    program = (
        "import sys, pytest, json; before = set(sys.modules);"
        f"import {MODULE};"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    loaded = json.loads(found)
    assert [name for name in loaded if name.startswith("aiohooks")] == LOADED
    assert not {"asyncio", "anyio", "unittest"} & {name.partition(".")[0] for name in loaded}


LOADED = [
    "aiohooks",
    "aiohooks._core",
    "aiohooks._core.lazy",
    "aiohooks.errors",
    "aiohooks.testing",
    MODULE,
]

OF_ANOTHER_PROJECT = {
    "pytest.ini": (
        """
        [pytest]
        asyncio_mode = auto
        markers =
            explore: exploratory tests of this project
            no_leaks: tests of the plumbing
    """
    ),
    "conftest.py": (
        f"""
        import sys
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--explore-replay", default="none of aiohooks's")

        @pytest.fixture
        def no_leaks():
            return "a pipe"

        @pytest.fixture
        def hooks_of_aiohooks(pytestconfig):
            plugins = pytestconfig.pluginmanager
            callers = plugins.get_hookcallers(sys.modules["{MODULE}"])
            return {{caller.name for caller in callers}}
    """
    ),
    "test_project.py": (
        f"""
        import sys
        import unittest
        import pytest

        calls = []

        @pytest.mark.explore
        async def test_explores(tmp_path):
            calls.append(tmp_path)
            (tmp_path / "found").mkdir()

        @pytest.mark.explore("area 51")
        async def test_has_arguments():
            pass

        @pytest.mark.no_leaks(of="water")
        async def test_plumbing(no_leaks, request):
            assert no_leaks == "a pipe"
            assert request.fixturenames.count("no_leaks") == 1

        class TestOld(unittest.TestCase):
            @pytest.mark.no_leaks
            def test_plumbing(self):
                pass

        def test_each_ran_as_it_is(pytestconfig):
            assert len(calls) == 1
            assert pytestconfig.getoption("--explore-replay") == "none of aiohooks's"

        def test_the_plugin_does_nothing(hooks_of_aiohooks):
            assert hooks_of_aiohooks
            around_tests = ("pytest_runtest", "pytest_fixture", "pytest_pyfunc")
            assert not [name for name in hooks_of_aiohooks if name.startswith(around_tests)]
            assert [name for name in sorted(sys.modules) if name.startswith("aiohooks")] == {LOADED}
    """
    ),
}


def test_another_project_has_names_of_its_own(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markers, fixtures and options of other projects are theirs: where the plugin is only loaded,
    it takes no part in tests.
    """
    for name, text in OF_ANOTHER_PROJECT.items():
        pytester.path.joinpath(name).write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Other plugins of the environment may have warnings of their own.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = ("-p", MODULE, "-p", "pytest_asyncio.plugin")
    result = pytester.runpytest_subprocess(
        *plugins, "--strict-markers", "--strict-config", "-W", "error", *OPTIONS
    )
    result.assert_outcomes(passed=6)


def test_each_name_of_the_plugin_is_the_librarys(pytester: pytest.Pytester) -> None:
    """A fixture, marker or option that pytest lists only with the plugin begins with `aiohooks`."""
    name = re.compile(r"^@pytest\.mark\.(\w+)|^ +(--[\w-]+)|^(\w+) .*-- ", re.MULTILINE)

    def names(*options: str) -> set[str]:
        kinds = ("--fixtures", "--markers", "--help")
        lists = [pytester.runpytest(kind, *OPTIONS, *options).stdout.str() for kind in kinds]
        return {"".join(found.groups("")) for text in lists for found in name.finditer(text)}

    added = names(*loading()) - names("-p", "no:aiohooks")
    assert added == {"aiohooks_no_leaks", "aiohooks_explore", "--aiohooks-explore-replay"}


EXPLORED = """
    @pytest.fixture
    def times():
        return 2

    @pytest.mark.aiohooks_explore(seeds=300, disturb=["order"])
    {mark}
    async def test_loses_an_update(times):
        count = 0
        async def add(delay):
            nonlocal count
            for _ in range(delay):
                await asyncio.sleep(0)
            before = count
            await asyncio.sleep(0)
            count = before + 1
        await asyncio.gather(add(0), add(3))
        assert count == times

    @pytest.mark.aiohooks_explore(seeds=300)
    {mark}
    async def test_is_exact(times):
        await asyncio.sleep(3600)
"""


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_a_marked_test_is_explored(pytester: pytest.Pytester, mark: str) -> None:
    """Its body runs under many schedules, with its fixtures; the option that the message shows
    repeats one of them.
    """
    result = run(pytester, EXPLORED.format(mark=mark))
    result.assert_outcomes(passed=1, failed=1)
    found = re.search(r"again: pytest '(.*)' --aiohooks-explore-replay='(.*)'", result.stdout.str())
    assert found is not None
    again = run(
        pytester, EXPLORED.format(mark=mark), "-k", "loses", f"--aiohooks-explore-replay={found[2]}"
    )
    again.assert_outcomes(failed=1, deselected=1)
    again.stdout.fnmatch_lines(
        ["*(the replay, 1 schedules)*", f"*--aiohooks-explore-replay='{found[2]}'"]
    )
