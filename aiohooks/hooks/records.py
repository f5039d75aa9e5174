"""Writing values as lines of a file: CSV, or JSON."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._validate import check_callable, check_instance
from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.hooks._observing import (
    BackgroundWriter,
    OnWriteError,
    Values,
    WritingHook,
    check_writing,
    checked_path,
    checked_values,
    plain,
)
from aiohooks.hooks.every import Every, Sampling
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
_TRUTHS = {"True": "1", "False": "0"}


class Record(NamedTuple):
    """One line: the step, the time in seconds since 1970, and plain values by tag."""

    step: int
    time: float
    values: Mapping[str, Any]


class Format(Protocol):
    """How lines are written and read. Every line ends in a line break and has none inside."""

    def check(self, record: Record) -> None:
        """Refuses a record that this file cannot have."""
        ...

    def header(self, found: bytes | None) -> bytes:
        """The line at the top, or nothing; `found` is the first line of a file that is there."""
        ...

    def line(self, record: Record) -> bytes:
        """The record as a line."""
        ...

    def record(self, line: bytes) -> Record:
        """The record of a line; a ValueError if it is none."""
        ...


class JSONLinesFormat:
    """A JSON object a line."""

    def check(self, record: Record) -> None:
        """Any names will do, but the two that each line has."""
        for name in _FIRST_COLUMNS:
            if name in record.values:
                raise InvalidArgumentError(f"the record has {name!r}, which each line has anyway; give it another name")

    def header(self, found: bytes | None) -> bytes:
        """There is none."""
        return b""

    def line(self, record: Record) -> bytes:
        """See `Format`."""
        fields = {"step": record.step, "time": record.time, **record.values}
        return json.dumps(_strict(fields), ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace") + b"\n"

    def record(self, line: bytes) -> Record:
        """See `Format`."""
        fields: Any = json.loads(line)
        try:
            step, time = fields.pop("step"), fields.pop("time")
            return Record(_whole(step), float(time), fields)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no step or time: {error!r}") from None


class CSVFormat:
    """Comma-separated values under a line of names."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        """Takes the names; None takes them from the file, or else from the first record."""
        self._columns: tuple[str, ...] | None = None if columns is None else tuple(columns)

    def check(self, record: Record) -> None:
        """Refuses a column that is not there, and a value that is no number or text."""
        if self._columns is None:
            JSONLinesFormat().check(record)
            self._columns = tuple(record.values)
        for name, value in record.values.items():
            if name not in self._columns:
                raise InvalidArgumentError(
                    f"the record has {name!r}, which is no column of the file; {did_you_mean(name, self._columns)}; "
                    "name all that may come in columns=, or use JSONLinesHook"
                )
            if not isinstance(value, (bool, int, float, str)) and value is not None:  # a list or a mapping
                raise InvalidArgumentError(f"{name!r} is {str(value)[:80]}; give one number or text, or use JSONLinesHook")

    def header(self, found: bytes | None) -> bytes:
        """The names; checks those that are there already."""
        if found is not None:
            try:
                names = tuple(_row(found))
            except ValueError as error:
                raise InvalidArgumentError(f"its first line is {found[:80]!r}, not names of columns: {error}") from None
            wanted = self._columns if self._columns is not None else names[2:]
            if names != (*_FIRST_COLUMNS, *wanted):
                columns = ",".join((*_FIRST_COLUMNS, *wanted))
                raise InvalidArgumentError(f"its columns are {','.join(names)!r} and not {columns!r}")
            self._columns = wanted
        return b"" if self._columns is None else _joined([*_FIRST_COLUMNS, *self._columns])

    def line(self, record: Record) -> bytes:
        """See `Format`."""
        columns = self._columns or tuple(record.values)
        return _joined([str(record.step), repr(record.time), *(_cell(record.values.get(name)) for name in columns)])

    def record(self, line: bytes) -> Record:
        """See `Format`; every value is the text in the file."""
        step, time, *rest = _row(line)
        columns = self._columns or ()
        if len(rest) != len(columns):
            raise ValueError(f"{len(rest) + 2} fields under {len(columns) + 2} columns")
        return Record(_whole(int(step)), float(time), dict(zip(columns, rest, strict=True)))


class RecordFile:
    """A file of lines, open for more."""

    def __init__(self, path: str, form: Format, *, fsync: bool) -> None:
        """Opens nothing yet."""
        self.path: str = path
        self._format = form
        self._fsync = fsync
        self._file: BinaryIO | None = None
        self._good = 0  # how long the file is up to its last whole line
        self._has_header = False

    def open_at(self, step: int, restored: Sequence[Record] = ()) -> None:
        """Opens it for what follows `step`, and takes out a torn line and the lines of later steps.

        `restored` are lines of steps up to this one that may not have come into the file; those behind its last are added.

        Raises:
            InvalidArgumentError: the file has something else in it.
            OSError: it cannot be read or written.
        """
        if self._file is None:
            self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
            self._lock(self._file)
        kept, dropped, last = self._sorted_out(step)
        if dropped:
            self._set_aside(dropped)
            _logger.warning(
                "%s: took out %d lines that do not belong before step %d (torn by a crash, or of steps that are run once "
                "more); they are in %s.dropped",
                self.path,
                dropped.count(b"\n") or 1,
                step + 1,
                self.path,
            )
        self._good = kept
        self._file.truncate(kept)
        self._file.seek(kept)
        missing = [record for record in restored if last < record.step <= step]
        for record in missing:
            self._format.check(record)
        self.write(missing)

    def _lock(self, file: BinaryIO) -> None:
        """Two writers of one file would take out each other's lines."""
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file = None
            file.close()
            raise InvalidArgumentError(
                f"{self.path} is being written by another hook or process; give each of them a path of its own"
            ) from None
        except OSError as error:
            _logger.debug("%s cannot be locked: %s", self.path, error)  # some network file systems

    def _sorted_out(self, step: int) -> tuple[int, bytes, int]:
        """How much of the file stays, what does not, and the last step that stays."""
        kept, last = 0, -1
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # torn by a crash, it is the last one
                try:
                    if number == 1 and self._format.header(line):
                        self._has_header = True
                    else:
                        found = self._format.record(line).step
                        if found > step:
                            break
                        last = max(last, found)
                except ValueError as error:
                    raise InvalidArgumentError(
                        f"{self.path} is not a file of this hook: line {number}: {error}; move it away, or give another path"
                    ) from None
                kept += len(line)
            file.seek(kept)
            return kept, file.read(), last

    def _set_aside(self, dropped: bytes) -> None:
        with open(f"{self.path}.dropped", "ab") as aside:
            aside.write(dropped if dropped.endswith(b"\n") else dropped + b"\n")
            aside.flush()
            os.fsync(aside.fileno())

    def write(self, records: Sequence[Record]) -> None:
        """Adds the records' lines; a write that fails leaves no part of a line behind."""
        if not records:
            return
        assert self._file is not None
        header = b"" if self._has_header else self._format.header(None)
        lines = header + b"".join(map(self._format.line, records))
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._good)
            self._file.seek(self._good)
            raise
        self._good += len(lines)
        self._has_header = True

    def close(self) -> None:
        """Syncs and closes it; again is harmless."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                os.fsync(file.fileno())
                if fcntl is not None:
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have it open, too


Series = dict[str, tuple[list[int], list[float]]]
"""Steps and numbers by tag."""


def read_series(path: str) -> Series:
    """The numbers of a file that was written by one of the hooks, whichever it was; a torn last line is left out.

    Raises:
        InvalidArgumentError: it is not such a file.
        OSError: it cannot be read.
    """
    series: Series = {}
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
                record = form.record(line)
            except ValueError as error:
                raise InvalidArgumentError(
                    f"{path} is not a file of CSVHook or JSONLinesHook: line {number}: {error}; give one that is"
                ) from None
            for tag, value in _numbers(record.values, ""):
                steps, values = series.setdefault(tag, ([], []))
                steps.append(record.step)
                values.append(value)
    return series


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for tag, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(cast("dict[str, Any]", value), f"{prefix}{tag}.")
        elif isinstance(value, (bool, int, float, str)):
            try:
                yield f"{prefix}{tag}", float(_TRUTHS.get(value, value) if isinstance(value, str) else value)
            except ValueError:
                continue  # a text


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [_strict(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("\n", "\\n").replace("\r", "\\r")
    return repr(value)


def _joined(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _row(line: bytes) -> list[str]:
    try:
        rows = list(csv.reader([line.decode("utf-8").removesuffix("\n")], strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from None
    if len(rows) != 1 or len(rows[0]) < len(_FIRST_COLUMNS):
        raise ValueError("no step and time")
    return rows[0]


def _whole(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int):
        raise ValueError(f"the step is {step!r}")
    return step


RecordFn = Callable[[dict[str, Any]], Mapping[str, Any]]


class _RecordsHook(WritingHook):
    """What the two have in common."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values | None,
        every: Every,
        record_fn: RecordFn | None,
        max_queue: int,
        on_write_error: OnWriteError,
        fsync: bool,
        name: str | None,
    ) -> None:
        check_instance(every, Every, "every")
        check_callable(record_fn, "record_fn", optional=True)
        check_writing(max_queue, on_write_error)
        if values is None and record_fn is None:
            raise InvalidArgumentError("nothing to write; give values={'tag': fetch}, record_fn=, or both")
        self.path: str = checked_path(path, "path")
        self.name: str = f"{type(self).__name__}({os.path.basename(self.path)})" if name is None else name
        self._values = checked_values(values, may_be_empty=record_fn is not None)
        for reserved in ("step", "time"):
            if reserved in self._values:
                raise InvalidArgumentError(f"values has the tag {reserved!r}, which each line has anyway; give it another name")
        self._args = SessionRunArgs(self._values)
        self._every = every
        self._record_fn = record_fn
        self._max_queue = max_queue
        self._on_write_error: OnWriteError = on_write_error
        self._fsync = fsync
        self._sampling = Sampling(every, first=False)
        self._format: Format
        self._file: RecordFile | None = None
        self._writer: BackgroundWriter[Record] | None = None
        self._restored: list[Record] = []

    def _new_format(self) -> Format:
        raise NotImplementedError

    async def begin(self) -> None:
        """Starts anew for a new session; the file is opened when the session has been created."""
        self._sampling = Sampling(self._every, first=False)
        self._format = self._new_format()
        self._file = RecordFile(self.path, self._format, fsync=self._fsync)
        self._close_file = self._file.close
        self._writer = BackgroundWriter(
            self._file.write, what=self.path, max_queue=self._max_queue, on_write_error=self._on_write_error
        )
        self._restored = []

    def state_dict(self) -> dict[str, Any]:
        """The lines that are on their way to the file: a process that is killed now does not lose them for its successor."""
        pending = [] if self._writer is None else self._writer.pending()
        return {"pending": [[record.step, record.time, dict(record.values)] for record in pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the lines that `state_dict` had."""
        self._restored = [Record(int(step), float(time), dict(values)) for step, time, values in state.get("pending", ())]

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Opens the file and takes out what lies behind the step at which the session starts, also after a recovery.

        Raises:
            InvalidArgumentError: the file is not one that this hook has written, or has other columns.
            OSError: it cannot be opened.
        """
        step = session.global_step.latest.step
        restored, self._restored = self._restored, []
        if self._sampling.start(step) and self._file is not None and self._writer is not None:
            await self._writer.drain()
            await to_thread(self._file.open_at, step, restored, grace_secs=DEFAULT_GRACE_SECS)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Hands the line to the writer.

        Raises:
            InvalidArgumentError: a value that cannot be written, or a column that the file does not have.
        """
        step = run_context.global_step
        if self._writer is None or not self._sampling.take(step):
            return
        values: Mapping[str, Any] = run_values.results
        if self._record_fn is not None:
            values = self._record_fn(dict(values))
            if not isinstance(values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(f"record_fn returned {values!r}; it must return a mapping from tags to values")
        record = Record(step, self._sampling.time(), {str(tag): plain(value, str(tag)) for tag, value in values.items()})
        self._format.check(record)
        await self._writer.put(record)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {list(self._values)}, every={self._every})"


class CSVHook(_RecordsHook):
    r"""Writes a line of comma-separated values on each crossing of `every`: the step, the time, and the chosen values.

    The first line names the columns. Values are numbers or texts; numbers that are not finite are `nan`, `inf` and `-inf`,
    None is an empty field, and a line break in a text is written as `\n`. A run that goes on from a checkpoint goes on in the
    file as if it had never been interrupted: a line that was torn by a crash and lines of steps that are run once more are
    taken out, and kept in a file beside it, whose name ends in `.dropped`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=1),  # noqa: B008 - frozen
        columns: Iterable[str] | None = None,
        record_fn: RecordFn | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
        fsync: bool = False,
        name: str | None = None,
    ) -> None:
        """Takes where to write what, and when.

        Args:
            path: the file; the folder must be there.
            values: a mapping from a tag to a fetch, or several nodes or names, which name themselves.
            every: when.
            columns: the names behind `step` and `time`, in order; by default the tags of `values`, or with `record_fn` those
                of the file, or else of the first line.
            record_fn: makes a mapping from columns to values out of a dict of the fetched values, and this is written
                instead of them; a column that it leaves out is empty in that line. Called in the event loop.
            max_queue: how many lines may be waiting for the disk; more wait for room.
            on_write_error: `"raise"` raises a failed write in the next run at the latest, `"log"` logs it and goes on.
            fsync: whether to sync the file after each write, so that a power cut takes no line; a crash takes none anyway.
            name: what its state is called in checkpoints; by default the class and the file's name.

        Raises:
            InvalidArgumentError: neither `values` nor `record_fn`, or one of the arguments cannot be meant.
        """
        super().__init__(path, values, every, record_fn, max_queue, on_write_error, fsync, name)
        self._columns: tuple[str, ...] | None = _checked_columns(columns)
        if self._columns is None and record_fn is None:
            self._columns = tuple(self._values)
        if self._columns is not None and record_fn is None and (unknown := set(self._values) - set(self._columns)):
            raise InvalidArgumentError(f"values has {sorted(unknown)}, which columns {list(self._columns)} has not; add them")

    def _new_format(self) -> Format:
        return CSVFormat(self._columns)


