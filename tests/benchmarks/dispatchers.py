"""What dispatchers of async hooks promise, seen by calling them: ours and the published ones, in
one run.

    python -m tests.benchmarks.dispatchers
    python -m tests.benchmarks.dispatchers --page tests/benchmarks/FIGURES.md

Each one calls the same hooks through its own package. The times are medians of rounds in which all
take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import importlib.metadata
import platform
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohooks as ah
from tests.benchmarks.measure import Counts, Figure, Setup, imported, measure, repeated
from tests.benchmarks.report import replace_figures
from tests.benchmarks.rows_dispatch import Events
from tests.conformance.report import LOOPS, loop_factory
from tests.fuzz._harness import log_disabled
from tests.support.needs import MissingError

Hook = Callable[..., Coroutine[Any, Any, None]]
"""A coroutine function that takes whatever a dispatcher passes; nothing is put around it."""
Call = Callable[[], Awaitable[object]]
"""Dispatches one event to the hooks."""
Connect = Callable[[Sequence[Hook]], AbstractAsyncContextManager[Call]]
"""Connects hooks to a dispatcher, in its own way."""

WAIT_SECS = 0.050
FAIL_SECS = 0.020
SLOW_SECS = 0.200
COST_HOOKS = 8
SECTION = "dispatchers"
PACKAGES = ("langchain-core", "llama-index-instrumentation", "aiosignal", "blinker", "apluggy")


# -- the dispatchers


@asynccontextmanager
async def aiohooks_group(
    hooks: Sequence[Hook], timeout: float | None = None
) -> AsyncIterator[Call]:
    """A `HookGroup`; with `timeout` each hook has this time limit."""
    made: list[Any] = [type("Hook", (), {"on_event": hook})() for hook in hooks]
    if timeout is not None:
        made = [ah.configure(hook, timeout=timeout) for hook in made]
    async with ah.HookGroup(Events, made) as group:
        method = group.hooks.on_event
        yield lambda: method("event")


@asynccontextmanager
async def langchain(hooks: Sequence[Hook], raise_error: bool = False) -> AsyncIterator[Call]:
    """`ahandle_event` of langchain-core, with its handlers."""
    base = imported("langchain-core", "langchain_core.callbacks.base").AsyncCallbackHandler
    dispatch = imported("langchain-core", "langchain_core.callbacks.manager").ahandle_event
    handlers = [
        type("Handler", (base,), {"on_custom_event": hook, "raise_error": raise_error})()
        for hook in hooks
    ]
    run_id = uuid.uuid4()
    yield lambda: dispatch(handlers, "on_custom_event", None, "event", None, run_id=run_id)


@asynccontextmanager
async def llama_index(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """The `Dispatcher` that llama-index-core instruments itself with."""
    package = "llama-index-instrumentation"
    dispatcher = imported(package, "llama_index_instrumentation.dispatcher").Dispatcher
    base = imported(package, "llama_index_instrumentation.event_handlers").BaseEventHandler
    event = imported(package, "llama_index_instrumentation.base").BaseEvent()

    def handle(self: object, event: object) -> None:
        """Called for events that are dispatched without awaiting."""

    made = [
        type(base)("Handler", (base,), {"ahandle": hook, "handle": handle, "__module__": __name__})
        for hook in hooks
    ]
    connected = dispatcher(
        name="events", event_handlers=[handler() for handler in made], propagate=False
    )
    yield lambda: connected.aevent(event)


@asynccontextmanager
async def aiosignal(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """A frozen `Signal` of aiosignal, aiohttp's."""
    signal = imported("aiosignal", "aiosignal").Signal(None)
    signal.extend(hooks)
    signal.freeze()
    yield lambda: signal.send("event")


