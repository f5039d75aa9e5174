"""Changing the state of a run that a server keeps as one message: compare, set, and try again when somebody was faster."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from aiohooks._aio.clock import Clock
from aiohooks.stores._protocol import Member, Snapshot
from aiohooks.stores._run_state import RunState
from aiohooks.stores.nats._stream import NO_HEAD, Head, life_of, pack, unpack

T = TypeVar("T")
_AT_ONCE = 3
"""So many times in a row a lost race is run again at once; then after a pause, up to the longest."""
_PAUSE_SECS = 0.001, 0.05


class _Change(Generic[T]):
    """One caller's, until it is part of the state."""

    __slots__ = ("made", "make")

    def __init__(self, make: Callable[[RunState], T]) -> None:
        self.make = make
        self.made: list[T] = []


class Commits:
    """The newest state of a run that this process knows of, and how it is changed.

    Changes that are asked for while another one is on its way are made together, in one message. Leases are watched with
    this process's own clock: a member is taken for dead when its heartbeat has not changed for the time that it gave.
    """

    def __init__(
        self,
        clock: Clock,
        process: str,
        fetch: Callable[[float], Awaitable[Head]],
        publish: Callable[[bytes, int], Awaitable[int | None]],
        learnt: Callable[[Head, Head | None], None],
        lost: Callable[[], None],
    ) -> None:
        """Knows nothing yet.

        Args:
            clock: for the leases.
            process: whose members are not watched, being here.
            fetch: reads the newest message, within so many seconds.
            publish: writes a message if the newest one has that number, and gives its own; None if the newest one has not.
            learnt: told of each newer message, with the one before.
            lost: told when the server has lost data.
        """
        self.head: Head | None = None
        self._kept: Head | None = None  # known before the connection or the server's data was lost
        self._clock = clock
        self._process = process
        self._fetch = fetch
        self._publish = publish
        self._learnt = learnt
        self._lost = lost
        self._waiting: list[_Change[Any]] = []
        self._turn = asyncio.Lock()
        self._on_its_way: tuple[bytes, RunState] | None = None
        self._beats: dict[str, tuple[int, float]] = {}

    def restart(self) -> None:
        """Knows nothing again; while nobody could be heard, nobody's lease ran out."""
        self._kept = self.head or self._kept
        self.head = None
        self._beats.clear()

    def hear(self, seq: int, data: bytes, last: bool) -> None:
        """Takes note of a message that the server told of; unless it is the last one for now, there is a newer one."""
        head, life = self.head, life_of(data)
        if head is not None and life[0] == head.born and (seq <= head.seq or (not last and life == head.life)):
            return  # old, or our own, or the step alone has changed, which the next one says as well
        if (mine := self._on_its_way) is not None and mine[0] == data:
            self._take(Head(seq, *mine))
        elif head is not None and life == head.life:
            self._take(Head(seq, data))  # the step alone: who waits for it is woken sooner if the rest is not read
        else:
            self._take(unpack(seq, data))

    async def refresh(self, secs: float) -> Head:
        """Reads the newest message."""
        before = self.head
        head = await self._fetch(secs)
        now = self.head
        if now is not None and now is not before and now.born == head.born and now.seq >= head.seq:
            return now  # heard meanwhile
        if before is not None and before.born and (head.seq < before.seq or head.born != before.born):
            self._kept = before
            self.head = head
            self._lost()
            return head
        return self._take(head)

    def snapshot(self) -> Snapshot:
        """What to tell of the newest state."""
        left = [secs for _, secs in self._leases()]
        return (self.head or NO_HEAD).state.snapshot(max(0.0, min(left)) if left else None)

    async def bury(self, secs: float) -> None:
        """Takes out the members whose leases have run out."""
        dead = [(member.id, member.heartbeat) for member, secs in self._leases() if secs <= 0]
        if dead:
            await self.change(lambda state: [state.expire(*one) for one in dead], secs)

    def _leases(self) -> list[tuple[Member, float]]:
        """The members of other processes, and how many seconds they have left."""
        now = self._clock.now()
        members = (self.head or NO_HEAD).state.members.values()
        return [
            (member, self._beats.get(member.id, (0, now))[1] + member.ttl - now)
            for member in members
            if member.process != self._process
        ]

    async def change(self, make: Callable[[RunState], T], secs: float) -> T:
        """Makes a change, with those of others who wait, and gives what `make` returned for the state it was made to."""
        change = _Change(make)
        self._waiting.append(change)
        try:
            async with self._turn:
                if not change.made:
                    await self._commit(secs)
        finally:
            if not change.made:
                self._waiting.remove(change)
        return change.made[0]

    async def _commit(self, secs: float) -> None:
        races = 0
        while True:
            head = self.head or await self.refresh(secs)
            state = head.state.copy()
            kept = self._kept
            if kept is not None and (kept.born != head.born or kept.seq > head.seq):
                # Its data is gone. Who repeats a write that was heard of, and whose answer was lost, must not do it again.
                state.recover(kept.state)
            changes = tuple(self._waiting)
            results = [change.make(state) for change in changes]
            if await self._set(head, state, secs):
                self._kept = None
                break
            races += 1
            if races >= _AT_ONCE:
                first, longest = _PAUSE_SECS
                await self._pause(random.uniform(0, min(first * 2**races, longest)))
        for change, result in zip(changes, results, strict=True):
            change.made.append(result)
        self._waiting = [change for change in self._waiting if not change.made]

    async def _set(self, head: Head, state: RunState, secs: float) -> bool:
        born = head.born or secrets.token_hex(4).encode()
        data = pack(born, state)
        if data == head.data:
            return True
        self._on_its_way = data, state
        try:
            seq = await self._publish(data, head.seq)
        finally:
            self._on_its_way = None
        if seq is None:
            if self.head is head:  # who was faster has not been heard of yet
                await self.refresh(secs)
            return False
        if self.head is head:
            self._take(Head(seq, data, state))
        return True

    def _take(self, head: Head) -> Head:
        old = self.head
        if old is not None and old.born == head.born and head.seq <= old.seq:
            return old
        if old is not None and old.born and old.born != head.born:
            self._kept = old
        self.head = head
        if old is None or old.life != head.life:
            now = self._clock.now()
            known = self._beats
            self._beats = {
                member.id: seen
                if (seen := known.get(member.id)) is not None and seen[0] == member.heartbeat
                else (member.heartbeat, now)
                for member in head.state.members.values()
            }
        self._learnt(head, old)
        if old is not None and old.born and old.born != head.born:
            self._lost()
        return head

    async def _pause(self, secs: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(secs, lambda: None if over.done() else over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()
