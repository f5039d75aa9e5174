"""What passes between the library and a program's own code, as records; and tasks that know who
cancelled them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import types
from collections.abc import Awaitable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohooks as ah
from aiohooks.errors import is_clean_end
from aiohooks.testing._schedule_run import NumberedTask
from tests.fuzz.random_programs.programs import HookSpec

if TYPE_CHECKING:
    from tests.fuzz.random_programs.execution import ScriptedHook

HARNESS = "cancelled by the harness"
_inside: ContextVar[frozenset[int]] = ContextVar("inside", default=frozenset())
"""The sessions that have called the current code: as a hook, an operation or a background task."""


def called_by_library() -> bool:
    """Return whether the caller of this, a method of a task, was called by the library."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("aiohooks")


class TrackedTask(NumberedTask):
    """A task that tells the library's cancels from those of others."""

    pending: int | None = None
    """If other code than the library has cancelled it, and that was not thrown in yet: the depth
    from which.
    """
    balance = 0
    """The cancels of others, without those taken back by others."""
    own = 0
    """The library's cancels, without those taken back by it."""
    by_library = 0
    """How often the library has cancelled it or taken a cancel back: never, if it is a caller's."""
    is_caller = False
    is_miscounted = False
    """Whether others have taken back more cancels than were theirs."""
    is_stale = False
    """Whether its count is too high for good; constructs that read the count may go wrong then,
    without any library.
    """

    def __init__(self, coro: Any, **options: Any) -> None:
        self.stack: list[Record] = []
        """The calls that it is in, the outermost first."""
        super().__init__(coro, **options)

    def cancel(self, msg: Any = None) -> bool:
        accepted = super().cancel(msg)
        if accepted and called_by_library():
            self.own += 1
            self.by_library += 1
        elif accepted:
            self.balance += 1
            # A TaskGroup or timeout of the program may be behind it, at the latest the innermost
            # one.
            depths = [depth for depth, one in enumerate(self.stack) if one.what == "user"]
            certain = msg == HARNESS or not depths
            self.set_pending(-1 if certain else depths[-1])
            for one in self.stack[0 if certain else depths[0] :]:
                one.was_cancelled = True
        return accepted

    def excuse(self) -> None:
        """Let the calls that it is in end with a cancel: the program's own code has made one that
        cannot be told from others.
        """
        for one in self.stack:
            one.was_cancelled = True

    def set_pending(self, depth: int) -> None:
        self.pending = depth if self.pending is None else min(depth, self.pending)

    def uncancel(self) -> int:
        is_library = called_by_library()
        if (
            self.cancelling() <= 1
            and sys.version_info >= (3, 13)
            and (not is_library or getattr(self, "_must_cancel", False))
        ):
            self.pending = None  # it takes back one that is still to be thrown in, too
        if is_library:
            self.own -= 1
            self.by_library += 1
        else:
            self.balance -= bool(self.cancelling())
        return super().uncancel()


@dataclass(slots=True, eq=False)
class Record:
    """One call: of the library by the program, or the other way round."""

    what: str
    name: str
    session: SessionRecord | None
    token: int = 0
    is_library: bool = field(kw_only=True)
    hook: ScriptedHook | None = None
    attempt: int = 0
    epoch: int = field(init=False)
    began: int = 0
    ended: int | None = None
    outcome: BaseException | None = None
    value: Any = None
    task: asyncio.Task[Any] | None = None
    thrown: bool = False
    """Whether a CancelledError was thrown in."""
    was_cancelled: bool = False
    """Whether other code than the library may have cancelled the task from outside meanwhile."""
    depth: int = 0
    is_inside: bool = field(init=False)
    """Whether its session has called the code that it is part of."""
    is_outermost: bool = False
    """Whether it is a call of the library by a caller, and in no other: only the caller can have
    cancelled it.
    """
    external: list[BaseException] = field(default_factory=list)
    """Those that were thrown in because other code than the library had cancelled the task."""
    kept: list[BaseException] = field(default_factory=list)
    """Those of them that no code of the program had absorbed when this ended."""
    count: int = 0
    """The task's cancel count at the beginning."""
    own: int = 0
    count_error: int = 0
    """By how much the library has changed the task's cancel count."""
    left_cancel: bool = False
    """Whether the program's own code has left a cancel, as asyncio's task groups do from Python
    3.13 on if the count was too high: its task ends as cancelled even if this returns.
    """
    stray: bool = False
    """Whether the library has left a cancel that will be thrown in later."""

    def __post_init__(self) -> None:
        session = self.session
        self.epoch = -1 if session is None else session.epoch
        self.is_inside = session is not None and session.number in _inside.get()

    @property
    def cancelled(self) -> bool:
        return isinstance(self.outcome, asyncio.CancelledError)

    @property
    def error(self) -> BaseException | None:
        """What it ended with, unless that is a cancel."""
        return None if self.cancelled else self.outcome

    @property
    def may_be_cancelled(self) -> bool:
        """Whether a cancel may come out of this call of the library."""
        session = self.session
        body = None if session is None or self.what not in ("session", "group") else session.body
        if body is not None and body.outcome is self.outcome:
            return True  # the program's own code has raised it
        if (
            session is not None
            and self.what == "hooked"
            and (session.closing is not None or session.failed_in_background)
        ):
            return True  # its step function was interrupted, which may be noticed here first
        return self.was_cancelled if self.is_outermost else self.thrown

    @property
    def failed(self) -> bool:
        """Whether it ended with an error that is not only logged."""
        return self.outcome is not None and not self.is_logged

    @property
    def is_logged(self) -> bool:
        """Whether errors of this call are only logged."""
        return self.hook is not None and self.hook.spec.on_error == "log"

    def before(self, other: Record | None, *, ended: bool = False) -> bool:
        """Whether it ended before `other` began, or ended."""
        limit = None if other is None else other.ended if ended else other.began
        return self.ended is not None and limit is not None and self.ended < limit

    def __repr__(self) -> str:
        outcome = (
            "running"
            if self.ended is None
            else "returned"
            if self.outcome is None
            else f"{self.outcome!r}"
        )
        return f"{self.name}{f' of run {self.token}' if self.token else ''}: {outcome}"


