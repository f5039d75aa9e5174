"""Version 1 of the format is always read, and written with the same bytes on every Python.

`python -m tests.checkpoint.test_format_version_1` writes the files again; only before the release
of a new version.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.support.checkpoint_files import directory, same
from tests.support.source import ROOT

GOLDEN = ROOT / "tests" / "checkpoint" / "data" / "checkpoint-v1"
NAME = "step-000000001234.000001"
FILES = ("arrays.safetensors", "manifest.json", "state.msgpack")
METRICS = {
    "loss": 0.1,
    "größe": 1e300,
    "astray": float("nan"),
    "over": float("inf"),
    "under": float("-inf"),
    "zero": -0.0,
}


def golden_state() -> dict[str, Any]:
    """Return a state with a value of each kind, including those that are easily lost."""
    bits = np.array([0x7FF8000000000001, 0xFFF0000000000123, 0x8000000000000000, 1], np.uint64)
    return {
        "variables": {
            "weights": (np.arange(12, dtype=np.float64) / 7).reshape(3, 4),
            "bias": np.array([-0.0, 1.5, np.inf], np.float32),
            "half": np.array([1, 2, 65504], np.float16),
            "bits": bits.view(np.float64),
            "big-endian": np.arange(5, dtype=">i4"),
            "complex": np.array([1 + 2j, -3j], np.complex64),
            "times": np.array(["2020-02-29T12:00", "NaT"], "M8[s]"),
            "spans": np.array([1, -1], "m8[25us]"),
            "text": np.array(["ä", "bcd", ""], "<U3"),
            "bytes": np.array([b"a", b"\xff\0b"], "S3"),
            "bool": np.array([[True, False]]),
            "small": np.arange(-2, 2, dtype=np.int8),
            "unsigned": np.array([2**64 - 1], np.uint64),
            "empty": np.zeros((0, 3), np.int16),
            "one": np.array(7, np.uint32),
            "strided": np.arange(12).reshape(3, 4).T[::2],
            "a/b~c": np.zeros(1, np.uint8),
        },
        "tracked": {
            "generator": np.random.PCG64(5).state,
            "counts": {0: "zero", -1: None, 2**40: True},
        },
        "hooks": {
            "EarlyStopping": {
                "best": float("nan"),
                "waited": 3,
                "history": [0.5, -0.0, 1e-310],
                "seen": (1, (2, [3])),
            },
            "größe": [
                b"\x00\xff",
                "text \u0000 \U0001f600",
                1 - 0.5j,
                -(2**70),
                2**64 - 1,
                -(2**63),
                255,
                256,
                65536,
                2**32,
            ],
            "numbers": [
                np.float32(0.1),
                np.int64(-5),
                np.bool_(True),
                np.datetime64("2021-01-01", "D"),
                np.complex128(1j),
            ],
            "long": list(range(20)),
            "many": {f"key {number:02}": number for number in range(20)},
            "longer": "x" * 300,
        },
        "step": 1234,
    }


def write(path: Path) -> Path:
    """Save the golden state."""
    run_directory = directory(path)
    try:
        return run_directory.save(golden_state(), 1234, dict(sorted(METRICS.items()))).path
    finally:
        run_directory.close()


def test_version_1_is_read() -> None:
    """The files in the repository are read as the state that they were made from."""
    restored = directory(GOLDEN, read_only=True).restore(None)
    assert restored is not None
    assert same(restored.state, golden_state())
    assert same(dict(restored.checkpoint.metrics), dict(sorted(METRICS.items())))
    assert (restored.checkpoint.step, restored.checkpoint.sequence, restored.set_aside) == (
        1234,
        1,
        (),
    )


def test_the_same_bytes_are_written(tmp_path: Path) -> None:
    """By every Python and numpy."""
    path = write(tmp_path)
    assert path.name == NAME
    for file in FILES:
        assert (path / file).read_bytes() == (GOLDEN / NAME / file).read_bytes(), file


def test_the_manifest_has_no_other_entries() -> None:
    """No time, host or path; metrics that are not valid JSON numbers are text."""
    content = json.loads((GOLDEN / NAME / "manifest.json").read_bytes())
    assert sorted(content) == [
        "checksum",
        "files",
        "format",
        "metrics",
        "sequence",
        "step",
        "version",
    ]
    assert (content["format"], content["version"]) == ("aiohooks-checkpoint", 1)
    assert content["metrics"]["astray"] == "nan"
    assert sorted(content["files"]) == ["arrays.safetensors", "state.msgpack"]


def test_other_programs_can_read_the_arrays() -> None:
    """The reader of safetensors finds the arrays under their place in the state."""
    found = safetensors.numpy.load_file(GOLDEN / NAME / "arrays.safetensors")
    assert same(found["variables/weights"], golden_state()["variables"]["weights"])
    assert "variables/a~1b~0c" in found


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    print(write(GOLDEN), sys.version.split()[0])
    (GOLDEN / ".lock").unlink()
