"""A manifest has one form; anything else, and every name that could be a path, is damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiohooks.checkpoint import _format
from aiohooks.checkpoint._format import DamagedError
from aiohooks.checkpoint.policies import Checkpoint, FileEntry
from aiohooks.errors import InvalidArgumentError
from tests.support.checkpoint_files import sealed_manifest

PATH = Path("run/step-000000000007.000003")
FILES = dict.fromkeys(_format.FILES, FileEntry(5, 0))
SOUND = _format.encode(
    _format.checkpoint_of(PATH, {"loss": 0.5, "bad": float("inf")}, FILES),
)


def changed(**changes: Any) -> bytes:
    """Return the sound manifest with changes and the right checksum."""
    return sealed_manifest(json.loads(SOUND), **changes)


def test_checkpoints_that_were_set_aside_are_listed_by_their_commits() -> None:
    """The newest comes first. After a reset of the step, it has a lower step than earlier ones."""
    earlier = "damaged-step-000000000009.000001"
    later = "damaged-step-000000000002.000002"
    assert _format.damaged_names([earlier, later, "damaged-mine"]) == [later, earlier]


def test_a_sound_manifest_is_read() -> None:
    """And `changed` without changes returns it unchanged, so that the tests below test their
    changes.
    """
    assert _format.decode(SOUND, PATH) == Checkpoint(
        7, 3, {"loss": 0.5, "bad": float("inf")}, PATH, FILES
    )
    assert changed() == SOUND


def files(**changes: Any) -> dict[str, Any]:
    """Return the files of the sound manifest, with changes to the entry of the arrays."""
    entry = {"size": 5, "crc32": "0" * 8}
    arrays = {key: value for key, value in {**entry, **changes}.items() if value is not ...}
    return {_format.ARRAYS: arrays, _format.STATE: entry}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"\x80\x04.",
    "deep": b"[" * 1_000_000,
    "a long number": b'{"a":' + b"9" * 1_000_000 + b"}",
    "another encoding": SOUND.decode().encode("utf-16"),
    "a space": SOUND.replace(b":", b": ", 1),
    "said twice": SOUND.replace(b'"step":7', b'"step":7,"step":7'),
    "escaped letters": SOUND.replace(b'"loss"', b'"\\u006coss"'),
    "no checksum": SOUND.replace(b"checksum", b"checksun"),
    "a wrong checksum": SOUND.replace(b'"size":5', b'"size":6', 1),
    "another format": changed(format="pickle"),
    "version 0": changed(version=0),
    "a version that is no int": changed(version="1"),
    "a version that is a bool": changed(version=True),
    "another step": changed(step=8),
    "a step beyond 63 bits": changed(step=2**63),
    "one entry more": changed(more=1),
    "one entry less": changed(metrics=...),
    "a metric that is text": changed(metrics={"a": "x"}),
    "a metric that is a bool": changed(metrics={"a": True}),
    "a metric that is no number": SOUND.replace(b"0.5", b"NaN"),
    "files that are a list": changed(files=[]),
    "no files": changed(files={}),
    "a file more": changed(files={**files(), "more.bin": {"size": 0, "crc32": "0" * 8}}),
    "no size": changed(files=files(size=...)),
    "one thing more of a file": changed(files=files(mode=0o777)),
    "a checksum in capitals": changed(files=files(crc32="A" * 8)),
    "a size that is a bool": changed(files=files(size=True)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_in_another_form_is_refused(what: str) -> None:
    """Only the canonical form is accepted; anything else raises DamagedError."""
    with pytest.raises(DamagedError):
        _format.decode(HOSTILE[what], PATH)


@pytest.mark.parametrize(
    "name",
    [
        "../state.msgpack",
        "..",
        "a\0b",
        ".hidden",
        "x" * 65,
        "",
        "\ud800",
    ],
)
def test_a_name_from_a_manifest_is_never_a_path(name: str) -> None:
    """It is refused before any file is opened, alone and beside the two valid names."""
    for wrong in (
        {name: {"size": 1, "crc32": "0" * 8}},
        {**files(), name: {"size": 1, "crc32": "0" * 8}},
    ):
        with pytest.raises(DamagedError, match="does not name the files"):
            _format.decode(changed(files=wrong), PATH)


def test_metrics_may_fill_a_manifest() -> None:
    """One byte more is refused, before a manifest is written that could not be read again."""
    most = _format.MAX_MANIFEST_BYTES - 4096 - len('{"":0.5}')
    full = _format.encode(
        _format.checkpoint_of(PATH, _format.check_metrics({"x" * most: 0.5}), FILES)
    )
    assert _format.MAX_MANIFEST_BYTES - 4096 < len(full) <= _format.MAX_MANIFEST_BYTES
    with pytest.raises(InvalidArgumentError, match="metrics has 1 entries, too many"):
        _format.check_metrics({"x" * (most + 1): 0.5})
