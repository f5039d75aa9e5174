"""P14: signals, at every suspension inside this process and in every phase of real ones.

    python -m tests.fuzz.signals --points 5000 --real 150 --loop both

Inside the process a signal comes at the k-th suspension of one of nine small programs, for all k, and a second one a few
suspensions later in half of the points. Real processes get one, two or three signals, the first of them while they are in a
phase that was chosen, or at any moment of a training that goes on. After each: the stop was recorded with its reason,
`begin`, `end` and `close` of each hook were called as often as they should be, the last step is saved after one signal, the
exit code is the documented one, the handlers from before are there again, no task is left, nothing hangs. The counts are per
event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohooks as ah
from tests.fuzz._signal_sweep import Tally, sweep
from tests.support.source import ROOT

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
NO_TELLING = ("blocking", "close")
"""In these phases the process does not tell that a signal has come; two that wait to be handled would be one."""
PATIENCE_SECS = 60
AGAIN_SECS = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One process: where it gets its first signal, and which ones."""

    phase: str
    numbers: tuple[signal.Signals, ...]
    run: str
    loop: str
    lines: int
    """After so many lines in which it told of a phase it gets the first one."""

    def __str__(self) -> str:
        names = ", ".join(number.name for number in self.numbers)
        return f"{names} at {self.phase or f'line {self.lines}'}, {self.run}.run on {self.loop}"

    @property
    def stays(self) -> list[str]:
        """Where the process waits for the next signal."""
        if self.phase == "close":  # which a second signal does not end
            return [] if len(self.numbers) == 1 else ["close"]
        return [[], ["end"], ["end", "close"]][len(self.numbers) - 1]

    @property
    def exit_codes(self) -> set[int]:
        """What is documented; a shell says 128 + n of a process that a signal has ended, and `subprocess` -n."""
        last = self.numbers[-1]
        if len(self.numbers) == 1:
            return {128 + last if self.run == "aiohooks" else 0}
        if len(self.numbers) == 2 and not (last == signal.SIGINT and self.run == "asyncio"):
            return {128 + last}
        return {-last}  # the third one, and what Python makes of a KeyboardInterrupt


@dataclass(slots=True)
class Real:
    """What was sent to real processes, and found."""

    phases: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    violations: list[str] = field(default_factory=list)
    secs: float = 0.0


def real(*, processes: int, loop: str, seed: int = 0) -> Real:
    """Sends signals to so many processes, one after the other."""
    found = Real()
    began = time.perf_counter()
    for case in _cases(processes, loop, seed):
        found.phases[case.phase or "any moment"] += 1
        found.sent += len(case.numbers)
        with tempfile.TemporaryDirectory() as directory:
            found.violations += [f"{case}: {problem}" for problem in _problems(case, Path(directory))]
    found.secs = time.perf_counter() - began
    return found


def _cases(processes: int, loop: str, seed: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for number in range(processes):
        phase = PHASES[number // 2 % len(PHASES)] if number % 2 == 0 else ""  # each second one at any moment
        counts = {"close": (1, 3), "blocking": (3,)}.get(phase, (1, 1, 2, 2, 3))
        numbers = tuple(rng.choice((signal.SIGINT, signal.SIGTERM)) for _ in range(rng.choice(counts)))
        yield Case(phase, numbers, rng.choice(("aiohooks", "asyncio")), loop, rng.randrange(1, 60))


def _problems(case: Case, directory: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.fuzz._signalled", str(directory), f"--at={case.phase}"]
    command += ["--run", case.run, "--loop", case.loop, "--stay", *case.stays]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(PATIENCE_SECS, process.kill)
        patience.start()
        try:
            lines = _drive(case, process)
            output, errors = process.communicate()
        except EOFError as error:
            return [f"{error!r}, exit code {process.wait()}: {process.communicate()[1][-500:]}"]
        finally:
            patience.cancel()
    lines += output.splitlines()
    problems: list[str] = []
    if process.returncode not in case.exit_codes:
        problems.append(f"the exit code is {process.returncode} and not of {case.exit_codes}: {errors[-500:]}")
    if errors and process.returncode != -signal.SIGINT:
        problems.append(f"on stderr: {errors[-500:]}")
    if len(case.numbers) < 3:
        problems += _judge(case, directory, lines[-1])
    return problems


def _drive(case: Case, process: subprocess.Popen[str]) -> list[str]:
    """Sends each signal when the process has come to where it belongs, and gives the lines up to there."""
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EOFError(f"it has said nothing more than {lines}")
        lines.append(line.rstrip("\n"))

    def read_to(wanted: str) -> None:
        while wanted not in lines:
            read()

    if case.phase:
        read_to(f"at {case.phase}")
    while not case.phase and len(lines) < case.lines:
        read()
    process.send_signal(case.numbers[0])
    if case.phase in NO_TELLING and len(case.numbers) > 1:
        while process.poll() is None:
            process.send_signal(case.numbers[-1])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(AGAIN_SECS)
    else:
        for number, place in zip(case.numbers[1:], ("at end", "at close"), strict=False):
            read_to("stopping")
            read_to(place)
            process.send_signal(number)
    return lines


def _judge(case: Case, directory: Path, last_line: str) -> list[str]:
    if not last_line.startswith("{"):
        return [f"its last line is {last_line}"]
    problems: list[str] = []
    told: dict[str, Any] = json.loads(last_line)
    calls, reason, step = told["calls"], told["reason"], told["step"]
    if reason != f"{case.numbers[0].name} received":
        problems.append(f"it stopped because: {reason}")
    if calls.get("begin") != 1 or calls.get("close") != 1 or calls.get("end", 0) != 1:
        problems.append(f"calls: {calls}")
    if len(case.numbers) == 1:
        restored = asyncio.run(ah.Saver(directory).restore())
        if restored is None or restored.checkpoint.step != step:
            problems.append(f"the last save is {restored!r}, and it ended at step {step}")
    return problems


def report_inside(loop: str, tally: Tally) -> str:
    """The figures of the signals inside this process, and what was wrong."""
    lines = [f"{'program':20} {'signals':>8}"]
    lines += [f"{name:20} {count:8}" for name, count in tally.signals.items()]
    lines.append(
        f"Python {platform.python_version()}, {loop}: {tally.signals.total()} signals at {tally.once + tally.twice} points "
        f"({tally.twice} twice) in {tally.secs:.1f} s; {len(tally.violations)} violations"
    )
    return "\n".join([*lines, *tally.violations[:20]])


def report_real(loop: str, found: Real) -> str:
    """The figures of the signals to real processes, and what was wrong."""
    lines = [f"{'where':20} {'processes':>9}"]
    lines += [f"{name:20} {count:9}" for name, count in found.phases.items()]
    lines.append(
        f"Python {platform.python_version()}, {loop}: {found.sent} signals to {found.phases.total()} processes "
        f"in {found.secs:.1f} s; {len(found.violations)} violations"
    )
    return "\n".join([*lines, *found.violations[:20]])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.signals", description=__doc__)
    parser.add_argument("--points", type=int, default=5_000, help="signals inside this process (default %(default)s)")
    parser.add_argument("--real", type=int, default=150, help="processes that get real ones (default %(default)s)")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for loop in ("asyncio", "uvloop") if options.loop == "both" else (options.loop,):
        tally = sweep(points=options.points, loop=loop, seed=options.seed)
        print(report_inside(loop, tally), flush=True)
        found = real(processes=options.real, loop=loop, seed=options.seed)
        print(report_real(loop, found), flush=True)
        failed = failed or bool(tally.violations or found.violations) or tally.signals.total() < options.points
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
