"""TensorFlow's own tests of step functions (150-164 in the table): what they may do, how they stop,
and recovery.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.checks import refused
from tests.support.sessions import NO_BACKOFF, counting, counting_graph
from tests.tensorflow.blocks import MakeSession, both_kinds, lost, run_block

pytestmark = pytest.mark.every_python


async def use(context: ah.session.StepContext) -> Any:
    """Run once with hooks: a step function."""
    return await context.run_with_hooks("loss")


@both_kinds
@pytest.mark.parametrize("value", [42, None, "text", {"a": [1]}], ids=repr)
async def test_a_step_function_returns_a_value(make: MakeSession, value: object) -> None:
    """`run_step_fn` returns what the function returns, of any type."""

    async def step_fn(context: ah.session.StepContext) -> object:
        await context.session.run("train")
        return value

    async with make(counting_graph()) as session:
        assert await session.run_step_fn(step_fn) is value
        assert session.global_step.latest.step == 1


async def test_request_stop_raises_in_the_caller() -> None:
    """It reaches the caller of `run_step_fn` as StopRequestedError, and, unlike TensorFlow's, it is
    a stop from then on.
    """

    async def step_fn(context: ah.session.StepContext) -> None:
        context.request_stop()

    async with counting() as session:
        with refused(ah.StopRequestedError, "the step function requested a stop"):
            await session.run_step_fn(step_fn)
        assert session.should_stop()


@both_kinds
@pytest.mark.parametrize(
    ("script", "reason", "hooked", "steps"),
    [
        (
            ["hooked", "next", "ask"],
            "two are enough",
            1,
            1,
        ),  # in a loop: code after it does not run
        (["raw", "ask"], "two are enough", 0, 1),  # no `before_run` of a run that does not begin
        (["stop", "next"], "over", 0, 0),  # the function is not entered after a stop
        (
            ["hooked", "stop", "raw", "hooked"],
            "over",
            1,
            2,
        ),  # a stop in it lets it make raw runs, and none with hooks
    ],
)
async def test_a_stop_ends_the_block_cleanly(
    make: MakeSession, script: list[str], reason: str, hooked: int, steps: int
) -> None:
    """By the function itself, immediately, or by others at its next run with hooks; `end` is
    called.
    """
    hook, left = RecordingHook(), [*script]

    async def step_fn(context: ah.session.StepContext) -> None:
        while (what := left.pop(0)) != "next":
            if what == "ask":
                context.request_stop("two are enough")
            elif what == "stop":
                session.request_stop("over")
            else:
                await (
                    context.run_with_hooks("train")
                    if what == "hooked"
                    else context.session.run("train")
                )

    async with make(counting_graph(), [hook]) as session:
        if script[0] == "stop":
            session.request_stop("over")
        while True:
            await session.run_step_fn(step_fn)
    assert session.stop_reason == reason
    assert hook.phases() == [
        "begin",
        "after_create_session",
        *["before_run", "after_run"] * hooked,
        "end",
        "close",
    ]
    assert session.global_step.latest.step == steps


# -- what a step function may be


class Model:
    """Step functions that are methods."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def step(self, any_name: ah.session.StepContext) -> int:
        await any_name.run_with_hooks("loss")
        return self.number

    async def __call__(self, context: ah.session.StepContext) -> int:
        return await self.step(context)

    async def with_extra(self, context: ah.session.StepContext, factor: int = 2) -> int:
        return self.number * factor


async def test_a_step_function_is_anything_that_is_called_with_a_context() -> None:
    """Methods, objects, partials, with a parameter of any name, and further ones with a default."""
    model = Model(7)
    async with counting() as session:
        assert await session.run_step_fn(model.step) == 7
        assert await session.run_step_fn(model) == 7
        assert await session.run_step_fn(model.with_extra) == 14
        assert await session.run_step_fn(functools.partial(model.with_extra, factor=3)) == 21
        assert await session.run_step_fn(lambda context: model.step(context)) == 7


