"""The tree of errors, and the errors that end a session cleanly.

    AiohooksError
     ├─ OutOfRangeError                       the input has ended: a clean end
     ├─ StopRequestedError (RuntimeError)     a stop was requested: a clean end
     │   ├─ ProducerFinishedError             the producers of a wait have finished
     │   └─ PublisherFinishedError            no publisher is left that could reach the step
     ├─ AbortedError                          the run was lost and can be repeated: recovered
     │   └─ UpdateConflictError               other runs kept replacing the run's variable
     ├─ UnavailableError                      a service is temporarily unavailable: recovered
     │   └─ StoreUnavailableError             the engine of a step store is unavailable
     │       ├─ StoreRefusedError             the engine denies access: waiting does not help
     │       └─ StoreResetError               the engine has lost the data of the run
     ├─ StoreDamagedError                     the stored data of a run cannot be read
     ├─ RecoveryExhaustedError                the session was used after recovery gave up
     ├─ FeedsLostError                        a recovery has undone steps and lost their feeds
     ├─ SessionClosedError (RuntimeError)     the session is not open
     ├─ NestedRunError (RuntimeError)         `run`, `aclose` or `join` would wait for its caller
     ├─ WrongLoopError (RuntimeError)         used from another event loop or thread
     ├─ NotReadyError (RuntimeError)          something is missing after initialization
     ├─ SessionNotReadyError (TimeoutError)   a worker waited too long for the chief
     ├─ UnsupportedSystemError (RuntimeError) the operating system lacks a feature
     ├─ InvalidArgumentError (ValueError)     an argument is invalid
     ├─ InvalidHookError (TypeError)          not a hook, or not a coroutine where one is needed
     ├─ HookCancelledError                    other code than its caller cancelled a hook
     ├─ HookGroupClosedError (RuntimeError)   the hook group is not entered, or was left
     ├─ HookTimeoutError (TimeoutError)       a hook took longer than its `timeout`
     ├─ EffectError (RuntimeError)            an effect was recorded at the wrong time or place
     ├─ SessionStalledError (TimeoutError)    an activity exceeded a watchdog's limit
     ├─ GraphError (ValueError)               a graph cannot be built or planned
     ├─ GraphFinalizedError (RuntimeError)    a graph was changed after `begin`
     ├─ FetchError (ValueError)               a fetch or feed is unknown to the graph
     ├─ FeedConflictError (RuntimeError)      one node was fed twice
     ├─ NanLossDuringTrainingError (RuntimeError)
     ├─ StepTimeoutError (TimeoutError)       a step was not reached in time
     ├─ PublisherFailedError                  the publisher that should reach the step failed
     ├─ StepResetError                        the step was reset during a wait
     ├─ StoreClosedError                      the step store was closed
     ├─ StaleTermError                        another chief has taken over
     ├─ TaskDiedError                         the process of a chief or worker died
     └─ CheckpointError (OSError)             a checkpoint could not be written or read
         ├─ CorruptCheckpointError            the checkpoint does not verify
         ├─ CheckpointBusyError               another writer has the directory
         └─ CheckpointMismatchError           it belongs to another graph or other tracked objects

A class also derives from the builtin that a caller would expect. No other module defines public
errors.
"""

from __future__ import annotations

import copy
import logging
import reprlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    # The import of `pathlib` takes longer than that of this module with all the others.
    from pathlib import Path

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
    "StoreResetError",
    "StoreUnavailableError",
    "TaskDiedError",
    "UnavailableError",
    "UnsupportedSystemError",
    "UpdateConflictError",
    "WrongLoopError",
    "is_clean_end",
]

_logger = logging.getLogger("aiohooks")


class AiohooksError(Exception):
    """Base class of all errors that this library raises itself.

    They can be pickled and copied. A message of more than 2,000 characters is shortened in its
    middle, so that a large value does not hide the rest.
    """

    def __str__(self) -> str:
        return shortened(super().__str__(), 2_000)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, an error is rebuilt by `cls(*args)`, which fails for a class with required
        # keyword-only parameters. `state` has the attributes, which `copy` and `pickle` set after
        # `_restore`.
        reduced: Any = super().__reduce__()
        cls, args, *state = reduced
        return (_restore, (cls, args), *state)


