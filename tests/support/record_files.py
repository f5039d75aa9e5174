"""The contents of the files of `JSONLinesHook`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohooks.hooks import read_records


def without_time(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file without their times."""
    return [
        {tag: value for tag, value in record.items() if tag != "time"}
        for record in read_records(path)
    ]
