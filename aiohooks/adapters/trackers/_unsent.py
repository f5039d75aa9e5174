"""The file of metrics that could not be sent, and how they are sent later.

Each line is a JSON object: `{"step": 7, "time": 1.5, "metrics": {"loss": 0.5}}`; or `{"sent": 7}`, after which the lines of this
step above are void: a run that was set back has made the step again, and it was sent then.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

from aiohooks.adapters.trackers.tracker import Tracker
from aiohooks.errors import add_note
from aiohooks.hooks._observing import checked_path, write_whole
from aiohooks.hooks._record_files import LineFile, Record, json_line

_logger = logging.getLogger("aiohooks.hooks")


def send_unsent(path: str | os.PathLike[str], tracker: Tracker) -> int:
    """Send the metrics of a file of unsent metrics to a tracker, in order of their steps, then remove the file.

    It blocks. What cannot be sent remains in the file. The tracker is closed in any case.

    Args:
        path: the file, which no session is writing to.
        tracker: a tracker that continues the run to which the metrics belong.

    Returns:
        How many steps were sent.

    Raises:
        InvalidArgumentError: a session is writing to the file.
        OSError: it cannot be read or written.
        Exception: the error of the tracker.
    """
    name = checked_path(path, "path")
    os.stat(name)  # opening would create it
    file = LineFile(name, fsync=False)
    file.open()
    sent = 0
    error: BaseException | None = None
    try:
        records = read_unsent(name)
        for record in records:
            try:
                tracker.log_metrics(record.values, record.step, record.time)
            except BaseException:
                write_whole(name, partial(_write_lines, records=records[sent:]))
                raise
            sent += 1
        os.unlink(name)
    except BaseException as raised:
        error = raised
        add_note(raised, f"raised after {sent} of the metrics in {name} were sent; the file has the others")
        raise
    finally:
        file.close()
        tracker.close(error)
    return sent


def _write_lines(path: str, records: Iterable[Record]) -> None:
    with open(path, "wb") as file:
        file.writelines(json_line(metrics_line(record)) for record in records)
        file.flush()
        os.fsync(file.fileno())


def metrics_line(record: Record) -> dict[str, Any]:
    """Return the line of a step."""
    return {"step": record.step, "time": record.time, "metrics": dict(record.values)}


def read_unsent(path: str) -> list[Record]:
    """Return the metrics of a file, in order of their steps, of which the last line counts; torn lines are left out."""
    found: dict[int, Record] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line: Any = json.loads(text)
                if "sent" in line:
                    found.pop(line["sent"], None)
                else:
                    metrics = {tag: float(value) for tag, value in line["metrics"].items()}
                    found[line["step"]] = Record(line["step"], float(line["time"]), metrics)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _logger.warning("%s: line %d is left out, it is torn or of another kind: %r", path, number, error)
    return [found[step] for step in sorted(found)]


class UnsentFile(LineFile):
    """The file while a session runs: created with the first metrics that could not be sent."""

    def last_step(self) -> int:
        """Return the last step of the metrics in the file; -1 if there are none."""
        steps = [record.step for record in read_unsent(self.path)] if os.path.exists(self.path) else []
        if steps:
            _logger.warning("%s has the metrics of %d steps, which were not sent; send_unsent sends them", self.path, len(steps))
        return max(steps, default=-1)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Append the lines."""
        if self._file is None:
            file = self.open()
            size = file.seek(0, os.SEEK_END)
            self.continue_at(size)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                self.append(b"\n")  # the last line was torn by a crash
        self.append(b"".join(map(json_line, lines)))