def _restore(cls: type[AiohooksError], args: tuple[Any, ...]) -> AiohooksError:
    """Create an error of a class from the `args` of another one, for `copy` and `pickle`.

    The `__init__` of the class is not called, because its parameters differ from `args`. The caller
    sets the attributes of the error afterwards.
    """
    error = cls.__new__(cls, *args)
    # The nearest builtin base class is initialized, because some of them set attributes of their
    # own: `OSError` sets `errno`.
    builtin_base: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    builtin_base.__init__(error, *args)
    return error


class OutOfRangeError(AiohooksError):
    """Raised by user code when its input has ended.

    The session then ends cleanly and calls `end`.
    """


class StopRequestedError(AiohooksError, RuntimeError):
    """Raised by a `run` that begins after a stop request, and by waits that the stop ends.

    It ends the session cleanly.
    """


class ProducerFinishedError(StopRequestedError):
    """Raised by `until(..., producer=)` when the producers have ended and nothing is left to use.

    The producers have finished or were cancelled. If a producer failed, its error is raised
    instead. A background task that ends with a `ProducerFinishedError` has finished, too: the
    session continues, so that other tasks and steps can use the output of the task.
    """


class PublisherFinishedError(StopRequestedError):
    """Raised by a wait for a step when all publishers that could reach it have finished cleanly.

    If a publisher failed, the wait raises `PublisherFailedError` instead.
    """


class AbortedError(AiohooksError):
    """Raised by user code when a run was lost and can be repeated. The session recovers."""


class UpdateConflictError(AbortedError):
    """Raised by a run that reads and replaces a variable which other runs kept replacing.

    All attempts of the run have failed, and nothing was changed. Operations that only add to a
    variable (`adds_to=`) never conflict.
    """


class UnavailableError(AiohooksError):
    """Raised by user code when a service is temporarily unavailable. The session recovers."""


class StoreUnavailableError(UnavailableError):
    """Raised when the engine of a step store is unreachable or denies access.

    The error of the engine's client is the cause.
    """


class StoreRefusedError(StoreUnavailableError):
    """Raised when the engine of a step store denies access.

    The reason is a password, a permission, a version or a path. A first connection and a first
    session do not retry. A session that has run recovers, as from any `UnavailableError`.
    """


class StoreResetError(StoreUnavailableError):
    """Raised by a write to a run whose data the engine has lost.

    The run continues in a later epoch. The write is not made there, but if the data was lost after
    the write, the new step may include it. Call `acknowledge_loss` of the store, and restore your
    state from a checkpoint, as the session does when it recovers. Until then every write raises
    this error, and so does a wait of the chief, which stays the chief.

    Attributes:
        old: the last position that was seen before the loss.
        new: the position from which the run continues.
    """

    def __init__(
        self,
        message: str,
        *,
        old: tuple[int, int],
        new: tuple[int, int],
    ) -> None:
        super().__init__(message)
        self.old = old
        self.new = new


