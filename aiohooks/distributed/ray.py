"""Chief and workers on a Ray cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from typing import Any, TypeVar

from aiohooks._core.cancel import retrieve_exception, shielded, to_thread, wait_done
from aiohooks._core.validate import check_mapping
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
from aiohooks.errors import (
    InvalidArgumentError,
    StoreUnavailableError,
    TaskDiedError,
    missing_extra,
)

try:
    import ray
    from ray.exceptions import RayError
except ImportError as _missing:
    raise missing_extra("aiohooks.distributed.ray", "ray") from _missing

__all__ = ["run"]

T = TypeVar("T")
_ray: Any = ray  # its own types leave most things open
_JOIN_SECS = 60.0
"""How many seconds an existing cluster has to let this process in."""
_START_CLUSTER = (
    'Start one with `ray start --head --port=6379`, and give its address="host:6379" or set'
    " RAY_ADDRESS"
)
_SET_TOKEN = (
    "Something answers there; if the cluster requires a token, as its log says, set"
    " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Ray is imported, or put the token into"
    " ~/.ray/auth_token"
)


async def run(  # noqa: PLR0913 - options of users, by keyword
    main: Callable[..., Coroutine[Any, Any, T]],
    *,
    num_workers: int = 3,
    args: tuple[Any, ...] = (),
    address: str | None = "local",
    run: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    max_restarts: int = 3,
    stop_grace_secs: float = 10.0,
    task_options: Mapping[str, Any] | None = None,
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
            interface only. A process that is part of a cluster uses its own cluster, and stays
            part of it: call `ray.init` first to give it options, or if several launchers of a
            process run concurrently.
        run: see `run_processes`.
        checkpoint_dir: the value of `Task.checkpoint_dir`. Several machines must share this
            directory.
        max_restarts: see `run_processes`.
        stop_grace_secs: how long a task may take to end after it was interrupted.
        task_options: options of `ray.remote`: `num_cpus`, `num_gpus`, `resources`, `runtime_env`,
            ...
        store_options: further arguments of `open_step_store`; `on_lost` is "keep" by default.

    Returns:
        The results: the chief's, then the workers'.

    Raises:
        ExceptionGroup: of the error of `main`, or a `TaskDiedError`, for each task that failed.
        SystemExit: SIGTERM was received. The exit code is 143, as in shells.
        StoreUnavailableError: there is no such cluster.
    """
    spec = make_spec(main, args, num_workers, run, checkpoint_dir)
    spec = with_process_options(spec, max_restarts, stop_grace_secs, store_options)
    spec = dataclasses.replace(spec, url="ray://aiohooks")
    check_mapping(task_options, "task_options")
    store = spec.open_store()
    resources = {"num_cpus": 1, **(task_options or {})}
    for reserved in ("max_retries", "retry_exceptions", "num_returns"):
        if reserved in resources:
            raise InvalidArgumentError(
                f"task_options has {reserved!r}, which the launcher sets: see max_restarts"
            )
    init_options: dict[str, Any] = {}
    if address == "local":
        # All tasks must run at the same time, also on a machine with fewer CPUs.
        task_cpus = (spec.num_workers + 1) * resources["num_cpus"]
        init_options["num_cpus"] = max(os.cpu_count() or 1, int(task_cpus + 1))
        init_options["include_dashboard"] = False

    async def run_all() -> list[T]:
        """Join the cluster, run the tasks on it, and leave it."""
        async with cluster_membership(address, **init_options):
            run_attempt = functools.partial(_run_on_cluster, resources=resources)
            # A run without a name has got a random name, which nothing will continue.
            return await launch(run_attempt, spec, store, forgets=run is None)

    return await until_sigterm(run_all(), f"the launcher of the run {spec.run}")


async def _run_on_cluster(spec: TaskSpec, resources: Mapping[str, Any]) -> Any:
    """Submit a task to the cluster, and return its result.

    The task has ended when this function returns or raises.

    Raises:
        TaskDiedError: the process of the task or its node has died.
    """
    function = _ray.remote(max_retries=0, retry_exceptions=False, **resources)(_run_in_ray)
    task = function.options(name=f"aiohooks {spec.name}").remote(spec)
    reply = asyncio.wrap_future(task.future())
    reply.add_done_callback(retrieve_exception)
    try:
        await wait_done([reply], None)
    finally:
        # After a cancellation, the task still runs on the cluster.
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
    # A session handles the signal only if the process has no other handler, and Ray has one.
    ray_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return run_task(spec)
    finally:
        signal.signal(signal.SIGTERM, ray_handler)


