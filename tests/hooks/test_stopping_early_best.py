"""EarlyStoppingHook: the states of the best observation, given back after a clean end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.stopping import EarlyStoppingHook
from aiohooks.testing import FaultInjectionHook
from tests.support.checks import refused
from tests.support.sessions import NO_BACKOFF

LOSSES = [5, 3, 4, 1, 2, 2, 2]
BEST_STEP = 4


class Model:
    """Changes in place at every step, as a torch module does."""

    def __init__(self) -> None:
        self.weights = np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights[:] = state["weights"]


def training(model: Model) -> Any:
    async def step(value: float) -> dict[str, float]:
        model.weights += 1
        return {"loss": value}

    return step


async def train(session: ah.AsyncMonitoredSession) -> None:
    async for _ in session.steps("loss", feeds=LOSSES[session.global_step.latest.step :]):
        pass


@pytest.mark.parametrize("stops", ["early", "elsewhere"])
async def test_the_model_has_the_best_weights_after_a_clean_end(tmp_path: Path, stops: str) -> None:
    """However it came about; the checkpoint of the end has the last ones, so that training can continue."""
    model = Model()
    stopping = EarlyStoppingHook("loss", patience=2 if stops == "early" else 100, restore_best={"model": model})
    scaffold = ah.Scaffold(tracked={"model": model})
    creator = ah.ChiefSessionCreator(training(model), scaffold=scaffold, checkpoint_dir=tmp_path)
    saver = ah.CheckpointSaverHook()
    async with ah.AsyncMonitoredSession(creator, [stopping, saver]) as session:
        await train(session)
        last = session.global_step.latest.step
        assert model.weights.tolist() == [last, last]
    assert (last, stopping.best, stopping.best_step) == (6 if stops == "early" else len(LOSSES), 1, BEST_STEP)
    assert model.weights.tolist() == [BEST_STEP, BEST_STEP]
    async with ah.AsyncMonitoredSession(creator):
        assert model.weights.tolist() == [last, last]


async def test_not_after_an_error() -> None:
    """The objects are left as they were, for whoever looks at what went wrong."""
    model = Model()
    fault = FaultInjectionHook({("after_run", 6): ah.errors.AbortedError("lost")})
    hooks = [EarlyStoppingHook("loss", patience=100, restore_best={"model": model}), fault]
    with pytest.raises(ah.errors.AbortedError):
        async with ah.AsyncSingularMonitoredSession(training(model), hooks) as session:
            await train(session)
    assert model.weights.tolist() == [6, 6]


async def test_the_best_states_survive_a_restart_and_a_recovery(tmp_path: Path) -> None:
    """They are in the checkpoint: the best observation may be one of a process before."""

    def parts(last: int, *hooks: ah.SessionRunHook) -> tuple[Model, ah.AsyncMonitoredSession]:
        model = Model()
        stopping = EarlyStoppingHook("loss", patience=100, restore_best={"model": model})
        creator = ah.ChiefSessionCreator(training(model), scaffold=ah.Scaffold(tracked={"model": model}), checkpoint_dir=tmp_path)
        stop = ah.StopAtStepHook(last_step=last)
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=1), background=False)
        return model, ah.AsyncMonitoredSession(creator, [stopping, stop, saver, *hooks], recovery=NO_BACKOFF)

    model, session = parts(5)
    async with session:
        await train(session)
    model, session = parts(len(LOSSES), FaultInjectionHook({("before_run", 2): ah.errors.AbortedError("lost")}))
    async with session:
        assert model.weights.tolist() == [5, 5]
        await train(session)
    assert session.status().recoveries == 1
    assert model.weights.tolist() == [BEST_STEP, BEST_STEP]


async def test_states_of_an_evaluation_elsewhere() -> None:
    """What was evaluated is given with the value: the model has changed since."""
    model = Model()
    stopping = EarlyStoppingHook(patience=100, every=None, restore_best={"model": model})
    async with ah.AsyncMonitoredSession(training(model), [stopping]) as session:
        async for _ in session.steps("loss", feeds=[1.0] * 5):
            stopping.report(1, 0.5, {"model": {"weights": np.array([1.0, 1.0])}})
            stopping.report(2, 0.75, {"model": {"weights": np.array([2.0, 2.0])}})
    assert model.weights.tolist() == [1, 1]


async def test_wrong_arguments() -> None:
    """Objects without a state, and states of other objects, are refused by name."""
    wrong: Any = {"model": 3}
    with refused(ah.errors.InvalidArgumentError, "restore_best['model'] is 3", "load_state_dict"):
        EarlyStoppingHook("loss", patience=1, restore_best=wrong)
    stopping = EarlyStoppingHook(patience=1, restore_best={"model": Model()})
    await stopping.begin()
    with refused(ah.errors.InvalidArgumentError, "states has 'weights'", "'model'"):
        stopping.report(1, 0.5, {"weights": {}})
