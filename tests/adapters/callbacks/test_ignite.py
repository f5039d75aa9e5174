"""Ignite: what handlers see in a session, beside what they see in `run`, and what hooks see of an engine."""

from __future__ import annotations

from typing import Any

import pytest
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage

import aiohooks as ah
from aiohooks.adapters.ignite import HooksForIgnite, IgniteHandlers
from aiohooks.hooks import Evaluation
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import StepsHook, ignite_engine, losses

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

IN_A_SESSION: Any = [
    *(Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED),
    *(Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED),
]


def recorded(engine: Any, stop_after: int) -> list[Any]:
    """Record the events of an engine, which is terminated after a number of iterations."""
    record: list[Any] = []

    def note(event: Any) -> None:
        state = engine.state
        average = dict(state.metrics).get("average")
        record.append((event.name, state.iteration, state.epoch, state.epoch_length, state.batch, state.output, average))

    for event in IN_A_SESSION:
        engine.add_event_handler(event, note, event)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop_after), lambda: engine.terminate())
    return record


@pytest.mark.parametrize("stop_after", [100, 4, 5])
async def test_handlers_see_what_they_see_in_run(stop_after: int) -> None:
    """Events, iterations, epochs, batches, outputs and metrics are the same, also when the engine is terminated."""
    engines = [ignite_engine(), Engine(lambda engine, batch: None)]
    for engine in engines:
        RunningAverage(output_transform=lambda output: output["loss"]).attach(engine, "average")
    in_run, in_session = (recorded(engine, stop_after) for engine in engines)
    engines[0].run([10, 20], max_epochs=3)
    step = losses()

    async def fed(batch: int) -> Any:
        return await step()

    hook = IgniteHandlers(engines[1], ["loss"], steps_per_epoch=2)
    async with ah.AsyncMonitoredSession(fed, [hook]) as session:
        async for _ in session.steps(feeds=[10, 20] * 3):
            pass
    assert [one for one in in_session if one[0].startswith("ITER")] == [one for one in in_run if one[0].startswith("ITER")]
    assert [one[:4] for one in in_session] == [one[:4] for one in in_run]
    assert session.global_step.latest.step == min(stop_after, 6)


async def test_events_with_periods_and_results() -> None:
    """Handlers for every second iteration are called at these; results of evaluations are in `state.metrics`."""
    engine, seen = Engine(lambda engine, batch: None), list[Any]()
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: seen.append(engine.state.iteration))
    engine.add_event_handler(Events.STARTED, lambda: seen.append(engine.state.epoch))
    hook = IgniteHandlers(engine)

    async def evaluate(evaluation: Evaluation) -> dict[str, float]:
        return {"accuracy": 0.5}

    evaluator = ah.EvaluatorHook(evaluate, every=ah.Every(steps=3), on_result=hook.report)
    async with ah.AsyncMonitoredSession(losses(), [evaluator, hook, ah.StopAtStepHook(last_step=5)]) as session:
        async for _ in session.steps():
            pass
    assert seen == [0, 2, 4]
    assert engine.state.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize("skip_completed", [False, True])
async def test_a_terminated_engine_may_skip_its_last_event(skip_completed: bool) -> None:
    """As `engine.terminate` says; before it, the epoch that was not over has no end, as in Ignite."""
    engine, seen = Engine(lambda engine, batch: None), list[str]()
    for event in (Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED):
        engine.add_event_handler(event, seen.append, event.name)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate(skip_completed=skip_completed))
    async with ah.AsyncMonitoredSession(losses(), [IgniteHandlers(engine)]) as session:
        await session.run(())
    assert seen == ["TERMINATE", *["COMPLETED"][skip_completed:]]


@pytest.mark.parametrize("answer", ["swallow", "raise", "replace"])
async def test_a_failure_is_an_event(answer: str) -> None:
    """Handlers of `EXCEPTION_RAISED` get the error; what they raise besides it is added; none of them can swallow it."""
    engine, error, seen = Engine(lambda engine, batch: None), LookupError("a step"), list[Any]()

    def failed(engine: Any, raised: BaseException) -> None:
        seen.append(raised)
        if answer == "raise":
            raise raised
        if answer == "replace":
            raise ZeroDivisionError

    engine.add_event_handler(Events.EXCEPTION_RAISED, failed)

    async def step() -> None:
        raise error

    with pytest.raises(LookupError) as raised:
        async with ah.AsyncMonitoredSession(step, [IgniteHandlers(engine)]) as session:
            await session.run(())
    assert raised.value is error
    assert seen == [error]
    assert error.__notes__[1:] == (["and then: ZeroDivisionError()"] if answer == "replace" else [])


def test_hooks_fetch_outputs_and_metrics() -> None:
    """An output that is no mapping is `output`."""
    engine: Any = Engine(lambda engine, batch: batch * 2)
    RunningAverage(output_transform=lambda output: output).attach(engine, "average")
    hook = RecordingHook(fetches=["output", "average"])
    with HooksForIgnite(engine, [hook]):
        engine.run([1, 1])
    assert hook.results[0][0] == 2
    assert hook.results[1] == pytest.approx([2, 2])


def test_hooks_continue_with_a_run_that_continues() -> None:
    """A session in a run that is resumed begins at its iteration."""
    engine, steps = ignite_engine(), StepsHook()
    engine.load_state_dict({"iteration": 4, "epoch_length": 2, "max_epochs": 3})
    with HooksForIgnite(engine, [steps]):
        engine.run([1, 2])
    assert steps.steps == [4, 5, 6]


def test_an_error_that_a_handler_swallows_ends_the_session_cleanly() -> None:
    """The training goes well then as far as the block can see; the step that failed is no run."""
    engine, hook = ignite_engine(lambda number: 1 // (number - 2)), RecordingHook()
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    with HooksForIgnite(engine, [hook]):
        engine.run(range(5))
    assert [phase for _, phase in hook.record][2:] == ["before_run", "after_run", "before_run", "end", "close"]
