"""Chief and workers on a Ray cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohooks._aio.cancel import shielded, to_thread, wait_done
from aiohooks._aio.waits import Backoff
from aiohooks._validate import check_mapping
from aiohooks.distributed.task import (
    TaskResult,
    TaskSpec,
    launch,
    make_spec,
    run_task,
    until_sigterm,
    unwrap_result,
    with_process_options,
)
from aiohooks.errors import InvalidArgumentError, TaskDiedError
from aiohooks.stores.ray import _cluster

__all__ = ["run"]

T = TypeVar("T")


async def run(  # noqa: PLR0913 - options of users, by keyword
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    address: str | None = "local",
    namespace: str = "aiohooks",
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    backoff: Backoff = Backoff(initial_secs=0.5, max_secs=30.0),
    stop_grace_secs: float = 10.0,
    task_options: Mapping[str, Any] | None = None,
    init_options: Mapping[str, Any] | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Run `main(task, *args)` for the chief and each worker, as tasks on a Ray cluster.

    All tasks share a step store on the cluster. A task whose process or node dies is restarted with
    the next `attempt`, on a node that has room for it. An exception of `main` is final, and ends
    the other tasks. Ray also ends the tasks when this process ends.

    Unless the program handles SIGTERM, the signal ends the tasks as an interrupt would, and then
    the program by `SystemExit`.

    Args:
        main: see `aiohooks.distributed.local.run_processes`.
        num_workers: see `run_processes`.
        args: see `run_processes`.
        address: `host:port` of a cluster. None uses RAY_ADDRESS or the cluster on this machine.
            "local" starts a cluster for the duration of the run, which listens on the loopback
            interface only. A process that is part of a cluster uses its own cluster.
        namespace: the Ray namespace of the run's actor.
        run: see `run_processes`.
        checkpoint_dir: the value of `Task.checkpoint_dir`. Several machines must share this
            directory.
        max_restarts: see `run_processes`.
        backoff: see `run_processes`.
        stop_grace_secs: how long a task may take to end after it was interrupted.
        task_options: options of `ray.remote`: `num_cpus`, `num_gpus`, `resources`, `runtime_env`,
            ...
        init_options: options of `ray.init`.
        store_options: options of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of the error of `main`, or a `TaskDiedError`, for each task that failed.
        SystemExit: SIGTERM was received; the exit code is 143, as in shells.
        StoreUnavailableError: there is no such cluster.
    """
    spec = make_spec(main, args, num_workers, run, checkpoint_dir)
    spec = with_process_options(spec, max_restarts, backoff, stop_grace_secs, store_options)
    spec = dataclasses.replace(spec, url=f"ray://{namespace}")
    check_mapping(task_options, "task_options")
    check_mapping(init_options, "init_options")
    store = spec.open_store()
    resources = {"num_cpus": 1, **(task_options or {})}
    for reserved in ("max_retries", "retry_exceptions", "num_returns"):
        if reserved in resources:
            raise InvalidArgumentError(
                f"task_options has {reserved!r}, which the launcher sets: see max_restarts"
            )
    init_arguments = dict(init_options or {})
    if address == "local":
        # All tasks must run at the same time, also on a machine with fewer CPUs.
        task_cpus = (spec.num_workers + 1) * resources["num_cpus"]
        init_arguments.setdefault("num_cpus", max(os.cpu_count() or 1, int(task_cpus + 1)))
        init_arguments.setdefault("include_dashboard", False)

    async def run_all() -> list[T]:
        """Join the cluster, run the tasks on it, and leave it."""
        await to_thread(
            lambda: _cluster.join(address, timeout=60.0, **init_arguments), grace_secs=60.0
        )
        try:
            run_attempt = functools.partial(_run_on_cluster, resources=resources)
            # A run without a name has got a random name, which nothing will continue.
            return await launch(run_attempt, spec, store, forgets=run is None)
        finally:
            await to_thread(_cluster.leave, grace_secs=stop_grace_secs)

    return await until_sigterm(run_all(), f"the launcher of the run {spec.run}")


async def _run_on_cluster(spec: TaskSpec, resources: Mapping[str, Any]) -> Any:
    """Submit a task to the cluster, and return its result.

    The task has ended when this function returns or raises.

    Raises:
        TaskDiedError: the process of the task or its node has died.
    """
    task = _cluster.submit(_run_in_ray, spec, f"aiohooks {spec.name}", resources)
    reply = _cluster.result_of(task)
    try:
        result: TaskResult = await reply
    except Exception as error:
        if not _cluster.is_ray_error(error):
            raise
        lines = str(error).strip().splitlines()
        message = lines[0] if lines else ""
        raise TaskDiedError(
            f"the {spec.name} (attempt {spec.attempt}) died: {type(error).__name__}: {message}",
            task_id=spec.task_id,
        ) from error
    finally:
        # Without a reply, such as after a cancellation, the task may still run on the cluster.
        if not reply.done() or reply.cancelled():
            await shielded(
                _end_task(task, spec.stop_grace_secs),
                grace_secs=2 * spec.stop_grace_secs + 1,
                what=f"ending the {spec.name}",
            )
    return unwrap_result(result, spec)


def _run_in_ray(spec: TaskSpec) -> TaskResult:
    """Run a task in a process of Ray's, where a session with `handle_signals` gets SIGTERM."""
    # A session handles the signal only if the process has no other handler, and Ray has one.
    ray_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return run_task(spec)
    finally:
        signal.signal(signal.SIGTERM, ray_handler)


async def _end_task(task: Any, grace_secs: float) -> None:
    """Interrupt a task as Ctrl-C would, and end its process after the grace period."""
    ended = _cluster.result_of(task)
    _cluster.cancel_task(task, force=False)
    if not await wait_done([ended], grace_secs):
        _cluster.cancel_task(task, force=True)
        await wait_done([ended], grace_secs)
