"""Sessions that write lines, and the contents of the files afterwards; for `CSVHook` and `JSONLinesHook`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aiohooks.hooks.records import CSVHook, JSONLinesHook
from tests.support.hooks import RestoringHook
from tests.support.sessions import train

Hook = CSVHook | JSONLinesHook
both = pytest.mark.parametrize("make", [CSVHook, JSONLinesHook])


async def run(hook: Hook, runs: int, *, start: int = 0, state: Mapping[str, Any] | None = None, **feeds: Any) -> None:
    """Make so many runs in a session that starts at a step, with the hook's state of the last checkpoint."""
    others = [] if state is None else [RestoringHook(hook, state)]
    await train(hook, *others, runs=runs, start=start, feed_dict=feeds)


def steps(path: Path) -> list[int]:
    """Return the steps of a file's lines."""
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        return [int(row["step"]) for row in csv.DictReader(lines)]
    return [json.loads(line)["step"] for line in lines]


def without_time(path: Path) -> list[Any]:
    """Return the contents of a file without the times."""
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        return [{name: value for name, value in row.items() if name != "time"} for row in csv.DictReader(lines)]
    return [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]


def aside_of(path: Path) -> str:
    """Return the lines that were removed from a file."""
    return Path(f"{path}.dropped").read_text()


def file_of(make: Callable[..., Hook], folder: Path) -> Path:
    """Return a path with the suffix that belongs to the hook."""
    return folder / ("run.csv" if make is CSVHook else "run.jsonl")
