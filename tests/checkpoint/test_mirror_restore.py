"""Restoring with a mirror: the newest checkpoint that verifies, here or there."""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from aiohooks.checkpoint import KeepNewest, Mirror, Saver
from aiohooks.checkpoint.policies import INTERIM
from aiohooks.errors import CheckpointError, CorruptCheckpointError
from aiohooks.testing import ManualClock
from tests.checkpoint.test_mirror import (
    FILES,
    QUICKLY,
    mirrored,
    no_threads,
    reached,
    restored_step,
)
from tests.fuzz.checkpoints.operations import Failing
from tests.support.checkpoint_files import WatchedFs, names, saver_over, state_of, step_of
from tests.support.faulty_files import Disk, status_of
from tests.support.waiting import cancel_and_wait, until_true


async def test_a_step_is_found_in_the_mirror(tmp_path: Path) -> None:
    """`restore(step)` downloads it if it is not here; a step that is nowhere is an error."""
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1, 2, 3)
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        restored = await saver.restore(2)
        assert restored is not None
        assert restored.checkpoint.sequence == 2
        assert names(tmp_path / "b") == ["step-000000000002.000002"]
        with pytest.raises(CheckpointError, match="has no checkpoint of step 7"):
            await saver.restore(7)
        assert step_of(await saver.restore()) == 3


async def test_an_interim_checkpoint_stays_one(tmp_path: Path) -> None:
    """After a download, here and in the mirror: the next checkpoint of the run replaces it."""
    disk = Disk()
    async with Saver(tmp_path / "a", mirror=disk.mirror()) as saver:
        await saver.save(state_of(1), 1, metrics={"loss": 1, INTERIM: 1})
        assert await saver.flush_mirror(30)
    there = dict(disk.files)
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        restored = await saver.restore()
        assert restored is not None
        assert restored.checkpoint.interim
        assert await saver.flush_mirror(30)
    assert disk.files == there


async def test_a_directory_without_a_good_checkpoint_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not again after the mirror has nothing newer: its damage is logged once."""
    disk = Disk()
    async with saver_over(WatchedFs(), tmp_path) as saver:
        path = (await saver.save(state_of(1), 1)).path
    (path / "state.msgpack").write_bytes(b"")

    def rename(*_: object, **options: object) -> None:
        raise OSError(errno.EACCES, "may not be renamed")

    async with saver_over(WatchedFs(rename=rename), tmp_path, mirror=disk.mirror()) as saver:
        with pytest.raises(CorruptCheckpointError, match="none of them is good"):
            await saver.restore()
    assert sum(path.name in text for text in caplog.messages) == 1


@pytest.mark.parametrize("steps", [(2,), (1, 2)])
async def test_what_is_damaged_here_is_restored_from_there(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    """It is set aside, and the same one is downloaded; `set_aside` says so. That happens in a
    recovery, too.
    """
    disk = Disk()
    async with Saver(tmp_path, mirror=disk.mirror()) as saver:
        await saver.restore()
        for step in (1, 2):
            await saver.save(state_of(step), step)
            assert await saver.flush_mirror(30)
        for step in steps:
            (tmp_path / f"step-{step:012d}.{step:06d}" / "arrays.safetensors").write_bytes(
                b"nothing"
            )
        restored = await saver.restore()
        assert step_of(restored) == 2
        aside = [f"step-{step:012d}.{step:06d}" for step in steps]
        if restored is not None and len(steps) == 1:
            assert restored.set_aside == (
                (aside[0], "arrays.safetensors has 7 bytes instead of 104"),
            )
    there = [
        *(f"damaged-{name}" for name in aside),
        *(["step-000000000001.000001"] if len(steps) == 1 else []),
    ]
    assert names(tmp_path) == [*there, "step-000000000002.000002"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "changed"])
async def test_one_that_is_damaged_there_is_skipped(tmp_path: Path, file: str, damage: str) -> None:
    """Whatever is wrong with it, the one before is downloaded, nothing is left of it here, and
    there it stays as it is.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1, 2)
    path = f"disk/run/step-000000000002.000002/{file}"
    data = disk.files.pop(path)
    if damage != "missing":
        disk.files[path] = {
            "truncated": data[:-1],
            "longer": data + b"x",
            "changed": b"?" + data[1:],
        }[damage]
    before = dict(disk.files)
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        assert step_of(await saver.restore()) == 1
        assert names(tmp_path / "b") == ["step-000000000001.000001"]
        assert (await saver.save(state_of(3), 3)).sequence == 3  # later than the damaged one
        assert {path: disk.files[path] for path in before} == before


