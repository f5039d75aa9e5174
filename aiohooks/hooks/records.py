"""Writing values: JSON lines, and reading them back; event files for TensorBoard.

restart   a line with the step that is run next: earlier lines of this step and later ones are void
torn      a line is torn if a crash has left only a part of it
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, ClassVar, cast

from aiohooks._core.files import write_all
from aiohooks._core.validate import checked_path
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._observing import (
    Record,
    RecordFile,
    Values,
    WritingHook,
    checked_numbers,
    describe_value,
    logger,
    scalar,
)
from aiohooks.hooks.every import Every

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The numbers that JSON does not have, by the strings that stand for them in a file."""


class JSONLinesHook(WritingHook):
    """Appends a line of JSON on each crossing of `every`: the step, the time, and the chosen
    values.

    Values may be nested, lines may differ in their names, and arrays become lists. JSON has
    neither NaN nor infinities: they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`.

    The hook never changes existing lines of the file. A session that resumes, or that a recovery
    moves back, appends a line such as `{"restart": 31}` when it runs step 31 next: earlier lines of
    this step and later ones are void. `read_records` returns each step once. A save waits until all
    lines are written, so a kill loses none that a resumed run does not write again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: Values,
        *,
        every: Every = Every(steps=1),
    ) -> None:
        """Create the hook.

        Args:
            path: the file. Its directory must exist.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags.
            every: when to write.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        self.path: str = checked_path(path, "path")
        super().__init__(values, every)
        for name in ("step", "time"):
            if name in self._values:
                raise InvalidArgumentError(
                    f"a value has the tag {name!r}, as every line; give it another tag"
                )

    def _new_file(self) -> tuple[_JSONLinesFile, str]:
        return _JSONLinesFile(self.path), self.path

    def _checked(self, record: Record) -> Record:
        values = {tag: _plain(value, tag) for tag, value in record.values.items()}
        return record._replace(values=values)

    def __repr__(self) -> str:
        return f"JSONLinesHook({self.path!r}, {list(self._values)}, every={self._every})"


class SummarySaverHook(WritingHook):
    """Writes numbers as event files for TensorBoard: at the first run, then on each crossing of
    `every`.

    TensorFlow is not needed. Files are written in a thread, never in the event loop. A session that
    starts at a step records that in the file, so that TensorBoard drops the later steps that an
    earlier session wrote.

    A hook of your own adds its numbers to `run_context.metrics`, which a `TrackerHook` with a
    `TensorBoardTracker` writes.
    """

    _first: ClassVar[bool] = True

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        values: Values,
        *,
        every: Every = Every(steps=100),
    ) -> None:
        """Create the hook.

        Args:
            output_dir: the directory of the files, created if missing.
            values: a mapping from a tag to a fetch, or several nodes or names, whose names are the
                tags.
            every: when to write.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: tensorboardX is not installed.
        """
        # An extra, imported here to fail now, and not after hours of training.
        from aiohooks.hooks import _tensorboard

        self.output_dir: str = checked_path(output_dir, "output_dir")
        self._tensorboard = _tensorboard
        super().__init__(values, every)

    def _new_file(self) -> tuple[RecordFile, str]:
        return self._tensorboard.EventFile(self.output_dir), f"the summaries in {self.output_dir}"

    def _checked(self, record: Record) -> Record:
        return record._replace(values=checked_numbers(record.values))

    def __repr__(self) -> str:
        return f"SummarySaverHook({self.output_dir!r}, {list(self._values)}, every={self._every})"


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
    # The number of a line that cannot be decoded. A crash may have torn it, and then a restart
    # follows, or nothing. Any other line after it means that the file is damaged.
    torn_number: int | None = None
    with open(name, "rb") as file:
        _check_contents(file, name)
        for number, line in enumerate(file, 1):
            try:
                fields = _decoded(line)
            except ValueError:
                torn_number = number
                continue
            # A line without a step is a restart, which makes later steps void.
            if "step" not in fields:
                while records and records[-1]["step"] >= fields["restart"]:
                    records.pop()
                torn_number = None
            elif torn_number is not None:
                raise InvalidArgumentError(f"{name}: line {torn_number} is damaged; remove it")
            else:
                records.append(fields)
    return records


