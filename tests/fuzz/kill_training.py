"""Training that is killed again and again ends as if it had not been.

    python -m tests.fuzz.kill_training --kills 30

examples/train_digits.py with one worker, as a process, is killed with SIGKILL at a random moment and started again, so many
times; then it runs to its end. Its weights must be those of a run that was not interrupted, to the last bit, and each restart
must go on from a step that is not farther back than was promised: one checkpoint interval where training waits for the disk
(as the example does), two where it goes on meanwhile.

Moments are chosen by what happens, not by a watch: the n-th committed step, the n-th line of output, or the n-th thing that
is done in the checkpoint directory (a file made, written, closed, renamed, removed), which lies inside a save as a rule.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import platform
import random
import selectors
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiohooks.checkpoint import Saver
from tests.fuzz._reported_training import RECORD, start

MODES = ("waiting", "background")
INTERVAL = 50
"""Steps from checkpoint to checkpoint."""
INTERVALS_PER_KILL = 3
"""So many intervals are to be trained for each kill: none of them lets more than that pass."""
PATIENCE_SECS = 120
"""A guard against hanging for ever, not a measurement."""

Kind = Literal["step", "line", "file"]


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill: at the n-th thing of a kind in the life of the process."""

    kind: Kind
    n: int

    def __str__(self) -> str:
        return f"{self.kind} {self.n}"


