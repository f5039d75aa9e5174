"""The one module that knows Ray: joining and leaving a cluster, actors and tasks on it, and what
its errors mean.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar

from aiohooks.errors import (
    InvalidArgumentError,
    StoreRefusedError,
    StoreUnavailableError,
    missing_extra,
)

try:
    import ray
    from ray.exceptions import AuthenticationError, RayError, RaySystemError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _missing:
    raise missing_extra("ray:// or RayLauncher", "ray") from _missing

_ray: Any = ray  # its own types leave most things open
_lock = threading.Lock()
_LAST_ANSWERS_SECS = 1.0


class _Membership:
    """This process's membership of a cluster, if `join` made it: ended by the last user.

    One thread joins and leaves, and lives as long: the processes of a local cluster end with the
    thread that started them, and in the main thread Ray would take over SIGTERM.
    """

    users = 0
    thread: threading.Thread | None = None
    end: threading.Event
    calls: ClassVar[set[concurrent.futures.Future[Any]]] = set()
    """The remote calls whose answers are not there yet."""


def join(address: str | None, *, timeout: float, **options: Any) -> None:
    """Make this process a member of a cluster unless it is one already. Blocks for seconds. Each
    `join` needs a `leave`.

    Args:
        address: `host:port` of the cluster; "local" starts one for this process, which other
            machines cannot reach; None is RAY_ADDRESS, or the cluster that runs on this machine.
        timeout: how many seconds to wait for the cluster; starting one takes what it takes.
        options: for `ray.init`.

    Raises:
        StoreUnavailableError: there is no answer, or the cluster refuses this process.
        InvalidArgumentError: this process is a member of another cluster.
    """
    with _lock:
        if _Membership.users == 0 and (late := _Membership.thread) is not None:
            late.join(
                timeout
            )  # an attempt that took too long: it leaves the cluster as soon as it has joined it
            if late.is_alive():
                raise _late_error(address, timeout)
        if not _ray.is_initialized():
            _init_ray(address, timeout, options)
        elif address not in (None, "auto", "local") and address != (
            current := _ray.get_runtime_context().gcs_address
        ):
            raise InvalidArgumentError(
                f"address={address!r}: this process is part of the Ray cluster at {current!r}"
                " already"
            )
        _Membership.users += 1


def leave() -> None:
    """Undo a `join`; blocks."""
    with _lock:
        _Membership.users -= 1
        if _Membership.users == 0 and _Membership.thread is not None:
            _Membership.end.set()
            _Membership.thread.join()
            _Membership.thread = None


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _init_ray(address: str | None, timeout: float, options: dict[str, Any]) -> None:
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if ":" in where and "://" not in where:
        # Ray itself would try for minutes.
        try:
            socket.create_connection((_host(where), int(where.rpartition(":")[2])), timeout).close()
        except (OSError, ValueError) as error:
            raise StoreUnavailableError(
                f"no Ray cluster answers at {where}: {error}. {_START_CLUSTER}"
            ) from error
    joined: concurrent.futures.Future[None] = concurrent.futures.Future()
    _Membership.end = threading.Event()

    def stay_member() -> None:
        try:
            with (
                _on_loopback(where == "local" or _host(where) in ("127.0.0.1", "localhost")),
                _sigterm_left_alone(),
            ):
                _ray.init(address=where, configure_logging=False, **options)
        except BaseException as error:
            joined.set_exception(error)
            return
        joined.set_result(None)
        _Membership.end.wait()
        # Ray ends the process if an answer arrives in a thread of its own meanwhile, such as that
        # of an actor that just ended.
        concurrent.futures.wait(tuple(_Membership.calls), timeout=_LAST_ANSWERS_SECS)
        _ray.shutdown()

    _Membership.thread = threading.Thread(
        target=stay_member, name="aiohooks: member of a Ray cluster", daemon=True
    )
    _Membership.thread.start()
    try:
        # Ray itself would try for minutes: to reach a cluster that has ended without `ray stop`, or
        # one that is stopped.
        joined.result(None if where == "local" else timeout)
    except Exception as error:
        if not joined.done():
            _Membership.end.set()
            raise _late_error(where, timeout) from None
        _Membership.thread.join()
        _Membership.thread = None
        raise explain_error(
            error, f"cannot join the Ray cluster at {where}", answers=":" in where
        ) from error


def _late_error(where: str | None, timeout: float) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the Ray cluster at {where or 'auto'} has not let this process in for {timeout:g} s."
        f" {_START_CLUSTER}"
    )


@contextlib.contextmanager
def _on_loopback(wanted: bool) -> Generator[None]:
    # Ray's processes listen on all interfaces unless the node's address is the loopback one. While
    # this constant is true, as on Linux, Ray replaces that address by another one, even if
    # `ray.init` gets it: no public option prevents that.
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if not wanted or not getattr(constants, "ENABLE_RAY_CLUSTER", False):
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = True


@contextlib.contextmanager
def _sigterm_left_alone() -> Generator[None]:
    # Ray warns that it has left SIGTERM to this process, as intended here. It has not: below Python
    # its handler comes first, prints a stack, and has the process aborted three seconds later,
    # whatever that still saves. No option turns the warning off. If Ray renames its logger, the
    # warning is logged.
    logger = logging.getLogger("ray._private.worker")

    def drop(record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in record.getMessage()

    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    action = ctypes.create_string_buffer(1024)  # more than a `struct sigaction` takes
    logger.addFilter(drop)
    if libc is not None:
        libc.sigaction(signal.SIGTERM, None, action)
    try:
        yield
    finally:
        if libc is not None:
            libc.sigaction(signal.SIGTERM, action, None)
        logger.removeFilter(drop)


_START_CLUSTER = (
    'Start one with `ray start --head --port=6379`, and give its address="host:6379" or set'
    " RAY_ADDRESS"
)


def explain_error(
    error: BaseException, what: str, *, answers: bool = False
) -> StoreUnavailableError:
    """Return the store's error for one of Ray's, beginning with `what`; `answers` if something
    listens at the address.
    """
    kind, hint = StoreUnavailableError, ""
    if isinstance(error, AuthenticationError) or (answers and isinstance(error, ConnectionError)):
        kind = StoreRefusedError
        hint = (
            ". Something answers there; if the cluster requires a token, as its log says, set"
            " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Ray is imported, or put the token into"
            " ~/.ray/auth_token"
        )
    elif isinstance(error, ConnectionError):
        hint = f". {_START_CLUSTER}"
    elif isinstance(error, (RayTaskError, RaySystemError)):
        kind = StoreRefusedError
        hint = ". All nodes must have the same version of aiohooks and of Python"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return kind(f"{what}: {lines[-1 if isinstance(error, RayTaskError) else 0]}{hint}")


def is_ray_error(error: BaseException) -> bool:
    """Return whether the error is one of Ray's."""
    return isinstance(error, RayError)


