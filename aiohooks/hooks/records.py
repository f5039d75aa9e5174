"""Writing values as lines of a file: CSV, or JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohooks._checks import check_callable, check_instance
from aiohooks._errors import InvalidArgumentError
from aiohooks._every import Every
from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks._shield import in_thread
from aiohooks.hooks._background import BackgroundWriter, OnWriteError, check_writing
from aiohooks.hooks._record_file import CSVFormat, Format, JSONLinesFormat, Record, RecordFile
from aiohooks.hooks._sampling import Sampling
from aiohooks.hooks._values import Values, checked_path, checked_values, plain
from aiohooks.hooks._writing_hook import GRACE_SECS, WritingHook

if TYPE_CHECKING:
    from aiohooks._coordinator import Coordinator
    from aiohooks._session import Session

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
            await in_thread(self._file.open_at, step, restored, grace_secs=GRACE_SECS)

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
