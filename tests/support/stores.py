"""Step stores over processes, opened as users do."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aiohooks.stores import SharedStepStore, open_step_store

if TYPE_CHECKING:
    from aiohooks.stores.local import LocalEngine


def shared_store(url: str, **options: Any) -> SharedStepStore:
    """Return the store of a URL."""
    store = open_step_store(url, **options)
    assert isinstance(store, SharedStepStore)
    return store


def local_store(
    directory: str | os.PathLike[str] | None = None, *, run: str = "default", **options: Any
) -> SharedStepStore:
    """Return a store for the processes of this machine."""
    from aiohooks.stores.local import LocalEngine

    return SharedStepStore(LocalEngine(directory), run=run, **options)


def engine_of(store: SharedStepStore) -> LocalEngine:
    """Return the engine of a store on this machine."""
    engine: Any = store._engine
    return cast("LocalEngine", engine)


def directory_of(store: SharedStepStore) -> Path:
    """Return the directory of the run of a store on this machine."""
    return engine_of(store).directory


@contextlib.contextmanager
def locked(store: SharedStepStore) -> Iterator[None]:
    """Let another connection lock the database of a store in the block."""
    holder = sqlite3.connect(directory_of(store) / "run.db", isolation_level=None)
    with contextlib.closing(holder):
        holder.execute("BEGIN IMMEDIATE")
        yield
