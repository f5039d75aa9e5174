"""Draining, stopping and cancelling sessions on SIGINT, SIGTERM or other signals.

The handlers are installed with `signal.signal` and not with the loop's `add_signal_handler`: they
run between two instructions, so the third signal ends a process whose loop is blocked, and handlers
that were added to the loop stay installed.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import enum
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from signal import Signals
from typing import Any

from aiohooks._core.activity import logger
from aiohooks._core.clock import TimerHandle, call_later
from aiohooks._core.fork import call_after_fork
from aiohooks._core.validate import check_secs
from aiohooks._core.waits import current_task
from aiohooks.errors import StopRequestedError
from aiohooks.session.coordinator import Coordinator, Requests


class Escalation(enum.IntEnum):
    """The effect of a signal in a session. Each signal, and the end of a time limit, is one step
    further. Sessions that a task has entered inside each other are cancelled together.
    """

    DRAIN = 1
    STOP = 2
    CANCEL = 3
    EXIT = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalPolicy:
    """Which signals stop a session, and how long it may take to end.

    The first signal requests a stop: the current step finishes and the session ends cleanly, with a
    last save if a hook saves. The second signal cancels the session: it calls `close` of every
    hook, but not `end`, and does not save. The third signal ends the process immediately.

    Args:
        signals: the signals to handle.
        step_secs: how long the current step may continue after the first signal. Then it is
            abandoned, nothing of it is kept unless it is committed, and the session ends cleanly.
            None sets no limit.
        grace_secs: how long the session may take to end after the first signal, before it is
            cancelled as by a second signal. None sets no limit. After that,
            `stop_grace_period_secs` of the session is the limit, plus 5 s if the engine of its step
            store is unreachable.
        drain_secs: how long the session may take to finish accepted work. The first signal then
            requests a drain, as `AsyncMonitoredSession.request_drain` does. A second signal, or the
            end of this time, acts like the first signal without a drain, and so on. None turns this
            off.
    """

    signals: tuple[Signals, ...] = (signal.SIGINT, signal.SIGTERM)
    step_secs: float | None = None
    grace_secs: float | None = None
    drain_secs: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "signals", tuple(map(Signals, self.signals)))
        for name in ("step_secs", "grace_secs", "drain_secs"):
            check_secs(getattr(self, name), name, optional=True)


def may_handle(number: Signals) -> bool:
    """Return whether nothing but sessions handles the signal, in this thread: it would end the
    program otherwise.
    """
    handler = signal.getsignal(number)
    free = handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), LoopSignals)
    return free and threading.current_thread() is threading.main_thread()


class StopOnSignal:
    """Drains or stops one session when a signal arrives."""

    def __init__(self, policy: SignalPolicy, coordinator: Coordinator) -> None:
        """Take the coordinator of the session that it stops."""
        self.policy: SignalPolicy = policy
        self.requests: Requests = coordinator.requests
        self.task: asyncio.Task[Any]
        """The task that entered the session. The second signal cancels it."""
        self.number: Signals | None = None
        """The signal that is the reason of the stop or the drain, if it is one."""
        self.escalation: Escalation | None = None
        self.is_cancelled: bool = False
        self.timers: list[TimerHandle] = []
        self.coordinator: Coordinator = coordinator
        self._begun: Escalation | None = None
        """The escalation that the loop has begun. It follows `escalation`, which the signal handler
        sets between any two instructions.
        """

    def install(self) -> Callable[[], None]:
        """Install the signal handlers, and return the function that removes them."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "%s: handle_signals has no effect outside the main thread, which alone gets"
                " signals; leave it out, and call request_stop() of the session from there",
                self.requests.label,
            )
            return lambda: None
        self.task = current_task()
        loop = asyncio.get_running_loop()
        handlers = _handlers_of_loops.get(loop) or LoopSignals(loop)
        handlers.add_session(self)
        return functools.partial(handlers.remove_session, self)

    @property
    def next_escalation(self) -> Escalation:
        """The effect of the next signal."""
        if self.escalation is not None:
            return Escalation(self.escalation + 1)
        if self.policy.drain_secs is None or self.requests.stopped:
            return Escalation.STOP
        return Escalation.DRAIN

    def advance(self, number: Signals) -> None:
        """Record the next step that the signal leads to. This is safe in a signal handler."""
        requests = self.requests
        escalation = self.next_escalation
        if escalation is Escalation.EXIT:
            # Other sessions have not come so far.
            return
        self.escalation = escalation
        reason = f"{number.name} received"
        if escalation is Escalation.DRAIN:
            earlier_reason = requests.drain_reason
            requests.record_drain(reason)
        else:
            earlier_reason = requests.stop_reason
            requests.record_stop(reason)
        if earlier_reason is None:
            self.number = number

    def begin(self, number: Signals, handlers: LoopSignals) -> None:
        """Begin in the loop what `advance` has recorded.

        `handlers` are notified when the time for it is over, by timers that end with the session.
        """
        if self._begun is self.escalation:
            return  # opening the session, after the signal and before this call, has begun it
        self._begun = self.escalation
        policy = self.policy
        end_period = functools.partial(handlers.end_period, self, number, self.escalation)
        if self.escalation is Escalation.DRAIN:
            self.requests.begin_drain()
            self.timers.append(call_later(policy.drain_secs, end_period))
            return
        if self.escalation is Escalation.STOP:
            logger.info("%s: stopping: %s received", self.requests.label, number.name)
            self.coordinator.owner.log_wait_for_end()
        self.requests.end_waits()
        if self.escalation is Escalation.STOP:
            abandoned = StopRequestedError(
                f"{number.name} received, and the step took longer than {policy.step_secs} s more"
            )
            end_step = functools.partial(self.coordinator.owner.end_run, abandoned)
            self.timers.append(call_later(policy.step_secs, end_step))
            self.timers.append(call_later(policy.grace_secs, end_period))


