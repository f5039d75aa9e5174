"""open_step_store: the step store of a URL, by which the processes of a run find each other."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, cast

from aiohooks._validate import check_instance
from aiohooks.errors import InvalidArgumentError, did_you_mean
from aiohooks.stores.base import StepStore

URL_VARIABLE = "AIOHOOKS_STEP_STORE"
RUN_VARIABLE = "AIOHOOKS_RUN"

_ENGINES = {
    "memory": ("aiohooks.stores.memory", "MemoryStepStore"),
    "local": ("aiohooks.stores.local", "LocalStepStore"),
    "redis": ("aiohooks.stores.redis", "RedisStepStore"),
    "rediss": ("aiohooks.stores.redis", "RedisStepStore"),
    "unix": ("aiohooks.stores.redis", "RedisStepStore"),
    "ray": ("aiohooks.stores.ray", "RayStepStore"),
}


def open_step_store(url: str | None = None, *, run: str | None = None, **options: Any) -> StepStore:
    """Return the step store that a URL names; it connects when it is first used, or by `async
    with`.

    `memory://` is a new one for the tasks of one process, `local:///directory` is for the processes
    of one machine; for several machines there are `redis://host:6379` (`rediss://` with TLS,
    `unix:///socket`) and `ray://namespace/run`. The packages for these are installed by `pip
    install 'aiohooks[redis]'` and `[ray]`.

    Args:
        url: the address; if left out, that in the environment variable AIOHOOKS_STEP_STORE, which
            launchers set for workers.
        run: the name of the run, the same in all its processes; if left out, that in AIOHOOKS_RUN,
            or else "default".
        options: keyword arguments of that kind of store.

    Raises:
        InvalidArgumentError: there is no such kind of store, the URL is invalid, or an option is
            unknown.
        ImportError: the package for it is not installed; the message names it.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            raise InvalidArgumentError(
                f"there is no URL of a step store, and {URL_VARIABLE} is not set; give one of them"
            )
    check_instance(url, str, "url")
    kind, is_url, rest = url.partition("://")
    if not is_url or kind not in _ENGINES:
        if is_url:
            raise InvalidArgumentError(
                f"unknown kind of step store {kind!r}; {did_you_mean(kind, _ENGINES)}"
            )
        # Not the part after a colon: it may hold a password.
        head = kind.partition(":")[0]
        raise InvalidArgumentError(
            f"{head!r} is not the beginning of a step store's URL; give one like local:///directory"
            " or redis://host:6379"
        )
    module, name = _ENGINES[kind]
    store = cast("type[StepStore]", getattr(importlib.import_module(module), name))
    known = _options_of(store)
    for option in options:
        if option not in known:
            advice = did_you_mean(option, known) if known else "it takes none"
            raise InvalidArgumentError(f"a {kind} step store has no option {option!r}; {advice}")
    address, named = _address_of(kind, url, rest)
    if named and run and named != run:
        raise InvalidArgumentError(f"run={run!r}, but the URL names {named!r}; give one of them")
    run = named or (os.environ.get(RUN_VARIABLE) or "default" if run is None else run)
    return cast("Callable[..., StepStore]", store)(*address, run=run, **options)


def _address_of(kind: str, url: str, rest: str) -> tuple[tuple[str, ...], str]:
    """Return the arguments for a kind of store, and the run if the URL names it."""
    if kind == "memory":
        return (), ""
    if kind == "local":
        if rest and (not rest.startswith("/") or "\0" in rest):
            raise InvalidArgumentError(
                f"{url!r} has no absolute path; give local:///directory, so that all processes use"
                " the same one"
            )
        return (rest,) if rest else (), ""
    if kind == "ray":
        namespace, _, run = rest.partition("/")
        if ":" in namespace or "?" in rest:
            raise InvalidArgumentError(
                f"{url!r} is not of the form ray://namespace/run; the address of the cluster is an"
                " option: address='host:6379'"
            )
        return (namespace,), run.strip("/")
    return (url,), ""


def _options_of(store: type[StepStore]) -> list[str]:
    """Return the names of the options of a class, also of those that it passes to its base."""
    names: list[str] = []
    for kind in store.__mro__:
        if "__init__" in vars(kind):
            parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
            names += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                break
    return [name for name in dict.fromkeys(names) if name != "run"]
