"""Saver: saving, restoring the newest good checkpoint, setting damaged ones aside, and what is
kept.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiohooks.checkpoint import Checkpoint, KeepBest, KeepNewest, KeepPolicy, Saver
from aiohooks.errors import CheckpointError, CorruptCheckpointError, InvalidArgumentError
from aiohooks.testing import ManualClock
from tests.support.checkpoint_files import (
    WatchedFs,
    directory,
    names,
    same,
    saved,
    saver_over,
    state_of,
)
from tests.support.checks import invalid, refused
from tests.support.faulty_files import memory_mirror
from tests.support.waiting import until_true


def damage(path: Path, file: str = "arrays.safetensors") -> None:
    """Change the last byte of a file of a checkpoint."""
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)


async def test_a_saved_state_is_restored(tmp_path: Path) -> None:
    """Another Saver restores what one has saved, with step, sequence, metrics and path."""
    async with Saver(tmp_path / "a" / "b") as saver:
        checkpoint = await saver.save(
            state_of(3), 3, metrics={"loss": np.float32(0.5), "acc": float("nan")}
        )
    assert (checkpoint.step, checkpoint.sequence, checkpoint.path.name) == (
        3,
        1,
        "step-000000000003.000001",
    )
    async with Saver(str(tmp_path / "a" / "b")) as saver:
        restored = await saver.restore()
    assert restored is not None
    assert same(restored.state, state_of(3))
    assert same(dict(restored.checkpoint.metrics), {"acc": float("nan"), "loss": 0.5})
    assert (restored.checkpoint.path, restored.set_aside) == (checkpoint.path, ())
    assert sorted(os.listdir(checkpoint.path)) == [
        "arrays.safetensors",
        "manifest.json",
        "state.msgpack",
    ]


async def test_nothing_saved_is_none(tmp_path: Path) -> None:
    """A directory that is new, empty or has other entries restores None, and the entries are
    kept.
    """
    async with Saver(tmp_path) as saver:
        assert await saver.restore() is None
        for other in (
            "notes.txt",
            "step-1.1",
            "step-000000000001.00001",
            "step-0000000000010.000001",
            "damaged-mine",
            ".tmp-mine",
        ):
            (tmp_path / other).mkdir()
        assert await saver.restore() is None
        await saver.save({}, 0)
    assert len(names(tmp_path)) == 7


async def test_a_missing_step_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    """It is not damage, so the error is a plain CheckpointError."""
    async with Saver(tmp_path) as saver:
        with pytest.raises(
            CheckpointError, match="no checkpoint of step 7; there are: none at all"
        ):
            await saver.restore(7)
        await saver.save({}, 3)
        await saver.save({}, 4)
        with pytest.raises(CheckpointError, match="there are: 3, 4") as caught:
            await saver.restore(7)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == 2


# Damage


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.msgpack", "manifest.json"])
async def test_a_damaged_one_is_skipped_set_aside_and_reported(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before is restored; the damaged one is renamed, not removed; the log names file and
    reason.
    """
    paths = saved(tmp_path, 1, 2)
    damage(paths[1], file)
    with caplog.at_level(logging.WARNING, "aiohooks"):
        async with Saver(tmp_path) as saver:
            restored = await saver.restore()
            assert restored is not None
            assert restored.state["step"] == 1
            [(name, reason)] = restored.set_aside
            assert name == paths[1].name
            assert file in reason
            assert names(tmp_path) == [f"damaged-{name}", paths[0].name]
            assert sorted(os.listdir(tmp_path / f"damaged-{name}")) == [
                "arrays.safetensors",
                "manifest.json",
                "state.msgpack",
            ]
            assert (await saver.save({}, 9)).sequence == 3
    assert [
        record.message
        for record in caplog.records
        if name in record.message and file in record.message
    ]


@pytest.mark.parametrize("count", [1, 2])
async def test_if_none_is_good_it_is_an_error_now_and_later(tmp_path: Path, count: int) -> None:
    """A run whose checkpoints are all damaged does not silently start from the beginning, also at
    the second attempt.

    The error names the newest.
    """
    newest_first = [path.name for path in reversed(saved(tmp_path, *range(count)))]
    for name in newest_first:
        damage(tmp_path / name)
    for attempt in range(2):
        reason = (
            "was set aside as damaged before"
            if attempt
            else "arrays.safetensors does not have the checksum in the manifest"
        )
        newest = "damaged-" * attempt + newest_first[0]
        async with Saver(tmp_path) as saver:
            with pytest.raises(CorruptCheckpointError) as caught:
                await saver.restore()
        assert f"the newest is {newest}: {reason}; to start" in str(caught.value)
        assert (caught.value.path, caught.value.reason) == (tmp_path / newest, reason)
    assert len(names(tmp_path)) == count
    async with Saver(tmp_path) as saver:
        assert (await saver.save({}, 3)).sequence == count + 1
        assert (await saver.restore()) is not None


