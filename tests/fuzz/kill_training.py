"""Training that is killed repeatedly ends as if it had not been killed.

    python -m tests.fuzz.kill_training --kills 30

An example runs as a process, is killed with SIGKILL at random points and started again; then it
runs to its end. What it has learned must equal that of an uninterrupted run to the last bit, and
each restart must continue from a step that is not farther back than promised: one checkpoint
interval where training waits for the disk, two where it continues in a write.

    waiting   examples/train_digits.py with one worker, which waits for the disk; the weights are
              compared
    torch     examples/train_torch.py (AdamW, a scheduler, dropout, bfloat16, shuffled batches taken
              ahead, evaluations beside the training), which continues in a write; all that it
              tracks is compared, and the records of all steps

The points are events, not times: the n-th committed step, or the n-th change in the checkpoint
directory (a file made, written, closed, renamed, removed), which is inside a save as a rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
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
from typing import Any, Literal, NamedTuple

from aiohooks.checkpoint import Restored, Saver
from aiohooks.stores.local import store as local_store
from tests.fuzz._harness import command
from tests.fuzz._training_process import RECORD, start
from tests.support.record_files import without_time
from tests.support.waiting import HANG_SECS

MODES = ("waiting", "torch")
INTERVAL = 50
"""Steps between checkpoints."""
INTERVALS_PER_KILL = 3
"""How many intervals are trained for each kill; no kill point is later than that."""

Kind = Literal["step", "file"]


class KillPoint(NamedTuple):
    """When to kill a process: at its n-th event of a kind."""

    kind: Kind
    n: int

    def __str__(self) -> str:
        return f"{self.kind} {self.n}"


def kill_points(kills: int, seed: int) -> list[KillPoint]:
    """Return random points; every second one is a change of the directory."""
    order = random.Random(seed)
    latest: dict[Kind, int] = {"step": INTERVAL * 5 // 2, "file": 45}  # a save makes about 15
    kinds: list[Kind] = ["step" if number % 2 else "file" for number in range(kills)]
    return [KillPoint(kind, order.randint(1, latest[kind])) for kind in kinds]


class DirectoryWatch(local_store.Inotify):
    """Counts the changes in a directory and its subdirectories."""

    _CREATE = 0x100
    _MOVED_FROM = 0x40
    _MOVED_TO = 0x80
    _DELETE = 0x200
    _IS_DIRECTORY = 0x40000000
    _MASK = (
        _CREATE | local_store.MODIFY | local_store.CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _DELETE
    )
    _EVENT = struct.Struct("iIII")

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.add(directory, self._MASK)

    def count(self) -> int:
        """Return the number of changes since the last call."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return 0
        events, place = 0, 0
        while place < len(data):
            _, mask, _, size = self._EVENT.unpack_from(data, place)
            name = data[place + self._EVENT.size : place + self._EVENT.size + size].rstrip(b"\0")
            if mask & self._CREATE and mask & self._IS_DIRECTORY:
                with contextlib.suppress(FileNotFoundError):  # it may be removed already
                    self.add(self._directory / os.fsdecode(name), self._MASK)
            events += 1
            place += self._EVENT.size + size
        return events


class ProcessRun(NamedTuple):
    """What one process did."""

    status: int | None
    output: str
    first: int | None
    """The step it began at; None if it was killed before."""
    reached: int | None
    """The last step it committed."""
    inside_save: bool


def training(mode: str, directory: Path, steps: int) -> TrainingProcess:
    """Start an example. No evaluation stops that of torch: at which step depends on the machine."""
    if mode == "torch":
        options: list[object] = [
            "--every",
            INTERVAL,
            "--patience",
            steps,
            "--records",
            directory.with_suffix(".jsonl"),
        ]
        example = "train_torch.py"
    else:
        options, example = (
            ["--workers", 1, "--k", 0, "--checkpoint-every", INTERVAL],
            "train_digits.py",
        )
    options += ["--steps", steps, "--checkpoint-dir", directory]
    return TrainingProcess(directory, example, options)


