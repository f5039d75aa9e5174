"""The command line, `aiohooks` or `python -m aiohooks`: the commands, their arguments and their
help.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from aiohooks import __version__
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
  1    a task has failed, or the step store or the cluster is not there
  2    the arguments are invalid: nothing was started
  130  ended by Ctrl-C: every process got SIGTERM and the grace period
  143  ended by SIGTERM, in the same way
"""

_CHECKPOINTS = """\
list and verify checkpoints, and say which one a restore would read

example:
  %(prog)s model
  %(prog)s s3://bucket/model

exit codes:
  0    there are checkpoints, and none is damaged
  1    there are none, one is damaged, or they cannot be read
  2    the arguments are invalid
"""

_STEPS = """\
show a run in a step store: step, chief, publishers, waiters, how the last one left

The run is read from outside: nothing is registered, made or changed. A member that has died is
shown until another process of the run notices that its lease has expired. local:// shows only
living members.

example:
  %(prog)s local:///tmp/steps --run digits
  %(prog)s redis://127.0.0.1:6379 --run digits --json

exit codes:
  0    the run is there
  1    it is not, or the store cannot be read
  2    the arguments are invalid
"""

_WHY = """\
say why a process, a service or a run waits: for which task, hook, lock, queue, step or process,
at which line, and since when

A process can be asked if it was started with AIOHOOKS_WHY=1, or runs in ah.run(main, why=True); a
service if it has controls, with its token in AIOHOOKS_SERVICE_TOKEN. Name a run by its name or by
the URL of its step store: all of its processes on this machine are asked, and their answers
connected. For a process that cannot answer, the system's view of it is shown.

example:
  %(prog)s 4242
  %(prog)s digits
  %(prog)s redis://127.0.0.1:6379 --run digits --json
  %(prog)s http://127.0.0.1:8000/training

exit codes:
  0    all have answered
  1    one has not, or there is none
  2    the arguments are invalid
"""

_RUN_OPTION = {
    "metavar": "NAME",
    "help": "the name of the run (default: $AIOHOOKS_RUN, or `default`)",
}
_ADDRESS_OPTION = {
    "metavar": "HOST:PORT",
    "help": "of the cluster of a ray:// URL (default: $RAY_ADDRESS, or that of this machine)",
}

# ArgumentTypeError also for what is no number: for a ValueError argparse names these functions in
# its message.


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (count := int(text)) >= 0:
            return count
    raise argparse.ArgumentTypeError("give a number of at least 0")


def _secs(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (secs := float(text)) < float("inf"):
            return secs
    raise argparse.ArgumentTypeError("give seconds, 0 or more")


def _imported(module: str, name: str) -> Callable[..., int]:
    """Return a function that is imported when it is called: no command loads the packages of
    another.
    """

    def call(**arguments: Any) -> Any:
        return getattr(importlib.import_module(f"aiohooks.{module}"), name)(**arguments)

    return call


def _add_command(
    commands: Any, name: str, execute: Callable[..., int], text: str
) -> Callable[..., object]:
    """Add a command, and return what adds its arguments; the first line of the text is its help."""
    summary, _, more = text.partition("\n\n")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(execute=execute)
    return command.add_argument


def _add_run_options(add: Callable[..., object]) -> None:
    """Add what chooses a run of a step store, and how it is printed."""
    add("--run", **_RUN_OPTION)
    add("--address", **_ADDRESS_OPTION)
    add("--json", dest="as_json", action="store_true", help="print it as JSON")


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of all commands. What it returns has `execute`, which takes the arguments
    and returns the exit code.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Start runs, and show what they have written or are doing.",
        epilog=f"`{prog} COMMAND --help` has examples of each.\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aiohooks {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add = _add_command(commands, "run", _imported("_command_line.run", "run_function"), _RUN)
    add("function", metavar="MODULE:FUNCTION", help="a coroutine function that takes the task")
    add(
        "--workers",
        dest="num_workers",
        type=_count,
        default=3,
        metavar="N",
        help="besides the chief (default: 3)",
    )
    engines = "processes of this machine, or tasks on a Ray cluster (default: local)"
    add("--engine", choices=("local", "ray"), default="local", help=engines)
    add(
        "--store",
        metavar="URL",
        help="the step store of the processes (default: one of this machine, for this run only)",
    )
    clusters = "of a Ray cluster, `auto` for that of this machine (default: one for this run only)"
    add("--address", metavar="HOST:PORT", help=clusters)
    add(
        "--run",
        metavar="NAME",
        help="the name of the run (default: a new one, which is forgotten afterwards)",
    )
    add("--checkpoint-dir", metavar="DIR", help="passed to the function")
    add(
        "--max-restarts",
        type=_count,
        default=3,
        metavar="N",
        help="of each process that dies (default: 3)",
    )
    grace = "how long a process may take to end (default: 10)"
    add("--grace-secs", dest="stop_grace_secs", type=_secs, default=10.0, metavar="S", help=grace)

    add = _add_command(
        commands, "checkpoints", _imported("checkpoint.cli", "checkpoints"), _CHECKPOINTS
    )
    add(
        "directory",
        help=(
            "the directory, or the URL of a mirror; it is only read, and a session may be writing"
            " to it"
        ),
    )

    add = _add_command(commands, "steps", _imported("_command_line.steps", "print_run"), _STEPS)
    add(
        "url",
        metavar="URL",
        help="of the step store: local:///directory, redis://, ray://namespace",
    )
    _add_run_options(add)

    add = _add_command(commands, "why", _imported("_command_line.why", "print_why"), _WHY)
    add(
        "target",
        metavar="URL|PID|RUN",
        help="the URL of a service or a step store, the id of a process, or the name of a run",
    )
    _add_run_options(add)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: the program `aiohooks`.

    Args:
        arguments: the command and its arguments; those of this process, if left out.

    Raises:
        SystemExit: the arguments are invalid (2), help was asked for (0), or a run was ended by
            SIGTERM (143).
    """
    name = os.path.basename(sys.argv[0])
    prog = "python -m aiohooks" if name == "__main__.py" else name
    parser = make_parser(prog)
    given = vars(parser.parse_args(arguments))
    try:
        code: int = given.pop("execute")(**given)
        sys.stdout.flush()
    except InvalidArgumentError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who reads the output has seen enough; without this the interpreter would complain when it
        # closes the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (AiohooksError, OSError, ImportError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
