"""Sessions that continue from checkpoints, after a restart and after a recovery; what does not fit
is refused by name.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.checkpoint_files import same
from tests.support.checks import refused
from tests.support.hooks import SessionRecorder
from tests.support.saving_sessions import (
    Remembering,
    chief,
    on_disk,
    saving,
    train,
    values_at,
)
from tests.support.sessions import NO_BACKOFF, counting_graph

LOST = ah.AbortedError("lost")


async def uninterrupted(tmp_path: Path, runs: int) -> Any:
    """Return the values after so many runs in one session."""
    await train(chief(tmp_path / "whole"), [saving(None)], runs)
    return await values_at(tmp_path / "whole")


# -- restarts


async def test_the_order_at_a_restart(tmp_path: Path) -> None:
    """Tracked objects are loaded before the scaffold's functions, without `init_fn`; hooks before
    `after_create_session`.
    """
    record: list[str] = []

    async def init(session: ah.Session) -> None:
        record.append("init_fn")

    async def local_init(session: ah.Session) -> None:
        record.append(f"local_init_fn at step {await session.run('global_step')}")

    for _ in range(2):
        record.clear()
        loader = Remembering("loader", record)
        hook = Remembering("hook", record)
        scaffold = ah.Scaffold(tracked={"loader": loader}, init_fn=init, local_init_fn=local_init)
        async with ah.AsyncMonitoredSession(
            chief(tmp_path, scaffold=scaffold), [hook, saving(None)]
        ) as session:
            loader.count = 40
            await session.run("train")
    assert record == [
        "begin",
        "loader 40",
        "local_init_fn at step 1",
        "hook 1",
        "after_create_session with 1 at step 1",
    ]


@pytest.mark.parametrize("step", [0, 5, 9])
async def test_a_restore_begins_an_epoch_at_the_step_of_the_checkpoint(
    tmp_path: Path, step: int
) -> None:
    """The step store has the step of the checkpoint in a new epoch, whatever its step was before:
    what the session before had received is lost. Waiters for a step that was reached before the
    restart wake.
    """
    await train(chief(tmp_path), [saving(None)], 5)
    steps = ah.MemoryStepStore(step)
    sessions = SessionRecorder()
    waiting = asyncio.create_task(steps.wait_for(5))
    async with ah.AsyncMonitoredSession(
        chief(tmp_path, global_step=steps), [saving(None), sessions]
    ) as session:
        assert await waiting in (5, step)
        assert steps.latest == (2, 5)
        assert sessions.sessions[0].committed_step == 5
        await session.run("train")
    assert await on_disk(tmp_path) == [2, 3, 4, 5, 6]


# -- recoveries


async def test_a_recovery_restores_the_newest_checkpoint(tmp_path: Path) -> None:
    """Variables, tracked objects, hooks and the step are restored; the run is repeated and ends
    with the same bits.
    """
    whole = await uninterrupted(tmp_path, 6)
    record = list[str]()
    steps = ah.MemoryStepStore()
    seen = list[ah.stores.Position]()
    hook = Remembering("hook", record)
    loader = Remembering("loader", record)
    hooks = [
        FaultInjectionHook({("before_run", 6): LOST}),
        hook,
        saving(None, every=ah.Every(steps=2)),
    ]
    creator = chief(tmp_path, scaffold=ah.Scaffold(tracked={"loader": loader}), global_step=steps)
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=NO_BACKOFF) as session:
        for number in range(7):
            loader.count = 10 * number
            await session.run("train")
            seen.append(session.global_step.latest)
    assert seen == [*((1, step) for step in range(1, 6)), (2, 5), (2, 6)]
    created = "after_create_session with {0} at step {0}"
    assert record == ["begin", created.format(0), "loader 30", "hook 4", created.format(4)]
    assert (await on_disk(tmp_path), hook.count) == ([0, 2, 4, 6], 6)
    assert same(await values_at(tmp_path), whole)


# -- chiefs and workers


async def test_a_worker_never_restores(tmp_path: Path) -> None:
    """Workers use the shared values as they are, also after a recovery, so they do not reset the
    chief.
    """
    variables = ah.Variables()
    steps = ah.MemoryStepStore()
    graph = counting_graph()
    shared: dict[str, Any] = {"variables": variables, "global_step": steps}
    await train(chief(tmp_path, graph), [saving(None)], 3)
    sessions = SessionRecorder()
    hooks = [FaultInjectionHook({("before_run", 2): LOST}), sessions]
    working = asyncio.create_task(
        train(ah.WorkerSessionCreator(graph, **shared), hooks, 3, recovery=NO_BACKOFF)
    )
    async with ah.AsyncMonitoredSession(
        chief(tmp_path, graph, **shared), [saving(None)]
    ) as session:
        await working
        await session.run("train")
    assert [raw.restored for raw in sessions.sessions] == [None, None]
    assert (steps.latest, variables.snapshot()) == ((2, 7), {"total": 7})
    assert (await on_disk(tmp_path))[-1] == 7


# -- what does not fit


def model(**variables: Any) -> ah.Graph:
    """Return a graph with these variables, and a step that does not change them."""
    graph = ah.Graph()
    for name, value in variables.items():
        graph.variable(name, value)
    graph.train_op(name="train")(lambda: None)
    return graph


W = np.zeros((3, 2))
OWN: dict[str, Any] = {"weights": W, "bias": 1}
SHAPE = "has variable 'weights' with shape (3, 2); here it has shape (2, 3). Was the model changed?"
MISMATCHES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "gone": ({"weights": W}, ["loader"], "has the variable 'bias', which would be lost"),
    "misspelt": (
        {"weigths": W, "bias": 1},
        ["loader"],
        "has no variable 'weigths': did you mean 'weights'?",
    ),
    "new": ({**OWN, "scale": 1}, ["loader"], "has no variable 'scale'"),
    "shape": ({"weights": W.T, "bias": 1}, ["loader"], SHAPE),
    "no shape": (
        {"weights": W, "bias": W},
        ["loader"],
        "has variable 'bias' with shape None; here it has shape (3, 2)",
    ),
    "tracked gone": (OWN, [], "has the tracked object 'loader', which would be lost"),
    "tracked new": (OWN, ["loader", "sampler"], "has no tracked object 'sampler'"),
}


@pytest.mark.parametrize(("variables", "tracked", "says"), MISMATCHES.values(), ids=MISMATCHES)
async def test_another_model_is_refused(
    tmp_path: Path, variables: dict[str, Any], tracked: list[str], says: str
) -> None:
    """The error names what does not fit, before anything is changed; the checkpoint still fits its
    own model.
    """

    def creator(
        model_of: dict[str, Any], tracked: list[str], **options: Any
    ) -> ah.ChiefSessionCreator:
        scaffold = ah.Scaffold(tracked={name: Remembering(record=record) for name in tracked})
        return chief(tmp_path, model(**model_of), scaffold=scaffold, **options)

    record: list[str] = []
    await train(creator(OWN, ["loader"]), [saving(None)], 2)
    steps = ah.MemoryStepStore()
    values = ah.Variables()
    with refused(
        ah.errors.CheckpointMismatchError, f"checkpoint {tmp_path}", "step-000000000002", says
    ):
        await train(
            creator(variables, tracked, global_step=steps, variables=values), [saving(None)]
        )
    assert (steps.latest, values.ready, record) == ((1, 0), False, [])
    session = await train(creator(OWN, ["loader"]), [saving(None)], 1)
    assert session.global_step.latest.step == 3


async def test_a_checkpoint_without_a_session_is_refused(tmp_path: Path) -> None:
    """A checkpoint that a user's own `Saver` wrote is not restored into a session."""
    async with ah.checkpoint.Saver(tmp_path) as saver:
        await saver.save({"variables": {"bias": 1}, "tracked": []}, 3)
    with refused(
        ah.errors.CheckpointMismatchError,
        "has no 'tracked'; was it written by CheckpointSaverHook?",
    ):
        await train(chief(tmp_path, model(bias=1)))


