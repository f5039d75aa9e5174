"""The error tree, and what counts as a clean end.

    AiohooksError
     ├─ OutOfRangeError                     the input has ended: a clean end
     ├─ StopRequestedError (RuntimeError)   a stop was requested: a clean end
     │   ├─ ProducerFinishedError           the producers of a wait have finished
     │   └─ PublisherFinishedError          no publisher is left that could reach the step
     ├─ AbortedError                        the run was lost and can be repeated: recovered
     │   └─ UpdateConflictError other runs kept replacing a variable that this one replaces
     ├─ UnavailableError                    a service is temporarily unavailable: recovered
     │   └─ StoreUnavailableError           the engine of a step store is unavailable
     │       └─ StoreRefusedError           the engine refuses access: waiting does not help
     ├─ StoreDamagedError                   the stored data of a run cannot be read: not recovered
     ├─ RecoveryExhaustedError              the session was used after recovery gave up
     ├─ FeedsLostError                      a recovery has undone steps whose feeds do not come
                                            again
     ├─ SessionClosedError (RuntimeError)   the session is not open
     ├─ NestedRunError (RuntimeError)       `run`, `aclose` or `join` was called in what it waits
                                            for
     ├─ WrongLoopError (RuntimeError)       used from another event loop or thread
     ├─ NotReadyError (RuntimeError)        initialisation left something missing
     ├─ SessionNotReadyError (TimeoutError) a worker waited too long for the chief
     ├─ UnsupportedSystemError (RuntimeError) the system lacks what a part of the library needs
     ├─ InvalidArgumentError (ValueError)   an argument is invalid
     ├─ InvalidHookError (TypeError)        not a hook, or not a coroutine where one is needed
     ├─ HookCancelledError                  a hook was cancelled by other code
     ├─ HookGroupClosedError (RuntimeError) the hook group is not entered, or was left
     ├─ HookTimeoutError (TimeoutError)     a hook took longer than its `timeout`
     ├─ EffectError (RuntimeError)          an effect was recorded where none can be
     ├─ SessionStalledError (TimeoutError)  an activity exceeded a watchdog's limit
     ├─ GraphError (ValueError)             a graph cannot be built or planned
     ├─ GraphFinalizedError (RuntimeError)  a graph was changed after `begin`
     ├─ FetchError (ValueError)             a fetch or feed is unknown to the graph
     ├─ FeedConflictError (RuntimeError)    one node was fed twice
     ├─ NanLossDuringTrainingError (RuntimeError)
     ├─ StepTimeoutError (TimeoutError)     a step was not reached in time
     ├─ PublisherFailedError                the publisher that should have reached the step failed
     ├─ StepResetError                      the step was reset during a wait
     ├─ StoreClosedError                    the step store was closed
     ├─ StaleTermError                      another chief has taken over
     ├─ TaskDiedError                       the process of a chief or worker died
     └─ CheckpointError (OSError)           a checkpoint could not be written or read
         ├─ CorruptCheckpointError          it does not verify
         ├─ CheckpointBusyError             another writer has the directory
         └─ CheckpointMismatchError         it belongs to another graph or other tracked objects

A class also derives from the builtin that a caller would expect. No other module defines public
errors.
"""

from __future__ import annotations

import copy
import itertools
import reprlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path  # takes longer to import than all of this module

__all__ = [
    "AbortedError",
    "AiohooksError",
    "CheckpointBusyError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "EffectError",
    "FeedConflictError",
    "FeedsLostError",
    "FetchError",
    "GraphError",
    "GraphFinalizedError",
    "HookCancelledError",
    "HookGroupClosedError",
    "HookTimeoutError",
    "InvalidArgumentError",
    "InvalidHookError",
    "NanLossDuringTrainingError",
    "NestedRunError",
    "NotReadyError",
    "OutOfRangeError",
    "ProducerFinishedError",
    "PublisherFailedError",
    "PublisherFinishedError",
    "RecoveryExhaustedError",
    "SessionClosedError",
    "SessionNotReadyError",
    "SessionStalledError",
    "StaleTermError",
    "StepResetError",
    "StepTimeoutError",
    "StopRequestedError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreRefusedError",
    "StoreUnavailableError",
    "TaskDiedError",
    "UnavailableError",
    "UnsupportedSystemError",
    "UpdateConflictError",
    "WrongLoopError",
    "is_clean_end",
]


