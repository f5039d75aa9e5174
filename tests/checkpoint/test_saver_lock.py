"""A directory has one writer, across processes, forks and kills; leftovers; and the owner of the
directory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks import Backoff
from aiohooks.checkpoint import KeepNewest, Saver
from aiohooks.errors import CheckpointBusyError, CheckpointError, CorruptCheckpointError
from tests.checkpoint.test_mirror_session import graph
from tests.support.checkpoint_files import (
    WatchedFs,
    directory,
    names,
    saved,
    state_of,
    step_of,
)
from tests.support.faulty_files import Disk
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

IMPORTS = """
    import os, sys, signal
    from pathlib import Path
    from aiohooks.errors import CheckpointBusyError
    from tests.support.checkpoint_files import WatchedFs, directory
    path = Path(sys.argv[1])
"""


def program(code: str) -> list[str]:
    """Return a command that runs some lines after the imports."""
    return [sys.executable, "-W", "error", "-c", textwrap.dedent(IMPORTS) + textwrap.dedent(code)]


async def test_a_second_writer_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    """Saving and restoring; when the process that has the directory is killed, both succeed."""
    holder = subprocess.Popen(  # noqa: ASYNC220 - it is quick, and the test has nothing else to do
        [
            *program(
                "one = directory(path); one.save({}, 1, {}); print('ready', flush=True);"
                " signal.pause()"
            ),
            str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        saver = Saver(tmp_path)
        for call in (lambda: saver.save({}, 2), saver.restore):
            with pytest.raises(
                CheckpointBusyError, match="another writer, perhaps in this process"
            ):
                await call()
        assert len(await saver.checkpoints()) == 1
    finally:
        holder.kill()
        holder.communicate()
    async with saver:
        await saver.save({}, 2)
        assert len(await saver.checkpoints()) == 2


async def test_a_reader_needs_no_lock_and_changes_nothing(tmp_path: Path) -> None:
    """`read_only=True` reads beside the writer, skips damage without setting it aside, and refuses
    to save.
    """
    paths = saved(tmp_path, 1, 2)
    (paths[1] / "state.msgpack").unlink()
    reader = Saver(tmp_path, read_only=True)
    async with Saver(tmp_path) as writer:
        await writer.save({}, 3)
        assert step_of(await reader.restore()) == 3
        for saver in (reader, Saver(tmp_path / "unused", read_only=True)):
            with pytest.raises(
                CheckpointError, match="has read_only=True, so it cannot save"
            ) as caught:
                await saver.save({}, 4)
            assert caught.value.errno == errno.EROFS
        with pytest.raises(CorruptCheckpointError, match=r"state\.msgpack cannot be read"):
            await reader.restore(2)
    assert names(tmp_path) == [
        *(saved_path.name for saved_path in paths),
        "step-000000000003.000003",
    ]


@pytest.mark.parametrize("races", [1, 50])
def test_a_reader_that_races_removals_reads_the_newest(tmp_path: Path, races: int) -> None:
    """A checkpoint that is removed while it is read is not damaged: the reader lists the directory
    again, as often as it takes.
    """
    saved(tmp_path, 1)
    writer, steps = directory(tmp_path, keep=KeepNewest(1)), iter(range(2, 2 + races))
    fs = WatchedFs()

    def save_first(name: str, args: tuple[object, ...]) -> None:
        if args and args[0] == "state.msgpack":
            for step in steps:
                writer.save(state_of(step), step, {})
                break

    fs.before = save_first
    restored = directory(tmp_path, fs, read_only=True).restore(None)
    assert restored is not None
    assert (restored.checkpoint.step, restored.set_aside) == (1 + races, ())
    writer.close()
    assert fs.opened == set()


FORKS = {
    "asks": (
        """
        one.save({}, 1, {})
        parent = os.getpid()
        go, ready = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            try:
                one.save({}, 2, {})
            except CheckpointBusyError:
                os.write(ready[1], b"b")
            os.read(go[0], 1)                       # the parent has released the directory
            one.save({}, 3, {})
            os.write(ready[1], b"s")
            os._exit(0)
        assert os.read(ready[0], 1) == b"b"
        one.save({}, 4, {})                         # the parent still has the lock
        one.close()
        os.write(go[1], b"g")
        assert os.read(ready[0], 1) == b"s"
        assert os.waitpid(child, 0)[1] == 0
        one.save({}, 5, {})
        """,
        "[5, 3, 4, 1]",
    ),
    "has none of its files": (
        """
        one.save({}, 1, {})
        folder = "/proc/self/fd"
        paths = lambda: [os.path.realpath(f"{folder}/{fd}") for fd in os.listdir(folder)]
        held = lambda: [opened for opened in paths() if str(path) in opened]
        assert held()
        child = os.fork()
        if child == 0:
            os._exit(len(held()))
        assert os.waitpid(child, 0)[1] == 0
        one.close()
        """,
        "[1]",
    ),
    "is forked in a save": (
        """
        children = []

        def fork_once(name, args):
            if name == "write" and not children:
                children.append(os.fork())
                if children == [0]:
                    signal.alarm(30)  # ends a child that waits for a thread of its parent
                    os._exit(len(one.checkpoints()))
                assert os.waitpid(children[0], 0)[1] == 0

        fs.before = fork_once
        one.save({}, 1, {})
        """,
        "[1]",
    ),
}


@pytest.mark.parametrize("what", FORKS)
def test_a_forked_child_is_not_the_holder(tmp_path: Path, what: str) -> None:
    """It must take the lock like any other process, and neither takes it from its parent nor keeps
    it for the parent.
    """
    code, steps = FORKS[what]
    begin, end = (
        "fs = WatchedFs()\none = directory(path, fs)\n",
        "\nprint([each.step for each in one.checkpoints()])",
    )
    command = [*program(begin + textwrap.dedent(code) + end), str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECS, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (steps, "")


# The place of the directory


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def replace_by_copy(path: Path) -> None:
    shutil.copytree(path, path.with_suffix(".copy"))
    shutil.rmtree(path)
    path.with_suffix(".copy").rename(path)


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


LOST: list[Callable[[Path], None]] = [rename, shutil.rmtree, replace_by_copy, replace_by_file]


@pytest.mark.parametrize("made_anew", [False, True])
@pytest.mark.parametrize("lose", LOST)
async def test_a_directory_that_is_another_one_is_an_error(
    tmp_path: Path, lose: Callable[[Path], None], made_anew: bool
) -> None:
    """Whatever calls come next, until the Saver is closed: nothing is written where it would not be
    found.
    """
    path = tmp_path / "run"
    async with Saver(path) as saver:
        await saver.save(state_of(1), 1)
        lose(path)
        if made_anew and not path.exists():
            path.mkdir()
        for call in (lambda: saver.save({}, 2), saver.restore, saver.checkpoints, saver.verify):
            with pytest.raises(
                CheckpointError, match=rf"{path} is not the directory that this Saver has locked"
            ) as caught:
                await call()
            assert caught.value.errno == errno.ESTALE
    assert not list(tmp_path.rglob("step-*2.000002"))  # noqa: ASYNC240
    if not path.is_file():
        await saver.save({}, 3)
        assert path.is_dir()
        await saver.aclose()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_lock_whose_file_was_removed_is_an_error(tmp_path: Path, replaced: bool) -> None:
    """A second writer could take that of a new file, beside the first."""
    async with Saver(tmp_path) as saver:
        await saver.save({}, 1)
        (tmp_path / ".lock").unlink()
        if replaced:
            (tmp_path / ".lock").touch()
        with pytest.raises(CheckpointError, match=r"or its \.lock was") as raised:
            await saver.save({}, 2)
        assert raised.value.errno == errno.ESTALE
        async with Saver(tmp_path) as other:
            await other.save({}, 3)
        await saver.aclose()
        await saver.save({}, 4)


@pytest.mark.parametrize("made_anew", [False, True])
async def test_a_session_whose_directory_is_lost_fails(tmp_path: Path, made_anew: bool) -> None:
    """The run after the next save raises, and the mirror gets nothing from elsewhere."""
    disk, path = Disk(), tmp_path / "run"

    async def train() -> None:
        creator = ah.ChiefSessionCreator(graph(), checkpoint_dir=saver)
        hooks = [ah.CheckpointSaverHook(every=ah.Every(steps=1))]
        async with ah.AsyncMonitoredSession(
            creator, hooks, stop_grace_period_secs=0
        ) as session:  # no time for the mirror
            await session.run("train")
            disk.fail("open wb")
            await saver.flush_mirror(0)
            rename(path)
            if made_anew:
                path.mkdir()
            disk.heal()
            for _ in range(3):
                await session.run("train")
                await asyncio.sleep(0)

    async with Saver(path, mirror=disk.mirror(backoff=Backoff(0, 0))) as saver:
        with pytest.raises(CheckpointError, match="is not the directory that this Saver has"):
            await train()
        await saver.aclose(grace_secs=0)
    assert disk.steps() in ([], [0])


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_directory_that_does_not_exist_is_empty(tmp_path: Path, read_only: bool) -> None:
    """A writer makes it, as in a session; a reader does not. Without that step it raises."""
    path = tmp_path / "new" / "run"
    async with Saver(path, read_only=read_only) as saver:
        assert await saver.restore() is None
        assert path.exists() is not read_only
        with pytest.raises(CheckpointError) as caught:
            await saver.restore(3)
        assert caught.value.errno == errno.ENOENT


# Leftovers


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    """Entries with other names are kept, and so are a file, and a link with its target, that have a
    name of ours.
    """
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("mine")
    root = tmp_path / "checkpoints"
    root.mkdir(mode=0o700)
    for name in (
        ".tmp-step-000000000001.000001",
        ".tmp-drop-step-000000000001.000002",
        ".tmp-step-000000000001.000003-2",
    ):
        (root / name).mkdir()
        (root / name / "arrays.safetensors").write_bytes(b"half")
    (root / ".tmp-step-000000000009.000009").symlink_to(other)
    (root / ".tmp-step-000000000008.000008").write_text("a file")
    stays = [
        ".tmp-x",
        ".tmp-step-1.1",
        ".tmp-step-000000000001.000001.old",
        "tmp-step-000000000001.000001",
        ".tmpstep",
    ]
    for name in stays:
        (root / name).mkdir()
    stays += [".tmp-step-000000000009.000009", ".tmp-step-000000000008.000008"]
    run_directory = directory(root)
    assert run_directory.restore(None) is None
    run_directory.close()
    assert names(root) == sorted(stays)
    assert (other / "file").read_text() == "mine"


def test_leftovers_that_cannot_be_removed_do_not_prevent_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A leftover that contains a directory is kept, with a warning, and the save uses another
    name.
    """
    (tmp_path / ".tmp-step-000000000001.000001" / "inside").mkdir(parents=True)
    saved(tmp_path, 1)
    assert names(tmp_path) == [".tmp-step-000000000001.000001", "step-000000000001.000001"]
    assert "cannot be removed" in caplog.text