def _decoded(line: bytes) -> dict[str, Any]:
    """Return the record or the restart of a line. Raise `ValueError` if it is neither."""
    fields = _with_floats(json.loads(line))
    if isinstance(fields, dict):
        names = cast("dict[str, Any]", fields)
        if isinstance(names.get("step", names.get("restart")), int):
            return names
    raise ValueError("neither a step nor a restart")


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


class _JSONLinesFile:
    """A file of JSON lines to which one writer appends, in one thread.

    Only a crash leaves a part of a line, and only at the end. The next line does not continue it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def open(self) -> BinaryIO:
        """Open and lock the file, if it is not open. Create it if it is missing.

        Raises:
            InvalidArgumentError: another hook or process is writing to it.
            OSError: the file cannot be opened.
        """
        if self._file is None:
            file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise InvalidArgumentError(
                    f"{self.path} is being written by another hook or process; give each of them a"
                    " path of its own"
                ) from None
            except OSError as error:
                # Some network file systems have no locks. The file is written without one.
                logger.debug("%s cannot be locked: %s", self.path, error)
            self._file = file
        return self._file

    def open_at(self, step: int) -> None:
        """Open the file to continue after `step`. Append a restart unless the file is empty."""
        file = self.open()
        _check_contents(file, self.path)
        if file.seek(0, os.SEEK_END):
            self.append([{"restart": step + 1}])

    def write(self, records: list[Record]) -> None:
        """Append the records."""
        self.append(
            {"step": record.step, "time": record.time, **record.values} for record in records
        )

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each object. A write that fails leaves no part of them in the file."""
        texts = [json.dumps(fields, ensure_ascii=False, allow_nan=False) for fields in objects]
        # A str may have a lone surrogate, which has no UTF-8. It is escaped instead.
        lines = b"".join(text.encode("utf-8", "backslashreplace") + b"\n" for text in texts)
        file = self.open()
        size = file.seek(0, os.SEEK_END)
        # If a crash has torn the last line, end it, so that the new lines do not continue it.
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        try:
            write_all(file.write, lines, self.path)
        except OSError:
            file.truncate(size)
            raise

    def close(self) -> None:
        """Sync and close the file, if it is open."""
        if self._file is None:
            return
        with self._file as file:
            self._file = None
            os.fsync(file.fileno())
            if fcntl is not None:
                # Closing the file would not release the lock while a forked child has it open.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def _check_contents(file: BinaryIO, path: str) -> None:
    """Check that a file is empty, or begins as a file of `JSONLinesHook` does. Go to its start.

    Raises:
        InvalidArgumentError: it begins differently.
    """
    beginning = b'{"step":'
    file.seek(0)
    # A crash may have left only a part of the first line, or zeros in its place. So compare as much
    # as there is.
    first = file.readline(len(beginning)).rstrip(b"\n\0")
    if not beginning.startswith(first):
        raise InvalidArgumentError(f"{path} is not a file of JSONLinesHook; give another path")
    file.seek(0)


def _plain(value: Any, tag: str) -> Any:
    """Return a value as None, bool, int, float, str, lists and dicts with str keys, for JSON."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, str):
        # `str(value)` may be overridden: that of an enumeration is its name, not its value.
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, Any]", value).items()
        return {str(key): _plain(item, f"{tag}.{key}") for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tag) for item in cast("Iterable[Any]", value)]
    if callable(getattr(value, "tolist", None)):
        # Of a scalar, `tolist` returns a number, which `scalar` converts below.
        listed = value.tolist()
        if isinstance(listed, list):
            return _plain(listed, tag)
    number = scalar(value)
    if number is None:
        raise InvalidArgumentError(
            f"{tag!r} is {describe_value(value)}; give numbers, strings, or lists or mappings of"
            " these"
        )
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number
