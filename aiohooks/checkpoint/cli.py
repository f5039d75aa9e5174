"""The command `python -m aiohooks checkpoints DIR`, or the URL of a mirror."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohooks.checkpoint._directory import CheckpointDirectory, Verified
from aiohooks.checkpoint._format import DamagedError, MirrorError, NewerVersionError
from aiohooks.checkpoint.mirror import Mirror
from aiohooks.errors import CheckpointError, printable

_LINE = "{:>12}  {:>8}  {:>12}  {}  {}"


def checkpoints(directory: str) -> int:
    """Print the checkpoints in a directory or a mirror, and which one a restore would read.

    Change nothing.

    Returns:
        0 if there is a checkpoint and none is damaged (those set aside earlier do not count),
        otherwise 1.
    """
    try:
        if "://" in directory:
            verb = "skip"
            verified = asyncio.run(_verify_mirror(directory))
        elif Path(directory).is_dir():
            verb = "set aside"
            verified = CheckpointDirectory(Path(directory), read_only=True).verify()
        else:
            print(printable(f"{directory} is not a directory"), file=sys.stderr)
            return 1
    except (CheckpointError, MirrorError) as error:
        print(printable(f"the checkpoints could not be read: {error}"), file=sys.stderr)
        return 1
    if verified:
        print(_LINE.format("step", "sequence", "bytes", "metrics", "state"))
    for checkpoint in verified:
        _print_line(checkpoint)
    current = [checkpoint for checkpoint in verified if not checkpoint.was_set_aside]
    print(_restore_outcome(current, any_set_aside=len(current) < len(verified), verb=verb))
    is_good = all(checkpoint.reason is None for checkpoint in current)
    return 0 if current and is_good else 1


async def _verify_mirror(url: str) -> list[Verified]:
    from aiohooks.checkpoint._remote import RemoteDirectory  # needs an extra

    remote = RemoteDirectory(Mirror(url))
    verified: list[Verified] = []
    for name in await remote.names():
        path = Path(str(name))
        try:
            manifest = await remote.read_manifest(name)
            if manifest is not None:  # else its upload is not finished
                await remote.verify(manifest)
                checkpoint = manifest.checkpoint(Path())
                verified.append(Verified(path, name, None, checkpoint=checkpoint))
        except (DamagedError, NewerVersionError) as error:
            verified.append(Verified(path, name, str(error)))
    return verified


def _restore_outcome(current: list[Verified], *, any_set_aside: bool, verb: str) -> str:
    """Return what a restore would read."""
    newer: list[str] = []
    for checkpoint in current:
        if checkpoint.reason is not None:
            newer.append(checkpoint.path.name)
            continue
        read = f"A restore would read step {checkpoint.name.step} ({checkpoint.path.name})"
        if newer:
            return f"{read}, the newest good one, and {verb} {', '.join(newer)}."
        return f"{read}, which was saved last and is good."
    if current or any_set_aside:
        return "A restore would raise CorruptCheckpointError: none of the checkpoints is good."
    return "There are no checkpoints; a restore would return None."


def _print_line(checkpoint: Verified) -> None:
    size: int | str = "-"
    metrics: list[str] = []
    if checkpoint.checkpoint is not None:
        size = checkpoint.checkpoint.size
        for metric, value in checkpoint.checkpoint.metrics.items():
            metrics.append(f"{printable(metric)}={value:.6g}")
    sequence, step = checkpoint.name
    state = printable(checkpoint.reason or "good")
    print(_LINE.format(step, sequence, size, " ".join(metrics) or "-", state))