async def test_a_function_with_other_parameters_is_no_step_function() -> None:
    """A function that cannot be called with one context is an error; nothing is run."""

    async def none_at_all() -> None: ...

    async def one_too_many(context: ah.session.StepContext, extra: int) -> None: ...

    hook = RecordingHook()
    async with counting(hook) as session:
        for fn in (none_at_all, one_too_many):
            with pytest.raises(TypeError, match="positional argument"):
                await session.run_step_fn(fn)  # type: ignore[arg-type]
    assert "before_run" not in hook.phases()


# -- with hooks


@both_kinds
async def test_the_order_of_effects(make: MakeSession) -> None:
    """Raw runs, runs with hooks, and raw runs of hooks see each other's effects in the order in
    which they are made.
    """
    seen: list[tuple[str, int]] = []

    class Hook(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
            seen.append(("before_run", await run_context.session.run("total")))
            await run_context.session.run("train", {"x": 10})
            return ah.SessionRunArgs("total")

        async def after_run(
            self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
        ) -> None:
            seen.append(("beside the run", run_values.results))
            seen.append(("after_run", await run_context.session.run("total")))

    async def step_fn(context: ah.session.StepContext) -> int:
        await context.session.run("train", {"x": 100})
        await context.run_with_hooks("train", {"x": 1})
        await context.run_with_hooks("train", {"x": 1})
        return int(await context.session.run("total"))

    async with make(counting_graph(), [Hook()]) as session:
        assert await session.run_step_fn(step_fn) == 122
    assert seen == [
        *[("before_run", 100), ("beside the run", 110), ("after_run", 111)],
        *[("before_run", 111), ("beside the run", 121), ("after_run", 122)],
    ]


# -- recovery


@pytest.mark.parametrize("lost_in", ["the function", "a raw run", "before_run", "after_run"])
async def test_a_recoverable_error_repeats_the_whole_function(lost_in: str) -> None:
    """After recovery the function is called again from its beginning, wherever in it the error came
    from.
    """
    attempts: list[tuple[int, str]] = []
    graph = counting_graph()

    @graph.operation
    def fragile() -> None:
        if lost_in == "a raw run" and len(attempts) == 2:
            raise lost()

    async def step_fn(context: ah.session.StepContext) -> str:
        attempts.append((len(attempts) + 1, "begins"))
        await context.run_with_hooks("train")
        attempts.append((len(attempts) + 1, "has run"))
        await context.session.run("fragile")
        if lost_in == "the function" and len(attempts) == 2:
            raise lost()
        return "done"

    faults: dict[tuple[str, int], Any] = {(lost_in, 1): lost()} if "_run" in lost_in else {}
    hook = FaultInjectionHook(faults)
    async with ah.AsyncMonitoredSession(graph, [hook], recovery=NO_BACKOFF) as session:
        assert await session.run_step_fn(step_fn) == "done"
        assert session.global_step.latest.step == (1 if lost_in == "before_run" else 2)
    began = [what for _, what in attempts].count("begins")
    assert began == 2
    assert attempts[-2:] == [(len(attempts) - 1, "begins"), (len(attempts), "has run")]
    assert hook.phases().count("after_create_session") == 2
    assert hook.phases().count("begin") == 1


async def test_the_context_has_the_current_session() -> None:
    """After recovery `session` of the context, also of a kept one, is the new open session."""
    contexts: list[ah.session.StepContext] = []
    sessions: list[ah.Session] = []

    async def step_fn(context: ah.session.StepContext) -> Any:
        contexts.append(context)
        sessions.append(context.session)
        if len(contexts) == 1:
            raise lost()
        assert contexts[0].session is context.session
        return await context.session.run("loss")

    async with counting(recovery=NO_BACKOFF) as session:
        assert await session.run_step_fn(step_fn) == 10
        assert [one.closed for one in sessions] == [True, False]
    assert len(sessions) == 2


async def test_the_singular_session_lets_the_error_out() -> None:
    """Without recovery the function is called once, and its error leaves the block."""
    calls: list[int] = []
    error = lost()

    async def step_fn(context: ah.session.StepContext) -> None:
        calls.append(1)
        raise error

    with pytest.raises(ah.AbortedError) as caught:
        await run_block(
            ah.session.AsyncSingularMonitoredSession(counting_graph()),
            lambda session: session.run_step_fn(step_fn),
        )
    assert caught.value is error
    assert calls == [1]
