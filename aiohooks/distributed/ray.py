"""Chief and workers on a Ray cluster."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohooks._aio.backoff import Backoff
from aiohooks._aio.cancel import shielded, to_thread
from aiohooks._validate import check_mapping, check_secs
from aiohooks.distributed._supervise import supervise
from aiohooks.distributed.task import (
    Order,
    Outcome,
    absolute,
    check_task_options,
    forget,
    fulfil,
    options_of_stores,
    result_of,
    task_name,
)
from aiohooks.errors import InvalidArgumentError, TaskDiedError
from aiohooks.stores import open_step_store
from aiohooks.stores.ray import _cluster

T = TypeVar("T")


async def run(
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    address: str | None = "local",
    namespace: str = "aiohooks",
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    backoff: Backoff = Backoff(initial_secs=0.5, max_secs=30.0),  # noqa: B008 - it is frozen
    stop_grace_secs: float = 10.0,
    task_options: Mapping[str, Any] | None = None,
    init_options: Mapping[str, Any] | None = None,
    store_options: Mapping[str, Any] | None = None,
) -> list[T]:
    """Runs `main(task, *args)` for the chief and each worker, as tasks on a Ray _cluster, with a `RayStepStore`.

    A task whose process or node dies is started again, where there is room, with the next `attempt`; what `main` raises is
    final, and ends the others. Ray ends them also when this process ends.

    Args:
        main: a coroutine function that takes the `Task`.
        num_workers: how many workers there are besides the chief.
        args: what `main` takes besides.
        address: `host:port` of a cluster; None takes RAY_ADDRESS or the cluster on this machine; "local" starts one for the time
            of the run, which listens on the loopback interface only. A process that is part of a cluster uses that one.
        namespace: of the run's actor.
        run: the name of the run; left out, a new one, which is forgotten afterwards.
        checkpoint_dir: for `Task.checkpoint_dir`; on several machines a directory that all of them see.
        max_restarts: how often each task is started again.
        backoff: the pauses before that.
        stop_grace_secs: how long a task may take to end when it is asked to.
        task_options: for `ray.remote`: `num_cpus`, `num_gpus`, `resources`, `runtime_env`, ...
        init_options: for `ray.init`.
        store_options: see `RayStepStore`; `on_lost` is "keep" if it is left out.

    Returns:
        What they returned: the chief, then the workers.

    Raises:
        ExceptionGroup: of those that failed: with what `main` raised, or `TaskDiedError`.
        StoreUnavailableError: there is no such cluster.
    """
    check_task_options(main, args, num_workers, max_restarts, backoff)
    check_secs(stop_grace_secs, "stop_grace_secs")
    check_mapping(task_options, "task_options")
    check_mapping(init_options, "init_options")
    options, directory = options_of_stores(store_options), absolute(checkpoint_dir)
    url, name = f"ray://{namespace}", f"run-{secrets.token_hex(4)}" if run is None else run
    store = open_step_store(url, run=name, **options)
    resources = {"num_cpus": 1, **(task_options or {})}
    for reserved in ("max_retries", "retry_exceptions", "num_returns"):
        if reserved in resources:
            raise InvalidArgumentError(f"task_options has {reserved!r}, which is the launcher's: see max_restarts")
    room = {}
    if address == "local":
        cpus = (num_workers + 1) * resources["num_cpus"]
        room = {"num_cpus": max(os.cpu_count() or 1, int(cpus + 1)), "include_dashboard": False}
    init = {**room, **(init_options or {})}
    await to_thread(lambda: _cluster.join(address, timeout=30.0, **init), grace_secs=60.0)
    try:
        async with store:

            async def attempt(task_id: int, tries: int) -> T:
                order = Order(main, args, url, name, task_id, num_workers, directory, tries, options)
                result: T = await _do_on_cluster(order, resources, stop_grace_secs)
                return result

            grace = 2 * stop_grace_secs + 5.0
            try:
                return await supervise(
                    attempt, num_tasks=num_workers + 1, max_restarts=max_restarts, backoff=backoff, grace_secs=grace
                )
            finally:
                if run is None:
                    await forget(store, stop_grace_secs)
    finally:
        await to_thread(_cluster.leave, grace_secs=stop_grace_secs)


async def _do_on_cluster(order: Order, resources: Mapping[str, Any], grace_secs: float) -> Any:
    task = _cluster.submit(_fulfil, order, f"aiohooks {task_name(order.task_id)}", resources)
    reply = _cluster.reply_to(task)
    try:
        outcome: Outcome = await reply
    except Exception as error:
        if not _cluster.is_of_ray(error):
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        raise TaskDiedError(
            f"the {task_name(order.task_id)} (attempt {order.attempt}) died: {type(error).__name__}: {said}",
            task_id=order.task_id,
        ) from error
    finally:
        if not reply.done() or reply.cancelled():
            await shielded(_end(task, grace_secs), grace_secs=2 * grace_secs + 1, what=f"ending the {task_name(order.task_id)}")
    return result_of(outcome, order.task_id, order.attempt)


def _fulfil(order: Order) -> Outcome:
    """Does a task in a process of Ray's, whose SIGTERM is the task's own meanwhile: a session with `handle_signals` takes it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return fulfil(order)
    finally:
        signal.signal(signal.SIGTERM, before)


async def _end(task: Any, grace_secs: float) -> None:
    """Interrupts a task as Ctrl-C would, and ends its process if that is not enough."""
    ended = _cluster.reply_to(task)
    _cluster.cancel_task(task, force=False)
    if not await _cluster.settled(ended, grace_secs):
        _cluster.cancel_task(task, force=True)
        await _cluster.settled(ended, grace_secs)