class StoreDamagedError(AiohooksError):
    """Raised when the stored data of a run is damaged, foreign or of another version.

    The session does not recover. The message says what to do: stop the processes of the run, then
    restore or delete it.

    Attributes:
        path: the file, key, subject or actor.
        found: the data found there.
        expected: the data expected there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        found: str = "",
        expected: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.found = found
        self.expected = expected


class RecoveryExhaustedError(AiohooksError):
    """Raised when a session is used again after its recovery gave up.

    The call in which recovery gave up raised the last error itself, with the history as notes. That
    error is the cause.
    """


class FeedsLostError(AiohooksError):
    """Raised by a recovery that cannot repeat feeds, with `RecoveryPolicy(on_lost_feeds="raise")`.

    The recovery went back to a checkpoint, which undoes the steps since then, and their feeds do
    not come again. Restart the program, and feed it from the step of the checkpoint. The cause is
    the error from which the session recovered.
    """


class SessionClosedError(AiohooksError, RuntimeError):
    """Raised when a session is used before it is entered or after it is closed."""


class NestedRunError(AiohooksError, RuntimeError):
    """Raised by a call that would wait for its own caller, a deadlock.

    Examples are `run` or `aclose` of a session in one of its hooks, and `aclose` or `join` in a
    background task for which it waits.
    """


class WrongLoopError(AiohooksError, RuntimeError):
    """Raised when an object is used from another event loop or thread than its own."""


class NotReadyError(AiohooksError, RuntimeError):
    """Raised by the check of a scaffold when something is missing after initialization."""


class SessionNotReadyError(AiohooksError, TimeoutError):
    """Raised when the chief has not initialized the variables after `max_wait_secs` of a worker."""


class UnsupportedSystemError(AiohooksError, RuntimeError):
    """Raised when the operating system lacks a feature that a part of the library needs.

    The message names the feature and an alternative.
    """


class InvalidArgumentError(AiohooksError, ValueError):
    """Raised for an invalid argument. The message has the value and what to give instead."""


class InvalidHookError(AiohooksError, TypeError):
    """Raised for an object in `hooks` that is no hook, or has a plain method for a coroutine."""


class HookCancelledError(AiohooksError):
    """Raised when other code than its caller cancelled a hook.

    The hook's `CancelledError` is the cause.
    """


class HookGroupClosedError(AiohooksError, RuntimeError):
    """Raised when a `HookGroup` that must be entered is used before that, or after it was left."""


class HookTimeoutError(AiohooksError, TimeoutError):
    """Raised when one call of a hook took longer than the hook's `timeout`."""


class EffectError(AiohooksError, RuntimeError):
    """Raised when an effect is recorded at the wrong time or in the wrong place.

    That is outside of a run, in a session that delivers no effects, or after the session has taken
    the effects of the step.
    """


class SessionStalledError(AiohooksError, TimeoutError):
    """Raised by `WatchdogHook` when an activity of a session exceeds its limit.

    The message names the waiting calls and tasks.
    """


class GraphError(AiohooksError, ValueError):
    """Raised for a graph that cannot be built or planned.

    Examples are a duplicate name, a cycle, and a value with two owners.
    """


class GraphFinalizedError(AiohooksError, RuntimeError):
    """Raised when a node is added to a finalized graph. Add nodes in `begin`."""


class FetchError(AiohooksError, ValueError):
    """Raised for fetches or feeds that do not fit the graph.

    A fetch or feed is unknown to the graph, a placeholder has no feed, or there is nothing to run.

    Attributes:
        name: the fetched or fed name, if it does not fit a step function and its result, otherwise
            None.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class FeedConflictError(AiohooksError, RuntimeError):
    """Raised when two hooks, or a hook and the caller, feed the same node.

    The message lists all conflicts.
    """


class NanLossDuringTrainingError(AiohooksError, RuntimeError):
    """Raised by `NanHook` when a watched value is not a number, or not finite."""


class StepTimeoutError(AiohooksError, TimeoutError):
    """Raised when a step was not reached in time.

    Attributes:
        wanted: the step of the wait.
        seen: the latest step seen.
        waited_secs: the duration of the wait.
    """

    def __init__(
        self,
        message: str,
        *,
        wanted: int,
        seen: int,
        waited_secs: float,
    ) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.seen = seen
        self.waited_secs = waited_secs


class PublisherFailedError(AiohooksError):
    """Raised by a wait when the publisher that should have reached the step failed.

    The error of the publisher is the cause.
    """


class StepResetError(AiohooksError):
    """Raised by a wait with `on_reset="raise"` when the step was reset.

    Attributes:
        old: the position before the reset.
        new: the position after it.
    """

    def __init__(
        self,
        message: str,
        *,
        old: tuple[int, int],
        new: tuple[int, int],
    ) -> None:
        super().__init__(message)
        self.old = old
        self.new = new


class StoreClosedError(AiohooksError):
    """Raised by a closed step store, and by waits that are pending when it is closed."""


class StaleTermError(AiohooksError):
    """Raised by a write of a chief after its lease has expired and another chief has taken over.

    Nothing was written.

    Attributes:
        term: the number of the term that has ended.
        newest: the number of the current term.
    """

    def __init__(
        self,
        message: str,
        *,
        term: int,
        newest: int,
    ) -> None:
        super().__init__(message)
        self.term = term
        self.newest = newest


class TaskDiedError(AiohooksError):
    """Raised by a launcher when the process of a task died and will not be restarted.

    An error that the function of the task raised reaches the caller unchanged instead.

    Attributes:
        task_id: the number of the task.
        exit_code: the exit code of its process, negative for a signal, or None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        task_id: int = -1,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.task_id = task_id
        self.exit_code = exit_code


