"""A checkpoint is damaged: the newer of two, of which each way changes the three files, or replaces
something on the disk.

Bits, lengths and ranges of its files are changed; its manifest, with knowledge of the format; other
kinds of files, links and directories are put in their place. The damage must be detected and
reported, the checkpoint set aside unchanged, and the older one restored equal to the last bit; or
the change is harmless, and the newer one is restored. Contents that a forged manifest confirms
cannot be detected: then only errors of this library may be raised, quickly and with little memory.
All of it runs in a child with 256 MiB at most.
"""

from __future__ import annotations

import copy
import errno
import json
import mmap
import os
import random
import resource
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohooks.checkpoint import Restored
from aiohooks.errors import CheckpointError
from tests.fuzz._harness import scratch
from tests.fuzz.checkpoints.faults import fork
from tests.fuzz.checkpoints.laws import (
    Outcome,
    Save,
    ViolationError,
    check_restored,
    directory,
    make_save,
)
from tests.fuzz.checkpoints.operations import Tree, materialise, snapshot
from tests.support.checkpoint_files import OTHER_ENTRIES, replace_entry, sealed_manifest
from tests.support.waiting import HANG_SECS

MANIFEST = "manifest.json"
PAYLOADS = ("arrays.safetensors", "state.msgpack")
Files = dict[str, bytes]

# Bytes of one file

BYTES = ("bit", "cut", "insert", "zero", "empty")


def altered(way: str, data: bytes, rng: random.Random) -> bytes:
    """Flip a bit; or cut, insert or set to zero a range, or all."""
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 600 if way == "zero" else 40))
    before, inside, after = data[:at], data[at:end], data[end:]
    match way:
        case "bit":
            return before + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case "cut":
            return before
        case "insert":
            return before + rng.randbytes(rng.randint(1, 40)) + data[at:]
        case "zero":
            return before + bytes(len(inside)) + after
        case _:
            return rng.choice((b"", bytes(len(data))))


# The manifest, with knowledge of the format


def rewritten(files: Files, rng: random.Random) -> Files:
    """Write the same contents in another way."""
    content = json.loads(files[MANIFEST])
    upper = files[MANIFEST].replace(
        content["checksum"].encode(), content["checksum"].upper().encode()
    )
    escaped = files[MANIFEST].replace(b'"step"', b'"\\u0073tep"')
    texts: list[bytes] = [
        json.dumps(content, indent=rng.randrange(3)).encode(),
        json.dumps(content).encode(),
        json.dumps(dict(reversed(content.items())), separators=(",", ":")).encode(),
        files[MANIFEST] + rng.choice((b"\n", b" ", b"\t\r\n")),
        rng.choice((b" ", b"\n", b"\xef\xbb\xbf")) + files[MANIFEST],
        files[MANIFEST].replace(b'"number":', b'"number": '),
        files[MANIFEST].replace(
            b'"number":2.0',
            rng.choice((b'"number":2.00', b'"number":20e-1', b'"number":2', b'"number":02.0')),
        ),
        files[MANIFEST].replace(
            b'"version":1',
            rng.choice((b'"version":1.0', b'"version":1,"version":1', b'"version":true')),
        ),
        upper,
        escaped,
    ]
    return {**files, MANIFEST: rng.choice(texts)}


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**63,
    2**63 - 1,
    10**30,
    1.5,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    "\0",
    "é",
    [],
    {},
    [[]],
    {"": {}},
    "A" * 64,
    "a" * 63,
    "0" * 64,
)
_NAMES = (
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "manifest.json",
    "MANIFEST.JSON",
    "con",
    "x" * 300,
    "\0",
    "\u2024\u2024",
    "extra",
)


def edited(files: Files, rng: random.Random) -> Files:
    """Change the contents, with the right checksum."""
    content = json.loads(files[MANIFEST])
    for _ in range(rng.randint(1, 3)):
        target: Any = rng.choice(
            (content, content["files"], *content["files"].values(), content["metrics"])
        )
        if not isinstance(target, dict):
            continue
        key = rng.choice((*target, rng.choice(_NAMES)))
        if rng.random() < 0.2:
            target.pop(key, None)
        else:
            target[key] = copy.deepcopy(rng.choice(_VALUES))  # later changes may be made in it
        if not all(isinstance(content.get(each), dict) for each in ("files", "metrics")):
            break
    return {**files, MANIFEST: sealed_manifest(content)}


def unsigned(files: Files, rng: random.Random) -> Files:
    """Change the contents and keep the checksum."""
    content = json.loads(edited(files, rng)[MANIFEST])
    content["checksum"] = json.loads(files[MANIFEST])["checksum"]
    return {
        **files,
        MANIFEST: json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii"),
    }


