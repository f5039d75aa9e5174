"""`aiohooks run module:function`: start a function as a chief and its workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

from aiohooks._validate import is_coroutine_function
from aiohooks.distributed.task import task_name
from aiohooks.errors import InvalidArgumentError, did_you_mean, safe_str
from aiohooks.session.program import run as run_program
from aiohooks.stores import open_step_store

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_function(
    function: str,
    *,
    engine: str,
    store: str | None,
    address: str | None,
    run: str | None,
    **options: Any,
) -> int:
    """Start `module:function` as a chief and its workers, wait for them, and print what they
    return.

    Args:
        function: `module:function`.
        engine: `"local"` or `"ray"`.
        store: the URL of the step store of local processes.
        address: that of a Ray cluster; `"auto"` is one of this machine, None one for this run.
        run: the name of the run.
        options: more arguments of the launchers, such as `num_workers`.

    Returns:
        The exit code: 0, or 1 if a task has failed.

    Raises:
        InvalidArgumentError: an argument is invalid; nothing was started.
        StoreUnavailableError: the step store or the cluster is not there.
        SystemExit: SIGTERM was received (143), or the module could not be imported (1).
    """
    if engine == "ray" and store is not None:
        raise InvalidArgumentError(
            "--store is for --engine local; on Ray the step store is on the cluster"
        )
    if engine == "local" and address is not None:
        raise InvalidArgumentError(f"--address {address} is for --engine ray")
    main = load_function(function)
    # Ray gives its processes the directory of the program, and that of this package has modules of
    # its own.
    sys.argv[0] = sys.modules[main.__module__].__file__ or sys.argv[0]

    async def launch() -> list[Any]:
        if engine == "ray":
            from aiohooks.distributed import ray  # needs an extra

            where = "local" if address is None else None if address == "auto" else address
            return await ray.run(main, address=where, run=run, **options)
        from aiohooks.distributed.local import run_processes

        if store is not None:
            # Raise now what otherwise each process would raise: that the store is not there, or
            # that the run is damaged.
            async with contextlib.aclosing(open_step_store(store, run=run)) as opened:
                await opened.inspect()
        return await run_processes(main, store=store, run=run, **options)

    try:
        results = run_program(launch)
    except BaseExceptionGroup as group:
        _print_failures(group)
        return 1
    for task_id, result in enumerate(results):
        if result is not None:
            print(f"{task_name(task_id)}: {result}")
    return 0


def _print_failures(group: BaseExceptionGroup[BaseException]) -> None:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _print_failures(error)  # pyright: ignore[reportUnknownArgumentType]
            continue
        # The notes name the task and have the traceback of its process; that of this one shows the
        # launcher only.
        print(
            "\n".join(
                (f"{type(error).__name__}: {safe_str(error)}", *getattr(error, "__notes__", ()))
            ),
            file=sys.stderr,
        )


def load_function(target: str) -> Main:
    """Import the coroutine function that `module:function` names.

    Raises:
        InvalidArgumentError: there is none.
        SystemExit: the module raised an error, whose traceback is printed.
    """
    module_name, _, name = target.partition(":")
    if (
        not module_name
        or not name
        or not all(part.isidentifier() for part in (*module_name.split("."), name))
    ):
        raise InvalidArgumentError(
            f"{target!r} does not name a function; give module:function, such as train:main"
        )
    if module_name.endswith(".py"):
        raise InvalidArgumentError(
            f"{target!r} has the name of a file; give that of the module: {module_name[:-3]}:{name}"
        )
    if os.getcwd() not in sys.path:  # an installed program does not have it there
        sys.path.insert(0, os.getcwd())
    module = _import_module(module_name)
    function: Any = getattr(module, name, None)
    if not is_coroutine_function(function):
        known = [each for each, value in vars(module).items() if is_coroutine_function(value)]
        found = (
            "has no function of this name"
            if function is None
            else f"has {name!r}, which is {function!r}"
        )
        hint = did_you_mean(name, known) if known else "write one: async def main(task)"
        raise InvalidArgumentError(
            f"{target}: {module_name} {found}; give a coroutine function that takes the task;"
            f" {hint}"
        )
    loaded: Main = function
    return loaded


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(
            f"{error.name}."
        ):  # itself, or a package above it
            raise InvalidArgumentError(
                f"there is no module {name!r} in {os.getcwd()}, and none is installed; start in its"
                " directory"
            ) from None
        traceback.print_exc()
        print(f"the module {name!r} could not be imported", file=sys.stderr)
        raise SystemExit(1) from None