class CheckpointError(AiohooksError, OSError):
    """Raised when a checkpoint could not be written or read.

    It has the `errno` of the failed system call. Earlier checkpoints are unchanged.
    """


class CorruptCheckpointError(CheckpointError):
    """Raised when a checkpoint, or every existing checkpoint, does not verify.

    The message names the file and the damage.

    Attributes:
        path: the directory of the checkpoint.
        reason: the damage.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.reason = reason


class CheckpointBusyError(CheckpointError):
    """Raised when another writer has the directory."""


class CheckpointMismatchError(CheckpointError):
    """Raised when an intact checkpoint does not fit this session.

    It has other variables, shapes or tracked objects.
    """


E = TypeVar("E", bound=AiohooksError)
T = TypeVar("T")


def is_clean_end(error: BaseException) -> bool:
    """Return whether a session that `error` leaves calls `end` and suppresses the error.

    These errors are `OutOfRangeError`, `StopAsyncIteration`, `StopIteration`, `StopRequestedError`,
    their subclasses, and groups that contain no others.

    A `StopIteration` that a coroutine or a generator raises is a failure: Python replaces it by a
    `RuntimeError`. It comes from a `next()` without a default that found nothing, which need not be
    the end of the session's input.
    """
    if isinstance(error, BaseExceptionGroup):
        # A group that also contains a failure must not be suppressed.
        group: Any = error  # pyright: ignore[reportUnknownVariableType]
        return all(map(is_clean_end, group.exceptions))
    clean_ends = (OutOfRangeError, StopRequestedError, StopAsyncIteration, StopIteration)
    return isinstance(error, clean_ends)


def failure_of(error: BaseException, what: str) -> BaseException:
    """Return `error`, or a `RuntimeError` with it as the cause if it is a `StopIteration`.

    Python itself replaces a `StopIteration` in this way if a coroutine or a generator raises it
    (PEP 479), but not if a plain function does. `what` names the function.
    """
    if not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{what} raised StopIteration")
    failure.__cause__ = error
    return failure


def next_feed(function: Callable[..., T], *args: Any) -> T:
    """Return the next feed, which is the result of a plain function.

    Raises:
        OutOfRangeError: the function raised `StopIteration`, the end of the feeds.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise OutOfRangeError(f"the feeds of {function!r} have ended") from error


def copy_error(error: E, message: str | None = None) -> E:
    """Return a copy of an error for another caller, with its cause and without its notes.

    A single object that is raised twice would collect the tracebacks of both callers.
    """
    copied = copy.copy(error)
    # The copy shares the list of notes, to which both callers would add.
    vars(copied).pop("__notes__", None)
    if message is not None:
        copied.args = (message,)
    copied.__cause__ = error.__cause__
    return copied


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """Return the end of a message about an unknown name: the most similar name, and all names."""
    # The names may be keys of a mapping, of several types. Only texts can always be sorted.
    names = sorted(map(str, known))
    if not names:
        return "nothing is known by name here"
    # This import takes a while, and only messages about errors need it.
    import difflib

    listed = ", ".join(names[:20])
    if len(names) > 20:
        listed += ", ..."
    hint = f"known are: {listed}"
    similar_names = difflib.get_close_matches(name, names, n=1)
    if similar_names:
        hint = f"did you mean {similar_names[0]!r}? {hint}"
    return hint


