"""A few points of each checkpoint program; each is also a command, named in its docstring."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.checkpoints.__main__ import MAX_SHOWN, PROGRAMS, main, run
from tests.fuzz.checkpoints.laws import Outcome, ViolationError
from tests.fuzz.checkpoints.operations import Crash, Recorder
from tests.support.checkpoint_files import same

FAST = {"kill": 150, "crash": 150, "error": 200, "corruption": 200}
SLOW = {
    "turns": 100,
    "strace": 300,
    "power": 60,
    "crash": 700,
    "error": 600,
    "full": 150,
    "corruption": 1500,
}


@pytest.mark.skipif(sys.platform != "linux", reason="kills, forks and mounts as Linux does")
@pytest.mark.parametrize(
    ("fault", "points"),
    [
        *FAST.items(),
        *(pytest.param(*program_points, marks=pytest.mark.slow) for program_points in SLOW.items()),
    ],
)
def test_nothing_is_lost(fault: str, points: int) -> None:
    """Whatever happens to a writer, its disk or its files: no acknowledged checkpoint is lost, and
    no torn one restored.
    """
    outcome = run(PROGRAMS[fault][0], points)
    assert not outcome.violations, "\n".join(outcome.violations[:MAX_SHOWN])
    assert outcome.points >= points


def test_a_command_fails_on_a_violation_and_on_too_few_points(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It exits with 1 if a law was broken, any error counts, or if there were fewer points than
    requested.
    """

    def found(points: int, seed: int) -> Outcome:
        outcome = Outcome("found")
        for error in (ViolationError("it is gone"), KeyError("lost")):
            with outcome.point("here"):
                raise error
        return outcome

    programs = {"found": (found, 2), "lazy": (lambda points, seed: Outcome("lazy"), 3)}
    assert main(["--fault", "found"], programs) == 1
    gone, lost, _ = capsys.readouterr().out.splitlines()
    assert gone == "here: it is gone"
    assert lost.startswith("here: KeyError: 'lost' (test_checkpoint_programs.py:")
    assert main(["--fault", "lazy"], programs) == 1
    assert "FEWER than the 3 requested" in capsys.readouterr().out


# What the laws rely on; that broken ones are found is shown in test_checkpoint_injected_bugs.py


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
def test_same_compares_to_the_last_bit(one: object, other: object) -> None:
    """Values that are equal and not identical differ; a NaN is the same as itself."""
    assert same(one, one)
    assert not same(one, other)
    assert same(float("nan"), float("nan"))


def test_a_crash_keeps_what_was_synced(tmp_path: Path) -> None:
    """What was synced is there in every state; of the rest all, nothing or any part in some
    state.
    """
    recorder = Recorder(tmp_path)
    directory = recorder.open(tmp_path, 0)
    for name, synced in (("safe", True), ("unsafe", False)):
        fd = recorder.open(name, 0o101, 0o600, dir_fd=directory)
        recorder.write(fd, name.encode() * 200)
        if synced:
            recorder.fsync(fd)
            recorder.fsync(directory)
        recorder.close(fd)
    recorder.close(directory)
    crash, rng = Crash(recorder), random.Random(0)
    states = [crash.state(len(recorder.events), rng) for _ in range(300)]
    assert all(state["safe"] == b"safe" * 200 for state in states)
    unsafe = {state.get("unsafe") for state in states}
    assert {None, b"", bytes(1200), b"unsafe" * 200} <= unsafe
    assert (b"unsafe" * 200)[:512] in unsafe
