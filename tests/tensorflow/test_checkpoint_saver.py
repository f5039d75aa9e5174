"""TensorFlow's own tests of its checkpoint hook (18-40 in the table), and six recorded scenarios.

Two differences run through all of them. A save at the beginning is one at step 0, whatever kind of
session it is, and the boundaries behind it are multiples of the period; TensorFlow's timer triggers
at the first run instead where it was not triggered when the session was created. And by default a
checkpoint is written in the background: `after_save` comes when it is durable, while training may
have continued. Where TensorFlow's order is to be seen, `background` is off here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.saving_sessions import Listener, on_disk, train
from tests.support.sessions import counting, counting_graph

pytestmark = pytest.mark.every_python


def saver(
    path: Path | None, every: ah.Every, *listeners: ah.hooks.CheckpointSaverListener, **options: Any
) -> ah.CheckpointSaverHook:
    """Make a hook that writes as TensorFlow's does: the step waits for it."""
    return ah.CheckpointSaverHook(
        path, every=every, listeners=listeners, background=False, **options
    )


class Recording(Listener):
    """A listener that writes into the record of a scenario, as `L`."""

    def __init__(self, record: list[str], **options: Any) -> None:
        super().__init__(record=record, name="L.", **options)


class Noting(ah.SessionRunHook):
    """Records what happens to the session around the hook."""

    def __init__(self, record: list[str]) -> None:
        self._record = record
        self.steps: list[int] = []
        self._created = 0

    async def after_create_session(self, *_: object) -> None:
        self._created += 1
        self._record.append(f"CREATE{self._created}")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.steps.append(run_context.global_step)
        self._record.append(f"RUN{len(self.steps)}")


def saves(record: Iterable[str]) -> list[int]:
    """Return the steps at which the state was taken."""
    return [int(one.removeprefix("L.before_save(")[:-1]) for one in record if "before_save" in one]


# -- the periods


@pytest.mark.parametrize("every", [ah.Every(secs=2), ah.Every(steps=2)], ids=["secs", "steps"])
async def test_saves_before_the_first_step(tmp_path: Path, every: ah.Every) -> None:
    """Step 0 is saved when the session is created, and the first run is not; TensorFlow saves step
    1 in a bare session (O52).
    """
    with ManualClock():
        async with counting(saver(tmp_path, every)) as session:
            assert await on_disk(tmp_path) == [0]
            await session.run("train")
            assert await on_disk(tmp_path) == [0]


@pytest.mark.parametrize(
    ("every", "run", "steps", "last"),
    [
        (
            ah.Every(secs=2),
            "train",
            [0, 2, 4],
            5,
        ),  # one second a run; TensorFlow saves 1, 3 and 6 of its own, uneven clock
        (ah.Every(steps=2), "train", [0, 2, 4], 5),  # TensorFlow's bare session has 1, 3, 5
        (ah.Every(steps=10), "leap", [0, 10, 20], 25),  # five steps a run; TensorFlow: 5, 15, 25
    ],
    ids=["secs", "steps", "leaps"],
)
async def test_saves_periodically(
    tmp_path: Path, every: ah.Every, run: str, steps: list[int], last: int
) -> None:
    """At multiples of the period, and the last step at the end; the listeners get each."""
    graph, listener = counting_graph(), Listener()
    graph.train_op(steps=5, name="leap")(lambda: None)
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(graph, [saver(tmp_path, every, listener)]) as session:
            for _ in range(5):
                clock.advance(1)
                await session.run(run)
            assert await on_disk(tmp_path) == steps
    assert await on_disk(tmp_path) == listener.saved == [*steps, last]


async def test_listeners_within_one_period(tmp_path: Path) -> None:
    """Two runs within the period: begin once, two saves (the beginning and the end), end once."""
    listener = Listener()
    with ManualClock():
        await train(counting_graph(), [saver(tmp_path, ah.Every(secs=2), listener)], 2)
    assert listener.record == [
        "begin",
        "before_save(0)",
        "after_save(0)",
        "before_save(2)",
        "after_save(2)",
        "end(2)",
    ]


async def test_the_step_is_not_read_once_more(tmp_path: Path) -> None:
    """The hook fetches nothing in a run, unless it has metrics: the context has the step (O49)."""
    hook = saver(tmp_path, ah.Every(steps=1))
    answers: list[Any] = []
    asked = hook.before_run

    async def before_run(run_context: ah.SessionRunContext) -> Any:
        answer: Any = await asked(run_context)
        answers.append(answer)
        return answer

    hook.before_run = before_run  # type: ignore[method-assign]
    await train(counting_graph(), [hook], 2)
    assert answers == [None, None]


