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
from tests.support.ray_cluster import environment as ray_environment
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

STARTED = re.compile(r"(chief|worker \d+): asked to start at step (\d+), started at step (\d+)")
ENDED = re.compile(r"(chief|worker \d+): (\d+) steps, stopped because: (.+)")
ACCURACY = re.compile(r"accuracy on 450 held-out images: (\d\.\d+)")


ON_DIGITS = ("train_digits.py", "train_torch.py", "async_rl_digits.py")
"""Examples that train on the images of scikit-learn."""


def command(example: str, *options: object) -> list[str]:
    if example in ON_DIGITS:
        need("scikit-learn")
    return [sys.executable, "-W", "error", f"examples/{example}", *map(str, options)]


def environment() -> dict[str, str]:
    return {**os.environ, **ray_environment(), "PYTHONPATH": str(ROOT), "RAY_LOG_TO_DRIVER": "1", "RAY_DEDUP_LOGS": "0"}


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


def check_digits(output: str, workers: int, steps: int, k: int, *, restored: int = 0) -> int:
    """Check the run of a chief and workers; return how many steps they made."""
    # Workers finish the run that they are in when the last step is reached: at most one step more each.
    made = int(re.findall(r"(\d+) steps in", output)[0])
    assert steps <= restored + made < steps + workers
    names = ["chief", *(f"worker {number}" for number in range(1, workers))]
    wanted = {name: int(k * math.log(number + 1)) for number, name in enumerate(names)}
    seen, ended = starts(output), ends(output)
    assert {name: want for name, (want, _) in seen.items()} == {name: want for name, want in wanted.items() if want < steps}
    assert all(max(want, restored) <= start < steps for want, start in seen.values())
    if ended.keys() != wanted.keys():
        assert "ray" in output, "what is printed last on its nodes may be lost"
        return made
    assert made == sum(runs for runs, _ in ended.values())
    for name, (runs, reason) in ended.items():
        if name in seen:
            assert runs > 0
            assert f"reached the last step, {steps}" in reason
        else:
            assert f"{name}: asked to start at step {wanted[name]}, never started\n" in output
            assert (runs, reason) == (0, f"chief finished at step {steps}, wanted {wanted[name]}")
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "workers", "steps", "k", "least"),
    [
        ((), 4, 2_000, 200, 0.93),
        (("--workers", 1, "--steps", 150, "--k", 0), 1, 150, 0, 0.0),
        (("--workers", 5, "--steps", 150, "--k", 20), 5, 150, 20, 0.0),
        (("--workers", 3, "--steps", 60, "--k", 90), 3, 60, 90, 0.0),
        (("--processes", "--workers", 3, "--steps", 600, "--k", 20), 3, 600, 20, 0.85),
        (("--engine", "ray", "--steps", 600, "--k", 20), 4, 600, 20, 0.85),
    ],
    ids=["the main job", "alone", "more workers", "some never start", "processes", "Ray"],
)
def test_digits(options: tuple[object, ...], workers: int, steps: int, k: int, least: float) -> None:
    """Each worker starts at its step, or ends where that is beyond the last one; the model, or the mean of them, is good."""
    need(*(["ray"] if "ray" in options else []))
    done = run("train_digits.py", *options)
    assert done.returncode == 0, done
    check_digits(done.stdout + done.stderr, workers, steps, k)
    assert accuracy(done.stdout) >= least
    losses = [float(loss) for loss in re.findall(r"loss = ([\d.]+)", done.stdout)]
    assert not options or losses
    if not options:
        assert done.stderr == ""
        assert len(losses) >= 5
        assert losses[-1] < losses[0] / 2, "the loss falls"


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
        (["--k", "-1"], "--k is -1: give a number from 0 to 1000000000"),
        (["--checkpoint-every", "0"], "--checkpoint-every is 0: give a number from 1 to 1000000000"),
        (["--engine", "ray", "--store", "local:///x"], "--engine ray keeps the global step in the cluster: leave out --store"),
    ],
)
def test_an_invalid_option_is_refused(options: list[str], message: str) -> None:
    """An invalid option is named in one sentence, with the exit code for wrong usage."""
    done = run("train_digits.py", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(message)


@pytest.mark.slow
@pytest.mark.parametrize("in_processes", [False, True])
def test_a_run_continues_from_its_checkpoint(tmp_path: Path, in_processes: bool) -> None:
    """With a checkpoint directory a second run continues from the last step and prints so; damaged checkpoints end it."""
    directory = tmp_path / "made" / "here"
    given = ("--store", f"local://{tmp_path}/steps") if in_processes else ("--checkpoint-every", 70)
    options = ("train_digits.py", "--workers", 2, "--k", 20, "--checkpoint-dir", directory, *given, "--steps")
    first = run(*options, 600)
    made = check_digits(first.stdout, 2, 600, 20)
    assert "continuing from" not in first.stdout
    second = run(*options, 900)
    assert f"continuing from step {made}, the newest checkpoint in {directory}\n" in second.stdout
    assert starts(second.stdout)["chief"] == (0, made)
    check_digits(second.stdout, 2, 900, 20, restored=made)
    assert accuracy(second.stdout) > 0.9
    for manifest in directory.glob("*/manifest.json"):
        manifest.write_text("not what was written")
    done = run(*options, 1_000)
    assert done.returncode == 1
    assert f"{directory} has checkpoints and none of them is good" in done.stderr
    assert in_processes or "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("after", ["images to train on", "loss = "])
def test_ctrl_c_stops_all_workers(after: str) -> None:
    """Ctrl-C ends every worker after its step, or while it opens; the accuracy is printed and the exit code is 130."""
    with processes.start(command("train_digits.py", "--steps", 100_000_000), env=environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if after in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_SECS)
    assert (process.returncode, errors) == (130, "")
    if after == "loss = ":
        assert 0 <= accuracy(output) <= 1
        assert [reason for _, reason in ends(output).values()] == ["SIGINT received"] * 4
        assert output.endswith("interrupted before step 100000000\n")


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
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_terminal(interrupt: bool) -> None:
    """Progress is written over one line, of which nothing remains at the end or after Ctrl-C; the cursor is on an empty line."""
    code, output = on_a_terminal("--steps", 100_000_000 if interrupt else 3_000, interrupt=interrupt)
    assert code == (130 if interrupt else 0), output
    assert re.search(r"\r\x1b\[Kstep \d+: loss [\d.]+, [\d,]+ steps per second", output)
    assert "loss = " not in output, "log lines are only for other outputs"
    assert "Traceback" not in output
    lines = screen(output)
    assert not [line for line in lines if line.startswith("step ") and ": loss " in line]
    assert lines[-1] == ""
    assert list(starts("\n".join(lines)))[:1] == ["chief"]
    if interrupt:
        assert lines[-2] == "interrupted before step 100000000"
        assert [reason for _, reason in ends("\n".join(lines)).values()] == ["SIGINT received"] * 4
    else:
        assert accuracy(lines[-2]) >= 0.93


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
    done = processes.run_python("-c", readme_programs()[number], env=environment())
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.splitlines() == wanted


@pytest.mark.slow
def test_training_reaches_its_accuracy_and_is_continued(tmp_path: Path) -> None:
    """SIGTERM ends it after the step; started again it continues from there, and ends with the best weights."""
    options = ("--every", 50, "--patience", 10**6, "--checkpoint-dir", tmp_path)
    arguments = command("train_torch.py", *options, "--steps", 10**6)
    with processes.start(arguments, env=environment()) as first:
        assert first.stderr is not None
        assert "step 50/1000000" in first.stderr.readline()
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=HANG_SECS)
    assert first.returncode == 128 + signal.SIGTERM
    newest = int(max(path.name for path in tmp_path.glob("step-*")).split("-")[1].split(".")[0])
    done = run("train_torch.py", *options, "--steps", newest + 450)
    assert done.returncode == 0, done
    assert (found := re.search(r"continuing from step (\d+)", done.stdout))
    assert 50 <= int(found[1]) == newest
    assert (found := re.search(r"accuracy on 450 held-out images: (\d\.\d+), with the weights of step (\d+)", done.stdout))
    assert float(found[1]) >= 0.95


@pytest.mark.slow
def test_training_stops_when_it_gets_no_better() -> None:
    """The best weights are those of an evaluation before the last ones."""
    done = run("train_torch.py", "--steps", 900, "--every", 10, "--patience", 3)
    assert done.returncode == 0, done
    assert "accuracy" in done.stdout.splitlines()[0]  # the reason of the stop
    assert "with the weights of step" in done.stdout
