"""The base class of hooks and their registration: order, time limit, error handling."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from aiohooks._validate import check_choice, check_int, check_secs
from aiohooks.errors import InvalidHookError

OnError = Literal["raise", "log"]
"""How errors of a hook are handled: `"raise"` ends the run with the error, `"log"` logs it and continues."""


class Hook:
    """Base class of hooks; the attributes say how the methods are called.

    Override the attributes in a subclass, or for one registration with `configure`.
    """

    order: ClassVar[int] = 0
    """Hooks of a lower order complete a phase before those of a higher order start it; hooks of the same order overlap."""
    timeout: ClassVar[float | None] = None
    """Time limit in seconds for one call of a method; costs nothing until the call suspends."""
    on_error: ClassVar[OnError] = "raise"
    """`"log"` for observers: an error is logged with its traceback and the run continues."""
    name: str = ""
    """The name of the hook's state in checkpoints, unique in its session; if empty, the name of its class."""


class HookRegistration(NamedTuple):
    """A hook with its attributes in one session; created by `configure`."""

    hook: Any
    order: int
    timeout: float | None
    on_error: OnError


_UNSET: Any = object()


def configure(hook: Hook, *, order: int = _UNSET, timeout: float | None = _UNSET, on_error: OnError = _UNSET) -> HookRegistration:
    """Return a registration of `hook` with another `order`, `timeout` or `on_error`; the hook itself is unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Raises:
        InvalidArgumentError: an argument is invalid.
        InvalidHookError: `hook` is not a hook.
    """
    if not isinstance(hook, Hook):
        raise InvalidHookError(f"configure got {hook!r}; give an object of a SessionRunHook class")
    return registration_of(
        hook,
        hook.order if order is _UNSET else order,
        hook.timeout if timeout is _UNSET else timeout,
        hook.on_error if on_error is _UNSET else on_error,
    )


def registration_of(hook: Hook, order: Any, timeout: Any, on_error: Any) -> HookRegistration:
    """Check the attributes of a hook and return its registration."""
    name = type(hook).__name__
    check_int(order, f"order of {name}", None, expected="a whole number, lower ones come first")
    check_secs(timeout, f"timeout of {name}", optional=True, positive=True)
    check_choice(on_error, f"on_error of {name}", "raise", "log")
    return HookRegistration(hook, order, timeout, on_error)
