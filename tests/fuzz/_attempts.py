"""A save or a restore that may fail, and what must hold after it did."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from aiohooks.errors import CheckpointError, CorruptCheckpointError
from tests.fuzz._disk import WrongError, open_files
from tests.fuzz._stories import LEFTOVERS, Story, act, check_restored, directory, judge

RESTORE = "restore"
"""The story in which nothing is saved."""


@dataclass(slots=True)
class Attempt:
    """How far a writer came, and what it was told; plain data, to be sent between processes."""

    saves: int = 0
    errno: int | None = None
    corrupt: bool = False
    restored: int | None = None
    untyped: str | None = None
    left_open: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong."""

    error: str
    call: str = ""
    """The system call, where it is one."""
    lasting: bool = False
    """It goes on so, once it has begun."""
    of_saved: bool = False
    """What is being saved was written or synced there, and nothing else."""


def unfinished(path: Path) -> set[str]:
    """Names of unfinished checkpoints, without those that a story begins with."""
    return {each.name for each in path.glob(".tmp-*step-*.*")} - {*LEFTOVERS}


def attempt(story: Story, path: Path) -> Attempt:
    """Does what a story says."""
    files, found = open_files(), Attempt()

    def acknowledge(saves: int) -> None:
        found.saves = saves

    try:
        if story.name == RESTORE:
            found.restored = _restore(story, path)
        else:
            act(story, path, os, acknowledge)
    except CorruptCheckpointError:
        found.corrupt = True
    except CheckpointError as error:
        found.errno = error.errno
    except Exception as error:  # nothing else may come out
        found.untyped = f"{type(error).__name__}: {error}"
    found.left_open = [" ".join(each) for each in open_files() - files]
    return found


def _restore(story: Story, path: Path) -> int:
    there = directory(path)
    try:
        restored = there.restore(None)
        assert restored is not None
        saved = next(each for each in story.before if each.step == restored.checkpoint.step)
        check_restored(restored, saved)
        return saved.number
    finally:
        there.close()


def look(story: Story, path: Path, found: Attempt, trouble: Trouble) -> None:
    """Looks at what came of an attempt, and at what it left.

    Raises:
        WrongError: it was told nothing or the wrong thing, or something is lost or left over.
    """
    if found.untyped is not None:
        raise WrongError(f"raised {found.untyped}")
    if found.errno not in (None, getattr(errno, trouble.error)):
        raise WrongError(f"raised errno {errno.errorcode.get(found.errno or 0)} for {trouble.error}")
    if found.left_open and trouble.call != "close":  # a close that strace replaces is not done
        raise WrongError(f"left open: {found.left_open}")
    failed = found.errno is not None
    if failed and not trouble.lasting and (names := unfinished(path)):
        raise WrongError(f"not cleaned up: {sorted(names)}")
    if story.name == RESTORE:
        _look_at_restore(story, path, found, trouble)
        return
    if found.corrupt:
        raise WrongError("a save found something corrupt")
    if not failed and found.saves < len(story.then):
        raise WrongError(f"{found.saves} saves of {len(story.then)} returned, and nothing was raised")
    # Where there was nothing before, nothing is removed either.
    of_saved = trouble.of_saved or not story.before
    if not failed and of_saved and trouble.call in ("write", "fsync") and trouble.error != "EINTR":
        raise WrongError(f"a failed {trouble.call} was passed over")
    judge(story, path, found.saves, in_flight=trouble.lasting)


def _look_at_restore(story: Story, path: Path, found: Attempt, trouble: Trouble) -> None:
    if trouble.error == "EIO":  # the disk does not give it back: that is damage
        there = [each.name for each in path.iterdir() if each.name.startswith(("step-0", "damaged-step-0"))]
        if len(there) != len(story.before):
            raise WrongError(f"a checkpoint was removed: {there}")
        return
    if found.corrupt or (found.restored is None) != (found.errno is not None):
        raise WrongError(f"restored {found.restored}, errno {found.errno}, corrupt {found.corrupt}")
    if found.restored not in (None, story.before[-1].number):
        raise WrongError(f"restored save {found.restored}, though the last one is good")
    judge(story, path, 0)
