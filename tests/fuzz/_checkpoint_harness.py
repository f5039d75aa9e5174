"""Shared by the checkpoint programs: temporary directories, replacements of `os`, forked children, and the command line."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.fuzz._harness import log_disabled
from tests.support.needs import MissingError
from tests.support.waiting import HANG_SECS

UNSUPPORTED = 2
"""The exit code of a command that this machine cannot run."""
MAX_SHOWN = 20
"""A child that runs longer has hung, and is killed."""

Tree = dict[str, bytes | None]
"""The contents of a directory by relative path: bytes of a file, None for a directory."""


class ViolationError(Exception):
    """A promise is broken."""


@dataclass(slots=True)
class Outcome:
    """The result of a program."""

    name: str
    points: int = 0
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    secs: float = 0.0

    @contextlib.contextmanager
    def point(self, where: str) -> Generator[None]:
        """Count one point. An error raised in the block is a violation."""
        try:
            yield
        except ViolationError as error:
            self.violations.append(f"{where}: {error}")
        except Exception as error:  # any unexpected error is a violation, too
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.violations.append(f"{where}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
        self.points += 1

    def summary(self) -> str:
        """Return the last line of the output."""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.name}: {self.points} points, {len(self.violations)} violations, {self.secs:.1f} s{notes}"


Program = Callable[[int, int], Outcome]
"""Runs a number of points, with a seed."""


def run(program: Program, points: int, seed: int = 0) -> Outcome:
    """Run a program and measure its time. The log of the library, about thousands of damaged files, is disabled."""
    begun = time.monotonic()
    with log_disabled():
        outcome = program(points, seed)
    outcome.secs = time.monotonic() - begun
    return outcome


def command(program: Program, default: int, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run a program as a command.

    Returns:
        0; 1 if there was a violation or fewer points than requested; 2 if this machine cannot run it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=default, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        outcome = run(program, options.points, options.seed)
    except MissingError as error:
        print(f"not run: {error}", flush=True)
        return UNSUPPORTED
    for violation in outcome.violations[:MAX_SHOWN]:
        print(violation)
    short = outcome.points < options.points
    print(outcome.summary() + (f"; FEWER than the {options.points} requested" if short else ""), flush=True)
    return int(short or bool(outcome.violations))


# Directories


def snapshot(path: Path) -> Tree:
    """Return the contents of a directory."""
    found: Tree = {}
    for each in sorted(path.rglob("*")):
        found[str(each.relative_to(path))] = None if each.is_dir() else each.read_bytes()
    return found


def materialise(tree: Tree, path: Path) -> None:
    """Replace a directory by one with these contents."""
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


def empty(path: Path) -> None:
    """Remove what is in a directory."""
    for each in path.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink()


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of the open files of this process, with their targets."""
    found: set[tuple[str, str]] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


# Replacements of `os`


class Seam:
    """Replaces `os` in the library; each operation is done by `do`."""

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
        """Do one operation."""
        return real(*args, **kwargs)


class Counting(Seam):
    """Records the name of each operation, and how many bytes it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int]] = []

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.done.append((name, len(args[1]) if name == "write" else 0))
        return real(*args, **kwargs)


class Fatal(Seam):
    """Sends this process a signal before one operation, or after some bytes of a write."""

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
    """Fork a child that calls a function and exits with 0, or with 70 if that raises; return its process id."""
    with warnings.catch_warnings():
        # The other threads belong to a numerics library, which the child does not call.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(fn)
    return pid


def _run_child(fn: Callable[[], None]) -> NoReturn:
    code = 70
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANG_SECS)
    gc.disable()  # a collection would write to, and so copy, every page of the parent
    try:
        fn()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# Choosing points


def pick(limit: int, groups: Sequence[Sequence[Any]], rng: random.Random) -> list[Any]:
    """Return up to `limit` items: whole groups from the first on, and a random sample, in order, of the one that does not fit."""
    found: list[Any] = []
    for group in groups:
        left = limit - len(found)
        found += group if len(group) <= left else [group[i] for i in sorted(rng.sample(range(len(group)), left))]
    return found


def rounds(outcome: Outcome, points: int, seed: int) -> Iterator[tuple[int, random.Random]]:
    """Yield numbers of rounds, each with a random generator, until the outcome has so many points."""
    for number in itertools.count():
        if outcome.points >= points:
            return
        yield number, random.Random(seed * 1_000_003 + number)
