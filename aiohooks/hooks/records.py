"""Writing values to files, a line for each step that is due: CSV, and JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import ClassVar

from aiohooks._validate import checked_path
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._fetching import Convert, WritingHook
from aiohooks.hooks._observing import OnWriteError, Values
from aiohooks.hooks._record_files import FIRST_COLUMNS, CSVFormat, JSONLinesFormat, Record, RecordFile, check_tags, plain_value
from aiohooks.hooks.every import Every


class _RecordsHook(WritingHook):
    """Base of the hooks that write lines."""

    _convert_name: ClassVar[str] = "record_fn"
    _numbered_state: ClassVar[bool] = False  # its state has lines of its file

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=1),
        record_fn: Convert | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
        fsync: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the hook.

        Args:
            path: the file; its directory must exist.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the tags.
            every: when to write.
            record_fn: converts a dict of the fetched values to a mapping by tag, which is written instead of them; called in the
                event loop.
            max_queue: how many lines may be unwritten before the run waits.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"` logs it and continues.
            fsync: sync the file after each write, so that a power failure loses no line; a crash loses none anyway.
            name: the name of its state in checkpoints; by default the class and the file's name.

        Raises:
            InvalidArgumentError: neither `values` nor `record_fn`, or an argument is invalid.
        """
        super().__init__(values, every, record_fn, max_queue, on_write_error)
        self.path: str = checked_path(path, "path")
        self.name: str = f"{type(self).__name__}({os.path.basename(self.path)})" if name is None else name
        check_tags(self._values, "values has the tag")
        self._fsync = fsync

    def _new_format(self) -> JSONLinesFormat:
        raise NotImplementedError

    def _new_sink(self) -> tuple[RecordFile, str]:
        self._format = self._new_format()
        return RecordFile(self.path, self._format, fsync=self._fsync), self.path

    def _checked(self, record: Record) -> Record:
        record = record._replace(values={str(tag): plain_value(value, str(tag)) for tag, value in record.values.items()})
        self._format.check(record)
        return record

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {list(self._values)}, every={self._every})"


class CSVHook(_RecordsHook):
    r"""Writes a line of comma-separated values on each crossing of `every`: the step, the time, and the chosen values.

    The first line names the columns. Values are numbers or texts; NaN and infinities are `nan`, `inf` and `-inf`, None is
    an empty field, and a line break in a text is written as `\n`. A run that resumes from a checkpoint continues the file
    as if it had never been interrupted: a line torn by a crash and the lines of steps that are run again are moved to a
    file beside it, whose name ends in `.dropped`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=1),
        columns: Iterable[str] | None = None,
        record_fn: Convert | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
        fsync: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the hook; for the other arguments see `JSONLinesHook`.

        Args:
            path: the file.
            values: what to fetch.
            every: when to write.
            columns: the names after `step` and `time`, in order; by default the tags of `values`, or with `record_fn` those
                of the file, or else of the first line.
            record_fn: returns what is written; a column that it leaves out is empty in that line.
            max_queue: see there, as the others.
            on_write_error: likewise.
            fsync: likewise.
            name: likewise.

        Raises:
            InvalidArgumentError: neither `values` nor `record_fn`, or an argument is invalid.
        """
        super().__init__(
            path,
            values,
            every=every,
            record_fn=record_fn,
            max_queue=max_queue,
            on_write_error=on_write_error,
            fsync=fsync,
            name=name,
        )
        self._columns: tuple[str, ...] | None = _checked_columns(columns)
        if self._columns is None and record_fn is None:
            self._columns = tuple(self._values)
        if self._columns is not None and record_fn is None and (unknown := set(self._values) - set(self._columns)):
            raise InvalidArgumentError(f"values has {sorted(unknown)}, which columns {list(self._columns)} has not; add them")

    def _new_format(self) -> JSONLinesFormat:
        return CSVFormat(self._columns)


class JSONLinesHook(_RecordsHook):
    """Writes a JSON object per line on each crossing of `every`: `step`, `time`, and the chosen values.

    Lines may differ in their fields, values may be nested, and arrays become lists. It is strict JSON: NaN and infinities are
    the texts `"NaN"`, `"Infinity"` and `"-Infinity"`. Interrupted runs continue as with `CSVHook`.
    """

    def _new_format(self) -> JSONLinesFormat:
        return JSONLinesFormat()


def _checked_columns(columns: Iterable[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names: Sequence[object] = [columns] if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    texts = tuple(name for name in names if isinstance(name, str) and name and name not in FIRST_COLUMNS)
    if isinstance(columns, str) or len(texts) != len(names) or len(set(texts)) != len(texts) or not texts:
        raise InvalidArgumentError(f'columns is {columns!r}; give different names, without "step" and "time", as a list')
    return texts
