"""Keras: what its callbacks see in a session, beside what they see in `fit`, and what hooks see in `fit`."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import aiohooks as ah
from aiohooks.adapters.keras import HooksForKeras, KerasCallbacks
from aiohooks.testing import FaultInjectionHook
from tests.adapters.callbacks.loops import KerasModel, StepsHook, evaluating, fit_keras, losses, run_steps
from tests.support.sessions import NO_BACKOFF
from tests.support.waiting import HANG_SECS

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Recording(keras.callbacks.Callback):  # type: ignore[misc]
    """Records its calls; stops after a number of batches."""

    def __init__(self, stop_after: int = 100) -> None:
        super().__init__()
        self.record: list[Any] = []
        self.left = stop_after
        for event in ("epoch_begin", "train_batch_begin", "train_batch_end", "epoch_end", "train_end", "test_begin", "test_end"):
            setattr(self, f"on_{event}", partial(self.note, event))

    def on_train_begin(self, logs: Any = None) -> None:
        self.record.append(("train_begin", logs, self.model.stop_training))

    def note(self, event: str, *args: Any, **keywords: Any) -> None:
        """Record a call, its logs as far as Keras computes them, in 32 bits."""
        *position, logs = *args, *keywords.values()
        self.record.append((event, *position, {name: round(float(value), 6) for name, value in (logs or {}).items()}))
        if event == "train_batch_end":
            self.left -= 1
            self.model.stop_training = self.model.stop_training or not self.left


class MeanModel(KerasModel):
    """A model that tracks its loss, as those do that Keras compiles: its logs are means."""

    def __init__(self) -> None:
        super().__init__()
        self.tracked = keras.metrics.Mean("loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracked]

    def train_step(self, data: Any) -> dict[str, Any]:
        self.tracked.update_state(super().train_step(data)["loss"])
        return {"loss": self.tracked.result()}


@pytest.mark.parametrize("stop_after", [100, 4, 5])
async def test_a_callback_sees_what_it_sees_in_fit(stop_after: int) -> None:
    """Calls, epochs, batches and logs are the same, also when it stops at the end or in the middle of an epoch."""
    in_fit, in_session = Recording(stop_after), Recording(stop_after)
    fit_keras(MeanModel(), [in_fit], 2, epochs=3)
    hook = KerasCallbacks([in_session], ["loss"], steps_per_epoch=2)
    session = await run_steps(losses(), hook, ah.StopAtStepHook(last_step=6))
    assert in_session.record == in_fit.record
    assert session.global_step.latest.step == min(stop_after, 6)
    if stop_after < 6:
        assert session.stop_reason == "Recording has requested it"


async def test_callbacks_of_keras_do_what_they_do_in_fit(tmp_path: Path) -> None:
    """`EarlyStopping` stops and restores the best weights, with what an evaluation reports; `CSVLogger` writes both."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    async def step() -> dict[str, float]:
        model.set_weights([np.full((1, 1), next(numbers))])
        return {"loss": 0.5}

    numbers = iter(range(1, 100))
    stopping = keras.callbacks.EarlyStopping("val_accuracy", patience=2, mode="max", restore_best_weights=True)
    hook = KerasCallbacks([stopping, keras.callbacks.CSVLogger(tmp_path / "log.csv")], ["loss"], model=model, steps_per_epoch=2)
    evaluator = evaluating(hook, "val_accuracy", 0.5, 0.9, 0.8, 0.7, 0.6)
    session = await run_steps(step, evaluator, hook)
    assert session.global_step.latest.step == 8
    assert model.get_weights()[0].item() == 4  # of the second epoch
    assert (tmp_path / "log.csv").read_text().split()[:3] == ["epoch,loss,val_accuracy", "0,0.5,0.5", "1,0.5,0.9"]


