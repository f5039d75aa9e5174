"""The parts of the tests: `--quick`, which the README runs, and `--of-the-day`, which CI runs."""

from __future__ import annotations

import collections

import pytest

from tests.support.source import ROOT

pytest_plugins = ["pytester"]

ALL = (
    "-p",
    "tests.conftest",
    "-p",
    "no:cacheprovider",
    "-o",
    "asyncio_default_fixture_loop_scope=function",
)
OPTIONS = (*ALL, "--quick")
MARKERS = ("-o", "markers=slow\nsample")


def test_a_few_cases_of_each_test_are_run(pytester: pytest.Pytester) -> None:
    """Of a fast test at most four cases are run, of a slow sample one, of any other slow test none;
    each time the same.
    """
    pytester.makepyfile(
        """
        import pytest

        cases = pytest.mark.parametrize("number", range(20))

        @cases
        def test_fast(number): pass

        def test_without_cases(): pass

        @pytest.mark.slow
        @pytest.mark.sample
        @cases
        def test_sample(number): pass

        @pytest.mark.slow
        def test_slow(): pass
        """
    )
    shown = [
        pytester.runpytest(*OPTIONS, *MARKERS, "--collect-only", "-q").outlines for _ in range(2)
    ]
    first, second = ([line for line in lines if "::" in line] for lines in shown)
    assert first == second
    assert [line.partition("::")[2].partition("[")[0] for line in first] == [
        *["test_fast"] * 4,
        "test_without_cases",
        "test_sample",
    ]


def test_the_date_chooses_cases(pytester: pytest.Pytester) -> None:
    """All fast tests on asyncio run; each slow test, and each on uvloop, on every third day."""
    pytester.makepyfile(
        """
        import pytest

        cases = pytest.mark.parametrize("number", range(20))

        @cases
        def test_fast(number): pass

        @pytest.mark.slow
        @cases
        def test_slow(number): pass

        @cases
        async def test_on_both_loops(number): pass
        """
    )
    counts = collections.Counter[str]()
    for day in ("2026-01-30", "2026-01-31", "2026-02-01"):
        options = (*ALL, *MARKERS, "-o", "asyncio_mode=auto", "--of-the-day", day)
        for line in pytester.runpytest(*options, "--collect-only", "-q").outlines:
            for test in ("fast[", "slow[", "loops[asyncio", "loops[uvloop"):
                counts[test] += test in line
    assert counts == {"fast[": 60, "slow[": 2, "loops[asyncio": 60, "loops[uvloop": 2}


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_failure_is_printed_when_it_happens(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    """Its name, traceback and output are there before the next test, which may kill the run; the
    end has the name alone.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        test_fails="def test_fails():\n    print('a line of output')\n    assert 1 == 2\n",
        test_kills="import os\ndef test_kills():\n    os._exit(3)\n",
    )
    killed = pytester.runpytest_subprocess(*OPTIONS, "test_fails.py", "test_kills.py")
    shown = ["*FAILED test_fails.py::test_fails*", "*> * assert 1 == 2", "a line of output"]
    killed.stdout.fnmatch_lines(shown)
    whole = pytester.runpytest_subprocess(*OPTIONS, *workers, "test_fails.py")
    whole.stdout.fnmatch_lines(
        [*shown, "*short test summary info*", "FAILED test_fails.py::test_fails*"]
    )
    assert str(whole.stdout).count("Captured stdout call") == 1
