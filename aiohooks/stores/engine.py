"""The interface between a step store and its engine, in both directions.

`RunState` is the state of a run as an engine keeps it, and has the effect of each request. There is
no I/O in it, and no clock.
"""

from __future__ import annotations

import abc
import asyncio
import contextvars
import functools
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_type_hints

from aiohooks._core.clock import Clock
from aiohooks._core.waits import new_task, wait_done
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    EngineError,
    Expire,
    Join,
    LastExit,
    Lead,
    Leave,
    Member,
    Position,
    Report,
    Request,
    Snapshot,
    Write,
    logger,
)
from aiohooks.stores.base import WaitRegistry


class Engine(abc.ABC):
    """The place where a run is kept: a server, an actor, or files.

    An engine belongs to one store.

    Each method makes one attempt. The store does the rest: it repeats requests, waits, renews
    leases, combines advances and reconnects. Because requests are repeated, the engine must
    recognize a request that it has carried out already, as `RunState` does.

    A method raises `StoreUnavailableError` if the connection fails, or if the engine rejects the
    call for now: the store calls the method again over a new connection. It raises
    `StoreRefusedError` if the engine would reject the call again, and `StoreDamagedError` if the
    data is not that of a run: the store does not call the method again.
    """

    remote: ClassVar[bool] = True
    """Whether the engine is behind a connection that can be lost. The store then connects again
    after a loss, and finds dead processes by leases. Otherwise the store connects once, and the
    engine itself removes the members of dead processes.
    """
    connect_timeout: ClassVar[float] = 10.0
    """How many seconds the first connection may take, unless the user has given the store a
    `connect_timeout`.
    """
    link: EngineLink
    """The parts of the store that the engine uses, set by `attach`."""

    def attach(self, link: EngineLink) -> None:
        """Called once, when the store is made.

        Raises:
            InvalidArgumentError: an option of the engine does not fit the store, or its run.
        """
        self.link = link

    @abc.abstractmethod
    async def connect(self) -> Snapshot:
        """Connect, subscribe to reports, and then read the run. Make the run if there is none.

        When a process connects again, it already knows a run: `link.waits.known_run`. The engine
        has lost the data of the known run if

        - it has no run now,
        - its run has another `Snapshot.run_id`, or
        - its run is an older copy of the known run.

        In these cases, continue the known run: call `RunState.follow` with it on the state of the
        run with the other id, or else on a new `RunState`. The continued run must have another id
        than the known run.

        Requests and reports check the id as well: if the engine's run has another id than the
        snapshot that this method has returned, they raise `StoreUnavailableError`. So does a
        request that `RunState` answers with "lost". The store then connects again.

        Returns:
            The state of the run, with its id.
        """

    async def watch(self) -> None:  # noqa: B027 - only if it is `remote`
        """Report positions and snapshots until the connection fails."""

    @abc.abstractmethod
    async def request(self, request: Request) -> Answer:
        """Send a request, and return its answer.

        If the answer is lost, the store sends the request again. The engine must then return the
        same answer, and must not apply the request twice.
        """

    @abc.abstractmethod
    async def read(self) -> Snapshot:
        """Read the run."""

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        """Advance without suspending, and return the new position.

        The arguments are those of a `Write`. Return None if the engine cannot advance so now: the
        store then sends a request.
        """
        return None

    def subscribe(self, step: int | None) -> None:  # noqa: B027 - an engine may report every step
        """Report positions from `step` on, which is the lowest step with a waiter in this process.

        `step` is 0 while a wait is for any change: report every position. It is None without a
        waiter: no report of a position is needed.
        """

    @abc.abstractmethod
    async def delete(self) -> None:
        """Delete the run, even if it is damaged, connected or not."""

    @abc.abstractmethod
    async def disconnect(self) -> None:
        """Release the resources of `connect`, even if `connect` has failed.

        Do not raise an error if the connection is broken.
        """

    async def close(self) -> None:
        """Disconnect for the last time. The store limits the time that this may take."""
        await self.disconnect()


