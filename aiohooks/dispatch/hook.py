"""Registering hooks: order, time limit, error handling, background calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

from aiohooks._core.validate import check_choice, check_instance, check_secs, checked_int
from aiohooks.errors import InvalidHookError

OnError = Literal["raise", "log"]
"""How errors of a hook are handled: `"raise"` ends the call with the error, `"log"` logs it and
continues.
"""
OnFull = Literal["wait", "drop"]
"""What a full queue of background calls does: the caller waits for a place, or its call is
dropped.
"""


class Hook:
    """Base class of hooks whose attributes say how their methods are called.

    Override the attributes in a subclass, or for one registration with `configure`. A hook of a
    `HookGroup` need not derive from it.
    """

    order: ClassVar[int] = 0
    """Hooks of a lower order complete a call before those of a higher order start it; those of one
    order run concurrently.
    """
    timeout: ClassVar[float | None] = None
    """Time limit in seconds for one call of a coroutine method; costs nothing where the method
    cannot wait.
    """
    on_error: ClassVar[OnError] = "raise"
    """`"log"` for observers: an error is logged with its traceback and the run continues."""
    name: str = ""
    """The name of the hook's state in checkpoints, unique in its session; if empty, the name of its
    class.
    """


class HookRegistration(NamedTuple):
    """A hook with its attributes in one group or session; created by `configure`."""

    hook: Any
    order: int = 0
    timeout: float | None = None
    on_error: OnError = "raise"
    background: bool = False
    max_pending: int = 100
    disable_after: int | None = None
    observer: bool = False
    on_full: OnFull = "wait"
    retry_secs: float | None = None
    thread: bool = False
    given: frozenset[str] = frozenset()
    """The names of the attributes that were given, so that no default of a group takes their
    place.
    """


class HookOptions(TypedDict, total=False):
    """The options of `configure`, which are explained there."""

    order: int
    timeout: float | None
    on_error: OnError
    background: bool
    max_pending: int
    disable_after: int | None
    observer: bool
    on_full: OnFull
    retry_secs: float | None
    thread: bool


class _Unset:
    """The class of `UNSET`: as the registration or the hook says."""

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


def configure(
    hook: object,
    *,
    order: int = UNSET,
    timeout: float | None = UNSET,
    on_error: OnError = UNSET,
    background: bool = UNSET,
    max_pending: int = UNSET,
    disable_after: int | None = UNSET,
    observer: bool = UNSET,
    on_full: OnFull = UNSET,
    retry_secs: float | None = UNSET,
    thread: bool = UNSET,
) -> HookRegistration:
    """Return a registration of `hook` that says how its methods are called; the hook itself is
    unchanged.

    Example: `hooks=[configure(MetricsHook(), timeout=5.0, on_error="log")]`.

    Args:
        hook: an object with methods of a hook interface; or a registration, of which the other
            attributes are kept.
        order: hooks of a lower order complete a call before those of a higher order start; those of
            one order run concurrently.
        timeout: time limit in seconds for one call of a method, which must be a coroutine. The time
            of the others in a method that wraps them has no limit.
        on_error: `"raise"`, or `"log"`: the 1st failure is logged with its traceback, and the 10th,
            the 100th and so on.
        background: whether calls of methods that return None are queued and run in order beside
            what follows. A failure is raised by the next call of the hook, or at the end, or
            logged. In a session this is `after_run`.
        max_pending: how many background calls may be queued; the caller waits while there are as
            many, unless the queue would wait for it, as for a hook that calls its own group.
        disable_after: take the hook out of the calls, with a warning, when it has failed this often
            in a row; with `on_error="log"` only.
        observer: whether it only observes methods that return a result: it is called before the
            others, with the caller's arguments. Observers run concurrently; their own results do
            not count.
        on_full: `"wait"`, or `"drop"`: a background call is dropped if the queue is full, counted,
            and logged as failures are.
        retry_secs: try a disabled hook again after this time, by one call, and if that fails, after
            as long again.
        thread: whether plain methods that stand for coroutine methods are called in a worker thread
            each, so that they may block; for a hook of a group, as `BlockingHook(hook)`. A cancel
            or time limit waits for it, for at most the grace period.

    Raises:
        InvalidArgumentError: an argument is invalid.
        InvalidHookError: `hook` is a class and not an object of it, or an option has no effect
            without another.
    """
    given: dict[str, Any] = {name: one for name, one in locals().items() if one is not UNSET}
    known = registration_of(given.pop("hook"))
    registration = registration_of(known._replace(**given, given=known.given.union(given)))
    for name in ("max_pending", "on_full"):
        if name in given and background is UNSET and not known.background:
            raise InvalidHookError(
                f"{name} of {type(known.hook).__name__} is {given[name]}, but its calls are not"
                " queued; give background=True too"
            )
    return registration


def with_defaults(registration: HookRegistration, **defaults: Any) -> HookRegistration:
    """Return a registration with `defaults` where it has no attributes of its own."""
    usual = HookRegistration._field_defaults
    missing = (
        name
        for name in defaults
        if getattr(registration, name) == usual[name] and name not in registration.given
    )
    return registration._replace(**{name: defaults[name] for name in missing})


BLOCKING = "__aiohooks_blocking__"
"""The attribute of a class whose objects call the plain methods of another in worker threads: that
of which has this one.
"""


def for_group(hook: Any, lifecycle: Any) -> Any:
    """Return what is called for a hook of a group: the object of a `BlockingHook` itself, in
    threads.
    """
    given: object = hook.hook if isinstance(hook, HookRegistration) else hook
    place: str | None = getattr(type(given), BLOCKING, None)
    if place is None or lifecycle in type(given).__mro__:
        return hook
    return registration_of(hook)._replace(hook=getattr(given, place), thread=True)


def in_order(hooks: Iterable[object], *, first: int = 0) -> list[HookRegistration]:
    """Return registrations of `hooks` with ascending orders, so that each completes a call before
    the next one starts.

    Hooks of the same order run concurrently, and a list alone says nothing about which one is done
    first. Use it where one hook relies on what another has done: `hooks=[*in_order([restore,
    broadcast]), logging]`.

    Args:
        hooks: hooks or registrations.
        first: the order of the first one; others of that order run concurrently with it.
    """
    first = checked_int(first, "first", None, expected="a whole number")
    return [configure(hook, order=order) for order, hook in enumerate(hooks, first)]


def registration_of(hook: object) -> HookRegistration:
    """Return the registration of a hook, which may be one already; raise unless its attributes are
    valid.
    """
    if isinstance(hook, type):
        raise InvalidHookError(
            f"the class {hook.__name__} is given as a hook; give an object of it:"
            f" {hook.__name__}(...)"
        )
    if isinstance(hook, Hook):
        # Not by their values: a class that sets what the base class has means it.
        bases = type(hook).__mro__
        names = frozenset(getattr(hook, "__dict__", ())).union(
            *map(vars, bases[: bases.index(Hook)])
        )
        given = names.intersection(HookRegistration._fields)
        hook = HookRegistration(hook, hook.order, hook.timeout, hook.on_error, given=given)
    elif not isinstance(hook, HookRegistration):
        return HookRegistration(hook)
    if isinstance(hook.hook, HookRegistration):
        raise InvalidHookError(f"{hook!r} is a registration of a registration; give the hook")
    name = hook_name(hook.hook)
    checked_int(
        hook.order, f"order of {name}", None, expected="a whole number, lower ones come first"
    )
    check_secs(hook.timeout, f"timeout of {name}", optional=True, positive=True)
    check_choice(hook.on_error, f"on_error of {name}", "raise", "log")
    for option in ("background", "observer", "thread"):
        check_instance(getattr(hook, option), bool, f"{option} of {name}")
    checked_int(hook.max_pending, f"max_pending of {name}", 1)
    check_choice(hook.on_full, f"on_full of {name}", "wait", "drop")
    checked_int(hook.disable_after, f"disable_after of {name}", 1, optional=True)
    check_secs(hook.retry_secs, f"retry_secs of {name}", optional=True, positive=True)
    if hook.disable_after is not None and hook.on_error != "log":
        raise InvalidHookError(
            f"disable_after of {name} is {hook.disable_after}, but its errors are raised; give"
            ' on_error="log" too'
        )
    if hook.retry_secs is not None and hook.disable_after is None:
        raise InvalidHookError(
            f"retry_secs of {name} is {hook.retry_secs}, but it is never disabled; give"
            " disable_after too"
        )
    return hook


def hook_name(hook: object) -> str:
    """Return the name of a hook in messages: that of its class, or of the function that it was made
    of.
    """
    return getattr(hook, "__aiohooks_name__", None) or type(hook).__name__
