"""`python -m aiohooks run`: real processes, their output, exit codes and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiohooks.stores import open_step_store
from tests.support.commands import ENVIRONMENT, command, start_command
from tests.support.waiting import HANG_SECS

pytestmark = [pytest.mark.slow]

JOBS = """
import asyncio, os, signal, sys
import aiohooks as ah

def say(word):
    os.write(1, f"{word} {os.getpid()}\\n".encode())  # in one piece: the processes share the pipe

async def main(task):
    with task.store.publisher(task.name):
        await task.store.advance()
        await task.store.wait_for(task.num_workers + 1)
    program = os.path.basename(sys.argv[0])
    return f"{program}, {task.num_workers} workers, {task.checkpoint_dir}, run {task.store.run}"

async def fails(task):
    if task.task_id == 1:
        raise ValueError("the data are bad")
    await asyncio.Event().wait()

async def dies_once(task):
    if task.task_id == 1 and task.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.attempt

async def trains(task):
    async def step():
        await asyncio.sleep(0)

    async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
        say("started")
        while not session.should_stop():
            await session.run(())
    say("stopped")

async def hangs(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("started")
    await asyncio.Event().wait()

"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A directory with the module `jobs`."""
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path


def test_a_function_of_the_current_directory(jobs: Path) -> None:
    """It is run as a chief and its workers, as the program of each; what they return is printed."""
    done = command(
        "run",
        "jobs:main",
        "--workers",
        "2",
        "--checkpoint-dir",
        "model",
        "--run",
        "digits",
        cwd=jobs,
    )
    assert (done.returncode, done.stderr) == (0, "")
    returned = f"jobs.py, 2 workers, {jobs / 'model'}, run digits"
    assert done.stdout.splitlines() == [
        f"chief: {returned}",
        f"worker 1: {returned}",
        f"worker 2: {returned}",
    ]


def test_a_given_step_store(jobs: Path) -> None:
    """The processes meet there, and a run with a name is kept."""
    done = command(
        "run",
        "jobs:main",
        "--workers",
        "1",
        "--store",
        f"local://{jobs}/steps",
        "--run",
        "kept",
        cwd=jobs,
    )
    assert (done.returncode, done.stderr) == (0, "")

    async def step_of_run() -> int:
        async with open_step_store(f"local://{jobs}/steps", run="kept") as store:
            return store.latest.step

    assert asyncio.run(step_of_run()) == 2
    command("run", "jobs:main", "--workers", "1", "--store", f"local://{jobs}/steps", cwd=jobs)
    assert os.listdir(jobs / "steps") == ["kept"]


def test_a_task_that_fails(jobs: Path) -> None:
    """Its error, the task and the traceback of its process are shown; the exit code is 1."""
    done = command("run", "jobs:fails", "--workers", "1", cwd=jobs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "ValueError: the data are bad\nin the worker 1, attempt 1:\nTraceback"
    )
    assert "jobs.py" in done.stderr


def test_a_task_that_dies(jobs: Path) -> None:
    """It is restarted, as often as allowed, with a line about it."""
    done = command("run", "jobs:dies_once", "--workers", "1", cwd=jobs)
    assert (done.returncode, done.stdout) == (0, "chief: 1\nworker 1: 2\n")
    assert "was killed by SIGKILL; restarting it" in done.stderr
    done = command("run", "jobs:dies_once", "--workers", "1", "--max-restarts", "0", cwd=jobs)
    assert done.returncode == 1
    assert "TaskDiedError: the worker 1" in done.stderr


def test_what_stops_a_run_before_it_starts(jobs: Path) -> None:
    """The traceback of a module that cannot be imported, or, once and in a line, a step store that
    is not there.
    """
    (jobs / "broken.py").write_text("import does_not_exist\n")
    done = command("run", "broken:main", cwd=jobs)
    assert (done.returncode, done.stdout) == (1, "")
    for text in (
        "No module named 'does_not_exist'",
        "broken.py",
        "the module 'broken' could not be imported",
    ):
        assert text in done.stderr
    done = command("run", "jobs:main", "--store", f"local://{jobs}/broken.py", cwd=jobs)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "broken.py cannot be made" in done.stderr


@contextlib.contextmanager
def started(
    jobs: Path, *arguments: str, tasks: int
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a run in a process group of its own, and yield it with the ids of its tasks' processes
    when all have started.
    """
    with start_command("run", *arguments, "--workers", str(tasks - 1), cwd=jobs) as process:
        try:
            assert process.stdout is not None
            pids: list[int] = []
            while len(pids) < tasks:
                word, pid = process.stdout.readline().split()
                assert word == "started"
                pids.append(int(pid))
            yield process, pids
        finally:
            process.kill()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.sample
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_tasks(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """Each session finishes its step and ends; the exit code is the signal's, and no process and no
    run is left.
    """
    temporary = jobs / "temporary"
    temporary.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(temporary))
    with started(jobs, "jobs:trains", tasks=3) as (process, pids):
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_SECS)
    assert process.returncode == code, err
    assert sorted(line for line in out.splitlines() if line.startswith("stopped")) == sorted(
        f"stopped {pid}" for pid in pids
    )
    assert "Traceback" not in err
    assert all(has_ended(pid) for pid in pids)
    assert [*temporary.glob("aiohooks-*/run-*")] == []


def test_a_task_that_ignores_the_signal(jobs: Path) -> None:
    """It is killed after the grace period."""
    with started(jobs, "jobs:hangs", "--grace-secs", "0.2", tasks=2) as (process, pids):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_SECS)
    assert process.returncode == 143
    assert all(has_ended(pid) for pid in pids)
