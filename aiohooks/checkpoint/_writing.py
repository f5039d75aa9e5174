"""Putting one checkpoint on disk, whole or not at all, and taking old ones away."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterable, Mapping

from aiohooks._errors import CheckpointError
from aiohooks.checkpoint import _manifest, _names
from aiohooks.checkpoint._files import Files

_logger = logging.getLogger("aiohooks")

Chunks = Iterable[bytes | memoryview]


def commit(files: Files, dir_fd: int, name: _names.Name, metrics: Mapping[str, float], contents: Mapping[str, Chunks]) -> None:
    """Writes a checkpoint aside, makes it durable, gives it its name, and makes that durable.

    If anything fails, nothing of it is left. When it returns, a power cut does not undo it.

    Raises:
        OSError: what the system refused.
    """
    taken = set(files.names(dir_fd))
    aside = _names.free(f".tmp-{name}", taken)
    try:
        files.make_directory(aside, dir_fd=dir_fd)
        with files.directory(aside, dir_fd=dir_fd) as fd:
            entries = {file: _manifest.FileEntry(*files.write_new(file, chunks, dir_fd=fd)) for file, chunks in contents.items()}
            manifest = _manifest.encode(_manifest.Manifest(name, metrics, entries))
            files.write_new(_names.MANIFEST, [manifest], dir_fd=fd)
            files.sync(fd)
        files.rename(aside, str(name), dir_fd=dir_fd)
        files.sync(dir_fd)
    except BaseException:
        _undo(files, dir_fd, aside, str(name))
        raise


def _undo(files: Files, dir_fd: int, aside: str, name: str) -> None:
    # Also what has its name already: whether that would survive is what could not be found out.
    try:
        with contextlib.suppress(FileNotFoundError):
            files.rename(name, aside, dir_fd=dir_fd)
        files.remove_directory(aside, dir_fd=dir_fd)
    except OSError as error:
        _logger.warning("a failed checkpoint left %s behind (%s); the next save tries again to remove it", aside, error)


def sweep(files: Files, dir_fd: int) -> None:
    """Removes what a writer that was killed left unfinished. Only whoever holds the lock may do so."""
    for name in files.names(dir_fd):
        if _names.is_temporary(name):
            try:
                files.remove_directory(name, dir_fd=dir_fd)
            except OSError as error:
                _logger.warning("%s is left from an unfinished save and cannot be removed (%s)", name, error)


def remove(files: Files, dir_fd: int, names: list[_names.Name]) -> None:
    """Takes checkpoints away. Each loses its name first, durably, so that no half of one is ever taken for a checkpoint.

    What cannot be removed is named in a warning: the checkpoint that was just saved is none the worse for it.
    """
    aside: list[str] = []
    try:
        taken = set(files.names(dir_fd))
        for name in names:
            drop = _names.free(f".tmp-drop-{name}", taken)
            files.rename(str(name), drop, dir_fd=dir_fd)
            aside.append(drop)
        files.sync(dir_fd)
        for drop in aside:
            files.remove_directory(drop, dir_fd=dir_fd)
    except OSError as error:
        _logger.warning("old checkpoints could not be removed (%s); the next save tries again", error)


def check_space(files: Files, dir_fd: int, size: int, min_free_bytes: int) -> None:
    """Refuses to begin what would leave less than `min_free_bytes` on the disk; 0 asks nothing.

    Raises:
        CheckpointError: with ENOSPC, and how much is missing.
    """
    if min_free_bytes == 0:
        return
    missing = size + min_free_bytes - files.free_bytes(dir_fd)
    if missing > 0:
        raise CheckpointError(
            errno.ENOSPC,
            f"the checkpoint takes {size} bytes and min_free_bytes is {min_free_bytes}: the disk has {missing} bytes too few; "
            "make room, or keep fewer checkpoints",
        )