def missing_extra(feature: str, extra: str) -> ImportError:
    """Return the error that names the extra to install.

    Only the module that imports the package of the extra raises it.
    """
    return ImportError(
        f"{feature} needs a package that is not installed; pip install 'aiohooks[{extra}]'"
    )


class _ShortRepr(reprlib.Repr):
    """Makes a `repr` with only the first items of large containers, and other objects in full."""

    def __init__(self) -> None:
        super().__init__()
        # Eight items are enough for a shape or the names of some nodes. A batch of data, which has
        # hundreds of items, is shortened.
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8
        self.maxlevel = 3
        self.maxstring = 150
        self.maxlong = 100

    def repr_instance(self, x: object, level: int) -> str:
        # By default, the middle is cut out, where the `repr` of a hook or a store has the name.
        return repr(x)


_short_repr = _ShortRepr()


def safe_repr(value: object) -> str:
    """Return a shortened `repr(value)` for a message, even if `repr` raises.

    In full, a batch of data or a number of thousands of digits would hide the message.
    """
    try:
        text = _short_repr.repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return shortened(text, 1_000 if isinstance(value, BaseException) else 300)


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    # Half of the characters are from the beginning, and a third from the end, where a message says
    # what to do.
    return f"{text[: most // 2]} ... ({len(text):,} characters) ... {text[-most // 3 :]}"


def safe_str(value: object) -> str:
    """Return `str(value)` for a message, even if `str` raises."""
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose str raises {type(error).__name__}>"


def printable(text: str, max_length: int = 200) -> str:
    """Return text of a file or another process as one line of at most `max_length` characters.

    Control characters, which a terminal would obey, are escaped.
    """
    line = ""
    # Each character of the text becomes one or more of the line, so the rest is not needed.
    for char in text[: max_length + 1]:
        if char.isprintable():
            line += char
        else:
            line += char.encode("unicode_escape").decode("ascii")
    if len(line) <= max_length:
        return line
    return f"{line[: max_length - 3]}..."


def raise_unchanged(error: BaseException) -> NoReturn:
    """Raise an error that was raised before, such as in another task. Keep its cause and context.

    A plain `raise` would replace the context of the error by the exception that is being handled.
    `raise ... from None` would lose the cause of the error as well.
    """
    context = error.__context__
    try:
        raise error
    finally:
        set_context(error, context)
        # The traceback of the error refers to this frame, which would be a reference cycle.
        del error, context


def raise_failures(errors: list[BaseException], what: str) -> None:
    """Raise the failures of several calls, if there are any, and clear the list.

    A single failure is raised as it is, several as one flat group. But if one of them is no
    `Exception`, such as a KeyboardInterrupt, it alone is raised, and the others are logged.

    Args:
        errors: the failures.
        what: the end of the message of the group, after their number: "calls failed".
    """
    raised = next((error for error in errors if not isinstance(error, Exception)), None)
    if len(errors) == 1:
        raised = errors[0]
    try:
        if raised is not None:
            keep_errors(raised, [error for error in errors if error is not raised])
            raise_unchanged(raised)
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} {what}", flattened(errors))
    finally:
        # The traceback of the raised error refers to this frame, which would be a reference cycle.
        raised = None
        errors.clear()


def set_context(error: BaseException, context: BaseException | None) -> None:
    """Set the context of an error, even of a frozen dataclass that rejects attributes.

    If the chain of the new context comes back to the error, it is cut before the error, because it
    would be a circle. The interpreter does the same when it sets a context.
    """
    for link in contexts(context):
        if link.__context__ is error:
            BaseException.__setattr__(link, "__context__", None)
    BaseException.__setattr__(error, "__context__", None if context is error else context)


def contexts(error: BaseException | None) -> list[BaseException]:
    """Return an error, its context, the context of its context, and so on."""
    # Errors by id, in order. They may be unhashable.
    chain: dict[int, BaseException] = {}
    # Other libraries can make a circle of contexts, in which the loop ends at the first repetition.
    while error is not None and id(error) not in chain:
        chain[id(error)] = error
        error = error.__context__
    return [*chain.values()]


