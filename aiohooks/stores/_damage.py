"""Saying that what an engine keeps of a run cannot be read."""

from __future__ import annotations

from aiohooks.errors import StoreDamagedError, StoreUnavailableError

EngineError = StoreUnavailableError | StoreDamagedError
ENGINE_ERRORS = (StoreUnavailableError, StoreDamagedError)
"""What comes of asking an engine that is away, says no, or has lost its mind."""


def damaged(run: str, path: str, *, found: str, expected: str, delete: str) -> StoreDamagedError:
    """The error for what was found in the place of a part of a run; `delete` says how to delete it by hand."""
    return StoreDamagedError(
        f"{path}: found {found}, expected {expected}. Where the run {run!r} was is not known, and nothing is made up in its "
        f"place: stop its processes, and then restore it, or call forget() of a new store, or {delete}; a chief goes on from "
        "its newest checkpoint",
        path=path,
        found=found,
        expected=expected,
    )