async def test_verify_reads_all_and_changes_nothing(tmp_path: Path) -> None:
    """It needs no lock, so it works beside a writer. Those that were set aside come behind the
    others, the newest first.
    """
    paths = saved(tmp_path, 1, 2, 3, 4)
    for path in paths[:2]:
        path.rename(tmp_path / f"damaged-{path.name}")
    damage(paths[2])
    (tmp_path / "step-000000000005.000005").write_text("")
    before = names(tmp_path)
    async with Saver(tmp_path) as writer:
        await writer.save({}, 6)
        found = await Saver(tmp_path).verify()
    assert [(path.name, reason) for path, reason in found] == [
        ("step-000000000006.000006", None),
        ("step-000000000005.000005", "cannot be read (Not a directory)"),
        ("step-000000000004.000004", None),
        (
            "step-000000000003.000003",
            "arrays.safetensors does not have the checksum in the manifest",
        ),
        ("damaged-step-000000000002.000002", "was set aside as damaged"),
        ("damaged-step-000000000001.000001", "was set aside as damaged"),
    ]
    assert names(tmp_path)[:5] == before
    assert await Saver(tmp_path / "nowhere").verify() == []
    assert await Saver(tmp_path / "nowhere").checkpoints() == []
    assert not (tmp_path / "nowhere").exists()


def test_verify_lists_what_a_writer_sets_aside_meanwhile(tmp_path: Path) -> None:
    """A checkpoint that is renamed while it is read is listed under its new name."""
    path = saved(tmp_path, 1, 2)[1]
    damage(path)
    fs = WatchedFs()

    def set_aside(name: str, args: tuple[Any, ...]) -> None:
        if args and args[0] == "arrays.safetensors" and path.exists():
            path.rename(tmp_path / f"damaged-{path.name}")

    fs.before = set_aside
    found = directory(tmp_path, fs, read_only=True).verify()
    assert found == [
        (tmp_path / "step-000000000001.000001", None),
        (tmp_path / f"damaged-{path.name}", "was set aside as damaged"),
    ]


# Policies