class TrainingProcess:
    """An example with a checkpoint directory, as a process."""

    def __init__(self, directory: Path, example: str, options: Sequence[object]) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._watch = DirectoryWatch(directory)
        self._steps_fd, steps_fd = os.pipe()
        fcntl.fcntl(
            steps_fd, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE
        )  # it must not end while this process is too busy to kill it
        self._output_fd, output_fd = os.pipe()
        for fd in (self._steps_fd, self._output_fd):
            os.set_blocking(fd, False)
        self._process = start(steps_fd, output_fd, example, [str(each) for each in options])
        for fd in (steps_fd, output_fd):
            os.close(fd)
        self._records = self._text = b""
        self._seen: dict[Kind, int] = {"step": 0, "file": 0}

    def run_until(self, kill_point: KillPoint | None) -> ProcessRun:
        """Kill it at a point, or let it run to its end."""
        with selectors.DefaultSelector() as selector:
            for fd in (self._steps_fd, self._output_fd, self._watch.fd):
                selector.register(fd, selectors.EVENT_READ)
            until = time.monotonic() + HANG_SECS
            while kill_point is None or self._seen[kill_point.kind] < kill_point.n:
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    if not self._receive(key.fd):
                        selector.unregister(key.fd)
                if (
                    len(selector.get_map()) == 1 or time.monotonic() > until
                ):  # only the watch is left: it has ended
                    break
        if kill_point is not None or time.monotonic() > until:
            self._process.kill()
        return self._wait()

    def _receive(self, fd: int) -> bool:
        """Receive what is available from a pipe or the watch; return False at the end of a pipe."""
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
        return bool(data)

    def _steps(self) -> Iterator[tuple[bool, int]]:
        whole = len(self._records) - len(self._records) % RECORD.size
        yield from RECORD.iter_unpack(self._records[:whole])

    def _wait(self) -> ProcessRun:
        self._process.join(HANG_SECS)
        status = self._process.exitcode
        for fd in (self._steps_fd, self._output_fd):
            while self._receive(fd):
                pass
            os.close(fd)
        self._watch.close()
        steps = list(self._steps())
        first = reached = None
        if steps:
            restored, step = steps[0]
            first, reached = step if restored else step - 1, steps[-1][1]
        inside = any(each.name.startswith(".tmp-") for each in self._directory.iterdir())
        return ProcessRun(status, self._text.decode(errors="replace"), first, reached, inside)


@dataclass(slots=True)
class Tally:
    """The results of one mode."""

    mode: str
    steps: int
    kills: int = 0
    inside_saves: int = 0
    restarts: int = 0
    lost: list[int] = field(default_factory=list[int])
    """How many steps had to be repeated, at each restart."""
    violations: list[str] = field(default_factory=list[str])
    secs: float = 0.0

    @property
    def promised(self) -> int:
        """Return how many steps a kill may cost."""
        return INTERVAL if self.mode == "waiting" else 2 * INTERVAL

    def report(self) -> str:
        """Return a line for the results, and one for each violation."""
        line = (
            f"{self.mode:10} {self.kills} kills, {self.inside_saves} of them inside a save;"
            f" {self.restarts} restarts lost at most {max(self.lost, default=0)} steps"
            f" ({self.promised} allowed), {sum(self.lost)} in all; {self.steps} steps;"
            f" {len(self.violations)} violations; Python {platform.python_version()},"
            f" {self.secs:.1f} s"
        )
        return "\n".join([line, *(f"    {one}" for one in self.violations)])


def kill_training(
    directory: Path, *, kills: int, seed: int, mode: str, verbose: bool = False
) -> Tally:
    """Kill a run so many times, let it end, and compare it with an uninterrupted one."""
    began = time.perf_counter()
    tally = Tally(mode, (kills + 1) * INTERVALS_PER_KILL * INTERVAL)
    alone, killed = directory / "alone", directory / "killed"
    end = training(mode, alone, tally.steps).run_until(None)
    tally.violations += [f"left alone: {one}" for one in violations(end, None, 0, tally)]
    position = 0  # the step that it had reached
    for kill_point in [*kill_points(kills, seed), None]:
        run = training(mode, killed, tally.steps).run_until(kill_point)
        if kill_point is not None:
            tally.kills += run.status == -9
            tally.inside_saves += run.inside_save
        if run.first is not None:
            tally.restarts += 1
            tally.lost.append(position - run.first)
        if verbose:
            inside = " inside a save" * run.inside_save
            print(
                f"  {kill_point or 'the end'}: from {run.first} to {run.reached}{inside}",
                flush=True,
            )
        tally.violations += violations(run, kill_point, position, tally)
        position = position if run.reached is None else run.reached
    tally.violations += differences(alone, killed, tally.steps, mode)
    tally.secs = time.perf_counter() - began
    return tally


