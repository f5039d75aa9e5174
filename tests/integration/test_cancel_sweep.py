"""The cancel sweep: a part of it in every test run, and the proof that it finds the bugs it is for.

The whole of it is a command: `python -m tests.fuzz.cancel_sweep --points 100000 --double 30000 --loop both`.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.report import installed_loops
from tests.fuzz.cancel_sweep.injected_bugs import FAULTY, SOUND
from tests.fuzz.cancel_sweep.scenarios import SCENARIOS
from tests.fuzz.cancel_sweep.sweep import main, report, sweep, sweep_in_processes
from tests.fuzz.cancel_sweep.wrappers import WRAPPERS

pytestmark = pytest.mark.every_python

LOOPS = installed_loops()
POINTS, DOUBLE = 1_000, 250
"""Per loop: 2,500 on both."""


@pytest.mark.slow
def test_cancelled_anywhere() -> None:
    """Cancelled once or twice, at any suspension, in any wrapper: the session is cancelled and leaks nothing."""
    names = [scenario.name for scenario in SCENARIOS]
    with ThreadPoolExecutor() as pool:  # each thread waits for a process
        share = functools.partial(sweep_in_processes, names, points=POINTS, double=DOUBLE, seed=0, jobs=1)
        tallies = list(pool.map(lambda loop: share(loop=loop), LOOPS))
    for tally in tallies:
        assert not tally.violations, report(tally)
        assert tally.single.total() >= POINTS
        assert tally.double.total() >= DOUBLE
        assert set(tally.single) == set(names)


def test_the_sweep_is_as_wide_as_it_says() -> None:
    """At least 90 scenarios, each with a name of its own, in nine wrappers."""
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS) >= 90
    assert len({wrapper.name for wrapper in WRAPPERS}) == 9


@pytest.mark.parametrize("loop", LOOPS)
def test_sound_code_passes(loop: str) -> None:
    """Nothing is found in small coroutines that treat cancellation as they should, in any wrapper on this Python."""
    tally = sweep(SOUND, points=900, double=200, loop=loop)
    assert not tally.violations, report(tally)


@pytest.mark.parametrize("name", FAULTY)
def test_injected_bug_is_found(name: str) -> None:
    """Each injected bug is found, as the kind of violation that it is."""
    scenario, finding = FAULTY[name]
    tally = sweep([scenario], points=120, double=0, most_bad=4, most_hangs=1)
    assert any(finding in one.what for one in tally.violations), report(tally)


def test_command_counts_its_points(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one table, a row a scenario, and succeeds when there is no violation and enough points were run."""
    arguments = ["--points", "40", "--double", "10", "--loop", "asyncio", "--scenario", "two steps, 1"]
    assert main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:4] == ["two", "steps,", "1", "hooks"]
    assert table[1].split()[-3:] == ["40", "10", "0"]
    assert table[2].split() == ["sum", "40", "10", "0"]


def test_command_refuses_an_unknown_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that no scenario contains is an error that lists the names."""
    with pytest.raises(SystemExit):
        main(["--scenario", "nothing of the kind"])
    assert "two steps, 3 hooks" in capsys.readouterr().err
