"""The example of asynchronous reinforcement learning, `async_rl_digits.py`, run as a user runs it."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from examples.async_rl_digits import parse_options
from tests.integration.test_examples import command, environment, run
from tests.support import processes
from tests.support.waiting import HANG_SECS

EXAMPLE = "async_rl_digits.py"
STEPS = 80


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table."""

    bound: int
    seed: str
    accuracy: float
    steps_per_sec: float
    waiting: float
    lag_mean: float
    lag_max: int
    refused: int
    crashed_at: int | None
    continued_from: int | None


def rows(output: str) -> list[Row]:
    found: list[Row] = []
    for line in output.splitlines():
        words = line.replace(",", " ").split()
        if words and words[0].isdigit():
            share = float(words[4].removesuffix("%")) / 100
            numbers = [float(words[place]) for place in (2, 3, 5, 6, 7)]
            crash = (int(words[8]), int(words[9])) if len(words) > 8 else (None, None)
            found.append(
                Row(int(words[0]), words[1], numbers[0], numbers[1], share, numbers[2], int(numbers[3]), int(numbers[4]), *crash)
            )
    return found


@pytest.mark.slow
def test_no_item_is_used_beyond_the_bound(tmp_path: Path) -> None:
    """For each bound the run learns, continues after a crash, and uses no item beyond the bound; a bound of 4 makes a lag."""
    picture = tmp_path / "picture.png"
    done = run(EXAMPLE, "--seeds", 1, "--steps", STEPS, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, ""), done
    table = rows(done.stdout)
    assert [(one.bound, one.seed) for one in table] == [(0, "0"), (1, "0"), (4, "0")]
    for one in table:
        assert one.lag_mean <= one.lag_max <= one.bound
        assert one.accuracy > 0.8, "a tenth is what guessing gives"
        assert 0 < one.waiting < 1
        assert one.crashed_at is not None
        assert one.continued_from is not None
        assert 0 < one.crashed_at < STEPS, "the crash is inside the run"
        # The newest checkpoint may be that of the step of the crash.
        assert one.continued_from % 20 == 0
        assert one.crashed_at - 40 <= one.continued_from <= one.crashed_at + 1
    assert table[0].lag_mean == 0
    assert table[2].lag_max > 1, "the bound is used"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_several_seeds_are_averaged() -> None:
    """Over several seeds the table has the means of the printed values, and the maximum of the maximum lag."""
    done = run(EXAMPLE, "--bounds", 2, "--seeds", 2, "--steps", 50, "--workers", 8, "--wait")
    assert (done.returncode, done.stderr) == (0, ""), done
    first, second, both = rows(done.stdout)
    assert (first.seed, second.seed, both.seed) == ("0", "1", "all")
    assert both.lag_max == max(first.lag_max, second.lag_max) <= 2
    assert both.accuracy == pytest.approx((first.accuracy + second.accuracy) / 2, abs=0.001)
    assert both.crashed_at is None


@pytest.mark.slow
def test_ctrl_c_ends_it() -> None:
    """Ctrl-C ends the runs at any point, with the exit code of an interrupt and without a traceback."""
    arguments = command(EXAMPLE, "--steps", 50, "--seeds", 1_000, "--bounds", 4)
    with processes.start(arguments, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("lag bound")
        assert rows(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_SECS)
    assert (process.returncode, errors) == (130, "")
    assert len(rows(output)) < 999


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bounds", "0", "-1"], "--bounds has -1: give whole numbers, 0 or more"),
        (["--seeds", "0"], "--seeds is 0: give 1 or more"),
        (["--steps", "10"], "--steps is 10: give 50 or more"),
        (["--workers", "some"], "argument --workers: invalid int value: 'some'"),
    ],
)
def test_an_invalid_option_is_refused(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid option is named in one sentence, with the exit code for wrong usage."""
    monkeypatch.setattr("sys.argv", [EXAMPLE, *options])
    with pytest.raises(SystemExit, match="2"):
        parse_options()
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1].endswith(message)) == ("", True), err