def named_actor(kind: type, name: str, namespace: str) -> Any:
    """Return the actor of this name; if there is none, create one from `kind` on this node. Blocks.

    The actor outlives this process. When its own process dies, Ray starts it again, on another node
    if need be; the calls that it had not answered fail, and only their callers know how to repeat
    them.
    """
    this_node = NodeAffinitySchedulingStrategy(_ray.get_runtime_context().get_node_id(), soft=True)
    actor = _ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=100_000)(
        kind
    )
    options = {"lifetime": "detached", "get_if_exists": True, "scheduling_strategy": this_node}
    return actor.options(name=name, namespace=namespace, **options).remote()


def existing_actor(name: str, namespace: str) -> Any:
    """Return the actor of this name, or None if there is none. Blocks."""
    try:
        return _ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def kill_actor(actor: Any) -> None:
    """End an actor, which is not started again; blocks."""
    _ray.kill(actor, no_restart=True)


def result_of(call: Any) -> asyncio.Future[Any]:
    """Return the result of a remote call as a future of this loop, which the caller may also settle
    itself.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if not result.done():
            error = done.exception()
            if error is None:
                result.set_result(done.result())
            else:
                result.set_exception(error)
                result.exception()  # its waiter may be gone: do not log it as never retrieved

    def on_done(done: concurrent.futures.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, done)

    pending: concurrent.futures.Future[Any] = call.future()
    _Membership.calls.add(pending)
    pending.add_done_callback(_Membership.calls.discard)
    pending.add_done_callback(on_done)
    return result


def submit(fn: Callable[..., Any], argument: Any, name: str, resources: Mapping[str, Any]) -> Any:
    """Run `fn(argument)` once in a process of the cluster; pass what this returns to
    `result_of`.
    """
    return (
        _ray.remote(max_retries=0, retry_exceptions=False, **resources)(fn)
        .options(name=name)
        .remote(argument)
    )


def cancel_task(task: Any, *, force: bool) -> None:
    """Interrupt a task; with `force`, end its process."""
    _ray.cancel(task, force=force)
