"""What the chief or a worker is given, and what it gives back."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, cast

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import current_task, shielded
from aiohooks._validate import check_callable, check_instance, check_mapping
from aiohooks.errors import AiohooksError, InvalidArgumentError, StoreUnavailableError
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.session.runner import run
from aiohooks.stores import StepStore, open_step_store
from aiohooks.stores.open import RUN_VARIABLE, URL_VARIABLE

_logger = logging.getLogger("aiohooks")
Main = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """One of the tasks of a run: the chief, or a worker.

    Attributes:
        task_id: 0 for the chief, 1 to `num_workers` for the workers.
        num_workers: how many workers there are besides the chief.
        store: the step store of the run, open; closed by the launcher.
        checkpoint_dir: where the run's checkpoints are; None if the launcher was given no place.
        attempt: 1, and one more after each death of the process that did this task.
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
    """What messages call it."""
    return f"worker {task_id}" if task_id else "chief"


@dataclass(frozen=True, slots=True)
class Order:
    """What a process needs to do a task: all of it can travel."""

    main: Main
    args: tuple[Any, ...]
    url: str
    run: str
    task_id: int
    num_workers: int
    checkpoint_dir: Path | None
    attempt: int
    store_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Outcome(NamedTuple):
    """How a task ended, if its process lived to tell."""

    value: Any
    error: BaseException | None = None
    trace: str = ""


def fulfil(order: Order) -> Outcome:
    """Does a task in a new event loop of this process."""
    before = {name: os.environ.get(name) for name in (URL_VARIABLE, RUN_VARIABLE)}
    os.environ[URL_VARIABLE], os.environ[RUN_VARIABLE] = order.url, order.run
    try:
        return Outcome(run(_fulfil, order))
    except SystemExit as end:
        if end.code:
            raise
        return Outcome(None)
    except Exception as error:
        return Outcome(None, _portable(error), traceback.format_exc())
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _fulfil(order: Order) -> Any:
    # In what is told of its sessions: each process has a Task-1.
    current_task().set_name(task_name(order.task_id))
    async with open_step_store(order.url, run=order.run, **order.store_options) as store:
        task = Task(order.task_id, order.num_workers, store, order.checkpoint_dir, order.attempt)
        return await order.main(task, *order.args)


def _portable(error: Exception) -> Exception:
    """The error, or what can be said of it where it would not survive the journey."""
    try:
        pickler: Any = ForkingPickler  # its `loads` has no types
        pickler.loads(pickler.dumps(error))
    except Exception:
        return AiohooksError(f"{type(error).__name__}: {error}")
    return error


def result_of(outcome: Outcome, task_id: int, attempt: int) -> Any:
    """The value; an error is raised with a note of where it came from."""
    if outcome.error is None:
        return outcome.value
    trace = f":\n{outcome.trace}" if outcome.trace else ""
    outcome.error.add_note(f"in the {task_name(task_id)}, attempt {attempt}{trace}")
    raise outcome.error


def absolute(directory: object) -> Path | None:
    """The same place for processes with another working directory."""
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise InvalidArgumentError(f"checkpoint_dir is {directory!r}; give the path of a directory, or leave it out")
    return None if directory is None else Path(os.path.abspath(cast("str | os.PathLike[str]", directory)))


def check_task_options(
    main: object, args: object, num_workers: object, max_restarts: object = 0, backoff: object = Backoff()
) -> None:
    """Refuses what cannot be meant."""
    check_callable(main, "main")
    if not is_coroutine_function(main):
        raise InvalidArgumentError(f"main is {main!r}; give a coroutine function (`async def`) that takes the Task")
    for value, what in ((num_workers, "num_workers"), (max_restarts, "max_restarts")):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgumentError(f"{what} is {value!r}; give a whole number, 0 for none")
    check_instance(args, tuple, "args")
    check_instance(backoff, Backoff, "backoff")


def options_of_stores(store_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of the stores in all processes of a run. Who was lost is started again: the others go on waiting for it."""
    check_mapping(store_options, "store_options")
    for reserved in ("url", "run"):
        if reserved in (store_options or {}):
            raise InvalidArgumentError(f"store_options has {reserved!r}, which is an argument of its own here")
    return {"on_lost": "keep", **(store_options or {})}


async def forget(store: StepStore, grace_secs: float) -> None:
    """Deletes a run that had no name of its own, so that nobody will ask for it again; otherwise the log says why not."""
    try:
        await shielded(store.forget(), grace_secs=grace_secs, what=f"forgetting the run {store.run}")
    except StoreUnavailableError as error:
        _logger.warning("the run %s could not be deleted: %s", store.run, error)
