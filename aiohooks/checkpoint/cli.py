"""The command `python -m aiohooks checkpoints DIR`, or the URL of a mirror."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohooks.checkpoint._format import DamagedError, MirrorError, NewerVersionError
from aiohooks.checkpoint.mirror import Mirror
from aiohooks.checkpoint.saver import CheckpointDirectory, Verified
from aiohooks.errors import CheckpointError, printable

_HEADINGS = ("step", "sequence", "size", "metrics", "state")


def checkpoints(directory: str) -> int:
    """Print the checkpoints in a directory or a mirror, their damage, and which one a restore would
    read. Change nothing.

    Returns:
        0 if there is a checkpoint and none is damaged (those set aside earlier do not count),
        otherwise 1.
    """
    is_mirror = "://" in directory
    path = Path(directory)
    if not is_mirror and not path.is_dir():
        print(f"{printable(directory)} is not a directory", file=sys.stderr)
        return 1
    try:
        found = (
            asyncio.run(_verify_mirror(directory))
            if is_mirror
            else CheckpointDirectory(path, read_only=True).verify()
        )
    except MirrorError as error:
        print(printable(f"the mirror could not be read: {error}"), file=sys.stderr)
        return 1
    except CheckpointError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    if found:
        _print_table([_HEADINGS, *map(_row, found)])
        print()
    current = [each for each in found if not each.was_set_aside]
    print(
        _restore_outcome(
            current,
            any_set_aside=len(current) < len(found),
            verb="skip" if is_mirror else "set aside",
        )
    )
    return 0 if current and all(each.reason is None for each in current) else 1


async def _verify_mirror(url: str) -> list[Verified]:
    from aiohooks.checkpoint import _remote  # needs an extra

    _remote.check_url(url)
    remote = _remote.RemoteDirectory(url, {}, Mirror(url).timeout_secs)
    found: list[Verified] = []
    for name in await remote.names():
        manifest = reason = None
        try:
            manifest = await remote.read_manifest(name)
            if manifest is None:
                continue  # its upload is not finished
            for file, entry in manifest.files.items():
                await remote.file(name, file, entry).verify()
        except DamagedError as error:
            reason = str(error)
        except NewerVersionError as error:
            reason = f"has the later version {error} of the format"
        found.append(Verified(Path(str(name)), name, reason, manifest=manifest))
    return found


def _restore_outcome(current: list[Verified], *, any_set_aside: bool, verb: str) -> str:
    good = next((each for each in current if each.reason is None), None)
    if good is None:
        if current or any_set_aside:
            return (
                "A restore would raise CorruptCheckpointError: there are checkpoints, and none is"
                " good."
            )
        return "There are no checkpoints; a restore would return None."
    would = f"A restore would read step {good.name.step} ({good.path.name})"
    newer = ", ".join(each.path.name for each in current[: current.index(good)])
    if not newer:
        return f"{would}, which was saved last and is good."
    return f"{would}, the newest good one, and {verb} {newer}."


def _row(one: Verified) -> tuple[str, ...]:
    size = metrics = "-"
    if one.manifest is not None:
        size = _readable_size(one.manifest.size)
        metrics = (
            " ".join(
                f"{printable(name)}={value:.6g}" for name, value in one.manifest.metrics.items()
            )
            or "-"
        )
    state = "good" if one.reason is None else printable(one.reason)
    return str(one.name.step), str(one.name.sequence), size, metrics, state


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # Numbers are aligned to the right, text to the left.
        padded = enumerate(zip(row, widths, strict=True))
        cells = [
            cell.rjust(width) if place < 3 else cell.ljust(width) for place, (cell, width) in padded
        ]
        print("  ".join(cells).rstrip())


def _readable_size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