class AiohooksError(Exception):
    """Base of everything that this library raises on its own account. All of it can be pickled and
    copied.

    A message of more than 2,000 characters is shortened: no value in it, however large, hides what
    is said.
    """

    def __str__(self) -> str:
        return shortened(super().__str__(), 2_000)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as any exception, except that it is made again without the class's own `__init__`.

        That takes other arguments than `args` has, such as keyword-only ones.
        """
        reduced: Any = super().__reduce__()
        cls, args, *state = reduced
        return (_remake, (cls, args), *state)


def _remake(cls: type[AiohooksError], args: tuple[Any, ...]) -> AiohooksError:
    """Return an error with these `args` and without attributes, which follow."""
    error = cls.__new__(cls, *args)
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)
    return error


class OutOfRangeError(AiohooksError):
    """Raised by the user's code when its input has ended; leaves the session cleanly, `end` is
    called.
    """


class StopRequestedError(AiohooksError, RuntimeError):
    """Raised by a `run` that begins after a stop was requested, and by waits that the stop ends;
    leaves the session cleanly.
    """


class ProducerFinishedError(StopRequestedError):
    """Raised by `until(..., producer=)` when the producers have finished or were cancelled, and
    what they left is used up.

    A background task that ends with it has finished, too: it does not stop the session, whose other
    tasks and steps use what it has produced. A producer that failed gives its own error instead.
    """


class PublisherFinishedError(StopRequestedError):
    """Raised by a wait for a step when every publisher that could reach it has finished cleanly.

    A publisher that failed gives `PublisherFailedError` instead.
    """


class AbortedError(AiohooksError):
    """Raised by the user's code when a run was lost and can be repeated; the session recovers."""


class UpdateConflictError(AbortedError):
    """Raised by a run when, attempt after attempt, another run replaced a variable that it had read
    and replaces itself.

    Nothing was changed. Operations that only add to a variable (`adds_to=`) never conflict.
    """


class UnavailableError(AiohooksError):
    """Raised by the user's code when a service is temporarily unavailable; the session recovers."""


class StoreUnavailableError(UnavailableError):
    """Raised when the engine of a step store cannot be reached or refuses access; caused by the
    error of its client.
    """


class StoreRefusedError(StoreUnavailableError):
    """Raised when the engine of a step store refuses access: a password, permission, version or
    path.

    A first connection and a first session do not retry; a session that has run recovers, as from
    any `UnavailableError`.
    """


class StoreDamagedError(AiohooksError):
    """Raised when the stored data of a run is damaged, foreign or of another version; the session
    does not recover.

    The message says what to do: stop the processes of the run, then restore it or delete it.

    Attributes:
        path: the file, key, subject or actor.
        found: the data found there.
        expected: the data expected there.
    """

    def __init__(
        self, message: str, *, path: str = "", found: str = "", expected: str = ""
    ) -> None:
        super().__init__(message)
        self.path: str = path
        self.found: str = found
        self.expected: str = expected


class RecoveryExhaustedError(AiohooksError):
    """Raised when a session is used again after its recovery gave up.

    The call in which recovery gave up raised the last error itself, with the history as notes; it
    is the cause of this one.
    """


class FeedsLostError(AiohooksError):
    """Raised by a recovery that went back to a checkpoint, with
    `RecoveryPolicy(on_lost_feeds="raise")`.

    The steps since then are undone, and their feeds do not come again: start the program again, and
    feed it from the step of the checkpoint on. Its cause is the error from which the session
    recovered.
    """


class SessionClosedError(AiohooksError, RuntimeError):
    """Raised when a session is used before it was entered or after it was closed."""


