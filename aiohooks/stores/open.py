"""open_step_store: the step store of a URL, which all processes of a run use."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from aiohooks._core.validate import check_instance
from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.stores.base import MemoryStepStore, StepStore
from aiohooks.stores.shared import SharedStepStore

URL_VARIABLE = "AIOHOOKS_STEP_STORE"
RUN_VARIABLE = "AIOHOOKS_RUN"

# The module and the class of the engine for each kind of URL. It is imported only when it is used,
# because it may need a package that is not installed.
_ENGINES = {
    "local": ("aiohooks.stores.local", "LocalEngine"),
    "redis": ("aiohooks.stores.redis", "RedisEngine"),
    "rediss": ("aiohooks.stores.redis", "RedisEngine"),
    "unix": ("aiohooks.stores.redis", "RedisEngine"),
    "ray": ("aiohooks.stores.ray", "RayEngine"),
}
_KINDS = ("memory", *_ENGINES)
_SHARED_OPTIONS = ("on_lost", "lease_secs", "heartbeat", "connect_timeout")


def open_step_store(url: str | None = None, *, run: str | None = None, **options: Any) -> StepStore:
    """Return the step store of a URL.

    It connects at its first use, or when you enter it with `async with`.

    `memory://` is a new store for the tasks of one process, `local:///directory` is for the
    processes of one machine. For several machines, use `redis://host:6379` (`rediss://` with TLS,
    `unix:///socket`) or `ray://namespace`. The extras `redis` and `ray` install their packages.

    Args:
        url: the address, by default the value of the environment variable AIOHOOKS_STEP_STORE,
            which launchers set for workers.
        run: the name of the run, the same in all its processes, by default the value of
            AIOHOOKS_RUN, or else "default".
        options: keyword arguments of the engine, and of `SharedStepStore`.

    Raises:
        InvalidArgumentError: there is no such kind of store, the URL is invalid, or an option is
            unknown.
        ImportError: the package of the engine is not installed. The message names it.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            raise InvalidArgumentError(
                f"there is no URL of a step store, and {URL_VARIABLE} is not set; give one of them"
            )
    check_instance(url, str, "url")
    kind = _kind_of(url)
    address = _address_of(kind, url)
    if run is None:
        run = os.environ.get(RUN_VARIABLE) or "default"
    if kind == "memory":
        _check_options(kind, options, ())
        return MemoryStepStore(run=run)
    module, class_name = _ENGINES[kind]
    engine_class = getattr(importlib.import_module(module), class_name)
    shared_options = {name: options.pop(name) for name in _SHARED_OPTIONS if name in options}
    # RedisEngine checks its options itself, because these are the options of redis-py.
    if kind in ("local", "ray"):
        _check_options(kind, options, _SHARED_OPTIONS if kind == "ray" else ("on_lost",))
    return SharedStepStore(engine_class(*address, **options), run=run, **shared_options)


def _kind_of(url: str) -> str:
    """Return the part of a URL before `://`, if there is such a kind of step store."""
    kind, is_url, _ = url.partition("://")
    if kind in _KINDS and is_url:
        return kind
    if is_url:
        advice = did_you_mean(kind, _KINDS)
        raise InvalidArgumentError(f"unknown kind of step store {kind!r}; {advice}")
    # Show only the part before a colon, because a password may follow.
    raise InvalidArgumentError(
        f"{kind.partition(':')[0]!r} has no ://; give the URL of a step store, such as"
        " local:///directory or redis://host:6379"
    )


def _address_of(kind: str, url: str) -> tuple[str, ...]:
    """Return the arguments of the engine: its address, or none for the default one."""
    rest = url.partition("://")[2]
    if kind == "memory" and rest:
        raise InvalidArgumentError(f"{url!r} has an address; give memory://")
    if kind == "memory" or (kind == "local" and not rest):
        return ()
    if kind == "local":
        if not rest.startswith("/") or "\0" in rest:
            raise InvalidArgumentError(
                f"{url!r} has no absolute path; give local:///directory, so that all processes use"
                " the same one"
            )
        return (rest,)
    if kind == "ray":
        if any(character in rest for character in ":/?"):
            raise InvalidArgumentError(
                f"{url!r} is not of the form ray://namespace; give the address of the cluster to"
                " ray.init, and the name of the run as run="
            )
        return (rest,)
    return (url,)


def _check_options(kind: str, options: dict[str, Any], valid: Sequence[str]) -> None:
    """Raise an error if an option is not in `valid`, the names of the valid options."""
    for option in options:
        if option not in valid:
            advice = did_you_mean(option, valid) if valid else "it takes none"
            raise InvalidArgumentError(f"a {kind} step store has no option {option!r}; {advice}")
