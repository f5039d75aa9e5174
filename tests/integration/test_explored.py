"""Programs that `explore` disturbs: some schedules of each in every test run, and the proof that it
finds the bugs it is for.

All of it is a command: `python -m tests.fuzz.explored --seeds 500`, and `--exhaust 1`.
"""

from __future__ import annotations

import pytest

from aiohooks.testing import explore
from tests.fuzz.explored.__main__ import main
from tests.fuzz.explored.harness import finding
from tests.fuzz.explored.programs import BUGS, PROGRAMS, results
from tests.fuzz.random_programs.programs import (
    ERRORS,
    IN_HOOKS,
    NESTED,
    WAITS,
    Program,
    draw,
)

pytestmark = pytest.mark.every_python
one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own

SEEDS = 10


@pytest.mark.slow
def test_programs_keep_their_laws_however_they_are_disturbed() -> None:
    """Cancelled anywhere, in any order: a program is cancelled and leaks nothing."""
    found = list(results(PROGRAMS, SEEDS, jobs=2))
    assert not [result.problem for result in found if result.problem]
    assert all(result.schedules == SEEDS * PROGRAMS[result.name].times + 1 for result in found)
    assert sum(result.cancels for result in found) > 4 * len(found)
    assert sum(result.events for result in found) > 4 * len(found)


@one_loop
@pytest.mark.parametrize("name", BUGS)
async def test_an_injected_bug_is_found(name: str) -> None:
    """Each injected bug is found, as the kind of violation that it is."""
    bug = BUGS[name]
    assert bug.finding in await finding(bug.program, bug.finding, seeds=60)


@one_loop
async def test_random_programs_have_all_kinds_of_actions() -> None:
    """Five hundred of them have each action, each kind of error and each attribute of a hook."""
    drawn: list[Program] = []

    async def program() -> None:
        drawn.append(draw())

    await explore(program, seeds=500, disturb=["choice"])
    hooks = [hook for made in drawn for hook in (*made.hooks, *made.members)]
    kinds, scripts = (
        set[str](),
        [script for made in drawn for script in (*made.callers, *made.operations)],
    )
    scripts += [script for hook in hooks for _, script in hook.methods]
    while scripts:
        for action in scripts.pop():
            kinds.add(f"fail {ERRORS[action.n]}" if action.kind == "fail" else action.kind)
            scripts += action.scripts
    assert kinds == {
        *WAITS,
        *NESTED,
        *IN_HOOKS,
        *(f"fail {error}" for error in ERRORS),
        "aclose",
        "call",
        "hooked",
        "run",
        "step_fn",
        "together",
    }
    assert {hook.order for hook in hooks} == {-1, 0, 1}
    assert {hook.on_error for hook in hooks} == {"raise", "log"}
    assert {hook.background for hook in hooks} == {hook.fetches for hook in hooks} == {True, False}


def test_the_command_prints_a_row_for_each_program(capsys: pytest.CaptureFixture[str]) -> None:
    """It succeeds where nothing is found, and counts what it did."""
    assert main(["--program", "two steps, 1 hooks", "--seeds", "5", "--jobs", "1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split()[:5] == ["two", "steps,", "1", "hooks", "6"]
    assert table[2].split()[:2] == ["sum", "6"]
    assert main(["--program", "child_vanishes", "--injected-bugs"]) == 0
    assert capsys.readouterr().out.startswith("child_vanishes: found: lost cancellation")