class NestedRunError(AiohooksError, RuntimeError):
    """Raised by a call that would wait for its own caller, which would deadlock.

    That is `run` or `aclose` of a session in one of its hooks, and `aclose` or `join` in a
    background task that it waits for.
    """


class WrongLoopError(AiohooksError, RuntimeError):
    """Raised when an object is used from another event loop or thread than its own."""


class NotReadyError(AiohooksError, RuntimeError):
    """Raised when something is still missing after a session was initialised, by the scaffold's
    check.
    """


class SessionNotReadyError(AiohooksError, TimeoutError):
    """Raised when a worker waited `max_wait_secs` for the chief to initialise the variables."""


class UnsupportedSystemError(AiohooksError, RuntimeError):
    """The operating system lacks what a part of the library needs; the message says what, and what
    to use instead.
    """


class InvalidArgumentError(AiohooksError, ValueError):
    """Raised for an invalid argument; the message has the value and what to give instead."""


class InvalidHookError(AiohooksError, TypeError):
    """Raised when something in `hooks` is not a hook, or a method that must be a coroutine is
    not.
    """


class HookCancelledError(AiohooksError):
    """Raised when a hook was cancelled by other code than its caller; caused by its
    `CancelledError`.
    """


class HookGroupClosedError(AiohooksError, RuntimeError):
    """Raised when a `HookGroup` is used that has to be entered before, or that has been left."""


class HookTimeoutError(AiohooksError, TimeoutError):
    """Raised when one call of a hook took longer than the hook's `timeout`."""


class EffectError(AiohooksError, RuntimeError):
    """An effect was recorded outside of a run, in a session that delivers none, or after those of
    its step were taken.
    """


class SessionStalledError(AiohooksError, TimeoutError):
    """Raised by `WatchdogHook` when an activity of a session exceeds its limit; the message names
    the waiting calls and tasks.
    """


class GraphError(AiohooksError, ValueError):
    """Raised for a graph that cannot be built or planned: a duplicate name, a cycle, two owners of
    a value.
    """


class GraphFinalizedError(AiohooksError, RuntimeError):
    """Raised when a node is added to a graph that a session has finalized; only `begin` may add."""


