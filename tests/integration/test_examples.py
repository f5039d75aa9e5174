"""The examples and the README's programs, run as a user runs them: each in its own process."""

from __future__ import annotations

import functools
import math
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.needs import need
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

STARTED = re.compile(r"(.+): asked to start at step (\d+), started at step (\d+)")
ENDED = re.compile(r"(.+): (\d+) steps, stopped because: (.+)")
ACCURACY = re.compile(r"accuracy on 450 held-out images: (\d\.\d+)")


ON_DIGITS = ("train_digits.py", "train_torch.py", "async_rl_digits.py")
"""Examples that train on the images of scikit-learn."""


def command(example: str, *options: object) -> list[str]:
    if example in ON_DIGITS:
        need("scikit-learn")
    return [sys.executable, "-W", "error", f"examples/{example}", *map(str, options)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@functools.cache
def run(example: str, *options: object) -> subprocess.CompletedProcess[str]:
    return processes.run(command(example, *options), env=environment())


def test_exploration_finds_the_lost_update() -> None:
    """The example prints what was found and how to repeat it, and that nothing is found with a lock."""
    printed = run("explore_hooks.py")
    assert (printed.returncode, printed.stderr) == (0, "")
    found, *_, exact = printed.stdout.splitlines()
    assert found.startswith("an error: AssertionError('5 and a fee of 1 were spent, and ")
    assert "again: explore(..., replay='" in printed.stdout
    assert exact == "with a lock: nothing found in 1,001 schedules"


def test_the_timeline_shows_what_overlaps(tmp_path: Path) -> None:
    """The example prints lanes that overlap, or draws them."""
    printed = run("timeline.py")
    errors = [line for line in printed.stderr.splitlines() if "has waited" not in line]  # for a slow disk, at the end
    assert (printed.returncode, errors) == (0, [])
    heading, _, *lanes = printed.stdout.splitlines()
    assert "step 5 to step 9" in heading
    names = ("steps", "feeds taken ahead", "train_step", "Upload", "Audit", "Metrics in the background", "checkpoint writes")
    assert all(any(lane.startswith(name) for lane in lanes) for name in names), printed.stdout
    shares = [int(lane.split()[-2]) for lane in lanes]
    assert sum(shares[1:]) > shares[0], "in turn it would have taken longer"
    need("matplotlib")
    drawn = run("timeline.py", "--png", tmp_path / "timeline.png")
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def starts(output: str) -> dict[str, tuple[int, int]]:
    """Return, for each worker, the step at which it was to start, and the one at which it did."""
    return {name: (int(asked), int(seen)) for name, asked, seen in STARTED.findall(output)}


def ends(output: str) -> dict[str, tuple[int, str]]:
    """Return, for each worker, the number of its steps, and why it stopped."""
    return {name: (int(runs), reason) for name, runs, reason in ENDED.findall(output)}


def accuracy(output: str) -> float:
    found = ACCURACY.search(output)
    assert found, output
    return float(found[1])


def start_step(number: int, k: int) -> int:
    return int(k * math.log(number + 1))


@pytest.mark.slow
def test_the_main_job_reaches_its_accuracy() -> None:
    """Without options four workers train to an accuracy of 0.93 or more, each starting at its step."""
    done = run("train_digits.py")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert accuracy(done.stdout) >= 0.93
    seen = starts(done.stdout)
    assert list(seen) == ["chief", "worker 1", "worker 2", "worker 3"]
    assert [want for want, _ in seen.values()] == [start_step(number, 200) for number in range(4)]
    assert seen["chief"] == (0, 0)
    assert all(start >= want for want, start in seen.values())
    losses = [float(loss) for loss in re.findall(r"loss = ([\d.]+)", done.stdout)]
    assert len(losses) >= 5
    assert losses[-1] < losses[0] / 2, "the loss falls"
    assert re.search(r"[\d,]+ steps per second", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "k"), [(1, 0), (5, 20)])
def test_options_are_applied(workers: int, k: int) -> None:
    """The run has the given workers, steps and K, and every worker makes steps."""
    done = run("train_digits.py", "--workers", workers, "--steps", 150, "--k", k, "--seed", 3)
    assert (done.returncode, done.stderr) == (0, ""), done
    seen = starts(done.stdout)
    assert [want for want, _ in seen.values()] == [start_step(number, k) for number in range(workers)]
    assert all(want <= start < 150 for want, start in seen.values())
    ended = ends(done.stdout)
    assert sorted(ended) == sorted(seen)
    assert all(runs > 0 and "reached the last step, 150" in reason for runs, reason in ended.values())
    # Workers finish the run that they are in when the last step is reached: at most one step more each.
    total = re.search(r"(\d+) steps in", done.stdout)
    assert total
    assert 150 <= int(total[1]) == sum(runs for runs, _ in ended.values()) < 150 + workers