async def test_a_result_is_a_test() -> None:
    """As the validation in `fit`, it begins and ends a test, with the result as the logs of its end."""
    recording = Recording()
    hook = KerasCallbacks([recording])
    async with ah.AsyncMonitoredSession(losses(), [hook]) as session:
        hook.report(0, {"accuracy": 0.5})
        await session.run(())
    assert [one for one in recording.record if "test" in one[0]] == [("test_begin", {}), ("test_end", {"accuracy": 0.5})]


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_evaluation_at_the_end_is_passed_on(is_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The callbacks get it if the evaluator is before them; otherwise the training has ended by then, and this is logged."""
    recording = Recording()
    hook = KerasCallbacks([recording])
    evaluator = evaluating(hook, "val_accuracy", 0.5)
    async with ah.AsyncMonitoredSession(losses(), [evaluator, hook] if is_first else [hook, evaluator]) as session:
        await session.run(())
    logs = {"val_accuracy": 0.5} if is_first else {}
    assert recording.record[-2:] == [("epoch_end", 0, logs), ("train_end", logs)]
    assert ("callbacks do not get the evaluation of step 1, as KerasCallbacks has ended" in caplog.text) is not is_first


async def test_logs_have_the_metrics_of_other_hooks() -> None:
    """What hooks add in the run is in the logs as it is, wherever they are in the list; without epochs there is one."""

    @ah.hook("after_run")
    async def measure(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        run_context.metrics["speed"] = run_context.global_step * 10

    recording = Recording()
    async with ah.AsyncMonitoredSession(losses(), [KerasCallbacks([recording], {"cost": "loss"}), measure]) as session:
        await session.run(())
        await session.run(())
    ends = [one for one in recording.record if one[0].endswith("_end")]
    of_last = {"cost": 0.75, "speed": 20}
    assert ends == [
        *[("train_batch_end", 0, {"cost": 1.0, "speed": 10}), ("train_batch_end", 1, of_last)],
        *[("epoch_end", 0, of_last), ("train_end", of_last)],
    ]


@pytest.mark.parametrize("by", ["a recovery", "another worker"])
async def test_an_epoch_that_is_cut(by: str) -> None:
    """One that a recovery interrupted begins again; one of which another worker makes the last step ends when the next begins."""
    recording, store = Recording(), ah.MemoryStepStore()
    hooks: list[Any] = [KerasCallbacks([recording], steps_per_epoch=2)]
    if by == "a recovery":
        hooks.append(ah.configure(FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")}), order=91))
    async with ah.AsyncMonitoredSession(losses(), hooks, global_step=store, recovery=NO_BACKOFF) as session:
        await session.run(())
        if by == "another worker":
            await store.advance(2)
        await session.run(())
    first = [("epoch_begin", 0), ("train_batch_begin", 0), ("train_batch_end", 0)]
    cut = [("train_batch_begin", 1), ("epoch_begin", 0)] if by == "a recovery" else [("epoch_end", 0), ("epoch_begin", 1)]
    last = [("train_batch_begin", 1), ("train_batch_end", 1), ("epoch_end", cut[-1][1])]
    assert [one[:2] for one in recording.record[1:-1]] == [*first, *cut, *last]


async def test_a_hook_serves_one_session_after_the_other() -> None:
    """The second one begins anew: what the first one left to stop, to end and to report is forgotten."""
    recording = Recording(stop_after=1)
    hook = KerasCallbacks([recording], steps_per_epoch=2)

    async def fail() -> None:
        async with ah.AsyncMonitoredSession(losses(), [hook]) as session:
            await session.run(())
            hook.report(1, {"val_loss": 0.5})
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    del recording.record[:]
    async with ah.AsyncMonitoredSession(losses(), [hook]) as session:
        await session.run(())
    assert session.stop_reason is None
    assert recording.record == [
        *[("train_begin", {}, False), ("epoch_begin", 0, {}), ("train_batch_begin", 0, {}), ("train_batch_end", 0, {})],
        *[("epoch_end", 0, {}), ("train_end", {})],
    ]


@pytest.mark.parametrize("thread", [False, True])
async def test_callbacks_block_in_a_thread_only_if_asked(thread: bool) -> None:
    """With `thread` the event loop continues while a callback blocks; without, callbacks are in the loop's own thread."""
    threads, released = set[int](), threading.Event()

    class Blocking(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            threads.add(threading.get_ident())
            assert not thread or released.wait(HANG_SECS)

    async def release() -> None:
        await asyncio.sleep(0)
        released.set()

    @ah.hook("after_run")
    async def start(run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        assert run_context.coord is not None
        run_context.coord.start_soon(release)

    async with ah.AsyncMonitoredSession(losses(), [start, KerasCallbacks([Blocking()], thread=thread)]) as session:
        await session.run(())
    assert len(threads) == 1
    assert (threads == {threading.get_ident()}) != thread


async def test_an_error_of_a_callback_is_that_of_the_run() -> None:
    """It names the hook; nothing of Keras is called then, as in `fit`."""

    def fail(batch: int, logs: Any = None) -> None:
        raise LookupError("a callback")

    failing = Recording()
    failing.on_train_batch_end = fail
    with pytest.raises(LookupError, match="a callback") as raised:
        async with ah.AsyncMonitoredSession(losses(), [KerasCallbacks([failing])]) as session:
            await session.run(())
    assert "KerasCallbacks" in raised.value.__notes__[0]
    assert [one[0] for one in failing.record] == ["train_begin", "epoch_begin", "train_batch_begin"]


def test_a_batch_that_does_not_exist_is_no_step() -> None:
    """Where the data has no known length, `fit` begins a batch and finds none: the hooks see no step of it."""

    def batches() -> Any:
        for _ in range(2):
            yield np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)

    steps = StepsHook()
    with HooksForKeras([steps]) as callback:
        KerasModel().fit(batches(), verbose=0, callbacks=[callback])
        KerasModel().fit(batches(), verbose=0, callbacks=[callback])
    assert steps.steps == [0, 1, 2, 3, 4]
