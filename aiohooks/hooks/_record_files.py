"""Files of records, as CSV or JSON lines: how a line is written and read, and how a file is continued after a crash."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.hooks._observing import describe_value, scalar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger("aiohooks.hooks")
FIRST_COLUMNS = ("step", "time")


class Record(NamedTuple):
    """One line: the step, the Unix time, and plain values by tag."""

    step: int
    time: float
    values: Mapping[str, Any]


class JSONLinesFormat:
    """One JSON object per line. A line of any format ends with a line break and contains no other."""

    def check(self, record: Record) -> None:
        """Refuse a value that is named as one of the fields of every line."""
        check_tags(record.values, "the record has")

    def header(self, found: bytes | None) -> bytes:
        """Return the header line: there is none."""
        return b""

    def encode(self, record: Record) -> bytes:
        """Return the record as an object of strict JSON."""
        fields = {"step": record.step, "time": record.time, **record.values}
        return json.dumps(strict_json(fields), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"

    def decode(self, line: bytes) -> Record:
        """Return the record of an object; raise `ValueError` if it is not one."""
        fields: Any = json.loads(line)
        try:
            step, time = fields.pop("step"), fields.pop("time")
            if isinstance(step, bool) or not isinstance(step, int):
                raise ValueError(f"the step is {step!r}")
            return Record(step, float(time), fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no step or time: {error!r}") from None


class CSVFormat:
    """Comma-separated values below a header of column names."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        """Create a format with these columns; None takes them from the file, or else from the first record."""
        self._columns: tuple[str, ...] | None = None if columns is None else tuple(columns)

    def check(self, record: Record) -> None:
        """Refuse an unknown column, and a value that is not a number or text."""
        if self._columns is None:
            check_tags(record.values, "the record has")
            self._columns = tuple(record.values)
        for name, value in record.values.items():
            if name not in self._columns:
                raise InvalidArgumentError(
                    f"the record has {name!r}, which is not a column of the file; {did_you_mean(name, self._columns)}; "
                    "list all names in columns=, or use JSONLinesHook"
                )
            if not isinstance(value, (bool, int, float, str)) and value is not None:  # a list or a mapping
                raise InvalidArgumentError(f"{name!r} is {str(value)[:80]}; give one number or text, or use JSONLinesHook")

    def header(self, found: bytes | None) -> bytes:
        """Return the column names; check them against `found`, the first line of an existing file."""
        if found is not None:
            try:
                names = tuple(_csv_fields(found))
            except ValueError as error:
                raise InvalidArgumentError(f"its first line is {found[:80]!r}, not column names: {error}") from None
            expected = self._columns if self._columns is not None else names[2:]
            if names != (*FIRST_COLUMNS, *expected):
                columns = ",".join((*FIRST_COLUMNS, *expected))
                raise InvalidArgumentError(f"its columns are {','.join(names)!r} and not {columns!r}")
            self._columns = expected
        return b"" if self._columns is None else _csv_line([*FIRST_COLUMNS, *self._columns])

    def encode(self, record: Record) -> bytes:
        """Return the record as a row; a missing column is empty."""
        columns = self._columns or tuple(record.values)
        return _csv_line([str(record.step), repr(record.time), *(_cell(record.values.get(name)) for name in columns)])

    def decode(self, line: bytes) -> Record:
        """Return the record of a row, with the texts in the file as values; raise `ValueError` if it is not one."""
        step, time, *rest = _csv_fields(line)
        columns = self._columns or ()
        if len(rest) != len(columns):
            raise ValueError(f"{len(rest) + 2} fields under {len(columns) + 2} columns")
        return Record(int(step), float(time), dict(zip(columns, rest, strict=True)))


def check_tags(values: Mapping[str, Any], where: str) -> None:
    for name in FIRST_COLUMNS:
        if name in values:
            raise InvalidArgumentError(f"{where} {name!r}, which every line has anyway; give it another name")


def strict_json(value: Any) -> Any:
    """Return a plain value with NaN and infinities as texts: strict JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [strict_json(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("\n", "\\n").replace("\r", "\\r")
    return repr(value)


def _csv_line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _csv_fields(line: bytes) -> list[str]:
    try:
        rows = list(csv.reader([line.decode("utf-8").removesuffix("\n")], strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    if len(rows) != 1 or len(rows[0]) < len(FIRST_COLUMNS):
        raise ValueError("no step and time")
    return rows[0]


def plain_value(value: Any, tag: str) -> Any:
    """Return a value made only of None, bool, int, float, str, lists and dicts with str keys; arrays become lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bool, int, float, str)):  # of a subclass with a repr of its own, such as an enumeration
        return str.__str__(value) if isinstance(value, str) else float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {str(key): plain_value(item, f"{tag}.{key}") for key, item in mapping.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, tag) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):
        listed = value.tolist()
        if type(listed) is not type(value):
            return plain_value(listed, tag)
    found = scalar(value)
    if found is None:
        raise InvalidArgumentError(f"{tag!r} is {describe_value(value)}; give numbers, texts, or lists or mappings of these")
    return found


Format = JSONLinesFormat | CSVFormat


class LineFile:
    """A file of lines to which one writer appends, in one thread."""

    def __init__(self, path: str, *, fsync: bool) -> None:
        self.path: str = path
        self._fsync = fsync
        self._file: BinaryIO | None = None
        self._size = 0  # up to the last whole line

    def open(self) -> BinaryIO:
        """Open the file, if it is not; create it if it is missing.

        Raises:
            InvalidArgumentError: it has another writer.
            OSError: it cannot be opened.
        """
        if self._file is None:
            file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
            self._lock(file)
            self._file = file
        return self._file

    def _lock(self, file: BinaryIO) -> None:
        """Refuse a second writer of the file: each would remove the other's lines."""
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise InvalidArgumentError(
                f"{self.path} is being written by another hook or process; give each of them a path of its own"
            ) from None
        except OSError as error:
            _logger.debug("%s cannot be locked: %s", self.path, error)  # some network file systems

    def continue_at(self, size: int) -> None:
        """Remove what is behind the first `size` bytes, and append there."""
        file = self.open()
        file.truncate(size)
        file.seek(size)
        self._size = size

    def append(self, lines: bytes) -> None:
        """Append whole lines; a write that fails leaves no part of them in the file."""
        file = self.open()
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]
            if self._fsync:
                os.fsync(file.fileno())
        except OSError:
            self.continue_at(self._size)
            raise
        self._size += len(lines)

    def close(self) -> None:
        """Sync and close the file; do nothing if it is closed."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                os.fsync(file.fileno())
                if fcntl is not None:
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have it open


class RecordFile(LineFile):
    """A file of records in order, which a resumed run continues."""

    def __init__(self, path: str, form: Format, *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._format = form
        self._has_header = False

    def open_at(self, step: int, restored: Sequence[Record] = ()) -> None:
        """Open the file to continue after `step`; remove a torn line and the lines of later steps.

        `restored` are records up to this step that may be missing from the file; those after its last line are appended.

        Raises:
            InvalidArgumentError: the file has other contents.
            OSError: it cannot be read or written.
        """
        self.open()
        size, dropped, last = self._scan(step)
        if dropped:
            self._save_dropped(dropped)
            _logger.warning(
                "%s: removed %d lines that do not belong before step %d (torn by a crash, or of steps that are run again); "
                "they are in %s.dropped",
                *(self.path, dropped.count(b"\n") or 1, step + 1, self.path),
            )
        self.continue_at(size)
        missing = [record for record in restored if last < record.step <= step]
        for record in missing:
            self._format.check(record)
        self.write(missing)

    def _scan(self, step: int) -> tuple[int, bytes, int]:
        """Return the size of the part to keep, the part to drop, and the last step that is kept."""
        size, last = 0, -1
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # torn by a crash, so the last one
                try:
                    if number == 1 and self._format.header(line):
                        self._has_header = True
                    else:
                        found = self._format.decode(line).step
                        if found > step:
                            break
                        last = max(last, found)
                except ValueError as error:
                    raise InvalidArgumentError(
                        f"{self.path} is not a file of this hook: line {number}: {error}; move it away, or give another path"
                    ) from None
                size += len(line)
            file.seek(size)
            return size, file.read(), last

    def _save_dropped(self, dropped: bytes) -> None:
        with open(f"{self.path}.dropped", "ab") as file:
            file.write(dropped if dropped.endswith(b"\n") else dropped + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, records: Sequence[Record]) -> None:
        """Append the records."""
        if not records:
            return
        header = b"" if self._has_header else self._format.header(None)
        self.append(header + b"".join(map(self._format.encode, records)))
        self._has_header = True


Series = dict[str, tuple[list[int], list[float]]]
"""Steps and numbers by tag."""


def read_series(path: str) -> Series:
    """Return the numbers of a file of `CSVHook` or `JSONLinesHook`, as `read_records` reads it."""
    series: Series = {}
    for record in read_records(path):
        for tag, value in _flat_numbers(record.values, ""):
            steps, values = series.setdefault(tag, ([], []))
            steps.append(record.step)
            values.append(value)
    return series


def read_records(path: str) -> Iterator[Record]:
    """Yield the records of a file of `CSVHook` or `JSONLinesHook`; a torn last line is ignored.

    Raises:
        InvalidArgumentError: not such a file.
        OSError: it cannot be read.
    """
    form: Format | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                if form is None:
                    form = JSONLinesFormat() if line.startswith(b"{") else CSVFormat(None)
                    if form.header(line):
                        continue
                record = form.decode(line)
            except ValueError as error:
                raise InvalidArgumentError(
                    f"{path} is not a file of CSVHook or JSONLinesHook: line {number}: {error}; give one that is"
                ) from None
            yield record


def _flat_numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for tag, value in values.items():
        if isinstance(value, dict):
            yield from _flat_numbers(cast("dict[str, Any]", value), f"{prefix}{tag}.")
        elif isinstance(value, (bool, int, float, str)):
            with contextlib.suppress(ValueError):  # a text
                yield f"{prefix}{tag}", float(value == "True" if value in ("True", "False") else value)
