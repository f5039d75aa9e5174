"""What is on disk is not trusted: anything changed or made up is found out, with a typed error and in no time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aiohooks.checkpoint import _encoding, _format
from aiohooks.checkpoint._format import DamagedError
from aiohooks.errors import CheckpointError
from tests.support.checkpoint_files import WatchedFs, directory, names, saved, state_of

NAME = _format.Name(sequence=3, step=7)
ENTRY = _format.FileEntry(5, "0" * 8)
SOUND = _format.encode(_format.Manifest(NAME, {"loss": 0.5, "bad": float("inf")}, dict.fromkeys(_format.FILES, ENTRY)))


def canonical(content: dict[str, Any], **changes: Any) -> bytes:
    """A manifest with changes, sealed as a writer would who knows how."""
    content = {key: value for key, value in {**content, **changes}.items() if value is not ...}
    content.pop("checksum", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def changed(**changes: Any) -> bytes:
    """The sound manifest with changes, sealed."""
    return canonical(json.loads(SOUND), **changes)


def test_a_sound_manifest_is_read() -> None:
    """And changing nothing is no change (the tests below change something)."""
    found = _format.decode(SOUND, NAME)
    assert (found.name, dict(found.metrics), found.size) == (NAME, {"loss": 0.5, "bad": float("inf")}, 10)
    assert changed() == SOUND


def files(**changes: Any) -> dict[str, Any]:
    """The files of the sound manifest, with the entry of the arrays changed."""
    entry = {"size": 5, "crc32": "0" * 8}
    arrays = {key: value for key, value in {**entry, **changes}.items() if value is not ...}
    return {_format.ARRAYS: arrays, _format.STATE: entry}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"\x80\x04.",
    "a list": b"[]",
    "deep": b"[" * 1_000_000,
    "deep, and closed": b"[" * 900 + b"]" * 900,
    "a long number": b'{"a":' + b"9" * 1_000_000 + b"}",
    "another encoding": SOUND.decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + SOUND,
    "a space": SOUND.replace(b":", b": ", 1),
    "a newline": SOUND + b"\n",
    "said twice": SOUND.replace(b'"step":7', b'"step":7,"step":7'),
    "another order": json.dumps(json.loads(SOUND), separators=(",", ":")).encode()[:-1] + b',"a":1}',
    "escaped letters": SOUND.replace(b'"loss"', b'"\\u006coss"'),
    "capital digits": SOUND.replace(b'"checksum":"', b'"checksum":"A'),
    "no checksum": SOUND.replace(b"checksum", b"checksun"),
    "a wrong checksum": SOUND.replace(b'"size":5', b'"size":6', 1),
    "another format": changed(format="pickle"),
    "version 0": changed(version=0),
    "a version that is no int": changed(version="1"),
    "a version that is a bool": changed(version=True),
    "another step": changed(step=8),
    "another sequence": changed(sequence=4),
    "a negative step": changed(step=-7),
    "a step that is a float": changed(step=7.0),
    "a step beyond 63 bits": changed(step=2**63),
    "one entry more": changed(more=1),
    "one entry less": changed(metrics=...),
    "metrics that are a list": changed(metrics=[]),
    "a metric that is an int": changed(metrics={"a": 1}),
    "a metric that is text": changed(metrics={"a": "x"}),
    "a metric that is no number": SOUND.replace(b"0.5", b"NaN"),
    "files that are a list": changed(files=[]),
    "no files": changed(files={}),
    "a file more": changed(files={**files(), "more.bin": {"size": 0, "crc32": "0" * 8}}),
    "a file that is a number": changed(files={**files(), _format.STATE: 5}),
    "a size below 0": changed(files=files(size=-1)),
    "a size that is a float": changed(files=files(size=5.0)),
    "a size beyond 63 bits": changed(files=files(size=2**64)),
    "no size": changed(files=files(size=...)),
    "one thing more of a file": changed(files=files(mode=0o777)),
    "a short checksum of a file": changed(files=files(crc32="0" * 7)),
    "a checksum in capitals": changed(files=files(crc32="A" * 8)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_that_is_not_to_the_letter_is_refused(what: str) -> None:
    """One way to write a manifest is accepted; nothing comes out but the one error."""
    with pytest.raises(DamagedError):
        _format.decode(HOSTILE[what], NAME)


@pytest.mark.parametrize(
    "name",
    [
        "../state.msgpack", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\0b", "A", ".hidden", "-x", "x" * 65, "", "\u2024\u2024",
        "con\n", "e\u0301", "state.msgpack ", "x" * 10_000, "state.msgpack/.", "\ud800",
    ],
)  # fmt: skip
def test_a_name_from_a_manifest_is_never_a_path(name: str) -> None:
    """It is refused before anything of that name is looked for, alone and beside the two that belong there."""
    for wrong in ({name: {"size": 1, "crc32": "0" * 8}}, {**files(), name: {"size": 1, "crc32": "0" * 8}}):
        with pytest.raises(DamagedError, match="names a file"):
            _format.decode(changed(files=wrong), NAME)


def test_every_changed_bit_of_a_manifest_is_found() -> None:
    """Flipped, cut off or put in."""
    for place in range(len(SOUND)):
        for bit in range(8):
            wrong = bytearray(SOUND)
            wrong[place] ^= 1 << bit
            with pytest.raises(DamagedError):
                _format.decode(bytes(wrong), NAME)
        for other in (SOUND[:place], SOUND[:place] + b"0" + SOUND[place:], SOUND[:place] + SOUND[place + 1 :]):
            with pytest.raises(DamagedError):
                _format.decode(other, NAME)


def test_every_changed_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """In whichever file: the one before it is restored."""
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


def test_what_a_later_version_wrote_is_not_damaged(tmp_path: Path) -> None:
    """It is not set aside, not removed, and no older one is taken in silence: the error says to install a later aiohooks."""
    path = saved(tmp_path, 1, 2)[1]
    file = path / "manifest.json"
    file.write_bytes(canonical(json.loads(file.read_bytes()), version=2, more="unknown"))
    one = directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"version 2.*install a later one"):
        one.restore(None)
    assert [each.reason for each in one.verify()] == ["has the later version 2 of the format", None]
    assert [each.step for each in one.checkpoints()] == [1]
    one.close()
    assert len(names(tmp_path)) == 2


# Other things in place of files


def replace(path: Path, kind: str, other: Path) -> None:
    """Puts something else in place of a file or directory."""
    moved = path.with_name("moved")
    path.rename(moved)
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "hanging link":
        path.symlink_to(other / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)


# An empty directory in place of the checkpoint's own is one whose manifest is missing.
@pytest.mark.parametrize("kind", ["link", "hanging link", "fifo", "directory", "socket", "device", "sparse", "nothing"])
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.msgpack", "manifest.json", "."])
def test_what_is_no_plain_file_of_the_right_size_is_damage(tmp_path: Path, file: str, kind: str) -> None:
    """It is neither followed nor waited for, and nothing of its size is set aside in memory."""
    newest = saved(tmp_path / "a", 1, 2)[1]
    replace(newest / file if file != "." else newest, kind, tmp_path)
    fs = WatchedFs()
    one = directory(tmp_path / "a", fs)
    restored = one.restore(None)
    one.close()
    assert restored is not None
    assert restored.checkpoint.step == 1
    assert fs.opened == set()
    assert max((args for name, args in fs.log if name == "read"), default=0) < 1000


def test_a_directory_of_another_name_is_another_checkpoint(tmp_path: Path) -> None:
    """Renaming one to a later step or sequence does not make it so."""
    path = saved(tmp_path, 1)[0]
    for name in ("step-000000000099.000001", "step-000000000001.000099"):
        shutil.copytree(path, tmp_path / name)
    restored = directory(tmp_path, read_only=True).restore(None)
    assert restored is not None
    assert restored.checkpoint.path == path
    assert len(restored.set_aside) == 2


# Files that a writer who knows the format has sealed


def test_states_that_no_writer_makes_are_refused() -> None:
    """Checksums are no proof of good will: every part of the two files is looked at."""
    data, arrays = _encoding.encode({"a": np.arange(4, dtype=np.int32)})
    good = b"".join(map(bytes, arrays.chunks()))
    assert _encoding.decode(data, good)["a"].tolist() == [0, 1, 2, 3]

    def tree(value: Any) -> bytes:
        return msgspec.msgpack.encode({"x": value})

    def ext(code: int, *items: Any) -> bytes:
        return tree(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(list(items))))

    deep: Any = 1
    for _ in range(200):
        deep = msgspec.msgpack.Ext(1, msgspec.msgpack.encode([deep]))
    plain = msgspec.msgpack.Ext
    wrong = [
        b"", b"\xc1", data[:-1], data + b"\0", msgspec.msgpack.encode([1]), b"\x91" * 1_000_000, b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff", b"\x81\xa1\xff\x00", b"\x81\x80\x00", tree(deep), tree(1),
        tree(plain(99, b"")), tree(plain(1, b"\x81\xa1a\x00")), tree(plain(2, b"\1\0\0\0\0")), tree(plain(2, b"")),
        tree(plain(3, b"123")), ext(4, "a"), ext(4, "b", "<i4", [4]), ext(4, 5, "<i4", [4]), ext(4, "a", None, [4]),
        ext(5, "<i4", b"123"), ext(5, "<U1", b"1234"), ext(5, "<i4", "1234"), ext(5, "|O", b"12345678"),
    ]  # fmt: skip
    shapes: list[Any] = [[5], [2, 2], [-4], [True, 4], "4", [2**62, 2**62, 0], [1] * 100 + [4], [[4]], None]
    dtypes = [
        "<u4",
        "<f4",
        "|O",
        "O",
        "<i4,<i4",
        "|V16",
        "<i3",
        "=i4",
        "i4",
        "os.system",
        "<U4",
        "<U" + "9" * 30,
        "<M8[foo]",
        "<M8",
    ]
    wrong += [ext(4, "a", "<i4", shape) for shape in shapes]
    wrong += [ext(4, "a", dtype, shape) for dtype in dtypes for shape in ([4], [1], [0])]
    for one in wrong:
        with pytest.raises(DamagedError, match=r"^(state\.msgpack|arrays\.safetensors) "):
            _encoding.decode(one, good)


def test_array_files_that_no_writer_makes_are_refused() -> None:
    """Overlaps, gaps, a tail, a huge header: the safetensors library or we say no."""
    data, arrays = _encoding.encode({"a": np.arange(4, dtype=np.int32)})
    good = b"".join(map(bytes, arrays.chunks()))

    def file(header: Any, body: bytes = good[-16:]) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body

    def entry(begin: int, end: int, shape: list[int] | None = None) -> dict[str, Any]:
        return {"dtype": "I32", "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}

    wrong = [
        b"", good[:-1], good + b"\0", struct.pack("<Q", 2**63) + good[8:], struct.pack("<Q", 200_000_000) + good[8:],
        file(b"["), file(b"{" * 10_000), file({}),
        file({"a": entry(0, 12)}), file({"a": entry(4, 20)}), file({"a": entry(16, 0)}),
        file({"a": entry(0, 16), "b": entry(0, 16)}), file({"a": entry(0, 16), "b": entry(16, 16, [0])}),
        file({"a": entry(0, 16, [2**62, 4])}), file({"b": entry(0, 16)}), file({"a": {**entry(0, 16), "dtype": "PICKLE"}}),
        file({"a": {**entry(0, 16), "dtype": "F32"}}),
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(DamagedError, match=r"^(state\.msgpack|arrays\.safetensors) "):
            _encoding.decode(data, one)


AUDITED: list[str] = []
"""What the interpreter was asked to do while `audited` ran; an audit hook cannot be taken away again."""


@pytest.mark.parametrize(
    "gadget",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
        b"PK\x03\x04" + bytes(100),
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 50,
        b"!!python/object/apply:os.system ['true']",
        b'{"class_name":"Lambda","config":{"function":"true"}}',
        b"\xe3" + bytes(60),
    ],
)
@pytest.mark.parametrize("file", ["arrays.safetensors", "state.msgpack", "manifest.json"])
def test_no_file_is_ever_run(tmp_path: Path, file: str, gadget: bytes, audited: Callable[[], list[str]]) -> None:
    """Whatever is in a file: no code is loaded or run for it, no process started, no other file written."""
    [path] = saved(tmp_path, 1)
    (path / file).write_bytes(gadget)
    if file != "manifest.json":
        manifest = json.loads((path / "manifest.json").read_bytes())
        manifest["files"][file] = {"size": len(gadget), "crc32": f"{zlib.crc32(gadget):08x}"}
        (path / "manifest.json").write_bytes(canonical(manifest))
    one = directory(tmp_path, read_only=True)
    audited()
    with pytest.raises(CheckpointError):
        one.restore(None)
    assert audited() == []


@pytest.fixture(scope="module")
def audited() -> Callable[[], list[str]]:
    """Gives the dangerous events since it was called last."""
    import sys

    dangerous = ("import", "exec", "compile", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class", "socket.connect")
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


def test_a_state_of_step_is_of_that_step() -> None:
    """The helper makes another state at each step (so the tests above compare something)."""
    assert state_of(1)["step"] != state_of(2)["step"]
