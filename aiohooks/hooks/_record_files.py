"""Files of records, as CSV or JSON lines: how a line is written and read, and how a file is continued after a crash."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from aiohooks._validate import describe_value, scalar
from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.hooks._observing import logger

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOVE = "move it away, or give another path"
FIRST_COLUMNS = ("step", "time")


class Record(NamedTuple):
    """One line: the step, the Unix time, and plain values by tag."""

    step: int
    time: float
    values: Mapping[str, Any]


def check_tags(values: Mapping[str, Any], where: str) -> None:
    """Refuse a value that is named as one of the fields of every line."""
    for name in FIRST_COLUMNS:
        if name in values:
            raise InvalidArgumentError(f"{where} {name!r}, which every line has anyway; give it another name")


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


def json_line(fields: Mapping[str, Any]) -> bytes:
    """Return a line of strict JSON, which has no numbers for NaN and infinities: they are texts."""
    return json.dumps(_strict(dict(fields)), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_strict(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


class JSONLinesFormat:
    """One JSON object per line. A line of any format ends with a line break and contains no other."""

    def check(self, record: Record) -> None:
        """Refuse a record that cannot be a line."""
        check_tags(record.values, "the record has")

    def header(self, found: bytes | None) -> bytes:
        """Return the header line, or b"" if there is none; check it against `found`, the first line of an existing file."""
        return b""

    def encode(self, record: Record) -> bytes:
        """Return the record as a line."""
        return json_line({"step": record.step, "time": record.time, **record.values})

    def decode(self, line: bytes) -> Record:
        """Return the record of a line; raise `ValueError` if it is not one."""
        fields: Any = json.loads(line)
        try:
            step, time = fields.pop("step"), fields.pop("time")
            if isinstance(step, bool) or not isinstance(step, int):
                raise ValueError(f"the step is {step!r}")
            return Record(step, float(time), fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no step or time: {error!r}") from None


class CSVFormat(JSONLinesFormat):
    """Comma-separated values below a header of column names; None takes these from the file, or else from the first record."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self._columns: tuple[str, ...] | None = None if columns is None else tuple(columns)

    def check(self, record: Record) -> None:
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
        cells = [_cell(record.values.get(name)) for name in self._columns or record.values]
        return _csv_line([str(record.step), repr(record.time), *cells])

    def decode(self, line: bytes) -> Record:
        """Return the record of a row, with the texts in the file as values."""
        step, time, *rest = _csv_fields(line)
        columns = self._columns or ()
        if len(rest) != len(columns):
            raise ValueError(f"{len(rest) + 2} fields under {len(columns) + 2} columns")
        return Record(int(step), float(time), dict(zip(columns, rest, strict=True)))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\n", "\\n").replace("\r", "\\r")
    return "" if value is None else repr(value)


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
            InvalidArgumentError: it has another writer, of which each would remove the other's lines.
            OSError: it cannot be opened.
        """
        if self._file is None:
            file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise InvalidArgumentError(
                    f"{self.path} is being written by another hook or process; give each of them a path of its own"
                ) from None
            except OSError as error:
                logger.debug("%s cannot be locked: %s", self.path, error)  # some network file systems
            self._file = file
        return self._file

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

    def __init__(self, path: str, form: JSONLinesFormat, *, fsync: bool) -> None:
        super().__init__(path, fsync=fsync)
        self._format = form
        self._has_header = False

    def open_at(self, step: int, restored: Sequence[Record] = ()) -> list[Record]:
        """Open the file to continue after `step`; remove a torn line and the lines of later steps.

        Returns:
            Those of `restored`, records up to this step that may be missing from the file, which are after its last line.

        Raises:
            InvalidArgumentError: the file has other contents.
            OSError: it cannot be read or written.
        """
        self.open()
        size, last = 0, -1
        with open(self.path, "rb") as file:
            for record, line in _decoded(file, self._format, f"{self.path} is not a file of this hook", _MOVE):
                if record is not None and record.step > step:
                    break
                self._has_header = self._has_header or record is None
                last = last if record is None else max(last, record.step)
                size += len(line)
            file.seek(size)
            dropped = file.read()
        if dropped:
            with open(f"{self.path}.dropped", "ab") as aside:
                aside.write(dropped if dropped.endswith(b"\n") else dropped + b"\n")
                aside.flush()
                os.fsync(aside.fileno())
            logger.warning(
                "%s: removed %d lines that do not belong before step %d (torn by a crash, or of steps that are run again); "
                "they are in %s.dropped",
                *(self.path, dropped.count(b"\n") or 1, step + 1, self.path),
            )
        self.continue_at(size)
        missing = [record for record in restored if last < record.step <= step]
        for record in missing:
            self._format.check(record)
        return missing

    def write(self, records: Sequence[Record]) -> None:
        """Append the records."""
        if records:
            header = b"" if self._has_header else self._format.header(None)
            self.append(header + b"".join(map(self._format.encode, records)))
            self._has_header = True


def _decoded(file: BinaryIO, form: JSONLinesFormat | None, wrong: str, cure: str) -> Iterator[tuple[Record | None, bytes]]:
    """Yield the records of a file and their lines, None for the header; a last line that a crash has torn is left out."""
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            return
        try:
            form = form or (JSONLinesFormat() if line.startswith(b"{") else CSVFormat(None))
            yield None if number == 1 and form.header(line) else form.decode(line), line
        except ValueError as error:
            raise InvalidArgumentError(f"{wrong}: line {number}: {error}; {cure}") from None


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
    with open(path, "rb") as file:
        for record, _ in _decoded(file, None, f"{path} is not a file of CSVHook or JSONLinesHook", "give one that is"):
            if record is not None:
                yield record


def _flat_numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for tag, value in values.items():
        if isinstance(value, dict):
            yield from _flat_numbers(cast("dict[str, Any]", value), f"{prefix}{tag}.")
        elif isinstance(value, (bool, int, float, str)):
            with contextlib.suppress(ValueError):  # a text
                yield f"{prefix}{tag}", float(value == "True" if value in ("True", "False") else value)
