"""`python -m aiohooks run`: real processes, their output, exit codes and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiohooks.__main__ import main
from tests.support.commands import ENVIRONMENT, command, start_command
from tests.support.waiting import HANG_SECS

pytestmark = [pytest.mark.slow]

JOBS = """
import asyncio, os, signal
import aiohooks as ah

def say(word):
    os.write(1, f"{word} {os.getpid()}\\n".encode())  # in one piece: the processes share the pipe

async def main(task):
    with task.store.publisher(task.name):
        await task.store.advance()
        await task.store.wait_for(task.num_workers + 1)
    return f"{task.num_workers} workers, {task.checkpoint_dir}, run {task.store.run}"

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

def plain(task):
    pass

async def taskless():
    pass
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A directory with the module `jobs`."""
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path


def test_a_function_of_the_current_directory(jobs: Path) -> None:
    """It is run as a chief and its workers; what they return is printed."""
    done = command("run", "jobs:main", "--workers", "2", "--checkpoint-dir", "model", "--run", "digits", cwd=jobs)
    assert (done.returncode, done.stderr) == (0, "")
    returned = f"2 workers, {jobs / 'model'}, run digits"
    assert done.stdout.splitlines() == [f"chief: {returned}", f"worker 1: {returned}", f"worker 2: {returned}"]


def test_a_given_step_store(jobs: Path) -> None:
    """The processes meet there, and a run with a name is kept."""
    done = command("run", "jobs:main", "--workers", "1", "--store", f"local://{jobs}/steps", "--run", "kept", cwd=jobs)
    assert (done.returncode, done.stderr) == (0, "")
    shown = command("steps", f"local://{jobs}/steps", "--run", "kept")
    assert "run kept: step 2 of epoch 1" in shown.stdout
    command("run", "jobs:main", "--workers", "1", "--store", f"local://{jobs}/steps", cwd=jobs)
    assert os.listdir(jobs / "steps") == ["kept"]


def test_a_task_that_fails(jobs: Path) -> None:
    """Its error, the task and the traceback of its process are shown; the exit code is 1."""
    done = command("run", "jobs:fails", "--workers", "1", cwd=jobs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ValueError: the data are bad\nin the worker 1, attempt 1:\nTraceback")
    assert "jobs.py" in done.stderr


def test_a_task_that_dies(jobs: Path) -> None:
    """It is restarted, as often as allowed, with a line about it."""
    done = command("run", "jobs:dies_once", "--workers", "1", cwd=jobs)
    assert (done.returncode, done.stdout) == (0, "chief: 1\nworker 1: 2\n")
    assert "was killed by SIGKILL; restarting it" in done.stderr
    done = command("run", "jobs:dies_once", "--workers", "1", "--max-restarts", "0", cwd=jobs)
    assert done.returncode == 1
    assert "TaskDiedError: the worker 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["jobs"], "'jobs' does not name a function; give module:function, such as train:main"),
        (["jobs:"], "'jobs:' does not name a function"),
        (["a/jobs:main"], "'a/jobs:main' does not name a function"),
        (["jobs.py:main"], "'jobs.py:main' has the name of a file; give that of the module: jobs:main"),
        (["jobbs:main"], "there is no module 'jobbs' in "),
        (["jobs.inner:main"], "there is no module 'jobs.inner' in "),
        (["jobs:mains"], "jobs has no function of this name; give a coroutine function that takes the task; did you mean 'main'"),
        (["jobs:plain"], "jobs has 'plain', which is <function plain"),
        (["jobs:taskless"], "which is called with the Task: too many positional arguments"),
        (["jobs:main", "--store", "memory://"], "store='memory://' is for one process"),
        (["jobs:main", "--store", "redsi://h"], "unknown kind of step store 'redsi'; did you mean 'redis'"),
        (["jobs:main", "--run", ""], "run='': give a printable name"),
        (["jobs:main", "--address", "h:1"], "--address h:1 is for --engine ray"),
        (["jobs:main", "--engine", "ray", "--store", "redis://:secret@h"], "--store is for --engine local"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """The message has the value and what to give instead, never a password; nothing was started, and the exit code is 2."""
    monkeypatch.chdir(jobs)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    assert main(["run", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "secret" not in shown.err


@pytest.mark.parametrize(
    "arguments", [("--workers", "-1"), ("--workers", "x"), ("--engine", "slurm"), ("--grace-secs", "-1")], ids=str
)
def test_options_that_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused with how the command is used."""
    with pytest.raises(SystemExit) as end:
        main(["run", "jobs:main", *arguments])
    assert end.value.code == 2
    assert f"argument {arguments[0]}:" in capsys.readouterr().err


def test_a_module_that_raises(jobs: Path) -> None:
    """Its own traceback is shown, also if it is another module that is missing; the exit code is 1."""
    (jobs / "broken.py").write_text("import does_not_exist\n")
    done = command("run", "broken:main", cwd=jobs)
    assert done.returncode == 1
    assert "No module named 'does_not_exist'" in done.stderr
    assert "broken.py" in done.stderr
    assert "the module 'broken' could not be imported" in done.stderr


def test_a_step_store_that_is_not_there(jobs: Path) -> None:
    """It is found before any process is started, and said once."""
    (jobs / "file").write_text("")
    done = command("run", "jobs:main", "--store", f"local://{jobs}/file", cwd=jobs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "Not a directory" in done.stderr


@contextlib.contextmanager
def started(jobs: Path, *arguments: str, tasks: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a run in a process group of its own, and yield it with the ids of its tasks' processes when all have started."""
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_tasks(jobs: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int) -> None:
    """Each session finishes its step and ends; the exit code is the signal's, and no process and no directory is left."""
    temporary = jobs / "temporary"
    temporary.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(temporary))
    with started(jobs, "jobs:trains", tasks=3) as (process, pids):
        process.send_signal(number)
        out, err = process.communicate(timeout=HANG_SECS)
    assert process.returncode == code, err
    assert sorted(line for line in out.splitlines() if line.startswith("stopped")) == sorted(f"stopped {pid}" for pid in pids)
    assert "Traceback" not in err
    assert all(has_ended(pid) for pid in pids)
    assert os.listdir(temporary) == []


def test_a_task_that_ignores_the_signal(jobs: Path) -> None:
    """It is killed after the grace period."""
    with started(jobs, "jobs:hangs", "--grace-secs", "0.2", tasks=2) as (process, pids):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_SECS)
    assert process.returncode == 143
    assert all(has_ended(pid) for pid in pids)
