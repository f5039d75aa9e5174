"""Chief and workers on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohooks._core.validate import check_mapping
from aiohooks._core.waits import retrieve_exception, shielded, wait_done
from aiohooks.distributed.task import (
    TaskResult,
    TaskSpec,
    launch,
    make_spec,
    run_task,
    unwrap_result,
    with_process_options,
)
from aiohooks.errors import TaskDiedError, missing_extra

try:
    import ray
    from ray.exceptions import RayError
except ImportError as _missing:
    raise missing_extra("aiohooks.distributed.ray", "ray") from _missing

from aiohooks.stores.ray import check_membership

__all__ = ["run"]

T = TypeVar("T")
_ray: Any = ray  # Ray's own types are incomplete


async def run(  # noqa: PLR0913 - options of users, by keyword
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    stop_grace_secs: float = 10.0,
    task_options: Mapping[str, Any] | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run `main(task, *args)` for the chief and each worker, as tasks on a Ray cluster.

    Call `ray.init` before. The cluster must have room for all tasks at the same time: each needs
    one CPU unless `task_options` says otherwise.

    All tasks share a step store on the cluster. A task whose process or node dies is restarted with
    the next `attempt`, on a node that has room for it. An exception of `main` is final, and ends
    the other tasks. Ray also ends the tasks when this process ends.

    Unless the program handles SIGTERM, the signal ends the tasks as an interrupt would, and then
    the program by `SystemExit`.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: the number of workers, without the chief.
        args: further arguments of `main`.
        run: the name of the run, which is kept and continued by the next launcher of this name. The
            default is a new name, and the run is deleted afterwards.
        checkpoint_dir: the value of `Task.checkpoint_dir`. Several machines must share this
            directory.
        max_restarts: how often each task may be restarted.
        stop_grace_secs: how long a task may take to end after it was interrupted.
        task_options: options of `ray.remote`: `num_cpus`, `num_gpus`, `resources`, `runtime_env`,
            ...
        store_options: further arguments of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of the error of `main`, or a `TaskDiedError`, for each task that failed.
        SystemExit: SIGTERM was received. The exit code is 143, as in shells.
        StoreRefusedError: this process is not part of a cluster.
    """
    spec = make_spec(main, args, num_workers, run, checkpoint_dir)
    spec = with_process_options(spec, max_restarts, stop_grace_secs, store_options)
    spec = dataclasses.replace(spec, url="ray://aiohooks")
    check_mapping(task_options, "task_options")
    check_membership()  # without a cluster, the first call of a task would start one
    store = spec.open_store()
    # The launcher restarts tasks, so Ray must not repeat them. With `max_calls=1`, each attempt has
    # a new process.
    remote_task = _ray.remote(
        num_returns=1, max_retries=0, retry_exceptions=False, max_calls=1, **(task_options or {})
    )(_run_in_ray)

    async def run_attempt(spec: TaskSpec) -> Any:
        """Run a task on the cluster, and return its result."""
        name = f"aiohooks {spec.name}"
        return await _result_of(remote_task.options(name=name).remote(spec), spec)

    _remove_sigterm_handler_of_ray()
    # A run with a random name is forgotten, because no other launcher can continue it.
    has_random_name = run is None
    return await launch(run_attempt, spec, store, forgets=has_random_name)


def _remove_sigterm_handler_of_ray() -> None:
    """Reset SIGTERM to its default if Ray handles it, so that `launch` can handle it.

    Ray's handler would end this process before the tasks have ended. Only the main thread can set
    a handler.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and getattr(handler, "__module__", "").startswith("ray."):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _result_of(task: Any, spec: TaskSpec) -> Any:
    """Wait for a task on the cluster, and return its result.

    The task has ended when this function returns or raises.

    Raises:
        TaskDiedError: the process of the task or its node has died.
    """
    reply = asyncio.wrap_future(task.future())
    reply.add_done_callback(retrieve_exception)
    try:
        await wait_done([reply], None)
    finally:
        # Without a reply, this wait was cancelled, and the task still runs on the cluster.
        if not reply.done():
            await shielded(
                _end_task(task, reply, spec.stop_grace_secs),
                grace_secs=2 * spec.stop_grace_secs + 1,
                what=f"ending the {spec.name}",
            )
    try:
        result: TaskResult = reply.result()
    except RayError as error:
        message = str(error).partition("\n")[0]
        raise TaskDiedError(
            f"the {spec.name} (attempt {spec.attempt}) died: {type(error).__name__}: {message}",
            task_id=spec.task_id,
        ) from error
    return unwrap_result(result, spec)


def _run_in_ray(spec: TaskSpec) -> TaskResult:
    """Run a task in a process of Ray's, where a session with `handle_signals` gets SIGTERM."""
    # A session handles the signal only if the process has no other handler. Remove that of Ray.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return run_task(spec)


async def _end_task(task: Any, reply: asyncio.Future[Any], grace_secs: float) -> None:
    """Interrupt a task as Ctrl-C would. End its process if it runs after the grace period."""
    _ray.cancel(task, force=False)
    if not await wait_done([reply], grace_secs):
        _ray.cancel(task, force=True)
        await wait_done([reply], grace_secs)
