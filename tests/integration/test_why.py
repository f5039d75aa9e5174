"""`aiohooks why PID`: processes that hang for many reasons, and one command that names each with
its line, and since when.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiohooks.__main__ import main
from tests.support.hangs import line_of, unfolded
from tests.support.processes import start
from tests.support.store_servers import running
from tests.support.waiting import HANG_SECS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.every_python,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc"),
]

Ask = Callable[..., str]
Hang = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """What starts a program of `tests.support.hangs` that can be asked, and waits until it is about
    to hang.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOHOOKS_WHY", "1")
    with contextlib.ExitStack() as processes:

        def begin(name: str, url: object = "") -> subprocess.Popen[str]:
            process = processes.enter_context(
                start(
                    [sys.executable, "-m", "tests.support.hangs", name, str(url)],
                    stdin=subprocess.PIPE,
                )
            )
            processes.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield begin


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """What asks again until the answer matches: a process is about to hang, and then does."""

    def until(pattern: str, *target: object, code: int = 0) -> str:
        end = time.monotonic() + HANG_SECS
        while True:
            found = main(["why", *map(str, target)])
            text = unfolded(capsys.readouterr().out)
            if re.search(pattern, text):
                assert found == code, text
                return text
            assert time.monotonic() < end, f"{pattern} is not in\n{text}"

    return until


SECS = r"[0-9.e+-]+ s"
# LINE, AWAITS and OUTER are the places of comments; S are seconds.
HANGS = {
    "deadlock": (
        r"^deadlock: Deadlock(#2)?.before_run at step 1, LINE, S <- asyncio.Lock.acquire <-"
        r" Deadlock(#2)?.* LINE, S"
    ),
    "thread_lock": (r"InThread.* AWAITS, S <- thread .* LINE$"),
    "slow_disk": (
        r"CheckpointSaverHook.after_run at step 1, S <- .*save of the checkpoint of step 0 in .*"
        r" LINE"
    ),
    "recovery": (
        r"in recovery 1 from Unavail.*, recovery at LINE waits for the pause of 600 s before"
        r" recovery 1 .*is away'\)\), S"
    ),
    "blocked_loop": (
        r"'chief' \(step 1, in run 1\) waits for Block.after_run \(runs; the event loop waits"
        r" for it\), LINE"
    ),
    "task_done": (r"'chief' \(step 1, in its block\).* LINE <- asyncio.Queue.join"),
    "two_runs": (
        r"deadlock: .*Want.before_run at LINE, S <- step 9 of (?:rollouts|weights)"
        r" .*Want.before_run at LINE, S <- step 9 of (?:rollouts|weights)"
    ),
    "nested": (
        r"Nest.before_run at step 1, OUTER, S <- session 'evaluation' .* <- Forget.before_run at"
        r" .*, LINE, S <- asyncio.Event.wait"
    ),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_named_with_its_line_and_since_when(
    name: str, hang: Hang, ask: Ask, tmp_path: Path
) -> None:
    """The command names what hangs, where, for how long, and what it waits for, by the id of the
    process.
    """
    process = hang(name, tmp_path / "checkpoints")
    lines = {
        "LINE": name,
        "AWAITS": "awaits thread_lock",
        "OUTER": "outer nested",
    }
    pattern = re.sub(r"\bS\b", SECS, HANGS[name])
    for word, comment in lines.items():
        if word in pattern:
            pattern = pattern.replace(word, rf"\S*{re.escape(line_of(comment))}")
    ask(f"(?m){pattern}", process.pid)


def test_another_process_that_is_stopped(hang: Hang, ask: Ask, tmp_path: Path) -> None:
    """A worker names the trainer that it waits for, which is asked next: first while it works, and
    then while it is stopped.
    """
    url = f"local://{tmp_path / 'steps'}"
    trainer, worker = hang("publishes", url), hang("waits_for_step", url)
    waits = (
        rf"GlobalStepWaiterHook.before_run at step 4, {SECS} <- .*step 40 of digits \(seen 3\),"
        rf" {SECS} <- "
    )
    trainer_id = rf"trainer, process {trainer.pid} on \S+"
    ask(rf"(?m){waits}{trainer_id}$", worker.pid)
    place = re.escape(line_of("publishes"))
    ask(rf"^session 'trainer' \(step 3, in its block.* at \S*{place}", trainer.pid)
    trainer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, trainer.pid, os.WSTOPPED | os.WNOWAIT)
    ask(rf"{waits}{trainer_id} \(stopped by a signal", worker.pid)
    ask(
        rf"^process {trainer.pid}: stopped by a signal; SIGCONT continues it$",
        trainer.pid,
        code=1,
    )


def test_c_code_that_holds_the_lock_of_the_interpreter(hang: Hang, ask: Ask) -> None:
    """The process cannot answer, and the command shows the probable reason."""
    process = hang("c_code")
    reason = "it is in C code that does not let Python's other threads run"
    ask(rf"^process {process.pid}: has not answered in 1.5 s: {reason}", process.pid, code=1)


def test_a_dead_publisher_whose_lease_has_not_run_out(hang: Hang, ask: Ask, tmp_path: Path) -> None:
    """The step store still counts on a publisher that the system knows to be dead."""
    with running("valkey", tmp_path, keeps=False) as server:
        url = server.url
        trainer, worker = hang("publishes", url), hang("waits_for_step", url)
        waits = (
            rf"GlobalStepWaiterHook.before_run at step 4, {SECS} <- .*step 40 of digits \(seen 3\),"
            rf" {SECS} <- "
        )
        ask(rf"{waits}trainer, process {trainer.pid}", worker.pid)
        trainer.kill()
        trainer.wait()
        ask(
            rf"{waits}trainer, process {trainer.pid} on \S+ \(does not exist any more\)",
            worker.pid,
        )


def test_an_engine_that_is_away(hang: Hang, ask: Ask, tmp_path: Path) -> None:
    """A commit waits for a server that was killed."""
    with running("valkey", tmp_path, keeps=False) as server:
        process = hang("engine_away", server.url)
        server.kill()
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        away = rf"RedisEngine of digits \(unreachable for {SECS}\)"
        ask(
            rf"'chief' \(step 1, in run 2 for {SECS}\).* at \S*{re.escape(line_of('run'))} waits"
            rf" for .*{SECS} <- .*{away}",
            process.pid,
        )