# -- listeners and restarts


async def test_a_second_session_continues_from_the_saved_step(tmp_path: Path) -> None:
    """The hook needs no saver of its own; two listeners get the same; the next session continues at
    step 2.

    TensorFlow restores by a directory or by a file's name; here it is the directory, and its newest
    good checkpoint.
    """
    listeners = [Listener(), Listener()]
    hook = ah.CheckpointSaverHook(every=ah.Every(steps=1), listeners=listeners)
    await train(ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=tmp_path), [hook], 2)
    assert [listener.saved for listener in listeners] == [[0, 1, 2]] * 2
    async with ah.AsyncMonitoredSession(
        ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=tmp_path)
    ) as session:
        assert await session.run(["total", "global_step"]) == [2, 2]


async def test_the_last_step_counts_over_a_restart(tmp_path: Path) -> None:
    """`StopAtStepHook(last_step)` on checkpoints: 3 runs, then the 2 up to 5, then none."""
    runs: list[int] = []
    for last_step in (3, 5, 5):
        noting = Noting([])
        hooks = [noting, ah.StopAtStepHook(last_step=last_step), ah.CheckpointSaverHook()]
        await train(ah.ChiefSessionCreator(counting_graph(), checkpoint_dir=tmp_path), hooks, 100)
        runs.append(len(noting.steps))
    assert runs == [3, 2, 0]


async def test_an_empty_directory_is_a_beginning(tmp_path: Path) -> None:
    """With nothing to restore, the variables and then local state are initialised; with a
    checkpoint only local state is.
    """
    record: list[str] = []

    async def init(session: ah.Session) -> None:
        record.append("init")

    async def local_init(session: ah.Session) -> None:
        record.append(f"local_init at {session.global_step.latest.step}")

    scaffold = ah.Scaffold(init_fn=init, local_init_fn=local_init)
    for _ in range(2):
        creator = ah.ChiefSessionCreator(
            counting_graph(), scaffold=scaffold, checkpoint_dir=tmp_path
        )
        await train(creator, [ah.CheckpointSaverHook()])
    assert record == ["init", "local_init at 0", "local_init at 1"]


# -- the recorded scenarios


SAVES = "L.before_save({0}) L.after_save({0})".format


@pytest.mark.parametrize(
    ("every", "expected", "steps"),
    [
        (
            2,
            (
                f"L.begin CREATE1 {SAVES(0)} RUN1 RUN2 {SAVES(2)} RUN3 RUN4 {SAVES(4)} RUN5"
                f" {SAVES(5)} L.end(5)"
            ),
            [0, 2, 4, 5],
        ),
        (
            2,
            f"L.begin CREATE1 {SAVES(0)} RUN1 RUN2 {SAVES(2)} RUN3 RUN4 {SAVES(4)} L.end(4)",
            [0, 2, 4],
        ),
        (1, f"L.begin CREATE1 {SAVES(0)} RUN1 {SAVES(1)} L.end(1)", [0, 1]),
    ],
    ids=["beside the end", "at the end", "one run"],
)
async def test_recorded_saves(tmp_path: Path, every: int, expected: str, steps: list[int]) -> None:
    """Recorded: the same as TensorFlow's record; the last step is not saved twice. There is no
    graph to write into files.
    """
    record: list[str] = []
    await train(
        counting_graph(),
        [Noting(record), saver(tmp_path, ah.Every(steps=every), Recording(record))],
        steps[-1],
    )
    assert " ".join(record) == expected
    assert await on_disk(tmp_path) == steps


@pytest.mark.parametrize(
    ("returns", "steps"),
    [({0: True, 2: True}, [0]), ({2: True}, [0, 1, 2]), ({1: True}, [0, 1])],
    ids=["0 and 2", "2", "1"],
)
async def test_a_listener_stops_the_training(
    tmp_path: Path, returns: dict[int, bool], steps: list[int]
) -> None:
    """Recorded: a request at the first save stops before the first run; TensorFlow ignores it
    (O50), and stops at 2.
    """
    record: list[str] = []
    hook = saver(tmp_path, ah.Every(steps=1), Recording(record, returns=returns))
    session = await train(counting_graph(), [Noting(record), hook], 10)
    assert saves(record) == await on_disk(tmp_path) == steps
    assert record[-1] == f"L.end({steps[-1]})"
    assert session.stop_reason == f"a listener requested it after saving step {steps[-1]}"