def violations(
    run: ProcessRun, kill_point: KillPoint | None, position: int, tally: Tally
) -> Iterator[str]:
    """Yield what is wrong with a process that was to be killed at a point, where the one before had
    reached `position`.
    """
    if run.status != (0 if kill_point is None else -9):
        yield f"{kill_point or 'the end'}: ended with {run.status}: {run.output[-2000:]}"
    if run.first is not None and not 0 <= position - run.first <= tally.promised:
        yield f"{kill_point or 'the end'}: had reached step {position}, continued from {run.first}"
    if "damaged" in run.output:
        yield f"{kill_point or 'the end'}: a checkpoint was found damaged: {run.output[-2000:]}"


def differences(alone: Path, killed: Path, steps: int, mode: str) -> Iterator[str]:
    """Yield what differs between two directories at the end, or should not be there."""
    found: list[Restored] = []
    for directory in (alone, killed):
        restored = asyncio.run(Saver(directory, read_only=True).restore())
        if restored is None or restored.checkpoint.step != steps:
            yield (
                f"{directory.name}: the last checkpoint is of step"
                f" {restored and restored.checkpoint.step}, not of {steps}"
            )
            return
        found.append(restored)
    yield from (
        torch_differences(alone, killed, found) if mode == "torch" else digits_differences(found)
    )
    left = [each.name for each in killed.iterdir() if each.name.startswith((".tmp-", "damaged-"))]
    if left:
        yield f"left in the directory: {', '.join(left)}"


def digits_differences(found: Sequence[Restored]) -> Iterator[str]:
    """Yield what differs between the weights."""
    one, other = ((each.checkpoint.path / "arrays.safetensors").read_bytes() for each in found)
    if one != other:
        yield "the weights are not the same to the last bit"
    if not found[0].state["variables"]["weights"].any():
        yield "nothing was learned: the weights are all zero"


def torch_differences(alone: Path, killed: Path, found: Sequence[Restored]) -> Iterator[str]:
    """Yield what differs between all that is tracked, and the records."""
    from tests.support.tensors import same_tensors  # imports torch

    hooks: list[dict[str, Any]] = [
        restored.state["hooks"]["EarlyStoppingHook"] for restored in found
    ]
    one, other = (
        {
            **restored.state["tracked"],
            "best": (hook["best"], hook["best_step"], hook["best_states"]),
        }
        for restored, hook in zip(found, hooks, strict=True)
    )
    for name in one:
        if not same_tensors(one[name], other[name]):
            yield f"the state of {name!r} is not the same to the last bit"
    if hooks[0]["best"] < 0.9:
        yield f"nothing was learned: the accuracy is {hooks[0]['best']}"
    records = [without_time(path.with_suffix(".jsonl")) for path in (alone, killed)]
    if records[0] != records[1]:
        yield "the records are not the same"
    if [record["step"] for record in records[0]] != [*range(1, found[0].checkpoint.step + 1)]:
        yield "the records have not each step once"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = command("kill_training", __doc__)
    parser.add_argument("--kills", type=int, default=30, help="in each mode (default %(default)s)")
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, default=MODES, help="what is trained (default: all)"
    )
    parser.add_argument("--quiet", action="store_true", help="only the last line of each mode")
    options = parser.parse_args(arguments)
    if options.kills < 1:
        parser.error("--kills is at least 1")
    if sys.platform != "linux":
        print("this needs Linux: the points inside a save are found by inotify", file=sys.stderr)
        return 2
    failed = False
    for mode in options.mode:
        with tempfile.TemporaryDirectory(prefix="kill-training-") as directory:
            tally = kill_training(
                Path(directory),
                kills=options.kills,
                seed=options.seed,
                mode=mode,
                verbose=not options.quiet,
            )
        print(tally.report(), flush=True)
        failed = failed or bool(tally.violations) or tally.kills < options.kills
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
