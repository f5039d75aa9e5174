"""Hooks in the loop of each framework: when they are called, how they stop it, and what is left when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

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
    ignite_loop,
    lightning_loop,
    lightning_trainer,
    loader,
    train_trainer,
)
from tests.support.waiting import HANG_SECS

RUN = ["before_run", "after_run"]
BEGUN = ["begin", "after_create_session"]
ERROR = LookupError("what fails")


class Trained:
    """A training of so many steps, with hooks in it: which steps it made, and what a hook and another one saw of them."""

    def __init__(self, **recording: Any) -> None:
        self.made: list[int] = []
        self.hook = RecordingHook(**recording)
        self.steps = StepsHook()

    @property
    def phases(self) -> list[str]:
        return [phase for _, phase in self.hook.record]

    def by(self, loop: Loop, steps: int, *hooks: Any, step: Callable[[int], object] = lambda number: None) -> Self:
        """Train, with these hooks between the two."""

        def make(number: int) -> None:
            step(number)
            self.made.append(number)

        loop([self.hook, *hooks, self.steps], steps, make)
        return self


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Restore how an interrupt is handled: Lightning ignores it from the first one on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def test_each_step_is_a_run(loop: Loop) -> None:
    """The whole life cycle is called in its order, around each step, also by hooks that wait, which fetch the loss."""
    trained, seen = Trained(fetches="loss", suspend=True), list[str]()
    trained.by(loop, 3, step=lambda number: seen.append(trained.phases[-1]))
    assert seen == ["before_run"] * 3
    assert trained.phases == [*BEGUN, *RUN * 3, "end", "close"]
    assert [float(loss) for loss in trained.hook.results] == pytest.approx([1, 1 / 2, 1 / 3])
    assert (trained.hook.closed_with, trained.steps.steps) == ([None], [0, 1, 2, 3])


def request_stop(run_context: ah.SessionRunContext, *_: object) -> None:
    run_context.request_stop()


def end_cleanly(*_: object) -> None:
    raise ah.StopRequestedError("enough")


@pytest.mark.parametrize(
    ("stops", "made"),
    [
        (ah.StopAtStepHook(last_step=2), 2),
        (ah.LambdaHook(before_run=request_stop), 1),  # as in any session, this run is the last one
        (ah.LambdaHook(after_run=end_cleanly), 1),
    ],
    ids=["at a step", "before the step", "by a clean end"],
)
def test_a_stop_of_the_session_stops_the_framework(loop: Loop, stops: Any, made: int) -> None:
    """It makes no step after the one in which a hook requests the stop, and the session ends cleanly."""
    trained = Trained().by(loop, 5, stops)
    assert trained.made == [*range(1, made + 1)]
    assert trained.phases == [*BEGUN, *RUN * made, "end", "close"]


def test_a_stop_between_two_steps_begins_no_run(loop: Loop) -> None:
    """When a stop is requested while no run is in progress, the hooks see no further step; the framework may make one more."""
    stopping = ah.LambdaHook(after_create_session=lambda session, coord: coord.request_stop("from the first moment"))
    trained = Trained().by(loop, 5, stopping)
    assert trained.phases == [*BEGUN, "end", "close"]
    assert trained.made == ([] if loop in (lightning_loop, ignite_loop) else [1])


def fail(*_: object) -> None:
    raise ERROR


@pytest.mark.parametrize(
    ("where", "made"),
    [("begin", 0), ("after_create_session", 0), ("before_run", 0), ("after_run", 1), ("end", 2), ("close", 2), ("step", 1)],
)
def test_an_error_is_raised_by_the_framework(loop: Loop, where: str, made: int) -> None:
    """Of a hook or the step it is the same object, raised before any further step; the others are closed with it."""
    failing: dict[str, Any] = {} if where == "step" else {where: fail}
    trained, hooks = Trained(), [ah.LambdaHook(**failing)] if failing else []
    with pytest.raises(LookupError) as raised:
        trained.by(loop, 2, *hooks, step=lambda number: number == 2 and where == "step" and fail())
    assert raised.value is ERROR
    assert len(trained.made) == made
    assert trained.hook.closed_with == [None if where == "close" else ERROR]
    if where == "step":  # it is not counted
        assert trained.phases == [*BEGUN, *RUN, "before_run", "close"]
        assert trained.steps.steps == [0, 1]


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_closes_the_session(loop: Loop) -> None:
    """Lightning exits at an interrupt, the others pass it on; `close` gets what is raised."""

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    trained = Trained()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        trained.by(loop, 2, step=interrupt)
    assert trained.hook.closed_with == [raised.value]
    assert "end" not in trained.phases


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

    trained = Trained()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        trained.by(loop, 2, hang)
    assert (ended, trained.made, trained.hook.closed_with) == (["cancelled"], [], [raised.value])


def test_a_hook_may_make_raw_runs(loop: Loop) -> None:
    """They get the values of the framework's step, which is made once."""
    seen = list[Any]()

    @ah.hook("after_run")
    async def run_again(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        seen.append(float(await run_context.session.run("loss")))

    assert Trained().by(loop, 2, run_again).made == [1, 2]
    assert seen == pytest.approx([1, 1 / 2])


@pytest.mark.parametrize("fails", [False, True])
def test_tasks_of_hooks_continue_while_the_framework_computes(loop: Loop, fails: bool) -> None:
    """A task runs in the middle of a step, and is over when the block is left; if it fails, that is raised after the step."""
    computing, noticed, ended = threading.Event(), threading.Event(), list[str]()

    async def notice(coord: ah.Coordinator) -> None:
        await ah.in_thread(computing.wait)()
        noticed.set()
        if fails:
            raise ERROR
        await coord.wait_for_stop()
        ended.append("ended")

    def step(number: int) -> None:
        computing.set()
        assert noticed.wait(HANG_SECS)

    background = ah.LambdaHook(after_create_session=lambda session, coord: coord.start_soon(notice, coord) and None)
    trained = Trained()
    with pytest.raises(LookupError) if fails else contextlib.nullcontext() as raised:
        trained.by(loop, 3, background, step=step)
    if raised is not None:
        assert raised.value is ERROR
    assert (trained.made, ended) == (([1], []) if fails else ([1, 2, 3], ["ended"]))


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
    assert [phase for _, phase in hook.record] == ["begin", "after_create_session", *RUN * 3, "end", "close"]
    with hooks:
        engine.run(range(1))
    assert [phase for _, phase in hook.record][-6:] == ["begin", "after_create_session", *RUN, "end", "close"]
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
