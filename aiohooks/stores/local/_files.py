"""A run as it lies in the files of its directory, and everything that is done to them.

    quiet     the record of where the run is, as of the last change that nobody waited for; then the slots: for each process
              the lowest step that it waits for
    loud      the same record, as of the last change that somebody waited for, or that the file `state` tells of; it is watched,
              so that the change is one step with the news of it
    state     who publishes, who leads, how the last one left; replaced as a whole, before `loud` tells of it
    alive/    a file for each process, which tells of its end
    bells/    a named pipe for each process that cannot watch files

The run is where the later of the two records says. Whoever changes anything has the lock of the run, which is a `flock` on its
directory. A process may be killed at any moment: each change is one write of a few bytes or one renaming, which the kernel does
whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from aiohooks.errors import StoreDamagedError
from aiohooks.stores._protocol import MAX_STEP, Answer, Position, Request, Snapshot, Write, damaged_error
from aiohooks.stores._run_state import RunState
from aiohooks.stores.local import _liveness
from aiohooks.stores.local._directory import make_run_directory
from aiohooks.stores.local._notify import Bell, ring

_BODY = struct.Struct("<5Q")
_HALF = _BODY.size
_MAGIC = int.from_bytes(b"ahooks.1", "little")
SIZE = 2 * _HALF
"""Of a packed record."""


class Record(NamedTuple):
    """Where a run is. A later record is greater: nothing of it ever goes back, but the step in a new epoch."""

    position: Position
    revision: int
    term: int


def made(epoch: int, step: int, revision: int, term: int) -> Record:
    """A record of four numbers; what `Record(Position(epoch, step), revision, term)` does, in half the time."""
    position = tuple.__new__(Position, (epoch, step))  # pyright: ignore[reportUnknownMemberType]
    return tuple.__new__(Record, (position, revision, term))  # pyright: ignore[reportUnknownMemberType]


def pack(epoch: int, step: int, revision: int, term: int) -> bytes:
    """The bytes of a record: everything twice, which tells a whole one from another quicker than a checksum would."""
    return 2 * _BODY.pack(_MAGIC, epoch, step, revision, term)


def unpack(data: bytes) -> Record | None:
    """The record at the beginning of `data`; None if it is not whole."""
    if len(data) < SIZE or data[:_HALF] != data[_HALF:SIZE]:
        return None
    magic, epoch, step, revision, term = _BODY.unpack_from(data)
    return made(epoch, step, revision, term) if magic == _MAGIC else None


def what_is(data: bytes) -> str:
    """What lies where a record should be, for a message."""
    first, second = data[:_HALF], data[_HALF:SIZE]
    if len(data) < SIZE:
        return f"{len(data)} bytes"
    if not first.startswith(b"ahooks."):
        return f"something else, which begins with {first[:8]!r}"
    if first != second:
        return "a record whose two copies differ"
    return f"a record of version {first[7:8]!r}"


class Seen:
    """The record last read at one place: mostly it is still the same, and need not be unpacked again. Threads may share it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._last: tuple[bytes, Record | None] = b"", None

    def put(self, data: bytes, record: Record) -> None:
        """Was written just now, or is what will be read next, as far as can be known."""
        self._last = data, record

    def get(self, data: bytes) -> Record | None:
        """The record that `data` is; None if it is not whole."""
        last = self._last
        if data != last[0]:
            self._last = last = data, unpack(data)
        return last[1]


NOBODY = 0
"""What a slot holds while its process waits for nothing; for a step, it holds the step and 1 more; step 0 is every step."""
_BELL = 1 << 62  # added to a slot: its process is told by its bell
_STEP = _BELL - 1
_SLOT = struct.Struct("<Q")
SLOT_SIZE = _SLOT.size
"""Of one slot."""


def packed_slot(value: int, *, bell: bool) -> bytes:
    """The bytes of one slot."""
    return _SLOT.pack(value | _BELL if bell else value)


def asked(slots: bytes, own: int, old: int, new: int) -> tuple[bool, int]:
    """Whether somebody is to be told that the step goes from `old` to `new`, and at which higher step somebody is next.

    Slot `own` is that of this process itself, which knows what it does.
    """
    due, later = False, MAX_STEP + 1
    for slot, (number,) in enumerate(_SLOT.iter_unpack(slots)):
        if number != NOBODY and slot != own:
            step = (number & _STEP) - 1
            if step > new:
                if step < later:
                    later = step
            elif step > old:
                due = True
            elif step == 0:
                return True, 0
    return due, later


