"""What the adapters of callbacks refuse when they are made, before anything of a framework is called."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest
from transformers import EarlyStoppingCallback

import aiohooks as ah
from aiohooks.adapters.ignite import HooksForIgnite, IgniteHandlers
from aiohooks.adapters.keras import KerasCallbacks
from aiohooks.adapters.lightning import LightningCallbacks
from aiohooks.adapters.transformers import TrainerCallbacks
from aiohooks.testing import RecordingHook
from tests.adapters.callbacks.loops import LightningModule, Loop, ignite_engine, lightning_trainer, losses, trainer_arguments
from tests.support.checks import refused

Stopping = keras.callbacks.EarlyStopping


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KerasCallbacks([Stopping]), ("callbacks has <class", "give objects of Callback of keras")),
        (lambda: KerasCallbacks(Stopping()), ("callbacks is <keras", "give a list of objects of Callback of keras")),
        (lambda: KerasCallbacks([RecordingHook()]), ("callbacks has RecordingHook", "give objects of Callback of keras")),
        (lambda: LightningCallbacks([], LightningModule()), ("trainer is []; give a Trainer",)),
        (lambda: LightningCallbacks(lightning_trainer([]), None), ("module is None; give a LightningModule",)),
        (lambda: IgniteHandlers([print]), ("engine is [", "give an Engine")),
        (lambda: HooksForIgnite([], ignite_engine()), ("engine is []; give an Engine",)),
        (lambda: TrainerCallbacks([EarlyStoppingCallback()], None), ("args is None; give a TrainingArguments",)),
        (lambda: TrainerCallbacks([print], trainer_arguments()), ("callbacks has <built-in", "TrainerCallback of transformers")),
    ],
)
def test_what_is_no_callback_is_refused(make: Callable[[], object], says: tuple[str, ...]) -> None:
    """With the value, and what to give."""
    with refused(ah.errors.InvalidArgumentError, *says):
        make()


def test_a_hook_in_place_of_a_list_is_refused(loop: Loop) -> None:
    """When the training begins, as by a session."""
    with refused(ah.errors.InvalidHookError, "hooks is ", "give a list of hooks"):
        loop(RecordingHook(), 1)


@pytest.mark.parametrize(
    ("callback", "adapter"),
    [
        (Stopping(), "KerasCallbacks of aiohooks.adapters.keras"),
        (EarlyStoppingCallback(), "TrainerCallbacks of aiohooks.adapters.transformers"),
        (ignite_engine(), "IgniteHandlers of aiohooks.adapters.ignite"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_callback_in_place_of_a_hook_is_refused(callback: object, adapter: str) -> None:
    """The message names its adapter."""
    with refused(ah.errors.InvalidHookError, "which is not a SessionRunHook", f"give it to {adapter}"):
        ah.AsyncMonitoredSession(losses(), [callback])  # type: ignore[list-item]
