"""The files of a local run, damaged in every way: the error says where and how, and nothing is
guessed in their place.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aiohooks.errors import StoreDamagedError
from aiohooks.stores import Position
from aiohooks.stores.local import LocalStepStore
from aiohooks.stores.local._files import RECORD_SIZE, RunFiles
from aiohooks.testing import ManualClock
from tests.support.waiting import parked, ticks

FILES = ("position", "notify", "state")


async def make_run(directory: Path) -> Path:
    """Make a run that has had publishers, waiters and a reset; return its directory."""
    async with LocalStepStore(directory) as store, LocalStepStore(directory) as other:
        with store.publisher("one"):
            wait = await parked(other.wait_for(5))
            await store.advance(5)
            await wait
        await store.reset(3)
        await store.advance()
    return store.directory


async def open_run(directory: Path) -> Position:
    """Open the run and advance it; return the position before that."""
    async with LocalStepStore(directory, join_grace_secs=0) as store:
        position = await store.value()
        assert await store.advance() == position.step + 1
        return position


def read(directory: Path) -> None:
    """Read everything that opening the run reads."""
    files = RunFiles(directory, "default", "p")
    files.open()
    try:
        files.load_state(files.read())
    finally:
        os.close(files.run_fd)
        files.close()


def changed_byte(data: bytes, at: int) -> bytes:
    """Return the file with one bit of a byte changed."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def cut(data: bytes, at: int) -> bytes:
    """Return the file up to a byte."""
    return data[:at]


@pytest.mark.parametrize("damaged", [changed_byte, cut])
async def test_every_damage_is_noticed(
    tmp_path: Path, damaged: Callable[[bytes, int], bytes]
) -> None:
    """Each byte of the records and of the state is changed in turn, or the file is cut there, and
    each time reading fails with the file.
    """
    directory = await make_run(tmp_path)
    for name in FILES:
        good = (directory / name).read_bytes()
        for at in range(RECORD_SIZE) if name != "state" else range(0, len(good), 5):
            (directory / name).write_bytes(damaged(good, at))
            with pytest.raises(
                StoreDamagedError, match=r"found .*, expected .*forget.*remove the directory"
            ) as caught:
                read(tmp_path)
            assert caught.value.path == str(directory / name)
            assert caught.value.found in str(caught.value)
            assert caught.value.expected in str(caught.value)
        (directory / name).write_bytes(good)
    assert await open_run(tmp_path) == Position(2, 4)


async def test_a_longer_state_is_noticed(tmp_path: Path) -> None:
    """Reading fails with a file that is longer than it was."""
    directory = await make_run(tmp_path)
    (directory / "state").write_bytes((directory / "state").read_bytes() + b" ")
    with pytest.raises(StoreDamagedError, match="another checksum"):
        await LocalStepStore(tmp_path).value()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replacement", ["nothing", "a directory", "a link", "a pipe"])
async def test_something_else_in_the_place_of_a_file(
    tmp_path: Path, name: str, replacement: str
) -> None:
    """A file that is missing, or something else, is damage: a link is not followed, a pipe not
    waited for.
    """
    path = await make_run(tmp_path) / name
    path.rename(tmp_path / "away")
    if replacement == "a directory":
        path.mkdir()
    elif replacement == "a link":
        path.symlink_to(tmp_path / "away")
    elif replacement == "a pipe":
        os.mkfifo(path)
    with pytest.raises(StoreDamagedError) as caught:
        await LocalStepStore(tmp_path).value()
    assert caught.value.path == str(path)


@pytest.mark.parametrize("folder", ["alive", ""])
async def test_something_else_in_the_place_of_a_directory(tmp_path: Path, folder: str) -> None:
    """The error names the directory."""
    path = await make_run(tmp_path) / folder
    shutil.rmtree(path)
    path.write_text("mine")
    with pytest.raises(StoreDamagedError, match="File exists") as caught:
        await LocalStepStore(tmp_path).value()
    assert caught.value.path == str(path)


