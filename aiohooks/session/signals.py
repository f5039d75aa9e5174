"""A stop when the process is asked to end: SIGINT, SIGTERM or others.

The handlers are Python's own and not the loop's (`add_signal_handler`): they run between two instructions, so the third
signal ends a process whose loop is blocked, and what somebody has added to the loop is still there afterwards.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from aiohooks._aio.cancel import current_task
from aiohooks._aio.clock import TimerHandle, current_clock
from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError, StopRequestedError
from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalPolicy:
    """Which signals stop a session, and how long it may take to end then.

    The first signal asks for a stop: the step that is being run is finished and the session ends cleanly, with the last save
    if a hook is there for it. The second one ends it as a cancellation does: no `end`, no save, but `close` of every hook.
    The third one ends the process at once.

    Args:
        signals: which.
        step_secs: how long the step that is being run may go on after the first signal. It is given up then, nothing of it is
            kept, and the session ends cleanly; None: until it is done.
        grace_secs: how long the session may take from the first signal on, before it goes on as after a second one; None for
            no limit. What comes then is limited by the session's `stop_grace_period_secs`.
    """

    signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
    step_secs: float | None = None
    grace_secs: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.signals
        if not isinstance(given, tuple) or not given or not all(_can_be_handled(one) for one in given):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            raise InvalidArgumentError(f"signals is {given!r}; give a tuple of signals that can be handled: (signal.SIGTERM,)")
        check_secs(self.step_secs, "step_secs", optional=True)
        check_secs(self.grace_secs, "grace_secs", optional=True)


def _can_be_handled(number: object) -> bool:
    return isinstance(number, signal.Signals) and number.name not in ("SIGKILL", "SIGSTOP", "SIGCHLD")


def policy_of(handle_signals: object) -> SignalPolicy | None:
    """What a session's `handle_signals` means; None: signals are left alone."""
    if isinstance(handle_signals, SignalPolicy):
        return handle_signals
    if not isinstance(handle_signals, bool):
        raise InvalidArgumentError(f"handle_signals is {handle_signals!r}; give True, False or a SignalPolicy")
    return SignalPolicy() if handle_signals else None


class StopOnSignal:
    """One session's part: what the signals do to it."""

    def __init__(self, policy: SignalPolicy, root: Coordinator, interrupt: Callable[[str, BaseException], None]) -> None:
        """Takes the session's coordinator, and what ends the run that goes on; nothing is installed yet."""
        self.policy: SignalPolicy = policy
        self.task: asyncio.Task[Any] | None = None
        """The task that entered the session: it is cancelled by the second signal."""
        self.number: signal.Signals | None = None
        """The signal that is the reason of the stop, if it is one."""
        self._root = root
        self._interrupt = interrupt
        self._timers: list[TimerHandle] = []

    def install(self) -> Callable[[], None]:
        """Takes the signals, and returns what gives them back."""
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "handle_signals has no effect outside the main thread, which alone gets signals; "
                "leave it out, and call request_stop() of the session from there"
            )
            return lambda: None
        self.task = current_task()
        loop = asyncio.get_running_loop()
        taken = _Taken.of_loops.get(loop)
        if taken is None:
            taken = _Taken.of_loops[loop] = _Taken(loop)
        taken.add(self)

        def remove() -> None:
            taken.remove(self)
            for timer in self._timers:
                timer.cancel()

        return remove

    def stop(self, number: signal.Signals, late: Callable[[], None]) -> None:
        """The first signal; `late` is called when the grace period is over."""
        why = f"{number.name} received"
        if self._root.stop_reason is None:
            self.number = number
        self._root.request_stop(why)
        clock, policy = current_clock(), self.policy
        if policy.step_secs is not None:
            given_up = StopRequestedError(f"{why}, and the step took longer than {policy.step_secs} s more")
            self._timers.append(clock.call_later(policy.step_secs, lambda: self._interrupt(why, given_up)))
        if policy.grace_secs is not None:
            self._timers.append(clock.call_later(policy.grace_secs, late))


