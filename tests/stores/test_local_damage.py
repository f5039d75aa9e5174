"""The files of a local run, damaged in every way: it is said where and how, and nothing is made up in their place."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.errors import StoreDamagedError
from aiohooks.stores import Position
from aiohooks.stores.local import LocalStepStore
from aiohooks.stores.local._files import SIZE, RunFiles

FILES = ("quiet", "loud", "state")


async def a_run(directory: Path) -> Path:
    """One that has had publishers, waiters and a reset; its directory, with nobody in it."""
    async with LocalStepStore(directory) as store, LocalStepStore(directory) as other:
        with store.publisher("one"):
            wait = asyncio.ensure_future(other.wait_for(5))
            await asyncio.sleep(0)
            await store.advance(5)
            await wait
        await store.reset(3)
        await store.advance()
    return store.directory


async def opened(directory: Path) -> Position:
    """What a process finds there that comes now, and that its own step counts."""
    async with LocalStepStore(directory, join_grace_secs=0) as store:
        position = await store.value()
        assert await store.advance() == position.step + 1
        return position


def read(directory: Path) -> None:
    """All that who opens it reads."""
    files = RunFiles(directory, "default", "p")
    files.open()
    try:
        files.load(files.read())
    finally:
        os.close(files.run_fd)
        files.close()


async def test_every_byte_that_is_changed_is_noticed(tmp_path: Path) -> None:
    """Of the records and of the state: each byte in turn is another one, and the run is never somewhere else."""
    directory = await a_run(tmp_path)
    for name in FILES:
        good = (directory / name).read_bytes()
        for at in range(SIZE) if name != "state" else range(0, len(good), 5):
            bad = bytearray(good)
            bad[at] ^= 1 << at % 8
            (directory / name).write_bytes(bad)
            with pytest.raises(StoreDamagedError, match=r"found .*, expected .*forget.*remove the directory") as caught:
                read(tmp_path)
            assert caught.value.path == str(directory / name)
            assert caught.value.found in str(caught.value)
            assert caught.value.expected in str(caught.value)
        (directory / name).write_bytes(good)
    assert await opened(tmp_path) == Position(2, 4)


async def test_every_length_that_is_cut_is_noticed(tmp_path: Path) -> None:
    """A file that is cut anywhere, or is longer than it was."""
    directory = await a_run(tmp_path)
    for name in FILES:
        good = (directory / name).read_bytes()
        for length in range(SIZE) if name != "state" else range(0, len(good), 5):
            (directory / name).write_bytes(good[:length])
            with pytest.raises(StoreDamagedError):
                read(tmp_path)
        (directory / name).write_bytes(good)
    assert await opened(tmp_path) == Position(2, 4)
    (directory / "state").write_bytes((directory / "state").read_bytes() + b" ")
    with pytest.raises(StoreDamagedError, match="another checksum"):
        await LocalStepStore(tmp_path).value()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["nothing", "a directory", "a link", "a pipe"])
async def test_something_else_in_the_place_of_a_file(tmp_path: Path, name: str, what: str) -> None:
    """Neither followed nor waited for."""
    path = await a_run(tmp_path) / name
    path.rename(tmp_path / "away")
    if what == "a directory":
        path.mkdir()
    elif what == "a link":
        path.symlink_to(tmp_path / "away")
    elif what == "a pipe":
        os.mkfifo(path)
    with pytest.raises(StoreDamagedError) as caught:
        await LocalStepStore(tmp_path).value()
    assert caught.value.path == str(path)


@pytest.mark.parametrize("folder", ["alive", "bells", ""])
async def test_something_else_in_the_place_of_a_directory(tmp_path: Path, folder: str) -> None:
    """The error names it."""
    path = await a_run(tmp_path) / folder
    shutil.rmtree(path)
    path.write_text("mine")
    with pytest.raises(StoreDamagedError, match="File exists") as caught:
        await LocalStepStore(tmp_path).value()
    assert caught.value.path == str(path)


async def test_both_files_emptied_is_no_new_run(tmp_path: Path) -> None:
    """As after a loss of power: the state that is still there tells."""
    directory = await a_run(tmp_path)
    for name in ("quiet", "loud"):
        os.truncate(directory / name, 0)
    with pytest.raises(StoreDamagedError, match="quiet: found nothing"):
        await LocalStepStore(tmp_path).value()


async def test_a_run_whose_making_was_cut_off_begins(tmp_path: Path) -> None:
    """A process that was killed between any two of the writes that begin a run leaves one that can begin."""
    async with LocalStepStore(tmp_path) as store:
        directory, first = store.directory, (store.directory / "quiet").read_bytes()[:128]
    for quiet, loud in [(b"", b""), (b"", b"not begun"), (first, b"not begun")]:
        (directory / "quiet").write_bytes(quiet)
        (directory / "loud").write_bytes(loud)
        assert await opened(tmp_path) == Position(1, 0)


async def test_another_version_is_named(tmp_path: Path) -> None:
    """What it found and what it can read."""
    directory = await a_run(tmp_path)
    data = (directory / "quiet").read_bytes()
    (directory / "quiet").write_bytes(data.replace(b"ahooks.1", b"ahooks.2"))
    with pytest.raises(StoreDamagedError, match="found a record of version b'2', expected a whole record of version b'1'"):
        await LocalStepStore(tmp_path).value()


async def test_an_old_state_is_named(tmp_path: Path) -> None:
    """One that was put back without the rest."""
    async with LocalStepStore(tmp_path) as store:
        with store.publisher("one"):
            await store.flush()
            old = (store.directory / "state").read_bytes()
    (store.directory / "state").write_bytes(old)
    with pytest.raises(StoreDamagedError, match=r"state: found revision \d, expected revision \d, which the file loud tells of"):
        await LocalStepStore(tmp_path).value()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [_flip, _empty])
async def test_who_waits_is_told_of_damage(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """When what wakes them cannot be read, they would wait for ever; each gets an error of its own, which names the file."""
    async with LocalStepStore(tmp_path) as store:
        waits = [asyncio.ensure_future(store.wait_for(step)) for step in (5, 5, 7)]
        await asyncio.sleep(0)
        damage(store.directory / "loud")
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, StoreDamagedError)
            assert error.path == str(store.directory / "loud")
        with pytest.raises(StoreDamagedError):
            await store.advance()
        with pytest.raises(StoreDamagedError):
            await store.wait_for(9)
    assert "loud: found" in caplog.text


@pytest.mark.parametrize("name", FILES)
async def test_a_damaged_run_can_be_forgotten(tmp_path: Path, name: str) -> None:
    """By a store that cannot open it; then it begins anew."""
    directory = await a_run(tmp_path)
    (directory / name).write_text("no")
    await LocalStepStore(tmp_path).forget()
    assert not directory.exists()
    assert await opened(tmp_path) == Position(1, 0)


async def test_a_session_does_not_recover_from_damage(tmp_path: Path) -> None:
    """It would find the same again: the error comes out at once."""
    tries = 0

    async def step() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            _flip(store.directory / "quiet")

    store = LocalStepStore(tmp_path)
    async with store:
        with pytest.raises(StoreDamagedError) as caught:  # noqa: PT012
            async with ah.AsyncMonitoredSession(step, global_step=store) as session:
                while True:
                    await session.run("step")
    assert tries == 3
    assert caught.value.path == str(store.directory / "quiet")
