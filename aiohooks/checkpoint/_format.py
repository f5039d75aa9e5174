"""The names in a checkpoint directory, and the manifest of a checkpoint: its step, sequence, metrics, file sizes and checksums.

A manifest has one canonical form; anything else is damage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Container, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from aiohooks.checkpoint.checkpoint import INTERIM, Checkpoint
from aiohooks.errors import CheckpointError, InvalidArgumentError

LOCK = ".lock"
ARRAYS = "arrays.safetensors"
STATE = "state.msgpack"
MANIFEST = "manifest.json"
FILES = (ARRAYS, STATE)
"""The files that a manifest lists."""

MAX_INT = 2**63 - 1
# A name read from a file must match.
_SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)

_STEP = re.compile(r"step-([0-9]{12,19})\.([0-9]{6,19})", re.ASCII)
_DAMAGED = re.compile(r"damaged-(step-[0-9]{12,19}\.[0-9]{6,19})(?:-[0-9]{1,9})?", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(?:drop-)?step-[0-9]{12,19}\.[0-9]{6,19}(?:-[0-9]{1,9})?", re.ASCII)


class DamagedError(Exception):
    """A file of a checkpoint is damaged; the message is the end of a sentence that begins with the file's name.

    Private to this package, which raises `CorruptCheckpointError` from it.
    """


class NewerVersionError(Exception):
    """A valid manifest has a version that this library does not know. Private to this package."""

    def of(self, place: object) -> CheckpointError:
        """Return the error that says what to do, for the checkpoint at a place."""
        says = f"{place} has version {self} of the format, and this aiohooks reads versions up to {VERSION}; install a later one"
        return CheckpointError(errno.ENOTSUP, says)


@contextlib.contextmanager
def damage_in(file: str) -> Generator[None]:
    """Put the name of a file before the message of a `DamagedError`."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{file} {error}") from error.__cause__


class Name(NamedTuple):
    """The name of a checkpoint. Names sort in the order of commits."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.sequence:06d}"


def parse_name(text: str) -> Name | None:
    """Return the checkpoint that a directory is named after, or None."""
    match = _STEP.fullmatch(text)
    if match is None:
        return None
    found = Name(sequence=int(match[2]), step=int(match[1]))
    return found if str(found) == text and max(found) <= MAX_INT else None


def parse_damaged(text: str) -> Name | None:
    """Return the checkpoint that was set aside as damaged under this name, or None."""
    match = _DAMAGED.fullmatch(text)
    return parse_name(match[1]) if match is not None else None


def checkpoint_names(names: Iterable[str]) -> list[Name]:
    """Return the checkpoints among the names in a directory, newest first."""
    return sorted((name for text in names if (name := parse_name(text)) is not None), reverse=True)


def is_temporary(text: str) -> bool:
    """Return whether a writer of ours left this name unfinished, so that the next one removes it."""
    return _TEMPORARY.fullmatch(text) is not None


def unused_name(name: str, names: Container[str]) -> str:
    """Return `name`, with a number at its end if it is among `names`."""
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return name if name not in names else next(each for each in numbered if each not in names)


def next_sequence(names: Iterable[str]) -> int:
    """Return the highest sequence in a directory plus 1; damaged checkpoints count."""
    found = (parse_name(text) or parse_damaged(text) for text in names)
    return 1 + max((each.sequence for each in found if each is not None), default=0)


FORMAT = "aiohooks-checkpoint"
VERSION = 2
"""The newest version of the format. The first has no tensors of PyTorch; a manifest has the oldest that is enough."""
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_MAX_ENTRIES = 65_536

_KEYS = {"format", "version", "step", "sequence", "metrics", "files", "checksum"}
_CRC32 = re.compile(r"[0-9a-f]{8}", re.ASCII)
# JSON has no such numbers, but a loss may be one.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest states of a file."""

    size: int
    crc32: str