class FetchError(AiohooksError, ValueError):
    """Raised for a fetch or a feed that the graph does not know, a placeholder left unfed, or a run
    that would run nothing.

    Attributes:
        name: the name that is fetched or fed, if it does not fit a step function and its result;
            otherwise None.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name: str | None = name


class FeedConflictError(AiohooksError, RuntimeError):
    """Raised when two hooks, or a hook and the caller, feed the same node; lists every conflict."""


class NanLossDuringTrainingError(AiohooksError, RuntimeError):
    """Raised by `NanHook` when a watched value is not a number, or not finite."""


class StepTimeoutError(AiohooksError, TimeoutError):
    """Raised when a step was not reached in time.

    Attributes:
        wanted: the step that was waited for.
        seen: the latest step seen.
        waited_secs: the duration of the wait.
    """

    def __init__(self, message: str, *, wanted: int, seen: int, waited_secs: float) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.seen = seen
        self.waited_secs = waited_secs


class PublisherFailedError(AiohooksError):
    """Raised by a wait when the publisher that should have reached the step failed; caused by its
    error.
    """


class StepResetError(AiohooksError):
    """Raised by a wait with `on_reset="raise"` when the step was reset.

    Attributes:
        old: the position before the reset.
        new: the position after it.
    """

    def __init__(self, message: str, *, old: tuple[int, int], new: tuple[int, int]) -> None:
        super().__init__(message)
        self.old = old
        self.new = new


class StoreClosedError(AiohooksError):
    """Raised by a closed step store, and by the waits that were pending when it was closed."""


class StaleTermError(AiohooksError):
    """Raised by a write of a chief whose lease has expired, after another chief has taken over;
    nothing was written.

    Attributes:
        term: the number of the term that has ended.
        newest: the number of the current term.
    """

    def __init__(self, message: str, *, term: int, newest: int) -> None:
        super().__init__(message)
        self.term: int = term
        self.newest: int = newest


class TaskDiedError(AiohooksError):
    """Raised by a launcher when the process of a task died and is not restarted (again).

    An error that the task's function raised is raised as it is.

    Attributes:
        task_id: the number of the task.
        exit_code: the exit code of its process, negative for a signal; None if unknown.
    """

    def __init__(self, message: str, *, task_id: int = -1, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.task_id: int = task_id
        self.exit_code: int | None = exit_code


class CheckpointError(AiohooksError, OSError):
    """Raised when a checkpoint could not be written or read, with the `errno` of the failed system
    call.

    Earlier checkpoints are unchanged.
    """


class CorruptCheckpointError(CheckpointError):
    """Raised when a checkpoint, or every existing checkpoint, does not verify; the message names
    the file and the damage.

    Attributes:
        path: the directory of the checkpoint.
        reason: the damage.
    """

    def __init__(self, message: str, *, path: Path | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.path: Path | None = path
        self.reason: str = reason


class CheckpointBusyError(CheckpointError):
    """Raised when another writer has the directory.

    Attributes:
        pid: the process that holds the directory, if known.
    """

    def __init__(self, message: str, *, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid: int | None = pid


class CheckpointMismatchError(CheckpointError):
    """Raised when an intact checkpoint does not fit this session: other variables, shapes or
    tracked objects.
    """


E = TypeVar("E", bound=AiohooksError)
T = TypeVar("T")

_CLEAN = (OutOfRangeError, StopRequestedError, StopAsyncIteration, StopIteration)


def is_clean_end(error: BaseException) -> bool:
    """Return whether leaving a session with `error` is a clean end: `end` is called and the error
    is swallowed.

    These are `OutOfRangeError`, `StopAsyncIteration`, `StopIteration`, `StopRequestedError`, their
    subclasses, and groups that contain only these. The `RuntimeError` that Python makes of a
    `StopIteration` inside a coroutine or a generator is a failure: somewhere a `next()` without a
    default has found nothing, which says nothing about the input of the session.
    """
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(map(is_clean_end, group.exceptions))
    return isinstance(error, _CLEAN)


def failure_of(error: BaseException, what: str) -> BaseException:
    """Return the error of a plain function that is called where Python's own rule for coroutines
    does not reach (PEP 479).
    """
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{what} raised StopIteration")
    failure.__cause__ = error
    return failure


def next_feed(function: Callable[..., T], *args: Any) -> T:
    """Return what a plain function gives as the next feed.

    Raises:
        OutOfRangeError: it has raised `StopIteration`, the end of the feeds.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise OutOfRangeError(f"the feeds of {function!r} have ended") from error


def copy_error(error: E, message: str | None = None) -> E:
    """Return a copy of an error, without its notes, for another caller: one object raised twice
    would collect both tracebacks.
    """
    twin = copy.copy(error)
    vars(twin).pop("__notes__", None)
    if message is not None:
        twin.args = (message,)
    twin.__cause__ = error.__cause__
    return twin


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """Return the end of a message about an unknown `name`: the nearest known name, and all known
    names.
    """
    names = sorted(map(str, known))
    if not names:
        return "nothing is known by name here"
    import difflib  # only for a message

    near = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return (f"did you mean {near[0]!r}? " if near else "") + f"known are: {listed}"


def missing_extra(feature: str, extra: str) -> ImportError:
    """Return the error that says which extra to install; raised by the one module that imports the
    extra's package.
    """
    return ImportError(
        f"{feature} needs a package that is not installed; pip install 'aiohooks[{extra}]'"
    )


class _Shortened(reprlib.Repr):
    """Shows a part of large containers, without making the text of all of them."""

    def repr_instance(self, x: object, level: int) -> str:
        return repr(x)


