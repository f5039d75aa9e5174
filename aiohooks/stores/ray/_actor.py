"""The actor that keeps a run on a Ray cluster: plain Python, which also runs without Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import NamedTuple

from aiohooks._core.clock import wait_woken, wake
from aiohooks.stores._protocol import Answer, Position, Request, Snapshot
from aiohooks.stores._run_state import RunState


class LongPoll(NamedTuple):
    """A request for the run that is answered as soon as there is something new in it."""

    process: str
    threshold: int
    """The lowest step that the process waits for, above all steps without a wait."""
    epoch: int
    """The latest epoch that the process knows."""
    revision: int
    """The revision of the latest snapshot that the process knows."""
    secs: float
    """The seconds after which the poll is answered in any case."""


class StepActor:
    """Keeps a run in memory: its state, and a long poll of each process.

    Ray starts the actor again when its process or its node dies. Its memory is lost then. Each call
    but `connect` has the `incarnation` that the process knows. The answer to another incarnation is
    None: the process connects again, and brings the last snapshot of the lost run.
    """

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        """A random word, new after each start. It is the `run_id` of the snapshots."""
        self.polls: dict[str, tuple[LongPoll, asyncio.Future[None]]] = {}
        """The parked polls by process, each with the future that its answer waits for."""
        self._state = RunState()

    # Remote calls.

    async def connect(self, known_run: Snapshot) -> Snapshot:
        """Connect a process, and return the snapshot of the run.

        The id of a run is the incarnation of the actor. If the process knows the run of an earlier
        incarnation, which has lost it, this one first continues that run. The id is empty if the
        process has not connected before.
        """
        has_connected_before = known_run.run_id != ""
        if has_connected_before and known_run.run_id != self.incarnation:
            self._state.follow(known_run)
            self._answer_satisfied_polls()
        return self._state.snapshot(self.incarnation)

    async def apply(self, incarnation: str, request: Request) -> Answer | None:
        """Apply a request to the run, and answer the polls that wait for its effect.

        Return None for a request to an earlier incarnation, as all calls do.
        """
        if incarnation != self.incarnation:
            return None
        answer = self._state.apply(request)
        if self._answer_satisfied_polls():
            # Let the answers to the polls leave before that to the writer: others wait for them.
            await asyncio.sleep(0)
        return answer

    async def read(self, incarnation: str) -> Snapshot | None:
        """Return the run."""
        if incarnation != self.incarnation:
            return None
        return self._state.snapshot(incarnation)

    async def long_poll(self, incarnation: str, poll: LongPoll) -> Snapshot | Position | None:
        """Return the run, or only the position if nothing else is new.

        The answer comes when the poll is satisfied, when its time is up, or when the process sends
        another poll.
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
        """Answer the parked poll of a process, if there is one, as it is closing its store."""
        if process in self.polls:
            _, waiter = self.polls[process]
            wake(waiter)

    async def statistics(self) -> dict[str, int]:
        """Return the id of the actor's process, and the number of parked polls."""
        return {"pid": os.getpid(), "waiting": len(self.polls)}

    # Polls.

    def _satisfies(self, poll: LongPoll) -> bool:
        """Return whether the run has a state, or has reached a step, that the poll waits for."""
        state = self._state
        epoch, step = state.position
        return epoch != poll.epoch or state.revision != poll.revision or step >= poll.threshold

    def _answer_satisfied_polls(self) -> bool:
        """Answer the polls that are satisfied now. Return whether there was one."""
        satisfied = [
            waiter
            for poll, waiter in self.polls.values()
            if not waiter.done() and self._satisfies(poll)
        ]
        for waiter in satisfied:
            wake(waiter)
        return bool(satisfied)