class _Taken:
    """The signals, while sessions of one loop have them: the first one stops all of these sessions."""

    of_loops: dict[asyncio.AbstractEventLoop, _Taken] = {}  # noqa: RUF012

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.earlier: dict[signal.Signals, Any] = {}
        self._loop = loop
        self._context = contextvars.copy_context()
        self._sessions: list[StopOnSignal] = []
        self._received: list[signal.Signals] = []
        self._stopped = False
        self._ending: signal.Signals | None = None
        self._exit_code: int | None = None
        self._wakeup = _Wakeup(loop)

    # -- sessions come and go

    def add(self, session: StopOnSignal) -> None:
        for number in session.policy.signals:
            if number not in self.earlier:
                self._take(number)
        self._sessions.append(session)
        # One that is opened while others end because of a signal would be left over, and nobody would tell it.
        if self._stopped:
            self._stop_one(session)
        if self._ending is not None and session.task is not None:
            self._loop.call_soon(session.task.cancel, f"{self._ending.name} received")

    def remove(self, session: StopOnSignal) -> None:
        self._stop()  # a signal that has come in this very moment
        self._sessions.remove(session)
        wanted = {number for other in self._sessions for number in other.policy.signals}
        self._give_back(number for number in tuple(self.earlier) if number not in wanted)
        if not self._sessions:
            self._wakeup.close()
            del self.of_loops[self._loop]
            if self._exit_code is not None:
                # Not out of this task: that would stop the loop in the middle of what others do. From here the runner
                # cancels all that is left and waits for it.
                self._loop.call_soon(_exit, self._exit_code)

    def _take(self, number: signal.Signals) -> None:
        earlier: Any = signal.getsignal(number)
        if earlier is signal.SIG_IGN:
            return  # whoever started the process wants it so, as `nohup` and the `&` of a script do
        if earlier is None:
            _logger.warning("%s is handled outside of Python, and is left alone", number.name)
            return
        try:
            signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            _logger.warning("%s cannot be handled here, and is left alone: %s", number.name, error)
            return
        self.earlier[number] = earlier
        if earlier is not signal.SIG_DFL and earlier is not signal.default_int_handler and not _is_of_a_runner(earlier):
            _logger.warning(
                "%s has a handler already, %r, and the session takes its place while it is open; "
                "in a server that owns the signals leave handle_signals out",
                number.name,
                earlier,
            )

    def _give_back(self, numbers: Iterable[signal.Signals]) -> None:
        for number in tuple(numbers):
            earlier = self.earlier.pop(number)
            if signal.getsignal(number) == self._handle:  # else somebody has put another one there, who keeps it
                signal.signal(number, earlier)

    # -- signals come

    def _handle(self, number: int, frame: object) -> None:
        # Between any two instructions of the main thread: nothing may be done here but to count and to wake the loop.
        received = signal.Signals(number)
        self._received.append(received)
        if len(self._received) > 2:
            _end_at_once(received)
        try:
            if len(self._received) == 1:
                self._loop.call_soon_threadsafe(self._stop, context=self._context)
            else:
                self._loop.call_soon_threadsafe(self._end, received, context=self._context)
        except RuntimeError:  # the loop was closed, and its sessions never were
            self._give_back(self.earlier)
            self._wakeup.close()
            self.of_loops.pop(self._loop, None)
            signal.raise_signal(number)

    def _stop(self) -> None:
        if self._received and not self._stopped:
            self._stopped = True
            if not self._sessions:  # it came between the last look and the giving back: it is for those who have it now
                signal.raise_signal(self._received[0])
            for session in self._sessions:
                self._stop_one(session)

    def _stop_one(self, session: StopOnSignal) -> None:
        session.stop(self._received[0], self._late)
        if session.number is not None:
            _stops[self._loop] = session.number

    def _late(self) -> None:
        if self._ending is None and self._sessions:
            names = ", ".join(session.task.get_name() for session in self._sessions if session.task is not None)
            _logger.warning("the grace period after %s is over; cancelling %s", self._received[0].name, names)
            self._end(self._received[0])

    def _end(self, number: signal.Signals) -> None:
        """Cancels the sessions, and leaves to whoever had the signal before what becomes of the program."""
        if self._ending is not None:
            return
        self._ending = _stops[self._loop] = number
        tasks = {session.task: session.task.cancelling() for session in self._sessions if session.task is not None}
        earlier = self.earlier.get(number, signal.getsignal(number))
        if earlier == signal.SIG_DFL:
            self._exit_code = 128 + number
        try:
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, None)  # that of asyncio.run cancels the main task and raises KeyboardInterrupt in the end
        finally:
            for task, before in tasks.items():
                if task.cancelling() == before:
                    task.cancel(f"{number.name} received")
        if self._exit_code is not None and all(task.done() for task in tasks):
            _exit(self._exit_code)  # nobody is left to end the sessions

    # -- elsewhere

    @classmethod
    def reset_in_child(cls) -> None:
        """A forked child must not run its parent's handlers, nor write into its parent's loop."""
        for taken in cls.of_loops.values():
            for number in taken.earlier:
                if signal.getsignal(number) == taken._handle:
                    signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        cls.of_loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Taken.reset_in_child)


class _Wakeup:
    """Wakes a loop up for a signal that comes right before it falls asleep, or to another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pair: tuple[socket.socket, socket.socket] | None = None
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # the loop's own, as a rule, which does the same
            signal.set_wakeup_fd(before)
            return
        self._pair = ours, theirs = socket.socketpair()
        for one in self._pair:
            one.setblocking(False)
        loop.add_reader(ours, self._read)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def _read(self) -> None:
        if self._pair is not None:
            self._pair[0].recv(4096)

    def close(self) -> None:
        if self._pair is not None:
            ours, theirs = self._pair
            self._pair = None
            there = signal.set_wakeup_fd(-1)
            if there != theirs.fileno():  # that of somebody who came later
                signal.set_wakeup_fd(there)
            if not self._loop.is_closed():
                self._loop.remove_reader(ours)
            ours.close()
            theirs.close()


_stops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, signal.Signals] = weakref.WeakKeyDictionary()


def stopped_by(loop: asyncio.AbstractEventLoop) -> signal.Signals | None:
    """The last signal that stopped a session of this loop."""
    return _stops.get(loop)


def _is_of_a_runner(handler: Any) -> bool:
    return isinstance(getattr(getattr(handler, "func", None), "__self__", None), asyncio.Runner)


def _exit(code: int) -> None:
    raise SystemExit(code)


def _end_at_once(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the first process of a container is not ended by its own signals