def bells(slots: bytes, own: int) -> list[int]:
    """The slots, but for `own`, whose processes are told by their bells."""
    highest = slots[SLOT_SIZE - 1 :: SLOT_SIZE]  # of each slot the byte that the bell is in
    return [slot for slot, byte in enumerate(highest) if byte and slot != own] if any(highest) else []


_SLOTS_AT = 128  # where they begin in the file
_READ_TRIES = 100
_RECORD = "a whole record of version b'1'"
_STATE = "the state of the run, with its checksum"
_UNBORN = b"not begun"
"""What `loud` holds until all else is there: so an empty file is a damaged one."""


class RunFiles:
    """The files of one run, as one store has them open."""

    def __init__(self, directory: Path | None, run: str, process: str) -> None:
        """Opens nothing yet."""
        self.path: Path = Path()
        self.run_fd: int = -1
        """The run's directory: its lock belongs to who takes it (`Turns`), and so does its closing then."""
        self.slot: int = -1
        self.bell: Bell | None = None
        self._directory = directory
        self._run = run
        self._process = process
        self._quiet = -1
        self._loud = -1
        self._alive = -1
        self._size = _SLOTS_AT + 8 * 8  # so many bytes of `quiet` are read at once
        self._last_quiet = Seen()
        self._last_loud = Seen()
        self._calm = b"", 0, 0  # slots, in which epoch, and the lowest step that is waited for in them
        _all.add(self)

    def find(self) -> None:
        """Opens the run's directory, which it makes if it is not there; may block."""
        self.path = make_run_directory(self._directory, self._run)
        self.run_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def open(self) -> None:
        """Opens the files as well, which it makes if they are not there; may block."""
        self.find()
        self._quiet = self._opened("quiet", os.O_RDWR | os.O_CREAT)
        self._loud = self._opened("loud", os.O_RDWR | os.O_CREAT)

    def _opened(self, name: str, flags: int) -> int:
        # Not one that blocks until somebody else has opened it, too.
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self.run_fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise self._damaged(name, f"no file ({error.strerror})", "a file") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._damaged(name, "no file", "a file")
        return fd

    @property
    def deleted(self) -> bool:
        """Whether somebody has deleted the run since it was opened."""
        try:
            there, here = os.stat(self.path), os.fstat(self.run_fd)
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    @property
    def evicted(self) -> bool:
        """Whether somebody has taken this process out of those who have the run open: only who deletes the run does that."""
        if self._alive < 0:
            return False
        return os.fstat(self._alive).st_nlink == 0

    # Without the lock.

    def read(self) -> Record:
        """Where the run is."""
        quiet = None
        for _ in range(_READ_TRIES):
            quiet = self._last_quiet.get(os.pread(self._quiet, SIZE, 0))
            loud = self._last_loud.get(os.pread(self._loud, SIZE, 0))
            if quiet is not None and loud is not None:
                return quiet if quiet > loud else loud
            # Somebody is writing it in this moment, or it is damaged.
        raise self._no_record("quiet" if quiet is None else "loud")

    def told(self) -> Record:
        """Where the run was when somebody was last told; that is enough for who waits."""
        record = self._last_loud.get(os.pread(self._loud, SIZE, 0))
        return self.read() if record is None else record

    def load(self, record: Record) -> RunState:
        """The rest of what is known of the run, not older than `record`."""
        state = RunState()
        if record.revision:
            try:
                fd = self._opened("state", os.O_RDONLY)
            except FileNotFoundError:
                raise self._damaged("state", "nothing", _STATE) from None
            with open(fd, "rb") as file:
                data = file.read()
            if data[:9] != b"%08x " % crc32(data[9:]):
                raise self._damaged("state", f"{len(data)} bytes with another checksum", _STATE)
            try:
                state = RunState.load(data[9:])
            except ValueError as error:
                raise self._damaged("state", str(error), _STATE) from error
            if state.revision < record.revision:
                expected = f"revision {record.revision}, which the file loud tells of"
                raise self._damaged("state", f"revision {state.revision}", expected)
        state.position = record.position
        state.term = max(state.term, record.term)
        return state

    def _no_record(self, name: str) -> StoreDamagedError:
        return self._damaged(name, what_is(os.pread(self._quiet if name == "quiet" else self._loud, SIZE, 0)), _RECORD)

    def _damaged(self, name: str, found: str, expected: str) -> StoreDamagedError:
        path = self.path / name
        return damaged_error(self._run, str(path), found=found, expected=expected, delete=f"remove the directory {self.path}")

    def arm(self, step: int) -> Record:
        """Asks to be told when `step` is reached; 0: of everything. What was reached before that, the answer says.

        Asking comes first here and reading second; who advances writes first and then looks who has asked meanwhile. So one
        of the two sees what the other did, and nobody who waits needs the lock.
        """
        self._set_slot(step + 1)
        (epoch, seen), revision, term = record = self.read()
        # What will most likely be heard next: that is not unpacked then.
        expected = epoch, step or seen + 1, revision, term
        self._last_loud.put(pack(*expected), made(*expected))
        return record

    def disarm(self) -> None:
        """Asks for nothing any more."""
        self._set_slot(NOBODY)

    def _set_slot(self, value: int) -> None:
        os.pwrite(self._quiet, packed_slot(value, bell=self.bell is not None), _SLOTS_AT + 8 * self.slot)

    # All that follows is for who has the lock.

    def enter(self, *, by_bell: bool) -> Snapshot | None:
        """Takes its place among those who have the run open; None if the run was deleted while this waited for its turn."""
        if self.deleted:
            return None
        self._begin()
        snapshot = self.sweep(None)
        self.slot, self._alive = _liveness.claim(self.run_fd, self._process)
        if by_bell:
            self.bell = Bell(self.run_fd, self.slot)
        self._set_slot(NOBODY)
        return snapshot

    def _begin(self) -> None:
        first, loud = pack(1, 0, 0, 0), os.pread(self._loud, SIZE, 0)
        if not os.fstat(self._quiet).st_size:
            if loud not in (b"", _UNBORN) or "state" in os.listdir(self.run_fd):
                raise self._damaged("quiet", "nothing", _RECORD)
            os.pwrite(self._loud, _UNBORN, 0)
            os.pwrite(self._quiet, first.ljust(_SLOTS_AT, b"\0"), 0)
        elif loud != _UNBORN:
            return
        os.pwrite(self._loud, first, 0)

    def leave(self) -> None:
        """Gives its place back."""
        if self.slot >= 0:
            self._vacate(str(self.slot))
            self.slot = -1

    def _vacate(self, name: str) -> None:
        for path in (f"bells/{name}", f"alive/{name}"):
            _unlink(path, self.run_fd)
        os.pwrite(self._quiet, bytes(8), _SLOTS_AT + 8 * int(name))
        last = max((int(other) for other in _liveness.names(self.run_fd)), default=-1)
        os.ftruncate(self._quiet, _SLOTS_AT + 8 * (last + 1))

    def sweep(self, names: set[str] | None) -> Snapshot:
        """Finds out who of these (None: of all) has died, and takes their members out."""
        living, dead = _liveness.look(self.run_fd, names)
        record = self.read()
        state = self.load(record)
        processes = set(living.values()) if names is None else set(dead.values())
        lost = [member for member in state.members.values() if (member.process in processes) == (names is not None)]
        # The lease of a chief goes first: waiters are told the name of the last one, and that of a publisher says more.
        for member in sorted(lost, key=lambda member: -member.term):
            state.expire(member.id, member.heartbeat)
        self._save(state, record, changed=bool(lost))
        for name in dead:
            self._vacate(name)
        return state.snapshot()

    def advance(self, by: int, floor: Position, term: int) -> Position | None:
        """Adds to the step; None if that is refused, which `apply` explains."""
        record, slots = self._now()
        position, revision, ruling = record
        epoch, old = position
        step = old + by
        if (term and term != ruling) or position < floor or step > MAX_STEP:
            answer = self._write(record, slots, Write("advance", by, floor, term, "", 0))
            return answer.position if answer.status == "ok" else None
        calm, in_epoch, until = self._calm
        if (slots == calm and epoch == in_epoch and step < until) or not self._due(slots, epoch, old, step):
            return self._write_quiet(epoch, step, revision, ruling, slots, old)
        return self._tell(epoch, step, revision, ruling, slots)

    def _due(self, slots: bytes, epoch: int, old: int, new: int) -> bool:
        due, later = asked(slots, self.slot, old, new)
        self._calm = slots, epoch, later
        return due

    def apply(self, request: Request) -> tuple[Answer, Snapshot | None]:
        """Does what is asked for; with a snapshot of the run where that may have changed more than the mark."""
        record, slots = self._now()
        if isinstance(request, Write):
            return self._write(record, slots, request), None
        state = self.load(record)
        answer = state.apply(request)
        state.answers.clear()  # nothing is sent again here
        self._save(state, record, changed=answer.status == "ok")
        return answer, state.snapshot()

    def _write(self, record: Record, slots: bytes, write: Write) -> Answer:
        """What `RunState` does, on the record alone; a write whose answer is lost cannot be sent again here."""
        position = record.position
        epoch, step = max(position, write.floor)
        if write.kind == "advance":
            step += write.amount
        elif write.kind == "raise":
            step = max(step, write.amount)
        else:
            epoch, step = epoch + 1, write.amount
        if 0 < write.term < record.term:
            return Answer("stale", position, record.term, record.revision)
        if step > MAX_STEP:
            return Answer("full", position, record.term, record.revision)
        term = max(record.term, write.term)
        if (epoch, step) != position or term != record.term:
            if epoch != position.epoch or self._due(slots, epoch, position.step, step):
                position = self._tell(epoch, step, record.revision, term, slots)
            else:
                position = self._write_quiet(epoch, step, record.revision, term, slots, position.step)
        return Answer("ok", position, term, record.revision)

    def _save(self, state: RunState, record: Record, *, changed: bool) -> None:
        if changed:
            data = state.dump()
            fd = os.open("state.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=self.run_fd)
            with open(fd, "wb") as file:
                file.write(b"%08x %s" % (crc32(data), data))
            os.rename("state.new", "state", src_dir_fd=self.run_fd, dst_dir_fd=self.run_fd)
        # Also if who changed it last was killed before telling.
        if (state.revision, state.term) != (record.revision, record.term):
            self._tell(*record.position, state.revision, state.term, self._now()[1])

    def _write_quiet(self, epoch: int, step: int, revision: int, term: int, slots: bytes, old: int) -> Position:
        data = pack(epoch, step, revision, term)
        os.pwrite(self._quiet, data, 0)
        record = made(epoch, step, revision, term)
        self._last_quiet.put(data, record)
        # Has somebody asked since, without seeing this yet? If this process is killed here, its end tells them to look.
        since = os.pread(self._quiet, self._size - _SLOTS_AT, _SLOTS_AT)
        if since != slots and self._due(since, epoch, old, step):
            self._tell(epoch, step, revision, term, since)
        return record.position

    def _tell(self, epoch: int, step: int, revision: int, term: int, slots: bytes) -> Position:
        """Writes what somebody waits for: this is what wakes them."""
        data = pack(epoch, step, revision, term)
        os.pwrite(self._loud, data, 0)
        if ringing := bells(slots, self.slot):
            ring(self.run_fd, ringing)
        record = made(epoch, step, revision, term)
        self._last_loud.put(data, record)
        return record.position

    def _now(self) -> tuple[Record, bytes]:
        """Where the run is, and the slots."""
        quiet = os.pread(self._quiet, self._size, 0)
        while len(quiet) == self._size:
            self._size *= 2  # there may be more
            quiet = os.pread(self._quiet, self._size, 0)
        told = self._last_loud.get(os.pread(self._loud, SIZE, 0))
        record = self._last_quiet.get(quiet[:SIZE])
        if record is None:
            raise self._no_record("quiet")
        if len(quiet) < _SLOTS_AT or len(quiet) % SLOT_SIZE:
            raise self._damaged("quiet", f"{len(quiet)} bytes", f"{_SLOTS_AT} bytes, and {SLOT_SIZE} for each slot")
        if told is None:
            raise self._no_record("loud")
        return (record if record > told else told), quiet[_SLOTS_AT:]

    def forget(self) -> None:
        """Deletes the run; what else lies in its directory stays, and is named in the error."""
        self.leave()
        for folder in ("alive", "bells"):
            for name in os.listdir(self.path / folder):
                _unlink(f"{folder}/{name}", self.run_fd)
            os.rmdir(folder, dir_fd=self.run_fd)
        for name in ("state.new", "state", "quiet", "loud"):
            _unlink(name, self.run_fd)
        os.rmdir(self.path)

    def close(self) -> None:
        """Closes what is open, but for the lock; harmless when that was done already."""
        if self.bell is not None:
            self.bell.close()
        if self._alive >= 0:
            _liveness.release(self._alive)
        for fd in (self._quiet, self._loud):
            if fd >= 0:
                os.close(fd)
        self._alive = self._quiet = self._loud = -1

    def after_fork(self) -> None:
        """In a child: closes what it has inherited; the file in `alive` sees to itself."""
        for fd in (self.run_fd, self._quiet, self._loud, -1 if self.bell is None else self.bell.fd):
            if fd >= 0:
                os.close(fd)
        self.run_fd = self._alive = self._quiet = self._loud = -1
        self.bell = None


def _unlink(path: str, run_fd: int) -> None:
    try:
        os.unlink(path, dir_fd=run_fd)
    except FileNotFoundError:
        return


_all: weakref.WeakSet[RunFiles] = weakref.WeakSet()


def _after_fork() -> None:
    for files in _all:
        files.after_fork()


os.register_at_fork(after_in_child=_after_fork)
