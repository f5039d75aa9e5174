"""A part of each checkpoint programme (P6 to P11) in every test run; the whole of each is a command, named in its docstring.

Where the machine lacks what a programme needs, its test is skipped and says so, or fails where the variable CI is set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import (
    _mutators,
    checkpoint_corruption,
    checkpoint_crash_states,
    checkpoint_errors,
    checkpoint_kill,
    checkpoint_power,
    checkpoint_strace,
)
from tests.fuzz._disk import MOST_SHOWN, Outcome, Programme, UnsuitedError, WrongError, command, run
from tests.fuzz._stories import Story, judge, kept, make_save, make_stories, prepare, same
from tests.fuzz._trace import Crash, Recorder
from tests.support.commands import run_here

PROGRAMMES: list[tuple[Programme, int]] = [
    (checkpoint_kill.kill, 400),
    (checkpoint_strace.strace, 60),
    (checkpoint_power.power, 60),
    (checkpoint_crash_states.crash_states, 700),
    (checkpoint_errors.errors, 195),
    (checkpoint_corruption.corruption, 1500),
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills, forks and mounts as Linux does")
@pytest.mark.parametrize(("programme", "points"), PROGRAMMES, ids=[each.__name__ for each, _ in PROGRAMMES])
def test_nothing_is_lost(programme: Programme, points: int) -> None:
    """Whatever happens to a writer, its disk or its files: no acknowledged checkpoint is lost and no torn one is taken."""
    outcome = run_here(programme, points)
    assert not outcome.violations, "\n".join(outcome.violations[:MOST_SHOWN])
    assert outcome.points >= points


MAINS: list[Callable[[Sequence[str]], int]] = [
    checkpoint_kill.main,
    checkpoint_crash_states.main,
    checkpoint_corruption.main,
]


@pytest.mark.parametrize("main", MAINS, ids=[each.__module__.rpartition(".")[2] for each in MAINS])
def test_a_command_says_what_it_did_in_one_line(main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    """A programme is a command with a count, and its end is one line with the count and what was found."""
    assert main(["--points", "12"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert ": 12 points, 0 violations, " in line


@pytest.mark.parametrize("main", [checkpoint_strace.main, checkpoint_errors.main, checkpoint_power.main])
def test_a_command_says_what_the_machine_lacks(
    main: Callable[[Sequence[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a tool is missing, a command does not pretend: it says what it needs, and exits with a number of its own."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(checkpoint_power, "SYSTEM_TOOLS", "")
    assert main(["--points", "1"]) == 2
    assert "not run: " in (said := capsys.readouterr().out)
    assert " need" in said


def test_a_command_fails_on_a_violation_and_on_too_few_points(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 1 if something was found, or if less was done than asked for."""

    def found(points: int, seed: int) -> Outcome:
        outcome = Outcome("found")
        for number in range(points):
            with outcome.point(f"point {number}"):
                raise WrongError("it is gone")
        return outcome

    assert command(found, 3, None, []) == 1
    assert capsys.readouterr().out.splitlines()[0] == "point 0: it is gone"
    assert command(lambda points, seed: Outcome("lazy"), 3, None, []) == 1
    assert "FEWER than the 3 asked for" in capsys.readouterr().out


def test_an_unexpected_error_is_a_violation() -> None:
    """What is raised in a point and is no finding of the judge counts as one, with where it comes from."""
    outcome = Outcome("x")
    with outcome.point("here"):
        raise KeyError("lost")
    assert outcome.points == 1
    assert outcome.violations[0].startswith("here: KeyError: 'lost' (test_checkpoint_programs.py:")


