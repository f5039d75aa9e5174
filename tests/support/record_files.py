"""The contents of the files of `CSVHook` and `JSONLinesHook`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def without_time(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file as mappings, without the times."""
    texts = path.read_text().splitlines()
    rows: list[dict[str, Any]] = list(csv.DictReader(texts)) if path.suffix == ".csv" else [json.loads(text) for text in texts]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def aside_of(path: Path) -> str:
    """Return the lines that were removed from a file."""
    return Path(f"{path}.dropped").read_text()