async def test_none_is_good(tmp_path: Path) -> None:
    """Damaged checkpoints there are an error, like those here: a run does not begin again by
    mistake.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    path = "disk/run/step-000000000001.000001/arrays.safetensors"
    disk.files[path] = disk.files[path][:-1] + b"\xff"
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        with pytest.raises(
            CorruptCheckpointError,
            match="the mirror faulty://disk/run has checkpoints and none of them is good",
        ):
            await saver.restore()
    (tmp_path / "a" / "step-000000000001.000001" / "state.msgpack").unlink()
    async with Saver(tmp_path / "a", mirror=disk.mirror()) as saver:
        with pytest.raises(
            CorruptCheckpointError,
            match=r"the newest is step-000000000001\.000001: state\.msgpack cannot be read",
        ):
            await saver.restore()


async def test_a_mirror_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a checkpoint here the run continues from it, and what it saves is later than what may be
    there; without, it fails.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    await mirrored(tmp_path / "a", disk, 2, 3)
    disk.fail("ls")
    async with Saver(tmp_path / "new", mirror=disk.mirror(backoff=QUICKLY)) as saver:
        with pytest.raises(
            CheckpointError, match="could not be read: ConnectionRefusedError: refused; try again"
        ) as raised:
            await saver.restore()
        assert raised.value.errno == errno.EIO
    caplog.clear()
    async with Saver(tmp_path / "b", mirror=disk.mirror(backoff=QUICKLY)) as saver:
        assert step_of(await saver.restore()) == 1
        assert caplog.messages == [
            "the mirror faulty://disk/run could not be read (ConnectionRefusedError: refused):"
            " continuing with step 1, the newest here"
        ]
        assert await saver.restore() is not None
        assert "could not be read" not in "".join(
            caplog.messages[1:]
        )  # a recovery does not ask again
        disk.heal()
        await saver.save(state_of(2), 2)
        assert await saver.flush_mirror(30)
    assert await restored_step(tmp_path / "c", disk.mirror()) == 2
    assert disk.steps() == [1, 3, 2]


@pytest.mark.parametrize("operation", ["ls", "read"])
async def test_too_little_memory_is_no_failure_of_the_mirror(
    tmp_path: Path, operation: str
) -> None:
    """A restore does not continue from an older checkpoint because of it."""
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    await mirrored(tmp_path / "a", disk, 2)

    def fail(found: str, path: str) -> None:
        if found == operation:
            raise MemoryError

    disk.before = fail
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        with pytest.raises(MemoryError):
            await saver.restore()
        disk.heal()
        assert step_of(await saver.restore()) == 2


@pytest.mark.parametrize(
    "url", ["faulty://disk/run", "file://{}/mount/backup/run", "memory://{}/mount/backup/run"]
)
async def test_a_missing_bucket_or_mount_is_an_error(tmp_path: Path, url: str) -> None:
    """It says nothing about what is in the mirror: a run does not begin again by mistake."""
    disk = Disk()
    disk.is_missing = True
    mirror = Mirror(
        url.format(tmp_path),
        storage_options={"disk": disk} if "disk" in url else None,
        backoff=QUICKLY,
    )
    async with Saver(tmp_path / "here", mirror=mirror) as saver:
        with pytest.raises(
            CheckpointError, match=r"the mirror .* could not be read: .* does not exist"
        ):
            await saver.restore()


@pytest.mark.parametrize("kind", ["file", "memory"])
async def test_a_missing_directory_is_not_made(tmp_path: Path, kind: str) -> None:
    """It may not be mounted: neither a restore nor a copy makes it, and the message says what to
    do.
    """
    root = tmp_path / "run" if kind == "file" else Path("/", tmp_path.name)
    mirror = Mirror(f"{kind}://{root}", backoff=QUICKLY)
    fs: Any = fsspec.filesystem(kind)
    async with Saver(tmp_path / "a", mirror=mirror) as saver:
        with pytest.raises(CheckpointError, match="mount it, or make it if the mirror is new"):
            await saver.restore()
        await saver.save(state_of(1), 1)
        await until_true(lambda: status_of(saver).failures > 1)
        assert not fs.exists(str(root))
        fs.mkdir(str(root))
        assert await saver.flush_mirror(30)
    assert await restored_step(tmp_path / "b", mirror) == 1


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("lost", ["missing", "unreadable"])
@pytest.mark.parametrize("restored_first", [False, True])
async def test_a_mirror_that_comes_back_loses_nothing(
    tmp_path: Path, lost: str, killed: bool, restored_first: bool
) -> None:
    """What was saved while it was away is the newest, also after a kill, and no newer copy is
    removed for an older one.
    """
    mirror = Mirror(f"file://{tmp_path}/mount/run", backoff=QUICKLY)
    mount, hidden = tmp_path / "mount", tmp_path / "hidden"
    (mount / "run").mkdir(parents=True)
    async with Saver(tmp_path / "a", mirror=mirror) as saver:
        if restored_first or killed:  # without any knowledge of each other, two runs have no order
            await saver.restore()
        for step in (1, 2, 3):
            await saver.save(state_of(step), step)
            assert await saver.flush_mirror(30)
    async with Saver(tmp_path / "b") as saver:
        await saver.save(state_of(2), 2)
    mount.rename(hidden)
    if lost == "unreadable":
        mount.touch()
    saver = Saver(tmp_path / "b", mirror=mirror, keep=KeepNewest(4))
    assert step_of(await saver.restore()) == 2
    await saver.save(state_of(10), 10)
    await until_true(lambda: status_of(saver).failures)
    if killed:
        await saver.aclose(grace_secs=0)
    if lost == "unreadable":
        mount.unlink()
    assert not mount.exists(), "nothing is copied to where it will not be found"
    hidden.rename(mount)
    async with saver:
        if killed:
            assert step_of(await saver.restore()) == 10
        for step in (11, 12):
            await saver.save(state_of(step), step)
            assert await saver.flush_mirror(30)
    there = sorted(names(mount / "run"), key=lambda name: int(name[18:]))
    steps = [int(name[5:17]) for name in there]
    assert steps[-2:] == [11, 12]
    assert 3 in steps
    assert await restored_step(tmp_path / "c", mirror) == 12


async def test_saves_without_a_restore_are_later_than_what_is_there(tmp_path: Path) -> None:
    """Until the mirror has been read, a sequence is the time; then it follows the others."""
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1, 2, 3)
    async with Saver(tmp_path / "b", mirror=disk.mirror(), keep=KeepNewest(3)) as saver:
        begun = int(time.time() * 1000)
        first = await saver.save(state_of(10), 10)
        assert begun <= first.sequence <= time.time() * 1000
        assert await saver.flush_mirror(30)
        assert (await saver.save(state_of(11), 11)).sequence == first.sequence + 1
    assert disk.steps() == [3, 10, 11]
    assert await restored_step(tmp_path / "c", disk.mirror()) == 11


@pytest.mark.parametrize("operation", ["ls", "read"])
async def test_a_mirror_that_hangs_is_not_waited_for(
    tmp_path: Path, operation: str, clock: ManualClock
) -> None:
    """After `timeout_secs` the run continues from what is here, in spite of an unfinished download,
    of which nothing is left.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    await mirrored(tmp_path / "a", disk, 2)
    async with Saver(tmp_path / "b", mirror=disk.mirror(timeout_secs=30)) as saver:
        with disk.hang(operation, "state" if operation == "read" else "") as hang:
            restoring = asyncio.create_task(saver.restore())
            await reached(hang.reached)
            while not restoring.done():
                clock.advance(30)
                await asyncio.sleep(0)
            assert step_of(await restoring) == 1
            assert names(tmp_path / "b") == ["step-000000000001.000001"]
        await saver.flush_mirror()
    await until_true(no_threads)


async def test_a_cancelled_download_leaves_nothing(tmp_path: Path) -> None:
    """A restore that is cancelled while the mirror hangs ends without it, and the directory can be
    used again.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        with disk.hang("read", "state") as hang:
            restoring = asyncio.create_task(saver.restore())
            await reached(hang.reached)
            assert await cancel_and_wait(restoring)
            assert names(tmp_path / "b") == []
        disk.heal()
        assert step_of(await saver.restore()) == 1
    await until_true(no_threads)


async def test_any_failure_here_leaves_nothing(tmp_path: Path) -> None:
    """A full disk in the middle of a download is an error of the restore; the reader of the mirror
    ends as well.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    for number in itertools.count():
        path, fs = tmp_path / str(number), Failing(number, errno.ENOSPC, "once")
        async with saver_over(fs, path, mirror=disk.mirror()) as saver:
            try:
                assert await saver.restore() is not None
            except CheckpointError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
                assert not path.exists() or names(path) in ([], ["step-000000000001.000001"])
        if not fs.failed:
            break
    assert number > 30
    await until_true(no_threads)