def test_in_ci_nothing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A programme that cannot run is a skip on a laptop and a failure in CI."""

    def never(points: int, seed: int) -> Outcome:
        raise UnsuitedError("there is no disk")

    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="there is no disk"):
        run_here(never, 1)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="there is no disk"):
        run_here(never, 1)


# The judge and the tools


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """Two checkpoints, and nothing has happened."""
    told = make_stories(0, 600)[2]
    prepare(told, tmp_path / "ckpt")
    return told


def test_the_judge_is_content_with_what_is_sound(story: Story, tmp_path: Path) -> None:
    """Nothing is found where nothing has happened."""
    judge(story, tmp_path / "ckpt", 0)


def _newest(path: Path) -> Path:
    return max((path / "ckpt").glob("step-*.*"))


def test_the_judge_sees_a_loss(story: Story, tmp_path: Path) -> None:
    """A checkpoint that is gone is missed."""
    _newest(tmp_path).rename(tmp_path / "gone")
    with pytest.raises(WrongError, match=r"lost: saves \[2\]"):
        judge(story, tmp_path / "ckpt", 0)


def test_the_judge_sees_a_torn_checkpoint(story: Story, tmp_path: Path) -> None:
    """A file that was cut under a final name is found, although a restore would pass over it."""
    file = _newest(tmp_path) / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WrongError, match="torn under a final name"):
        judge(story, tmp_path / "ckpt", 0)


def test_the_judge_sees_what_was_not_acknowledged(story: Story, tmp_path: Path) -> None:
    """A save that was never begun has not happened; a save in flight may have."""
    other = Story("other", story.before[:1], story.before[1:])
    judge(other, tmp_path / "ckpt", 0, later=False)
    with pytest.raises(WrongError, match="restored"):
        judge(other, tmp_path / "ckpt", 0, in_flight=False)


def test_what_is_kept() -> None:
    """The model of the policy: the last two saves, one of each step."""
    one, two, again = make_save(1), make_save(2), make_save(3, step=20)
    assert kept([one, two]) == [one, two]
    assert kept([one, two, again]) == [one, again]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.zeros(1), -np.zeros(1)),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.zeros(2, "<f4"), np.zeros(1, "<f8")),
    ],
)
def test_the_same_is_the_same_to_the_last_bit(one: object, other: object) -> None:
    """What is equal and not identical is told apart; a NaN is the same as itself."""
    assert same(one, one)
    assert not same(one, other)
    assert same(float("nan"), float("nan"))


def test_a_crash_keeps_what_was_synced(tmp_path: Path) -> None:
    """Of what was not synced, all or nothing or any part is there in some state; what was synced, in every one."""
    recorder = Recorder(tmp_path)
    folder = recorder.open(tmp_path, 0)
    for name, synced in (("safe", True), ("unsafe", False)):
        fd = recorder.open(name, 0o101, 0o600, dir_fd=folder)
        recorder.write(fd, name.encode() * 200)
        if synced:
            recorder.fsync(fd)
            recorder.fsync(folder)
        recorder.close(fd)
    recorder.close(folder)
    crash, rng = Crash(recorder), random.Random(0)
    states = [crash.state(len(recorder.events), rng) for _ in range(300)]
    assert all(state["safe"] == b"safe" * 200 for state in states)
    unsafe = {state.get("unsafe") for state in states}
    assert {None, b"", bytes(1200), b"unsafe" * 200} <= unsafe
    assert (b"unsafe" * 200)[:512] in unsafe


@pytest.mark.parametrize("mutator", _mutators.BYTES, ids=lambda each: each.__name__)
def test_a_mutator_changes_something(mutator: Callable[[bytes, random.Random], bytes]) -> None:
    """Each way to damage bytes does, in nearly every case, and the same way for the same seed."""
    data = bytes(range(256)) * 4
    changed = [mutator(data, random.Random(seed)) for seed in range(50)]
    assert sum(each != data for each in changed) > 45
    assert all(isinstance(mutator(b"x" * size, random.Random(0)), bytes) for size in (1, 2, 3))
    assert changed == [mutator(data, random.Random(seed)) for seed in range(50)]


def test_the_same_seed_does_the_same() -> None:
    """A programme that found something finds it again."""
    first, second = (run(checkpoint_crash_states.crash_states, 40, seed=3) for _ in range(2))
    assert (first.points, first.violations) == (second.points, second.violations)
