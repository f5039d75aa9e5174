"""What the checkpoint programmes share: a place to write, seams, forked children, and how a command ends."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

UNSUITED = 2
"""What a command exits with where the machine lacks what it needs."""
MOST_SHOWN = 20
HANG_SECS = 60
"""A child that is still there then has hung, and is killed."""

Tree = dict[str, bytes | None]
"""The files of a folder with their bytes, and its folders with None."""


class UnsuitedError(Exception):
    """This machine lacks what a programme needs; says what."""


class WrongError(Exception):
    """Something that must never be; says what."""


@dataclass(slots=True)
class Outcome:
    """What a programme did and found."""

    name: str
    points: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    secs: float = 0.0

    @contextlib.contextmanager
    def point(self, where: str) -> Generator[None]:
        """Counts one point; whatever is raised in it is a violation there."""
        try:
            yield
        except WrongError as error:
            self.violations.append(f"{where}: {error}")
        except Exception as error:  # an error that a caller would not expect is a violation too
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.violations.append(f"{where}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
        self.points += 1

    def summary(self) -> str:
        """The one line."""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.name}: {self.points} points, {len(self.violations)} violations, {self.secs:.1f} s{notes}"


Programme = Callable[[int, int], Outcome]
"""Runs so many points with a seed."""


def run(programme: Programme, points: int, seed: int = 0) -> Outcome:
    """Runs a programme and takes the time; what the library logs meanwhile (thousands of damaged files) is not shown."""
    logger, begun = logging.getLogger("aiohooks"), time.monotonic()
    was = logger.disabled
    logger.disabled = True
    try:
        outcome = programme(points, seed)
    finally:
        logger.disabled = was
    outcome.secs = time.monotonic() - begun
    return outcome


def command(programme: Programme, default: int, what: str | None, arguments: Sequence[str] | None = None) -> int:
    """Runs a programme as a command.

    Returns:
        0; 1 if there was a violation or fewer points than asked for; 2 if this machine lacks what it needs.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=default, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the contents and of what is left to chance (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        outcome = run(programme, options.points, options.seed)
    except UnsuitedError as error:
        print(f"not run: {error}", flush=True)
        return UNSUITED
    for violation in outcome.violations[:MOST_SHOWN]:
        print(violation)
    short = outcome.points < options.points
    print(outcome.summary() + (f"; FEWER than the {options.points} asked for" if short else ""), flush=True)
    return int(short or bool(outcome.violations))


# Places


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """A folder in memory, where there is such a place, that is gone afterwards."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aiohooks-", dir=memory) as path:
        yield Path(path)


def snapshot(path: Path) -> Tree:
    """What is in a folder, by name relative to it."""
    found: Tree = {}
    for each in sorted(path.rglob("*")):
        found[str(each.relative_to(path))] = None if each.is_dir() else each.read_bytes()
    return found


def materialise(tree: Tree, path: Path) -> None:
    """Puts a tree in place of a folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    base = f"{path}/"
    for name in sorted(tree):
        data = tree[name]
        if data is None:
            os.mkdir(base + name, 0o700)
        else:
            fd = os.open(base + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            if data:
                os.write(fd, data)
            os.close(fd)


def open_files() -> set[tuple[str, str]]:
    """The open files of this process, with what they are."""
    found: set[tuple[str, str]] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that was open for the listing
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


# Seams


class Seam:
    """Stands in for `os` in the library; `do` sees each operation before it is done."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = fcntl.flock if name == "flock" else getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            number, self.count = self.count, self.count + 1
            return self.do(number, name, real, args, kwargs)

        self.__dict__[name] = call
        return call

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does one operation."""
        return real(*args, **kwargs)


class Counting(Seam):
    """Keeps what was done: the name of each operation, and how many bytes it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int]] = []

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.done.append((name, len(args[1]) if name == "write" else 0))
        return real(*args, **kwargs)


class Fatal(Seam):
    """Sends this process a signal at one operation: before it, or after so many bytes of a write."""

    def __init__(self, at: int, after_bytes: int, signal_number: int = signal.SIGKILL) -> None:
        super().__init__()
        self._at = at
        self._after_bytes = after_bytes
        self._signal = signal_number

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number == self._at:
            if self._after_bytes:
                real(args[0], memoryview(args[1])[: self._after_bytes])
            os.kill(os.getpid(), self._signal)
        return real(*args, **kwargs)


# Children


def fork(fn: Callable[[], None]) -> int:
    """Starts a child that runs a function and exits: 0, or 70 if that raised."""
    with warnings.catch_warnings():
        # The other threads are those of a numerics library, which the child does not call.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(fn)
    return pid


def _run_child(fn: Callable[[], None]) -> NoReturn:
    code = 70
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANG_SECS)
    gc.disable()  # it would look at, and so copy, every page of the parent
    try:
        fn()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# Sharing out


def pick(most: int, groups: Sequence[Sequence[Any]], rng: random.Random) -> list[Any]:
    """At most so many of all: the first groups whole as far as they go, the one that does not fit by chance, in its order."""
    found: list[Any] = []
    for group in groups:
        left = most - len(found)
        found += group if len(group) <= left else [group[i] for i in sorted(rng.sample(range(len(group)), left))]
    return found


def rounds(seed: int) -> Iterator[tuple[int, random.Random]]:
    """Numbers of rounds, each with its own chance."""
    for number in itertools.count():
        yield number, random.Random(seed * 1_000_003 + number)
