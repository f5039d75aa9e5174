"""`aiohooks run module:function`: start a function as a chief and its workers."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

from aiohooks._core.validate import is_coroutine_function
from aiohooks.distributed.local import run_processes
from aiohooks.distributed.task import task_name
from aiohooks.errors import InvalidArgumentError, did_you_mean, flattened, notes_of, safe_str
from aiohooks.session.run import run as run_program
from aiohooks.stores import open_step_store

Main = Callable[..., Coroutine[Any, Any, Any]]


def run_function(
    function: str,
    *,
    store: str | None,
    run: str | None,
    **options: Any,
) -> int:
    """Start `module:function` as a chief and its workers, and print their results.

    Args:
        function: `module:function`.
        store: the URL of the step store.
        run: the name of the run.
        options: more arguments of `run_processes`, such as `num_workers`.

    Returns:
        The exit code: 0, or 1 if a task has failed.

    Raises:
        InvalidArgumentError: an argument is invalid. Nothing was started.
        StoreUnavailableError: the step store is unavailable.
        SystemExit: SIGTERM was received (143), or the module could not be imported (1).
    """
    if store is not None and store.startswith("ray:"):
        raise InvalidArgumentError(
            "--store ray:// is for processes of a Ray cluster; call ray.init and"
            " aiohooks.distributed.ray.run in a program"
        )
    main = load_function(function)

    async def launch() -> list[Any]:
        """Run the tasks in processes, and return their results."""
        if store is not None:
            # This raises the error of an unavailable store or a damaged run only once. Otherwise
            # every process would raise it.
            async with open_step_store(store, run=run or f"check {os.getpid()}") as opened:
                if run is None:
                    await opened.forget()
        return await run_processes(main, store=store, run=run, **options)

    try:
        results = run_program(launch)
    except BaseExceptionGroup as group:
        for error in flattened([group]):
            # Print the notes, which contain the name of the task and the traceback of its process.
            # The traceback of the error itself shows only the launcher.
            summary = f"{type(error).__name__}: {safe_str(error)}"
            print(summary, *notes_of(error), sep="\n", file=sys.stderr)
        return 1
    for task_id, result in enumerate(results):
        if result is not None:
            print(f"{task_name(task_id)}: {result}")
    return 0


def load_function(target: str) -> Main:
    """Import a coroutine function by its name, `module:function`.

    Raises:
        InvalidArgumentError: no coroutine function has this name.
        SystemExit: the module raised an error, whose traceback is printed.
    """
    module_name, _, name = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise InvalidArgumentError(
            f"{target!r} does not name a function; give module:function, such as train:main"
        )
    if module_name.endswith(".py"):
        raise InvalidArgumentError(
            f"{target!r} has the name of a file; give the module: {module_name[:-3]}:{name}"
        )
    # Python adds this directory for `python -m aiohooks`, but not for the installed program.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import_module(module_name)
    function: Any = getattr(module, name, None)
    if is_coroutine_function(function):
        main: Main = function
        return main
    problem = f"has {name!r}, which is {function!r}"
    if function is None:
        problem = "has no function of this name"
    hint = "write one: async def main(task)"
    if candidates := [key for key, value in vars(module).items() if is_coroutine_function(value)]:
        hint = did_you_mean(name, candidates)
    raise InvalidArgumentError(
        f"{target}: {module_name} {problem}; give a coroutine function that takes the task; {hint}"
    )


def _import_module(name: str) -> ModuleType:
    """Import a module of the user. Print the traceback of an error in its code, and exit."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            # The module itself or a package that contains it is missing. A missing module that it
            # imports has another name, and needs the traceback.
            raise InvalidArgumentError(
                f"there is no module {name!r} in {os.getcwd()}, and none is installed. Run the"
                " command in the directory that contains the module"
            ) from None
        # The error is in the user's own code, so its traceback is shown.
        traceback.print_exc()
        print(f"the module {name!r} could not be imported", file=sys.stderr)
        raise SystemExit(1) from None
