"""Registering hooks: order, time limit, error handling, background calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

from aiohooks._validate import check_choice, check_instance, check_int, check_secs
from aiohooks.errors import InvalidHookError

OnError = Literal["raise", "log"]
"""How errors of a hook are handled: `"raise"` ends the call with the error, `"log"` logs it and continues."""


class Hook:
    """Base class of hooks whose attributes say how their methods are called.

    Override the attributes in a subclass, or for one registration with `configure`. A hook of a `HookGroup` need not derive
    from it.
    """

    order: ClassVar[int] = 0
    """Hooks of a lower order complete a phase before those of a higher order start it; hooks of the same order overlap."""
    timeout: ClassVar[float | None] = None
    """Time limit in seconds for one call of a coroutine method; costs nothing where the method cannot wait."""
    on_error: ClassVar[OnError] = "raise"
    """`"log"` for observers: an error is logged with its traceback and the run continues."""
    name: str = ""
    """The name of the hook's state in checkpoints, unique in its session; if empty, the name of its class."""


class HookRegistration(NamedTuple):
    """A hook with its attributes in one group or session; created by `configure`."""

    hook: Any
    order: int = 0
    timeout: float | None = None
    on_error: OnError = "raise"
    background: bool = False
    max_pending: int = 100
    disable_after: int | None = None


_UNSET: Any = object()


def configure(
    hook: object,
    *,
    order: int = _UNSET,
    timeout: float | None = _UNSET,
    on_error: OnError = _UNSET,
    background: bool = _UNSET,
    max_pending: int = _UNSET,
    disable_after: int | None = _UNSET,
) -> HookRegistration:
    """Return a registration of `hook` that says how its methods are called; the hook itself is unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Args:
        hook: an object with the methods of a lifecycle; or a registration, of which the other attributes are kept.
        order: hooks of a lower order complete a call before those of a higher order start; those of the same order overlap.
        timeout: time limit in seconds for one call of a method, which must be a coroutine. The time of the others in a method
            that wraps them has no limit.
        on_error: `"raise"`, or `"log"`: the first failure is logged with its traceback, later ones are counted, and logged again
            at the 10th, the 100th and so on.
        background: whether calls of methods that return None are queued and run in order beside what follows. A failure is
            raised by the next call of the hook, or at the end, or logged. In a session this is `after_run`.
        max_pending: how many background calls may be queued; the caller waits while there are as many, unless the queue would
            wait for it, as for a hook that calls its own group. Give `background` too, unless the registration has it.
        disable_after: take the hook out of the calls, with a warning, when it has failed this often in a row; with
            `on_error="log"` only.

    Raises:
        InvalidArgumentError: an argument is invalid.
        InvalidHookError: `hook` is a class and not an object of it, or an option has no effect without another.
    """
    known = registration_of(hook)
    values = order, timeout, on_error, background, max_pending, disable_after
    given: dict[str, Any] = {
        name: one for name, one in zip(HookRegistration._fields[1:], values, strict=True) if one is not _UNSET
    }
    registration = registration_of(known._replace(**given))
    if max_pending is not _UNSET and background is _UNSET and not known.background:
        raise InvalidHookError(
            f"max_pending of {type(known.hook).__name__} is {max_pending}, but its calls are not queued; give background=True too"
        )
    return registration


def in_order(hooks: Iterable[object], *, first: int = 0) -> list[HookRegistration]:
    """Return registrations of `hooks` with ascending orders, so that each completes a phase before the next one starts it.

    Hooks of the same order overlap, and a list alone says nothing about which one is done first. Use it where one hook relies
    on what another has done: `hooks=[*in_order([restore, broadcast]), logging]`.

    Args:
        hooks: hooks or registrations.
        first: the order of the first one; others of that order overlap with it.
    """
    check_int(first, "first", None, expected="a whole number")
    return [configure(hook, order=order) for order, hook in enumerate(hooks, first)]


def registration_of(hook: object) -> HookRegistration:
    """Return the registration of a hook, which may be one already; raise unless its attributes are valid."""
    if isinstance(hook, type):
        raise InvalidHookError(f"the class {hook.__name__} is given as a hook; give an object of it: {hook.__name__}(...)")
    if isinstance(hook, Hook):
        hook = HookRegistration(hook, hook.order, hook.timeout, hook.on_error)
    elif not isinstance(hook, HookRegistration):
        return HookRegistration(hook)
    if isinstance(hook.hook, HookRegistration):
        raise InvalidHookError(f"{hook!r} is a registration of a registration; give the hook")
    name = type(hook.hook).__name__
    check_int(hook.order, f"order of {name}", None, expected="a whole number, lower ones come first")
    check_secs(hook.timeout, f"timeout of {name}", optional=True, positive=True)
    check_choice(hook.on_error, f"on_error of {name}", "raise", "log")
    check_instance(hook.background, bool, f"background of {name}")
    check_int(hook.max_pending, f"max_pending of {name}", 1)
    check_int(hook.disable_after, f"disable_after of {name}", 1, optional=True)
    if hook.disable_after is not None and hook.on_error != "log":
        raise InvalidHookError(
            f'disable_after of {name} is {hook.disable_after}, but its errors are raised; give on_error="log" too'
        )
    return hook