def checked_pieces(pieces: Iterable[bytes], entry: FileEntry) -> Generator[bytes]:
    """Pass on the pieces of a file.

    Raises:
        DamagedError: after the last one, if they do not have the size or checksum of the entry.
    """
    size = crc32 = 0
    for piece in pieces:
        size += len(piece)
        if size > entry.size:
            break
        crc32 = zlib.crc32(piece, crc32)
        yield piece
    if size != entry.size:
        raise DamagedError(f"does not have the {entry.size} bytes in the manifest")
    if f"{crc32:08x}" != entry.crc32:
        raise DamagedError("does not have the checksum in the manifest")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest."""

    name: Name
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]
    version: int = 1

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def checkpoint(self, parent: Path) -> Checkpoint:
        """Return the checkpoint that it describes, in a directory."""
        metrics = MappingProxyType({name: value for name, value in self.metrics.items() if name != INTERIM})
        path = parent / str(self.name)
        return Checkpoint(self.name.step, self.name.sequence, metrics, path, self.size, INTERIM in self.metrics)


def check_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, float]:
    """Return the metrics as floats, sorted by name.

    Raises:
        InvalidArgumentError: they are not a mapping of names to numbers, or too many for a manifest.
    """
    if metrics is None:
        return MappingProxyType({})
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics is {metrics!r}; give a mapping of names to numbers, or leave it out")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"metrics has the name {name!r}; give a str")
        try:
            if isinstance(value, (bool, str, bytes)):
                raise TypeError
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(f"metrics[{name!r}] is {value!r}; give a number") from None
    if len(found) + len(FILES) > _MAX_ENTRIES or len(_canonical(_metrics_to_json(found))) > MAX_MANIFEST_BYTES - 4096:
        raise InvalidArgumentError(f"metrics has {len(found)} entries, too many for a manifest; put them into the state instead")
    return MappingProxyType(dict(sorted(found.items())))


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest, which are the same for the same contents on every Python."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": manifest.version,
        "step": manifest.name.step,
        "sequence": manifest.name.sequence,
        "metrics": _metrics_to_json(manifest.metrics),
        "files": {name: {"size": entry.size, "crc32": entry.crc32} for name, entry in manifest.files.items()},
    }
    return _canonical({**content, "checksum": _checksum(content)})


def decode(data: bytes, name: Name) -> Manifest:
    """Read the manifest of the checkpoint of that name.

    Raises:
        DamagedError: it is not a manifest in canonical form, or belongs to another checkpoint.
        NewerVersionError: it is valid and of a later version.
    """
    try:
        content = json.loads(data.decode("ascii"), parse_constant=_reject_constant, parse_int=_parse_int)
        again = _canonical(content)
    except DamagedError:
        raise
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise DamagedError(f"is not a manifest ({type(error).__name__})") from None
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get("format") != FORMAT:
        raise DamagedError(f"is not a manifest of the format {FORMAT!r}")
    content = cast("dict[str, Any]", content)
    if again != data:  # also where a key is there twice, of which one was read
        raise DamagedError("is not in canonical form")
    checksum = content.get("checksum")
    if checksum != _checksum({key: value for key, value in content.items() if key != "checksum"}):
        raise DamagedError("does not have the checksum it states")
    if (version := _int(content, "version")) > VERSION:
        raise NewerVersionError(version)
    if version < 1 or content.keys() != _KEYS:
        raise DamagedError("does not have the entries of a manifest")
    if (_int(content, "sequence"), _int(content, "step")) != name:
        raise DamagedError(f"is of another checkpoint than {name}")
    metrics, files = content["metrics"], content["files"]
    if not isinstance(metrics, dict) or not isinstance(files, dict):
        raise DamagedError("does not have the entries of a manifest")
    metrics, files = cast("dict[str, Any]", metrics), cast("dict[str, Any]", files)
    if len(metrics) + len(files) > _MAX_ENTRIES:
        raise DamagedError(f"has more than {_MAX_ENTRIES} entries")
    found = MappingProxyType({key: _metric(value) for key, value in metrics.items()})
    return Manifest(name, found, MappingProxyType(_file_entries(files)), version)


def _file_entries(files: dict[str, Any]) -> dict[str, FileEntry]:
    if not all(map(_SAFE_NAME.fullmatch, files)):
        raise DamagedError("names a file that is not part of a checkpoint")
    if files.keys() != set(FILES):
        raise DamagedError(f"does not name the files {' and '.join(FILES)}")
    found: dict[str, FileEntry] = {}
    for name, entry in files.items():
        if not isinstance(entry, dict) or cast("dict[str, Any]", entry).keys() != {"size", "crc32"}:
            raise DamagedError(f"does not state size and crc32 of {name}")
        entry = cast("dict[str, Any]", entry)
        if not isinstance(entry["crc32"], str) or not _CRC32.fullmatch(entry["crc32"]):
            raise DamagedError(f"has an invalid crc32 of {name}")
        found[name] = FileEntry(_int(entry, "size"), entry["crc32"])
    return found


def _int(content: dict[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise DamagedError(f"has an invalid {key!r}")
    return value


def _metric(value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise DamagedError("has a metric that is not a float")


def _metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _reject_constant(text: str) -> NoReturn:
    raise DamagedError("has a number that is not valid JSON")


def _parse_int(text: str) -> int:
    # The length comes first: converting a number of a million digits takes long.
    if len(text) > 19 or abs(value := int(text)) > MAX_INT:
        raise DamagedError(f"has an int above {MAX_INT}")
    return value
