"""The registry of activity: what is in it, in which order, and for how long."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable

import pytest

from aiohooks._core.activity import (
    ENTRIES,
    Awaited,
    Entry,
    Parked,
    active,
    enter,
    entries,
)
from tests.support.waiting import forever, parked

pytestmark = pytest.mark.every_python


def entries_of(task: asyncio.Task[None]) -> list[Entry]:
    """Return the entries of a task, the outermost first."""
    return [entry for entry in entries() if entry.task is task]


def names(task: asyncio.Task[None]) -> list[str]:
    """Return what a task waits for, by name."""
    descriptions = [entry.awaited() for entry in entries_of(task)]
    return [awaited.name for awaited in descriptions if awaited is not None]


def named(name: str) -> active:
    """Return a block with a description."""
    return active("wait", name, lambda: Awaited("wait", name))


async def nested(opened: Awaitable[object]) -> None:
    with named("outer"):
        with named("inner"):
            await opened
        raise ValueError


async def test_blocks_are_entered_by_their_task_and_left_with_their_errors() -> None:
    """The outermost comes first, and has lasted for some time; an error passes."""
    opened = asyncio.Event()
    first = await parked(nested(opened.wait()))
    second = await parked(nested(forever()))
    assert (names(first), names(second)) == (["outer", "inner"],) * 2
    (outer, _) = [entry.awaited() for entry in entries_of(first)]
    assert outer is not None
    assert outer.secs is not None
    assert outer.secs > 0
    opened.set()
    with pytest.raises(ValueError, match=r"^$"):
        await first
    assert entries_of(first) == []
    second.cancel()
    await asyncio.wait([second])
    assert entries_of(second) == []


async def test_an_entry_keeps_nothing_alive() -> None:
    """What its owner has forgotten is not in the registry any more."""
    forgotten = named("forgotten")
    forgotten.__enter__()
    assert "forgotten" in [entry.name for entry in entries() if isinstance(entry, active)]
    del forgotten
    gc.collect()
    assert "forgotten" not in [entry.name for entry in entries() if isinstance(entry, active)]


class Table:
    """A table without waits."""

    def parked(self) -> list[Parked]:
        return []


def test_an_object_that_dies_has_left() -> None:
    """Another object with its id would get its place among the entries."""
    table = Table()
    enter(table)
    key = id(table)
    assert key in ENTRIES
    del table
    assert key not in ENTRIES


class SelfReferring(Table):
    """A table that only a garbage collection can remove."""

    def __init__(self) -> None:
        self.itself = self


def test_the_registry_can_be_read_while_objects_die() -> None:
    """A garbage collection in the middle of reading takes them out."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        keys: set[int] = set()
        for _ in range(100):
            table = SelfReferring()
            enter(table)
            keys.add(id(table))
        del table
        # The collection comes when a part of the registry has been read.
        gc.set_threshold(gc.get_count()[0] + 30)
        gc.enable()
        entries()
        gc.collect()
        assert keys.isdisjoint(ENTRIES)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
