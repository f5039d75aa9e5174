"""The one module that knows Ray: joining and leaving a cluster, actors and tasks on it, and what its errors mean."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from aiohooks._aio.clock import current_clock
from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError

try:
    import ray
    from ray.exceptions import AuthenticationError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise ImportError(
        "the Ray step store and launcher need a package that is not installed; pip install 'aiohooks[ray]'"
    ) from missing

_ray: Any = ray  # its own types leave most things open
_lock = threading.Lock()


class _Member:
    """This process's part in a cluster, if it is ours: joined by the first user, left with the last one.

    Everything is done in one thread that lives as long: the processes of a local cluster end with the thread that started
    them, and in the main thread Ray would take SIGTERM for itself.
    """

    users = 0
    thread: threading.Thread | None = None
    leave: threading.Event


def join(address: str | None, *, timeout: float, **options: Any) -> None:
    """Makes this process a part of a cluster, unless it is one already; blocks, for seconds. Each `join` needs a `leave`.

    Args:
        address: `host:port` of the cluster; "local" starts one of this process's own, which nobody can reach from other machines;
            None takes RAY_ADDRESS, or the cluster that runs on this machine.
        timeout: how many seconds to wait for somebody to answer there.
        options: for `ray.init`.

    Raises:
        StoreUnavailableError: nobody answers there, or says no.
        InvalidArgumentError: this process is part of another cluster.
    """
    with _lock:
        if not _ray.is_initialized():
            _begin(address, timeout, options)
        elif address not in (None, "auto", "local") and address != (there := _ray.get_runtime_context().gcs_address):
            raise InvalidArgumentError(f"address={address!r}: this process is part of the Ray cluster at {there!r} already")
        _Member.users += 1


def leave() -> None:
    """Takes a `join` back; blocks."""
    with _lock:
        _Member.users -= 1
        if _Member.users == 0 and _Member.thread is not None:
            _Member.leave.set()
            _Member.thread.join()
            _Member.thread = None


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _begin(address: str | None, timeout: float, options: dict[str, Any]) -> None:
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if ":" in where and "://" not in where:
        # Ray itself would try for minutes.
        try:
            socket.create_connection((_host(where), int(where.rpartition(":")[2])), timeout).close()
        except (OSError, ValueError) as error:
            raise StoreUnavailableError(f"no Ray cluster answers at {where}: {error}. {_HOW}") from error
    joined: concurrent.futures.Future[None] = concurrent.futures.Future()
    _Member.leave = threading.Event()

    def belong() -> None:
        try:
            with _on_loopback(where == "local" or _host(where) in ("127.0.0.1", "localhost")), _silent_about_sigterm():
                _ray.init(address=where, configure_logging=False, **options)
        except BaseException as error:
            joined.set_exception(error)
            return
        joined.set_result(None)
        _Member.leave.wait()
        _ray.shutdown()

    _Member.thread = threading.Thread(target=belong, name="aiohooks: part of a Ray cluster", daemon=True)
    _Member.thread.start()
    try:
        joined.result()
    except Exception as error:
        _Member.thread.join()
        _Member.thread = None
        raise unavailable(error, f"cannot join the Ray cluster at {where}", answers=":" in where) from error


@contextlib.contextmanager
def _on_loopback(wanted: bool) -> Generator[None]:
    # Its processes listen on all interfaces unless the node's address is the loopback one; and Ray replaces that by another
    # one, also in an address that it is given, wherever it takes several nodes for possible. On Windows and macOS it does not.
    constants = importlib.import_module("ray._private.ray_constants")
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    if not wanted or before is None:
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before  # type: ignore[attr-defined]


@contextlib.contextmanager
def _silent_about_sigterm() -> Generator[None]:
    # A warning that it has left SIGTERM alone, as it should.
    logger = logging.getLogger("ray._private.worker")

    def drop(record: logging.LogRecord) -> bool:
        return "SIGTERM handler is not set" not in record.getMessage()

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


_HOW = 'Start one with `ray start --head --port=6379`, and give its address="host:6379" or set RAY_ADDRESS'


def unavailable(error: BaseException, what: str, *, answers: bool = False) -> StoreUnavailableError:
    """What an error of Ray's means to the users of a store; `answers` tells that somebody is there."""
    kind, hint = StoreUnavailableError, ""
    if isinstance(error, AuthenticationError) or (answers and isinstance(error, ConnectionError)):
        kind = StoreRefusedError
        hint = (
            ". Somebody answers there; if the cluster wants a token, which its log says, set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN before Ray is imported, or put the token into ~/.ray/auth_token"
        )
    elif isinstance(error, ConnectionError):
        hint = f". {_HOW}"
    elif isinstance(error, RayTaskError):
        kind, hint = StoreRefusedError, ". All nodes must have the same version of aiohooks and of Python"
    said = str(error).strip().splitlines() or [type(error).__name__]
    return kind(f"{what}: {said[-1 if isinstance(error, RayTaskError) else 0]}{hint}")


def is_of_ray(error: BaseException) -> bool:
    """Whether Ray has raised it."""
    return isinstance(error, RayError)


def named_actor(kind: type, name: str, namespace: str) -> Any:
    """The actor of that name, made of `kind` on this node if there is none; blocks.

    It lives on when this process ends, and is started again, on another node if must be, when its own dies. What was asked of
    it meanwhile is not repeated: only who asked knows how.
    """
    here = NodeAffinitySchedulingStrategy(_ray.get_runtime_context().get_node_id(), soft=True)
    actor = _ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=100_000)(kind)
    options = {"lifetime": "detached", "get_if_exists": True, "scheduling_strategy": here}
    return actor.options(name=name, namespace=namespace, **options).remote()


def kill_actor(actor: Any) -> None:
    """Ends an actor for good; blocks."""
    _ray.kill(actor, no_restart=True)


def reply_to(call: Any) -> asyncio.Future[Any]:
    """The result of a call, as a future that may also be settled by somebody else."""
    loop = asyncio.get_running_loop()
    reply: asyncio.Future[Any] = loop.create_future()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if not reply.done():
            error = done.exception()
            if error is None:
                reply.set_result(done.result())
            else:
                reply.set_exception(error)
                reply.exception()  # heard: its waiter may have gone

    def arrived(done: concurrent.futures.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, done)

    call.future().add_done_callback(arrived)
    return reply


def submit(fn: Callable[..., Any], argument: Any, name: str, resources: Mapping[str, Any]) -> Any:
    """Runs `fn(argument)` in some process of the cluster, once; `reply_to` it."""
    return _ray.remote(max_retries=0, retry_exceptions=False, **resources)(fn).options(name=name).remote(argument)


def cancel_task(task: Any, *, force: bool) -> None:
    """Interrupts a task, or ends its process by force."""
    _ray.cancel(task, force=force)


async def settled(reply: asyncio.Future[Any], secs: float) -> bool:
    """Waits until there is a reply, whatever it is, `secs` seconds at most; whether there is one."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    reply.add_done_callback(end)
    timer = current_clock().call_later(secs, end)
    try:
        await over
    finally:
        timer.cancel()
    return reply.done()
