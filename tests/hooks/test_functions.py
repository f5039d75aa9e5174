"""@hook: functions in place of a hook's methods."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.functions import hook
from aiohooks.session.hook import HOOK_METHODS
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.sessions import counting, going_back, make_runs

ARGUMENTS = dict(zip(HOOK_METHODS, (0, 2, 1, 2, 1, 1), strict=True))


async def run(*hooks: ah.SessionRunHook, times: int = 1, start: int = 0) -> list[Any]:
    """Return the values of `loss` in so many runs."""
    found: list[Any] = []
    async with counting(*hooks, global_step=ah.MemoryStepStore(start)) as session:
        found += [await session.run(["train", "loss"]) for _ in range(times)]
    return found


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
async def test_each_function_is_called_as_its_method(is_async: bool) -> None:
    """Plain and async functions get the method's arguments, in the order of a hook's life."""
    calls: list[tuple[str, int]] = []

    def function(method: str) -> Any:
        def plain(*args: Any) -> None:
            calls.append((method, len(args)))

        async def waits(*args: Any) -> None:
            plain(*args)

        return waits if is_async else plain

    await run(*[hook(method)(function(method)) for method in HOOK_METHODS])
    assert calls == list(ARGUMENTS.items())


async def test_methods_without_a_function_are_not_called() -> None:
    """A method without a function is not overridden, so the session has nothing to call."""
    quiet = hook("end")(lambda session: None)
    assert {*HOOK_METHODS} & quiet.__dict__.keys() == {"end"}
    session = counting(quiet)
    assert (session._lifecycle.hooks.before_run, session._lifecycle.hooks.after_run) == ((), ())
    await run(quiet)


async def test_a_decorated_function_is_a_hook() -> None:
    """`@hook` makes a hook of a function, with its fetches; it is named after the function."""
    seen: list[tuple[int, Any]] = []

    @hook("after_run", fetches={"loss": "loss"})
    async def note(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        seen.append((run_context.global_step, run_values.results))

    assert isinstance(note, ah.SessionRunHook)
    assert note.name == "note"
    assert hook("end", name="other")(lambda session: None).name == "other"
    await run(note, times=2)
    assert seen == [(1, {"loss": 10}), (2, {"loss": 10})]


@pytest.mark.parametrize("fetches", [None, "loss"])
async def test_only_runs_that_are_due(fetches: Any) -> None:
    """With `every` only the runs at which a boundary is crossed count, and nothing is fetched for
    the others.
    """
    seen: list[tuple[int, Any]] = []

    @hook("after_run", every=ah.Every(steps=3), fetches=fetches)
    def note(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        seen.append((run_context.global_step, run_values.results))

    for start, steps in ((0, [3, 6]), (4, [6, 9])):  # separately in each session
        await run(note, times=7, start=start)
        assert seen == [(step, None if fetches is None else 10) for step in steps]
        seen.clear()


async def test_every_over_time_and_recoveries() -> None:
    """Seconds are those of the current clock; after a recovery that moved the step back, the
    repeated runs count again.
    """
    seen: list[int] = []
    with ManualClock() as clock:
        note = hook("after_run", every=ah.Every(secs=10))(
            lambda context, values: seen.append(context.global_step)
        )
        async with counting(note) as session:
            for secs in (9, 1, 9, 2):
                clock.advance(secs)
                await session.run("train")
    assert seen == [2, 4]
    seen.clear()
    note = hook("after_run", every=ah.Every(steps=2))(
        lambda context, values: seen.append(context.global_step)
    )
    assert "first" in getattr(note, "state_dict")()  # noqa: B009 - it has one because of `every`
    async with going_back(note, at=5, to=1) as session:
        await make_runs(session, 7, "train")
    assert seen == [2, 4, 2, 4]


@pytest.mark.parametrize("method", HOOK_METHODS)
def test_a_function_with_other_parameters_is_refused(method: Any) -> None:
    """A function that does not take the method's arguments is refused when the hook is created,
    with both signatures.
    """

    def other(one: int, two: int, three: int) -> None: ...

    count = ARGUMENTS[method]
    parameters = {0: "()", 1: "(", 2: ", "}[count]
    with refused(
        ah.errors.InvalidHookError,
        f"{method} is",
        "takes (one",
        "is called with",
        parameters,
        "missing a required",
    ):
        hook(method)(other)
    fitting: Any = functools.partial(
        other, **dict.fromkeys(["three", "two", "one"][: 3 - count], 1)
    )
    assert isinstance(hook(method)(fitting), ah.SessionRunHook)


async def begin() -> None: ...


@pytest.mark.parametrize("method", ["beginn", print])
def test_what_is_no_method_is_refused(method: Any) -> None:
    """The error has the nearest method."""
    with refused(ah.errors.InvalidHookError, "is not a method of a hook"):
        hook(method)
    with refused(ah.errors.InvalidHookError, "did you mean 'begin'?"):
        hook("beginn")


def test_what_is_no_function_is_refused() -> None:
    """A coroutine in place of its function is closed."""
    with refused(ah.errors.InvalidArgumentError, "a coroutine; give the function"):
        hook("begin")(begin())  # type: ignore[arg-type]
    with refused(ah.errors.InvalidArgumentError, "give a function"):
        hook("end")(5)  # type: ignore[arg-type]


async def test_functions_without_a_signature() -> None:
    """A function without a signature is accepted as it is; so is a callable object."""

    class Note:
        def __call__(self, exc: BaseException | None) -> None:
            closed.append(exc)

    closed: list[BaseException | None] = []
    quiet: Any = type("Quiet", (), {"__call__": lambda self, *args: None, "__signature__": None})()
    await run(hook("close")(Note()), hook("end")(quiet), hook("begin")(dict))
    assert closed == [None]
