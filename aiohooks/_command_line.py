"""The commands of `aiohooks`, whose arguments and help are in `aiohooks.__main__`.

    list_checkpoints    list and verify the checkpoints in a directory
    run_function        start a function as a chief and its workers
    print_why           show why a process waits

Each function imports what only its command needs, because importing all of it takes long.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohooks._core.validate import is_coroutine_function
from aiohooks.errors import (
    CheckpointError,
    InvalidArgumentError,
    did_you_mean,
    flattened,
    notes_of,
    printable,
    safe_str,
)


def list_checkpoints(directory: str) -> int:
    """Read the checkpoints in a directory completely and print them, newest first.

    The directory is not changed. Damaged checkpoints that a session has set aside are printed, too,
    but do not count.

    Returns:
        The exit code: 0 if there is a checkpoint and none is damaged, otherwise 1.
    """
    from aiohooks.checkpoint import _format

    path = Path(directory)
    if not path.is_dir():
        print(printable(f"{directory} is not a directory"), file=sys.stderr)
        return 1
    try:
        # This import raises a CheckpointError on a system that cannot open directories.
        from aiohooks.checkpoint._directory import CheckpointDirectory

        opened = CheckpointDirectory(path, read_only=True)
        verified = opened.verify()
        sound = {checkpoint.path: checkpoint for checkpoint in opened.checkpoints()}
    except CheckpointError as error:
        print(printable(f"the checkpoints could not be read: {error}"), file=sys.stderr)
        return 1
    damages: list[str | None] = []
    for checkpoint_path, damage in verified:
        text = damage or "good"
        if damage is None and checkpoint_path in sound:
            checkpoint = sound[checkpoint_path]
            text += f", {checkpoint.size} bytes"
            for name, value in checkpoint.metrics.items():
                text += f", {name}={value:.6g}"
        print(f"{checkpoint_path.name}: {printable(text)}")
        # The name shows whether the checkpoint was set aside.
        if not _format.parse_damaged(checkpoint_path.name):
            damages.append(damage)
    if not damages:
        print("there are no checkpoints")
    return 0 if damages and not any(damages) else 1


Main = Callable[..., Coroutine[Any, Any, Any]]
"""The function that a user starts as a chief and its workers."""


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
    from aiohooks.distributed.local import run_processes
    from aiohooks.distributed.task import task_name
    from aiohooks.session.run import run as run_program
    from aiohooks.stores import open_step_store

    if store is not None and store.startswith("ray:"):
        raise InvalidArgumentError(
            "--store ray:// is for processes of a Ray cluster; call ray.init and"
            " aiohooks.distributed.ray.run in a program"
        )
    main = load_function(function)
    module = sys.modules[function.partition(":")[0]]
    program = sys.argv[0]
    # For libraries, the program is the user's module, not this package. Ray, for example, adds the
    # directory of the program to the import path of its processes. The modules of this package
    # would hide other modules of the same names there.
    sys.argv[0] = module.__file__ or program

    async def launch() -> list[Any]:
        """Check the store, run the tasks in processes, and return their results."""
        if store is not None:
            # Open the store here first. If it is unavailable, or its run is damaged, this raises
            # the error once. Otherwise every process would raise it.
            async with open_step_store(store, run=run or f"check {os.getpid()}") as opened:
                if run is None:
                    # The processes get a new run of another name, so this one is not needed.
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
    finally:
        sys.argv[0] = program
    for task_id, result in enumerate(results):
        if result is not None:
            print(f"{task_name(task_id)}: {result}")
    return 0


def load_function(target: str) -> Main:
    """Import a coroutine function by its name, `module:function`, and return it.

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


# How long a process may take to answer.
_ANSWER_SECS = 1.5
# The answer is text of another process, so its lines are cut before they are printed.
_MAX_LINE_LENGTH = 10_000


def print_why(pid: int) -> int:
    """Ask a process why it waits, and print its answer.

    Returns:
        The exit code: 0, or 1 if the process has not answered.
    """
    answer, problem = _ask_process(pid)
    if problem is not None:
        answer = f"process {pid}: {problem}"
    print("\n".join(printable(line, _MAX_LINE_LENGTH) for line in answer.splitlines()))
    return int(problem is not None)


def _ask_process(pid: int) -> tuple[str, str | None]:
    """Ask a process why it waits.

    Returns:
        The answer and None, or an empty text and the reason why there is no answer.
    """
    from aiohooks._why.sources import process_state
    from aiohooks.session.why import why_folder

    state = process_state(pid)
    if state is not None:
        # The process is stopped or does not exist, so it cannot answer.
        return "", state
    path = why_folder() / f"{pid}.sock"
    answer = b""
    try:
        for part in _receive_answer(path):
            answer += part
    except TimeoutError:
        # A process sends a space before it makes the graph, so an empty answer means that its
        # thread does not run.
        reason = "it has too many tasks, or the machine is busy: ask again"
        if not answer:
            reason = "it is in C code that does not let Python's other threads run"
        # If the process was stopped after the first check, that is the reason.
        reason = process_state(pid) or reason
        return "", f"has not answered in {_ANSWER_SECS} s: {reason}{_kernel_wait(pid)}"
    except (FileNotFoundError, ConnectionRefusedError):
        return (
            "",
            f"cannot be asked: it has no socket in {path.parent}; start it with AIOHOOKS_WHY=1, and"
            " ask as its user",
        )
    except OSError as error:
        return "", f"cannot be asked by {path}: {error}"
    # Remove the space. Without any text, the process has closed the connection.
    text = answer.decode().lstrip()
    return text, None if text else "it has ended meanwhile"


def _receive_answer(path: Path) -> Iterator[bytes]:
    """Connect to the socket of a process, and yield the parts of its answer.

    Raises:
        TimeoutError: the whole answer has not come within `_ANSWER_SECS`.
        OSError: there is no socket, or the process does not accept the connection.
    """
    deadline = time.monotonic() + _ANSWER_SECS
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECS)
        connection.connect(str(path))
        while part := connection.recv(1 << 16):
            yield part
            # The deadline is for the whole answer. When it has passed, a timeout of 0 would make
            # the socket non-blocking.
            connection.settimeout(max(deadline - time.monotonic(), 0.001))


def _kernel_wait(pid: int) -> str:
    """Return the kernel function in which a process waits, as the end of a message.

    Return no text if the process runs, or if this user or system cannot read it.
    """
    with contextlib.suppress(OSError):
        function = Path(f"/proc/{pid}/wchan").read_text()
        if function not in ("", "0"):
            return f"; in the kernel: {function}"
    return ""
