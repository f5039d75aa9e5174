"""Writing to files whose system may write only a part."""

from __future__ import annotations

import errno
from collections.abc import Callable


def write_all(
    write: Callable[[memoryview], int | None],
    data: bytes | memoryview,
    path: str,
) -> None:
    """Write `data` by as many calls of `write` as it takes.

    Raises:
        OSError: `write` raised it, or wrote nothing. A broken file system may never write a byte,
            and report no error.
    """
    unwritten = memoryview(data)
    while unwritten:
        count = write(unwritten)
        if not count:
            raise OSError(errno.EIO, f"nothing was written to {path}", path)
        unwritten = unwritten[count:]
