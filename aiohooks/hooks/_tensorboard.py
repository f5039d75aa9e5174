"""TensorBoard's event files, by tensorboardX: the one module that imports it."""

# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The package has no types.
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiohooks.hooks._extras import missing_extra

try:
    from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
    from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("SummarySaverHook", "tensorboard") from error


class Scalars(NamedTuple):
    """The values of one step.

    `restart` says before them that the steps from that one on are run once more: TensorBoard drops what it has of them.
    """

    step: int
    time: float
    values: Mapping[str, float]
    restart: int | None = None


class EventFile:
    """Event files in a folder: one, and a new one after each failed write, as nothing behind a torn record is read.

    Writes with the package's simple writer: the other one has a thread that keeps errors to itself.
    """

    def __init__(self, folder: str) -> None:
        """Opens nothing yet."""
        self.folder: str = folder
        self._writer: Any = None

    def open(self) -> Any:
        """Opens one, making the folder; again is harmless."""
        if self._writer is None:
            os.makedirs(self.folder, exist_ok=True)
            # The library names files by second and host; two of one second would overwrite each other.
            suffix = f".{time.time_ns() % 10**9:09d}.{os.getpid()}"
            self._writer = EventsWriter(os.path.join(self.folder, "events"), suffix)
            self._writer.flush()
        return self._writer

    def write(self, records: list[Scalars]) -> None:
        """Writes and syncs them."""
        writer = self.open()
        try:
            for record in records:
                if record.restart is not None:
                    start: Any = Event(step=record.restart, wall_time=record.time)
                    start.session_log.status = SessionLog.START
                    writer.write_event(start)
                event: Any = Event(step=record.step, wall_time=record.time)
                values: Any = [Summary.Value(tag=tag, simple_value=value) for tag, value in record.values.items()]
                event.summary.value.extend(values)
                writer.write_event(event)
            writer.flush()
        except BaseException:
            self._writer = None
            with contextlib.suppress(OSError, ValueError):  # the write's own error says more
                writer.close()
            raise

    def close(self) -> None:
        """Closes it; again is harmless."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