@pytest.mark.slow
def test_a_worker_that_can_never_start_ends() -> None:
    """A worker whose step is beyond the last one ends cleanly, and the output says why."""
    done = run("train_digits.py", "--workers", 3, "--steps", 60, "--k", 90)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert list(starts(done.stdout)) == ["chief"]
    assert "worker 1: asked to start at step 62, never started\n" in done.stdout
    assert "worker 2: asked to start at step 98, never started\n" in done.stdout
    ended = ends(done.stdout)
    assert ended["worker 1"] == (0, "chief finished at step 60, wanted 62")
    assert ended["worker 2"] == (0, "chief finished at step 60, wanted 98")


@pytest.mark.slow
def test_a_seed_decides_the_run() -> None:
    """A second run with the same seed has the same output except for the times."""

    def without_times(output: str) -> list[str]:
        return [re.sub(r" \([\d.]+ sec\)$| in [\d.]+ s: .*", "", line) for line in output.splitlines() if "/sec" not in line]

    options = ("train_digits.py", "--workers", 5, "--steps", 150, "--k", 20, "--seed", 3)
    assert without_times(run(*options).stdout) == without_times(run.__wrapped__(*options).stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers is 0: give a number from 1 to 100"),
        (["--steps", "ten"], "argument --steps: invalid int value: 'ten'"),
        (["--steps", "0"], "--steps is 0: give a number from 1 to 1000000000"),
        (["--k", "-1"], "--k is -1: give a number from 0 to 1000000000"),
        (["--seed", "1.5"], "argument --seed: invalid int value: '1.5'"),
        (["--checkpoint-every", "0"], "--checkpoint-every is 0: give a number from 1 to 1000000000"),
    ],
)
def test_an_invalid_option_is_refused(options: list[str], message: str) -> None:
    """An invalid option is named in one sentence, with the exit code for wrong usage."""
    done = run("train_digits.py", *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(message)
    assert done.stdout == ""


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """With a checkpoint directory a second run continues from the last step and prints so; damaged checkpoints end it."""
    directory = tmp_path / "made" / "here"
    options = ("train_digits.py", "--workers", 2, "--k", 20, "--checkpoint-dir", directory, "--checkpoint-every", 70, "--steps")
    done = run(*options, 150)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "continuing from" not in done.stdout
    first = sum(runs for runs, _ in ends(done.stdout).values())

    done = run(*options, 300)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert f"continuing from step {first}, the newest checkpoint in {directory}\n" in done.stdout
    assert starts(done.stdout)["chief"] == (0, first)
    runs = sum(runs for runs, _ in ends(done.stdout).values())
    assert 300 <= first + runs < 300 + 2
    assert f"\n{runs} steps in " in done.stdout
    assert accuracy(done.stdout) > 0.9

    for manifest in directory.glob("*/manifest.json"):
        manifest.write_text("not what was written")
    done = run(*options, 450)
    assert done.returncode == 1
    assert f"{directory} has checkpoints and none of them is good" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_all_workers() -> None:
    """Ctrl-C ends every worker after its step; the accuracy is printed and the exit code is 130."""
    with processes.start(command("train_digits.py", "--steps", 100_000_000), env=environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "loss = " in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_SECS)
    assert (process.returncode, errors) == (130, "")
    assert 0 <= accuracy(output) <= 1
    assert [reason for _, reason in ends(output).values()] == ["SIGINT received"] * 4
    assert output.endswith("interrupted before step 100000000\n")


@pytest.mark.slow
def test_ctrl_c_before_the_first_step() -> None:
    """Ctrl-C ends the program as cleanly while the sessions open."""
    with processes.start(command("train_digits.py", "--steps", 100_000_000), env=environment()) as process:
        assert process.stdout is not None
        assert "images to train on" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_SECS)
    assert (process.returncode, errors) == (130, "")


