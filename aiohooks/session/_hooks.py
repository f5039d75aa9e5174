"""The hooks of one session: checked once, sorted once, and called phase by phase."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from aiohooks._aio.cancel import TimeLimit, cancel_count, current_task
from aiohooks._aio.clock import current_clock
from aiohooks._aio.gather import FanOut, describe_failure, drive
from aiohooks.checkpoint.checkpoint import Stateful, is_stateful
from aiohooks.dispatch.hook import HookRegistration, registration_of
from aiohooks.errors import HookCancelledError, HookTimeoutError, InvalidHookError
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import HOOK_METHODS, SessionRunHook

_logger = logging.getLogger("aiohooks")

Method = Callable[..., Coroutine[Any, Any, Any]]


class Tier:
    """The calls of one phase that start together: hooks of one `order`, in registration order."""

    __slots__ = ("grace_secs", "has_timeouts", "methods", "names", "phase", "registrations", "size")

    def __init__(self, phase: str, registered: Sequence[tuple[str, HookRegistration]], grace_secs: float) -> None:
        """Takes the named hooks that override the method `phase`."""
        self.phase = phase
        self.grace_secs: float = grace_secs
        self.size = len(registered)
        self.has_timeouts = any(registration.timeout is not None for _, registration in registered)
        self.registrations = tuple(registration for _, registration in registered)
        self.names = tuple(f"{name}.{phase}" for name, _ in registered)
        self.methods: tuple[Method, ...] = tuple(
            _forgiving(method, name) if registration.on_error == "log" else method
            for registration, name in zip(self.registrations, self.names, strict=True)
            for method in (getattr(registration.hook, phase),)
        )


class HookSet:
    """All hooks of one session.

    A phase is a tuple of tiers; one that no hook overrides is empty, so what is not overridden costs nothing.
    """

    def __init__(self, hooks: Iterable[SessionRunHook | HookRegistration], grace_secs: float) -> None:
        """Checks the hooks and sorts their methods.

        Raises:
            InvalidHookError: one is not a hook, is listed twice, or has a plain function where a coroutine is needed.
        """
        self.grace_secs = grace_secs
        self.registrations: tuple[HookRegistration, ...] = _checked(hooks)
        self.names: tuple[str, ...] = _names(self.registrations)
        self.after_create_session: tuple[Tier, ...] = self._tiers("after_create_session")
        self.before_run: tuple[Tier, ...] = self._tiers("before_run")
        self.after_run: tuple[Tier, ...] = self._tiers("after_run")
        # Where, among the answers of before_run, each hook of after_run finds its own; None if it has no before_run.
        asked = [id(registration.hook) for tier in self.before_run for registration in tier.registrations]
        self.answers: tuple[tuple[int | None, ...], ...] = tuple(
            tuple(asked.index(id(one.hook)) if id(one.hook) in asked else None for one in tier.registrations)
            for tier in self.after_run
        )
        self.asked_names: list[str] = [name for tier in self.before_run for name in tier.names]
        self.begun: list[tuple[str, HookRegistration]] = []
        self.calling: tuple[str, HookRegistration, float, asyncio.Task[Any]] | None = None
        """The `begin`, `end` or `close` that goes on: whose it is, since when, and in which task."""
        self.opening: FanOut | None = None
        """Tells what an `after_create_session` that goes on is doing."""

    def stateful(self) -> dict[str, Stateful]:
        """The hooks that are kept in checkpoints, by their unique names.

        Raises:
            InvalidHookError: two of them have one name; which state belongs to which would depend on their order.
        """
        found: dict[str, Stateful] = {}
        for registration in self.registrations:
            hook: Any = registration.hook
            if is_stateful(hook):
                name = hook.name or type(hook).__name__
                if name in found:
                    raise InvalidHookError(
                        f"{found[name]!r} and {hook!r} would both be {name!r} in a checkpoint; give each a `name` of its own"
                    )
                found[name] = hook
        return found

    def _tiers(self, phase: str) -> tuple[Tier, ...]:
        overriding = [
            (name, one) for name, one in zip(self.names, self.registrations, strict=True) if _overrides(one.hook, phase)
        ]
        orders = sorted({one.order for _, one in overriding})
        return tuple(
            Tier(phase, [(name, one) for name, one in overriding if one.order == order], self.grace_secs) for order in orders
        )

    async def begin(self) -> None:
        """Calls `begin` of the hooks one by one; each counts as begun from the moment it is started."""
        for name, registration in zip(self.names, self.registrations, strict=True):
            self.begun.append((name, registration))
            if _overrides(registration.hook, "begin"):
                await self._call_one(registration, f"{name}.begin", registration.hook.begin)

    async def end(self, session: Session) -> list[BaseException]:
        """Calls `end` of the hooks one by one, whatever the others' do; returns what they raised.

        Raises:
            CancelledError: the caller was cancelled; the hooks left over get no `end`.
        """
        errors: list[BaseException] = []
        for name, registration in self.begun:
            if not _overrides(registration.hook, "end"):
                continue
            try:
                await self._call_one(registration, f"{name}.end", registration.hook.end, session)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                errors.append(error)
        return errors

    async def close(self, exc: BaseException | None) -> list[BaseException]:
        """Calls `close` of the hooks that were begun, in reverse and once, whatever the others' do; returns what they raised."""
        errors: list[BaseException] = []
        while self.begun:
            name, registration = self.begun.pop()
            if not _overrides(registration.hook, "close"):
                continue
            if registration.timeout is None:  # unlike the other methods, this one is always limited in time
                registration = registration._replace(timeout=max(self.grace_secs, 1e-9))
            try:
                await self._call_one(registration, f"{name}.close", registration.hook.close, exc)
            except asyncio.CancelledError as error:
                # The closing itself was cancelled: at the end of the grace period, or by a third party. The others go on.
                cancelled = HookCancelledError(f"{name}.close was cancelled before it was done")
                cancelled.__cause__ = error
                errors.append(cancelled)
            except BaseException as error:
                errors.append(error)
        return errors

    async def _call_one(self, registration: HookRegistration, name: str, method: Method, *args: Any) -> None:
        self.calling = name, registration, current_clock().now(), current_task()
        try:
            await _call_one(registration, name, method, *args)
        finally:
            self.calling = None

    def __repr__(self) -> str:
        return f"<hooks: {', '.join(self.names) or 'none'}>"


