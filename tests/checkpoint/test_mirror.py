"""Mirrors: what is copied there and when, faults of the file system, and that a run never waits for
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aiohooks import Backoff
from aiohooks.checkpoint import (
    KeepNewest,
    KeepPolicy,
    Mirror,
    MirrorStatus,
    Saver,
    _remote,
)
from aiohooks.checkpoint._remote import Copier
from aiohooks.checkpoint.policies import Checkpoint
from aiohooks.testing import ManualClock
from tests.support.checkpoint_files import same, state_of
from tests.support.faulty_files import Disk, Hang, memory_mirror, status_of
from tests.support.waiting import HANG_SECS, cancel_and_wait, parked, until_true

QUICKLY = Backoff(0, 0)


FILES = ("arrays.safetensors", "manifest.json", "state.msgpack")


async def reached(event: threading.Event) -> None:
    """Wait until a thread has set an event."""
    assert await asyncio.to_thread(event.wait, HANG_SECS)


async def failures(saver: Saver, count: int) -> None:
    """Wait until so many attempts to copy have failed, and the next one is waited for."""
    await until_true(lambda: status_of(saver).failures == count)
    await asyncio.sleep(0)


async def restored_step(path: Path, mirror: Any, **options: Any) -> int | None:
    """Return the step that a Saver of this directory restores, after checking its state."""
    async with Saver(path, mirror=mirror, **options) as saver:
        restored = await saver.restore()
    assert restored is None or same(restored.state, state_of(restored.checkpoint.step))
    return None if restored is None else restored.checkpoint.step


async def mirrored(path: Path, disk: Disk, *steps: int, keep: KeepPolicy = KeepNewest(5)) -> None:
    """Save steps and copy each one to the disk."""
    async with Saver(path, mirror=disk.mirror(), keep=keep) as saver:
        await saver.restore()
        for step in steps:
            await saver.save(state_of(step), step)
            assert await saver.flush_mirror()


@contextlib.asynccontextmanager
async def hanging(
    path: Path, disk: Disk, operation: str = "write", **options: Any
) -> AsyncIterator[tuple[Saver, Hang]]:
    """Yield a Saver whose copy of step 1 hangs in an operation until it is released."""
    keep = options.pop("keep", KeepNewest(5))
    async with Saver(path, mirror=disk.mirror(**options), keep=keep) as saver:
        await saver.restore()
        with disk.hang(operation, once=True) as hang:
            await saver.save(state_of(1), 1)
            await reached(hang.reached)
            yield saver, hang


def order_of_uploads(disk: Disk) -> list[int]:
    """Return the steps in the order in which their files were opened."""
    return list(
        dict.fromkeys(int(path[5:17]) for operation, path in disk.log if operation == "open wb")
    )


async def test_a_forked_child_copies_nothing(tmp_path: Path) -> None:
    """What is pending is its parent's, which has the thread and the connection for it."""
    copier = Copier(memory_mirror(tmp_path), KeepNewest())
    copier.submit(Checkpoint(step=1, sequence=1, path=tmp_path / "removed"))
    child = os.fork()
    if child == 0:
        os._exit(copier.status.pending)
    # It has ended by then.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
    assert copier.status.pending == 1
    await copier.aclose(30)  # ends immediately: there is nothing to copy