def moments(kills: int, seed: int) -> list[Moment]:
    """Random ones; every second one by what is done to the directory."""
    order = random.Random(seed)
    farthest: dict[Kind, int] = {"step": INTERVAL * 5 // 2, "line": 4, "file": 45}  # a save makes about 15
    kinds: list[Kind] = [order.choice(("step", "step", "line")) if number % 2 else "file" for number in range(kills)]
    return [Moment(kind, order.randint(1, farthest[kind])) for kind in kinds]


class Watch:
    """Tells of everything that is done in a directory and in the directories in it, as the kernel does (inotify)."""

    _MASK = 0x2 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200  # modify, close after writing, moved from, moved to, create, delete
    _CREATE, _IS_DIRECTORY = 0x100, 0x40000000
    _EVENT = struct.Struct("iIII")

    def __init__(self, directory: Path) -> None:
        """Begins to watch."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._directory = directory
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._add(directory)

    def _add(self, directory: Path) -> None:
        self._libc.inotify_add_watch(self.fd, os.fsencode(directory), self._MASK)  # it may be gone again: then never mind

    def count(self) -> int:
        """How much has been done since the last look."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return 0
        events, place = 0, 0
        while place < len(data):
            _, mask, _, size = self._EVENT.unpack_from(data, place)
            name = data[place + self._EVENT.size : place + self._EVENT.size + size].rstrip(b"\0")
            if mask & self._CREATE and mask & self._IS_DIRECTORY:
                self._add(self._directory / os.fsdecode(name))
            events += 1
            place += self._EVENT.size + size
        return events

    def close(self) -> None:
        """Ends it."""
        os.close(self.fd)


@dataclass(slots=True)
class Life:
    """What one process did, from its start to its end."""

    status: int | None
    output: str
    first: int | None
    """The step it began at; None if it was killed before that could be seen."""
    reached: int | None
    """The last step it has committed."""
    inside_save: bool


class Training:
    """The example with one worker and a checkpoint directory, as a process."""

    def __init__(self, directory: Path, steps: int, mode: str) -> None:
        """Starts it."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._watch = Watch(directory)
        self._steps_fd, steps_fd = os.pipe()
        self._output_fd, output_fd = os.pipe()
        for fd in (self._steps_fd, self._output_fd):
            os.set_blocking(fd, False)
        options = ["--workers", 1, "--k", 0, "--steps", steps, "--checkpoint-dir", directory, "--checkpoint-every", INTERVAL]
        self._process = start(steps_fd, output_fd, [str(each) for each in options], background=mode == "background")
        for fd in (steps_fd, output_fd):
            os.close(fd)
        self._records = self._text = b""
        self._seen: dict[Kind, int] = {"step": 0, "line": 0, "file": 0}

    def live(self, moment: Moment | None) -> Life:
        """Lets it live until a moment, or to its end."""
        with selectors.DefaultSelector() as selector:
            for fd in (self._steps_fd, self._output_fd, self._watch.fd):
                selector.register(fd, selectors.EVENT_READ)
            until = time.monotonic() + PATIENCE_SECS
            while moment is None or self._seen[moment.kind] < moment.n:
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                if len(selector.get_map()) == 1 or time.monotonic() > until:  # only the directory is left: it has ended
                    break
        if moment is not None or time.monotonic() > until:
            self._process.kill()
        return self._buried()

    def _read(self, fd: int) -> bool:
        """Takes in what there is; False at the end of it."""
        if fd == self._watch.fd:
            self._seen["file"] += self._watch.count()
            return True
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if fd == self._steps_fd:
            self._records += data
            self._seen["step"] = sum(not restored for restored, _ in self._steps())
        else:
            self._text += data
            self._seen["line"] = self._text.count(b"\n")
        return bool(data)

    def _steps(self) -> Iterator[tuple[bool, int]]:
        whole = len(self._records) - len(self._records) % RECORD.size
        yield from RECORD.iter_unpack(self._records[:whole])

    def _buried(self) -> Life:
        self._process.join(PATIENCE_SECS)
        status = self._process.exitcode
        for fd in (self._steps_fd, self._output_fd):
            while self._read(fd):
                pass
        self._watch.close()
        os.close(self._steps_fd)
        os.close(self._output_fd)
        steps = list(self._steps())
        first = reached = None
        if steps:
            restored, step = steps[0]
            first, reached = step if restored else step - 1, steps[-1][1]
        inside = any(each.name.startswith(".tmp-") for each in self._directory.iterdir())
        return Life(status, self._text.decode(errors="replace"), first, reached, inside)


@dataclass(slots=True)
class Tally:
    """What the kills of one mode have led to."""

    mode: str
    steps: int
    kills: int = 0
    inside_saves: int = 0
    restarts: int = 0
    lost: list[int] = field(default_factory=list[int])
    """Steps that had to be made again, at each restart."""
    violations: list[str] = field(default_factory=list[str])
    secs: float = 0.0

    @property
    def promised(self) -> int:
        """How many steps a kill may cost."""
        return INTERVAL if self.mode == "waiting" else 2 * INTERVAL

    def report(self) -> str:
        """One line, and one for each violation."""
        line = (
            f"{self.mode:10} {self.kills} kills, {self.inside_saves} of them inside a save; {self.restarts} restarts lost "
            f"{max(self.lost, default=0)} steps at most ({self.promised} may be), {sum(self.lost)} in all; {self.steps} steps; "
            f"{len(self.violations)} violations; Python {platform.python_version()}, {self.secs:.1f} s"
        )
        return "\n".join([line, *(f"    {one}" for one in self.violations)])


def kill_training(directory: Path, *, kills: int, seed: int, mode: str, say: bool = False) -> Tally:
    """Kills a run so many times, lets it end, and compares it with one that was left alone."""
    began = time.perf_counter()
    tally = Tally(mode, (kills + 1) * INTERVALS_PER_KILL * INTERVAL)
    alone = Training(directory / "alone", tally.steps, mode)  # goes on while the other one is killed
    position = 0  # where the killed run stands
    for moment in [*moments(kills, seed), None]:
        life = Training(directory / "killed", tally.steps, mode).live(moment)
        if moment is not None:
            tally.kills += life.status == -9
            tally.inside_saves += life.inside_save
        if life.first is not None:
            tally.restarts += 1
            tally.lost.append(position - life.first)
        if say:
            print(
                f"  {moment or 'the end'}: from {life.first} to {life.reached}{' inside a save' * life.inside_save}", flush=True
            )
        tally.violations += wrong(life, moment, position, tally)
        position = position if life.reached is None else life.reached
    end = alone.live(None)
    tally.violations += [f"left alone: {one}" for one in wrong(end, None, 0, tally)]
    tally.violations += differences(directory / "alone", directory / "killed", tally.steps)
    tally.secs = time.perf_counter() - began
    return tally


def wrong(life: Life, moment: Moment | None, position: int, tally: Tally) -> Iterator[str]:
    """What is wrong with a life that was to end at a moment, and to begin where the one before had got to."""
    if life.status != (0 if moment is None else -9):
        yield f"{moment or 'the end'}: ended with {life.status}: {life.output[-2000:]}"
    if life.first is not None and not 0 <= position - life.first <= tally.promised:
        yield f"{moment or 'the end'}: had reached step {position}, went on from {life.first}"
    if "damaged" in life.output:
        yield f"{moment or 'the end'}: a checkpoint was found damaged: {life.output[-2000:]}"


def differences(alone: Path, killed: Path, steps: int) -> Iterator[str]:
    """What is not the same in two directories at the end, or should not be there."""
    results = [asyncio.run(Saver(each, read_only=True).restore()) for each in (alone, killed)]
    if None in results:
        yield "there is no checkpoint at the end"
        return
    found = [each for each in results if each is not None]
    if [each.checkpoint.step for each in found] != [steps, steps]:
        yield f"the last checkpoints are of the steps {[each.checkpoint.step for each in found]}, not of {steps}"
    one, other = ((each.checkpoint.path / "arrays.safetensors").read_bytes() for each in found)
    if one != other:
        yield "the weights are not the same to the last bit"
    if not found[0].state["variables"]["weights"].any():
        yield "nothing was learned: the weights are all zero"
    left = [each.name for each in killed.iterdir() if each.name.startswith((".tmp-", "damaged-"))]
    if left:
        yield f"left in the directory: {', '.join(left)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.kill_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=30, help="in each mode (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="whether training waits for the disk")
    parser.add_argument("--quiet", action="store_true", help="only the last line of each mode")
    options = parser.parse_args(arguments)
    if options.kills < 1:
        parser.error("--kills is at least 1")
    if sys.platform != "linux":
        print("this needs Linux: the moments inside a save are found by inotify", file=sys.stderr)
        return 2
    failed = False
    for mode in MODES if options.mode == "both" else (options.mode,):
        with tempfile.TemporaryDirectory(prefix="kill-training-") as directory:
            tally = kill_training(Path(directory), kills=options.kills, seed=options.seed, mode=mode, say=not options.quiet)
        print(tally.report(), flush=True)
        failed = failed or bool(tally.violations) or tally.kills < options.kills
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
