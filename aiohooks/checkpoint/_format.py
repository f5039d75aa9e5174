"""The files of a checkpoint directory: their names, and the manifest of a checkpoint.

A manifest has one form, which `encode` gives. Anything else is damage.

manifest    a file with the step, sequence and metrics of a checkpoint, the size and checksum of its
            other files, and a checksum of itself
sequence    the number of a checkpoint in the order of commits
set aside   said of a damaged checkpoint that was renamed to `damaged-...`
interim     said of a checkpoint where a run has stopped, and no save was due
canonical   the one form of some JSON: sorted keys, no spaces, ASCII
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from aiohooks._core.validate import check_mapping
from aiohooks.checkpoint.policies import INTERIM, Checkpoint, FileEntry
from aiohooks.errors import CheckpointError, InvalidArgumentError

FORMAT = "aiohooks-checkpoint"
VERSION = 1
LOCK = ".lock"
ARRAYS = "arrays.safetensors"
STATE = "state.msgpack"
MANIFEST = "manifest.json"
FILES = (ARRAYS, STATE)
"""The files that a manifest lists."""
MAX_INT = 2**63 - 1
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The errors of code that reads a file whose contents do not have the expected form."""

# The dtypes that the safetensors format has. An array of another dtype (complex numbers, times,
# fixed-width text, big-endian numbers) is stored as plain bytes, and the state has its dtype.
SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
TORCH_DTYPES = (
    *SAFETENSORS_NAMES,
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
"""The dtypes of tensors that a checkpoint can hold."""


class DamagedError(Exception):
    """A file of a checkpoint is damaged.

    The message continues a sentence that begins with the name of the file. Private to this package,
    which raises `CorruptCheckpointError` from it.
    """


@contextlib.contextmanager
def damage_in(file: str) -> Generator[None]:
    """Put the name of a file before the message of a `DamagedError`."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{file} {error}") from error.__cause__


# Names

_STEP = re.compile(r"step-([0-9]{12,19})\.([0-9]{6,19})", re.ASCII)
_DAMAGED = re.compile(rf"damaged-({_STEP.pattern})(?:-[0-9]{{1,9}})?", re.ASCII)
_TEMPORARY = re.compile(rf"\.tmp-(?:drop-)?{_STEP.pattern}(?:-[0-9]{{1,9}})?", re.ASCII)


class Name(NamedTuple):
    """The name of a checkpoint. Names sort in the order of commits: the sequence comes first."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.sequence:06d}"


def parse_name(text: str) -> Name | None:
    """Return the checkpoint that a directory is named after, or None."""
    match = _STEP.fullmatch(text)
    if match is None:
        return None
    name = Name(sequence=int(match[2]), step=int(match[1]))
    # A name with other zeros at the front is not ours, nor is one with a number above the limit.
    return name if str(name) == text and max(name) <= MAX_INT else None


def parse_damaged(text: str) -> Name | None:
    """Return the checkpoint that was set aside as damaged under this name, or None."""
    match = _DAMAGED.fullmatch(text)
    return parse_name(match[1]) if match is not None else None


def checkpoint_names(names: Iterable[str]) -> list[Name]:
    """Return the checkpoints among the names in a directory, newest first."""
    return sorted(filter(None, map(parse_name, names)), reverse=True)


def damaged_names(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints that were set aside, newest first."""
    parsed = {text: name for text in names if (name := parse_damaged(text)) is not None}
    # By the sequence: after a reset of the step, a later checkpoint has a lower step in its name.
    return sorted(parsed, key=parsed.__getitem__, reverse=True)


def is_temporary(text: str) -> bool:
    """Return whether this is the name of a directory that a writer makes or removes.

    If the writer was killed, the next one removes the directory.
    """
    return _TEMPORARY.fullmatch(text) is not None


def next_sequence(names: Iterable[str]) -> int:
    """Return the highest sequence in a directory plus 1.

    Damaged checkpoints count, so that a new one never has the name of one that was set aside.
    """
    parsed = [parse_name(text) or parse_damaged(text) for text in names]
    sequences = [name.sequence for name in parsed if name is not None]
    return max(sequences, default=0) + 1


# Manifests


def name_of(checkpoint: Checkpoint) -> Name:
    """Return the name of a checkpoint."""
    return Name(checkpoint.sequence, checkpoint.step)


def checkpoint_of(
    path: Path,
    metrics: Mapping[str, float],
    files: Mapping[str, FileEntry],
) -> Checkpoint:
    """Return the checkpoint at a path, whose name has its step and its sequence.

    The entry `INTERIM` of the metrics, if it is there, becomes the attribute `interim`.
    """
    name = parse_name(path.name)
    # All callers have parsed the name, or made it from a `Name`.
    assert name is not None, "the path of a checkpoint"
    return Checkpoint(
        name.step,
        name.sequence,
        MappingProxyType({key: value for key, value in metrics.items() if key != INTERIM}),
        path,
        MappingProxyType(files),
        INTERIM in metrics,
    )


def check_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, float]:
    """Return the metrics as floats, sorted by name.

    Raises:
        InvalidArgumentError: they are not a mapping of names to numbers, or too many for a
            manifest.
    """
    check_mapping(metrics, "metrics")
    checked: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            # A bool or a text is no number, though `float` would take it.
            if not isinstance(name, str) or isinstance(value, (bool, str, bytes)):
                raise TypeError
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(
                f"metrics[{name!r}] is {value!r}; give numbers by name",
            ) from None
    # 4096 bytes are enough for everything else in a manifest.
    if len(_canonical(_metrics_to_json(checked))) > MAX_MANIFEST_BYTES - 4096:
        raise InvalidArgumentError(
            f"metrics has {len(checked)} entries, too many for a manifest; put them into the state"
            " instead",
        )
    return MappingProxyType(dict(sorted(checked.items())))


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the manifest of a checkpoint, which is the same on every Python."""
    metrics = dict(checkpoint.metrics)
    if checkpoint.interim:
        metrics[INTERIM] = 1.0
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": checkpoint.step,
        "sequence": checkpoint.sequence,
        "metrics": _metrics_to_json(metrics),
        "files": {
            name: {"size": entry.size, "crc32": f"{entry.crc32:08x}"}
            for name, entry in checkpoint.files.items()
        },
    }
    return _sealed(content)


def decode(data: bytes, path: Path) -> Checkpoint:
    """Return the checkpoint at a path, which has this manifest.

    Raises:
        DamagedError: it is not what `encode` gives, or belongs to another checkpoint.
        CheckpointError: it is valid and of a later version.
    """
    try:
        content: dict[str, Any] = json.loads(data.decode("ascii"))
        # A later version with a right checksum is no damage. With a wrong one, the version itself
        # may be damaged.
        if content["version"] > VERSION and _sealed(content) == data:
            raise CheckpointError(
                errno.ENOTSUP,
                f"{path.name} has version {content['version']} of the format, and this aiohooks"
                f" reads versions up to {VERSION}; install a later one",
            )
        if content["files"].keys() != set(FILES):
            raise DamagedError(f"does not name the files {' and '.join(FILES)}, and no others")
        files = {
            file: FileEntry(int(entry["size"]), int(entry["crc32"], 16))
            for file, entry in content["files"].items()
        }
        metrics = {key: float(value) for key, value in content["metrics"].items()}
        checkpoint = checkpoint_of(path, metrics, files)
    except MALFORMED as error:
        raise DamagedError(f"is not a manifest ({type(error).__name__})") from None
    # Only the canonical form of the same checkpoint gives the same bytes. So this one comparison
    # finds a wrong checksum, another step than that of the path, an entry too many, and all other
    # forms of the JSON, such as a key that is there twice, or a bool in place of an int.
    if encode(checkpoint) != data:
        raise DamagedError("is of another checkpoint, or not in canonical form with its checksum")
    return checkpoint


def _metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    # A loss may be infinite or NaN, for which JSON has no number. Such a metric becomes a text.
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _canonical(content: object) -> bytes:
    return json.dumps(
        content,
        sort_keys=True,
        separators=(",", ":"),
    ).encode("ascii")


def _sealed(content: Mapping[str, Any]) -> bytes:
    """Return the one form of a manifest, with the checksum of everything else in it."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    checksum = hashlib.sha256(_canonical(rest)).hexdigest()
    return _canonical({**rest, "checksum": checksum})
