"""Opening a step store by its URL, which is how the processes of a run find it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from aiohooks._errors import InvalidArgumentError, did_you_mean
from aiohooks.stores._store import StepStore
from aiohooks.stores.memory import MemoryStepStore

URL_VARIABLE = "AIOHOOKS_STEP_STORE"
RUN_VARIABLE = "AIOHOOKS_RUN"

_ENGINES = {
    "local": ("aiohooks.stores.local", "LocalStepStore"),
    "redis": ("aiohooks.stores.redis", "RedisStepStore"),
    "rediss": ("aiohooks.stores.redis", "RedisStepStore"),
    "unix": ("aiohooks.stores.redis", "RedisStepStore"),
    "nats": ("aiohooks.stores.nats", "NatsStepStore"),
    "tls": ("aiohooks.stores.nats", "NatsStepStore"),
    "ray": ("aiohooks.stores.ray", "RayStepStore"),
}


def open_step_store(url: str | None = None, *, run: str | None = None, **options: Any) -> StepStore:
    """Makes the step store that a URL names; it connects when it is first used, or by `async with`.

    `memory://` is for one process, `local:///directory` for the processes of one machine; for several machines there are
    `redis://host:6379` (`rediss://` with TLS, `unix:///socket`), `nats://host:4222` (`tls://` with TLS) and
    `ray://namespace`. The packages for these are installed by `pip install 'aiohooks[redis]'`, `[nats]` and `[ray]`.

    Args:
        url: where it is; left out, the environment variable AIOHOOKS_STEP_STORE says it, which launchers set for workers.
        run: the name of the run, the same in all its processes; left out, AIOHOOKS_RUN says it, and "default" otherwise.
        options: what that kind of store takes besides.

    Raises:
        InvalidArgumentError: there is no such kind of store, the URL is not one, or an option is not known.
        ImportError: the package for it is not installed; the message says which one.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE)
        if not url:
            raise InvalidArgumentError(f"no URL of a step store was given, and the environment has no {URL_VARIABLE}; give one")
    given: object = url
    if not isinstance(given, str):
        raise InvalidArgumentError(f"url={url!r}: give the URL of a step store as a text")
    if run is None:
        run = os.environ.get(RUN_VARIABLE) or "default"
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return _made(MemoryStepStore, url, run=run, **options)
    if scheme not in _ENGINES or "://" not in url:
        # Without what follows: there may be a password in it.
        raise InvalidArgumentError(f"{scheme!r} is no kind of step store; {did_you_mean(scheme, ['memory', *_ENGINES])}")
    module, name = _ENGINES[scheme]
    store = getattr(importlib.import_module(module), name)
    if scheme == "local":
        return _made(store, url, rest or None, run=run, **options)
    if scheme == "ray":
        parts = urlsplit(url)
        return _made(store, url, parts.netloc, run=parts.path.strip("/") or run, **options)
    return _made(store, url, url, run=run, **options)


def _made(store: type[StepStore], url: str, *args: Any, **options: Any) -> StepStore:
    try:
        return cast("Callable[..., StepStore]", store)(*args, **options)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # out of its own code
        scheme = url.partition("://")[0]
        raise InvalidArgumentError(f"a {scheme} step store does not take these options: {error}") from error
