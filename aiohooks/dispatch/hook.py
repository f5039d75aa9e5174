"""Registering hooks: order, time limit, error handling, background calls, a name.

A registration is a hook and the options for its calls.

    Hook              a base class for hooks whose options are attributes
    configure         makes a registration with options
    in_order          registers hooks so that they are called one after another
    registration_of   makes the registration of a hook, and checks it
    FunctionHook      a function as a hook with one method
"""

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
from aiohooks.errors import InvalidArgumentError, InvalidHookError, safe_repr

OnError = Literal["raise", "log"]
"""How errors of a hook are handled: `"raise"` ends the call with the error, `"log"` logs it and
continues.
"""


class Hook:
    """A base class for hooks with options. A hook of a `HookGroup` need not derive from it.

    Set the attributes in your subclass, or for a single registration with `configure`.
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
    """A hook and its options. Created by `configure`."""

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
    """Return `hook` with options for its calls, to pass to a group or session. The hook itself is
    unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Args:
        hook: an object with methods of a hook interface, or a registration, whose other options are
            kept.
        options: the options that follow here, by name.
        order: hooks of a lower order complete a call before hooks of a higher order start. Hooks of
            the same order run concurrently.
        timeout: the limit in seconds for each call of a coroutine method. A method that wraps
            others cannot have one: use `asyncio.timeout` around its own waits.
        on_error: `"raise"` raises each failure. `"log"` logs the first failure of each method and
            type of error with its traceback, and counts the others.
        background: whether calls of methods that return None are queued and run in order, while
            the caller continues. A failure is raised by the next call of the hook or at the end, or
            logged. In a session this applies to `after_run`.
        max_pending: how many background calls may be queued before the caller has to wait. Code
            that is part of a background call itself never waits for a place in a queue.
        disable_after: after how many failures in a row the hook is no longer called. A warning
            reports this. At the end, it is still exited, or closed by its session.
        name: the name of the hook in messages and in the status, in place of its class's name.
        once: whether a function is called only once. It is removed when that call starts.

    Raises:
        InvalidArgumentError: an argument is invalid.
        InvalidHookError: `hook` is a class and not an object of it.
        TypeError: there is no option of that name.
    """
    # A type checker rejects any other name, but a program may still pass one.
    for name in options.keys() - HookOptions.__optional_keys__:
        known = ", ".join(sorted(HookOptions.__optional_keys__))
        raise TypeError(f"configure() has no option {name!r}; it has {known}")
    # The inner call accepts a hook or a registration, and the outer call checks the options.
    registration = registration_of(registration_of(hook)._replace(**options))
    if "max_pending" in options and not registration.background:
        raise InvalidHookError(
            f"max_pending of {hook_name(registration.hook)} is {registration.max_pending}, but its"
            " calls are not queued; give background=True too"
        )
    return registration


def in_order(hooks: Iterable[object]) -> list[HookRegistration]:
    """Return registrations of `hooks` that make each hook complete a call before the next hook
    starts.

    By default hooks run concurrently, whatever their order in the list. Use this if a hook relies
    on another: `hooks=[*in_order([restore, broadcast]), logging]`.

    The orders are 0, 1, 2 and so on. Other hooks have order 0, and run concurrently with the first
    hook.

    Raises:
        InvalidHookError: `hooks` is no collection, or a hook is invalid.
    """
    check_hooks(hooks)
    return [configure(hook, order=order) for order, hook in enumerate(hooks)]


def check_hooks(hooks: object) -> None:
    """Raise unless `hooks` is a collection, and not a hook itself."""
    if isinstance(hooks, (Hook, HookRegistration)) or not isinstance(hooks, Iterable):
        raise InvalidHookError(f"hooks is {safe_repr(hooks)}; give a list of hooks")


def registration_of(hook: object) -> HookRegistration:
    """Return a hook as a registration with valid options. A registration is returned as it is.

    Raises:
        InvalidHookError: the hook is a class.
        InvalidArgumentError: an option is invalid.
    """
    if isinstance(hook, HookRegistration):
        registration = hook
    elif isinstance(hook, Hook):
        registration = HookRegistration(hook, hook.order, hook.timeout, hook.on_error)
    else:
        registration = HookRegistration(hook)
    if isinstance(registration.hook, type):
        name = registration.hook.__name__
        raise InvalidHookError(
            f"the class {name} is given as a hook; give an object of it: {name}(...)"
        )
    # The default options of any other object need no check.
    if isinstance(hook, (Hook, HookRegistration)):
        _check_options(registration)
    return registration


def _check_options(registration: HookRegistration) -> None:
    """Raise unless each option of a registration has a valid value."""
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
    function = hook
    if isinstance(hook, FunctionHook):
        function = hook.__aiohooks_function__
    elif not isinstance(hook, (types.FunctionType, types.MethodType)):
        # An object may have a `__name__` that means something else, so its class names it.
        return type(hook).__name__
    return getattr(function, "__name__", type(function).__name__)


class FunctionHook:
    """A function as a hook with one method."""

    def __init__(self, name: str, function: Any) -> None:
        """Make a hook whose method `name` is the function."""
        check_callable(function, "the function of a hook")
        # A special name, as the method of the interface, set below, may have any other one.
        self.__aiohooks_function__: Any = function
        setattr(self, name, function)


def identity(hook: Any) -> object:
    """Return the key under which a group finds a hook. For a function, that of the function.

    The key of an object is its `id`, as objects may be equal or not hashable. A bound method is its
    own key: `object.method` makes a new object each time, and these objects are equal.
    """
    if isinstance(hook, FunctionHook):
        hook = hook.__aiohooks_function__
    is_method = isinstance(hook, (types.MethodType, types.BuiltinMethodType))
    return hook if is_method else id(hook)
