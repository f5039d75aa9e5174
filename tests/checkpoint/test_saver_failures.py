"""Trouble of the system: what it means, and what is said. `tests.fuzz.checkpoints` has all
operations that may fail.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.checkpoint import Checkpoint, KeepNewest, KeepPolicy
from aiohooks.errors import CheckpointError, CorruptCheckpointError
from tests.support.checkpoint_files import WatchedFs, directory, names, saved, state_of
from tests.support.checks import refused


def raising(error: Exception) -> Callable[..., Any]:
    """Return an operation that raises an error."""

    def operation(*args: Any, **kwargs: Any) -> None:
        raise error

    return operation


async def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """The message has its path, also when nothing is there that could be restored."""
    (tmp_path / "file").touch()
    with refused(
        CheckpointError,
        "no checkpoint could be restored from",
        "file: Not a directory",
    ):
        await ah.checkpoint.Saver(tmp_path / "file").restore()


@pytest.mark.parametrize(
    ("operation", "kind", "says"),
    [
        (
            {"readv": lambda fd, buffers: 0},
            CorruptCheckpointError,
            r"manifest\.json ends \d+ bytes early",
        ),
        ({"readv": raising(MemoryError("full"))}, MemoryError, "full"),
        ({"write": raising(MemoryError("full"))}, MemoryError, "full"),
        (
            {"write": lambda fd, data: 0},
            CheckpointError,
            r"step 2 was not saved .*: nothing was written to arrays\.safetensors",
        ),
    ],
)
def test_what_trouble_means(
    tmp_path: Path, operation: dict[str, Any], kind: type[Exception], says: str
) -> None:
    """A write of nothing is not tried indefinitely; a file that ends early is damage; too little
    memory is not, and passes as it is.
    """
    [path] = saved(tmp_path, 1)
    run_directory = directory(tmp_path, WatchedFs(**operation))
    with pytest.raises(kind, match=says) as caught:
        run_directory.save({}, 2, {}) if "write" in operation else run_directory.restore(None)
    run_directory.close()
    assert type(caught.value) is kind
    assert names(tmp_path) == [
        f"damaged-{path.name}" if kind is CorruptCheckpointError else path.name
    ]


def test_a_reader_that_never_catches_up_ends(tmp_path: Path) -> None:
    """Its writer removes each checkpoint that it has listed: an error says so, at last."""
    listings = itertools.count(1)
    fs = WatchedFs(listdir=lambda fd: [f"step-000000000001.{next(listings):06d}"])
    reader = directory(tmp_path, fs, read_only=True)
    with refused(CheckpointError, "its writer removed 100 checkpoints while they were read"):
        reader.restore(None)
    assert fs.opened == set()


def test_a_checkpoint_with_a_nan_is_kept(tmp_path: Path) -> None:
    """NaN equals nothing, and yet the new checkpoint is the one that a policy must not lose."""

    class KeepNothing(KeepPolicy):
        def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
            return set()

    run_directory = directory(tmp_path, keep=KeepNothing())
    for step in (1, 2):
        run_directory.save({}, step, {"loss": float("nan")})
    run_directory.close()
    assert names(tmp_path) == ["step-000000000002.000002"]


@pytest.mark.parametrize("call", ["checkpoints", "verify", "restore"])
def test_a_reader_that_fails_leaves_no_file_open(tmp_path: Path, call: str) -> None:
    """Also if the directory can be opened and not listed."""
    saved(tmp_path, 1)
    fs = WatchedFs(listdir=raising(PermissionError(errno.EACCES, "not allowed")))
    reader = directory(tmp_path, fs, read_only=True)
    with refused(CheckpointError, "not allowed"):
        reader.restore(None) if call == "restore" else getattr(reader, call)()
    assert fs.opened == set()


UNDONE = {
    "old ones": (
        "rmdir",
        "old checkpoints could not be removed ([Errno 1] not allowed); the next save tries again",
    ),
    "a failed save": (
        "write rmdir",
        "a failed save left .tmp-step-000000000002.000003 behind ([Errno 1] not allowed); the next",
    ),
    "old ones that cannot be read": (
        "open-old",
        "old checkpoints could not be removed ([Errno 1] not allowed); the next save tries again",
    ),
    "damage": (
        "rename",
        (
            "is damaged and could not be set aside ([Errno 1] not allowed): state.msgpack cannot be"
            " read (No such file or directory)"
        ),
    ),
    "damage, read only": (
        "",
        (
            "step-000000000001.000002 is damaged and was skipped: state.msgpack cannot be read (No"
            " such file or directory)"
        ),
    ),
}


@pytest.mark.parametrize("what", UNDONE)
def test_what_is_left_undone_is_logged(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the name, and the reason of the system. Nothing is lost by it."""
    prevented, says = UNDONE[what]
    oldest, newest = saved(tmp_path, 0, 1)
    fs, not_allowed = WatchedFs(), raising(PermissionError(errno.EPERM, "not allowed"))
    vars(fs).update(dict.fromkeys(prevented.split(), not_allowed))
    if prevented == "open-old":
        vars(fs)["open"] = lambda path, *args, **kwargs: (
            not_allowed if path == oldest.name else os.open
        )(path, *args, **kwargs)
    run_directory = directory(tmp_path, fs, KeepNewest(1), read_only=not prevented)
    if "damage" in what:
        (newest / "state.msgpack").unlink()
        assert run_directory.restore(None) is not None
    elif "write" in prevented:
        with pytest.raises(CheckpointError, match="not allowed"):
            run_directory.save(state_of(2), 2, {})
    else:
        run_directory.save(state_of(2), 2, {})
    run_directory.close()
    assert [message for message in caplog.messages if says in message]
    assert oldest.exists() is (prevented != "rmdir")


@pytest.mark.parametrize("existing", range(4))
def test_the_name_of_the_directory_is_durable(tmp_path: Path, existing: int) -> None:
    """And so are those of the parents that are made with it; one that is there may be so since a
    crash only.
    """
    path = tmp_path / "a" / "b" / "c"
    [tmp_path, *reversed(path.parents[:2]), path][existing].mkdir(parents=True, exist_ok=True)
    synced: list[str] = []
    run_directory = directory(
        path, WatchedFs(fsync=lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    )
    run_directory.save({}, 1, {})
    run_directory.close()
    parents = [str(parent) for parent in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert [parent for parent in synced if parent in parents] == (
        parents[existing:] or parents[-1:]
    )