async def test_an_object_that_cannot_load_its_state_is_named(tmp_path: Path) -> None:
    """Its own error is raised, with a note that names the object."""

    class Failing(Remembering):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("epoch")

    def creator(tracked: Any) -> ah.ChiefSessionCreator:
        return chief(tmp_path, model(bias=1), scaffold=ah.Scaffold(tracked={"loader": tracked}))

    await train(creator(Remembering()), [Remembering("mine"), saving(None)])
    for hook, tracked, what in (
        (Failing("mine"), Remembering(), "the hook mine"),
        (Remembering("mine"), Failing(), "the tracked object 'loader'"),
    ):
        with pytest.raises(KeyError, match="epoch") as caught:
            await train(creator(tracked), [hook, saving(None)])
        assert any(f"loading the state of {what}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("save_on_begin", [True, False])
async def test_two_hooks_of_one_name_are_refused(tmp_path: Path, save_on_begin: bool) -> None:
    """Their states could not be told apart, so they are refused before the first run, even if
    nothing is saved yet.
    """
    says = "would both be 'Remembering' in a checkpoint", "give each a `name` of its own"
    for second in (Remembering(), Remembering("Remembering")):
        with refused(ah.errors.InvalidHookError, *says):
            hooks = [Remembering(), second, saving(tmp_path, save_on_begin=save_on_begin)]
            await ah.AsyncMonitoredSession(model(), hooks).__aenter__()
    assert await on_disk(tmp_path) == []
    await train(
        model(), [Remembering(), Remembering()], 1
    )  # without a saver the names do not matter


async def test_hooks_with_names_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each gets its own state back, whatever their order; a warning names one without a state, and
    a state without a hook.
    """
    caplog.set_level(logging.INFO, logger="aiohooks")
    await train(
        chief(tmp_path, model()),
        [saving(None), Remembering("a"), Remembering(), Remembering("old")],
        2,
    )
    a = Remembering("a")
    other = Remembering()
    new = Remembering("new")
    a.count = new.count = 50
    await train(chief(tmp_path, model()), [new, other, a], 0)
    assert (a.count, other.count) == (2, 2)
    assert new.record == ["begin", "after_create_session with 0 at step 2"]
    parts = [
        (record.levelname, record.getMessage().partition("step-000000000002.000003 ")[2])
        for record in caplog.records
    ]
    assert [part for part in parts if part[1]] == [
        ("WARNING", "has no state of the hook new, which starts anew"),
        ("WARNING", "has the state of a hook CheckpointSaverHook, which is not in this session"),
        ("WARNING", "has the state of a hook old, which is not in this session"),
    ]
