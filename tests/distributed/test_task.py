"""What launchers share: a task in its process, restarts, and the end of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from aiohooks import Backoff
from aiohooks.distributed import Task
from aiohooks.distributed.task import (
    TaskSpec,
    launch,
    make_spec,
    run_task,
    supervise,
    until_sigterm,
    unwrap_result,
    with_process_options,
)
from aiohooks.errors import (
    AiohooksError,
    PublisherFinishedError,
    StoreUnavailableError,
    TaskDiedError,
)
from aiohooks.stores import MemoryStepStore, StoreStatistics
from aiohooks.testing import ManualClock
from tests.support.tasks import SpecOfStore
from tests.support.waiting import advance_clock, parked, ticks, uncancellable


class OwnError(Exception):
    """An error that cannot be pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


async def _end(task: Task, how: Any) -> Any:
    if isinstance(how, BaseException):
        raise how
    running = asyncio.current_task()
    assert running is not None
    assert running.get_name() == task.name, "messages of its sessions have it"
    return how, task.name, os.environ["AIOHOOKS_STEP_STORE"], os.environ["AIOHOOKS_RUN"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart tasks immediately."""
    monkeypatch.setattr("aiohooks.distributed.task._BACKOFF", Backoff(initial_secs=0))


def spec_of(how: Any = 7, stop_grace_secs: float = 1.0) -> TaskSpec:
    spec = make_spec(_end, (how,), 1, "r", None)
    return with_process_options(spec, 1, stop_grace_secs, None)


def run(how: Any) -> Any:
    spec = dataclasses.replace(spec_of(how), url="memory://", task_id=1, attempt=3)
    spec = SpecOfStore.of(spec, MemoryStepStore())
    return unwrap_result(run_task(spec), spec)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the variables that a task sets in its process."""
    for name in ("AIOHOOKS_RUN", "AIOHOOKS_STEP_STORE"):
        monkeypatch.setenv(name, "of another run")


def test_a_task_in_its_process() -> None:
    """It returns what `main` returns; the run is in the environment. An end with code 0 is one
    without a value.
    """
    assert run(7) == (7, "worker 1", "memory://", "r")
    assert run(SystemExit(0)) is None
    assert run(SystemExit(None)) is None
    with pytest.raises(SystemExit):
        run(SystemExit(3))


def test_an_error_in_its_process() -> None:
    """It is raised in the launcher, with the task and the traceback as a note; one that cannot be
    pickled, as its text.
    """
    with pytest.raises(ValueError, match="bad data") as raised:
        run(ValueError("bad data"))
    assert raised.value.__notes__[0].startswith("in the worker 1, attempt 3:\nTraceback")
    with pytest.raises(AiohooksError, match="OwnError: one two"):
        run(OwnError("one", "two"))


class Attempts:
    """Attempts of the tasks that end as told, by task and attempt; all others wait."""

    def __init__(self, ends: dict[tuple[int, int], Callable[[], Any]]) -> None:
        self.ends = ends
        self.ended: list[tuple[int, int]] = []

    async def __call__(self, spec: TaskSpec) -> Any:
        try:
            end = self.ends.get((spec.task_id, spec.attempt))
            return end() if end is not None else await asyncio.get_running_loop().create_future()
        finally:
            self.ended.append((spec.task_id, spec.attempt))


def die(task_id: int = 1) -> Any:
    raise TaskDiedError("it died", task_id=task_id)


async def test_a_task_that_dies_too_often() -> None:
    """Its last error says how often it was restarted, and the others are ended."""
    attempts = Attempts({(1, 1): die, (1, 2): die})
    with pytest.raises(ExceptionGroup, match="1 of 2 tasks failed") as raised:
        await supervise(attempts, spec_of())
    assert [error.__notes__ for error in raised.value.exceptions] == [
        ["not restarted again after 1 restarts"]
    ]
    assert attempts.ended == [(1, 1), (1, 2), (0, 1)]


async def test_a_clean_end_is_an_error() -> None:
    """A task that ends so has no result, unless it had one before its chief died."""

    def end() -> None:
        raise PublisherFinishedError("chief finished at step 7")

    with pytest.raises(ExceptionGroup, match="1 of 2 tasks failed") as raised:
        await supervise(Attempts({(1, 1): end}), spec_of())
    assert isinstance(raised.value.exceptions[0], PublisherFinishedError)


async def test_a_task_that_others_cancel() -> None:
    """It is named, and no other task: there is no result, and no error."""

    def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    # The launcher cancels the chief, which is no failure.
    with pytest.raises(ExceptionGroup, match="1 of 2 tasks failed") as raised:
        await supervise(Attempts({(1, 1): cancel}), spec_of())
    (error,) = raised.value.exceptions
    assert str(error) == "the worker 1 was cancelled, and not by the launcher"
    assert isinstance(error.__cause__, asyncio.CancelledError)


class Store(MemoryStepStore):
    """Counts what is asked of it."""

    calls: list[str]
    error: Exception | None = None

    async def forget(self) -> None:
        self.calls.append("forget")
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        self.calls.append("close")
        await super().aclose()

    def statistics(self) -> StoreStatistics:
        if self.error is not None:
            raise self.error
        return super().statistics()


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("error", [None, StoreUnavailableError("it is away")])
async def test_the_end_of_a_run(
    forgets: bool, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with a random name is deleted, or the log says why not; a chief that dies meanwhile is
    restarted all the same.
    """
    store = Store()
    store.calls = []
    store.error = error
    ends = {(0, 1): lambda: die(0), (0, 2): lambda: 1, (1, 1): lambda: 2}
    spec = SpecOfStore.of(spec_of(), store)
    assert await launch(Attempts(ends), spec, store, forgets=forgets) == [1, 2]
    assert "it died; restarting it in 0.0 s, attempt 2" in caplog.text
    assert store.calls == [*["forget"] * forgets, "close"]
    assert ("could not be deleted: it is away" in caplog.text) is (forgets and error is not None)
    assert ("cannot read whether the chief has a successor: it is away" in caplog.text) is (
        error is not None
    )


async def test_the_store_is_closed_whatever_deleting_the_run_raises() -> None:
    """An error of another kind is raised, and leaves no open store."""
    store = Store()
    store.calls = []
    store.error = ValueError("odd")
    with pytest.raises(ValueError, match="odd"):
        await launch(
            Attempts({(0, 1): lambda: 1, (1, 1): lambda: 2}), spec_of(), store, forgets=True
        )
    assert store.calls == ["forget", "close"]


async def test_tasks_that_do_not_end(clock: ManualClock) -> None:
    """A launcher that is cancelled waits for them; cancelled again, for twice the grace period and
    five seconds more.
    """
    released = asyncio.Event()
    launcher = await parked(
        supervise(lambda spec: uncancellable(released), spec_of(stop_grace_secs=1.5))
    )
    try:
        for _ in range(2):
            await ticks(20)
            launcher.cancel()
        await ticks(20)
        await advance_clock(clock, 7.9, 20)
        assert not launcher.done()
        await advance_clock(clock, 0.2, 20)
        assert launcher.cancelled()
    finally:
        released.set()
        await ticks(20)


async def test_sigterm_ends_what_a_launcher_runs() -> None:
    """It is cancelled, and the program ends with the code of the signal; a program that handles the
    signal itself continues.
    """
    ended: list[str] = []

    async def running() -> str:
        signal.raise_signal(signal.SIGTERM)
        try:
            await ticks(20)
        finally:
            ended.append("ended")
        return "continued"

    with pytest.raises(SystemExit) as raised:
        await until_sigterm(running(), "the launcher")
    assert (raised.value.code, ended) == (128 + signal.SIGTERM, ["ended"])
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append("handled"))
    try:
        assert await until_sigterm(running(), "the launcher") == "continued"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["ended", "handled", "ended"]
