"""The chief and the workers of a run: their arguments, their results, and their restarts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from aiohooks._core.activity import logger
from aiohooks._core.clock import sleep
from aiohooks._core.validate import (
    call_error,
    check_callable,
    check_checkpoint_dir,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._core.waits import Backoff, current_task, shielded, wait_done
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    StopRequestedError,
    StoreUnavailableError,
    TaskDiedError,
    add_note,
    is_clean_end,
    safe_str,
)
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.run import run
from aiohooks.session.signals import SignalPolicy, StopOnSignal, may_handle
from aiohooks.stores import StepStore, open_step_store
from aiohooks.stores.open import RUN_VARIABLE, URL_VARIABLE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a run: the chief, or a worker.

    Attributes:
        task_id: 0 for the chief, 1 to `num_workers` for the workers.
        num_workers: the number of workers, without the chief.
        store: the open step store of the run. The launcher closes it.
        checkpoint_dir: the directory of the run's checkpoints, or None if the launcher got none.
        attempt: 1 for the first start, and one more for each restart of the task.
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
        """The name of the task in messages, such as `chief` or `worker 2`."""
        return task_name(self.task_id)


def task_name(task_id: int) -> str:
    """Return the name of a task in messages."""
    return f"worker {task_id}" if task_id else "chief"


_BACKOFF = Backoff(initial_secs=0.5, max_secs=30.0)
"""The pauses before restarts of a task."""

# Arguments of the launchers.


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task and the options of its launcher.

    A spec can be pickled, so that another process can run the task. The launcher uses the spec to
    end and restart the task. The spec of a whole run has the default `task_id` and `attempt`.
    """

    main: Callable[..., Coroutine[Any, Any, Any]]
    args: tuple[Any, ...]
    num_workers: int
    run: str
    checkpoint_dir: Path | None
    store_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_restarts: int = 0
    stop_grace_secs: float = 2.5
    url: str = ""
    task_id: int = 0
    attempt: int = 1

    @property
    def name(self) -> str:
        """The name of the task in messages."""
        return task_name(self.task_id)

    def open_store(self) -> StepStore:
        """Return a step store of the run."""
        # Waits for a step continue while a task restarts.
        options = {"on_lost": "keep", **self.store_options}
        return open_step_store(self.url, run=self.run, **options)

    def call(self, store: StepStore) -> Coroutine[Any, Any, Any]:
        """Call `main` with the task, and return its coroutine."""
        return self.main(
            Task(self.task_id, self.num_workers, store, self.checkpoint_dir, self.attempt),
            *self.args,
        )


