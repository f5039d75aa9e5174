"""The state of a run as the latest message of a subject: the format of the message, and its compare-and-set loop.

Nothing here knows the client of NATS.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohooks._aio.clock import Clock, sleep
from aiohooks._aio.waits import Backoff
from aiohooks.errors import StoreUnavailableError
from aiohooks.stores._protocol import MAX_STEP, Position, Snapshot, logger
from aiohooks.stores._run_state import RunState

T = TypeVar("T")
# Everything before the state: the format, the run id, the revision and the heartbeats, the position.
_PREFIX = re.compile(rb"1 (\w{0,64}) (\d{1,16})\.(\d{1,20}) (\d{1,16})\.(\d{1,16}) ")
_IMMEDIATE_ATTEMPTS = 3  # lost races in a row before the first pause
_BACKOFF = Backoff(initial_secs=0.008, max_secs=0.05)


class ForeignMessageError(StoreUnavailableError):
    """A message of a run that no store of this version wrote. It is damage only if it is still the latest when read again."""


class LatestMessage:
    """The latest message of a run; the state in it is decoded when it is needed.

    Attributes:
        seq: the message's number in the stream; 0 if the run has no message.
        data: the message.
        position: the position of the run.
        run_id: a random word made with the run's first message; with another one, the server has lost the run meanwhile.
        revision_key: changes with everything but the position.
    """

    __slots__ = ("_state", "data", "position", "revision_key", "run_id", "seq")

    def __init__(self, seq: int, data: bytes, state: RunState | None = None) -> None:
        """Decode the prefix of the message.

        Raises:
            ForeignMessageError: the message does not begin as ours do.
        """
        self.seq: int = seq
        self.data: bytes = data
        self._state = state
        prefix = _PREFIX.match(data)
        if prefix is None:
            raise _foreign(data)
        run_id, revision, heartbeats, epoch, step = prefix.groups()
        self.position: Position = Position(int(epoch), int(step))
        # Both are in the state as well, which may be decoded much later.
        if max(self.position) > MAX_STEP or b'"position":[%b,%b],' % (epoch, step) not in data:
            raise _foreign(data)
        self.run_id: bytes = run_id
        self.revision_key: tuple[bytes, int, bytes] = run_id, int(revision), heartbeats

    @property
    def state(self) -> RunState:
        """The state of the run.

        Raises:
            ForeignMessageError: the message is not one of ours.
        """
        if self._state is None:
            try:
                self._state = RunState.load(self.data.split(b" ", 4)[4])
            except ValueError as error:
                raise _foreign(self.data) from error
        return self._state


def encode_message(run_id: bytes, state: RunState) -> bytes:
    """Encode a run: the format, the run id, the revision, the position, then the whole state."""
    heartbeats = sum(member.heartbeat for member in state.members.values())
    return b"1 %b %d.%d %d.%d %b" % (run_id, state.revision, heartbeats, *state.position, state.dump())


def decode_message(seq: int, data: bytes) -> LatestMessage:
    """Decode all of a message.

    Raises:
        ForeignMessageError: the message is not one of ours.
    """
    message = LatestMessage(seq, data)
    _ = message.state
    return message


def _foreign(data: bytes) -> ForeignMessageError:
    return ForeignMessageError(f"a message of {len(data)} bytes, which begins with {data[:50]!r}")


NO_MESSAGE = LatestMessage(0, encode_message(b"", RunState()))
"""Stands for the latest message of a run that has none."""


class CompareAndSet:
    """The latest state of a run that this process knows, and its updates.

    Updates of this process are made one after the other: concurrent writes were combined by the store.

    `latest` is the latest known message, None while nothing is known.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        fetch: Callable[[float], Awaitable[LatestMessage]],
        publish: Callable[[bytes, int], Awaitable[int | None]],
        on_latest: Callable[[LatestMessage, LatestMessage | None], None],
        on_data_lost: Callable[[], None],
        recover: Callable[[RunState, RunState], None],
    ) -> None:
        """Start without any knowledge of the run.

        Args:
            clock: measures the pauses after lost races.
            fetch: reads the latest message, within so many seconds.
            publish: writes a message if the latest one has the given number, and returns its own; None if it has not.
            on_latest: called with each newer message, and the one before it.
            on_data_lost: called when the server has lost data.
            recover: called before the first update after that, with the server's state, to change, and the latest known one.
        """
        self.latest: LatestMessage | None = None
        self._passed_over = Position(0, 0)  # the position of a message before the one that was expected to be the latest
        self._backup: LatestMessage | None = None  # the latest before the connection or the server's data was lost
        self._clock = clock
        self._fetch = fetch
        self._publish = publish
        self._on_latest = on_latest
        self._on_data_lost = on_data_lost
        self._recover = recover
        self._lock = asyncio.Lock()
        self._in_flight: tuple[bytes, RunState] | None = None

    def reset(self) -> None:
        """Forget the latest message, for a new connection."""
        if not self.data_lost:
            self._backup = self.latest or self._backup
        self.latest = None

    @property
    def data_lost(self) -> bool:
        """Whether the server has lost data that this process knows, and has not got it back yet."""
        backup, latest = self._backup, self.latest
        if backup is None or latest is None or not backup.run_id:
            return False
        return backup.run_id != latest.run_id or backup.seq > latest.seq

    def receive(self, seq: int, data: bytes, is_last: bool) -> None:
        """Take a message that the server has republished; unless it `is_last`, a newer one is already queued.

        Others can publish to that subject as well. What they write is found here (`ForeignMessageError`), or by the next write.
        """
        message, latest = LatestMessage(seq, data), self.latest
        only_moved = latest is not None and message.revision_key == latest.revision_key
        if latest is not None and message.run_id == latest.run_id:
            before = max(latest.position, self._passed_over)
            if seq > latest.seq:
                contradicts = message.position < before
            else:
                is_newer = message.position > before or message.revision_key[1] > latest.revision_key[1]
                contradicts = is_newer or (seq == latest.seq and data != latest.data)
            if contradicts:
                self.reset()  # one of them is not the server's, or it has lost the other: connecting again compares
                return self._on_data_lost()
            if seq <= latest.seq:
                return
        if only_moved and not is_last:
            self._passed_over = message.position  # the next message has it as well
            return
        if (mine := self._in_flight) is not None and mine[0] == data:
            message = LatestMessage(seq, *mine)
        elif not only_moved:  # otherwise waiters wake sooner if the state is not decoded
            _ = message.state
        self._set_latest(message)

    async def refresh(self, secs: float) -> LatestMessage:
        """Read the latest message, within so many seconds."""
        before = self.latest
        fetched = await self._fetch(secs)
        now = self.latest
        if now is not None and now is not before and now.run_id == fetched.run_id and now.seq >= fetched.seq:
            return now  # received meanwhile
        if before is not None and before.run_id and (fetched.seq < before.seq or fetched.run_id != before.run_id):
            if not self.data_lost:
                self._backup = before
            self.latest = fetched
            self._on_data_lost()
            return fetched
        return self._set_latest(fetched)

    def snapshot(self) -> Snapshot:
        latest = self.latest or NO_MESSAGE
        return latest.state.snapshot(latest.run_id.decode())

    async def update(self, apply: Callable[[RunState], T], secs: float) -> T:
        """Apply an update to the state, and return what `apply` returned.

        `apply` is called again when another process was faster; the server has `secs` seconds for each answer.
        """
        async with self._lock:
            lost_races = 0
            while True:
                latest = self.latest or await self.refresh(secs)
                try:
                    state, run_id, backup = latest.state.copy(), latest.run_id, self._backup if self.data_lost else None
                    known = None if backup is None else backup.state
                except ForeignMessageError as error:
                    logger.warning("ignored what others have published as the server's: %s", error)
                    self.latest = self._backup = None
                    continue
                if backup is not None and known is not None:
                    if backup.run_id == run_id:  # only the latest messages are lost: with another id the others notice it, too
                        state.mark_older()
                        run_id = b""
                    self._recover(state, known)
                result = apply(state)
                if await self._compare_and_set(latest, run_id or secrets.token_hex(4).encode(), state, secs):
                    self._backup = None
                    return result
                lost_races += 1
                if lost_races >= _IMMEDIATE_ATTEMPTS:
                    await sleep(_BACKOFF.pause_secs(lost_races - _IMMEDIATE_ATTEMPTS + 1), self._clock)

    async def _compare_and_set(self, latest: LatestMessage, run_id: bytes, state: RunState, secs: float) -> bool:
        """Publish the state if `latest` is still the latest message; return whether it was."""
        data = encode_message(run_id, state)
        if data == latest.data:
            return True
        self._in_flight = data, state
        try:
            seq = await self._publish(data, latest.seq)
        finally:
            self._in_flight = None
        if seq is None:
            if self.latest is latest:  # the faster one's message has not arrived yet
                await self.refresh(secs)
            return False
        if self.latest is latest:
            self._set_latest(LatestMessage(seq, data, state))
        return True

    def _set_latest(self, message: LatestMessage) -> LatestMessage:
        before = self.latest
        if before is not None and before.run_id == message.run_id and message.seq <= before.seq:
            return before
        knew_of_loss, self.latest, self._passed_over = self.data_lost, message, message.position
        if before is not None and before.run_id not in (b"", message.run_id) and not knew_of_loss:
            self._backup = before
            self._on_data_lost()
        else:
            self._on_latest(message, before)
        return message
