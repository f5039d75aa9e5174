"""The command line, `aiohooks` or `python -m aiohooks`: its commands, arguments and help."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from aiohooks import __version__
from aiohooks._command_line import list_checkpoints, print_why, run_function
from aiohooks.errors import AiohooksError, InvalidArgumentError

_EXIT_CODES = """\
exit codes:
  0    done
  1    failed; each command says what that means for it
  2    the arguments are invalid
  130  ended by Ctrl-C
  143  ended by SIGTERM
"""

_RUN = """\
start a function as a chief and its workers, and wait for them

The function is `async def main(task)`; the `Task` has task_id, is_chief, num_workers, store,
checkpoint_dir and attempt. It is imported from the current directory, or from the installed
packages. Its result is printed, unless it is None.

example:
  %(prog)s train:main --workers 4 --checkpoint-dir model
  %(prog)s train:main --store redis://127.0.0.1:6379 --run digits-7

exit codes:
  0    all tasks have returned
  1    a task has failed, or the step store is unavailable
  2    the arguments are invalid: nothing was started
  130  ended by Ctrl-C: every process got SIGTERM and the grace period
  143  ended by SIGTERM, in the same way
"""

_CHECKPOINTS = """\
list and verify the checkpoints in a directory

example:
  %(prog)s model

exit codes:
  0    there are checkpoints, and none is damaged
  1    there are none, one is damaged, or they cannot be read
  2    the arguments are invalid
"""

_WHY = """\
show why a process waits: for which task, hook, lock, queue, step or process, at which line, and
since when

A process of your user can be asked if it was started with AIOHOOKS_WHY=1. If it cannot answer, the
command shows the system's view of it. If the answer ends at another process, ask that process next.

example:
  %(prog)s 4242

exit codes:
  0    the process has answered
  1    it has not answered, or does not exist
  2    the arguments are invalid
"""


def _parse_count(text: str) -> int:
    """Return the whole number of an argument, or raise the error that argparse shows."""
    with contextlib.suppress(ValueError):
        count = int(text)
        if count >= 0:
            return count
    # argparse shows this message. For a ValueError, it would show the name of this function.
    raise argparse.ArgumentTypeError("give a number of at least 0")


def _parse_secs(text: str) -> float:
    """Return the seconds of an argument, or raise the error that argparse shows."""
    with contextlib.suppress(ValueError):
        secs = float(text)
        if 0 <= secs < float("inf"):
            return secs
    raise argparse.ArgumentTypeError("give seconds, 0 or more")


def _parse_pid(text: str) -> int:
    """Return the process ID of an argument, or raise the error that argparse shows."""
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError("give the PID of a process")


def _add_command(
    commands: Any, name: str, execute: Callable[..., int], text: str
) -> Callable[..., object]:
    """Add a command, and return the method that adds its arguments.

    Args:
        commands: the subparsers of the program.
        name: the name of the command.
        execute: the function of the command. It gets the arguments by name.
        text: the help: a summary, an empty line, and the details.
    """
    # argparse shows the summary in the list of commands, and the details in the help of this one.
    summary, _, details = text.partition("\n\n")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(execute=execute)
    return command.add_argument


def _add_run_command(commands: Any) -> None:
    """Add the command `run` with its options, whose names are parameters of `run_function`."""
    add = _add_command(commands, "run", run_function, _RUN)
    add("function", metavar="MODULE:FUNCTION", help="a coroutine function that takes the task")
    add(
        "--workers",
        dest="num_workers",
        type=_parse_count,
        default=3,
        metavar="N",
        help="besides the chief (default: 3)",
    )
    add(
        "--store",
        metavar="URL",
        help="the step store of the processes (default: one of this machine, for this run only)",
    )
    add(
        "--run",
        metavar="NAME",
        help="the name of the run (default: a new one, which is forgotten afterwards)",
    )
    add("--checkpoint-dir", metavar="DIR", help="passed to the function")
    add(
        "--max-restarts",
        type=_parse_count,
        default=3,
        metavar="N",
        help="of each process that dies (default: 3)",
    )
    add(
        "--grace-secs",
        dest="stop_grace_secs",
        type=_parse_secs,
        default=10.0,
        metavar="S",
        help="how long a process may take to end (default: 10)",
    )


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    The parsed arguments are the options of a command, and `execute`, the function of the command.
    Without a command there are none.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Start runs, and show what they have written or are doing.",
        epilog=f"`{prog} COMMAND --help` has examples of each.\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aiohooks {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_run_command(commands)

    add = _add_command(commands, "checkpoints", list_checkpoints, _CHECKPOINTS)
    add("directory", help="the directory; a session may write to it meanwhile")

    add = _add_command(commands, "why", print_why, _WHY)
    add("pid", metavar="PID", type=_parse_pid, help="the ID of the process")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of the program `aiohooks`, and return its exit code.

    Args:
        arguments: the command and its arguments, by default the arguments of this process.

    Raises:
        SystemExit: the arguments are invalid (2), the user asked for help (0), or SIGTERM ended a
            run (143).
    """
    name = os.path.basename(sys.argv[0])
    prog = "python -m aiohooks" if name == "__main__.py" else name
    parser = make_parser(prog)
    options = vars(parser.parse_args(arguments))
    if not options:
        # No command was given.
        parser.print_help(sys.stderr)
        return 2
    try:
        execute = options.pop("execute")
        code: int = execute(**options)
        # If the pipe of the output is closed, this raises the error here. When the interpreter
        # ends, it would raise the error where no one can catch it.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. When the interpreter ends, it writes
        # the rest of its buffer, which would fail and print an error. So redirect the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AiohooksError, OSError, ImportError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1


if __name__ == "__main__":
    sys.exit(main())
