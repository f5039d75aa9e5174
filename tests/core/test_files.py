"""Writing all of the data, however little the system takes at a time."""

from __future__ import annotations

import errno

import pytest

from aiohooks._core.files import write_all


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_all_is_written_in_order(count: int) -> None:
    """Each write continues where the one before has ended."""
    written = bytearray()

    def write(data: memoryview) -> int:
        taken = data[:count]
        written.extend(taken)
        return len(taken)

    write_all(write, b"abcdefg", "file")
    assert written == b"abcdefg"


@pytest.mark.parametrize("count", [0, None])
def test_a_write_of_nothing_is_an_error(count: int | None) -> None:
    """It is not tried again without end."""
    with pytest.raises(OSError, match="nothing was written to run") as raised:
        write_all(lambda data: count, b"abc", "run")
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, "run")