def oversized(files: Files, rng: random.Random) -> Files:
    """Write a manifest that is made to take time, memory or stack."""
    deep = rng.choice((40, 900, 5_000, 100_000))
    size = rng.choice((1_000, 100_000, 3_000_000))
    content = json.loads(files[MANIFEST])
    many = {**content, "metrics": {f"m{number}": 0.0 for number in range(min(size, 70_000))}}
    texts: list[Callable[[], bytes]] = [
        lambda: b"[" * deep + b"]" * deep,
        lambda: b'{"a":' * deep + b"1" + b"}" * deep,
        lambda: b'{"step":' + b"9" * size + b"}",
        lambda: b"[" + b"0," * size + b"0]",
        lambda: b'{"format":"' + b"x" * size + b'"}',
        lambda: b'{"x":1e' + b"9" * size + b"}",
        lambda: bytes(5_000_000),
        lambda: sealed_manifest(many),
    ]
    return {**files, MANIFEST: rng.choice(texts)()}


def forged(files: Files, rng: random.Random) -> Files:
    """Change a file, and write a manifest that confirms it: no checksum detects this, only careful
    reading.
    """
    name = rng.choice(PAYLOADS)
    data = files[name]
    for _ in range(rng.randint(1, 4)):
        data = altered(rng.choice(BYTES), data or b"\0\0", rng)
    if rng.random() < 0.3:
        data = _hostile(name, rng)
    content = json.loads(files[MANIFEST])
    content["files"][name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    return {**files, name: data, MANIFEST: sealed_manifest(content)}


def _hostile(name: str, rng: random.Random) -> bytes:
    deep, large = rng.choice((60, 70, 1_000, 100_000)), rng.choice((2**31 - 1, 2**32 - 1))
    if name == "state.msgpack":
        texts = (
            b"\x91" * deep + b"\xc0",
            b"\x81\xa1a" * deep + b"\xc0",
            b"\xdd" + large.to_bytes(4, "big"),
            b"\xdf" + large.to_bytes(4, "big"),
            b"\xc6" + large.to_bytes(4, "big"),
            b"\xc9" + large.to_bytes(4, "big") + b"\x01",
            b"\x81\xa1a\xc7\xff\x02" + bytes(255),
            b"\x81\xa1a\xc7" + bytes([rng.randrange(40), rng.randrange(256)]) + rng.randbytes(40),
            b"\x81" + rng.randbytes(30),
        )
        return rng.choice(texts)
    shape = rng.choice(([2**40, 2**40], [2**62], [0] * 70, [1] * 70, [-1], [2**31, 0]))
    kind = rng.choice(("F32", "U8", "BF16", "F8_E4M3", "X", "F64"))
    header = json.dumps(
        {
            "weights": {
                "dtype": kind,
                "shape": shape,
                "data_offsets": rng.choice(([0, 0], [0, 2**40], [5, 1])),
            }
        }
    )
    text = header.encode()
    length = rng.choice((len(text), 2**63, 100_000_001, 0, len(text) + 1))
    return length.to_bytes(8, "little") + text


def on_disk(checkpoint: Path, rng: random.Random) -> None:
    """Replace a file or the directory by another kind of entry, or rename the directory, as of
    another step or sequence.
    """
    kind = rng.randrange(10)
    if kind < 8:
        replace_entry(
            checkpoint / rng.choice((*PAYLOADS, MANIFEST, ".")),
            rng.choice(OTHER_ENTRIES),
            checkpoint.parent,
        )
    elif kind == 8:
        checkpoint.rename(checkpoint.with_name(f"step-{rng.randrange(10**12):012d}.000002"))
    else:
        checkpoint.rename(
            checkpoint.with_name(f"{checkpoint.name.partition('.')[0]}.{rng.randint(3, 10**6):06d}")
        )


# The program

MEMORY = 256 * 1024 * 1024
MAX_SECS = 2.0
POINTS_PER_CHILD = 1_000
OLD, NEW = "step-000000000010.000001", "step-000000000020.000002"

MANIFEST_EDITS: tuple[Callable[[Files, random.Random], Files], ...] = (rewritten, unsigned)
SIGNED_EDITS: tuple[Callable[[Files, random.Random], Files], ...] = (edited, forged, oversized)


def corruption(points: int, seed: int) -> Outcome:
    """Damage so many checkpoints."""
    outcome = Outcome("damaged checkpoints")
    with scratch() as root:
        while outcome.points < points:
            count = min(POINTS_PER_CHILD, points - outcome.points)
            if not _damage_in_child(
                outcome, root / str(outcome.points), count, f"{seed}/{outcome.points}"
            ):
                break
    return outcome


def _damage_in_child(outcome: Outcome, path: Path, points: int, seed: str) -> bool:
    """Damage some in a child; return whether it finished."""
    found = path.with_suffix(".json")
    with mmap.mmap(-1, 200) as now:

        def child() -> None:
            part = Outcome("part")
            with open("/proc/self/statm", encoding="ascii") as file:
                mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
            _damage(part, path, points, seed, now)
            found.write_text(json.dumps([part.points, part.violations]))

        _, status = os.waitpid(fork(child), 0)
        where = now[:].rstrip(b"\0").decode()
    if status != 0:
        outcome.violations.append(
            f"{where}: the process ended with status {status}, or ran for {HANG_SECS} s"
        )
        return False
    done, violations = json.loads(found.read_text())
    outcome.points += done
    outcome.violations += violations
    return True


def _damage(outcome: Outcome, path: Path, points: int, seed: str, now: mmap.mmap) -> None:
    """Damage one directory repeatedly; note each time in `now` what is done next."""
    rng = random.Random(seed)
    saves = [make_save(number, size=400, seed=rng.randrange(2**31)) for number in (1, 2)]
    there = directory(path)
    for save in saves:
        save.to(there)
    there.close()
    tree = snapshot(path)
    while outcome.points < points:
        materialise(tree, path)
        where, files = _damage_once(tree, path, rng)
        if files is not None and all(tree[f"{NEW}/{file}"] == data for file, data in files.items()):
            continue
        where = f"{where}, point {outcome.points} of seed {seed}"
        now[:] = where.encode()[:200].ljust(200, b"\0")
        with outcome.point(where):
            begun = time.process_time()
            kind = where.partition(" ")[0]
            if kind in {each.__name__ for each in SIGNED_EDITS}:
                _check_signed(path, saves, kind)
            else:
                _check_damaged(path, saves, files)
            if (took := time.process_time() - begun) > MAX_SECS:
                raise ViolationError(f"took {took:.1f} s")


def _damage_once(tree: Tree, path: Path, rng: random.Random) -> tuple[str, Files | None]:
    """Damage it in one way; return what was done, and the files as they are now, if they are still
    files.
    """
    kind = rng.randrange(20)
    if kind < 2:
        on_disk(path / NEW, rng)
        return "on disk", None
    good = {
        file: data for file in (*PAYLOADS, MANIFEST) if (data := tree[f"{NEW}/{file}"]) is not None
    }
    if kind < 10:
        on_files = rng.choice(
            MANIFEST_EDITS
            if kind < 6
            else SIGNED_EDITS
            if rng.random() < 0.97
            else SIGNED_EDITS[2:]
        )
        if on_files is oversized and rng.random() < 0.9:  # these are slow by design
            on_files = edited
        where, files = f"{on_files.__name__} manifest", on_files(good, rng)
    else:
        name = rng.choice((*PAYLOADS, MANIFEST))
        way = rng.choice(BYTES)
        where, files = f"{way} in {name}", {**good, name: altered(way, good[name], rng)}
    for file, data in files.items():
        (path / NEW / file).write_bytes(data)
    return where, files


def _check_damaged(path: Path, saves: list[Save], files: Files | None) -> None:
    """Check that the damage was detected and nothing was lost."""
    names = {each for each in os.listdir(path) if each.startswith("step-")} - {OLD}
    found = _restore(path)
    check_restored(found, saves[0])
    assert found is not None
    if {name for name, _ in found.set_aside} != names or not all(
        reason for _, reason in found.set_aside
    ):
        raise ViolationError(f"reported {found.set_aside}")
    aside = [each for each in os.listdir(path) if each.startswith("damaged-")]
    if aside != [f"damaged-{name}" for name in names]:
        raise ViolationError(f"set aside: {aside}")
    if (
        files is not None
        and {file: (path / aside[0] / file).read_bytes() for file in files} != files
    ):
        raise ViolationError("what was set aside is not what was there")


def _check_signed(path: Path, saves: list[Save], kind: str) -> None:
    """Check what a signed manifest may lead to: the damage is detected or harmless; forged contents
    may be restored.
    """
    try:
        found = _restore(path)
    except CheckpointError as error:
        if error.errno != errno.ENOTSUP:  # a later version of the format
            raise
        return
    if found is None:
        raise ViolationError("nothing was restored")
    if found.set_aside:
        check_restored(found, saves[0])
    elif kind == "forged":
        if found.checkpoint.step != saves[1].step:
            raise ViolationError(f"restored {found.checkpoint}")
    else:
        # Metrics are not part of the state, so a signed manifest may change them.
        check_restored(
            replace(found, checkpoint=replace(found.checkpoint, metrics=saves[1].metrics)), saves[1]
        )


def _restore(path: Path) -> Restored | None:
    there = directory(path)
    try:
        return there.restore(None)
    finally:
        there.close()