async def test_a_policy_that_fails_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the copy is complete."""
    disk, failing = Disk(), KeepPolicy()
    await mirrored(tmp_path, disk, 1, 2, keep=failing)
    assert disk.steps() == [1, 2]
    assert "old checkpoints could not be removed (NotImplementedError())" in caplog.text


async def count_of_operations(path: Path) -> int:
    """Return how many operations a second upload and the removal of the first take."""
    disk = Disk()
    await mirrored(path, disk, 1)
    disk.log.clear()
    await mirrored(path, disk, 2, keep=KeepNewest(1))
    return len(disk.log)


@pytest.mark.parametrize("partial", [False, True])
async def test_any_operation_may_fail_or_be_the_last(tmp_path: Path, partial: bool) -> None:
    """Whichever fails, the copy is made again until it is complete; what could not be removed is
    removed after the next one.

    After each operation that is the last of a process, the older checkpoint is restored or the new
    one, and it is complete.
    """
    total = await count_of_operations(tmp_path / "count")
    assert total > 15
    seen: list[int | None] = []
    for dies, number in itertools.product((False, True), range(total + 1)):
        disk, path = Disk(partial=partial), tmp_path / str(dies) / str(number)
        await mirrored(path, disk, 1)
        failing = len(disk.log) + number + 1

        def fail(
            operation: str, where: str, disk: Disk = disk, failing: int = failing, dies: bool = dies
        ) -> None:
            if len(disk.log) == failing or (dies and len(disk.log) > failing):
                raise OSError(f"{operation} {where}")

        disk.before = fail
        backoff = Backoff(99, 99, False) if dies else QUICKLY
        async with Saver(path, mirror=disk.mirror(backoff=backoff), keep=KeepNewest(1)) as saver:
            await saver.save(state_of(2), 2)
            if dies:
                await until_true(functools.partial(is_settled, saver))
                await saver.aclose(grace_secs=0)
            else:
                assert await saver.flush_mirror(30)
                assert (
                    status_of(saver).latest_step,
                    status_of(saver).pending,
                    status_of(saver).error,
                ) == (2, 0, None)
                disk.heal()
                await saver.save(state_of(3), 3)
        disk.heal()
        found = await restored_step(tmp_path / "new" / str(dies) / str(number), disk.mirror())
        if dies:
            seen.append(found)
        else:
            assert (disk.steps(), found) == ([3], 3), number
    assert seen == sorted(seen, key=lambda step: step or 0), "once it is there it stays"
    assert set(seen) == {1, 2}


async def test_a_file_whose_upload_fails_is_closed_immediately(tmp_path: Path) -> None:
    """Its finaliser would upload the rest, in any thread."""
    disk, failed = Disk(), list[int]()

    def fail(operation: str, path: str) -> None:
        if operation == "write" and not failed:
            failed.append(len(disk.log))
            raise OSError("the link is cut")

    disk.before = fail
    async with Saver(tmp_path, mirror=disk.mirror(backoff=QUICKLY)) as saver:
        await saver.save(state_of(1), 1)
        assert await saver.flush_mirror(30)
    assert disk.log[failed[0]] == ("close", disk.log[failed[0] - 1][1])


def no_threads() -> bool:
    """Return whether no thread of a mirror is left."""
    return not any("aiohooks: mirror" in thread.name for thread in threading.enumerate())


def is_settled(saver: Saver) -> bool:
    """Return whether an attempt has failed, or all are copied and what was old is removed."""
    status = status_of(saver)
    return bool(status.failures) or not status.pending


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("loss", ["missing", "truncated", "longer", "changed"])
async def test_what_is_lost_in_an_upload_is_uploaded_again(
    tmp_path: Path, file: str, loss: str
) -> None:
    """A file that the file system took and did not keep is noticed before the manifest is written,
    or when that is read back.
    """
    disk, lost = Disk(), False

    def lose(operation: str, path: str) -> None:
        nonlocal lost
        found = next((name for name in disk.files if name.endswith(file)), None)
        if found is not None and not lost and operation == "read" and path.endswith(file):
            lost = True
            data = disk.files.pop(found)
            changed = {
                "truncated": data[:-1],
                "longer": data + b"x",
                "changed": bytes([data[0] ^ 1]) + data[1:],
            }
            if loss != "missing":
                disk.files[found] = changed[loss]

    disk.before = lose
    async with Saver(tmp_path / "a", mirror=disk.mirror(backoff=QUICKLY)) as saver:
        await saver.save(state_of(1), 1)
        assert await saver.flush_mirror(30)
        status = status_of(saver)
    assert lost
    assert (status.latest_step, status.failures) == (1, 1)
    assert await restored_step(tmp_path / "b", disk.mirror()) == 1


async def test_later_metrics_do_not_replace_a_newer_checkpoint(tmp_path: Path) -> None:
    """The newest of those that wait is copied, though an older one has changed since."""
    disk = Disk()
    async with hanging(tmp_path, disk) as (saver, hang):
        await saver.save(state_of(2), 2)
        await saver.add_metrics(1, {"loss": 1})
        hang.released.set()
        assert await saver.flush_mirror(30)
    assert order_of_uploads(disk) == [1, 2]


async def test_a_failure_of_this_system_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, or too little memory: the copy is made again, like any other."""
    errors: list[Exception] = [OSError(errno.EMFILE, "too many open files"), MemoryError()]
    opening = _remote._open_files

    def failing(*args: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return opening(*args)

    monkeypatch.setattr(_remote, "_open_files", failing)
    disk = Disk()
    async with Saver(tmp_path, mirror=disk.mirror(backoff=QUICKLY)) as saver:
        await saver.save(state_of(1), 1)
        assert await saver.flush_mirror(30)
        assert (status_of(saver).latest_step, status_of(saver).failures) == (1, 2)
    assert disk.steps() == [1]


async def test_a_checkpoint_that_cannot_be_reached_does_not_count_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is missing for a moment, and its directory gives an error: the copy is retried."""
    opening = _remote._open_files
    faults = ["open", "stat"]

    def failing_open(checkpoint: Checkpoint, opened: contextlib.ExitStack) -> Any:
        if "open" in faults:
            faults.remove("open")
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return opening(checkpoint, opened)

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def stat(path: Any, *args: Any, **options: Any) -> Any:
            if faults == ["stat"] and "step-" in str(path):
                faults.clear()
                raise OSError(errno.EIO, "input/output error")
            return call(path, *args, **options)

        return stat

    monkeypatch.setattr(_remote, "_open_files", failing_open)
    monkeypatch.setattr(os, "stat", failing(os.stat))
    monkeypatch.setattr(os, "lstat", failing(os.lstat))
    disk = Disk()
    async with Saver(tmp_path, mirror=disk.mirror(backoff=QUICKLY)) as saver:
        await saver.save(state_of(1), 1)
        assert await saver.flush_mirror(30)
        assert (status_of(saver).latest_step, status_of(saver).failures) == (1, 1)
    assert not faults
    assert disk.steps() == [1]


async def test_one_that_is_damaged_here_is_not_copied(tmp_path: Path) -> None:
    """What does not fit its manifest does not become a checkpoint there; the next one does."""
    disk = Disk()
    async with hanging(tmp_path, disk, backoff=QUICKLY) as (saver, hang):
        arrays = (await saver.save(state_of(2), 2)).path / "arrays.safetensors"
        arrays.write_bytes(arrays.read_bytes()[:-1] + b"\xff")
        hang.released.set()
        await until_true(lambda: status_of(saver).failures)
        assert (
            status_of(saver).error == "what was read back of arrays.safetensors does not have the"
            " checksum in the manifest"
        )
        await saver.save(state_of(3), 3)
        assert await saver.flush_mirror(30)
    assert disk.steps() == [1, 3]


async def test_a_mirror_that_refuses_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """With its reason, which the status has too; attempts come after pauses, and the newest is
    copied when it works again.

    From `flush_mirror` on the pauses between attempts begin with the shortest again.
    """
    caplog.set_level(logging.INFO, "aiohooks")
    disk = Disk()
    disk.fail("open wb")
    async with Saver(tmp_path, mirror=disk.mirror(backoff=Backoff(10, 40, jitter=False))) as saver:
        await saver.restore()
        await saver.save(state_of(1), 1)

        for count, pause in enumerate((10, 20, 40, 40), 1):
            await failures(saver, count)
            clock.advance(pause - 1)
            await asyncio.sleep(0)
            assert saver.mirror_status == MirrorStatus(
                "faulty://disk/run",
                pending=1,
                failures=count,
                error="ConnectionRefusedError: refused",
            )
            clock.advance(1)
        await failures(saver, 5)
        assert [record.message for record in caplog.records] == [
            "mirror faulty://disk/run: the checkpoint of step 1 was not copied"
            " (ConnectionRefusedError: refused); trying again, and training continues"
        ]
        await saver.save(state_of(2), 2)
        flushing = asyncio.create_task(saver.flush_mirror())  # ends the pause
        await failures(saver, 6)
        clock.advance(10)
        await failures(saver, 7)
        disk.heal()
        clock.advance(20)
        assert await flushing
        assert saver.mirror_status == MirrorStatus("faulty://disk/run", latest_step=2, failures=7)
    assert (len(caplog.records), clock.pending) == (1, 0)


@pytest.mark.parametrize("operation", ["open wb", "write", "close", "read"])
async def test_a_mirror_that_hangs_is_left_behind(
    tmp_path: Path, operation: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """After `timeout_secs` without progress a call has failed; the next has a new connection, and
    the old one changes nothing.
    """
    disk = Disk()
    async with hanging(
        tmp_path, disk, operation, timeout_secs=30, backoff=QUICKLY, keep=KeepNewest(1)
    ) as (saver, hang):
        await saver.save(state_of(2), 2)
        opened = disk.opened
        while not caplog.records:
            clock.advance(30)
            await asyncio.sleep(0)
        assert "no progress for 30 s" in caplog.text
        assert await saver.flush_mirror()
        assert (disk.opened, disk.steps()) == (opened + 1, [2])
        done = len(disk.log)
        hang.released.set()
        await until_true(no_threads)
        assert not [
            path
            for noted_operation, path in disk.log[done:]
            if noted_operation in ("open wb", "write", "remove")
        ]
        assert disk.steps() == [2]


async def test_the_end_waits_for_a_limited_time(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """After the grace period the steps that are missing are named; the next Saver copies the newest
    after its restore.
    """
    disk = Disk()
    async with hanging(tmp_path, disk) as (saver, _):
        await saver.save(state_of(2), 2)
        closing = await parked(saver.aclose(grace_secs=7))
        clock.advance(6)
        await asyncio.sleep(0)
        assert not closing.done()
        clock.advance(1)
        await closing
        assert caplog.messages == [
            "mirror faulty://disk/run: not copied within 7 s: the checkpoints of the steps 1, 2 (it"
            " is slow)"
        ]
    await until_true(no_threads)
    assert disk.checkpoints() == []
    assert await restored_step(tmp_path, disk.mirror()) == 2
    assert disk.steps() == [2]


@pytest.mark.parametrize("call", ["flush_mirror", "aclose"])
async def test_waiting_can_be_cancelled(tmp_path: Path, call: str) -> None:
    """A cancelled `flush_mirror` leaves the upload alone; a cancelled `aclose` gives it up and
    releases the directory.
    """
    disk = Disk()
    async with hanging(tmp_path, disk) as (saver, hang):
        task = await parked(getattr(saver, call)())
        await asyncio.sleep(0)
        assert await cancel_and_wait(task)
        if call == "aclose":
            async with Saver(tmp_path) as other:
                await other.save(state_of(2), 2)
        hang.released.set()
    await until_true(no_threads)
    assert disk.steps() == ([1] if call == "flush_mirror" else [])


async def test_another_checkpoint_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    """Two runs that write to one mirror: the second gets an error, and what the first has written
    stays.
    """
    disk = Disk()
    await mirrored(tmp_path / "a", disk, 1)
    before = dict(disk.files)
    async with Saver(tmp_path / "b") as saver:
        await saver.save({"other": 1}, 1)
    async with Saver(tmp_path / "b", mirror=disk.mirror(backoff=QUICKLY)) as saver:
        await saver.restore()
        await until_true(lambda: status_of(saver).failures)
        assert (
            "another checkpoint has the name step-000000000001.000001: a mirror has one writer"
            in str(status_of(saver))
        )
        assert disk.files == before
        assert (await saver.save({"other": 2}, 2)).sequence == 2
        assert await saver.flush_mirror(30)
    assert disk.steps() == [1, 2]


async def test_unfinished_uploads_are_removed(tmp_path: Path) -> None:
    """What a killed process has left is removed by the next upload; a later one may be in progress
    elsewhere, and stays.
    """
    disk = Disk()
    left = {
        f"disk/run/step-000000000001.00000{sequence}/arrays.safetensors": b"half"
        for sequence in (1, 9)
    }
    disk.files.update(left)
    async with Saver(tmp_path / "a") as saver:
        for step in (1, 2):
            await saver.save(state_of(step), step)
    await mirrored(tmp_path / "a", disk)
    assert [path for path in left if path in disk.files] == list(left)[1:]
    assert await restored_step(tmp_path / "b", disk.mirror()) == 2


def test_arguments_are_checked(tmp_path: Path) -> None:
    """Whatever is wrong is said when the Saver is made."""
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: Saver(tmp_path, mirror=3), "mirror is 3; give a Mirror"),  # type: ignore[arg-type]
        (lambda: Saver(tmp_path, mirror=""), "the URL of a mirror is ''; give a str"),
        (
            lambda: Saver(tmp_path, mirror="nothing://x"),
            "the mirror nothing://x has the protocol 'nothing', which fsspec does not know",
        ),
        (
            lambda: Saver(tmp_path, mirror="memory://x", read_only=True),
            "read_only=True and a mirror exclude each other",
        ),
        (lambda: Mirror("memory://x", timeout_secs=0), "timeout_secs is 0"),
        (lambda: Mirror("memory://x", backoff=1.0), "backoff is 1.0"),  # type: ignore[arg-type]
        (
            lambda: Mirror("memory://x", storage_options=3),  # type: ignore[arg-type]
            "storage_options is 3",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            call()


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    """Neither those in the URL nor the options are in what is shown of a mirror."""
    mirror = Mirror("ftp://me:secret@host/run", storage_options={"password": "secret"})
    saver = Saver(tmp_path, mirror=mirror)
    assert str(mirror) == "ftp://host/run"
    assert "secret" not in f"{mirror} {saver.mirror_status} {saver.mirror_status!r} {saver!r}"
    assert "secret" not in repr(mirror)
