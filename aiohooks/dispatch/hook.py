"""A hook, and how its calls are made: order, time limit, what becomes of its errors."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError, InvalidHookError

OnError = Literal["raise", "log"]
"""What becomes of a hook's error: `"raise"` ends the run with it, `"log"` writes it to the log and goes on."""


class Hook:
    """Base class of hooks: the attributes say how their methods are called.

    They can be overridden in a subclass, or for one registration by `configure`.
    """

    order: ClassVar[int] = 0
    """Hooks of a lower order finish a phase before those of a higher one start it; equal ones overlap."""
    timeout: ClassVar[float | None] = None
    """Seconds that one call of a method may take; costs nothing until the call suspends."""
    on_error: ClassVar[OnError] = "raise"
    """`"log"` for observers: an error is logged with its traceback and the step goes on."""
    name: str = ""
    """What its state is called in checkpoints, unique in its session; its class's name, if empty."""


class HookRegistration(NamedTuple):
    """A hook with the attributes it has in one session; made by `configure`."""

    hook: Any
    order: int
    timeout: float | None
    on_error: OnError


_UNSET: Any = object()


def configure(hook: Hook, *, order: int = _UNSET, timeout: float | None = _UNSET, on_error: OnError = _UNSET) -> HookRegistration:
    """Gives a hook another `order`, `timeout` or `on_error` where it is registered; the hook itself is unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Raises:
        InvalidArgumentError: a value that cannot be meant.
        InvalidHookError: not a hook.
    """
    given: object = hook
    if not isinstance(given, Hook):
        raise InvalidHookError(f"configure got {given!r}; give an object of a SessionRunHook class")
    return registration_of(
        hook,
        hook.order if order is _UNSET else order,
        hook.timeout if timeout is _UNSET else timeout,
        hook.on_error if on_error is _UNSET else on_error,
    )


def registration_of(hook: Hook, order: Any, timeout: Any, on_error: Any) -> HookRegistration:
    """Checks the three attributes of a hook and joins them with it."""
    name = type(hook).__name__
    if isinstance(order, bool) or not isinstance(order, int):
        raise InvalidArgumentError(f"order of {name} is {order!r}; give a whole number, lower ones come first")
    check_secs(timeout, f"timeout of {name}", optional=True, positive=True)
    if on_error not in ("raise", "log"):
        raise InvalidArgumentError(f'on_error of {name} is {on_error!r}; give "raise" or "log"')
    return HookRegistration(hook, order, timeout, on_error)