def on_a_terminal(*options: object, interrupt: bool = False) -> tuple[int, str]:
    """Run the main example on a terminal, and return its exit code and its output."""
    terminal, side = pty.openpty()
    arguments = command("train_digits.py", *options)
    with processes.start(arguments, env=environment(), stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        output = b""
        while True:
            try:
                chunk = os.read(terminal, 4096)
            except OSError:  # on Linux, when the last process has closed the other side
                break
            if not chunk:
                break
            output += chunk
            if interrupt and b": loss " in output:
                process.send_signal(signal.SIGINT)
                interrupt = False
        code = process.wait(HANG_SECS)
    os.close(terminal)
    return code, output.decode()


def screen(output: str) -> list[str]:
    """Return the lines that a terminal shows in the end, with the last of the texts written over each other."""
    return [line.rsplit("\r", 1)[-1].removeprefix("\x1b[K") for line in output.replace("\r\n", "\n").split("\n")]


@pytest.mark.slow
def test_a_terminal_shows_one_line_of_progress() -> None:
    """On a terminal the progress is written over one line, and nothing of it remains between the other lines."""
    code, output = on_a_terminal("--steps", 3_000)
    assert code == 0, output
    assert re.search(r"\r\x1b\[Kstep \d+: loss [\d.]+, [\d,]+ steps per second", output)
    assert "loss = " not in output, "log lines are only for other outputs"
    lines = screen(output)
    assert not [line for line in lines if line.startswith("step ") and ": loss " in line]
    assert lines[-1] == ""
    assert accuracy(lines[-2]) >= 0.93
    assert list(starts("\n".join(lines))) == ["chief", "worker 1", "worker 2", "worker 3"]


@pytest.mark.slow
def test_ctrl_c_on_a_terminal() -> None:
    """Ctrl-C on a terminal ends as cleanly, with the cursor on an empty line."""
    code, output = on_a_terminal("--steps", 100_000_000, interrupt=True)
    assert code == 130, output
    assert "Traceback" not in output
    lines = screen(output)
    assert lines[-1] == ""
    assert lines[-2] == "interrupted before step 100000000"
    assert [reason for _, reason in ends("\n".join(lines)).values()] == ["SIGINT received"] * 4


def test_first_session() -> None:
    """The smallest session prints each loss, and its hook prints the best."""
    done = run("first_session.py")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.splitlines() == [
        "loss 1.0", "loss 0.5", "loss 0.125", "loss 0.25", "best loss after 4 steps: 0.125"
    ]  # fmt: skip


def test_step_waiter() -> None:
    """A wait for a published step ends at it; one for a step that is never reached ends with the publisher's failure."""
    done = run("step_waiter.py")
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert lines[:4] == ["published step 1", "published step 2", "wanted step 2: woken at step 2", "published step 3"]
    assert len(lines) == 5
    assert lines[4].startswith("wanted step 10: ")
    assert lines[4].endswith("because of: out of memory")


def test_agent_hooks() -> None:
    """Hooks of the group overlap; the metrics are cut off and logged, the guardrail answers, each call is in the audit log."""
    done = run("agent_hooks.py")
    assert (done.returncode, done.stderr) == (0, ""), done
    together, in_turn = done.stdout.split("One hook after the other:\n")
    assert len(re.findall(r"^  Metrics\.on_tool_(?:start|end) \S+ +#+ cut off$", together, re.MULTILINE)) == 6
    assert len(re.findall(r"^  Audit\.on_tool_(?:start|end) \S+ +#+$", together, re.MULTILINE)) == 6
    assert "  log: Metrics.on_tool_start failed" in together
    assert [count(part) for part in (together, in_turn)] == [4, 2], "two tool calls, with two hooks each"
    lines = in_turn.splitlines()
    assert "  delete(all files): refused by the guardrail" in lines
    assert lines[-2] == "12 records in the audit log"
    assert re.fullmatch(r"\d\.\d\d s with the group, \d\.\d\d s in turn", lines[-1])


def count(timeline: str) -> int:
    """Return how many calls of hooks were active at the same time."""
    found = re.search(r"up to (\d+) calls of hooks at the same time", timeline)
    assert found, timeline
    return int(found[1])


def readme_programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("number", "wanted"), [(0, []), (1, ["step 1 loss 1.0", "step 2 loss 0.5", "step 3 loss 0.25"])])
def test_the_programs_of_the_readme(number: int, wanted: list[str]) -> None:
    """Each program of the README is complete: it runs and prints this."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", readme_programs()[number]],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HANG_SECS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.splitlines() == wanted
