"""Who has added how much to the step: enough to count on exactly, when all that is left of it is what processes remember."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aiohooks.stores._protocol import Position

_MOST_WRITERS = 4096


class Entry(NamedTuple):
    """What one writer has done."""

    writer: str
    seq: int
    """The number of its last write."""
    total: int
    """All that it has added in this epoch."""
    step: int
    """The step that its last write led to."""


class Pages(NamedTuple):
    """A ledger, or what has changed in one; it travels."""

    epoch: int
    fold: int
    """How often the longest silent writers have been added up into `base`."""
    base: int
    entries: tuple[Entry, ...]


class Ledger:
    """The step of a run as a sum: a base, and what each writer has added.

    Every process keeps a copy of what it has been told. When the one who counts is started again with nothing, those who
    come back show their copies, in any order and at any time, and `merge` takes of each writer what is most. So no write that
    was answered is lost, and none that is sent again is counted twice. A number alone could not do that: of two steps it
    does not say whether they count the same writes.
    """

    __slots__ = ("_entries", "_fold", "base", "epoch", "total", "version")

    def __init__(self) -> None:
        """Nobody has written."""
        self.epoch = 1
        self.base = 0
        self.total = 0
        """What all writers have added."""
        self.version = 0
        """Counts the changes."""
        self._fold = 0
        # In the order of their last change, with its version.
        self._entries: dict[str, tuple[int, Entry]] = {}

    @property
    def position(self) -> Position:
        """The sum."""
        return Position(self.epoch, self.base + self.total)

    def add(self, writer: str, seq: int, position: Position) -> None:
        """Takes note that a writer's write has led to `position`."""
        if position.epoch != self.epoch:
            self._begin(position.epoch, position.step)
        known = self._entries.get(writer)
        total = position.step - self.position.step + (0 if known is None else known[1].total)
        self._put(Entry(writer, seq, total, position.step))
        if len(self._entries) > _MOST_WRITERS:
            self._fold_silent()

    def since(self, version: int) -> Pages:
        """What has changed since a version; 0 for everything."""
        changed: list[Entry] = []
        for changed_in, entry in reversed(self._entries.values()):
            if changed_in <= version:
                break
            changed.append(entry)
        changed.reverse()
        return Pages(self.epoch, self._fold, self.base, tuple(changed))

    def merge(self, pages: Pages) -> list[Entry]:
        """Takes in what another copy knows; returns the entries that were news."""
        if pages.epoch > self.epoch:
            self._begin(pages.epoch, pages.base)
        same_epoch = pages.epoch == self.epoch
        if same_epoch and pages.fold > self._fold:
            # It comes whole, and those who are not in it are in its base.
            kept = {entry.writer for entry in pages.entries}
            self._drop(writer for writer in tuple(self._entries) if writer not in kept)
            self._fold, self.base = pages.fold, pages.base
        elif same_epoch and pages.fold == self._fold:
            self.base = max(self.base, pages.base)
        news: list[Entry] = []
        for fields in pages.entries:
            entry = Entry(*fields)
            known = self._entries.get(entry.writer)
            if known is not None and known[1].seq >= entry.seq:
                continue
            if same_epoch and pages.fold < self._fold and known is None:
                continue  # added up already
            if not same_epoch:
                entry = entry._replace(total=0 if known is None else known[1].total)
            self._put(entry)
            news.append(entry)
        return news

    def _begin(self, epoch: int, base: int) -> None:
        """A new epoch: the writes of the earlier ones count no more, but repeated ones are still known."""
        self.epoch, self.base, self.total, self._fold = epoch, base, 0, 0
        for writer, (version, entry) in self._entries.items():
            self._entries[writer] = version, entry._replace(total=0)

    def _put(self, entry: Entry) -> None:
        known = self._entries.pop(entry.writer, None)
        self.version += 1
        self.total += entry.total - (0 if known is None else known[1].total)
        self._entries[entry.writer] = self.version, entry

    def _drop(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self.total -= self._entries.pop(writer)[1].total

    def _fold_silent(self) -> None:
        step = self.position.step
        self._drop(tuple(self._entries)[: _MOST_WRITERS // 2])
        self.base = step - self.total
        self._fold += 1
        for _, entry in tuple(self._entries.values()):
            self._put(entry)  # whoever is told of anything is told of all of them now
