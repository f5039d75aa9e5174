"""Writing values to a file of JSON lines, and reading them back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, cast

from aiohooks._core.validate import checked_path
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._fetching import Record, WritingHook
from aiohooks.hooks._line_file import LineFile
from aiohooks.hooks._numbers import describe_value, scalar
from aiohooks.hooks._observing import OnWriteError, Values
from aiohooks.hooks.every import Every

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JSONLinesHook(WritingHook):
    """Appends a line of JSON on each crossing of `every`: the step, the time, and the chosen
    values.

    Values may be nested, lines may differ in their names, and arrays become lists. JSON has
    neither NaN nor infinities: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

    The hook never changes what the file contains. A session that resumes, or that a recovery
    moves back, appends a line such as `{"restart": 31}` when it runs step 31 next: earlier lines
    of this step and later ones are void. `read_records` returns each step once. A save waits until
    all lines are written, so a kill loses none that a resumed run does not write again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values,
        *,
        every: Every = Every(steps=1),
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
        fsync: bool = False,
    ) -> None:
        """Create the hook.

        Args:
            path: the file; its directory must exist.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags.
            every: when to write.
            max_queue: how many lines may be unwritten before the run waits.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"`
                logs it and continues.
            fsync: sync the file after each write, so that a power failure loses no line; a crash of
                the process loses none anyway.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        self.path: str = checked_path(path, "path")
        self._fsync = fsync
        super().__init__(values, every, max_queue, on_write_error)
        _check_tags(self._values)

    def _new_sink(self) -> tuple[_RecordFile, str]:
        return _RecordFile(self.path, fsync=self._fsync), self.path

    def _checked(self, record: Record) -> Record:
        _check_tags(record.values)
        values = {str(tag): _plain(value, str(tag)) for tag, value in record.values.items()}
        return record._replace(values=values)

    def __repr__(self) -> str:
        return f"JSONLinesHook({self.path!r}, {list(self._values)}, every={self._every})"


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of a file of `JSONLinesHook`, such as for `pandas.DataFrame`.

    Each step is there once, in order. Lines that a restart has made void, and parts of lines that a
    crash has left, are not included. NaN and infinities are numbers again. A session may be writing
    to the file.

    Args:
        path: the file.

    Returns:
        Dicts with `step`, `time` and the values by tag.

    Raises:
        InvalidArgumentError: the file has other contents, or is damaged.
        OSError: the file cannot be read.
    """
    name = checked_path(path, "path")
    records: list[dict[str, Any]] = []
    torn_number: int | None = None
    with open(name, "rb") as file:
        _check_contents(file, name)
        for number, line in enumerate(file, 1):
            try:
                fields = _decoded(line)
            except ValueError:
                torn_number = number
                continue
            if "step" not in fields:
                while records and records[-1]["step"] >= fields["restart"]:
                    records.pop()
                torn_number = None
            elif torn_number is not None:
                # A session that continues after a crash begins with a restart.
                raise InvalidArgumentError(f"{name}: line {torn_number} is damaged; remove it")
            else:
                records.append(fields)
    return records


def _decoded(line: bytes) -> dict[str, Any]:
    """Return the record or the restart of a line; raise `ValueError` if it is neither."""
    fields: Any = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    names = cast("dict[str, Any]", fields)
    if not isinstance(names.get("step", names.get("restart")), int):
        raise ValueError("neither a step nor a restart")
    return {name: _with_floats(value) for name, value in names.items()}


def _with_floats(value: Any) -> Any:
    """Return a decoded value in which the strings for NaN and infinities are numbers."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {name: _with_floats(item) for name, item in fields.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in cast("Iterable[Any]", value)]
    return value


class _RecordFile(LineFile):
    """The file to which the thread of a `JSONLinesHook` writes."""

    def open_at(self, step: int) -> None:
        """Open the file to continue after `step`."""
        file = self.open()
        _check_contents(file, self.path)
        if file.seek(0, os.SEEK_END):
            self.append([{"restart": step + 1}])

    def write(self, records: list[Record]) -> None:
        """Append the records."""
        self.append(
            {"step": record.step, "time": record.time, **record.values} for record in records
        )


def _check_contents(file: BinaryIO, path: str) -> None:
    beginning = b'{"step":'
    file.seek(0)
    # A crash may have left only a part of the first line, or zeros in its place.
    first = file.readline(len(beginning)).rstrip(b"\n\0")
    if not beginning.startswith(first):
        raise InvalidArgumentError(f"{path} is not a file of JSONLinesHook; give another path")
    file.seek(0)


def _check_tags(tags: Iterable[str]) -> None:
    for name in ("step", "time"):
        if name in tags:
            raise InvalidArgumentError(
                f"a value has the tag {name!r}, as every line; give it another tag"
            )


def _plain(value: Any, tag: str) -> Any:
    """Return a value made only of None, bool, int, float, str, lists and dicts with str keys."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the str of an enumeration may be its name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, Any]", value).items()
        return {str(key): _plain(item, f"{tag}.{key}") for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tag) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        if type(listed) is not type(value):
            return _plain(listed, tag)
    number = scalar(value)
    if number is None:
        raise InvalidArgumentError(
            f"{tag!r} is {describe_value(value)}; give numbers, strings, or lists or mappings of"
            " these"
        )
    return number
