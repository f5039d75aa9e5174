"""The examples and the README's programs, run as a user runs them: each in its own process."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.needs import need
from tests.support.ray_cluster import environment as ray_environment
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

DIGITS, TORCH, ASYNC_RL = ON_DIGITS = ("train_digits.py", "train_torch.py", "async_rl_digits.py")
"""Examples that train on the images of scikit-learn."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
FOREVER = ("--steps", 100_000_000)


def command(example: str, *options: object) -> list[str]:
    if example in ON_DIGITS:
        need("scikit-learn")
    return [sys.executable, "-W", "error", f"examples/{example}", *map(str, options)]


def output_of(example: str, *options: object, code: int = 0, errors: str | None = "") -> str:
    """Run an example to its end, and return what it prints; check its exit code, and the error
    stream unless others use it.
    """
    env = {**ENVIRONMENT, **ray_environment(), "RAY_LOG_TO_DRIVER": "1", "RAY_DEDUP_LOGS": "0"}
    done = processes.run(command(example, *options), env=env)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    if errors is None:
        return done.stdout + done.stderr
    assert errors in done.stderr if errors else not said_in(done.stderr), done
    return done.stdout


def said_in(errors: str) -> list[str]:
    """Return the lines of an error stream, but for warnings of a slow disk."""
    return [line for line in errors.splitlines() if "has waited" not in line]


