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
from aiohooks.errors import InvalidArgumentError, StopRequestedError, safe_repr
from aiohooks.session.coordinator import Coordinator, Requests


class Escalation(enum.IntEnum):
    """How far the signals have brought a session to its end.

    Each signal, and the end of each time limit, brings it one step further. If a task has entered
    several sessions inside each other, they are cancelled together.
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
        try:
            signals = tuple(map(Signals, self.signals))
        except (TypeError, ValueError):
            signals = ()
        if not signals:
            raise InvalidArgumentError(
                f"signals is {safe_repr(self.signals)}; give signals, such as (signal.SIGTERM,)"
            )
        object.__setattr__(self, "signals", signals)
        for name in ("step_secs", "grace_secs", "drain_secs"):
            check_secs(getattr(self, name), name, optional=True)


def may_handle(number: Signals) -> bool:
    """Return whether a session that is opened in this thread may handle the signal.

    It may in the main thread, if the signal has no handler, or only that of other sessions.
    """
    handler = signal.getsignal(number)
    is_of_sessions = isinstance(getattr(handler, "__self__", None), LoopSignals)
    is_free = handler is signal.SIG_DFL or is_of_sessions
    return is_free and threading.current_thread() is threading.main_thread()


class StopOnSignal:
    """Drains or stops one session when a signal arrives."""

    def __init__(self, policy: SignalPolicy, coordinator: Coordinator) -> None:
        """Take the policy and the coordinator of the session."""
        self.policy: SignalPolicy = policy
        self.requests: Requests = coordinator.requests
        self.task: asyncio.Task[Any]
        """The task that entered the session. A cancellation by signals cancels it."""
        self.number: Signals | None = None
        """The signal that is the reason of the stop or the drain, if a signal is."""
        # The effect of the latest signal. The signal handler sets it, between any two instructions.
        self.escalation: Escalation | None = None
        self.is_cancelled: bool = False
        self.timers: list[TimerHandle] = []
        self.coordinator: Coordinator = coordinator
        self._begun: Escalation | None = None
        """The escalation that the event loop has begun: it follows `escalation`."""

    def install(self) -> Callable[[], None]:
        """Install the signal handlers, and return the function that removes them.

        Outside of the main thread, only log that this is not possible.
        """
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
        """Record the next escalation, and its drain or stop. This is safe in a signal handler.

        The loop calls `begin` for it afterwards.
        """
        requests = self.requests
        escalation = self.next_escalation
        if escalation is Escalation.EXIT:
            # The process exits only when all its sessions have come so far. This one waits for the
            # others.
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
        """Begin, in the event loop, the escalation that `advance` has recorded.

        Timers call `handlers.end_period` when the time for it is over. They end with the session.
        """
        if self._begun is self.escalation:
            # A session that was opened between the signal and this call has already begun it.
            return
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
    """The signal handlers of one loop, shared by its sessions. Each signal is for all of them.

    `_handle` is the handler itself: it runs between any two instructions of the main thread, so it
    only records the signal. The loop then calls `_begin`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The handler may interrupt any context. Its callbacks are called in this one.
        self._context = contextvars.copy_context()
        # The handlers that were replaced, by signal.
        self._previous: dict[Signals, Any] = {}
        self._sessions: list[StopOnSignal] = []
        self._received: list[Signals] = []
        """All signals so far."""
        self._has_cancelled = False
        """Whether a signal has cancelled any session."""
        self._has_called_previous = False
        """Whether `_call_previous_handler` was called: it acts once."""
        self._exit_error: BaseException | None = None
        """The error that ends the program when the sessions are closed. None lets it continue."""
        # The signal for which the loop has got a handler that does nothing, if it needed one.
        self._wakeup_signal: signal.Signals | None = _let_signals_wake(loop)
        self._wakeup_fd: int = _wakeup_fd()
        """The file descriptor that wakes the loop. Other code may set another one later."""
        _handlers_of_loops[loop] = self
        call_after_fork(self)

    def add_session(self, session: StopOnSignal) -> None:
        """Handle the signals of a session that is being opened."""
        for number in session.policy.signals:
            if number not in self._previous:
                self._install(number, session.requests.label)
        self._sessions.append(session)
        # A session that is opened after a signal of the loop gets the same effect.
        for number in self._received:
            session.advance(number)
            session.begin(number, self)
        if session.escalation is Escalation.CANCEL:
            self._loop.call_soon(self._cancel_sessions)

    def remove_session(self, session: StopOnSignal) -> None:
        """Stop handling signals for a session that has closed, and restore unneeded handlers."""
        if session.escalation is Escalation.CANCEL:
            # The signal handler has recorded this, but the loop may not have called `_begin` yet.
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
        """Leave the loop after its last session.

        If the signal that has cancelled the sessions also ends the program, let the program end
        when the current task has ended.
        """
        self._stop_waking()
        del _handlers_of_loops[self._loop]
        if self._has_cancelled:
            self._call_previous_handler()
        if self._exit_error is not None:
            # A callback raises the error, so that the runner cancels the remaining tasks and waits
            # for them. It is called after the other callbacks of this task. If that is the main
            # task, one of them is the runner's own, which would end the runner's wait.
            current_task().add_done_callback(functools.partial(_exit, self._exit_error))

    def _stop_waking(self) -> None:
        """Remove the handler of `_let_signals_wake`, if there is one."""
        if self._wakeup_signal is None:
            return
        descriptor = _wakeup_fd()
        self._loop.remove_signal_handler(self._wakeup_signal)
        # With its last handler, the loop unsets the descriptor, even one that other code has set.
        if descriptor != self._wakeup_fd:
            signal.set_wakeup_fd(descriptor)

    def _install(self, number: Signals, label: str) -> None:
        """Install the handler of a signal, and keep the previous one.

        An ignored signal stays ignored. If it cannot be handled, log that.
        """
        previous: Any = signal.getsignal(number)
        if previous is signal.SIG_IGN:
            # The parent process has set it to be ignored, as `nohup` and the `&` of a script do.
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
        """Restore the previous handlers of signals."""
        for number in tuple(numbers):
            previous = self._previous.pop(number)
            # If other code has installed a handler in the meantime, that stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)

    def _handle(self, number: int, frame: object) -> None:
        """Record a signal in all sessions, and wake the loop. This is the signal handler.

        It runs between any two instructions of the main thread, so it does no more than that. As
        the stop is recorded immediately, a step that computes without waiting is the last step.
        """
        received = Signals(number)
        try:
            if self._sessions:
                self._advance(received)
            else:
                # The last session has just been removed, so the signal is for the previous handler,
                # which is restored by the time of this callback.
                self._call_soon(signal.raise_signal, received)
        except RuntimeError:
            # The loop was closed, although sessions were open. Let the signal have the effect that
            # it had before.
            self._restore(self._previous)
            _handlers_of_loops.pop(self._loop, None)
            signal.raise_signal(number)

    def _call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a callback in the loop, which this wakes. A closed loop raises `RuntimeError`."""
        self._loop.call_soon_threadsafe(callback, *args, context=self._context)

    def _advance(self, received: Signals) -> None:
        """Record the next escalation of every session, which the event loop then begins.

        If it is the exit for all sessions, kill the process instead.
        """
        if all(session.next_escalation is Escalation.EXIT for session in self._sessions):
            _kill_process(received)
        self._received.append(received)
        for session in self._sessions:
            session.advance(received)
        self._call_soon(self._begin, received)

    def _begin(self, received: Signals) -> None:
        """Begin, in the event loop, what the signal handler has recorded."""
        for session in self._sessions:
            session.begin(received, self)
        self._cancel_sessions()

    def end_period(
        self, session: StopOnSignal, number: Signals, escalation: Escalation | None
    ) -> None:
        """Bring a session one step further when its time for `escalation` is over.

        `number` is the signal that has begun the escalation. If another signal has brought the
        session further meanwhile, do nothing.
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
            # The cancellation is that of the task, so it is for all sessions that it has entered.
            for other in self._sessions:
                if other.task is session.task:
                    other.escalation = following
        session.begin(number, self)
        self._cancel_sessions()

    def _cancel_sessions(self) -> None:
        """Cancel each task whose sessions have all reached the escalation CANCEL, once.

        If that is so for all tasks, let the previous handler of the signal act, too.
        """
        tasks_not_due = {
            session.task
            for session in self._sessions
            if session.escalation is not Escalation.CANCEL
        }
        due = [
            session
            for session in self._sessions
            if session.task not in tasks_not_due and not session.is_cancelled
        ]
        if not due:
            return
        # The previous handler may cancel some of the tasks. By these counts they are not cancelled
        # twice.
        cancelling = {session.task: session.task.cancelling() for session in due}
        for session in due:
            session.is_cancelled = True
            logger.warning("cancelling %s", session.coordinator.status())
        self._has_cancelled = True
        number = self._received[-1]
        # `aiohooks.run` uses it for the exit code of the program.
        _last_signals[self._loop] = number
        if not tasks_not_due:
            self._call_previous_handler()
        for task, count in cancelling.items():
            if task.cancelling() == count:
                task.cancel(f"{number.name} received")
        if self._exit_error is not None and all(task.done() for task in cancelling):
            # These tasks have ended without closing their sessions. So `_leave_loop` is not called,
            # which would let the program end.
            raise self._exit_error

    def _call_previous_handler(self) -> None:
        """Call the handler that the signal had before, once.

        If it raises KeyboardInterrupt or SystemExit, or if there was none, `_exit_error` becomes
        the error that ends the program.
        """
        if self._has_called_previous:
            return
        self._has_called_previous = True
        number = self._received[-1]
        previous: Any = self._previous.get(number, signal.getsignal(number))
        if getattr(previous, "__self__", None) is self._loop:
            # It is the loop's own handler. The loop has got the signal already, by its file
            # descriptor, and uvloop's handler would repeat the signal.
            return
        module = getattr(previous, "__module__", None)
        # The handler of `why` only prints a report, so it counts as none: without a handler, the
        # signal ends the process.
        if previous == signal.SIG_DFL or module == "aiohooks.session.why":
            self._exit_error = SystemExit(128 + number)
        # Python's own handler of Ctrl-C only raises KeyboardInterrupt. The sessions end instead.
        elif callable(previous) and previous is not signal.default_int_handler:
            try:
                # The handler of `asyncio.run` cancels the main task the first time, and raises
                # KeyboardInterrupt the next time.
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
    """Make sure that a signal wakes the loop, even if it arrives right before the loop waits for
    events, or in another thread.

    asyncio's loop has a file descriptor for this only while it handles some signal itself. If it
    handles none, give it a handler that does nothing, for a signal that processes ignore by default
    and that the program does not handle.

    Returns:
        The signal with the new handler, or None if there is none.
    """
    if _wakeup_fd() != -1:
        return None
    for number in _IGNORED_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            # The handler `int` does nothing: it is called without arguments, and returns 0.
            loop.add_signal_handler(number, int)
            return number
    return None


def _wakeup_fd() -> int:
    """Return the file descriptor to which Python writes signals, or -1 if there is none."""
    # Python returns the descriptor only when another one is set.
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


_last_signals: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Signals] = (
    weakref.WeakKeyDictionary()
)
"""The last signal that has stopped a session of each loop."""


def stopped_by(loop: asyncio.AbstractEventLoop) -> Signals | None:
    """Return the last signal that stopped a session of this loop, or None."""
    return _last_signals.get(loop)


def _exit(error: BaseException, task: asyncio.Task[Any]) -> None:
    """End the program with `error`, unless the error of the task, which has ended, ends it."""
    if task.cancelled() or not isinstance(task.exception(), (KeyboardInterrupt, SystemExit)):
        raise error


def _kill_process(number: Signals) -> None:
    """End this process immediately, as the signal does by default."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    # The signal does not end the first process of a container: that is protected from its own
    # signals.
    os._exit(128 + number)
