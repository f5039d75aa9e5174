"""Checks that pytest does not have."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest

import aiohooks as ah


def drop(things: list[Any]) -> None:
    """Empty the list, and collect what is not referenced any more."""
    things.clear()
    gc.collect()


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[BaseException | None]:
    """Return the errors in the log, with tracebacks."""
    return [record.exc_info[1] for record in caplog.records if record.exc_info]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let nothing be freed in the block but what is not referenced any more, without the garbage
    collector.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def refused(
    error: type[ah.AiohooksError], *says: str
) -> Iterator[pytest.ExceptionInfo[ah.AiohooksError]]:
    """Check that the block raises exactly `error`, whose message has all of these, in this
    order.
    """
    pattern = "(?s)" + ".*".join(map(re.escape, says))
    with pytest.raises(error, match=pattern) as caught:
        yield caught
    assert caught.type is error


def invalid(
    *says: str,
) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[ah.AiohooksError]]:
    """Check that the block refuses an argument, in a message that has all of these."""
    return refused(ah.errors.InvalidArgumentError, *says)
