"""What is on disk is not trusted: anything changed or forged is detected, with a typed error and
without delay.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiohooks.errors import CheckpointError
from tests.support.checkpoint_files import (
    OTHER_ENTRIES,
    WatchedFs,
    directory,
    names,
    replace_entry,
    saved,
    sealed_manifest,
)


def test_every_changed_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """In each of the files; the checkpoint before is restored."""
    path = saved(tmp_path, 1, 2)[1]
    reader = directory(tmp_path, read_only=True)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for place in range(len(good)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
            restored = reader.restore(None)
            assert restored is not None
            assert restored.checkpoint.step == 1
            assert restored.set_aside[0][1].startswith(file.name)
        file.write_bytes(good)
    restored = reader.restore(None)
    assert restored is not None
    assert restored.checkpoint.step == 2


def test_a_restore_reads_in_pieces(tmp_path: Path) -> None:
    """No call of the thread keeps the event loop waiting for as long as a large array takes."""
    with contextlib.closing(directory(tmp_path)) as run_directory:
        run_directory.save({"a": np.arange(5_000_000), "b": np.arange(3, dtype=">i8")}, 1, {})
    sizes: list[int] = []
    fs = WatchedFs()
    fs.before = lambda name, args: sizes.append(sum(map(len, args[1]))) if name == "readv" else None
    restored = directory(tmp_path, fs, read_only=True).restore(None)
    assert restored is not None
    assert (restored.state["a"] == np.arange(5_000_000)).all()
    assert restored.state["b"].tolist() == [0, 1, 2]
    assert max(sizes) <= 1 << 20


def test_a_later_version_is_not_damage(tmp_path: Path) -> None:
    """It is kept, and no older one is silently restored: the error says to install a later
    aiohooks.
    """
    path = saved(tmp_path, 1, 2)[1]
    file = path / "manifest.json"
    file.write_bytes(sealed_manifest(json.loads(file.read_bytes()), version=3, more="unknown"))
    run_directory = directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"version 3.*install a later one"):
        run_directory.restore(None)
    for read in (run_directory.verify, run_directory.checkpoints):
        with pytest.raises(CheckpointError, match="reads versions up to 1; install a later one"):
            read()
    run_directory.close()
    assert len(names(tmp_path)) == 2


# In an empty directory in place of the checkpoint's own, the manifest is missing.
@pytest.mark.parametrize("kind", OTHER_ENTRIES)
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.msgpack", "manifest.json", "."])
def test_anything_but_a_plain_file_of_the_right_size_is_damage(
    tmp_path: Path, file: str, kind: str
) -> None:
    """It is not followed or waited for, and no memory of its size is allocated."""
    newest = saved(tmp_path / "a", 1, 2)[1]
    replace_entry(newest / file if file != "." else newest, kind, tmp_path)
    sizes: list[int] = []
    fs = WatchedFs()
    fs.before = lambda name, args: sizes.append(sum(map(len, args[1]))) if name == "readv" else None
    for read_only in (
        True,
        False,
    ):  # to a reader, too, it is no checkpoint that a writer has removed meanwhile
        run_directory = directory(tmp_path / "a", fs, read_only=read_only)
        restored = run_directory.restore(None)
        run_directory.close()
        assert restored is not None
        assert restored.checkpoint.step == 1
    assert restored is not None
    problems = {
        "fifo": "is not a plain file",
        "socket": "cannot be read (No such device or address)",
    }
    if file != "." and kind in problems:
        assert restored.set_aside[0][1] == f"{file} {problems[kind]}"
    assert fs.opened == set()
    assert max(sizes) < 1000


# Code

AUDITED: list[str] = []
"""Audit events while the fixture `audited` is active; an audit hook cannot be removed."""


@pytest.mark.parametrize(
    "gadget",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system"
        b"\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
        b"PK\x03\x04" + bytes(100),
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        + b" " * 50,
        b"!!python/object/apply:os.system ['true']",
        b'{"class_name":"Lambda","config":{"function":"true"}}',
        b"\xe3" + bytes(60),
    ],
)
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.msgpack", "manifest.json"])
def test_no_file_is_ever_executed(
    tmp_path: Path, file: str, gadget: bytes, audited: Callable[[], list[str]]
) -> None:
    """Whatever a file contains: no code is loaded or executed, and no process is started."""
    [path] = saved(tmp_path, 1)
    (path / file).write_bytes(gadget)
    if file != "manifest.json":
        manifest = json.loads((path / "manifest.json").read_bytes())
        manifest["files"][file] = {"size": len(gadget), "crc32": f"{zlib.crc32(gadget):08x}"}
        (path / "manifest.json").write_bytes(sealed_manifest(manifest))
    run_directory = directory(tmp_path, read_only=True)
    audited()
    with pytest.raises(CheckpointError):
        run_directory.restore(None)
    assert audited() == []


@pytest.fixture(scope="module")
def audited() -> Callable[[], list[str]]:
    """Return a function that returns the dangerous events since its last call."""
    dangerous = (
        "import",
        "exec",
        "compile",
        "os.system",
        "os.exec",
        "subprocess.Popen",
        "pickle.find_class",
        "socket.connect",
    )
    on = True
    directory(Path.cwd(), read_only=True).checkpoints()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if on and event in dangerous:
            AUDITED.append(f"{event} {args[:1]}")

    sys.addaudithook(hook)

    def since() -> list[str]:
        found = AUDITED[:]
        AUDITED.clear()
        return found

    return since
