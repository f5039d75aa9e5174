"""What TensorBoard reads of the event files in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def events(folder: Path) -> list[Any]:
    """Return all events of a directory's files, as TensorBoard's loader gives them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        event for path in sorted(folder.iterdir()) for event in EventFileLoader(str(path)).Load()
    ]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return what TensorBoard shows for a tag: steps and values, without those that a restart made
    void.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    if tag in accumulator.Tags()["scalars"]:
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]
    return [(event.step, event.tensor_proto.float_val[0]) for event in accumulator.Tensors(tag)]


def restarts(folder: Path) -> list[int]:
    """Return the steps at which sessions started."""
    return [event.step for event in events(folder) if event.HasField("session_log")]