async def _call_one(registration: HookRegistration, name: str, method: Method, *args: Any) -> None:
    limit = TimeLimit(registration.timeout, name)
    base = cancel_count(current_task())
    try:
        with limit:
            await method(*args)
        return
    except asyncio.CancelledError as error:
        if current_task().cancelling() > base:
            raise
        failure: BaseException = HookCancelledError(f"{name} was cancelled, and not by its session")
        failure.__cause__ = error
    except TimeoutError as error:
        failure = error
        if limit.expired:
            failure = HookTimeoutError(f"{error}; give it more with configure(hook, timeout=...)")
            failure.__cause__ = error
            failure.add_note(limit.stood)
    except BaseException as error:
        failure = error
    describe_failure(failure, name)
    if registration.on_error == "log" and isinstance(failure, Exception):
        _log(name, failure)
        return
    raise failure


def _forgiving(method: Method, name: str) -> Method:
    async def call(*args: Any) -> Any:
        base = cancel_count(current_task())
        try:
            return await method(*args)
        except asyncio.CancelledError as error:
            if current_task().cancelling() > base:
                raise
            _log(name, error)
        except Exception as error:
            _log(name, error)

    return call


def _log(name: str, error: BaseException) -> None:
    _logger.error("%s failed; going on, as its on_error says", name, exc_info=error)


def _checked(hooks: Iterable[SessionRunHook | HookRegistration]) -> tuple[HookRegistration, ...]:
    if isinstance(hooks, (SessionRunHook, HookRegistration)) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
    registrations: list[HookRegistration] = []
    for one in hooks:
        registration = one if isinstance(one, HookRegistration) else None
        hook: Any = one.hook if isinstance(one, HookRegistration) else one
        if isinstance(hook, type):
            raise InvalidHookError(f"hooks has the class {hook.__name__}; give an object of it: {hook.__name__}(...)")
        if not isinstance(hook, SessionRunHook):
            raise InvalidHookError(
                f"hooks has {hook!r}, which is not a SessionRunHook; derive it from SessionRunHook, "
                "or wrap an object with plain methods in BlockingHook"
            )
        if any(hook is other.hook for other in registrations):
            raise InvalidHookError(f"hooks has {hook!r} twice; make two objects of it if both are meant")
        if not isinstance(hook.name, str):
            raise InvalidHookError(f"the name of {hook!r} is {hook.name!r}; give a str, or leave it out")
        for phase in HOOK_METHODS:
            if not is_coroutine_function(getattr(hook, phase)):
                raise InvalidHookError(
                    f"{type(hook).__name__}.{phase} is not a coroutine function; write it as `async def`, "
                    "or wrap an object with plain methods in BlockingHook"
                )
        registrations.append(registration or registration_of(hook, hook.order, hook.timeout, hook.on_error))
    return tuple(registrations)