async def _end_task(task: Any, reply: asyncio.Future[Any], grace_secs: float) -> None:
    """Interrupt a task as Ctrl-C would, and end its process after the grace period."""
    _ray.cancel(task, force=False)
    if not await wait_done([reply], grace_secs):
        _ray.cancel(task, force=True)
        await wait_done([reply], grace_secs)


# Membership of a cluster.


@contextlib.asynccontextmanager
async def cluster_membership(address: str | None, **options: Any) -> AsyncGenerator[None]:
    """Make this process a member of a Ray cluster for the block, unless it is a member already.

    Args:
        address: see `run`.
        options: options of `ray.init`.

    Raises:
        InvalidArgumentError: this process is part of another cluster.
        StoreUnavailableError: no cluster answers, or it rejects this process.
    """
    if _ray.is_initialized():
        own_address = _ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local", own_address):
            raise InvalidArgumentError(
                f"address={address!r}: this process is part of the Ray cluster at {own_address!r}"
            )
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    # Starting a cluster takes as long as it takes.
    join_secs = None if where == "local" else _JOIN_SECS
    joined = concurrent.futures.Future[None]()
    leave = threading.Event()

    def stay_member() -> None:
        try:
            _join(where, options)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)
            leave.wait()
            _ray.shutdown()

    # Ray ends the processes of a local cluster with the thread that has started them. In the main
    # thread, it would also handle SIGTERM, and could not be given up.
    thread = threading.Thread(
        target=stay_member, name="aiohooks: member of a Ray cluster", daemon=True
    )
    thread.start()
    try:
        await to_thread(concurrent.futures.wait, [joined], join_secs)
        if not joined.done():
            raise StoreUnavailableError(
                f"the Ray cluster at {where} does not let this process in. {_START_CLUSTER}"
            )
        joined.result()
        yield
    finally:
        # A thread that joins the cluster too late leaves it immediately.
        leave.set()
        if joined.done():
            await to_thread(thread.join)


def _join(where: str, options: Mapping[str, Any]) -> None:
    """Make this process a member of a cluster. Blocks, possibly for minutes."""
    hint = _START_CLUSTER
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    if host and "://" not in where:
        # Ray itself would try for minutes.
        try:
            socket.create_connection((host, int(port)), _JOIN_SECS).close()
        except (OSError, ValueError) as error:
            raise StoreUnavailableError(
                f"no Ray cluster answers at {where}: {error}. {hint}"
            ) from error
        hint = _SET_TOKEN
    # Ray's processes listen on all interfaces unless the node's address is the loopback one. While
    # this constant is true, as on Linux, Ray replaces that address by another one, even if
    # `ray.init` gets it: no public option prevents that.
    constants = _ray._private.ray_constants
    is_enabled = constants.ENABLE_RAY_CLUSTER
    if where == "local" or host in ("127.0.0.1", "localhost"):
        constants.ENABLE_RAY_CLUSTER = False
    try:
        with _sigterm_left_alone():
            _ray.init(address=where, configure_logging=False, **options)
    except (OSError, RuntimeError, RayError) as error:
        raise StoreUnavailableError(
            f"cannot join the Ray cluster at {where}: {error}. {hint}"
        ) from error
    finally:
        constants.ENABLE_RAY_CLUSTER = is_enabled


@contextlib.contextmanager
def _sigterm_left_alone() -> Generator[None]:
    # Below Python, Ray installs a handler that prints a stack, and aborts the process three seconds
    # later, whatever that still saves. No option prevents this.
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    action = ctypes.create_string_buffer(1024)  # more than a `struct sigaction` takes
    # Ray warns that it has left SIGTERM to this process, as intended here. If Ray renames its
    # logger, the warning is logged.
    logger = logging.getLogger("ray._private.worker")
    logger.addFilter(_is_not_about_sigterm)
    if libc is not None:
        libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        if libc is not None:
            libc.sigaction(signal.SIGTERM, action, None)
        logger.removeFilter(_is_not_about_sigterm)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()