async def test_empty_files_are_not_a_new_run(tmp_path: Path) -> None:
    """When both files are empty, as after a loss of power, the state that is still there shows that
    a run is lost.
    """
    directory = await make_run(tmp_path)
    for name in ("position", "notify"):
        os.truncate(directory / name, 0)
    with pytest.raises(StoreDamagedError, match="position: found nothing"):
        await LocalStepStore(tmp_path).value()


async def test_a_run_can_begin_after_its_creation_was_interrupted(tmp_path: Path) -> None:
    """A process that is killed between any two of the writes that begin a run leaves one that can
    begin.
    """
    async with LocalStepStore(tmp_path) as store:
        directory, first = store.directory, (store.directory / "position").read_bytes()[:128]
    for position, notify in [(b"", b""), (b"", b"not begun"), (first, b"not begun")]:
        (directory / "position").write_bytes(position)
        (directory / "notify").write_bytes(notify)
        assert await open_run(tmp_path) == Position(1, 0)


async def test_another_version_is_named(tmp_path: Path) -> None:
    """The error says which version was found, and which one can be read."""
    directory = await make_run(tmp_path)
    data = (directory / "position").read_bytes()
    (directory / "position").write_bytes(data.replace(b"ahooks.1", b"ahooks.2"))
    with pytest.raises(
        StoreDamagedError,
        match="found a record of version b'2', expected a whole record of version b'1'",
    ):
        await LocalStepStore(tmp_path).value()


async def test_an_old_state_is_named(tmp_path: Path) -> None:
    """A state that was restored without the other files is damage."""
    async with LocalStepStore(tmp_path) as store:
        with store.publisher("one"):
            await store.flush()
            old = (store.directory / "state").read_bytes()
    (store.directory / "state").write_bytes(old)
    with pytest.raises(
        StoreDamagedError,
        match=r"state: found revision \d, expected revision \d, as in the file notify",
    ):
        await LocalStepStore(tmp_path).value()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [_flip, _empty])
async def test_damage_ends_waits(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """When the record that wakes them cannot be read, waiters get an error each, which names the
    file.
    """
    async with LocalStepStore(tmp_path) as store:
        waits = [asyncio.ensure_future(store.wait_for(step)) for step in (5, 5, 7)]
        await asyncio.sleep(0)
        damage(store.directory / "notify")
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, StoreDamagedError)
            assert error.path == str(store.directory / "notify")
        with pytest.raises(StoreDamagedError):
            await store.advance()
        with pytest.raises(StoreDamagedError):
            await store.wait_for(9)
    assert "notify: found" in caplog.text


async def test_damage_that_a_call_finds_ends_waits(tmp_path: Path) -> None:
    """Waiters do not wait for a notification that may never come."""
    async with LocalStepStore(tmp_path) as store:
        wait = await parked(store.wait_for(5))
        _flip(store.directory / "position")
        for call in (store.value(), wait):
            with pytest.raises(StoreDamagedError):
                await call


@pytest.mark.parametrize("name", ["position", "notify"])
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_removed_while_it_is_open(
    tmp_path: Path, name: str, replaced: bool
) -> None:
    """Steps are not written where no other process reads them: calls and waits end, and name the
    file.
    """
    with ManualClock():
        async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
            waits = [asyncio.ensure_future(each.wait_for(5)) for each in (store, other)]
            await ticks(3)
            path = store.directory / name
            if replaced:
                shutil.copy(path, tmp_path / "copy")
                os.replace(tmp_path / "copy", path)
            else:
                path.unlink()
            for wait in waits:
                with pytest.raises(
                    StoreDamagedError,
                    match="found no file, or another one, expected the file that this process",
                ):
                    await wait
            for call in (store.advance(), store.value(), other.raise_to(3), other.wait_for(9)):
                with pytest.raises(StoreDamagedError) as caught:
                    await call
                assert caught.value.path == str(path)


@pytest.mark.parametrize("name", FILES)
async def test_a_damaged_run_can_be_forgotten(tmp_path: Path, name: str) -> None:
    """A store that cannot open a damaged run can delete it; then the run begins anew."""
    directory = await make_run(tmp_path)
    (directory / name).write_text("no")
    await LocalStepStore(tmp_path).forget()
    assert not directory.exists()
    assert await open_run(tmp_path) == Position(1, 0)
