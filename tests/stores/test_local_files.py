"""The directory of a local run: where it may be, and who may use it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.stores.local import default_directory
from aiohooks.stores.local.store import MODIFY, Inotify, remote_file_system, run_file_name
from tests.support.stores import directory_of, local_store

pytestmark = pytest.mark.every_python


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the runtime directory of the login if the user has one, otherwise in the directory
    for temporary files.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "aiohooks"
    for other in ("relative", str(tmp_path / "missing"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", other)
        assert default_directory().name == f"aiohooks-{os.geteuid()}"


async def test_files_are_private(tmp_path: Path) -> None:
    """Directories and files are made accessible to the user only, whatever the umask."""
    old = os.umask(0)
    try:
        async with local_store(tmp_path / "new" / "runs", run="a") as store:
            await store.flush()
            made = [directory_of(store), *directory_of(store).rglob("*")]
    finally:
        os.umask(old)
    assert [
        path for path in made if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ] == []


def link(path: Path) -> None:
    """Put a link in the place of a directory."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("place", "change", "problem"),
    [
        ("aiohooks", lambda path: path.chmod(0o770), r"is open to other users \(mode 770\)"),
        ("aiohooks/default", lambda path: path.chmod(0o777), "is open to other users"),
        ("aiohooks/default/alive", lambda path: path.chmod(0o777), "is open to other users"),
        ("aiohooks/default", link, "default is not a directory"),
        (
            "aiohooks/default",
            lambda path: os.chown(path, 12345, 12345),
            "default belongs to user 12345",
        ),
        ("aiohooks", lambda path: os.chown(path, 12345, 12345), "aiohooks belongs to user 12345"),
    ],
    ids=[
        "open base",
        "open run",
        "open folder",
        "a link",
        "run of another user",
        "base of another user",
    ],
)
async def test_a_directory_that_is_not_private_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    change: Callable[[Path], None],
    problem: str,
) -> None:
    """The default directory, whose parent is open to all, a run in it and what is in that: another
    user may have made it.
    """
    if "belongs" in problem and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with local_store() as store:
        await store.advance()
    change(tmp_path / place)
    with pytest.raises(ah.errors.InvalidArgumentError, match=problem):
        await local_store().value()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_a_given_directory_may_be_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of a run that is given may be open to others, and belong to the user or to root;
    not to anyone else.
    """
    os.chmod(tmp_path, 0o777)
    async with local_store(tmp_path) as store:
        await store.advance()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(
            ah.errors.InvalidArgumentError, match="default belongs to user 0"
        ):  # the run, and not its parent
            await local_store(tmp_path).value()
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ah.errors.InvalidArgumentError, match="belongs to user 12345"):
        await local_store(tmp_path).value()


async def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A path where no directory can be made is refused, with the error of the system and what to
    give instead.
    """
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ah.errors.StoreRefusedError,
            match=rf"{path} cannot be made: .*; give one that user \d+ may",
        ):
            await local_store(path).value()


async def test_a_run_that_is_deleted_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is not made again with other modes: opening fails, and may be tried again."""
    monkeypatch.setattr(
        "aiohooks.stores.local.store._check_private", lambda path, **_: path.rmdir()
    )
    with pytest.raises(
        ah.errors.StoreUnavailableError, match=r"cannot be used: .*No such file"
    ) as caught:
        await local_store(tmp_path).value()
    assert not isinstance(caught.value, ah.errors.StoreRefusedError)
    assert not (tmp_path / "default").exists()


async def test_a_full_disk_may_have_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is not a refusal, so a session tries again."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(
        ah.errors.StoreUnavailableError, match=r"cannot be used: .*No space left"
    ) as caught:
        await local_store(tmp_path / "runs").value()
    assert not isinstance(caught.value, ah.errors.StoreRefusedError)


async def test_a_remote_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes there are not notified: the error names the file system, and what to use instead."""
    assert remote_file_system(tmp_path) is None

    class Everything(dict[int, str]):
        def get(self, key: int, default: object = None) -> str:
            return "NFS"

    monkeypatch.setattr("aiohooks.stores.local.store._REMOTE_FILE_SYSTEMS", Everything())
    with pytest.raises(
        ah.errors.InvalidArgumentError,
        match=r"is on NFS, which may be shared with other machines.*redis://",
    ):
        await local_store(tmp_path).value()


@pytest.mark.parametrize(
    "run", ["../up", "..", ".", "/etc/passwd", "a/b", "a b\u00fc", ".hidden", "%2F"]
)
async def test_run_names_cannot_leave_the_directory(tmp_path: Path, run: str) -> None:
    """Whatever the name of a run, its files are in a directory of its own."""
    async with local_store(tmp_path / "runs", run=run) as store:
        await store.advance()
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == [run_file_name(run)] == [directory_of(store).name]


def test_what_cannot_be_watched_is_named(tmp_path: Path) -> None:
    """A watch that the system refuses is an error with the path."""
    with (
        contextlib.closing(Inotify()) as inotify,
        pytest.raises(OSError, match=rf"No such file.*{tmp_path}/missing"),
    ):
        inotify.add(tmp_path / "missing", MODIFY)


def test_different_runs_have_different_file_names() -> None:
    """Quoting keeps different names different, and a name that becomes too long is refused."""
    names = ["a", "a/b", "a%2Fb", "a%252Fb", ".a", "%2Ea", "A", "a b", "a+b"]
    assert len({run_file_name(name) for name in names}) == len(names)
    with pytest.raises(ah.errors.InvalidArgumentError, match="makes a file name of 264 characters"):
        local_store(run="\u00fc" * 44)
