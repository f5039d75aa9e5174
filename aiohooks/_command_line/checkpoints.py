"""`aiohooks checkpoints DIR`: list and verify the checkpoints in a directory."""

from __future__ import annotations

import sys
from pathlib import Path

from aiohooks.checkpoint import _format
from aiohooks.errors import CheckpointError, printable


def list_checkpoints(directory: str) -> int:
    """Read the checkpoints in a directory completely and print them, newest first.

    Change nothing.

    Returns:
        0 if there is a checkpoint and none is damaged (checkpoints set aside earlier do not count),
        otherwise 1.
    """
    path = Path(directory)
    if not path.is_dir():
        print(printable(f"{directory} is not a directory"), file=sys.stderr)
        return 1
    try:
        # This raises where the system cannot open directories.
        from aiohooks.checkpoint._directory import CheckpointDirectory

        opened = CheckpointDirectory(path, read_only=True)
        verified = opened.verify()
        sound = {checkpoint.path: checkpoint for checkpoint in opened.checkpoints()}
    except CheckpointError as error:
        print(printable(f"the checkpoints could not be read: {error}"), file=sys.stderr)
        return 1
    damages: list[str | None] = []
    for checkpoint_path, damage in verified:
        text = damage or "good"
        if damage is None and checkpoint_path in sound:
            checkpoint = sound[checkpoint_path]
            text += f", {checkpoint.size} bytes"
            for name, value in checkpoint.metrics.items():
                text += f", {name}={value:.6g}"
        print(f"{checkpoint_path.name}: {printable(text)}")
        if not _format.parse_damaged(checkpoint_path.name):
            damages.append(damage)
    if not damages:
        print("there are no checkpoints")
    return 0 if damages and not any(damages) else 1
