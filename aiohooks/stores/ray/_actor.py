"""The actor that keeps a run on a Ray cluster: plain Python that runs without Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import NamedTuple

from aiohooks._core.clock import wait_woken, wake
from aiohooks.stores._protocol import Answer, Position, Request, Snapshot
from aiohooks.stores._run_state import RunState


class LongPoll(NamedTuple):
    """What a process waits for, and what it knows."""

    process: str
    threshold: int | None
    """The lowest step that the process waits for; None: no step."""
    epoch: int
    revision: int
    secs: float
    """After how long it is answered in any case."""


class StepActor:
    """Keeps one run in memory: its state, and one long poll of each process.

    Ray starts the actor again when its process or its node dies; it has lost everything then. Each
    call but `connect` has the `incarnation` that the process knows. If that is another one, the
    answer is None: the process connects again, with what it knows of the lost run.
    """

    def __init__(self) -> None:
        self.incarnation: str = secrets.token_hex(8)
        """A different one after each start; the `run_id` of the snapshots."""
        self.polls: dict[str, tuple[LongPoll, asyncio.Future[None]]] = {}
        """By process, each with the future that answers it."""
        self._state = RunState()

    # Remote calls.

    async def connect(self, known: Snapshot) -> Snapshot:
        """Return the run, for a process that knows this one; without an id it knows none."""
        if known.run_id not in ("", self.incarnation):
            self._state.follow(known)
            self._answer_satisfied()
        return self._state.snapshot(self.incarnation)

    async def apply(self, incarnation: str, request: Request) -> Answer | None:
        if incarnation != self.incarnation:
            return None
        answer = self._state.apply(request)
        if self._answer_satisfied():
            await asyncio.sleep(0)  # the waiters are answered before the writer
        return answer

    async def read(self, incarnation: str) -> Snapshot | None:
        if incarnation != self.incarnation:
            return None
        return self._state.snapshot(incarnation)

    async def long_poll(self, incarnation: str, poll: LongPoll) -> Snapshot | Position | None:
        """Return the run, or only the position if nothing else is new.

        The answer comes when the poll is satisfied, its time is up, or the process sends another
        one.
        """
        if incarnation != self.incarnation:
            return None
        await self.leave(poll.process)  # the new poll replaces an earlier one
        if not self._satisfies(poll):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            parked = (poll, waiter)
            self.polls[poll.process] = parked
            try:
                await wait_woken(waiter, poll.secs)
            finally:
                if self.polls.get(poll.process) is parked:
                    del self.polls[poll.process]
        if self._state.revision == poll.revision:
            return self._state.position
        return self._state.snapshot(incarnation)

    async def leave(self, process: str) -> None:
        """Answer the poll of a process, which is closing its store."""
        if process in self.polls:
            wake(self.polls[process][1])

    async def statistics(self) -> dict[str, int]:
        """Return the id of the actor's process, and the number of parked polls."""
        return {"pid": os.getpid(), "waiting": len(self.polls)}

    # Polls.

    def _satisfies(self, poll: LongPoll) -> bool:
        state = self._state
        epoch, step = state.position
        return (
            epoch != poll.epoch
            or state.revision != poll.revision
            or (poll.threshold is not None and step >= poll.threshold)
        )

    def _answer_satisfied(self) -> bool:
        """Answer the polls that are satisfied now; return whether there was one."""
        satisfied = [
            waiter
            for poll, waiter in self.polls.values()
            if not waiter.done() and self._satisfies(poll)
        ]
        for waiter in satisfied:
            wake(waiter)
        return bool(satisfied)
