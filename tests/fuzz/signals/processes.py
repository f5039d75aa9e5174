"""Signals to processes that run a training program, in a chosen phase or at a random moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah
from tests.support import processes
from tests.support.waiting import HANG_SECS

PHASES = (
    "begin",
    "create_session",
    "after_create_session",
    "before_run",
    "wait",
    "step",
    "recovery",
    "save",
    "after_run",
    "end",
    "close",
    "blocking",
)
SILENT_PHASES = ("blocking", "close")
"""In these phases the process does not print that a signal has arrived; two that are pending would
count as one.
"""
REPEAT_SECS = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One process: the phase of its first signal, and all signals."""

    phase: str
    numbers: tuple[signal.Signals, ...]
    run: str
    loop: str
    result: str
    """What the program gives `aiohooks.run` to exit with: "0", or nothing."""
    lines: int
    """Without a phase: the number of printed lines after which the first signal is sent."""

    def __str__(self) -> str:
        names = ", ".join(number.name for number in self.numbers)
        place = self.phase or f"line {self.lines}"
        return f"{names} at {place}, {self.run}.run on {self.loop}, exits with {self.result!r}"

    @property
    def stays(self) -> list[str]:
        """The phases in which the process waits for the next signal."""
        if self.phase == "close":  # a second signal does not end it
            return [] if len(self.numbers) == 1 else ["close"]
        return [[], ["end"], ["end", "close"]][len(self.numbers) - 1]

    @property
    def exit_codes(self) -> set[int]:
        """The documented codes; for a process ended by a signal, `subprocess` has -n where a shell
        has 128 + n.
        """
        last = self.numbers[-1]
        if len(self.numbers) == 1:
            return {128 + last if self.run == "aiohooks" and not self.result else 0}
        if len(self.numbers) == 2 and not (last == signal.SIGINT and self.run == "asyncio"):
            return {128 + last}
        return {-last}  # after a third signal, and after a KeyboardInterrupt


@dataclass(slots=True)
class ProcessTally:
    """The signals sent to processes, and the violations found."""

    phases: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    violations: list[str] = field(default_factory=list)
    secs: float = 0.0


def send_to_processes(*, count: int, loop: str, seed: int = 0) -> ProcessTally:
    """Send signals to `count` processes, one after the other."""
    found = ProcessTally()
    began = time.perf_counter()
    for case in _cases(count, loop, seed):
        found.phases[case.phase or "random moment"] += 1
        found.sent += len(case.numbers)
        with tempfile.TemporaryDirectory() as directory:
            found.violations += [
                f"{case}: {problem}" for problem in _problems(case, Path(directory))
            ]
    found.secs = time.perf_counter() - began
    return found


def _cases(count: int, loop: str, seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for number in range(count):
        phase = (
            PHASES[number // 2 % len(PHASES)] if number % 2 == 0 else ""
        )  # every second one at a random moment
        counts = {"close": (1, 3), "blocking": (3,)}.get(phase, (1, 1, 2, 2, 3))
        numbers = tuple(
            rng.choice((signal.SIGINT, signal.SIGTERM)) for _ in range(rng.choice(counts))
        )
        run, result = rng.choice(("aiohooks", "asyncio")), rng.choice(("", "0"))
        yield Case(phase, numbers, run, loop, result, rng.randrange(1, 60))


def _problems(case: Case, directory: Path) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.signals.program",
        str(directory),
        f"--at={case.phase}",
    ]
    command += ["--run", case.run, "--loop", case.loop, f"--result={case.result}"]
    command += ["--stay", *case.stays]
    with processes.start(command) as process:
        timer = threading.Timer(HANG_SECS, process.kill)
        timer.start()
        try:
            lines = _send_signals(case, process)
            output, errors = process.communicate()
        except EOFError as error:
            return [f"{error!r}, exit code {process.wait()}: {process.communicate()[1][-500:]}"]
        finally:
            timer.cancel()
    lines += output.splitlines()
    problems: list[str] = []
    if process.returncode not in case.exit_codes:
        problems.append(
            f"the exit code is {process.returncode}, not one of {case.exit_codes}: {errors[-500:]}"
        )
    if errors and process.returncode != -signal.SIGINT:
        problems.append(f"on stderr: {errors[-500:]}")
    if len(case.numbers) < 3:
        problems += _check_end(case, directory, lines[-1])
    return problems


def _send_signals(case: Case, process: subprocess.Popen[str]) -> list[str]:
    """Send each signal when the process is at its phase, and return the lines that it printed until
    then.
    """
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EOFError(f"it printed nothing after {lines}")
        lines.append(line.rstrip("\n"))

    def read_to(wanted: str) -> None:
        while wanted not in lines:
            read()

    if case.phase:
        read_to(f"at {case.phase}")
    while not case.phase and len(lines) < case.lines:
        read()
    process.send_signal(case.numbers[0])
    if case.phase in SILENT_PHASES and len(case.numbers) > 1:
        while process.poll() is None:
            process.send_signal(case.numbers[-1])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REPEAT_SECS)
    else:
        for number, place in zip(case.numbers[1:], ("at end", "at close"), strict=False):
            read_to("stopping")
            read_to(place)
            process.send_signal(number)
    return lines


def _check_end(case: Case, directory: Path, last_line: str) -> list[str]:
    if not last_line.startswith("{"):
        return [f"its last line is {last_line}"]
    problems: list[str] = []
    end: dict[str, Any] = json.loads(last_line)
    calls, reason, step = end["calls"], end["reason"], end["step"]
    if reason != f"{case.numbers[0].name} received":
        problems.append(f"it stopped because: {reason}")
    if calls.get("begin") != 1 or calls.get("close") != 1 or calls.get("end", 0) != 1:
        problems.append(f"calls: {calls}")
    if len(case.numbers) == 1:
        restored = asyncio.run(ah.checkpoint.Saver(directory).restore())
        if restored is None or restored.checkpoint.step != step:
            problems.append(f"the last save is {restored!r}, and it ended at step {step}")
    return problems
