"""Random programs against the reference model: some of them in every test run, and the proof that the model finds bugs.

All of them are a command: `python -m tests.fuzz.random_programs --count 200000`, for each loop and mode.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.conformance.report import installed_loops
from tests.fuzz.random_programs.__main__ import main
from tests.fuzz.random_programs.campaign import MODES, Campaign, campaign
from tests.fuzz.random_programs.injected_bugs import BUGS, Bug
from tests.fuzz.random_programs.model import violations
from tests.fuzz.random_programs.programs import Action, HookSpec, Program, generate, smaller

pytestmark = pytest.mark.every_python

LOOPS = installed_loops()
# uvloop passes `eager_start` to task factories, which those of 3.13.0 refuse.
EAGER_LOOPS = LOOPS if sys.version_info >= (3, 13, 3) or sys.version_info < (3, 13) else ["asyncio"]
COUNTS = {"plain": 500, "debug": 150, "eager": 250}
CASES = [(loop, mode) for mode in MODES for loop in (EAGER_LOOPS if mode == "eager" else LOOPS)]


@pytest.mark.parametrize(("loop", "mode"), CASES)
def test_no_program_violates_the_model(loop: str, mode: str) -> None:
    """Whatever hooks, operations and callers do: nothing is lost, left, invented or called twice."""
    texts: list[str] = []
    done = campaign(COUNTS[mode], seed=1, loop=loop, mode=mode, most=3, report=texts.append)
    assert not done.kinds, "\n".join(texts)
    assert done.programs == COUNTS[mode]
    assert done.calls > 5 * done.programs


@pytest.mark.parametrize("bug", BUGS.values(), ids=list(BUGS))
def test_an_injected_bug_is_found(bug: Bug) -> None:
    """Each injected bug is found as a violation of the law that it breaks, in a program that is right without it."""
    with Campaign() as runner:
        for number in range(3_000):
            program = generate(7, number)
            with bug.injected():
                found = [one for one in runner.run_one(program) if one.startswith(bug.law)]
            if found and not any(one.startswith(bug.law) for one in runner.run_one(program)):
                return
    pytest.fail(f"not found in {runner.programs} programs")


def test_a_cancel_that_cannot_be_told_from_an_outer_one_is_no_violation() -> None:
    """A hook that ends with a scope's cancel, and has left its task's count too high, may end its session as cancelled.

    anyio lets its scope's cancel pass because the timeout of the hook cancels the task in the same turn.
    """
    cut_short = Action("scope", 1, scripts=((Action("gather", 1, 1, scripts=((),)),),))
    begin = (Action("finally", 1, 1, scripts=((cut_short,), (Action("stale"),))),)
    program = Program(((),), (HookSpec((("begin", begin),), timeout=2),), graph=False, recovers=False)
    with Campaign() as runner:
        assert runner.run_one(program) == []


def test_a_seed_repeats_its_programs() -> None:
    """A program is decided by its seed and number alone, and so is what happens in it."""
    assert [generate(3, number) for number in range(20)] == [generate(3, number) for number in range(20)]
    assert generate(3, 0) != generate(4, 0)
    with Campaign() as runner:
        traces = [[runner.execute(generate(3, number), tracing=True).trace for number in range(20)] for _ in range(2)]
    first, second = (re.sub("0x[0-9a-f]+|scope [0-9a-f]+", "", f"{each}") for each in traces)
    assert first == second


def test_programs_have_all_kinds_of_actions() -> None:
    """A few thousand programs have each action, each kind of error and each attribute of a hook."""
    programs = [generate(0, number) for number in range(3_000)]
    kinds = set().union(*(program.kinds() for program in programs))
    assert kinds == {
        "aclose", "anyio_group", "background", "call", "cancelled", "catch", "cleanup", "event", "fail clean end",
        "fail group", "fail plain", "fail recoverable", "fail takes no note", "finally", "gather", "group", "hooked", "raw",
        "run", "scope", "session", "set", "shield", "stale", "step_fn", "stop", "swallow", "third_party", "timeout",
        "together", "turns", "until", "wait", "wait_for",
    }  # fmt: skip
    hooks = [hook for program in programs for hook in program.hooks]
    assert {hook.order for hook in hooks} == {-1, 0, 1}
    assert {hook.on_error for hook in hooks} == {"raise", "log"}
    assert {hook.background for hook in hooks} == {hook.fetches for hook in hooks} == {True, False}


def test_a_violation_is_made_small() -> None:
    """A program with a violation is made smaller while it still violates the same law."""
    hook = HookSpec((("begin", ()), ("before_run", (Action("turns", 3),)), ("close", ())), timeout=9)
    program = Program(((Action("turns", 2), Action("run", 1), Action("run")),), (hook, hook), cancels=((30, 0),))
    with Campaign() as runner, BUGS["run_swallows_a_cancel"].injected(), BUGS["failure_of_the_librarys_own"].injected():
        what = runner.run_one(program)
        small, found = runner.shrink(program, what)
    assert what
    assert found[0].split(":")[0] == what[0].split(":")[0]
    assert small == Program(((Action("run"),),), graph=False, recovers=False)
    assert not any(runner_finds(one) for one in smaller(small))


def runner_finds(program: Program) -> list[str]:
    """Return the violations of a program, with a bug."""
    with Campaign() as runner, BUGS["failure_of_the_librarys_own"].injected():
        return violations(runner.execute(program))


def test_the_command_replays_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """`--only` prints a program as text, what happened in it, and whether it is right."""
    assert main(["--only", "1"]) == 0
    text = capsys.readouterr().out
    assert "caller 0" in text
    assert "session 0 begins" in text
    assert text.endswith("no violation\n")


def test_the_command_reports_violations(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints seed, number and the smallest program of a violation, then the figures, and fails."""
    with BUGS["error_is_swallowed"].injected():
        assert main(["--count", "60", "--seed", "7", "--most", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("seed 7, --only ")
    assert "violations, Python" in lines[-1]
    assert main(["--count", "5", "--seed", "7"]) == 0
    assert capsys.readouterr().out.startswith("5 programs, ")