def make_spec(
    main: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
    num_workers: int,
    run: str | None,
    checkpoint_dir: str | os.PathLike[str] | None,
) -> TaskSpec:
    """Return the spec of the tasks of a run. A run without a name gets a random name.

    All launchers have these parameters.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(
            f"main is {main!r}; give a coroutine function (`async def`) that takes the Task"
        )
    check_instance(args, tuple, "args")
    error = call_error(main, None, *args)  # None stands for the Task
    if error is not None:
        arguments = f"the Task and the arguments {args!r}" if args else "the Task"
        raise InvalidArgumentError(
            f"main is {main!r}, which is called with {arguments}: {error}"
        ) from error
    num_workers = checked_int(num_workers, "num_workers", expected="a whole number, 0 for none")
    if run is None:
        run = f"run-{secrets.token_hex(4)}"
    if checkpoint_dir is not None:
        check_checkpoint_dir(checkpoint_dir)
        # The path must be absolute, because other processes may have another working directory.
        checkpoint_dir = Path(os.path.abspath(checkpoint_dir))
    return TaskSpec(main, args, num_workers, run, checkpoint_dir)


def with_process_options(
    spec: TaskSpec,
    max_restarts: int,
    stop_grace_secs: float,
    store_options: Mapping[str, Any] | None,
) -> TaskSpec:
    """Return a copy of the spec with the options of launchers that start processes.

    Raises:
        InvalidArgumentError: an option is invalid.
    """
    max_restarts = checked_int(max_restarts, "max_restarts", expected="a whole number, 0 for none")
    check_secs(stop_grace_secs, "stop_grace_secs")
    check_mapping(store_options, "store_options")
    return replace(
        spec,
        max_restarts=max_restarts,
        stop_grace_secs=stop_grace_secs,
        # A dict: the spec is pickled for other processes, and not every mapping can be pickled.
        store_options=dict(store_options or {}),
    )


# In the task's process.


class TaskResult(NamedTuple):
    """The value or the error of a task, which its process sends to the launcher."""

    value: Any
    error: BaseException | None = None
    trace: str = ""
    """The traceback of the error as text, because an error loses its traceback when pickled."""


def run_task(spec: TaskSpec) -> TaskResult:
    """Run a task in a new event loop of this process, which runs no other task later."""
    os.environ[URL_VARIABLE] = spec.url
    os.environ[RUN_VARIABLE] = spec.run
    try:
        return TaskResult(run(_call_main, spec))
    except SystemExit as request:
        # An exit code other than 0 must end the process, so that the launcher restarts the task.
        if request.code:
            raise
        return TaskResult(None)
    except Exception as error:
        return TaskResult(None, _picklable(error), traceback.format_exc())


async def _call_main(spec: TaskSpec) -> Any:
    """Call `main` with an open store, in a named asyncio task."""
    # A session's messages contain this name. Without it, every process would report "Task-1".
    current_task().set_name(spec.name)
    async with spec.open_store() as store:
        return await spec.call(store)


def _picklable(error: Exception) -> Exception:
    """Return the error, or an error with its text if it does not survive pickling."""
    pickler: Any = ForkingPickler  # its `loads` has no types
    try:
        pickler.loads(pickler.dumps(error))
    except Exception:
        return AiohooksError(f"{type(error).__name__}: {safe_str(error)}")
    return error


def unwrap_result(result: TaskResult, spec: TaskSpec) -> Any:
    """Return the value of a result, or raise its error with a note that names the task."""
    if result.error is None:
        return result.value
    add_note(result.error, f"in the {spec.name}, attempt {spec.attempt}:\n{result.trace}")
    raise result.error


# In the launcher.


async def launch(
    run_attempt: Callable[[TaskSpec], Coroutine[Any, Any, T]],
    spec: TaskSpec,
    store: StepStore,
    *,
    forgets: bool,
) -> list[T]:
    """Run the tasks as `supervise` does, until they end or SIGTERM ends them. Then close the store.

    With `forgets`, delete the run from the store before it is closed. This is for a run with a
    random name, which no other launcher can continue.
    """

    async def run_tasks() -> list[T]:
        """Run the tasks, and close the store."""
        async with contextlib.aclosing(store):
            try:
                return await supervise(run_attempt, spec)
            finally:
                if forgets:
                    await _forget_run(store, spec.stop_grace_secs)

    return await until_sigterm(run_tasks(), f"the launcher of the run {spec.run}")


async def _forget_run(store: StepStore, grace_secs: float) -> None:
    """Delete a run from its store. If the store is unavailable, only log a warning."""
    try:
        await shielded(
            store.forget(), grace_secs=grace_secs, what=f"forgetting the run {store.run}"
        )
    except StoreUnavailableError as error:
        # Do not raise this error: it would replace the results or the errors of the tasks.
        logger.warning("the run %s could not be deleted: %s", store.run, error)


async def supervise(
    run_attempt: Callable[[TaskSpec], Coroutine[Any, Any, T]], spec: TaskSpec
) -> list[T]:
    """Run the chief and all workers, restart tasks that die, and return the results in order.

    A worker that ends while the chief is dead is restarted as well, because the next chief restores
    a checkpoint and repeats steps. When a task fails, the other tasks are cancelled.

    Args:
        run_attempt: runs one attempt of a task. It raises `TaskDiedError` if the process of the
            task ends without a result. If it is cancelled, it ends that process.
        spec: the spec of all tasks. Its store shows whether a dead chief has a successor.

    Raises:
        ExceptionGroup: of the errors of the tasks that failed.
    """
    # The term of the chief that has died last, or 0 if none has died or the term is unknown.
    term_of_dead_chief = 0

    async def chief_is_missing() -> bool:
        """Return whether the chief has died and has no successor yet."""
        if not term_of_dead_chief or tasks[0].done():
            return False
        # A successor begins a later term.
        return await _last_term(spec) <= term_of_dead_chief

    async def run_with_restarts(task_id: int) -> T:
        """Run a task until it ends, and restart it after a death.

        A worker is also restarted, as often as needed, if it ends while the chief is dead.
        """
        nonlocal term_of_dead_chief
        attempt = 1
        deaths = 0
        # The result of the latest attempt that returned, or no item before one has returned. It is
        # in a list, because a result may be None.
        results: list[T] = []
        while True:
            try:
                result = await run_attempt(replace(spec, task_id=task_id, attempt=attempt))
                if task_id == 0 or not await chief_is_missing():
                    return result
                results = [result]
                reason = (
                    f"the {task_name(task_id)} has ended while the chief is dead and the run is not"
                    " done"
                )
            except TaskDiedError as error:
                deaths += 1
                if deaths > spec.max_restarts:
                    add_note(error, f"not restarted again after {spec.max_restarts} restarts")
                    raise
                reason = str(error)
                if task_id == 0:
                    term_of_dead_chief = await _last_term(spec)
            except Exception as error:
                # If an earlier attempt of this worker has returned, its result counts: this attempt
                # has only found that the next chief has finished as well.
                if results and is_clean_end(error):
                    return results[0]
                raise
            pause = _BACKOFF.pause_secs(attempt)
            logger.warning("%s; restarting it in %.1f s, attempt %d", reason, pause, attempt + 1)
            await sleep(pause)
            attempt += 1

    tasks = [
        asyncio.create_task(run_with_restarts(number), name=task_name(number))
        for number in range(spec.num_workers + 1)
    ]
    ended_first = await _wait_ended_or_failed(tasks, spec.stop_grace_secs)
    return _results_of(tasks, ended_first)


def _results_of(
    tasks: Sequence[asyncio.Task[T]],
    ended_first: set[asyncio.Task[T]],
) -> list[T]:
    """Return the results of tasks that have ended, or raise their errors as a group.

    `ended_first` are the tasks that have ended before the launcher has cancelled the others.
    """
    errors: list[BaseException] = []
    for task in tasks:
        try:
            error = task.exception()
        except asyncio.CancelledError as cancelled:
            if task not in ended_first:
                continue
            error = TaskDiedError(f"the {task.get_name()} was cancelled, and not by the launcher")
            error.__cause__ = cancelled
        if error is not None:
            errors.append(error)
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(tasks)} tasks failed", errors)
    return [task.result() for task in tasks]


async def _wait_ended_or_failed(
    tasks: Sequence[asyncio.Task[T]], grace_secs: float
) -> set[asyncio.Task[T]]:
    """Wait until all tasks have ended. Return those that have ended by themselves.

    When a task fails or this wait is cancelled, cancel the other tasks and wait for their ends.
    """
    pending = set(tasks)
    try:
        while pending:
            ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() or task.exception() is not None for task in ended):
                break
    finally:
        for task in tasks:
            task.cancel()
        # An attempt may need 2 * grace_secs + 1 to end its process. Give the tasks a little more.
        await shielded(
            wait_done(tasks, None),
            grace_secs=2 * grace_secs + 5.0,
            what="ending the tasks of a run",
        )
    return set(tasks) - pending


async def _last_term(spec: TaskSpec) -> int:
    """Return the term of the run's last chief, or 0 if there was none or the store is down."""
    try:
        async with spec.open_store() as store:
            return store.statistics().term
    except StoreUnavailableError as error:
        logger.warning("cannot read whether the chief has a successor: %s", error)
        return 0


async def until_sigterm(running: Coroutine[Any, Any, T], label: str) -> T:
    """Await `running`, and let SIGTERM cancel it and then end the program.

    If the program handles SIGTERM itself, only await `running`. Messages contain the `label`.
    """
    if not may_handle(signal.SIGTERM):
        return await running
    coord = Coordinator()
    coord.requests.label = label
    stop = StopOnSignal(SignalPolicy(signals=(signal.SIGTERM,)), coord)
    remove_handler = stop.install()
    try:
        return await coord.until(running)
    except StopRequestedError:
        if stop.number is None:  # no signal has requested the stop
            raise
        # Shells report this exit code for a program that a signal has ended.
        raise SystemExit(128 + stop.number) from None
    finally:
        remove_handler()
