"""TensorBoard's event files, by tensorboardX: the one module that imports it."""

# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The package has no types.
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from aiohooks.errors import missing_extra
from aiohooks.hooks._observing import Record

try:
    from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("writing for TensorBoard", "tensorboard") from error


class EventFile:
    """Event files in a directory, of which the last one may be open.

    A failed write may leave a part of a record in its file, at which readers stop. So the next
    write begins another file. The class uses the synchronous writer of tensorboardX, because errors
    of the asynchronous one are lost in its thread.
    """

    def __init__(self, folder: str) -> None:
        self.folder: str = folder
        self._writer: Any = None

    def open(self) -> Any:
        """Return the writer of the open file. Create a file, and the directory, if none is open."""
        if self._writer is None:
            os.makedirs(self.folder, exist_ok=True)
            # tensorboardX names files by second and host. Without the suffix, two files of the same
            # second would overwrite each other.
            suffix = f".{time.time_ns() % 10**9:09d}.{os.getpid()}"
            self._writer = EventsWriter(os.path.join(self.folder, "events"), suffix)
            self._writer.flush()
        return self._writer

    def open_at(self, step: int) -> None:
        """Open a file, and note in it that a session starts after `step`.

        TensorBoard drops its values of later steps, which are run again.
        """
        event: Any = Event(step=step + 1, wall_time=time.time())
        event.session_log.status = SessionLog.START
        self._write_events([event])

    def write(self, records: Sequence[Record]) -> None:
        """Write the records, and sync the file."""
        self._write_events(map(_event_of, records))

    def _write_events(self, events: Iterable[Any]) -> None:
        """Write and sync events. After an error, the next write opens another file."""
        writer = self.open()
        try:
            for event in events:
                writer.write_event(event)
            writer.flush()
        except BaseException:
            self._writer = None
            # The error of the write is raised. An error of the close would only repeat it.
            with contextlib.suppress(OSError, ValueError):
                writer.close()
            raise

    def close(self) -> None:
        """Close the file, if one is open."""
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()


def _event_of(record: Record) -> Any:
    """Return the event of a record, which has a value for each tag."""
    event: Any = Event(step=record.step, wall_time=record.time)
    for tag, value in record.values.items():
        event.summary.value.add(tag=tag, simple_value=value)
    return event