@dataclass(slots=True, eq=False)
class SessionRecord:
    """What happened to one session."""

    specs: Sequence[HookSpec]
    number: int
    recovers: bool = field(kw_only=True)
    graph: bool = field(kw_only=True)
    session: Any = None
    variables: ah.Variables = field(default_factory=ah.Variables)
    record: Record | None = None
    """The whole block."""
    epoch: int = 0
    """How many raw sessions were announced to the hooks."""
    body: Record | None = None
    closing: int | None = None
    """When the first close began."""
    stop_asked: int | None = None
    failed_in_background: bool = False
    commits: int = 0
    replaced: int = 0
    values: dict[int, Any] = field(default_factory=dict)
    """What operation `a` gave last, for each run."""
    final: tuple[Any, Any, int] | None = None

    @property
    def body_error(self) -> BaseException | None:
        """What the body ended with, if that is to come out of the block; a session swallows what is
        a clean end.
        """
        error = None if self.body is None else self.body.outcome
        return (
            None
            if error is not None and self.session is not None and is_clean_end(error)
            else error
        )


class Recorder:
    """Keeps the records of one execution, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.logs: list[logging.LogRecord] = []
        self.sessions: list[SessionRecord] = []
        self.count: Iterator[int] = itertools.count(1)
        """Numbers for whatever happens."""
        self._external: list[tuple[asyncio.Task[Any], BaseException, int]] = []
        self._absorbed: list[BaseException] = []
        self._by_session: dict[int, list[Record]] = {}

    def watch(self, record: Record, coro: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """Await `coro`, and record what is thrown in and how it ends."""
        return _watched(self, record, coro)

    def begin(self, record: Record) -> None:
        task = record.task = asyncio.current_task()
        record.began = next(self.count)
        self.records.append(record)
        if isinstance(task, TrackedTask):
            record.depth = len(task.stack)
            record.is_outermost = (
                record.is_library
                and task.is_caller
                and not any(
                    one.what in ("hook", "queued", "op")
                    or (one.is_library and one.what not in ("session", "group"))
                    for one in task.stack
                )
            )
            record.own = task.own
            record.count, record.count_error = task.cancelling(), task.cancelling() - task.balance
            record.was_cancelled = bool(getattr(task, "_must_cancel", False))
            task.stack.append(record)

    def thrown(self, record: Record, error: BaseException) -> None:
        """Note a cancel that is thrown in; the outermost record of its task sees it first."""
        task = record.task
        record.thrown = True
        if isinstance(task, TrackedTask):
            if task.pending is not None:
                self._external.append((task, error, task.pending))
                task.pending = None
            if any(
                task is owner and error is one and depth < record.depth
                for owner, one, depth in self._external
            ):
                record.external.append(error)

    def ended(self, record: Record, error: BaseException | None) -> None:
        record.ended, record.outcome = next(self.count), error
        if record.what == "background" and record.session is not None:
            record.session.failed_in_background |= isinstance(error, Exception)
        task = record.task
        if isinstance(task, TrackedTask):
            task.stack.remove(record)
            must_cancel = bool(getattr(task, "_must_cancel", False))
            if record.what == "user":
                task.is_stale |= task.cancelling() > record.count and not isinstance(
                    error, asyncio.CancelledError
                )
                if task.is_stale and (must_cancel or isinstance(error, asyncio.CancelledError)):
                    task.excuse()
                if (
                    record.name in ("scope", "gather")
                    and record.cancelled
                    and task.own == record.own
                ):
                    # `gather` raises cancels of its own, which anyio does not know as the scope's
                    task.excuse()
                passed = bool(record.external) and isinstance(error, asyncio.CancelledError)
                if task.cancelling() - record.count < task.own - record.own + passed:
                    # anyio takes back one cancel too many if its task group is cancelled while a
                    # child is busy.
                    task.is_miscounted = True
                    self._absorbed += record.external
            if not must_cancel:
                # what was not thrown in before the task runs on is never thrown: `gather` does so
                task.pending = None
            if record.is_library:
                change = task.cancelling() - task.balance - record.count_error
                record.count_error = 0 if task.is_miscounted else change
                record.stray = must_cancel and task.pending is None
            elif must_cancel:
                record.left_cancel = True
                if any("scope" in one.name or "anyio" in one.name for one in task.stack):
                    # A cancel that asyncio has repeated has not the message by which anyio knows
                    # its own.
                    task.excuse()
                task.set_pending(
                    -1 if record.external else record.depth
                )  # left behind by the program's own code
        if record.external and not isinstance(error, asyncio.CancelledError):
            if record.is_library and not getattr(task, "is_miscounted", False):
                record.kept = [
                    one
                    for one in record.external
                    if not any(one is other for other in self._absorbed)
                ]
            self._absorbed += record.external

    def of(self, session: SessionRecord) -> list[Record]:
        """Return the records of a session."""
        if not self._by_session:
            for one in self.records:
                if one.session is not None:
                    self._by_session.setdefault(one.session.number, []).append(one)
        return self._by_session.get(session.number, [])

    def last_attempt(self, run: Record) -> list[Record]:
        """Return the calls of the program that a call of the library has made, those of the last
        attempt of a run.

        A recovery announces a new session to the hooks; what fails then is the run's outcome, too.
        """
        assert run.session is not None
        if run.what == "until":
            return [run.value] if run.value.began else []
        own = [one for one in self.of(run.session) if not one.is_library]
        calls = [one for one in own if one.token == run.token]
        if run.what == "run":
            announced = [
                one for one in own if one.name == "after_create_session" and run.began < one.began
            ]
            calls += [one for one in announced if one.before(run, ended=True)]
        last = max((one.epoch for one in calls), default=0)
        return [one for one in calls if one.epoch == last]

    def reported(self) -> tuple[list[BaseException], str]:
        """Return the errors that came out of the library or were logged, and the texts of notes and
        log.
        """
        results = [
            one.outcome for one in self.records if one.is_library and one.outcome is not None
        ]
        logged = [
            one.exc_info[1] for one in self.logs if one.exc_info and one.exc_info[1] is not None
        ]
        found = reachable([*results, *logged])
        texts = [one.getMessage() for one in self.logs]
        texts += [note for error in found for note in getattr(error, "__notes__", ())]
        opened = [one.session for one in self.sessions if one.session is not None]
        texts += [f"{session.stop_reason}" for session in opened]
        return found, "\n".join(texts)


def flat(errors: Iterable[BaseException | None]) -> list[BaseException]:
    """Return the errors with the members of groups in place of the groups."""
    found: list[BaseException] = []
    for error in errors:
        if isinstance(error, BaseExceptionGroup):
            found += flat(error.exceptions)
        elif error is not None:
            found.append(error)
    return found


def reachable(errors: Iterable[BaseException]) -> list[BaseException]:
    """Return the errors, and all that are their causes, contexts and members."""
    found: dict[int, BaseException] = {}
    todo = list(errors)
    while todo:
        error = todo.pop()
        if id(error) not in found:
            found[id(error)] = error
            todo += [one for one in (error.__cause__, error.__context__) if one is not None]
            todo += getattr(error, "exceptions", ())
    return list(found.values())


@types.coroutine
def _watched(
    recorder: Recorder, record: Record, coro: Coroutine[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    recorder.begin(record)
    error: BaseException | None = None
    inside = _inside.get()
    if record.session is not None and record.what in ("hook", "queued", "op", "background"):
        _inside.set(inside | {record.session.number})
    try:
        while True:
            try:
                waiting = coro.send(None) if error is None else coro.throw(error)
            except StopIteration as stop:
                recorder.ended(record, None)
                return stop.value
            try:
                yield waiting
                error = None
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as thrown:
                if isinstance(thrown, asyncio.CancelledError):
                    recorder.thrown(record, thrown)
                error = thrown
    except GeneratorExit:
        raise
    except BaseException as raised:
        recorder.ended(record, raised)
        raise
    finally:
        error = None
        _inside.set(inside)
