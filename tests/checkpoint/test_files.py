"""Plain files of a checkpoint directory, read whole."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from aiohooks.checkpoint._files import Files
from aiohooks.checkpoint._format import DamagedError


class SlowFs:
    """An `os` whose reads return a few bytes each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def readv(self, fd: int, buffers: list[memoryview]) -> int:
        self.reads += 1
        return os.readv(fd, [buffers[0][: self.most], *(buffers[1:] if self.most > 4 else ())])


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 100])
def test_a_file_is_read_whole_however_the_reads_are_cut(most: int, tmp_path: Path) -> None:
    """Short reads are joined."""
    (tmp_path / "file").write_bytes(b"abcdef")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        files = Files(SlowFs(most))
        assert files.read("file", dir_fd=directory, size=6, max_size=6) == b"abcdef"
        with files.opened("file", dir_fd=directory) as file:
            parts = [bytearray(size) for size in (3, 0, 2, 1)]
            file.read_into([memoryview(each) for each in parts])
            assert parts == [b"abc", b"", b"de", b"f"]
            assert (file.left, file.crc32) == (0, zlib.crc32(b"abcdef"))
            with pytest.raises(DamagedError, match="is too short"):
                file.read_into([memoryview(parts[0])])
    finally:
        os.close(directory)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"size": 5}, "has 6 bytes instead of 5"), ({"size": 7}, "instead of 7"), ({"max_size": 5}, "more than the 5 allowed")],
)
def test_a_file_of_another_size_is_damage(limits: dict[str, int], says: str, tmp_path: Path) -> None:
    """The size is checked before anything is read."""
    (tmp_path / "file").write_bytes(b"abcdef")
    directory, fs = os.open(tmp_path, os.O_RDONLY), SlowFs(100)
    try:
        with pytest.raises(DamagedError, match=says):
            Files(fs).read("file", dir_fd=directory, **limits)
    finally:
        os.close(directory)
    assert fs.reads == 0