def keep_errors(raised: BaseException, errors: list[BaseException]) -> None:
    """Log the errors that `raised` replaces, and append them to its chain of contexts."""
    if not errors:
        return
    for error in errors:
        message = "a call failed, but %s is raised instead"
        _logger.error(message, type(raised).__name__, exc_info=error)
    chain = contexts(raised)
    chain_ids = {id(link) for link in chain}
    hidden_errors = [error for error in errors if id(error) not in chain_ids]
    for error in hidden_errors:
        # The context of such an error is often `raised`, because it was raised while that one was
        # handled. Cut its chain there: it is appended to the chain of `raised`, which would
        # otherwise be a circle.
        for link in contexts(error):
            if id(link.__context__) in chain_ids:
                set_context(link, None)
                break
    if len(hidden_errors) == 1:
        set_context(chain[-1], hidden_errors[0])
    elif hidden_errors:
        set_context(chain[-1], BaseExceptionGroup("hooks failed", hidden_errors))


def hook_cancelled_error(who: str, cause: BaseException) -> HookCancelledError:
    """Return the error of a call that was cancelled by other code than its caller.

    The `CancelledError` of the call, which is the cause, would look like a cancellation by the
    caller.
    """
    error = HookCancelledError(
        f"{who} was cancelled, and not by its caller; to end a call return or raise an error, to"
        " end a session request a stop"
    )
    error.__cause__ = cause
    return error


def add_note(error: BaseException, text: str) -> bool:
    """Add a note to an error that will be raised, and return whether the error has the note now.

    Unlike `error.add_note`, this never raises, because the error matters more than the note.
    """
    try:
        error.add_note(text)
    except Exception:
        # An error that is a frozen dataclass rejects a new attribute `__notes__`, but the dict of
        # its attributes can be changed. If the error has a `__notes__` that is no list, it stays.
        vars(error).setdefault("__notes__", [text])
    return text in notes_of(error)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error."""
    notes: object = vars(error).get("__notes__")
    return cast("list[str]", notes) if isinstance(notes, list) else []


def add_origin(error: BaseException, origin: str) -> None:
    """Add a note on the code that raised an error, unless the error has this note already."""
    _add_note_once(error, f"raised by {origin}")
    if isinstance(error, AttributeError):
        note_skipped_init(error)


def note_skipped_init(error: AttributeError) -> None:
    """Add a note if an attribute is missing because a class skips the `__init__` of aiohooks."""
    kind = type(error.obj)
    inits: list[Any] = [
        vars(base).get("__init__")
        for base in kind.__mro__[1:]
        if base.__module__.partition(".")[0] == "aiohooks"
    ]
    # These include the names of all attributes that the `__init__` of a base class sets.
    init_names = {
        name for init in inits if hasattr(init, "__code__") for name in init.__code__.co_names
    }
    if not init_names:
        return
    # A property that fails is reported by its own name, which no `__init__` sets. But if the object
    # has none of the attributes, no `__init__` was called.
    attributes = getattr(error.obj, "__dict__", init_names)
    if error.name in init_names or init_names.isdisjoint(attributes):
        _add_note_once(error, f"{kind.__name__}.__init__ does not call super().__init__()")


def _add_note_once(error: BaseException, text: str) -> None:
    """Add a note to an error, unless the error has a note with this text already."""
    if text not in notes_of(error):
        add_note(error, text)


def flattened(errors: Iterable[BaseException]) -> list[BaseException]:
    """Return the errors as a flat list, in which the members of each group replace the group.

    The notes of a group are added to its members.
    """
    flat: list[BaseException] = []
    for error in errors:
        if not isinstance(error, BaseExceptionGroup):
            flat.append(error)
            continue
        group: Any = error  # pyright: ignore[reportUnknownVariableType]
        # The members may be groups that have notes of their own, which come before those of this
        # group.
        members = flattened(group.exceptions)
        for member in members:
            for note in notes_of(group):
                _add_note_once(member, note)
        flat += members
    return flat
