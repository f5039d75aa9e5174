"""Reading one checkpoint: what is handed out is what was checked, byte by byte the same."""

from __future__ import annotations

import zlib
from typing import Any

from aiohooks.checkpoint import _manifest, _names
from aiohooks.checkpoint._errors import DamagedError
from aiohooks.checkpoint._files import Files, told_as_damage


def read_manifest(files: Files, dir_fd: int, name: _names.Name) -> _manifest.Manifest:
    """What a checkpoint says of itself; its files are not looked at.

    Raises:
        DamagedError: it does not verify.
        NewerVersionError: it is of a later version of the format.
        OSError: it could not be read, for a reason that is not its fault.
    """
    fd = _open(files, dir_fd, name)
    try:
        return _manifest_in(files, fd, name)
    finally:
        files.close_quietly(fd)


def read(files: Files, dir_fd: int, name: _names.Name) -> tuple[_manifest.Manifest, dict[str, Any]]:
    """A whole checkpoint, checked; raises as `read_manifest` does."""
    from aiohooks.checkpoint import _state

    fd = _open(files, dir_fd, name)
    try:
        manifest = _manifest_in(files, fd, name)
        contents = {file: _checked(files, fd, file, entry) for file, entry in manifest.files.items()}
    finally:
        files.close_quietly(fd)
    return manifest, _state.decode(contents[_names.STATE], contents.pop(_names.ARRAYS))


def _open(files: Files, dir_fd: int, name: _names.Name) -> int:
    with told_as_damage():
        return files.open_directory(str(name), dir_fd=dir_fd)


def _manifest_in(files: Files, fd: int, name: _names.Name) -> _manifest.Manifest:
    try:
        return _manifest.decode(files.read(_names.MANIFEST, dir_fd=fd, at_most=_manifest.LARGEST), name)
    except DamagedError as error:
        raise DamagedError(f"{_names.MANIFEST} {error}") from error.__cause__


def _checked(files: Files, fd: int, file: str, entry: _manifest.FileEntry) -> bytes:
    try:
        data = files.read(file, dir_fd=fd, size=entry.size)
        if f"{zlib.crc32(data):08x}" != entry.crc32:
            raise DamagedError("does not have the checksum in the manifest")
    except DamagedError as error:
        raise DamagedError(f"{file} {error}") from error.__cause__
    return data
