"""The database of a local run, damaged in every way: the error says where and how, and nothing is
guessed in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from aiohooks.errors import StoreDamagedError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores import Position
from aiohooks.testing import ManualClock
from tests.support.stores import directory_of, local_store
from tests.support.waiting import parked, ticks

FILES = ("notify", "waiting", "run.db")


async def make_run(directory: Path) -> Path:
    """Make a run that has had publishers, waiters and a reset; return its database."""
    async with local_store(directory) as store, local_store(directory) as other:
        with store.publisher("trainer"):
            wait = await parked(other.wait_for(5))
            await store.advance(5)
            await wait
        await store.reset(3)
        await store.advance()
    return directory_of(store) / "run.db"


async def open_run(directory: Path) -> Position:
    """Open the run and advance it; return the position before that."""
    async with local_store(directory) as store:
        position = await store.value()
        assert await store.advance() == position.step + 1
        return position


def execute(statement: str) -> Callable[[Path], None]:
    """Return what changes a database by a statement of SQL."""

    def change(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not a database": lambda path: path.write_bytes(b"nonsense" * 1000),
    "another beginning": lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2),
    "nothing in it": lambda path: os.truncate(path, 0),
    "nothing": lambda path: path.unlink(),
    "no table": execute("DROP TABLE state"),
    "no row": execute("DELETE FROM run"),
    "no state": execute("UPDATE state SET text = '{'"),
    "another version": execute("PRAGMA user_version = 3"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_every_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    """Opening the run fails with its file. A store that cannot open the run can delete it; then
    the run begins anew.
    """
    path = await make_run(tmp_path)
    DAMAGES[damage](path)
    with pytest.raises(
        StoreDamagedError, match=r"found .*, expected .*forget.*remove the directory"
    ) as caught:
        await local_store(tmp_path).value()
    assert caught.value.path == str(path)
    assert caught.value.found in str(caught.value)
    assert caught.value.expected == "a database of version 2"
    await local_store(tmp_path).forget()
    assert not path.parent.exists()
    assert await open_run(tmp_path) == Position(1, 0)


async def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """A run in the files of the first version is left alone; the error names its directory, and
    what to do with it.
    """
    run = tmp_path / "default"
    (run / "alive").mkdir(parents=True)
    run.chmod(0o700)
    (run / "position").write_bytes(b"ahooks.1")
    with pytest.raises(
        StoreRefusedError, match=rf"{run} has a run of an earlier version: finish it with that"
    ):
        await local_store(tmp_path).value()
    assert sorted(os.listdir(run)) == ["alive", "position"]


@pytest.mark.parametrize("name", ["notify", "waiting"])
async def test_a_file_that_is_made_again(tmp_path: Path, name: str) -> None:
    """The files that only wake processes are made again by the next one that opens the run."""
    path = (await make_run(tmp_path)).with_name(name)
    path.unlink()
    assert await open_run(tmp_path) == Position(2, 4)
    assert path.exists()


async def test_the_file_of_the_waiting_is_cut_off(tmp_path: Path) -> None:
    """An advance counts and wakes all others, which then find the damage."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        waiting = await parked(other.wait_for(2))
        os.truncate(directory_of(store) / "waiting", 5)
        assert await store.advance() == 1
        with pytest.raises(StoreDamagedError, match="waiting"):
            await waiting


async def test_the_notification_is_cut_off(tmp_path: Path) -> None:
    """The waiting processes read the database instead, and the next advance repairs the file."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        waiting = await parked(other.wait_for(2))
        os.truncate(directory_of(store) / "notify", 3)
        await ticks()
        assert await store.advance(2) == 2
        assert await waiting == 2


async def test_foreign_files_among_those_of_the_living(tmp_path: Path) -> None:
    """They are no processes; the dead are found beside them."""
    alive = (await make_run(tmp_path)).with_name("alive")
    for name in ("0~", "5.swp"):
        (alive / name).write_text("mine")
    assert await open_run(tmp_path) == Position(2, 4)


async def test_the_files_of_the_living_are_deleted(tmp_path: Path) -> None:
    """No living process is taken for dead: its calls and waits end."""
    async with local_store(tmp_path) as store:
        waiting = await parked(store.wait_for(2))
        shutil.rmtree(directory_of(store) / "alive")
        with pytest.raises(StoreUnavailableError, match="was deleted"):
            await waiting


@pytest.mark.parametrize("folder", ["alive", ""])
async def test_something_else_in_the_place_of_a_directory(tmp_path: Path, folder: str) -> None:
    """The error names the directory."""
    path = (await make_run(tmp_path)).parent / folder
    shutil.rmtree(path)
    path.write_text("mine")
    with pytest.raises(StoreRefusedError, match=rf"the directory {path} cannot be made.*File exi"):
        await local_store(tmp_path).value()


async def test_a_run_can_begin_after_its_creation_was_interrupted(tmp_path: Path) -> None:
    """A process that is killed while it makes the files leaves a run that can begin."""
    directory = tmp_path / "default"
    for made in range(len(FILES) + 1):
        (directory / "alive").mkdir(parents=True, mode=0o700)
        directory.chmod(0o700)
        for name in FILES[:made]:
            (directory / name).touch()
        assert await open_run(tmp_path) == Position(1, 0)
        shutil.rmtree(directory)


async def test_damage_that_a_call_finds_ends_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiters do not wait for a notification that may never come: they get an error each, which
    names the file.
    """
    async with local_store(tmp_path) as store:
        waits = [await parked(store.wait_for(step)) for step in (5, 5, 7)]
        DAMAGES["no row"](directory_of(store) / "run.db")
        with pytest.raises(StoreDamagedError, match="found no row of the run"):
            await store.value()
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert len({id(error) for error in errors}) == 3
        for error in errors:
            assert isinstance(error, StoreDamagedError)
            assert error.path == str(directory_of(store) / "run.db")
        for call in (store.advance(), store.wait_for(9)):
            with pytest.raises(StoreDamagedError):
                await call
    assert "run.db: found no row of the run" in caplog.text


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_removed_while_it_is_open(
    tmp_path: Path, name: str, replaced: bool
) -> None:
    """Steps are not written where no other process reads them: calls and waits end."""
    with ManualClock():
        async with local_store(tmp_path) as store, local_store(tmp_path) as other:
            waits = [asyncio.ensure_future(opened.wait_for(5)) for opened in (store, other)]
            await ticks(3)
            path = directory_of(store) / name
            if replaced:
                shutil.copy(path, tmp_path / "copy")
                os.replace(tmp_path / "copy", path)
            else:
                path.unlink()
            for wait in waits:
                with pytest.raises(StoreUnavailableError, match="was deleted, or its directory"):
                    await wait
            for call in (store.advance(), store.value(), other.raise_to(3), other.wait_for(9)):
                with pytest.raises(StoreUnavailableError, match="was deleted, or its directory"):
                    await call