class LoopSignals:
    """The signal handlers of one loop, shared by its sessions: each signal is for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = contextvars.copy_context()
        self._previous: dict[Signals, Any] = {}
        self._sessions: list[StopOnSignal] = []
        self._received: list[Signals] = []
        """All signals so far."""
        self._has_cancelled = False
        """Whether a signal has cancelled any session."""
        self._has_asked_previous = False
        """Whether the previous handler of the signal was asked what ends beside the sessions."""
        self._exit_error: BaseException | None = None
        """The error that ends the program when the sessions are closed, if anything does."""
        self._wakeup_signal: signal.Signals | None = _let_signals_wake(loop)
        self._wakeup_fd: int = _wakeup_fd()
        """The file descriptor that wakes the loop. Other code may set another one later."""
        _handlers_of_loops[loop] = self
        call_after_fork(self)

    def add_session(self, session: StopOnSignal) -> None:
        for number in session.policy.signals:
            if number not in self._previous:
                self._install(number, session.requests.label)
        self._sessions.append(session)
        # A session that is opened later gets the signals that it has missed.
        for number in self._received:
            session.advance(number)
            session.begin(number, self)
        if session.escalation is Escalation.CANCEL:
            self._loop.call_soon(self._cancel_sessions)

    def remove_session(self, session: StopOnSignal) -> None:
        if session.escalation is Escalation.CANCEL:
            # The callback of the signal may not have run yet.
            self._cancel_sessions()
        self._sessions.remove(session)
        for timer in session.timers:
            timer.cancel()
        if session.number is not None:
            _last_signals[self._loop] = session.number
        wanted = {number for other in self._sessions for number in other.policy.signals}
        self._restore(number for number in self._previous if number not in wanted)
        if not self._sessions:
            self._leave_loop()

    def _leave_loop(self) -> None:
        """Leave the loop behind its last session. If a signal is to end the program as well, that
        happens when the current task has ended.
        """
        self._stop_waking()
        del _handlers_of_loops[self._loop]
        if self._has_cancelled:
            self._ask_previous_handler()
        if self._exit_error is not None:
            # Raised from a callback, it makes the runner cancel the remaining tasks and wait for
            # them. If this is the main task, the runner's own callback must have run: it would end
            # that wait.
            current_task().add_done_callback(functools.partial(_exit, self._exit_error))

    def _stop_waking(self) -> None:
        """Remove the handler of `_let_signals_wake`. A file descriptor that other code has set in
        the meantime stays: the loop would unset it with its last handler.
        """
        if self._wakeup_signal is None:
            return
        descriptor = _wakeup_fd()
        self._loop.remove_signal_handler(self._wakeup_signal)
        if descriptor != self._wakeup_fd:
            signal.set_wakeup_fd(descriptor)

    def _install(self, number: Signals, label: str) -> None:
        previous: Any = signal.getsignal(number)
        if previous is signal.SIG_IGN:
            # The parent process wants it ignored, as `nohup` and the `&` of a script do.
            return
        try:
            if previous is None:
                raise ValueError("it is handled outside of Python")
            signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            logger.warning(
                "%s: %s cannot be handled here, and is left alone: %s", label, number.name, error
            )
            return
        self._previous[number] = previous

    def _restore(self, numbers: Iterable[Signals]) -> None:
        for number in tuple(numbers):
            previous = self._previous.pop(number)
            # A handler that was installed in the meantime stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: object) -> None:
        # Runs between any two instructions of the main thread, so it does no more than record the
        # stop, which a step that computes is then the last to miss, and wake the loop.
        received = Signals(number)
        try:
            if self._sessions:
                self._advance(received)
            else:
                # The last session has just been removed: it is for the previous handler.
                self._call_soon(signal.raise_signal, received)
        except RuntimeError:
            # The loop was closed, and its sessions never were.
            self._restore(self._previous)
            _handlers_of_loops.pop(self._loop, None)
            signal.raise_signal(number)

    def _call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *args, context=self._context)

    def _advance(self, received: Signals) -> None:
        """Move every session to its next escalation, or kill the process.

        The process is killed if the next escalation of all sessions is the exit. Otherwise, the
        escalations are recorded in the signal handler, and the event loop begins them.
        """
        if all(session.next_escalation is Escalation.EXIT for session in self._sessions):
            _kill_process(received)
        self._received.append(received)
        for session in self._sessions:
            session.advance(received)
        self._call_soon(self._begin, received)

    def _begin(self, received: Signals) -> None:
        for session in self._sessions:
            session.begin(received, self)
        self._cancel_sessions()

    def end_period(
        self, session: StopOnSignal, number: Signals, escalation: Escalation | None
    ) -> None:
        """Let a session advance when its time for `escalation` is over, if no signal has done
        that.
        """
        if session.escalation is not escalation:
            return
        following = session.next_escalation
        option = "drain_secs" if escalation is Escalation.DRAIN else "grace_secs"
        secs = getattr(session.policy, option)
        status = session.coordinator.status()
        what = "%s s after %s, the %s of its SignalPolicy, comes the %s of %s"
        logger.warning(what, secs, number.name, option, following.name.lower(), status)
        session.advance(number)
        if following is Escalation.CANCEL:
            for other in self._sessions:
                if other.task is session.task:
                    other.escalation = following
        session.begin(number, self)
        self._cancel_sessions()

    def _cancel_sessions(self) -> None:
        """Cancel the tasks all of whose sessions have come so far."""
        not_due = {
            session.task
            for session in self._sessions
            if session.escalation is not Escalation.CANCEL
        }
        due = [
            session
            for session in self._sessions
            if session.task not in not_due and not session.is_cancelled
        ]
        if not due:
            return
        # The previous handler may cancel tasks, too.
        cancelling = {session.task: session.task.cancelling() for session in due}
        for session in due:
            session.is_cancelled = True
            logger.warning("cancelling %s", session.coordinator.status())
        self._has_cancelled = True
        number = self._received[-1]
        _last_signals[self._loop] = number
        if not not_due:
            self._ask_previous_handler()
        for task, count in cancelling.items():
            if task.cancelling() == count:
                task.cancel(f"{number.name} received")
        if self._exit_error is not None and all(task.done() for task in cancelling):
            # No session is left whose end would exit.
            raise self._exit_error

    def _ask_previous_handler(self) -> None:
        """Let the previous handler of the signal decide, once, what ends beside the sessions."""
        if self._has_asked_previous:
            return
        self._has_asked_previous = True
        number = self._received[-1]
        previous: Any = self._previous.get(number, signal.getsignal(number))
        if getattr(previous, "__self__", None) is self._loop:
            # The loop has got the signal already. uvloop's handler would repeat it.
            return
        module = getattr(previous, "__module__", None)
        # The handler of `why` only prints: without it the signal would end the process as well.
        if previous == signal.SIG_DFL or module == "aiohooks.session.why":
            self._exit_error = SystemExit(128 + number)
        elif callable(previous) and previous is not signal.default_int_handler:
            try:
                # That of asyncio.run cancels the main task and later raises KeyboardInterrupt.
                previous(number, None)
            except (KeyboardInterrupt, SystemExit) as error:
                self._exit_error = error

    def after_fork(self) -> None:
        """Remove the handlers in a forked child, which must neither run them nor write into its
        parent's loop.
        """
        if _handlers_of_loops.get(self._loop) is self:
            del _handlers_of_loops[self._loop]
            self._previous = dict.fromkeys(self._previous, signal.SIG_DFL)
            self._restore(self._previous)
            if _wakeup_fd() == self._wakeup_fd:
                signal.set_wakeup_fd(-1)


_handlers_of_loops: dict[asyncio.AbstractEventLoop, LoopSignals] = {}


_IGNORED_SIGNALS = [
    number for number in signal.Signals if number.name in ("SIGURG", "SIGCONT", "SIGWINCH")
]
"""Signals that a process ignores by default. Windows has none of them."""


def _let_signals_wake(loop: asyncio.AbstractEventLoop) -> signal.Signals | None:
    """Let signals wake the loop that arrive right before it waits for events, or in another thread.

    asyncio's loop has a file descriptor for signals as long as it handles any of them itself. If it
    has none, give it a handler that does nothing, of a signal that a process ignores by default and
    for which the program has no handler. Return this signal.
    """
    if _wakeup_fd() != -1:
        return None
    for number in _IGNORED_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            loop.add_signal_handler(number, int)
            return number
    return None


def _wakeup_fd() -> int:
    """Return the file descriptor to which Python writes signals, or -1."""
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


_last_signals: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Signals] = (
    weakref.WeakKeyDictionary()
)


def stopped_by(loop: asyncio.AbstractEventLoop) -> Signals | None:
    """Return the last signal that stopped a session of this loop."""
    return _last_signals.get(loop)


def _exit(error: BaseException, task: asyncio.Task[Any]) -> None:
    """End the program with `error`, as this task has ended, unless its own error ends it."""
    if task.cancelled() or not isinstance(task.exception(), (KeyboardInterrupt, SystemExit)):
        raise error


def _kill_process(number: Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # The first process of a container is not ended by its own signals.
    os._exit(128 + number)
