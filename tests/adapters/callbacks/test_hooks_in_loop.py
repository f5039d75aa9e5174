"""Hooks in the loop of each framework: when they are called, how they stop it, and what is left when it fails."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest

import aiohooks as ah
from aiohooks.adapters.ignite import HooksForIgnite
from aiohooks.adapters.keras import HooksForKeras
from aiohooks.adapters.lightning import HooksForLightning
from aiohooks.adapters.transformers import HooksForTrainer
from aiohooks.errors import SessionClosedError
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import (
    KerasModel,
    LightningModule,
    Loop,
    StepsHook,
    TrainerModel,
    fit_keras,
    ignite_engine,
    lightning_trainer,
    loader,
    train_trainer,
)
from tests.support.waiting import HANG_SECS

RUN = ["before_run", "after_run"]


def phases(hook: RecordingHook) -> list[str]:
    """Return what was called."""
    return [phase for _, phase in hook.record]


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Restore how an interrupt is handled: Lightning ignores it from the first one on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def test_each_step_is_a_run(loop: Loop) -> None:
    """The whole life cycle is called in its order, also by hooks that wait, and a hook fetches the loss of each step."""
    hook, steps = RecordingHook(fetches="loss", suspend=True), StepsHook()
    loop([hook, steps], 3)
    assert phases(hook) == ["begin", "after_create_session", *RUN * 3, "end", "close"]
    assert [float(loss) for loss in hook.results] == pytest.approx([1, 1 / 2, 1 / 3])
    assert hook.closed_with == [None]
    assert steps.steps == [0, 1, 2, 3]


def test_before_run_is_done_when_the_step_begins(loop: Loop) -> None:
    """The framework waits for the hooks before its step and after it."""
    hook, seen = RecordingHook(suspend=True), list[str]()
    loop([hook], 2, lambda number: seen.append(phases(hook)[-1]))
    assert seen == ["before_run", "before_run"]


def test_a_stop_of_the_session_stops_the_framework(loop: Loop) -> None:
    """It makes no step after the one in which a hook requests the stop, and the session ends cleanly."""
    made, hook = list[int](), RecordingHook()
    loop([hook, ah.StopAtStepHook(last_step=2)], 5, made.append)
    assert made == [1, 2]
    assert phases(hook)[-4:] == [*RUN, "end", "close"]


def test_a_stop_before_the_step_lets_it_be_made(loop: Loop) -> None:
    """As in any session, the run in whose `before_run` a stop is requested is the last one."""

    @ah.hook("before_run")
    async def stop(run_context: ah.SessionRunContext) -> None:
        run_context.request_stop()

    made, steps = list[int](), StepsHook()
    loop([stop, steps], 5, made.append)
    assert (made, steps.steps) == ([1], [0, 1])


def test_a_clean_end_out_of_a_run_ends_the_session(loop: Loop) -> None:
    """A hook that raises `StopRequestedError` stops the framework; no run follows, and `end` is called."""

    @ah.hook("after_run")
    async def stop(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        raise ah.StopRequestedError("enough")

    made, hook = list[int](), RecordingHook()
    loop([stop, hook], 5, made.append)
    assert made == [1]
    assert phases(hook)[-2:] == ["end", "close"]


@pytest.mark.parametrize(
    ("method", "steps"),
    [("begin", 0), ("after_create_session", 0), ("before_run", 0), ("after_run", 1), ("end", 2), ("close", 2)],
)
def test_an_error_of_a_hook_is_raised_by_the_framework(loop: Loop, method: Any, steps: int) -> None:
    """It is the same object, raised before any further step is made, and the others are closed with it."""
    error = LookupError("a hook")

    async def fail(*_: object) -> None:
        raise error

    hook, made = RecordingHook(), list[int]()
    with pytest.raises(LookupError) as raised:
        loop([hook, ah.hook(method)(fail)], 2, made.append)
    assert raised.value is error
    assert len(made) == steps
    assert hook.closed_with == [None if method == "close" else error]


def test_an_error_of_the_step_closes_the_session(loop: Loop) -> None:
    """It passes unchanged; the step is not counted, `end` is not called, and `close` gets the error."""
    error = LookupError("the step")

    def fail(number: int) -> None:
        if number == 2:
            raise error

    hook, steps = RecordingHook(), StepsHook()
    with pytest.raises(LookupError) as raised:
        loop([hook, steps], 5, fail)
    assert raised.value is error
    assert phases(hook) == ["begin", "after_create_session", *RUN, "before_run", "close"]
    assert hook.closed_with == [error]
    assert steps.steps == [0, 1]


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_closes_the_session(loop: Loop) -> None:
    """Lightning exits at an interrupt, the others pass it on; `close` gets what is raised."""

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    hook = RecordingHook()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        loop([hook], 2, interrupt)
    assert hook.closed_with == [raised.value]
    assert "end" not in phases(hook)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_ends_the_wait_for_a_hook(loop: Loop) -> None:
    """It reaches the framework while that waits for `before_run`; the hook is cancelled, and closed with what is raised."""
    ended = list[str]()

    @ah.hook("before_run")
    async def hang(run_context: ah.SessionRunContext) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("cancelled")

    hook, made = RecordingHook(), list[int]()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        loop([hook, hang], 2, made.append)
    assert (ended, made, hook.closed_with) == (["cancelled"], [], [raised.value])


def test_a_hook_may_make_raw_runs(loop: Loop) -> None:
    """They get the values of the framework's step, which is made once."""
    made, seen = list[int](), list[Any]()

    @ah.hook("after_run")
    async def run_again(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        seen.append(float(await run_context.session.run("loss")))

    loop([run_again], 2, made.append)
    assert made == [1, 2]
    assert seen == pytest.approx([1, 1 / 2])


def test_tasks_of_hooks_continue_while_the_framework_computes(loop: Loop) -> None:
    """A task of the session runs in the middle of a step; it is over when the block is left."""
    computing, noticed, ended = threading.Event(), threading.Event(), list[str]()

    class Background(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(self.notice, coord)

        async def notice(self, coord: ah.Coordinator) -> None:
            await ah.in_thread(computing.wait)()
            noticed.set()
            await coord.wait_for_stop()
            ended.append("ended")

    def step(number: int) -> None:
        computing.set()
        assert noticed.wait(HANG_SECS)

    loop([Background()], 2, step)
    assert ended == ["ended"]


def test_a_failure_of_a_task_is_raised_by_the_framework(loop: Loop) -> None:
    """A task that fails in the middle of a step ends that run: the framework raises its error after the step."""
    error, failed, made = LookupError("a task"), threading.Event(), list[int]()

    class Failing(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            self.coord = coord

        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            self.coord.start_soon(self.fail)

        async def fail(self) -> None:
            failed.set()
            raise error

    def step(number: int) -> None:
        assert failed.wait(HANG_SECS)
        made.append(number)

    with pytest.raises(LookupError) as raised:
        loop([Failing()], 3, step)
    assert raised.value is error
    assert made == [1]


def test_a_stop_between_two_steps_begins_no_run(loop: Loop) -> None:
    """When a stop is requested while no run is in progress, the hooks see no further step; the framework may make one more."""
    made, hook = list[int](), RecordingHook()

    class Stopping(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.request_stop("from the first moment")

    loop([hook, Stopping()], 5, made.append)
    assert phases(hook) == ["begin", "after_create_session", "end", "close"]
    assert made in ([], [1])


def keras_continues(hooks: list[Any]) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    fit_keras(model, [], 2)
    with HooksForKeras(hooks) as callback:
        fit_keras(model, [callback], 2)


def lightning_continues(hooks: list[Any]) -> None:
    trainer = lightning_trainer([])
    trainer.fit(LightningModule(), loader(2))
    trainer.save_checkpoint("2.ckpt")
    with HooksForLightning(hooks) as callback:
        trainer = lightning_trainer([callback], max_epochs=2)
        trainer.fit(LightningModule(), loader(2), ckpt_path="2.ckpt", weights_only=False)


def ignite_continues(hooks: list[Any]) -> None:
    engine = ignite_engine()
    engine.load_state_dict({"iteration": 2, "epoch_length": 2, "max_epochs": 2})
    with HooksForIgnite(engine, hooks):
        engine.run([1, 2])


def transformers_continues(hooks: list[Any]) -> None:
    train_trainer(TrainerModel(), [], 4, save_strategy="steps", save_steps=2)
    with HooksForTrainer(hooks) as callback:
        train_trainer(TrainerModel(), [callback], 4, resume="trainer/checkpoint-2")


@pytest.mark.parametrize("train", [keras_continues, lightning_continues, ignite_continues, transformers_continues])
def test_hooks_continue_with_a_training_that_continues(train: Callable[[list[Any]], None]) -> None:
    """A session in a training that continues, or restores a checkpoint, begins at its step."""
    steps = StepsHook()
    train([steps])
    assert steps.steps == [2, 3, 4]


def test_outside_of_the_block_it_is_refused() -> None:
    """A callback that is used without `with` says so, and starts nothing."""
    model, callback = KerasModel(), HooksForKeras([RecordingHook()])
    with pytest.raises(SessionClosedError, match="`with HooksForKeras"):
        fit_keras(model, [callback], 1)
    with callback:
        pass
    with pytest.raises(SessionClosedError, match="`with HooksForKeras"):
        fit_keras(model, [callback], 1)


def test_a_training_is_seen_from_its_beginning() -> None:
    """A callback that is called in the middle of a training says so."""
    with HooksForKeras([RecordingHook()]) as callback, pytest.raises(SessionClosedError, match="beginning of the training"):
        callback.on_train_batch_begin(0)


@pytest.mark.parametrize("given", [list, iter])
def test_several_trainings_in_one_block_are_one_session(given: Callable[[list[ah.SessionRunHook]], Any]) -> None:
    """The session continues with the second one; a further block opens a new session with the same hooks."""
    engine, hook, steps = ignite_engine(), RecordingHook(), StepsHook()
    hooks = HooksForIgnite(engine, given([hook, steps]))
    with hooks:
        engine.run(range(2))
        engine.run(range(1))
    assert phases(hook) == ["begin", "after_create_session", *RUN * 3, "end", "close"]
    with hooks:
        engine.run(range(1))
    assert phases(hook)[-6:] == ["begin", "after_create_session", *RUN, "end", "close"]
    assert steps.steps == [0, 1, 2, 3, 0, 1]
    engine.run(range(1))  # without the hooks
    assert steps.steps == [0, 1, 2, 3, 0, 1]


def test_a_block_without_a_training_opens_no_session() -> None:
    """Nothing of the hooks is called."""
    hook = RecordingHook()
    with HooksForKeras([hook]):
        pass
    assert hook.record == []


def test_an_error_of_the_block_closes_the_session() -> None:
    """Also one that is not of the training."""
    hook, error = RecordingHook(), LookupError("after the training")

    def train() -> None:
        with HooksForKeras([hook]) as callback:
            fit_keras(KerasModel(), [callback], 1)
            raise error

    with pytest.raises(LookupError):
        train()
    assert hook.closed_with == [error]
