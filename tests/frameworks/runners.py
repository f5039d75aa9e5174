"""A run of each framework with hooks composed for it: its own runner, with a model, a broker or a
server in this process.

The line under `# composed` is what a user writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

Body = Callable[[], Awaitable[None]]


class Runner(NamedTuple):
    """A framework."""

    run: Callable[[Sequence[Any]], Coroutine[Any, Any, object]]
    """Compose the hooks and run what calls them; return what the tool, the task or the page has
    returned.
    """
    hook: Callable[[Body], object]
    """Make a hook that does what is given, and has no answer."""
    result: object
    """What is returned when no hook fails."""


RUNNERS: dict[str, Runner] = {}


Run = Callable[[Any], Coroutine[Any, Any, object]]


def runner(hook: Callable[[Body], object], result: object) -> Callable[[Run], Run]:
    """Add the function to `RUNNERS`, by its name."""

    def add(run: Run) -> Run:
        RUNNERS[run.__name__] = Runner(run, hook, result)
        return run

    return add


def hook_overriding(name: str, base: type[Any] = object) -> Callable[[Body], object]:
    """Return what makes a hook with one coroutine method of that name, which takes all
    arguments.
    """

    def make(body: Body) -> object:
        async def method(self: Any, *args: Any, **keywords: Any) -> None:
            await body()

        return type("Hook", (base,), {name: method})()

    return make


def function(body: Body) -> object:
    """Make a hook that is a function."""

    async def hook(*args: Any, **keywords: Any) -> None:
        await body()

    return hook
