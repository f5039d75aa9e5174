"""The command `python -m aiohooks checkpoints DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from aiohooks.checkpoint._directory import CheckpointDirectory, Verified
from aiohooks.errors import CheckpointError, printable


def checkpoints(directory: str) -> int:
    """Read the checkpoints in a directory completely and list them, newest first.

    Change nothing.

    Returns:
        0 if there is a checkpoint and none is damaged (those set aside earlier do not count),
        otherwise 1.
    """
    path = Path(directory)
    if not path.is_dir():
        print(printable(f"{directory} is not a directory"), file=sys.stderr)
        return 1
    try:
        verified = CheckpointDirectory(path, read_only=True).verify()
    except CheckpointError as error:
        print(printable(f"the checkpoints could not be read: {error}"), file=sys.stderr)
        return 1
    for result in verified:
        print(f"{result.path.name}: {_description(result)}")
    current = [result for result in verified if not result.was_set_aside]
    if not current:
        print("there are no checkpoints")
    is_good = all(result.reason is None for result in current)
    return 0 if current and is_good else 1


def _description(result: Verified) -> str:
    checkpoint = result.checkpoint
    if checkpoint is None:
        return printable(result.reason or "")
    text = f"good, {checkpoint.size} bytes"
    for name, value in checkpoint.metrics.items():
        text += f", {printable(name)}={value:.6g}"
    return text