@contextlib.contextmanager
def started(
    example: str, *options: object, until: str, **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start an example, and read its output up to a line with a text."""
    with processes.start(command(example, *options), env=ENVIRONMENT, **streams) as process:
        try:
            assert process.stdout is not None
            while until not in (line := process.stdout.readline()):
                assert line, process.communicate()
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> str:
    """Send SIGINT, wait for the end with its exit code, and return the rest of the output."""
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANG_SECS)
    assert (process.returncode, said_in(errors)) == (128 + signal.SIGINT, [])
    return output


# -- small examples: what each prints, line by line, as patterns

PRINTED = {
    "first_session.py": [
        "loss 1.0",
        "loss 0.5",
        r"loss 0\.125",
        r"loss 0\.25",
        r"best loss after 4 steps: 0\.125",
    ],
    "step_waiter.py": [
        "published step 1",
        "published step 2",
        "wanted step 2: woken at step 2",
        "published step 3",
        "wanted step 10: .*because of: out of memory",
    ],
    "explore_hooks.py": [
        r"an error: AssertionError\('5 and a fee of 1 were spent, and .*",
        r"(?s:.*again: explore\(\.\.\., replay='.*)",
        "with a lock: nothing found in 1,001 schedules",
    ],
    "agent_hooks.py": [
        r"\d+\.\d\d s with 4 hooks that wait 0\.05 s each, called concurrently",
        r"\d+\.\d\d s with the same hooks, awaited in turn",
        r'log: Sender#5\.on_tool_start failed; continuing because on_error is "log": .*',
        r"\d+\.\d\d s with one more that hangs, and has a time limit of 0\.1 s",
        "1[34] calls were sent",  # the limit of the one that hangs may be over before the call is
        "Which coat do I need\\?",
        "weather\\(Bergen\\): rain",
        r"delete\(all files\): refused by the guardrail",
        r"Take an umbrella to Bergen\.",
    ],
}


@pytest.mark.parametrize("example", PRINTED)
def test_what_an_example_prints(example: str) -> None:
    """A session and its best loss, waits that are woken or fail, a lost update that is found, hooks
    that overlap.
    """
    printed = output_of(example)
    assert re.fullmatch("\n+".join(PRINTED[example]), printed.strip()), printed


def test_the_timeline_shows_what_overlaps(tmp_path: Path) -> None:
    """The example writes a trace whose tracks overlap, and the script of the site draws it."""
    written, *tracks = output_of("timeline.py", tmp_path).splitlines()
    trace = tmp_path / "timeline-7.json"
    assert written == f"wrote {trace}"
    busy = {
        name: float(milliseconds)
        for name, milliseconds in (track.rsplit(maxsplit=2)[:2] for track in tracks)
    }
    names = (
        "prefetched feeds",
        "train_step",
        "Upload",
        "Audit",
        "Metrics in the background",
        "checkpoint writes",
    )
    assert sum(busy[name] for name in names) > busy["steps"], (
        "one after another it would have taken longer"
    )
    picture = tmp_path / "timeline.svg"
    subprocess.run(
        [sys.executable, ROOT / "docs" / "images" / "draw_timeline.py", trace, picture], check=True
    )
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    assert {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")} >= {
        *names,
        "steps",
        "step 8",
    }


REFUSED = [
    (DIGITS, "--workers 0", "--workers is 0: give a number from 1 to 100"),
    (DIGITS, "--steps ten", "argument --steps: invalid int value: 'ten'"),
    (
        DIGITS,
        "--engine ray --store local:///x",
        "--engine ray keeps the global step in the cluster: leave out --store",
    ),
    (ASYNC_RL, "--bounds 0 -1", "--bounds has -1: give whole numbers, 0 or more"),
    (ASYNC_RL, "--seeds 0", "--seeds is 0: give 1 or more"),
]


@pytest.mark.parametrize(("example", "options", "message"), REFUSED)
def test_an_invalid_option_is_refused(example: str, options: str, message: str) -> None:
    """An invalid option is named in one sentence, with the exit code for wrong usage."""
    assert output_of(example, *options.split(), code=2, errors=f"{message}\n") == ""


# -- examples/train_digits.py


@dataclasses.dataclass
class Training:
    """What `train_digits.py` says of a run: by worker the step at which it was to start, and the
    one at which it did.
    """

    output: str

    @property
    def starts(self) -> dict[str, tuple[int, int]]:
        found = re.findall(
            r"((?:chief|worker \d+)): asked to start at step (\d+), started at step (\d+)",
            self.output,
        )
        return {
            name: (int(asked), int(seen)) for name, asked, seen in sorted(found)
        }  # processes print in any order

    @property
    def ends(self) -> dict[str, tuple[int, str]]:
        """The number of steps of each worker, and why it stopped."""
        found = re.findall(r"(.+): (\d+) steps, stopped because: (.+)", self.output)
        return {name: (int(runs), reason) for name, runs, reason in found}

    @property
    def accuracy(self) -> float:
        return self.number(r"accuracy on 450 held-out images: (\d\.\d+)")

    def number(self, pattern: str) -> float:
        found = re.search(pattern, self.output)
        assert found, self.output
        return float(found[1])


def trained(*options: object, errors: str | None = "") -> Training:
    return Training(output_of(DIGITS, *options, errors=errors))


def check_starts(training: Training, workers: int, k: int) -> None:
    """Check that all workers were started, at K times the logarithm of their number, and none too
    early.
    """
    assert [want for want, _ in training.starts.values()] == [
        int(k * math.log(number + 1)) for number in range(workers)
    ]
    assert all(start >= want for want, start in training.starts.values())


@pytest.mark.slow
def test_the_main_job_reaches_its_accuracy() -> None:
    """Without options four workers train to an accuracy of 0.93 or more, each starting at its
    step.
    """
    done = trained()
    assert done.accuracy >= 0.93
    check_starts(done, 4, 200)
    assert list(done.starts) == ["chief", "worker 1", "worker 2", "worker 3"]
    losses = [float(loss) for loss in re.findall(r"loss = ([\d.]+)", done.output)]
    assert len(losses) >= 5
    assert losses[-1] < losses[0] / 2, "the loss falls"
    assert re.search(r"[\d,]+ steps per second", done.output)


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """With a checkpoint directory a second run continues from the last step and prints so; damaged
    checkpoints end it.
    """
    directory = tmp_path / "made" / "here"
    options = (
        "--workers",
        2,
        "--k",
        20,
        "--checkpoint-dir",
        directory,
        "--checkpoint-every",
        70,
        "--steps",
    )
    done = trained(*options, 150)
    assert "continuing from" not in done.output
    first = sum(runs for runs, _ in done.ends.values())
    done = trained(*options, 300)
    assert f"continuing from step {first}, the newest checkpoint in {directory}\n" in done.output
    assert min(start for _, start in done.starts.values()) == first
    runs = sum(runs for runs, _ in done.ends.values())
    assert 300 <= first + runs < 300 + 2
    assert f"\n{runs} steps in " in done.output
    assert done.accuracy > 0.9
    for manifest in directory.glob("*/manifest.json"):
        manifest.write_text("not what was written")
    output_of(
        DIGITS,
        *options,
        450,
        code=1,
        errors=f"{directory} has checkpoints and none of them is good",
    )


@pytest.mark.slow
def test_ctrl_c_stops_all_workers() -> None:
    """Ctrl-C ends every worker after its step; the accuracy is printed and the exit code is 130; as
    cleanly at the start.
    """
    with started(DIGITS, *FOREVER, until="loss = ") as process:
        done = Training(interrupted(process))
    assert 0 <= done.accuracy <= 1
    assert [reason for _, reason in done.ends.values()] == ["SIGINT received"] * 4
    assert done.output.endswith("interrupted before step 100000000\n")
    with started(DIGITS, *FOREVER, until="images to train on") as process:
        interrupted(process)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "workers"),
    [(("--processes",), 3), (("--engine", "ray"), 4)],
    ids=["processes", "ray"],
)
def test_processes_train_together(engine: tuple[str, ...], workers: int) -> None:
    """Each process, of this machine or on a cluster, trains its own copy of the model; the chief's
    is the mean.
    """
    if "ray" in engine:
        need("ray")
    done = trained(
        *engine,
        *(("--workers", workers) if workers == 3 else ()),
        "--steps",
        600,
        "--k",
        20,
        errors=None,
    )
    check_starts(done, workers, 20)
    assert 600 <= done.number(r"(\d+) steps in") < 600 + workers
    assert done.number(r"held-out images: ([\d.]+)") > 0.85


# -- examples/train_torch.py


@pytest.mark.slow
def test_torch_reaches_its_accuracy_and_is_continued(tmp_path: Path) -> None:
    """SIGTERM ends it after the step; started again it continues from there, and ends with the best
    weights.
    """
    options = ("--every", 50, "--patience", 10**6, "--checkpoint-dir", tmp_path, "--steps")
    with started(
        TORCH, *options, 10**6, until="step 50:", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_SECS)
    assert process.returncode == 128 + signal.SIGTERM
    newest = int(max(path.name for path in tmp_path.glob("step-*")).split("-")[1].split(".")[0])
    done = Training(output_of(TORCH, *options, newest + 450, errors=None))
    assert 50 <= done.number(r"continuing from step (\d+)") == newest
    assert done.accuracy >= 0.95
    assert "with the weights of step" in done.output


# -- examples/async_rl_digits.py


def rows(output: str) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    names = (
        "bound",
        "seed",
        "accuracy",
        "steps_per_sec",
        "waiting",
        "lag_mean",
        "lag_max",
        "refused",
        "crashed_at",
        "continued",
    )
    lines = (line.replace(",", " ").replace("%", "").split() for line in output.splitlines())
    table = [
        dict(zip(names, words, strict=False)) for words in lines if words and words[0].isdigit()
    ]
    return [
        {name: text if name == "seed" else float(text) for name, text in row.items()}
        for row in table
    ]


@pytest.mark.slow
def test_no_item_is_used_beyond_the_bound() -> None:
    """For each bound the run learns, continues after a crash, and uses no item beyond the bound; a
    bound of 4 makes a lag.
    """
    table = rows(output_of(ASYNC_RL, "--seeds", 1, "--steps", 80))
    assert [(row["bound"], row["seed"]) for row in table] == [(0, "0"), (1, "0"), (4, "0")]
    for row in table:
        assert row["lag_mean"] <= row["lag_max"] <= row["bound"]
        assert row["accuracy"] > 0.8, "a tenth is what guessing gives"
        assert 0 < row["waiting"] < 100
        assert 0 < row["crashed_at"] < 80, "the crash is inside the run"
        # The newest checkpoint may be that of the step of the crash.
        assert row["continued"] % 20 == 0
        assert row["crashed_at"] - 40 <= row["continued"] <= row["crashed_at"] + 1
    assert table[0]["lag_mean"] == 0
    assert table[2]["lag_max"] > 1, "the bound is used"
