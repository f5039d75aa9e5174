"""Chief and workers on one machine: as tasks of one event loop, or as processes."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohooks._checks import check_secs
from aiohooks._errors import InvalidArgumentError
from aiohooks._recovery import Backoff
from aiohooks._shield import in_thread
from aiohooks.distributed._process import do_in_process
from aiohooks.distributed._supervise import supervise
from aiohooks.distributed._task import Order, Task, absolute, check_task_options, forget, options_of_stores
from aiohooks.stores import MemoryStepStore, open_step_store

T = TypeVar("T")


async def run_tasks(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    run: str = "default",
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> list[T]:
    """Runs `main(task, *args)` for the chief and each worker, as tasks of this event loop that share a `MemoryStepStore`.

    When one fails the others are cancelled. There are no restarts: what one could survive here is its session's to recover.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: how many workers there are besides the chief.
        args: what `main` takes besides.
        run: the name of the run.
        checkpoint_dir: for `Task.checkpoint_dir`.

    Returns:
        What they returned: the chief, then the workers.

    Raises:
        ExceptionGroup: of those that failed.
    """
    check_task_options(main, args, num_workers)
    directory = absolute(checkpoint_dir)
    async with MemoryStepStore(run=run) as store:

        def attempt(task_id: int, tries: int) -> Coroutine[Any, Any, T]:
            return main(Task(task_id, num_workers, store, directory, tries), *args)

        return await supervise(attempt, num_tasks=num_workers + 1, max_restarts=0, backoff=Backoff(), grace_secs=10.0)


async def run_processes(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    store: str | None = None,
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    backoff: Backoff = Backoff(initial_secs=0.5, max_secs=30.0),  # noqa: B008 - it is frozen
    stop_grace_secs: float = 10.0,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Runs `main(task, *args)` for the chief and each worker, each in a process of its own on this machine.

    A process that dies (a signal, an exit code other than 0) is started again, after growing pauses, with the next `attempt`;
    what `main` raises is final, and ends the others. These get SIGTERM, which a session with `handle_signals=True` takes as a
    stop, and SIGKILL `stop_grace_secs` later. They end also when this process does, however it ends.

    `main`, `args` and the results are pickled: `main` is a function of a module, or of a script whose own doings are under
    `if __name__ == "__main__":`. The processes find the run's address also in AIOHOOKS_STEP_STORE and AIOHOOKS_RUN.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: how many workers there are besides the chief.
        args: what `main` takes besides.
        store: the URL of the step store; left out, a local one in a new directory, which is removed afterwards.
        run: the name of the run; left out, a new one, which is forgotten afterwards.
        checkpoint_dir: for `Task.checkpoint_dir`.
        max_restarts: how often each task is started again.
        backoff: the pauses before that.
        stop_grace_secs: how long a process may take to end when it is asked to.
        store_options: what `open_step_store` takes besides; `on_lost` is "keep" if it is left out.

    Returns:
        What they returned: the chief, then the workers.

    Raises:
        ExceptionGroup: of those that failed: with what `main` raised, or `TaskDiedError`.
        InvalidArgumentError: an argument cannot be meant; nothing was started.
    """
    check_task_options(main, args, num_workers, max_restarts, backoff)
    check_secs(stop_grace_secs, "stop_grace_secs")
    options, directory = options_of_stores(store_options), absolute(checkpoint_dir)
    name = f"run-{secrets.token_hex(4)}" if run is None else run
    if str(store).startswith("memory:"):
        raise InvalidArgumentError(f"store={store!r} is for one process; leave it out, or give local:///directory")
    # Made here as well, so that what is wrong with it is said once, and now.
    kept = open_step_store("local://" if store is None else store, run=name, **options)
    own = None
    if store is None:
        own = await in_thread(lambda: tempfile.mkdtemp(prefix="aiohooks-"), grace_secs=stop_grace_secs)
    url = store or f"local://{own}"

    async def attempt(task_id: int, tries: int) -> T:
        order = Order(main, args, url, name, task_id, num_workers, directory, tries, options)
        result: T = await do_in_process(order, stop_grace_secs)
        return result

    try:
        grace = 2 * stop_grace_secs + 5.0
        return await supervise(attempt, num_tasks=num_workers + 1, max_restarts=max_restarts, backoff=backoff, grace_secs=grace)
    finally:
        if own is not None:
            await in_thread(lambda: shutil.rmtree(own, ignore_errors=True), grace_secs=stop_grace_secs)
        elif run is None:
            await forget(kept, stop_grace_secs)