# Owners


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600, whatever the umask; a parent that is made as well is not
    the Saver's own.
    """
    old = os.umask(0)
    try:
        run_directory = directory(tmp_path / "a" / "b")
        path = run_directory.save(state_of(1), 1, {}).path
        run_directory.close()
    finally:
        os.umask(old)
    modes = {
        entry.relative_to(tmp_path).as_posix(): entry.stat().st_mode & 0o777
        for entry in tmp_path.rglob("*")
    }
    assert modes == {
        **{"a": 0o777, "a/b": 0o700, f"a/b/{path.name}": 0o700, "a/b/.lock": 0o600},
        **{
            f"a/b/{path.name}/{file}": 0o600
            for file in ("arrays.safetensors", "state.msgpack", "manifest.json")
        },
    }


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_lock_that_is_not_a_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Nothing is written to the target."""
    target = tmp_path / "target"
    target.write_text("mine")
    root = tmp_path / "a"
    root.mkdir(mode=0o700)
    if kind == "link":
        (root / ".lock").symlink_to(target)
    else:
        (root / ".lock").mkdir()
    fs = WatchedFs()
    with pytest.raises(CheckpointError):
        directory(root, fs).save({}, 1, {})
    assert target.read_text() == "mine"
    assert fs.opened == set()


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    """A link to another disk is followed."""
    (tmp_path / "big").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "big")
    saved(tmp_path / "checkpoints", 1)
    assert names(tmp_path / "big") == ["step-000000000001.000001"]
