"""The chief and the workers of a run: what each is given, what it returns, and when it is restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import current_task, shielded, wait_done
from aiohooks._aio.clock import sleep
from aiohooks._validate import check_callable, check_instance, check_int, check_mapping
from aiohooks.errors import AiohooksError, InvalidArgumentError, StoreUnavailableError, TaskDiedError
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.session.runner import run
from aiohooks.stores import StepStore, open_step_store
from aiohooks.stores.open import RUN_VARIABLE, URL_VARIABLE

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One of the tasks of a run: the chief, or a worker.

    Attributes:
        task_id: 0 for the chief, 1 to `num_workers` for the workers.
        num_workers: the number of workers besides the chief.
        store: the step store of the run, open; closed by the launcher.
        checkpoint_dir: the directory of the run's checkpoints; None if the launcher was given none.
        attempt: 1, and one more after each restart of the task.
    """

    task_id: int
    num_workers: int
    store: StepStore
    checkpoint_dir: Path | None = None
    attempt: int = 1

    @property
    def is_chief(self) -> bool:
        """Whether this is the chief."""
        return self.task_id == 0

    @property
    def name(self) -> str:
        """`chief`, or `worker 2`."""
        return task_name(self.task_id)


def task_name(task_id: int) -> str:
    """Return the name of a task in messages."""
    return f"worker {task_id}" if task_id else "chief"


# Arguments of the launchers.


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What another process needs to run a task; all of it can be pickled."""

    main: Callable[..., Coroutine[Any, Any, Any]]
    args: tuple[Any, ...]
    url: str
    run: str
    num_workers: int
    checkpoint_dir: Path | None
    store_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    task_id: int = 0
    attempt: int = 1


def check_task_options(
    main: object, args: object, num_workers: object, max_restarts: object = 0, backoff: object = Backoff()
) -> None:
    """Raise `InvalidArgumentError` unless the arguments that all launchers share are valid."""
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(f"main is {main!r}; give a coroutine function (`async def`) that takes the Task")
    check_int(num_workers, "num_workers", expected="a whole number, 0 for none")
    check_int(max_restarts, "max_restarts", expected="a whole number, 0 for none")
    check_instance(args, tuple, "args")
    check_instance(backoff, Backoff, "backoff")


def absolute_path(directory: object) -> Path | None:
    """Return a checkpoint directory as other processes, with another working directory, can use it."""
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise InvalidArgumentError(f"checkpoint_dir is {directory!r}; give the path of a directory, or leave it out")
    return None if directory is None else Path(os.path.abspath(cast("str | os.PathLike[str]", directory)))


def with_store_defaults(store_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the step stores of all processes: by default waiters keep waiting for one that is restarted."""
    check_mapping(store_options, "store_options")
    for reserved in ("url", "run"):
        if reserved in (store_options or {}):
            raise InvalidArgumentError(f"store_options has {reserved!r}, which is an argument of the launcher")
    return {"on_lost": "keep", **(store_options or {})}


def new_run_name() -> str:
    """Return a random name for a run that was given none."""
    return f"run-{secrets.token_hex(4)}"


async def forget_run(store: StepStore, grace_secs: float) -> None:
    """Delete a run whose name was random, or log why that failed."""
    try:
        await shielded(store.forget(), grace_secs=grace_secs, what=f"forgetting the run {store.run}")
    except StoreUnavailableError as error:
        _logger.warning("the run %s could not be deleted: %s", store.run, error)


# In the task's process.


class TaskResult(NamedTuple):
    """What a task returned or raised, as its process sends it back."""

    value: Any
    error: BaseException | None = None
    trace: str = ""


def run_task(spec: TaskSpec) -> TaskResult:
    """Run a task in a new event loop of this process."""
    before = {name: os.environ.get(name) for name in (URL_VARIABLE, RUN_VARIABLE)}
    os.environ[URL_VARIABLE], os.environ[RUN_VARIABLE] = spec.url, spec.run
    try:
        return TaskResult(run(_call_main, spec))
    except SystemExit as end:
        if end.code:
            raise
        return TaskResult(None)
    except Exception as error:
        return TaskResult(None, _picklable(error), traceback.format_exc())
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _call_main(spec: TaskSpec) -> Any:
    # The asyncio task gets the name because it is part of a session's messages, and each process has a Task-1.
    current_task().set_name(task_name(spec.task_id))
    async with open_step_store(spec.url, run=spec.run, **spec.store_options) as store:
        return await spec.main(Task(spec.task_id, spec.num_workers, store, spec.checkpoint_dir, spec.attempt), *spec.args)


def _picklable(error: Exception) -> Exception:
    """Return the error, or one with its text if it does not survive pickling."""
    try:
        pickler: Any = ForkingPickler  # its `loads` has no types
        pickler.loads(pickler.dumps(error))
    except Exception:
        return AiohooksError(f"{type(error).__name__}: {error}")
    return error


def unwrap_result(result: TaskResult, spec: TaskSpec) -> Any:
    """Return the value of a result, or raise its error with a note that names the task."""
    if result.error is None:
        return result.value
    trace = f":\n{result.trace}" if result.trace else ""
    result.error.add_note(f"in the {task_name(spec.task_id)}, attempt {spec.attempt}{trace}")
    raise result.error


# In the launcher.

Attempt = Callable[[int, int], Coroutine[Any, Any, T]]
"""Runs a task, given its id and the number of the attempt. Cancelled, it ends the process that it has started.

Raises `TaskDiedError` if the process ends without a result.
"""


async def supervise(attempt: Attempt[T], *, num_tasks: int, max_restarts: int, backoff: Backoff, grace_secs: float) -> list[T]:
    """Run all tasks, restart those that die, and return their results by task id.

    When one fails the others are cancelled.

    Raises:
        ExceptionGroup: of the errors of the tasks that failed.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def task_done(task: asyncio.Task[T]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if not ended.done() and (failed or all(one.done() for one in tasks)):
            ended.set_result(None)

    tasks = [
        asyncio.get_running_loop().create_task(
            _run_with_restarts(attempt, task_id, max_restarts, backoff), name=task_name(task_id)
        )
        for task_id in range(num_tasks)
    ]
    for task in tasks:
        task.add_done_callback(task_done)
    try:
        await ended
    finally:
        for task in tasks:
            task.cancel()
        await shielded(wait_done(tasks, None), grace_secs=grace_secs, what="ending the tasks of a run")
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if not errors and any(task.cancelled() for task in tasks):
        errors = [TaskDiedError(f"the {task.get_name()} was cancelled from outside") for task in tasks if task.cancelled()]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {num_tasks} tasks failed", errors)
    return [task.result() for task in tasks]


async def _run_with_restarts(attempt: Attempt[T], task_id: int, max_restarts: int, backoff: Backoff) -> T:
    number = 1
    while True:
        try:
            return await attempt(task_id, number)
        except TaskDiedError as error:
            if number > max_restarts:
                error.add_note(f"not restarted again after {max_restarts} restarts")
                raise
            secs = backoff.pause_secs(number)
            _logger.warning("%s; restarting it in %.1f s, attempt %d", error, secs, number + 1)
        await sleep(secs)
        number += 1
