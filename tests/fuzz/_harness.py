"""Shared by the programs: a temporary directory, a silent log, injected bugs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import logging
import os
import tempfile
import types
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

Method = Callable[..., Any]


def command(
    module: str, doc: str | None, count: int | None = None, *, has_bugs: bool = False
) -> argparse.ArgumentParser:
    """Make the parser of a program, which takes a seed, a number of trials if there is a default
    `count`, and whether to inject its bugs if it has any.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.fuzz.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one (default %(default)s)")
    if count is not None:
        parser.add_argument("--count", type=int, default=count, help="trials (default %(default)s)")
    if has_bugs:
        parser.add_argument(
            "--injected-bugs", action="store_true", help="inject each bug, until it is found"
        )
    return parser


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """Make a temporary directory for the block, in memory if possible, where fsync costs
    nothing.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aiohooks-", dir=memory) as path:
        yield Path(path)


@contextlib.contextmanager
def log_disabled() -> Generator[None]:
    """Log nothing in the block."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(disabled)


@dataclasses.dataclass(frozen=True)
class Bug:
    """A function of the library, `owner.name`, and what replaces it: a function that gets the
    original one, and then its arguments.
    """

    owner: type | types.ModuleType
    name: str
    replacement: Method
    found_by: Any = None
    """The law that is broken then, or the program that breaks it."""

    def __post_init__(self) -> None:
        # What cannot be called as the original would be found for that reason, and not as the bug.
        parameters = inspect.signature(vars(self.owner)[self.name]).parameters.values()
        keywords = [
            each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)
        ]
        positional = len(parameters) - len(keywords)
        inspect.signature(self.replacement).bind(
            None, *range(positional), **dict.fromkeys(keywords)
        )

    @contextlib.contextmanager
    def injected(self) -> Generator[None]:
        """Have the bug in the library for a block."""
        original = vars(self.owner)[self.name]

        def replaced(*args: Any, **options: Any) -> Any:
            return self.replacement(original, *args, **options)

        with mock.patch.object(self.owner, self.name, replaced):
            yield


class Bugs(dict[str, Bug]):
    """Injected bugs by their names."""

    def add(
        self, owner: type | types.ModuleType, name: str, found_by: Any = None
    ) -> Callable[[Method], None]:
        """Add a replacement of `owner.name`, as `Bug` has it; a decorator."""

        def add(replacement: Method) -> None:
            self[replacement.__name__] = Bug(owner, name, replacement, found_by)

        return add


def find_bugs(names: Iterable[str], find: Callable[[str], str | None]) -> int:
    """Print how each bug is found, and return 1 if one is not."""
    missed = 0
    for name in names:
        found = find(name)
        missed += found is None
        print(f"{name}: {'NOT FOUND' if found is None else f'found: {found}'}", flush=True)
    return int(missed > 0)