class Own(KeepPolicy):
    """Keeps nothing, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        if self._error is not None:
            raise self._error
        return set()


@pytest.mark.parametrize(("error", "steps"), [(None, [2]), (LookupError("no idea"), [2, 1])])
async def test_a_policy_never_costs_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception | None, steps: list[int]
) -> None:
    """One that keeps nothing does not remove it. One that fails removes nothing: the save succeeds,
    and the error is logged.
    """
    async with Saver(tmp_path, keep=Own(error)) as saver:
        await saver.save({}, 1)
        await saver.save({}, 2)
        assert [checkpoint.step for checkpoint in await saver.checkpoints()] == steps
    assert ("no idea" in caplog.text) is (error is not None)


# Metrics that come later


@pytest.mark.parametrize("mirrored", [False, True])
async def test_later_metrics_are_those_of_the_checkpoint(tmp_path: Path, mirrored: bool) -> None:
    """They are added to the others, on the disk and in the mirror, and what is no longer the best
    is removed.
    """
    mirror = memory_mirror(tmp_path) if mirrored else None
    async with Saver(tmp_path / "here", keep=KeepBest(1, "score"), mirror=mirror) as saver:
        await saver.save({"weights": 1}, 1, metrics={"score": 3})
        await saver.save({"weights": 2}, 2, metrics={"loss": 5})
        assert await saver.flush_mirror()
        found = await saver.add_metrics(2, {"score": 2})
        assert await saver.add_metrics(7, {"score": 2}) is None
        assert await saver.flush_mirror()
        assert await saver.verify() == [(found.path if found else None, None)]
    async with Saver(tmp_path / ("elsewhere" if mirrored else "here"), mirror=mirror) as saver:
        restored = await saver.restore()  # also compares what is here with the mirror
        assert await saver.flush_mirror()
        assert saver.mirror_status is None or saver.mirror_status.failures == 0
    assert restored is not None
    assert (restored.checkpoint.step, dict(restored.checkpoint.metrics)) == (
        2,
        {"loss": 5, "score": 2},
    )
    assert restored.state == {"weights": 2}


async def test_metrics_that_cannot_be_added_are_refused(tmp_path: Path) -> None:
    """A reader adds nothing, and what is no number is refused; the checkpoint is unchanged."""
    async with Saver(tmp_path) as saver:
        await saver.save({}, 1)
        with invalid("metrics['score'] is 'x'"):
            await saver.add_metrics(1, {"score": "x"})  # type: ignore[dict-item]
        with refused(CheckpointError, "read_only=True"):
            await Saver(tmp_path, read_only=True).add_metrics(1, {"score": 1})
        assert [dict(checkpoint.metrics) for checkpoint in await saver.checkpoints()] == [{}]


# Order, memory, cancelling


async def test_a_save_lists_the_directory_once(tmp_path: Path) -> None:
    """One listing serves the leftovers, the sequence, the policy and the removal; a restore that
    sets one aside has one, too.
    """
    (tmp_path / ".tmp-step-000000000001.000001").mkdir()
    listings: list[bool] = []

    def listdir(fd: int) -> list[str]:
        listings.append(os.path.samestat(os.fstat(fd), os.stat(tmp_path)))
        return os.listdir(fd)

    async with saver_over(WatchedFs(listdir=listdir), tmp_path, keep=KeepNewest(2)) as saver:
        for step in range(4):
            await saver.save(state_of(step), step)
            assert sum(listings) == step + 1
        damage(tmp_path / "step-000000000003.000004")
        assert (await saver.restore()) is not None
        assert sum(listings) == 5
    assert names(tmp_path) == ["damaged-step-000000000003.000004", "step-000000000002.000003"]


async def test_arrays_are_written_from_their_own_memory(tmp_path: Path) -> None:
    """Arrays are not copied: the bytes written are in the array, and a save does not allocate
    memory of its size.
    """
    array = np.zeros(8 << 20, np.uint8)
    start = array.ctypes.data
    fs = WatchedFs()
    async with saver_over(fs, tmp_path) as saver:
        await saver.save({"small": np.zeros(1)}, 0)
        fs.written.clear()
        tracemalloc.start()
        try:
            await saver.save({"a": array}, 1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    places = [
        np.frombuffer(piece, np.uint8).ctypes.data for piece in fs.written if len(piece) == 1 << 20
    ]
    assert places == [start + (number << 20) for number in range(8)]
    assert peak < 1 << 20


# Invalid arguments


INVALID: list[tuple[Any, Any, Any, str]] = [
    *(({}, step, None, "step is") for step in (-1, 1.0, "1", None, True, 2**63)),
    *(
        ({}, 1, metrics, "metrics")
        for metrics in ([1], {"a": "1"}, {"a": None}, {1: 1.0}, {"a": True}, {"a": np.zeros(2)})
    ),
    ({}, 1, {"a" * 5_000_000: 0.0}, "metrics has 1 entries, too many for a manifest"),
    ({"a": object()}, 1, None, r"state\['a'\]"),
]


@pytest.mark.parametrize(("state", "step", "metrics", "says"), INVALID)
async def test_what_is_invalid_touches_nothing(
    tmp_path: Path, state: Any, step: Any, metrics: Any, says: str
) -> None:
    """A step is an int of 0 or more; metrics are numbers by name, as many as a manifest can have; a
    state is checked first.
    """
    with pytest.raises(InvalidArgumentError, match=says):
        await Saver(tmp_path / "a").save(state, step, metrics=metrics)
    assert not (tmp_path / "a").exists()


async def test_new_checkpoints_of_another_process(tmp_path: Path) -> None:
    """`follow` yields the newest checkpoint and each newer one, of whatever step, and ends after
    `timeout` seconds without one. There may be no directory yet.
    """
    saver = Saver(tmp_path / "later")
    reader = Saver(tmp_path / "later", read_only=True)
    steps: list[int] = []
    with ManualClock() as clock:

        async def evaluate() -> None:
            async for checkpoint in reader.follow(every_secs=1, timeout=5):
                steps.append(checkpoint.step)  # noqa: PERF401 - the test reads it meanwhile

        def has_read(count: int) -> bool:
            if clock.pending:  # it waits for its next read
                clock.advance(1)
            return len(steps) == count

        evaluating = asyncio.create_task(evaluate())
        for count, step in enumerate((1, 3, 3, 2), 1):
            await saver.save({}, step)
            await until_true(functools.partial(has_read, count))
        await until_true(lambda: not has_read(0) and evaluating.done())
        await evaluating
    assert steps == [1, 3, 3, 2]
    await saver.aclose()


async def test_an_earlier_checkpoint_is_not_new(tmp_path: Path) -> None:
    """`follow` yields nothing if the newest checkpoint goes, and begins again in a directory that
    was emptied.
    """
    saver = Saver(tmp_path)
    saved = [await saver.save({}, step) for step in (1, 2)]
    with ManualClock() as clock:
        following = Saver(tmp_path, read_only=True).follow(every_secs=1)
        assert (await anext(following)).step == 2
        following_next = asyncio.ensure_future(anext(following))

        async def read_again() -> None:
            """Let the directory be read twice."""
            for _ in range(2):
                await until_true(lambda: clock.pending)
                clock.advance(1)

        shutil.rmtree(saved[1].path)
        await read_again()
        assert not following_next.done()
        shutil.rmtree(saved[0].path)
        await read_again()
        await saver.save({}, 1)
        await until_true(lambda: clock.pending)
        clock.advance(1)
        assert (await following_next).step == 1
        await following.aclose()
    await saver.aclose()