@dataclass(frozen=True, slots=True)
class EngineLink:
    """The parts of a store that its engine uses.

    The engine may use them only in the event loop of the store.
    """

    run: str
    """The name of the run."""
    process: str
    """The name of this process, which is the `writer` of its requests. Several stores of a process
    have different names.
    """
    clock: Clock
    """The clock of the store's event loop."""
    heartbeat: float
    """The seconds without a report after which the engine tests its connection."""
    connect_timeout: float
    """How many seconds the first connection may take."""
    waits: WaitRegistry
    """The waits of this process, which the engine only reads: `latest` is the latest position that
    this process knows, `known_run` the latest state of the run, and `waiters.lowest` the lowest
    step with a waiter. Without a waiter, `waiters.lowest` is above all steps.
    """
    tasks: StoreTasks
    """The tasks of the store and of its engine. The store cancels them before it calls `close`."""
    observe: Callable[[Report], None]
    """The engine calls this to report the position or the state of the run, or an error. All calls
    and waits raise the error from then on. A position or a state that is older than the latest one
    is ignored.
    """


class StoreTasks:
    """The tasks of a store: they run in no session's context, and end with the store."""

    def __init__(self, run: str) -> None:
        self.running: dict[asyncio.Task[Any], None] = {}
        """The tasks that have not ended, in the order in which they were started."""
        self._run = run

    def spawn(self, coro: Coroutine[Any, Any, None], purpose: str) -> asyncio.Task[None]:
        """Start a task, and log the error that ends it, if any. Its name contains `purpose`."""
        task = new_task(coro, f"step store {self._run}: {purpose}", contextvars.Context())
        self.running[task] = None
        task.add_done_callback(self._on_done)
        return task

    def ensure_running(
        self,
        task: asyncio.Task[None] | None,
        work: Callable[[], Coroutine[Any, Any, None]],
        purpose: str,
    ) -> asyncio.Task[None]:
        """Return the task if it still runs. Otherwise start the work in a new one."""
        if task is None or task.done():
            return self.spawn(work(), purpose)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        del self.running[task]
        error = None if task.cancelled() else task.exception()
        # An `EngineError` is not logged here: it ends the connection, which logs it.
        if error is not None and not isinstance(error, EngineError):
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def cancel(self, secs: float) -> None:
        """Cancel all tasks, and wait for them, `secs` seconds at most."""
        tasks = tuple(self.running)
        for task in tasks:
            task.cancel()
        await wait_done(tasks, secs)


_ENCODER = json.JSONEncoder(separators=(",", ":"))
_START = Position(1, 0)
_MAX_WRITERS = 1024
"""The number of writers whose last answers are kept. Beyond it, the state drops the answer of the
writer that has been silent for longest.
"""


class LastAnswer(NamedTuple):
    """The answer to the last write or exit of a writer."""

    seq: int
    """The number of the write or exit."""
    position: Position