class JSONLinesHook(_RecordsHook):
    """Writes a JSON object in a line of its own on each crossing of `every`: `step`, `time`, and the chosen values.

    Values may be nested, and arrays become lists. It is strict JSON: numbers that are not finite are the texts `"NaN"`,
    `"Infinity"` and `"-Infinity"`. What is said of interrupted runs at `CSVHook` holds here too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values | None = None,
        *,
        every: Every = Every(steps=1),  # noqa: B008 - frozen
        record_fn: RecordFn | None = None,
        max_queue: int = 1000,
        on_write_error: OnWriteError = "raise",
        fsync: bool = False,
        name: str | None = None,
    ) -> None:
        """Takes where to write what, and when; see `CSVHook`, but lines may differ in what they have.

        Raises:
            InvalidArgumentError: neither `values` nor `record_fn`, or one of the arguments cannot be meant.
        """
        super().__init__(path, values, every, record_fn, max_queue, on_write_error, fsync, name)

    def _new_format(self) -> Format:
        return JSONLinesFormat()


def _checked_columns(columns: Iterable[str] | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names: Sequence[object] = [columns] if isinstance(columns, str) or not isinstance(columns, Iterable) else list(columns)
    texts = tuple(name for name in names if isinstance(name, str) and name and name not in ("step", "time"))
    if isinstance(columns, str) or len(texts) != len(names) or len(set(texts)) != len(texts) or not texts:
        raise InvalidArgumentError(f'columns is {columns!r}; give different names, without "step" and "time", as a list')
    return texts
