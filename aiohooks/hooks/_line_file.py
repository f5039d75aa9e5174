"""A file of JSON lines to which one writer appends."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, cast

from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class LineFile:
    """A file of JSON lines to which one writer appends, in one thread.

    Only a crash leaves a part of a line, and only at the end. The next line does not continue it.
    """

    def __init__(self, path: str, *, fsync: bool = False) -> None:
        self.path: str = path
        self._fsync = fsync
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Open and lock the file, if it is not open; create it if it is missing.

        Raises:
            InvalidArgumentError: another hook or process is writing to it.
            OSError: the file cannot be opened.
        """
        if self._file is None:
            file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise InvalidArgumentError(
                    f"{self.path} is being written by another hook or process; give each of them a"
                    " path of its own"
                ) from None
            except OSError as error:
                # Some network file systems have no locks.
                logger.debug("%s cannot be locked: %s", self.path, error)
            self._file = file
        return self._file

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each object; a write that fails leaves no part of them in the file."""
        lines = b"".join(map(json_line, objects))
        file = self.open()
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        unwritten = memoryview(lines)
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            if self._fsync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise

    def close(self) -> None:
        """Sync and close the file, if it is open."""
        if self._file is None:
            return
        with self._file as file:
            self._file = None
            os.fsync(file.fileno())
            if fcntl is not None:
                # A forked child may still have the file open, and with it the lock.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def json_line(fields: Mapping[str, Any]) -> bytes:
    """Return a line of strict JSON, in which NaN and infinities are strings."""
    text = json.dumps(_strict(dict(fields)), ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _strict(item) for name, item in fields.items()}
    if isinstance(value, list):
        return [_strict(item) for item in cast("Iterable[Any]", value)]
    return value
