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
    from aiohooks.testing import no_leaks as check

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    async def leak():
        leak.task = asyncio.ensure_future(asyncio.Event().wait())
        await asyncio.sleep(0)
"""


def run(pytester: pytest.Pytester, code: str, *options: str) -> pytest.RunResult:
    """Run pytest on a file with these tests; the plugin is loaded as by its entry point, also where that is not installed."""
    pytester.makepyfile(textwrap.dedent(HEADER) + textwrap.dedent(code))
    is_installed = any(one.value == MODULE for one in entry_points(group="pytest11"))  # then pytest finds it by itself
    options = ("-o", "asyncio_default_fixture_loop_scope=function", *options)
    return pytester.runpytest(*([] if is_installed else ["-p", MODULE]), "--strict-markers", "-p", "no:cacheprovider", *options)


LEAKING = """
    @pytest.mark.no_leaks
    {mark}
    async def test_leaks():
        await leak()

    @pytest.mark.no_leaks
    {mark}
    async def test_is_clean():
        await asyncio.sleep(0)

    {mark}
    async def test_does_not_ask():
        await leak()
"""


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_a_marked_test_must_not_leak(pytester: pytest.Pytester, mark: str) -> None:
    """Under pytest-asyncio and anyio's plugin the test that leaks fails, with the leak; one that does not ask is left alone."""
    result = run(pytester, LEAKING.format(mark=mark))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: leaks:*",
            "*- task 'Task-*' still runs, started at leak (*test_a_marked_test_must_not_leak.py:11), waits at Event.wait (*",
        ]
    )


def test_the_fixture_does_the_same(pytester: pytest.Pytester) -> None:
    """A test that has the fixture runs in the check, and gets it."""
    result = run(
        pytester,
        """
        @pytest.mark.asyncio
        async def test_leaks(no_leaks):
            await leak()

        @pytest.mark.asyncio
        async def test_is_clean(no_leaks):
            assert isinstance(no_leaks, check) and no_leaks.leaks == ()
        """,
    )
    result.assert_outcomes(passed=1, failed=1)


def test_a_whole_project_may_ask(pytester: pytest.Pytester) -> None:
    """`usefixtures` of the configuration checks each async test; plain tests and other fixtures are as they were."""
    pytester.makeini("[pytest]\nasyncio_mode = auto\nusefixtures = no_leaks\n")
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
    """A project's own fixture of that name says what is checked, also for the marker: here the waiters of a store."""
    result = run(
        pytester,
        """
        @pytest.fixture
        def store():
            return MemoryStepStore()

        @pytest.fixture
        def no_leaks(store):
            return check(stores=[store])

        @pytest.mark.no_leaks
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


def test_another_fixture_of_that_name_is_left_alone(pytester: pytest.Pytester) -> None:
    """A project may have had a fixture of that name before, for something else."""
    result = run(
        pytester,
        """
        @pytest.fixture
        def no_leaks():
            return "of another kind"

        @pytest.mark.asyncio
        async def test_leaks(no_leaks):
            await leak()
        """,
    )
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_each_example_of_hypothesis_is_checked(pytester: pytest.Pytester, mark: str) -> None:
    """The example that leaks is found; the ones before and behind it are checked by themselves."""
    result = run(
        pytester,
        f"""
        from hypothesis import given, settings, strategies

        @pytest.mark.no_leaks
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
    """Methods of `unittest.IsolatedAsyncioTestCase` too, where `unittest` itself runs the coroutine."""
    result = run(
        pytester,
        """
        @pytest.mark.no_leaks
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
    """Another plugin may run a coroutine function that it has kept: a check that did not happen is not passed over."""
    pytester.makeconftest(
        """
        import asyncio

        def pytest_collection_modifyitems(items):
            for item in items:
                item.kept = item.obj

        def pytest_pyfunc_call(pyfuncitem):
            asyncio.run(pyfuncitem.kept())
            return True
        """
    )
    result = run(
        pytester,
        """
        @pytest.mark.no_leaks
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
        @pytest.mark.no_leaks
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
    """Loaded at each start of pytest, for every project, it imports of the library only itself, and not asyncio or anyio."""
    program = (
        "import sys, pytest, json; before = set(sys.modules);"
        f"import {MODULE};"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = json.loads(found)
    assert [name for name in loaded if name.startswith("aiohooks")] == [
        *("aiohooks", "aiohooks._lazy", "aiohooks.errors", "aiohooks.testing", MODULE)
    ]
    assert not {"asyncio", "anyio"} & {name.partition(".")[0] for name in loaded}


EXPLORED = """
    @pytest.fixture
    def times():
        return 2

    @pytest.mark.explore(seeds=300, disturb=["order"])
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

    @pytest.mark.explore(seeds=300)
    {mark}
    async def test_is_exact(times):
        await asyncio.sleep(3600)
"""


@pytest.mark.parametrize("mark", ["@pytest.mark.asyncio", "@pytest.mark.anyio"])
def test_a_marked_test_is_explored(pytester: pytest.Pytester, mark: str) -> None:
    """Its body runs under many schedules, with its fixtures; the option that the message shows repeats one of them."""
    result = run(pytester, EXPLORED.format(mark=mark))
    result.assert_outcomes(passed=1, failed=1)
    found = re.search(r"again: pytest '(.*)' --explore-replay='(.*)'", result.stdout.str())
    assert found is not None
    again = run(pytester, EXPLORED.format(mark=mark), "-k", "loses", f"--explore-replay={found[2]}")
    again.assert_outcomes(failed=1, deselected=1)
    again.stdout.fnmatch_lines(["*(the replay, 1 schedules)*", f"*--explore-replay='{found[2]}'"])