_shortened = _Shortened()
_shortened.maxlist = _shortened.maxtuple = _shortened.maxdict = _shortened.maxset = (
    _shortened.maxfrozenset
) = 8
_shortened.maxlevel, _shortened.maxstring, _shortened.maxlong = 3, 150, 100


def safe_repr(value: object) -> str:
    """Return `repr(value)` for a message, shortened: a batch of data, or a number of thousands of
    digits, would hide the message.

    Without it if it raises, as what the message is about matters more.
    """
    try:
        text = _shortened.repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return shortened(text, 1_000 if isinstance(value, BaseException) else 300)


def shortened(text: str, most: int) -> str:
    """Return a text without its middle, if it is longer than `most`: a message says at its end what
    to do.
    """
    return (
        text
        if len(text) <= most
        else f"{text[: most // 2]} ... ({len(text):,} characters) ... {text[-most // 3 :]}"
    )


def safe_str(value: object) -> str:
    """Return `str(value)` for a message; see `safe_repr`."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose str raises {type(error).__name__}>"


def printable(text: str, max_length: int = 200) -> str:
    """Return text of another process or of a file as one line of limited length, without what a
    terminal would obey.
    """
    escaped = (
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text[: max_length + 1]
    )
    line = "".join(escaped)
    return line if len(line) <= max_length else f"{line[: max_length - 3]}..."


def raise_unchanged(error: BaseException) -> NoReturn:
    """Raise an error that came from elsewhere, such as another task, with the cause and the context
    that it has.

    A plain `raise` replaces the context by the exception that is being handled, and `raise ... from
    None` also the cause.
    """
    context = error.__context__
    try:
        raise error
    finally:
        set_context(error, context)
        del error, context  # its traceback refers to this frame


def set_context(error: BaseException, context: BaseException | None) -> None:
    """Set the context of an error, also of one that refuses attributes, such as a frozen dataclass.

    A link that would make a circle is cut, as the interpreter does: whoever follows the contexts
    would never come to an end.
    """
    for link in contexts(context):
        if link.__context__ is error:
            BaseException.__setattr__(link, "__context__", None)
    BaseException.__setattr__(error, "__context__", None if context is error else context)


def contexts(error: BaseException | None) -> list[BaseException]:
    """Return an error, its context, the context of that and so on."""
    chain: dict[int, BaseException] = {}
    while error is not None and id(error) not in chain:
        chain[id(error)] = error
        error = error.__context__
    return [*chain.values()]


def hook_cancelled_error(who: str, cause: BaseException) -> HookCancelledError:
    """Return the error for a call that was cancelled by a third party: it must not vanish, nor look
    like the caller's.
    """
    error = HookCancelledError(
        f"{who} was cancelled, and not by its caller; to end a call return or raise an error, to"
        " end a session request a stop"
    )
    error.__cause__ = cause
    return error


def add_note(error: BaseException, text: str) -> bool:
    """Add a note to a passing error. Unlike its own `add_note` this never raises, as the error
    matters more than the note.

    Returns:
        Whether the error has the note now.
    """
    try:
        error.add_note(text)
    except Exception:
        # A frozen dataclass takes the entry, though not the attribute. `__notes__` that are no list
        # stay as they are.
        vars(error).setdefault("__notes__", [text])
    return text in notes_of(error)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    notes: object = vars(error).get("__notes__")
    return cast("list[str]", notes) if isinstance(notes, list) else []


def add_origin(error: BaseException, origin: str) -> None:
    """Add the origin of a passing error as a note, once."""
    note = f"raised by {origin}"
    if note not in notes_of(error):
        add_note(error, note)


def flattened(errors: Iterable[BaseException]) -> list[BaseException]:
    """Return the errors, with the members of groups in place of the groups; a group's notes go to
    its members.
    """
    found: list[BaseException] = []
    for error in errors:
        if isinstance(error, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", error)
            members = flattened(group.exceptions)
            for member, note in itertools.product(members, notes_of(group)):
                if note not in notes_of(member):
                    add_note(member, note)
            found.extend(members)
        else:
            found.append(error)
    return found