class RunState:
    """The state of a run. An engine applies one request after another to it.

    An engine whose server has a language of its own implements the same rules in that language.
    """

    def __init__(self) -> None:
        """Begin a run. `dump` stores all attributes, by their names."""
        self.position: Position = _START
        self.term: int = 0
        """The number of the latest term, 0 before the first."""
        self.leader: str = ""
        """The process that the latest term was granted to."""
        self.ready: int = 0
        """The latest term whose chief has initialized the run, 0 before the first."""
        self.revision: int = 0
        """A number that grows with every change of a field other than the position."""
        self.members: dict[str, Member] = {}
        """The members by their ids."""
        self.last_exit: LastExit | None = None
        self.exits: int = 0
        """The number of exits so far."""
        self.answers: dict[str, LastAnswer] = {}
        """The last answer to each writer. The writer that has been silent for longest is first."""

    def apply(self, request: Request) -> Answer:
        """Apply the request, or reject it and change nothing."""
        if isinstance(request, Write):
            return self._write(request)
        if isinstance(request, Join):
            self._join(request.member)
        elif isinstance(request, Lead):
            return self._lead(request.member)
        elif isinstance(request, Expire):
            self._expire(request)
        else:
            self._leave(request)
        return self._answer("ok")

    def follow(self, lost: Snapshot) -> None:
        """Continue a lost run in this state.

        Each process of the run calls this with the last snapshot that it knows of the lost run. The
        new epoch is later than each epoch of the lost run, so within an epoch the step never
        decreases. The first process that calls this decides on the step, unless a chief has already
        done so. The chief of the latest term remains the chief. The members remain, too, until
        their leases run out.
        """
        epoch, step = self.position
        has_chief = self.term > 0 and self.term >= lost.term
        # This state is still new, so its step does not count.
        if self.position == _START and not has_chief:
            step = lost.position.step
        self.position = Position(max(epoch, lost.position.epoch + 1), step)
        if self.term < lost.term:
            self.term = lost.term
            self.leader = lost.leader
            # Only chiefs have a term. These belong to earlier terms: remove them.
            self.members = {id: member for id, member in self.members.items() if not member.term}
        for member in lost.members:
            # Do not add a member that has left since. A process that connects again announces its
            # members before it reports an exit. So if the state has an answer to an exit of the
            # process, the process has announced all its members, and a missing member has left.
            has_returned = f"{member.process}/" in self.answers
            if not has_returned and not self._is_term_over(member.term, member.process):
                self.members.setdefault(member.id, member)
        self.revision += 1

    def snapshot(self, run_id: str = "") -> Snapshot:
        """Return the state as a value. The engine adds the id of the run."""
        is_ready = self.term > 0 and self.ready == self.term
        return Snapshot(
            self.position,
            self.term,
            self.leader,
            is_ready,
            self.revision,
            tuple(self.members.values()),
            self.last_exit,
            run_id,
        )

    def _answer(self, status: Any) -> Answer:
        """Return an answer with the current position and term."""
        return Answer(status, self.position, self.term)

    # The effect of each request.

    def _write(self, write: Write) -> Answer:
        """Move the position, or answer why not.

        The answer is "lost" if data was lost, "stale" if the term of the writer is over, and "full"
        if the step would exceed `MAX_STEP`. A repeated write gets its first answer again, and
        changes nothing.
        """
        last = self._last_answer(write.writer)
        # A writer waits for each answer, so a write that is not newer is a repetition.
        if last is not None and last.seq >= write.seq:
            return Answer("ok", last.position, self.term)
        if write.floor > self.position:  # the writer knows a later position: data was lost
            return self._answer("lost")
        if self._is_term_over(write.term, write.writer):
            return self._answer("stale")
        target = write.target(self.position)
        if target.step > MAX_STEP:
            return self._answer("full")
        self.position = target
        self._keep_answer(write.writer, write.seq)
        return self._answer("ok")

    def _last_answer(self, writer: str) -> LastAnswer | None:
        """Return the last answer to a writer, and note that the writer is not silent."""
        last = self.answers.pop(writer, None)
        if last is not None:
            self.answers[writer] = last  # at the end of the dict now, see `answers`
        return last

    def _keep_answer(self, writer: str, seq: int) -> None:
        """Keep the current position as the last answer to a writer."""
        self.answers[writer] = LastAnswer(seq, self.position)
        if len(self.answers) > _MAX_WRITERS:
            del self.answers[next(iter(self.answers))]

    def _join(self, member: Member) -> None:
        """Register or renew a member. The revision grows if more than its heartbeat changes."""
        if self._is_term_over(member.term, member.process):
            # This chief was taken for dead, and its term is over: remove it.
            if self.members.pop(member.id, None) is not None:
                self.revision += 1
            return
        if member.ready and self.ready != member.term:
            self.ready = member.term
            self.revision += 1
        registered = self.members.get(member.id)
        heartbeat = 0 if registered is None else registered.heartbeat + 1
        renewed = member._replace(heartbeat=heartbeat)
        self.members[member.id] = renewed
        # A renewal that changes nothing but the heartbeat is no change of the run.
        if registered is None or registered._replace(heartbeat=heartbeat) != renewed:
            self.revision += 1

    def _leave(self, leave: Leave) -> None:
        """Remove a member, and record its exit if it has a name.

        A repeated request changes nothing.
        """
        last = self._last_answer(leave.writer)
        if last is not None and last.seq >= leave.seq:
            return
        self._keep_answer(leave.writer, leave.seq)
        removed = self.members.pop(leave.id, None)
        if leave.name:
            self._record_exit(leave.name, leave.step, leave.error, lost=False)
        elif removed is not None:
            self.revision += 1  # `_record_exit` does this, too

    def _expire(self, expire: Expire) -> None:
        """Remove a member and record it as lost, unless it was renewed since the heartbeat."""
        member = self.members.get(expire.id)
        if member is not None and member.heartbeat == expire.heartbeat:
            del self.members[expire.id]
            self._record_exit(member.name, self.position.step, "", lost=True)

    def _record_exit(self, name: str, step: int, error: str, *, lost: bool) -> None:
        """Record an exit as the last one of the run."""
        self.exits += 1
        self.last_exit = LastExit(self.exits, name, step, error, lost)
        self.revision += 1

    def _lead(self, member: Member) -> Answer:
        """Begin a term of the member, unless there is another chief."""
        if any(other.term and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        if member.id not in self.members:  # otherwise the request is repeated
            self.term += 1
            self.leader = member.process
            self.members[member.id] = member._replace(term=self.term)
            self.revision += 1
        return self._answer("ok")

    def _is_term_over(self, term: int, process: str) -> bool:
        """Return whether the term that the process had is over.

        It is false for the term 0, which stands for no term.
        """
        return term > 0 and (term, process) != (self.term, self.leader)

    # The state as bytes.

    def dump(self) -> bytes:
        """Return the state as JSON."""
        # The members are a list, because each member contains its id.
        return _ENCODER.encode({**vars(self), "members": list(self.members.values())}).encode()

    @classmethod
    def load(cls, data: bytes) -> RunState:
        """Return the state that `dump` returned.

        Raises:
            ValueError: `data` is not such a state.
        """
        state = cls()
        try:
            fields = json.loads(data)
            for name in ("position", "term", "leader", "ready", "revision", "exits"):
                default: Any = getattr(state, name)
                setattr(state, name, _decoded(type(default), fields[name]))
            members = [_decoded(Member, member) for member in fields["members"]]
            state.members = {member.id: member for member in members}
            if fields["last_exit"] is not None:
                state.last_exit = _decoded(LastExit, fields["last_exit"])
            for writer, answer in fields["answers"].items():
                state.answers[writer] = _decoded(LastAnswer, answer)
        except Exception as error:  # any error, because `data` comes from outside
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _decoded(kind: Any, value: Any) -> Any:
    """Convert a JSON value to this kind: int, float, str, bool, or a named tuple of these.

    All ints are steps or counts, from 0 to `MAX_STEP`. The only floats are the times of leases,
    which are above 0.

    Raises:
        ValueError: the value is of another kind, or out of range.
        TypeError: the value for a named tuple is not a list.
    """
    if hasattr(kind, "_fields"):  # a named tuple
        types = _field_types(kind)
        return kind(*(_decoded(type_, field) for type_, field in zip(types, value, strict=True)))
    if kind is float and type(value) is int:
        value = float(value)
    is_valid = type(value) is kind  # stricter than isinstance: True is no int here
    if kind is int:
        is_valid = is_valid and 0 <= value <= MAX_STEP
    if kind is float:
        is_valid = is_valid and value > 0
    if not is_valid:
        raise ValueError(f"{value!r:.50} is not a valid {kind.__name__}")
    return value


@functools.cache
def _field_types(kind: Any) -> tuple[Any, ...]:
    """Return the types of the fields of a named tuple."""
    return tuple(get_type_hints(kind).values())