def _names(registrations: Sequence[HookRegistration]) -> tuple[str, ...]:
    """A name for each hook: its class, numbered where there are several."""
    classes = [type(one.hook).__name__ for one in registrations]
    return tuple(
        name if classes.count(name) == 1 else f"{name}#{classes[: number + 1].count(name)}" for number, name in enumerate(classes)
    )


def _overrides(hook: Any, phase: str) -> bool:
    method = getattr(hook, phase)
    return getattr(method, "__func__", method) is not getattr(SessionRunHook, phase)


async def call_tier(fan: FanOut, tier: Tier, first: Any, seconds: Sequence[Any] | None, results: list[Any], step: int) -> None:
    """Calls all methods of a tier with `first` and, if given, each with its own of `seconds`; appends what they return.

    To be awaited through `drive`, which makes them overlap. Raises as `aiohooks._fan_out` says; `step` is for the messages.
    """
    fan.piece = (Calls, tier, first, seconds, results, len(results), step)
    try:
        if seconds is None:
            for method in tier.methods:
                results.append(await method(first))
                if fan.crew is not None:
                    break
        else:
            for method, second in zip(tier.methods, seconds):  # noqa: B905 - of one length, and on the path of every run
                results.append(await method(first, second))
                if fan.crew is not None:
                    break
    except BaseException as error:
        await fan.failed(error)
    else:
        if fan.crew is not None:
            await fan.crew.settle(None)
    finally:
        fan.piece = fan.crew = None


class Calls:
    """The calls of one tier as work that overlaps."""

    __slots__ = (
        "_before",
        "_brought",
        "_first",
        "_handed_out",
        "_results",
        "_seconds",
        "_step",
        "_tier",
        "grace_secs",
        "has_order",
        "has_timeouts",
    )

    def __init__(self, tier: Tier, first: Any, seconds: Sequence[Any] | None, results: list[Any], before: int, step: int) -> None:
        """Takes what `call_tier` got; `before` is how many results were there before this tier."""
        self._tier = tier
        self._first = first
        self._seconds = seconds
        self._results = results
        self._before = before
        self._step = step
        self._handed_out = False
        self._brought: dict[int, Any] = {}
        self.grace_secs = tier.grace_secs
        self.has_order = False
        self.has_timeouts = tier.has_timeouts

    def startable(self) -> Iterable[int]:
        """All behind the one that runs in the caller's task, once."""
        if self._handed_out:
            return ()
        self._handed_out = True
        return range(len(self._results) - self._before + 1, self._tier.size)

    def start(self, number: int) -> Coroutine[Any, Any, Any]:
        """The call itself."""
        method = self._tier.methods[number]
        return method(self._first) if self._seconds is None else method(self._first, self._seconds[number])

    def current(self) -> int:
        """The one whose result is missing."""
        return len(self._results) - self._before

    def store(self, number: int, result: Any) -> None:
        """See `Work`."""
        self._brought[number] = result

    def complete(self) -> None:
        """Puts the results that tasks brought behind those that came in turn."""
        for number in range(len(self._results) - self._before, self._tier.size):
            self._results.append(self._brought.get(number))

    def name(self, number: int) -> str:
        """See `Work`."""
        return self._tier.names[number]

    def describe(self, number: int) -> str:
        """See `Work`."""
        return f"{self._tier.names[number]} at step {self._step}"

    def timeout_secs(self, number: int) -> float | None:
        """See `Work`."""
        return self._tier.registrations[number].timeout

    def forgives(self, number: int, error: BaseException) -> bool:
        """See `Work`."""
        if self._tier.registrations[number].on_error != "log" or not isinstance(error, Exception):
            return False
        _log(self.describe(number), error)
        return True


async def after_create_session(hooks: HookSet, session: Session, coord: Coordinator) -> None:
    """Calls `after_create_session` of all hooks, tier by tier."""
    fan = hooks.opening = FanOut()
    fan.base = cancel_count(current_task())
    fan.now = current_clock().now
    try:
        for tier in hooks.after_create_session:
            call = call_tier(fan, tier, session, (coord,) * tier.size, [], session.global_step.latest.step)
            await drive(call, fan)
    finally:
        hooks.opening = None
