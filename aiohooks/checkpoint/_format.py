"""The manifest of a checkpoint: what belongs to it, how large, with which checksum; one way to write it, and no other."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from aiohooks.checkpoint._files import DamagedError
from aiohooks.errors import InvalidArgumentError

LOCK = ".lock"
ARRAYS = "arrays.safetensors"
STATE = "state.msgpack"
MANIFEST = "manifest.json"
FILES = (ARRAYS, STATE)
"""The files that a manifest vouches for."""

LARGEST_INT = 2**63 - 1
SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
"""What a name that comes from a file may look like."""

_STEP = re.compile(r"step-([0-9]{12,19})\.([0-9]{6,19})", re.ASCII)
_DAMAGED = re.compile(r"damaged-(step-[0-9]{12,19}\.[0-9]{6,19})(?:-[0-9]{1,9})?", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(?:drop-)?step-[0-9]{12,19}\.[0-9]{6,19}(?:-[0-9]{1,9})?", re.ASCII)


class Name(NamedTuple):
    """The name of one checkpoint; names sort by when they were committed."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.sequence:06d}"


def parse(name: str) -> Name | None:
    """The checkpoint that a directory's name stands for; None if it is none, or not written as we write it."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    found = Name(sequence=int(match[2]), step=int(match[1]))
    return found if str(found) == name and max(found) <= LARGEST_INT else None


def parse_damaged(name: str) -> Name | None:
    """The checkpoint that was set aside under this name; None if it is none."""
    match = _DAMAGED.fullmatch(name)
    return parse(match[1]) if match is not None else None


def is_temporary(name: str) -> bool:
    """Whether this is something unfinished of ours, which a writer may sweep away."""
    return _TEMPORARY.fullmatch(name) is not None


def free(name: str, taken: set[str]) -> str:
    """This name, or with a number behind it if it is taken."""
    number, wanted = 1, name
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def next_sequence(names: list[str]) -> int:
    """One more than the highest there is, the damaged ones counted too."""
    found = [each for name in names if (each := parse(name) or parse_damaged(name)) is not None]
    return 1 + max((each.sequence for each in found), default=0)


FORMAT = "aiohooks-checkpoint"
VERSION = 1
LARGEST = 4 * 1024 * 1024
"""Bytes of a manifest."""
MOST_ENTRIES = 65_536
DEEPEST = 32

_KEYS = {"format", "version", "step", "sequence", "metrics", "files", "checksum"}
_CRC32 = re.compile(r"[0-9a-f]{8}", re.ASCII)
# JSON has no such numbers; a loss that went astray is what one wants to see in a list of checkpoints.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class NewerVersionError(Exception):
    """A sound manifest of a version that this library does not know; private to this package."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a manifest says of a file."""

    size: int
    crc32: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    name: Name
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of the files it names."""
        return sum(entry.size for entry in self.files.values())


def check_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, float]:
    """The metrics as floats.

    Raises:
        InvalidArgumentError: they are no mapping of names to numbers, or too many for a manifest.
    """
    if metrics is None:
        return MappingProxyType({})
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics is {metrics!r}; give a mapping of names to numbers, or leave it out")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"metrics has the name {name!r}; give names as str")
        try:
            if isinstance(value, (bool, str, bytes)):
                raise TypeError
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidArgumentError(f"metrics[{name!r}] is {value!r}; give one number") from None
    if len(found) + len(FILES) > MOST_ENTRIES or len(_canonical(_metrics_to_json(found))) > LARGEST - 4096:
        raise InvalidArgumentError(f"metrics has {len(found)} entries, too much for a manifest; keep them in the state instead")
    return MappingProxyType(dict(sorted(found.items())))


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest; the same for the same contents, on every Python."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.name.step,
        "sequence": manifest.name.sequence,
        "metrics": _metrics_to_json(manifest.metrics),
        "files": {name: {"size": entry.size, "crc32": entry.crc32} for name, entry in manifest.files.items()},
    }
    return _canonical({**content, "checksum": _checksum(content)})


def decode(data: bytes, name: Name) -> Manifest:
    """Reads the manifest of the checkpoint of that name.

    Raises:
        DamagedError: it is not one, or not to the letter as it would be written, or of another checkpoint.
        NewerVersionError: it is sound, and of a later version.
    """
    try:
        content = json.loads(
            data.decode("ascii"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_small_int
        )
        again = _canonical(content)
    except DamagedError:
        raise
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise DamagedError(f"is not a manifest ({type(error).__name__})") from None
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get("format") != FORMAT:
        raise DamagedError(f"is not a manifest of the format {FORMAT!r}")
    content = cast("dict[str, Any]", content)
    if again != data:
        raise DamagedError("is not written in the one canonical way")
    if _depth(content) > DEEPEST:
        raise DamagedError(f"is nested deeper than {DEEPEST}")
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
    if len(metrics) + len(files) > MOST_ENTRIES:
        raise DamagedError(f"has more than {MOST_ENTRIES} entries")
    return Manifest(
        name,
        MappingProxyType({key: _metric(value) for key, value in metrics.items()}),
        MappingProxyType(_file_entries(files)),
    )


def _file_entries(files: dict[str, Any]) -> dict[str, FileEntry]:
    if not all(map(SAFE_NAME.fullmatch, files)):
        raise DamagedError("names a file as no file of a checkpoint is named")
    if files.keys() != set(FILES):
        raise DamagedError(f"does not name the files {' and '.join(FILES)}")
    found: dict[str, FileEntry] = {}
    for name, entry in files.items():
        if not isinstance(entry, dict) or cast("dict[str, Any]", entry).keys() != {"size", "crc32"}:
            raise DamagedError(f"does not say size and crc32 of {name}")
        entry = cast("dict[str, Any]", entry)
        if not isinstance(entry["crc32"], str) or not _CRC32.fullmatch(entry["crc32"]):
            raise DamagedError(f"has no crc32 of {name}")
        found[name] = FileEntry(_int(entry, "size"), entry["crc32"])
    return found


def _int(content: dict[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 0 <= value <= LARGEST_INT:
        raise DamagedError(f"does not have an int of 0 or more as {key!r}")
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
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _depth(content: Any) -> int:
    """How deep a value is nested; what came through the decoder is not deep enough to overflow the stack here."""
    if isinstance(content, dict):
        content = list(cast("dict[str, Any]", content).values())
    if not isinstance(content, list):
        return 0
    return 1 + max(map(_depth, cast("Sequence[Any]", content)), default=0)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DamagedError("says the same thing twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise DamagedError("has a number that JSON does not know")


def _small_int(text: str) -> int:
    # The length is looked at first: converting a number of a million digits takes its time.
    if len(text) > 20 or abs(value := int(text)) > LARGEST_INT:
        raise DamagedError(f"has an int above {LARGEST_INT}")
    return value