@asynccontextmanager
async def blinker(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """A `Signal` of blinker, Flask's."""
    signal = imported("blinker", "blinker").Signal()
    for hook in hooks:
        signal.connect(hook)
    yield lambda: signal.send_async("event")


@asynccontextmanager
async def apluggy(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """`PluginManager.ahook` of apluggy: pluggy with async hooks."""
    package = imported("apluggy", "apluggy")
    spec, implementation = package.HookspecMarker("events"), package.HookimplMarker("events")
    manager = package.PluginManager("events")
    manager.add_hookspecs(type("Spec", (), {"on_event": spec(Events.on_event)}))
    for hook in hooks:
        manager.register(type("Plugin", (), {"on_event": implementation(hook)})())
    yield lambda: manager.ahook.on_event(event="event")


@asynccontextmanager
async def gathered(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """`asyncio.gather` by hand."""
    yield lambda: asyncio.gather(*[hook("event") for hook in hooks])


@asynccontextmanager
async def task_group(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """`asyncio.TaskGroup` by hand."""

    async def dispatch() -> None:
        async with asyncio.TaskGroup() as tasks:
            for hook in hooks:
                tasks.create_task(hook("event"))

    yield dispatch


@asynccontextmanager
async def in_turn(hooks: Sequence[Hook]) -> AsyncIterator[Call]:
    """Awaiting one after the other by hand."""

    async def dispatch() -> None:
        for hook in hooks:
            await hook("event")

    yield dispatch


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """One line of the table: how hooks are connected, and connected with a time limit, if it has
    such.
    """

    name: str
    connect: Connect
    with_timeout: Connect | None = None


OURS = "aiohooks.HookGroup"
BASELINE = "awaiting one after another, by hand"
DISPATCHERS = (
    Dispatcher(OURS, aiohooks_group, partial(aiohooks_group, timeout=FAIL_SECS)),
    Dispatcher("langchain-core ahandle_event", langchain),
    Dispatcher("the same, raise_error=True", partial(langchain, raise_error=True)),
    Dispatcher("llama-index Dispatcher.aevent", llama_index),
    Dispatcher("aiosignal Signal.send", aiosignal),
    Dispatcher("blinker Signal.send_async", blinker),
    Dispatcher("apluggy ahook", apluggy),
    Dispatcher("asyncio.gather, by hand", gathered),
    Dispatcher("asyncio.TaskGroup, by hand", task_group),
    Dispatcher(BASELINE, in_turn),
)


# -- what is looked at


Line = tuple[str, ...]
"""What was seen of one dispatcher: a cell for each of `HEADINGS`."""


async def overlap(connect: Connect) -> str:
    """Return how long two hooks take that wait 50 ms each: the best of three calls."""
    took: list[float] = []
    async with connect([_waiting(WAIT_SECS), _waiting(WAIT_SECS)]) as call:
        for _ in range(3):
            began = time.perf_counter()
            await call()
            took.append(time.perf_counter() - began)
    return f"{min(took) * 1e3:.0f} ms"


async def variables(connect: Connect) -> str:
    """Return whether the caller sees the context variables that its hooks have set."""
    seen: list[contextvars.ContextVar[bool]] = [
        contextvars.ContextVar(f"variable_{number}") for number in range(2)
    ]

    def setting(variable: contextvars.ContextVar[bool]) -> Hook:
        async def hook(*args: object, **keywords: object) -> None:
            await asyncio.sleep(0)
            variable.set(True)

        return hook

    async with connect([setting(variable) for variable in seen]) as call:
        await call()
    return "yes" if all(variable.get(False) for variable in seen) else "no"


async def failure(connect: Connect) -> tuple[str, str]:
    """Return what the caller gets of an error after 20 ms, and what becomes of a hook of 200 ms
    beside the one that failed.
    """
    error = ValueError("a hook failed")
    states: list[str] = []

    async def failing(*args: object, **keywords: object) -> None:
        await asyncio.sleep(FAIL_SECS)
        raise error

    async def slow(*args: object, **keywords: object) -> None:
        states.append("still running")
        try:
            await asyncio.sleep(SLOW_SECS)
        except asyncio.CancelledError:
            states.append("cancelled and awaited")
            raise
        states.append("finishes first")

    async with connect([failing, slow]) as call:
        try:
            await call()
        except BaseException as raised:
            kept = "kept" if raised is error else f"inside {type(raised).__name__}"
        else:
            kept = "swallowed"
        sibling = states[-1] if states else "never started"
        await asyncio.sleep(SLOW_SECS)  # what still runs ends before the next line
    return kept, sibling


async def timeout(connect: Connect | None) -> str:
    """Return what a hook of 200 ms with a limit of 20 ms ends with."""
    if connect is None:
        return "no"
    async with connect([_waiting(SLOW_SECS)]) as call:
        try:
            await call()
        except TimeoutError as error:
            return f"per hook: {type(error).__name__}"
    return "no"


def _waiting(secs: float) -> Hook:
    async def hook(*args: object, **keywords: object) -> None:
        await asyncio.sleep(secs)

    return hook


def _silent() -> Hook:
    async def hook(*args: object, **keywords: object) -> None:
        pass

    return hook


# -- the table


async def cost(
    dispatchers: Sequence[Dispatcher], make: Callable[[], Hook], counts: Counts
) -> dict[str, float]:
    """Return the seconds of a call of eight hooks, by dispatcher; all of them are measured in
    turns.
    """

    @asynccontextmanager
    async def row(_: Counts) -> AsyncIterator[Setup]:
        async with AsyncExitStack() as stack:
            hooks = [make() for _ in range(COST_HOOKS)]
            lanes = {
                one.name: repeated(await stack.enter_async_context(one.connect(hooks)))
                for one in dispatchers
            }
            yield Setup(lanes, [Figure(name, None, name, BASELINE) for name in lanes])

    return {result.work: result.ours_secs or 0.0 for result in await measure(SECTION, row, counts)}


async def behaviour(one: Dispatcher) -> tuple[str, str, str, str, str]:
    """Return what the table says of a dispatcher before its costs."""
    with log_disabled():
        kept, sibling = await failure(one.connect)
        return (
            await overlap(one.connect),
            await variables(one.connect),
            kept,
            sibling,
            await timeout(one.with_timeout),
        )


async def look(counts: Counts) -> tuple[list[Line], list[str]]:
    """Return a line for each dispatcher that is installed, and the names of the packages that are
    not.
    """
    there: list[Dispatcher] = []
    missing: dict[str, None] = {}
    for one in DISPATCHERS:
        try:
            async with one.connect([]):
                there.append(one)
        except MissingError as error:
            missing[str(error)] = None
    # Each in a task of its own: on Python 3.11 a failed TaskGroup leaves its task with a cancel
    # that is not taken back.
    seen = {one.name: await asyncio.create_task(behaviour(one)) for one in there}
    with log_disabled():
        quick = await cost(there, _silent, counts)
        suspending = await cost(there, lambda: _waiting(0), counts)
    return [
        (name, *cells, f"{quick[name] * 1e6:.1f} us", f"{suspending[name] * 1e6:.0f} us")
        for name, cells in seen.items()
    ], list(missing)


HEADINGS = (
    "dispatcher",
    "2 hooks of 50 ms",
    "variables seen by the caller",
    "error",
    "slow sibling of a failure",
    "time limit",
    "8 hooks, none suspends",
    "8 hooks suspend once",
)


def table(lines: Sequence[Line]) -> str:
    """Format the table of the page."""
    first, *rest = (f"| {' | '.join(row)} |" for row in [HEADINGS, *lines])
    return "\n".join([first, f"|{' --- |' * 6}{' ---: |' * 2}", *rest])


def versions(loop: str) -> str:
    """Return the sentence that says with what the table was measured."""
    installed: list[str] = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{package} {importlib.metadata.version(package)}")
    return f"Measured with Python {platform.python_version()} on {loop}; {', '.join(installed)}."


def main(argv: list[str] | None = None) -> int:
    """Print the table, or put it into a page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.dispatchers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    parser.add_argument(
        "--rounds", type=int, default=Counts().rounds, help="how often each cost is measured"
    )
    parser.add_argument("--page", type=Path, metavar="PAGE", help="put the table into a page")
    options = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
        lines, missing = runner.run(look(replace(Counts(), rounds=options.rounds)))
    text = f"{versions(options.loop)}\n\n{table(lines)}"
    if options.page is not None:
        replace_figures(options.page, SECTION, text)
    else:
        print(text)
    if missing:
        print(f"\n{', '.join(missing)}; pip install --group bench", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
