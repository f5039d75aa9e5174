"""Registering hooks: order, time limit, error handling, background calls, a name."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack

from aiohooks._core.validate import (
    check_callable,
    check_choice,
    check_instance,
    check_secs,
    checked_int,
)
from aiohooks.errors import InvalidArgumentError, InvalidHookError

OnError = Literal["raise", "log"]
"""How errors of a hook are handled: `"raise"` ends the call with the error, `"log"` logs it and
continues.
"""


class Hook:
    """Base class of hooks whose attributes say how their methods are called.

    Override the attributes in a subclass, or for one registration with `configure`. A hook of a
    `HookGroup` need not derive from it.
    """

    order: ClassVar[int] = 0
    """Hooks of a lower order complete a call before hooks of a higher order start it. Hooks of the
    same order run concurrently.
    """
    timeout: ClassVar[float | None] = None
    """Time limit in seconds for one call of a coroutine method; costs nothing where the method
    cannot wait.
    """
    on_error: ClassVar[OnError] = "raise"
    """`"log"` for observers: an error is logged with its traceback and the run continues."""
    name: str = ""
    """The name of the hook's state in checkpoints, unique in its session. If it is empty, the
    state has the name of its class.
    """


class HookRegistration(NamedTuple):
    """A hook with its attributes in one group or session, created by `configure`."""

    hook: Any
    order: int = 0
    timeout: float | None = None
    on_error: OnError = "raise"
    background: bool = False
    max_pending: int = 100
    disable_after: int | None = None
    name: str | None = None
    once: bool = False


class HookOptions(TypedDict, total=False):
    """The options of `configure`, which are explained there."""

    order: int
    timeout: float | None
    on_error: OnError
    background: bool
    max_pending: int
    disable_after: int | None
    name: str | None
    once: bool


def configure(
    hook: object,
    **options: Unpack[HookOptions],
) -> HookRegistration:
    """Return a registration of `hook` that says how its methods are called. The hook itself is
    unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Args:
        hook: an object with methods of a hook interface, or a registration, whose other attributes
            are kept.
        options: attributes of the registration, which follow here by name.
        order: hooks of a lower order complete a call before hooks of a higher order start. Hooks of
            the same order run concurrently.
        timeout: time limit in seconds for one call of a coroutine method. A method that wraps
            others has none: use `asyncio.timeout` around its own waits.
        on_error: `"raise"`, or `"log"`: the first failure of each method and type of error is
            logged with its traceback, and further ones are only counted.

            `background`: whether calls of methods that return None are queued and run in order,
            alongside the code that follows. A failure is raised by the next call of the hook, or at
            the end, or logged. In a session this is `after_run`.

            `max_pending`: how many background calls may be queued. The caller waits while there are
            as many. Code of a background call, which other queues may wait for, never waits.

            `disable_after`: take the hook out of the calls, with a warning, when it has failed this
            often in a row.

            `name`: the name of the hook in messages and in the status, in place of its class's.

            `once`: whether a function takes part in one call only, and is removed when that starts.

    Raises:
        InvalidArgumentError: an argument is invalid.
        InvalidHookError: `hook` is a class and not an object of it.
        ValueError: there is no option of that name.
    """
    return registration_of(registration_of(hook)._replace(**options))


def in_order(hooks: Iterable[object]) -> list[HookRegistration]:
    """Return registrations of `hooks` with ascending orders, so that each completes a call before
    the next one starts.

    Hooks of the same order run concurrently, and a list alone says nothing about which one is done
    first. Use it where one hook relies on what another has done: `hooks=[*in_order([restore,
    broadcast]), logging]`.

    The first hook or registration has the order 0, with which others run concurrently.
    """
    return [configure(hook, order=order) for order, hook in enumerate(hooks)]


def registration_of(hook: object) -> HookRegistration:
    """Return the registration of a hook, or a registration itself. Check its attributes."""
    if isinstance(hook, type):
        raise InvalidHookError(
            f"the class {hook.__name__} is given as a hook; give an object of it:"
            f" {hook.__name__}(...)"
        )
    if isinstance(hook, Hook):
        hook = HookRegistration(hook, hook.order, hook.timeout, hook.on_error)
    elif not isinstance(hook, HookRegistration):
        return HookRegistration(hook)
    _check_options(hook)
    return hook


def _check_options(registration: HookRegistration) -> None:
    name = hook_name(registration.hook)
    checked_int(
        registration.order,
        f"order of {name}",
        None,
        expected="a whole number, lower ones come first",
    )
    check_secs(registration.timeout, f"timeout of {name}", optional=True, positive=True)
    check_choice(registration.on_error, f"on_error of {name}", "raise", "log")
    for option in ("background", "once"):
        check_instance(getattr(registration, option), bool, f"{option} of {name}")
    check_instance(registration.name, str, f"name of {name}", optional=True)
    if registration.name == "":
        raise InvalidArgumentError(f"name of {name} is ''; give a text, or leave it out")
    checked_int(registration.max_pending, f"max_pending of {name}", 1)
    checked_int(registration.disable_after, f"disable_after of {name}", 1, optional=True)


def hook_name(hook: Any) -> str:
    """Return the name of a hook in messages: of its class, or of its function."""
    if isinstance(hook, FunctionHook):
        function = hook.__aiohooks_function__
        return getattr(function, "__name__", type(function).__name__)
    return type(hook).__name__


class FunctionHook:
    """A function as a hook with one method."""

    def __init__(self, name: str, function: Any) -> None:
        """Make a hook whose method `name` is the function."""
        check_callable(function, "the function of a hook")
        # The method may have any other name.
        self.__aiohooks_function__: Any = function
        setattr(self, name, function)


def identity(hook: Any) -> object:
    """Return a key of a hook, or of its function.

    A bound method is a new object at each access, which is equal to the previous objects.
    """
    if isinstance(hook, FunctionHook):
        hook = hook.__aiohooks_function__
    is_method = isinstance(hook, (types.MethodType, types.BuiltinMethodType))
    return hook if is_method else id(hook)
