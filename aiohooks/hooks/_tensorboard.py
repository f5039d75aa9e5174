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

from aiohooks.errors import missing_extra

try:
    from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
    from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("writing for TensorBoard", "tensorboard") from error


class Scalars(NamedTuple):
    """The values of one step.

    If `restart` is given, the steps from that one on are run again: TensorBoard drops its earlier values of them.
    """

    step: int
    time: float
    values: Mapping[str, float]
    restart: int | None = None


class EventFile:
    """Event files in a directory: a new one after each failed write, because readers stop at a torn record.

    It uses the package's synchronous writer: the other one has a thread that hides errors.
    """

    def __init__(self, folder: str) -> None:
        self.folder: str = folder
        self._writer: Any = None

    def open(self) -> Any:
        """Open a file, if none is open; create the directory."""
        if self._writer is None:
            os.makedirs(self.folder, exist_ok=True)
            # The package names files by second and host; two of the same second would overwrite each other.
            suffix = f".{time.time_ns() % 10**9:09d}.{os.getpid()}"
            self._writer = EventsWriter(os.path.join(self.folder, "events"), suffix)
            self._writer.flush()
        return self._writer

    def write(self, records: list[Scalars]) -> None:
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
            with contextlib.suppress(OSError, ValueError):  # the error of the write says more
                writer.close()
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
