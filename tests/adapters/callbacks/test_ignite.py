"""Ignite: what handlers see in a session, beside what they see in `run`, and what hooks see of an engine."""

from __future__ import annotations

from typing import Any

import pytest
from ignite.engine import Engine, Events
from ignite.handlers import BasicTimeProfiler
from ignite.metrics import RunningAverage

import aiohooks as ah
from aiohooks.adapters.ignite import HooksForIgnite, IgniteHandlers
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import evaluating, ignite_engine, losses, run_steps

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
    session = await run_steps(fed, hook, feeds=[10, 20] * 3)
    assert [one for one in in_session if one[0].startswith("ITER")] == [one for one in in_run if one[0].startswith("ITER")]
    assert [one[:4] for one in in_session] == [one[:4] for one in in_run]
    assert session.global_step.latest.step == min(stop_after, 6)


async def test_events_with_periods_and_results() -> None:
    """Handlers for every second iteration are called at these, also from a later step; results are in `state.metrics`."""
    engine, seen = Engine(lambda engine, batch: None), list[Any]()
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: seen.append(engine.state.iteration))
    engine.add_event_handler(Events.STARTED, lambda: seen.append(engine.state.epoch))
    hook = IgniteHandlers(engine, steps_per_epoch=2)
    evaluator = evaluating(hook, "accuracy", 0.5, 0.5, every=3)
    stop = ah.StopAtStepHook(last_step=9)
    await run_steps(losses(), evaluator, hook, stop, global_step=ah.MemoryStepStore(4))
    assert seen == [2, 6, 8]
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


async def test_an_interrupt_is_what_it_is_in_run() -> None:
    """It stops the session; `INTERRUPT` is the last event, and a later run or session begins without it."""
    seen = list[list[str]]()
    for kind in ("run", "session"):
        engine, events = ignite_engine(), list[str]()
        for event in (*IN_A_SESSION, Events.INTERRUPT):
            engine.add_event_handler(event, events.append, event.name)
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), engine.interrupt)
        seen.append(events)
        if kind == "run":
            engine.run(range(2), max_epochs=2)
            continue
        session = await run_steps(losses(), IgniteHandlers(engine, steps_per_epoch=2))
        assert session.global_step.latest.step == 3
    assert seen[0] == seen[1]
    assert seen[0][-1] == "INTERRUPT"


async def test_what_has_no_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Handlers of events that only an engine fires are named, and so is the end of a single epoch; the session continues."""
    engine = Engine(lambda engine, batch: None)
    engine.add_event_handler(Events.GET_BATCH_STARTED | Events.DATALOADER_STOP_ITERATION, lambda: None)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate_epoch())
    await run_steps(losses(), IgniteHandlers(engine), ah.StopAtStepHook(last_step=3))
    logged = [record.message for record in caplog.records if record.message.startswith("IgniteHandlers")]
    assert len(logged) == 2
    assert "handlers of GET_BATCH_STARTED, DATALOADER_STOP_ITERATION are not called" in logged[0]
    assert "terminate_epoch() has no effect" in logged[1]


@pytest.mark.parametrize("max_epochs", [None, 2])
async def test_a_profiler_needs_the_length_of_the_training(max_epochs: int | None) -> None:
    """It works if it is known; its error says how otherwise."""
    engine, profiler = Engine(lambda engine, batch: None), BasicTimeProfiler()
    profiler.attach(engine)
    engine.state.max_epochs = max_epochs

    async def train() -> None:
        async with ah.AsyncMonitoredSession(losses(), [IgniteHandlers(engine, steps_per_epoch=2)]) as session:
            for _ in range(4):
                await session.run(())

    if max_epochs is None:
        with pytest.raises(TypeError) as raised:
            await train()
        assert "set engine.state.max_epochs before" in raised.value.__notes__[0]
    else:
        await train()
        assert profiler.get_results()["processing_stats"]["total"] >= 0


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


def test_an_error_that_a_handler_swallows_ends_the_session_cleanly() -> None:
    """The training goes well then as far as the block can see; the step that failed is no run."""
    engine, hook = ignite_engine(lambda number: 1 // (number - 2)), RecordingHook()
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    with HooksForIgnite(engine, [hook]):
        engine.run(range(5))
    assert [phase for _, phase in hook.record][2:] == ["before_run", "after_run", "before_run", "end", "close"]
