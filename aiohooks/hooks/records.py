"""Writing values to files: CSV, JSON lines, and TensorBoard's event files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, cast

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_callable, check_choice, check_instance, checked_int
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.hooks._observing import (
    BackgroundWriter,
    OnWriteError,
    Sampling,
    Values,
    checked_numbers,
    checked_path,
    checked_values,
    describe_value,
    scalar,
)
from aiohooks.hooks.every import Every, ScheduledHook
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger("aiohooks.hooks")
_FIRST_COLUMNS = ("step", "time")


class Record(NamedTuple):
    """One line: the step, the Unix time, and plain values by tag."""

    step: int
    time: float
    values: Mapping[str, Any]


class JSONLinesFormat:
    """One JSON object per line. A line of any format ends with a line break and contains no other."""

    def check(self, record: Record) -> None:
        """Refuse a value that is named as one of the fields of every line."""
        _check_tags(record.values, "the record has")

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
            _check_tags(record.values, "the record has")
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
            if names != (*_FIRST_COLUMNS, *expected):
                columns = ",".join((*_FIRST_COLUMNS, *expected))
                raise InvalidArgumentError(f"its columns are {','.join(names)!r} and not {columns!r}")
            self._columns = expected
        return b"" if self._columns is None else _csv_line([*_FIRST_COLUMNS, *self._columns])

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


def _check_tags(values: Mapping[str, Any], where: str) -> None:
    for name in _FIRST_COLUMNS:
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
    if len(rows) != 1 or len(rows[0]) < len(_FIRST_COLUMNS):
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


Convert = Callable[[dict[str, Any]], Mapping[str, Any]]


class _WritingHook(ScheduledHook):
    """Base of the hooks that write: fetches values in the runs that are due, and hands records to a thread."""

    def __init__(
        self,
        values: Values | None,
        every: Every,
        convert: Convert | None,
        convert_name: str,
        max_queue: int,
        on_write_error: OnWriteError,
        *,
        first: bool,
    ) -> None:
        check_instance(every, Every, "every")
        check_callable(convert, convert_name, optional=True)
        max_queue = checked_int(max_queue, "max_queue", 1, expected="a whole number of records, at least 1")
        check_choice(on_write_error, "on_write_error", "raise", "log")
        if values is None and convert is None:
            raise InvalidArgumentError(f"nothing to write; give values={{'tag': fetch}}, {convert_name}=, or both")
        self._values = checked_values(values, may_be_empty=convert is not None)
        self._args = SessionRunArgs(self._values)
        self._every = every
        self._convert = convert
        self._convert_name = convert_name
        self._max_queue = max_queue
        self._on_write_error: OnWriteError = on_write_error
        self._first = first
        self._timer: Sampling = Sampling(every, first=first)
        self._writer: BackgroundWriter[Any] | None = None
        self._restored: list[Record] = []
        self._close_file: Callable[[], None] | None = None

    def _start_writer(self, write: Callable[[list[Any]], None], what: str) -> None:
        self._restored = []
        self._timer = Sampling(self._every, first=self._first)
        self._writer = BackgroundWriter(write, what=what, max_queue=self._max_queue, on_write_error=self._on_write_error)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raise the error of a failed write; fetch the values if this run is to be written."""
        if self._writer is not None:
            self._writer.raise_failure()
        return self._args if self._timer.should_fetch(run_context.global_step) else None

    def _values_to_write(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Mapping[str, Any] | None:
        """Return the values of a run that is to be written, else None."""
        if self._writer is None or not self._timer.mark_if_due(run_context.global_step):
            return None
        values: Mapping[str, Any] = run_values.results
        if self._convert is not None:
            values = self._convert(dict(values))
            if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(f"{self._convert_name} returned {values!r}; it must return a mapping by tag")
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last due, and the records that are not written yet: a kill does not lose them."""
        pending: list[Record] = [] if self._writer is None else self._writer.pending()
        return {**super().state_dict(), "pending": [[record.step, record.time, dict(record.values)] for record in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the records of `state_dict`."""
        super().load_state_dict(state)
        self._restored = [Record(int(step), float(time), dict(values)) for step, time, values in state.get("pending", ())]

    @only_if("_has_to_wait")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Queue the values if the run is to be written; raise `InvalidArgumentError` if they cannot be."""
        record = self._record(run_context, run_values)
        if record is not None and self._writer is not None:
            await self._writer.put(record)

    def _has_to_wait(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Return whether the run is to be written and the queue is full; if not, do what `after_run` does."""
        writer = self._writer
        if writer is None or (writer.is_full and self._timer.is_due(run_context.global_step)):
            return writer is not None
        record = self._record(run_context, run_values)
        if record is not None:
            writer.raise_failure()
            writer.add(record)
        return False

    def _record(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        """Return the record of a run that is to be written, else None."""
        raise NotImplementedError

    async def end(self, session: Session) -> None:
        """Wait until all records are written; raise the error of a failed write."""
        if self._writer is not None:
            await self._writer.drain()

    async def close(self, exc: BaseException | None) -> None:
        """Write the remaining records, and close the file."""
        writer, self._writer = self._writer, None
        close_file, self._close_file = self._close_file, None
        try:
            if writer is not None:
                await writer.aclose()
        finally:
            if close_file is not None:
                await to_thread(close_file)


class _RecordsHook(_WritingHook):
    """Base of the hooks that write lines."""

    _numbered_state = False  # its state has lines of its file

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
        """Create the hook; for the arguments see `CSVHook`.

        Raises:
            InvalidArgumentError: neither `values` nor `record_fn`, or an argument is invalid.
        """
        super().__init__(values, every, record_fn, "record_fn", max_queue, on_write_error, first=False)
        self.path: str = checked_path(path, "path")
        self.name: str = f"{type(self).__name__}({os.path.basename(self.path)})" if name is None else name
        _check_tags(self._values, "values has the tag")
        self._fsync = fsync
        self._format: Format
        self._file: RecordFile | None = None

    def _new_format(self) -> Format:
        raise NotImplementedError

    async def begin(self) -> None:
        """Prepare for a new session; the file is opened when the session has been created."""
        self._format = self._new_format()
        self._file = RecordFile(self.path, self._format, fsync=self._fsync)
        self._close_file = self._file.close
        self._start_writer(self._file.write, self.path)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Open the file, and remove the lines after the step at which the session starts; also after a recovery.

        Raise `InvalidArgumentError` if the file was not written by this hook, or has other columns.
        """
        step = session.global_step.latest.step
        restored, self._restored = self._restored, []
        if self._timer.start(step) and self._file is not None and self._writer is not None:
            await self._writer.drain()
            await to_thread(self._file.open_at, step, restored)

    def _record(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Record | None:
        values = self._values_to_write(run_context, run_values)
        if values is None:
            return None
        plain = {str(tag): plain_value(value, str(tag)) for tag, value in values.items()}
        record = Record(run_context.global_step, self._timer.time(), plain)
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
        """Create the hook.

        Args:
            path: the file; its directory must exist.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the tags.
            every: when to write.
            columns: the names after `step` and `time`, in order; by default the tags of `values`, or with `record_fn` those
                of the file, or else of the first line.
            record_fn: converts a dict of the fetched values to a mapping from columns to values, which is written instead
                of them; a column that it leaves out is empty in that line. Called in the event loop.
            max_queue: how many lines may be unwritten before the run waits.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"` logs it and continues.
            fsync: sync the file after each write, so that a power failure loses no line; a crash loses none anyway.
            name: the name of its state in checkpoints; by default the class and the file's name.

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

    def _new_format(self) -> Format:
        return CSVFormat(self._columns)


class JSONLinesHook(_RecordsHook):
    """Writes a JSON object per line on each crossing of `every`: `step`, `time`, and the chosen values.

    Lines may differ in their fields, values may be nested, and arrays become lists. It is strict JSON: NaN and infinities are
    the texts `"NaN"`, `"Infinity"` and `"-Infinity"`. Interrupted runs continue as with `CSVHook`.
    """

    def _new_format(self) -> Format:
        return JSONLinesFormat()


def _checked_columns(columns: Iterable[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names: Sequence[object] = [columns] if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    texts = tuple(name for name in names if isinstance(name, str) and name and name not in _FIRST_COLUMNS)
    if isinstance(columns, str) or len(texts) != len(names) or len(set(texts)) != len(texts) or not texts:
        raise InvalidArgumentError(f'columns is {columns!r}; give different names, without "step" and "time", as a list')
    return texts


class SummaryWriter:
    """Writes numbers as event files for TensorBoard, in a thread: for hooks of one's own, and without a session.

    `async with SummaryWriter("runs/own") as writer: await writer.add(step, {"loss": 0.1})`. A hook opens it in `begin` and
    closes it in `close`. `SummarySaverHook` writes what can be fetched without a hook of one's own.

    Attributes:
        output_dir: the directory of the files.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], *, max_queue: int = 1000, on_write_error: OnWriteError = "raise"
    ) -> None:
        """Create the writer; the file is created by `open`, or else with the first numbers.

        Args:
            output_dir: the directory of the files; created if missing.
            max_queue: how many records may be unwritten before `add` waits.
            on_write_error: `"raise"` raises a failed write in the next `add` or `flush`, or in `aclose`; `"log"` logs the first
                one and continues.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        from aiohooks.hooks import _tensorboard  # only who writes summaries needs the package

        max_queue = checked_int(max_queue, "max_queue", 1, expected="a whole number of records, at least 1")
        check_choice(on_write_error, "on_write_error", "raise", "log")
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._record = _tensorboard.Scalars
        self._file = _tensorboard.EventFile(self.output_dir)
        self._writer: BackgroundWriter[Any] = BackgroundWriter(
            self._file.write, what=f"the summaries in {self.output_dir}", max_queue=max_queue, on_write_error=on_write_error
        )
        self._restart: int | None = None
        self._closed = False
        self._clock: Clock = current_clock()
        self._time_offset = time.time() - self._clock.now()

    @property
    def lost(self) -> int:
        """How many records could not be written."""
        return self._writer.lost

    async def open(self) -> None:
        """Create the directory and the file now, so that an invalid one is an error before there is anything to lose.

        Raises:
            OSError: it cannot be created.
        """
        self._check_open()
        await to_thread(self._file.open)

    def restart(self, step: int) -> None:
        """Record, with the next numbers, that a session has started at `step`: TensorBoard drops its later steps.

        Call it in `after_create_session`, with `session.global_step.latest.step`.
        """
        self._restart = step + 1

    async def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue the numbers of a step, by tag; wait only while the queue is full.

        Raises:
            InvalidArgumentError: a value is not a single number, or the writer is closed.
            OSError: an earlier write has failed.
        """
        self._check_open()
        numbers = checked_numbers(values)
        restart, self._restart = self._restart, None
        await self._writer.put(self._record(step, self._time_offset + self._clock.now(), numbers, restart))

    async def flush(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: a write has failed.
        """
        await self._writer.drain()

    async def aclose(self) -> None:
        """Write what is queued, and close the file; closing twice is harmless.

        Raises:
            OSError: a write has failed.
        """
        self._closed = True
        try:
            await self._writer.aclose()
        finally:
            await to_thread(self._file.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{self!r} is closed; make another one")

    def __repr__(self) -> str:
        return f"SummaryWriter({self.output_dir!r})"


class SummarySaverHook(_WritingHook):
    """Writes numbers as event files for TensorBoard: at the first run, then on each crossing of `every`.

    TensorFlow is not needed. Files are written in a thread, never in the event loop. A session that starts at a step records
    that in the file, so that TensorBoard drops the later steps that an earlier session wrote.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=100),
        summary_fn: Convert | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files; created if missing.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the tags.
            every: when to write.
            summary_fn: converts a dict of the fetched values to a mapping from tags to numbers, which is written instead of
                them; called in the event loop.
            max_queue: how many records may be unwritten before the run waits.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"` logs it and continues.

        Raises:
            InvalidArgumentError: neither `values` nor `summary_fn`, or an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        from aiohooks.hooks import _tensorboard  # imported here to fail now, and not after hours of training

        super().__init__(values, every, summary_fn, "summary_fn", max_queue, on_write_error, first=True)
        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._tensorboard = _tensorboard
        self._restart: int | None = None

    async def begin(self) -> None:
        """Create the directory, and open the file."""
        self._restart = None
        self._writer = None
        file = self._tensorboard.EventFile(self.output_dir)
        self._close_file = file.close
        await to_thread(file.open)
        self._start_writer(file.write, f"the summaries in {self.output_dir}")

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts, or to which a recovery moved it back."""
        step = session.global_step.latest.step
        restored, self._restored = self._restored, []
        if self._timer.start(step):
            # What was not written when the checkpoint was saved may be in the file by now, and is written again.
            self._restart = min([step + 1, *(record.step for record in restored)])
            for record in restored:
                if self._writer is not None:
                    self._writer.add(self._scalars(record))

    def _record(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        values = self._values_to_write(run_context, run_values)
        if values is None:
            return None
        return self._scalars(Record(run_context.global_step, self._timer.time(), checked_numbers(values)))

    def _scalars(self, record: Record) -> Any:
        restart, self._restart = self._restart, None
        return self._tensorboard.Scalars(*record, restart)

    def __repr__(self) -> str:
        return f"SummarySaverHook({self.output_dir!r}, {list(self._values)}, every={self._every})"
