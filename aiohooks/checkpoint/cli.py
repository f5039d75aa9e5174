"""What `python -m aiohooks checkpoints DIR` prints."""

from __future__ import annotations

import sys
from pathlib import Path

from aiohooks.checkpoint._directory import CheckpointDirectory, Verified
from aiohooks.checkpoint.policies import KeepNewest
from aiohooks.errors import CheckpointError

_HEADINGS = ("step", "sequence", "size", "metrics", "state")


def checkpoints(directory: str) -> int:
    """Prints what a directory holds, what is wrong with it, and what a restore would take; changes nothing.

    Returns:
        0 if there is a checkpoint and none is damaged (one that was set aside earlier does not count), otherwise 1.
    """
    path = Path(directory)
    if not path.is_dir():
        print(f"{printable(directory)} is not a directory", file=sys.stderr)
        return 1
    try:
        found = CheckpointDirectory(path, keep=KeepNewest(), min_free_bytes=0, read_only=True).verify()
    except CheckpointError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    if found:
        _print_table([_HEADINGS, *map(_row, found)])
        print()
    print(what_a_restore_takes(found))
    standing = [each for each in found if not each.was_set_aside]
    return 0 if standing and all(each.reason is None for each in standing) else 1


def what_a_restore_takes(found: list[Verified]) -> str:
    """Says which checkpoint `restore` would return, and why that one."""
    standing = [each for each in found if not each.was_set_aside]
    good = next((each for each in standing if each.reason is None), None)
    if good is None:
        if found:
            return "A restore would raise CorruptCheckpointError: there are checkpoints, and none is good."
        return "There are no checkpoints; a restore would return None."
    passed = standing[: standing.index(good)]
    if not passed:
        return f"A restore would take step {good.name.step} ({good.path.name}): the one saved last, and it is good."
    these = ", ".join(each.path.name for each in passed)
    return (
        f"A restore would take step {good.name.step} ({good.path.name}): the last one that is good. It would set aside {these}, "
        "saved after it."
    )


def _row(one: Verified) -> tuple[str, ...]:
    size = metrics = "-"
    if one.manifest is not None:
        size = readable(one.manifest.size)
        metrics = " ".join(f"{printable(name)}={value:.6g}" for name, value in one.manifest.metrics.items()) or "-"
    state = "good" if one.reason is None else printable(one.reason)
    return str(one.name.step), str(one.name.sequence), size, metrics, state


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # Numbers to the right, words to the left.
        cells = [
            cell.rjust(width) if place < 3 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def readable(size: int) -> str:
    """A size as people read it."""
    if size < 1024:
        return f"{size} B"
    value, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """Text from a file, without what a terminal would obey, and not too long."""
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
    return text if len(text) <= 200 else text[:200] + "..."
