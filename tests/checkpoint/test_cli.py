"""The output and exit code of `python -m aiohooks checkpoints DIR`."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from aiohooks._command_line import list_checkpoints
from aiohooks.checkpoint import KeepNewest
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.errors import CheckpointError
from tests.support.checkpoint_files import WatchedFs, directory, names, saved


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code and the printed lines."""
    code = list_checkpoints(str(path))
    captured = capsys.readouterr()
    return code, (captured.out + captured.err).splitlines()


def test_good_ones_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newest first, with size and metrics; the exit code is 0."""
    run_directory = directory(tmp_path, WatchedFs(), KeepNewest(9))
    run_directory.save({"a": 1}, 5, {})
    run_directory.save({"a": 1}, 12_000, {"accuracy": 0.875, "loss": float("nan")})
    run_directory.close()
    code, lines = run(tmp_path, capsys)
    assert code == 0
    assert lines == [
        "step-000000012000.000002: good, 20 bytes, accuracy=0.875, loss=nan",
        "step-000000000005.000001: good, 20 bytes",
    ]


def test_damage_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, and nothing is changed; after a restore has set the damage aside it is 0
    again.
    """
    paths = saved(tmp_path, 1, 2, 3)
    (paths[2] / "state.msgpack").unlink()
    (paths[0] / "manifest.json").write_bytes(b"")
    before = names(tmp_path)
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert lines[0] == f"{paths[2].name}: state.msgpack cannot be read (No such file or directory)"
    assert lines[1].startswith(f"{paths[1].name}: good, ")
    assert lines[2].startswith(f"{paths[0].name}: manifest.json is not a manifest")
    assert names(tmp_path) == before
    run_directory = directory(tmp_path)
    run_directory.restore(None)
    run_directory.close()
    (paths[0] / "manifest.json").unlink()
    for entry in (*paths[0].iterdir(), paths[0]):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    code, lines = run(tmp_path, capsys)
    assert code == 0
    assert lines[1].endswith("was set aside as damaged")


def test_a_directory_without_a_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1, and a directory that is missing is not made."""
    assert run(tmp_path, capsys) == (1, ["there are no checkpoints"])
    [path] = saved(tmp_path, 1)
    (path / "manifest.json").unlink()
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert lines[-1].endswith("manifest.json cannot be read (No such file or directory)")
    code, lines = run(tmp_path / "nowhere", capsys)
    assert code == 1
    assert lines == [f"{tmp_path / 'nowhere'} is not a directory"]
    assert not (tmp_path / "nowhere").exists()


def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of metrics come from a file, so they are not trusted."""
    run_directory = directory(tmp_path, WatchedFs())
    run_directory.save({}, 1, {"a\x1b[31m\n\u202eb\ud800": 1.0})
    run_directory.close()
    code, lines = run(tmp_path, capsys)
    assert code == 0
    assert "a\\x1b[31m\\n\\u202eb\\ud800=1" in lines[0]
    assert len(lines) == 1


def test_a_directory_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's reason is printed, and the exit status is 1."""

    def refuse(run_directory: CheckpointDirectory) -> None:
        raise CheckpointError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(CheckpointDirectory, "verify", refuse)
    code, lines = run(tmp_path, capsys)
    assert code == 1
    assert lines == ["the checkpoints could not be read: [Errno 13] Permission denied"]
