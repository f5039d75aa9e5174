"""A checkpoint of another model, and two hooks of one name, are refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.saving_sessions import Remembering, chief, on_disk, saving, train


def model(**variables: Any) -> ah.Graph:
    """Return a graph with these variables, and a step that does not change them."""
    graph = ah.Graph()
    for name, value in variables.items():
        graph.variable(name, value)
    graph.train_op(name="train")(lambda: None)
    return graph


WEIGHTS = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("variables", "tracked", "says"),
    [
        ({"weights": WEIGHTS}, ["loader"], "has the variable 'bias', which would be lost"),
        ({"weigths": WEIGHTS, "bias": 1}, ["loader"], "has no variable 'weigths': did you mean 'weights'?"),
        ({"weights": WEIGHTS, "bias": 1, "scale": 1}, ["loader"], "has no variable 'scale'"),
        (
            {"weights": WEIGHTS.T, "bias": 1},
            ["loader"],
            "has variable 'weights' with shape (3, 2); here it has shape (2, 3). Was the model changed?",
        ),
        ({"weights": WEIGHTS, "bias": WEIGHTS}, ["loader"], "has variable 'bias' with shape None; here it has shape (3, 2)"),
        ({"weights": WEIGHTS, "bias": 1}, [], "has the tracked object 'loader', which would be lost"),
        ({"weights": WEIGHTS, "bias": 1}, ["loader", "sampler"], "has no tracked object 'sampler'"),
    ],
    ids=["gone", "misspelt", "new", "shape", "no shape", "tracked gone", "tracked new"],
)
async def test_another_model_is_refused(tmp_path: Path, variables: dict[str, Any], tracked: list[str], says: str) -> None:
    """The error names what does not fit, before anything is changed; the checkpoint still fits its own model."""

    def creator(model_of: dict[str, Any], tracked: list[str], **options: Any) -> ah.ChiefSessionCreator:
        scaffold = ah.Scaffold(tracked={name: Remembering(record=record) for name in tracked})
        return chief(tmp_path, model(**model_of), scaffold=scaffold, **options)

    record: list[str] = []
    await train(creator({"weights": WEIGHTS, "bias": 1}, ["loader"]), [saving(None)], 2)
    steps, values = ah.MemoryStepStore(), ah.Variables()
    with refused(ah.errors.CheckpointMismatchError, f"checkpoint {tmp_path}", "step-000000000002", says):
        await train(creator(variables, tracked, global_step=steps, variables=values), [saving(None)])
    assert (steps.latest, values.ready, record) == ((1, 0), False, [])
    session = await train(creator({"weights": WEIGHTS, "bias": 1}, ["loader"]), [saving(None)], 1)
    assert session.global_step.latest.step == 3


async def test_an_object_that_cannot_load_its_state_is_named(tmp_path: Path) -> None:
    """Its own error is raised, with a note that names the object."""

    class Failing(Remembering):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("epoch")

    for hook, tracked, what in (
        (Failing("mine"), Remembering(), "the hook mine"),
        (Remembering("mine"), Failing(), "the tracked object 'loader'"),
    ):

        def creator(tracked: Any) -> ah.ChiefSessionCreator:
            return chief(tmp_path, model(bias=1), scaffold=ah.Scaffold(tracked={"loader": tracked}))

        await train(creator(Remembering()), [Remembering("mine"), saving(None)])
        with pytest.raises(KeyError, match="epoch") as caught:
            await train(creator(tracked), [hook, saving(None)])
        assert any(f"loading the state of {what}" in note for note in caught.value.__notes__)


async def test_two_hooks_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their states could not be told apart, so they are refused before the first run, even if nothing is saved yet."""
    for save_on_begin in (True, False):
        with refused(ah.errors.InvalidHookError, "would both be 'Remembering' in a checkpoint", "give each a `name` of its own"):
            async with ah.AsyncMonitoredSession(
                model(), [Remembering(), Remembering(), saving(tmp_path, save_on_begin=save_on_begin)]
            ):
                raise AssertionError("it must not open")
    with refused(ah.errors.InvalidHookError, "would both be 'Remembering'"):
        await train(model(), [Remembering(), Remembering("Remembering"), saving(tmp_path)], 0)
    assert await on_disk(tmp_path) == []
    await train(model(), [Remembering(), Remembering()], 1)  # without a saver the names do not matter


async def test_hooks_with_names_of_their_own(tmp_path: Path) -> None:
    """Each gets its own state back, whatever their order."""
    await train(chief(tmp_path, model()), [saving(None), Remembering("a"), Remembering()], 2)
    a, other = Remembering("a"), Remembering()
    a.count = 50
    async with ah.AsyncMonitoredSession(chief(tmp_path, model()), [other, a, saving(None)]) as session:
        assert (a.count, other.count) == (2, 2)
        a.count = 7
        await session.run("train")
    a, other = Remembering("a"), Remembering()
    await train(chief(tmp_path, model()), [other, a], 0)
    assert (a.count, other.count) == (8, 3)


async def test_hooks_may_be_added_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that is not in the checkpoint starts without a state, with a warning; a state without a hook is logged."""
    caplog.set_level(logging.INFO, logger="aiohooks")
    await train(chief(tmp_path, model()), [Remembering("old"), saving(None)], 2)
    new = Remembering("new")
    await train(chief(tmp_path, model()), [new], 0)
    assert new.record == ["begin", "after_create_session with 0 at step 2"]
    records = [record for record in caplog.records if "step-000000000002.000003 " in record.getMessage()]
    found = [(record.levelname, record.getMessage().split("step-000000000002.000003 ")[1]) for record in records]
    assert found == [
        ("WARNING", "has no state of the hook new, which starts anew"),
        ("INFO", "has the state of a hook CheckpointSaverHook, which is not in this session"),
        ("INFO", "has the state of a hook old, which is not in this session"),
    ]


async def test_a_checkpoint_without_a_session_is_refused(tmp_path: Path) -> None:
    """A checkpoint that a user's own `Saver` wrote is not restored into a session."""
    async with ah.Saver(tmp_path) as saver:
        await saver.save({"variables": {"bias": 1}, "tracked": []}, 3)
    with refused(ah.errors.CheckpointMismatchError, "has no 'tracked'; was it written by CheckpointSaverHook?"):
        await train(chief(tmp_path, model(bias=1)))
